"""From a person's decision to the file that the learning platform takes back, in a real browser."""

import json
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from desk.assignments import read_inputs
from grading.reviews import read_overrides
from infra.config.settings import load_settings
from kvasir import class_run
from kvasir.class_run import request_from
from tests.support import lms
from tests.support.browser import PATIENCE_S, Browser, BrowserFailed
from tests.support.desk import answer, plan
from tests.support.desk_page import (
    DeskPage,
    graded_assignment,
    new_assignment,
    quick_model,
    wait_until_chosen,
)
from tests.support.homework import RUBRIC
from tests.support.waiting import wait_until

pytestmark = pytest.mark.system

GOOD = "def mean(values):\n    return sum(values) / len(values)\n"
GUIDANCE = "One point for each function that works."
GRADEBOOK = """\
Student,ID,SIS User ID,SIS Login ID,Section,means (701)
    Points Possible,,,,,5
"Brookside, Benno",48102,b1,benno,A,
"Cloverfield, Cato",48103,c1,cato,A,
"""
WORKSHEET = """\
Identifier,Full name,Email address,Status,Grade,Maximum Grade,Grade can be changed,\
Last modified (submission),Last modified (grade),Feedback comments
Participant 11,Benno Brookside,b@example.org,Submitted for grading,,5.00,Yes,"Monday, 3 November",-,
Participant 12,Cato Cloverfield,c@example.org,Submitted for grading,,5.00,Yes,"Monday, 3 November",-,
"""


@pytest.fixture
def desk(tmp_path: Path) -> Iterator[DeskPage]:
    with DeskPage(tmp_path, quick_model(tmp_path)) as opened:
        yield opened


def hand_in(folder: Path, good: str, broken: str) -> Path:
    """A class of two: one whose work is there, one whose notebook can't be read."""
    for name, text in ((good, GOOD), (broken, "{")):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, "utf-8")
    return folder


def graded_and_reviewed(browser: Browser, desk: DeskPage, work: Path) -> Path:
    """The model gives 1 point for each criterion; a person gives 2 of 3 and 1 of 2, and comments."""
    folder = new_assignment(desk, "Means", work, RUBRIC)
    settings = load_settings(config=desk.config)
    assignment = plan(folder, request_from(settings, work, Path(read_inputs(folder).rubric)))
    readable = [number for number, item in enumerate(assignment.items) if not item.submission.problem]
    answer(folder, assignment, readable, points=1)
    class_run.look(settings, folder)  # its grades are written down, as by a grading
    browser.open(desk.at(folder, "Review"))
    changes = {"works": {"points": 2}, "clear": {"points": 1, "feedback": "=Names that say what they hold."}}
    changes[""] = {"feedback": "Nearly all of it is there."}
    for criterion, fields in changes.items():
        browser.press("css", f'[data-row="{criterion}"] > button')
        for field, text in fields.items():
            label = f"{'Points for' if field == 'points' else 'Feedback on'} {criterion}" if criterion else "Summary"
            browser.fill(label, str(text))
    browser.click("Save and next")
    wait_until(
        lambda: {each.criterion_id for each in read_overrides(folder)} >= {"works", "clear", None}, "all is kept"
    )
    browser.open(desk.at(folder, "Export"))
    browser.wait_for("Make the file")
    return folder


def choose(browser: Browser, option: str, nth: int = 0) -> None:
    """Take an option of a select box of the page. A page drawn again meanwhile closes the box: open it again."""
    boxes = "[data-testid=stMain] [data-testid=stSelectbox] input"
    holds = f"document.querySelectorAll({json.dumps(boxes)})[{nth}]?.value === {json.dumps(option)}"

    def taken() -> bool:
        browser.press("css", boxes, nth)
        with suppress(BrowserFailed, AssertionError):
            browser.click(option, timeout_s=4)
            wait_until(lambda: browser.evaluate(holds), f"{option!r} is shown", 4)  # or the box closed before the click
            return True
        return False

    wait_until(taken, f"{option!r} is taken", PATIENCE_S)


def made(browser: Browser, name: str) -> bytes:
    browser.click("Make the file")
    browser.click(f"Download {name}")
    return browser.wait_for_download(name).read_bytes()


def test_canvas_takes_back_the_gradebook_that_the_browser_downloads(
    browser: Browser, desk: DeskPage, tmp_path: Path
) -> None:
    broken = "cloverfieldcato_48103_910003_homework.ipynb"
    work = hand_in(tmp_path / "class", "brooksidebenno_48102_910002_homework.py", broken)
    graded_and_reviewed(browser, desk, work)
    gradebook = tmp_path / "gradebook.csv"
    gradebook.write_text(GRADEBOOK, "utf-8")

    choose(browser, "Canvas gradebook")
    browser.upload("Gradebook", gradebook)
    wait_until_chosen(browser, "means (701)")
    browser.click("Make the file")
    browser.wait_for("No export of this kind has been given out before.")
    browser.wait_for("1 grade in this file: 1 that a person has decided on, 0 on the model's points alone.")
    browser.wait_for("1 feedback text was written for other points than those given now: brooksidebenno")
    data = made(browser, "canvas-gradebook.csv")
    browser.wait_for("Nothing would differ from the last export of this kind")
    browser.wait_for("Points are compared, not texts.")

    found = lms.canvas_import(data, {"701"}, {"48102", "48103"})
    assert found.grades == {"701": {"48102": 3.0}}, "what can't be read stays blank, and is no 0"
    assert found.points_possible == {"701": 5.0}
    assert lms.formulas(data) == []
    browser.wait_for(f"{broken}: failed")


