"""Another rubric, in a real browser: edited, tried beside the present grades, adopted."""

from pathlib import Path

import pytest

from desk.assignments import grading_work, read_inputs, rubric_versions, version_name
from desk.rounds import versions
from tests.support.browser import Browser
from tests.support.desk_page import GRADED_S, DeskPage, grade_all, new_assignment, quick_model, steps, wait_until_chosen
from tests.support.homework import RUBRIC, journal, tiny_class
from tests.support.waiting import wait_until

pytestmark = pytest.mark.system

STRICTER = RUBRIC.replace("points: 3", "points: 4").replace("One point for each", "Two points for each")


def graded_with(folder: Path, rubric: Path) -> bool:
    """Whether the grading that was started last has this rubric, and is over."""
    record = grading_work(folder).record()
    return record is not None and str(rubric) in record.command and not grading_work(folder).is_alive


def test_a_rubric_is_edited_tried_beside_the_grades_and_adopted(tmp_path: Path) -> None:
    work = tiny_class(tmp_path / "class", 2)
    with DeskPage(tmp_path, quick_model(tmp_path)) as desk, Browser(tmp_path / "browser") as browser:
        folder = new_assignment(desk, "Means", work / "submissions", RUBRIC)
        grade_all(browser, desk, folder, 2)
        before = journal(folder)
        first = Path(read_inputs(folder).rubric)

        browser.open(desk.at(folder, "Regrade"))
        browser.click("YAML")
        browser.fill("Rubric", STRICTER)
        browser.click("Save as a new version")
        wait_until(lambda: len(rubric_versions(folder)) == 2, "the new text is a version of its own")
        (stricter,) = set(rubric_versions(folder)) - {first}
        chosen = version_name(folder, stricter)
        assert chosen.startswith("version 2, ")
        wait_until_chosen(browser, chosen)
        browser.click("Regrade beside the present grades")
        browser.wait_for(f"Round 1 with the rubric's {chosen}")
        browser.wait_for("of 2 are different", GRADED_S)
        assert journal(folder) == before, "a round leaves the class's own results alone"
        assert Path(read_inputs(folder).rubric) == first

        browser.click("Use this rubric for the class")
        browser.wait_for("Before the rubric changed: version 1")
        wait_until(lambda: graded_with(folder, stricter), "the class is graded with the new rubric", GRADED_S)
        browser.open(desk.at(folder, "Review"))
        browser.wait_for("/ 6")
        assert Path(read_inputs(folder).rubric) == stricter
        assert len(versions(folder)) == 1
        tried = {row["job_id"] for row in journal(folder / "rounds" / "1")}
        assert tried <= {row["job_id"] for row in journal(folder)}
        assert not tried & {job for run in steps(folder, "prefill_started") for job in run}, "nothing is graded twice"
        assert "Traceback" not in desk.text()


def test_after_a_trial_the_rubric_is_corrected_and_only_the_trial_is_graded_again(tmp_path: Path) -> None:
    work = tiny_class(tmp_path / "class", 8)
    with DeskPage(tmp_path, quick_model(tmp_path)) as desk, Browser(tmp_path / "browser") as browser:
        folder = new_assignment(desk, "Means", work / "submissions", RUBRIC)
        browser.open(desk.at(folder, "Grade"))
        browser.click("Trial")
        browser.wait_for("All 5 submissions of this run", GRADED_S)
        first = Path(read_inputs(folder).rubric)

        browser.click("Regrade")
        browser.click("YAML")
        browser.fill("Rubric", STRICTER)
        browser.click("Save as a new version")
        wait_until(lambda: len(rubric_versions(folder)) == 2, "the new text is a version of its own")
        (stricter,) = set(rubric_versions(folder)) - {first}
        wait_until_chosen(browser, version_name(folder, stricter))
        browser.click("Regrade beside the present grades")
        browser.wait_for("of 5 are different", GRADED_S)
        browser.click("Use this rubric for the class")
        wait_until(lambda: graded_with(folder, stricter), "the trial is graded with the new rubric", GRADED_S)
        assert len({row["item_id"].partition(".")[0] for row in journal(folder)}) == 5

        browser.click("Grade")
        browser.click("Grade all")
        browser.wait_for("All 8 submissions of this run", GRADED_S)
        assert "Traceback" not in desk.text()
