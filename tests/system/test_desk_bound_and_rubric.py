"""A sample graded by hand without seeing the model's points, and the rubric as a form, in a real browser."""

import csv
from contextlib import suppress
from pathlib import Path

import pytest

from desk.assignments import check_rubric, read_inputs, rubric_versions
from grading import hand_sample as bounds
from grading.hand_sample import SHEET, SamplePlan, SheetConflict, enter_points, is_drawn, load_draw
from grading.rubric.rubric import load_rubric
from tests.support.browser import PATIENCE_S, Browser
from tests.support.desk_page import (
    GRADED_S,
    ON_A_PHONE,
    DeskPage,
    axe_finds,
    choose_first,
    graded_assignment,
    quick_model,
    type_key,
    wait_until_holds,
)
from tests.support.homework import tiny_class
from tests.support.processes import environment
from tests.support.waiting import wait_until

pytestmark = pytest.mark.system

SIZE = 24
EARS = "!!window.kvasir && !!document.querySelector('.st-key-points-at-hand button')"


def sheet(folder: Path) -> list[list[str]]:
    """The points in the sheet, a row for each who was drawn."""
    return [row[1:-1] for row in csv.reader((folder / SHEET).read_text("utf-8").splitlines())][1:]


def test_a_sample_is_graded_blind_by_two_and_what_it_promises_is_said(
    browser: Browser, desk: DeskPage, tmp_path: Path
) -> None:
    # Given a class in which the model said something of each criterion
    folder = graded_assignment(desk, SIZE)
    browser.open(desk.at(folder, "Bound"))
    browser.wait_for("No error in 30 still allows 7.4% of a large class, in 15 14.3%")
    browser.wait_for("30 would be all 24 of them")
    browser.fill("Percent that may differ by more", "40")
    choose_first(browser, "15")
    browser.wait_gone("would be all")
    browser.click("Draw")
    browser.wait_for(f"drew 15 of {SIZE} grades")

    # Then nothing that the model gave is on the page, and points are kept as they are typed, by keys too
    wait_until(lambda: browser.evaluate(EARS), "the page hears keys", PATIENCE_S)
    html = browser.evaluate("document.documentElement.outerHTML")
    assert not [word for word in ("Fine.", "Good work", "by the model", "needs review", "evidence") if word in html]
    type_key(browser, "3")
    wait_until_holds(browser, "Points for works", "3")
    type_key(browser, "0")
    browser.wait_for("1 of 15 graded by hand")
    assert sheet(folder)[0] == ["3", "0"]
    type_key(browser, "j")
    wait_until_holds(browser, "Points for works", "")
    browser.fill("Points for works", "2")
    wait_until(lambda: sheet(folder)[1] == ["2", ""], "what is typed is kept", PATIENCE_S)
    browser.reload()
    wait_until_holds(browser, "Points for works", "2")
    browser.go_back()
    wait_until_holds(browser, "Points for works", "3")
    browser.go_back(-1)
    wait_until_holds(browser, "Points for works", "2")

    # and somebody else's entry is not overwritten unasked
    second = [*load_draw(folder).sampled_members()][1]
    enter_points(folder, second, "clear", "1", "")
    browser.fill("Points for clear", "2")
    browser.wait_for("Somebody has entered 1 here since you looked; yours is 2.")
    assert sheet(folder)[1] == ["2", "1"]
    browser.click("Mine replaces it")
    wait_until(lambda: sheet(folder)[1] == ["2", "2"], "it was asked for", PATIENCE_S)

    # When all are graded, the page says what follows
    for item_id in [*load_draw(folder).sampled_members()][2:]:
        enter_points(folder, item_id, "works", "2", "")
        enter_points(folder, item_id, "clear", "2", "")
    browser.reload()
    browser.wait_for("All are graded by hand")
    assert "kappa" not in browser.text()
    browser.click("Show what they say")
    browser.wait_for("With 90% confidence at most")
    browser.wait_for("of the grades that nobody looks at differ from yours by more than 1 point.")
    browser.wait_for("No error in 30 still allows 7.4%, in 15 14.3%.")
    assert axe_finds(browser) == []
    with Browser(tmp_path / "phone", 390, 844) as phone:
        phone.open(desk.at(folder, "Bound"))
        phone.wait_for("All are graded by hand")
        assert phone.evaluate(ON_A_PHONE) == [0, []]
    assert "Traceback" not in desk.text()