def test_what_is_not_saved_is_said_where_grades_leave(browser: Browser, desk: DeskPage) -> None:
    folder = graded_assignment(desk, 2)
    browser.open(desk.at(folder, "Review"))
    browser.wait_for("Final points")
    browser.fill("Feedback on works", "Half of it.")
    browser.wait_for("Not saved yet.")
    browser.click("Export")
    browser.wait_for("In this browser 1 change is not saved and will not go out: open Review first.")
    browser.click("Review")
    browser.click("Save and next")
    browser.wait_for("Saved: student0")
    wait_until(lambda: len(read_overrides(folder)) == 1, "it is kept", PATIENCE_S)
    browser.click("Export")
    browser.wait_for("Make the file")
    browser.wait_gone("In this browser")
    browser.click("Make the file")
    browser.wait_for("2 grades in this file: 1 that a person has decided on, 1 on the model's points alone.")


def test_no_column_is_chosen_by_its_place_and_none_that_holds_grades_is_filled_unasked(
    browser: Browser, desk: DeskPage, tmp_path: Path
) -> None:
    work = hand_in(
        tmp_path / "class", "brooksidebenno_48102_910002_homework.py", "cloverfieldcato_48103_910003_a.ipynb"
    )
    graded_and_reviewed(browser, desk, work)
    gradebook = tmp_path / "gradebook.csv"
    gradebook.write_text(
        GRADEBOOK.replace("means (701)", "Homework 5 (701),Homework 6 (702)").replace(",5\n", ",5,5\n")
        .replace("benno,A,", "benno,A,4.5,").replace("cato,A,", "cato,A,4,"),
        "utf-8",
    )  # fmt: skip

    choose(browser, "Canvas gradebook")
    waits = "Make the file waits for the file, or the choice, that is asked for above."
    browser.wait_for(waits)
    browser.upload("Gradebook", gradebook)
    browser.wait_for("Scale the points to Canvas")
    browser.wait_for(waits)  # for the column
    disabled = "[...document.querySelectorAll('button')].find((b) => b.innerText.includes('Make the file')).disabled"
    assert browser.evaluate(disabled), "nothing is chosen, so nothing can be made"

    choose(browser, "Homework 5 (701)", nth=1)
    wait_until_chosen(browser, "Homework 5 (701)")
    browser.click("Make the file")
    browser.wait_for("Brookside, Benno: 4.5 → 3")
    assert "Download canvas-gradebook.csv" not in browser.text()
    browser.click("I have read this, and this is the file that I want")
    browser.wait_for("Download canvas-gradebook.csv")

    # What was confirmed is that file: for another column nothing is, and back again it has to be made again.
    choose(browser, "Homework 6 (702)", nth=1)
    wait_until_chosen(browser, "Homework 6 (702)")
    browser.wait_gone("Download canvas-gradebook.csv")
    data = made(browser, "canvas-gradebook.csv")  # this column is empty: nothing is asked
    assert lms.canvas_import(data, {"701", "702"}, {"48102", "48103"}).grades == {"702": {"48102": 3.0}}


def test_moodle_takes_back_the_worksheet_and_the_feedback_that_the_browser_downloads(
    browser: Browser, desk: DeskPage, tmp_path: Path
) -> None:
    folders = [f"{name}_assignsubmission_file_" for name in ("Benno Brookside_11", "Cato Cloverfield_12")]
    work = hand_in(tmp_path / "class", f"{folders[0]}/homework.py", f"{folders[1]}/homework.ipynb")
    graded_and_reviewed(browser, desk, work)
    worksheet = tmp_path / "worksheet.csv"
    worksheet.write_text(WORKSHEET, "utf-8")

    choose(browser, "Moodle worksheet")
    browser.upload("Grading worksheet", worksheet)
    browser.wait_for(worksheet.name)
    data = made(browser, "moodle-worksheet.csv")

    found = lms.moodle_worksheet(data, {"11": "-", "12": "-"}, 5.0)
    assert found.grades == {"11": 3.0}
    assert "Nearly all of it is there." in found.comments["11"]
    assert "12" not in found.comments
    assert lms.formulas(data) == []
    assert GUIDANCE.encode() not in data

    choose(browser, "Moodle feedback files")
    files = lms.moodle_feedback_zip(made(browser, "moodle-feedback.zip"), {"11", "12"})
    assert b"Names that say what they hold." in files["11"]
    assert set(files) == {"11"}
    assert all(GUIDANCE.encode() not in file for file in files.values())


def test_the_kind_of_file_stays_chosen_while_another_section_is_shown(browser: Browser, desk: DeskPage) -> None:
    browser.open(desk.at(graded_assignment(desk, 1), "Export"))
    browser.wait_for("Make the file")
    choose(browser, "Canvas gradebook")
    browser.click("Results")
    browser.wait_for("Name contains")
    browser.click("Export")
    browser.wait_for("Make the file")
    wait_until_chosen(browser, "Canvas gradebook")
