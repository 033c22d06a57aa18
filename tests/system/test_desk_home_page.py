"""A new assignment on the desk, as it is filled in by somebody who has not read how."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.browser import Browser
from tests.support.desk_page import DeskPage, quick_model
from tests.support.homework import tiny_class

pytestmark = pytest.mark.system

PLACE = "… or a folder, zip or file on this machine"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


def test_a_desk_whose_home_is_among_the_submissions_says_so_and_makes_nothing(browser: Browser, tmp_path: Path) -> None:
    work = tiny_class(tmp_path / "class", 2) / "submissions"
    with DeskPage(tmp_path, quick_model(tmp_path), work / "grading") as desk:
        browser.open(desk.url)
        browser.fill("Name", "Means")
        browser.fill(PLACE, str(work))
        browser.click("Create")
        browser.wait_for("name a folder elsewhere with kvasir ui --home")
        assert not (desk.home / "means").exists()


def test_two_uploads_of_one_name_are_refused_and_no_empty_assignment_stays(browser: Browser, tmp_path: Path) -> None:
    for student in ("ann", "ben"):
        (tmp_path / student).mkdir()
        (tmp_path / student / "hw.py").write_text(f"# {student}\n", "utf-8")
    with DeskPage(tmp_path, quick_model(tmp_path)) as desk:
        browser.open(desk.url)
        browser.fill("Name", "Means")
        for student in ("ann", "ben"):
            browser.upload(0, tmp_path / student / "hw.py")
        browser.click("Create")
        browser.wait_for("two uploaded files are called 'hw.py': rename one")
        assert not desk.home.exists() or not list(desk.home.iterdir())