def give_all(folder: Path, points: str = "2") -> None:
    """What the sheet still lacks, by hand."""
    for item_id in load_draw(folder).sampled_members():
        for criterion in ("works", "clear"):
            with suppress(SheetConflict):
                enter_points(folder, item_id, criterion, points, "")


def test_each_part_of_a_class_has_its_sample_and_its_bound(browser: Browser, desk: DeskPage, tmp_path: Path) -> None:
    # Given a table that puts each submission into one of two parts
    folder = graded_assignment(desk, 36)
    names = sorted(path.name for path in Path(read_inputs(folder).submissions).iterdir())
    parts = tmp_path / "parts.csv"
    parts.write_text("submission,part\n" + "".join(f"{name},<b>lab {n % 2}</b>\n" for n, name in enumerate(names)))
    short = tmp_path / "short.csv"
    short.write_text(f"submission,part\n{names[0]},lab\n")
    browser.open(desk.at(folder, "Bound"))
    browser.wait_for("Parts with a sample and a bound of their own")
    choose_first(browser, "15")

    # When the table lacks somebody, nothing is drawn; then 15 of each part
    browser.upload("Parts", short)
    browser.wait_for("Read: lab (1).")
    browser.click("Draw")
    browser.wait_for("no part of the class is given for 35 submissions (the first is")
    assert not is_drawn(folder)
    browser.reload()
    choose_first(browser, "15")
    browser.upload("Parts", parts)
    browser.wait_for("Read: <b>lab 0</b> (18) and <b>lab 1</b> (18).")
    browser.click("Draw")
    browser.wait_for("drew 30 of 36 grades")

    # Then what each can promise is said before and after, and its name is text
    for part in ("<b>lab 0</b>", "<b>lab 1</b>"):
        browser.wait_for(f"{part}: 15 of these 15 have so little doubt that they stand for others, 3 in all.")
    give_all(folder)
    browser.reload()
    browser.click("Show what they say")
    for part in ("<b>lab 0</b>", "<b>lab 1</b>"):
        browser.wait_for(f"{part}: ")
        browser.wait_for(f"Agreement: {part}")
    assert "Traceback" not in desk.text()


def test_a_later_look_is_graded_blind_too_and_a_changed_rubric_ends_the_bound(browser: Browser, desk: DeskPage) -> None:
    # Given a class with two looks planned, the first one graded
    folder = graded_assignment(desk, SIZE)
    bounds.draw_sample(folder, SamplePlan((15, 18), at_most=0.5), "Ada")
    give_all(folder)
    browser.open(desk.at(folder, "Bound"))
    browser.wait_for("15 of 15 graded by hand")
    browser.click("Show what they say")
    browser.wait_for("Agreement: 15 grades")

    # When the next look is asked for, then three more are graded before anything is said again
    browser.click("The next look that was planned")
    browser.wait_for("15 of 18 graded by hand")
    browser.wait_gone("kappa")
    give_all(folder)
    browser.reload()
    browser.click("Show what they say")
    browser.wait_for("Agreement: 18 grades")

    # When the class is then graded by another rubric, that says nothing any more
    browser.click("Regrade")
    browser.fill("Guidance, which students never see", "One point a function.")
    browser.click("Save as a new version")
    browser.click("Regrade beside the present grades")
    browser.wait_for("are different", GRADED_S)
    browser.click("Use this rubric for the class")
    browser.wait_for("Changed once", GRADED_S)
    browser.click("Bound")  # perhaps while the class is still graded again: then the page waits for its end
    browser.wait_for("changed since the sample was drawn, say by a regrade: it says nothing of them any more", GRADED_S)
    assert "With 90% confidence" not in browser.text()
    kept = sheet(folder)
    browser.click("Draw")
    browser.wait_for("0 of ")
    assert kept in [
        [row[1:-1] for row in csv.reader(path.read_text("utf-8").splitlines())][1:]
        for path in folder.glob("hand-grades.*.csv")
    ], "what was entered is kept"
    assert "Traceback" not in desk.text()


