"""The desk in a real browser: a power cut, and what is hostile or mistaken."""

import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.browser import Browser
from tests.support.desk_page import GRADED_S, UPLOADS, DeskPage, cut_off, quick_model, steps
from tests.support.homework import assert_each_once, journal, tiny_class
from tests.support.processes import ModelEntry, config_text
from tests.support.waiting import wait_until

pytestmark = pytest.mark.system

HOSTILE = "<script>document.title='taken'</script><img src=x onerror=\"document.title='taken'\">"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("browser")) as opened:
        yield opened


def create(browser: Browser, desk: DeskPage, title: str, work: Path, rubric: Path) -> Path:
    """A new assignment, made on the page."""
    browser.open(desk.url)
    browser.wait_for("New assignment")
    browser.fill("Name", title)
    for label, path in zip(UPLOADS, [work, rubric], strict=False):
        browser.upload(label, path)
        browser.wait_for(path.name[-6:])  # a long name is shown shortened
    browser.click("Create")
    browser.wait_for("Look before you grade")
    return desk.home / title.lower().replace(" ", "-")


def slow_class(folder: Path) -> tuple[Path, Path]:
    """(configuration of a model that takes its time, a class for it)."""
    config = folder / "kvasir.toml"
    entry = ModelEntry("simulated", "sim:prefill=4000,decode=400,scale=1", 32768)
    config.write_text(config_text({"slow": entry}), "utf-8")
    return config, tiny_class(folder / "class", 12)


def test_a_desk_and_its_grading_that_are_cut_off_go_on_from_the_journal(browser: Browser, tmp_path: Path) -> None:
    config, work = slow_class(tmp_path)
    handed_in = Path(shutil.make_archive(str(tmp_path / "class"), "zip", work / "submissions"))
    with DeskPage(tmp_path, config) as desk:
        folder = create(browser, desk, "Means", handed_in, work / "rubric.yaml")
        browser.click("Grade all")
        wait_until(lambda: len(journal(folder)) >= 8, "a third is graded", GRADED_S)
        desk.kill()
        cut_off(folder)
    done = {row["job_id"] for row in journal(folder)}
    assert 8 <= len(done) < 24, "it was cut off half way"

    with DeskPage(tmp_path, config) as desk:
        wait_until(lambda: len(journal(folder)) == 24, "the rest is graded without anybody asking", GRADED_S)
        browser.open(desk.at(folder, "Grade"))
        browser.wait_for("All 12 submissions of this run")

    assert_each_once(folder)
    first, second = steps(folder, "prefill_started")
    assert len(first) >= 8
    assert not done & set(second), "what was done was run again"


def test_a_grading_outlives_its_desk(browser: Browser, tmp_path: Path) -> None:
    config, work = slow_class(tmp_path)
    with DeskPage(tmp_path, config) as desk:
        folder = create(browser, desk, "Means", min((work / "submissions").iterdir()), work / "rubric.yaml")
        browser.click("Grade all")
        wait_until(lambda: steps(folder, "prefill_started")[-1:] not in ([], [[]]), "it is being graded", GRADED_S)
        desk.kill()
        wait_until(lambda: len(journal(folder)) == 2, "it is graded without a desk", GRADED_S)


def test_hostile_work_stays_text_and_mistakes_become_sentences(browser: Browser, tmp_path: Path) -> None:
    work = tmp_path / "[x](h:y):red[z].py"  # Markdown for a link, and for colour
    work.write_text(f"# {HOSTILE}\n{HOSTILE}\n", "utf-8")
    broken = tmp_path / "broken.yaml"
    broken.write_text("title: [", "utf-8")
    with DeskPage(tmp_path, quick_model(tmp_path)) as desk:
        browser.open(desk.url)
        browser.wait_for("New assignment")
        browser.fill("Name", "Means")
        browser.upload("Rubric", broken)
        browser.wait_for("broken.yaml")
        browser.fill("… or a folder, zip or file on this machine", str(tmp_path / "nowhere"))
        browser.click("Create")
        browser.wait_for("does not exist; type the path")
        browser.fill("… or a folder, zip or file on this machine", str(work))
        browser.click("Create")
        browser.wait_for("not YAML")
        assert not list(desk.home.glob("*")), "nothing half made stays behind"

        folder = create(browser, desk, "Means", work, tiny_class(tmp_path / "class", 1) / "rubric.yaml")
        browser.click("Grade all")
        browser.wait_for("The submission of this run has", GRADED_S)
        browser.open(desk.at(folder, "Review"))
        browser.wait_for(HOSTILE[:20])
        assert browser.evaluate("document.title") == "Kvasir grading desk"
        assert browser.evaluate("document.querySelectorAll('img, [onerror]').length") == 0
        assert "Traceback" not in browser.text() + desk.text()
