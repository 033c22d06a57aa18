"""A new assignment on the desk, as it is filled in by somebody who has not read how."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.browser import Browser
from tests.support.desk_page import DeskPage, graded_assignment, quick_model
from tests.support.homework import tiny_class
from tests.support.waiting import wait_until

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
        browser.wait_for("choose a folder elsewhere with kvasir ui --home")
        assert not (desk.home / "means").exists()


def test_the_start_page_and_the_results_lead_to_review_where_something_needs_it(
    browser: Browser, tmp_path: Path
) -> None:
    with DeskPage(tmp_path, quick_model(tmp_path)) as desk:
        folder = graded_assignment(desk, 2, doubtful=[1])
        browser.open(desk.url)
        browser.wait_for("1 of 2 needs review")
        browser.click("Review")
        browser.wait_for("Final points")
        browser.wait_for("student1_101_1_homework.py")
        browser.open(desk.at(folder, "Results"))
        browser.wait_for("Open questions: works in 1, clear in 1.")
        browser.press("css", "[data-testid=stMain] button[kind=primary]")
        browser.wait_for("Final points")


def test_enter_on_the_start_page_opens_the_first_assignment_that_needs_review(browser: Browser, tmp_path: Path) -> None:
    with DeskPage(tmp_path, quick_model(tmp_path)) as desk:
        graded_assignment(desk, 2)
        graded_assignment(desk, 2, doubtful=[1])
        browser.open(desk.url)
        browser.wait_for("1 of 2 needs review")
        is_drawn = "!!document.querySelector('[data-testid=stMain] button[kind=primary]')"
        wait_until(lambda: browser.evaluate(is_drawn), "its button is drawn")
        browser.key("Enter", 13)
        browser.wait_for("in the class: 1 of 2 needs review")


def test_the_list_of_keys_stays_open_in_the_next_section(browser: Browser, tmp_path: Path) -> None:
    with DeskPage(tmp_path, quick_model(tmp_path)) as desk:
        browser.open(desk.at(graded_assignment(desk, 2, doubtful=[1]), "Results"))
        browser.wait_for("Name contains")
        browser.press("css", ".keys summary")
        browser.wait_for("the next field or button")
        browser.click("Export")
        browser.wait_for("Make the file")
        assert browser.evaluate("document.querySelector('.keys').open")


def test_an_export_names_who_stays_blank_before_it_is_made(browser: Browser, tmp_path: Path) -> None:
    with DeskPage(tmp_path, quick_model(tmp_path)) as desk:
        browser.open(desk.at(graded_assignment(desk, 3, doubtful=[1]), "Export"))
        browser.wait_for("Without a grade, and left blank: 1 submission")
        browser.wait_for("student1_101_1_homework.py: needs review: works: evidence not found")
        browser.click("Include grades that still need review")
        browser.wait_gone("Without a grade")


def test_two_uploads_of_one_name_are_refused_and_no_empty_assignment_stays(browser: Browser, tmp_path: Path) -> None:
    for student in ("ann", "ben"):
        (tmp_path / student).mkdir()
        (tmp_path / student / "hw.py").write_text(f"# {student}\n", "utf-8")
    with DeskPage(tmp_path, quick_model(tmp_path)) as desk:
        browser.open(desk.url)
        browser.fill("Name", "Means")
        for student in ("ann", "ben"):
            browser.upload("Submissions", tmp_path / student / "hw.py")
        browser.click("Create")
        browser.wait_for("two uploaded files are called 'hw.py': rename one")
        assert not desk.home.exists() or not list(desk.home.iterdir())


def test_what_a_folder_may_hold_can_be_uploaded_too(browser: Browser, tmp_path: Path) -> None:
    page = tmp_path / "doe_12_text.html"
    page.write_text("<p>Sales rose.</p>", "utf-8")
    rubric = tmp_path / "canvas.csv"
    ratings = "Rating Name,Rating Description,Rating Points"
    header = f"Rubric Name,Criteria Name,Criteria Description,Criteria Enable Range,{ratings}"
    rubric.write_text(f"{header}\nMeans,Code runs,It runs,false,Full,,3,None,,0\n", "utf-8")
    with DeskPage(tmp_path, quick_model(tmp_path)) as desk:
        browser.open(desk.url)
        browser.fill("Name", "Means")
        browser.upload("Submissions", page)
        browser.wait_for("xt.html")
        browser.upload("Rubric", tiny_class(tmp_path / "class", 1) / "rubric.yaml")
        browser.wait_for("c.yaml")
        browser.click("Create")
        browser.click("Dry run")
        browser.wait_for("counted with the model's tokenizer")
        folder = desk.home / "means"
        assert [path.name for path in folder.glob("handed-in/*/*")] == [page.name]

        browser.open(desk.at(folder, "Regrade"))
        browser.press("css", "[data-testid=stExpander]:has([data-testid=stFileUploader]) summary")
        browser.upload("Rubric", rubric)
        browser.wait_for("as.csv")
        browser.click("Keep the uploaded one")
        wait_until(lambda: list(folder.glob("rubrics/*.csv")), "the uploaded version is kept")
        assert "Traceback" not in desk.text()