def test_without_scipy_the_page_says_what_is_missing_and_the_others_work(browser: Browser, tmp_path: Path) -> None:
    (tmp_path / "without/scipy").mkdir(parents=True)
    (tmp_path / "without/scipy/__init__.py").write_text("raise ImportError\n")
    environ = environment(tmp_path)
    environ["PYTHONPATH"] = f"{tmp_path / 'without'}:{environ['PYTHONPATH']}"
    with DeskPage(tmp_path, quick_model(tmp_path), environ=environ) as desk:
        folder = graded_assignment(desk, 3)
        browser.open(desk.at(folder, "Bound"))
        browser.wait_for("the bound needs SciPy: pip install 'kvasir-inference[bound]'")
        browser.click("Review")
        browser.wait_for("Accept and next")
        assert "Traceback" not in desk.text()


def test_a_rubric_is_edited_as_a_form_and_as_yaml_and_keeps_what_was_typed(browser: Browser, desk: DeskPage) -> None:
    folder = graded_assignment(desk, 3)
    first = Path(read_inputs(folder).rubric)
    browser.open(desk.at(folder, "Regrade"))
    browser.wait_for("The class is graded with this rubric.")
    browser.click("YAML")
    wait_until_holds(browser, "Rubric", first.read_text("utf-8"))
    browser.click("Form")

    # What is typed in the form is in the YAML
    browser.fill("Guidance, which students never see", "One point a function.")
    browser.fill("Rulings on edge cases, one a line", "Half if it fails on an empty list.", 1)
    browser.wait_for("Differs from what the class is graded with: works and clear.")
    browser.click("Add a criterion")
    browser.fill("Criterion", "Tested", 2)
    browser.wait_for("criterion_1 (new)")
    browser.click("Up", 2)
    browser.click("YAML")
    browser.wait_gone("Add a criterion")
    typed = str(browser.evaluate("document.querySelector('[aria-label=Rubric]').value"))
    made = check_rubric("rubric.yaml", typed.encode())
    assert [each.id for each in made.criteria] == ["works", "criterion_1", "clear"]
    assert made.criteria[2].rulings == ("Half if it fails on an empty list.",)

    # A YAML that is no rubric stays, and says why; what is fixed is in the form, also after a reload
    browser.fill("Rubric", typed.replace("points: 3", "points: three"))
    browser.click("Form")
    browser.wait_for("'points' must be a number, not 'three'")
    browser.fill("Rubric", typed.replace("points: 3", "points: 4"))
    browser.click("Form")
    wait_until_holds(browser, "Points", "4")
    browser.reload()
    wait_until_holds(browser, "Points", "4")
    wait_until_holds(browser, "Guidance, which students never see", "One point a function.")
    assert axe_finds(browser) == []

    # It is saved as a version, and what asking would cost is said before anybody asks
    browser.click("Save as a new version")
    browser.wait_for("Asked about anew: works, criterion_1 and clear.")
    (second,) = set(rubric_versions(folder)) - {first}
    assert [each.points for each in load_rubric(second).criteria] == [4, 1, 2]
    assert "Traceback" not in desk.text()


def test_a_rubric_is_written_on_the_desk_from_nothing(browser: Browser, desk: DeskPage, tmp_path: Path) -> None:
    work = tiny_class(tmp_path, 3) / "submissions"
    browser.open(desk.url)
    browser.wait_for("New assignment")
    browser.fill("Name", "Written here")
    browser.fill("… or a folder, zip or file on this machine", str(work))
    browser.click("Create")
    browser.wait_for("This assignment has no rubric yet")
    folder = desk.home / "written-here"
    browser.click("Grade")
    browser.click("Write the rubric")

    browser.fill("Criterion", "It runs")
    browser.fill("Id", "works")
    browser.fill("Points", "3")
    browser.fill("Guidance, which students never see", "One point a function.")
    browser.reload()
    wait_until_holds(browser, "Guidance, which students never see", "One point a function.")
    assert not read_inputs(folder).rubric
    browser.click("Save as a new version")
    browser.wait_gone("This assignment has no rubric yet")
    made = load_rubric(Path(read_inputs(folder).rubric))
    assert (made.title, [(one.id, one.title, one.points) for one in made.criteria]) == (
        "Written here",
        [("works", "It runs", 3)],
    )

    browser.click("Grade")
    browser.click("Grade all")
    browser.wait_for("All 3 submissions of this run", GRADED_S)
    assert "Traceback" not in desk.text()
