"""A sample graded by hand without seeing the model's points, and the rubric as a form, in a real browser."""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path

import pytest

from producers.bound import SHEET, drawn, give
from producers.desk.assignments import check_rubric, read_inputs, rubric_versions
from producers.rubric.rubric import load_rubric
from tests.support.browser import PATIENCE_S, Browser
from tests.support.desk_page import (
    ON_A_PHONE,
    DeskPage,
    axe_finds,
    graded_assignment,
    quick_model,
    type_key,
    wait_until_holds,
)
from tests.support.waiting import wait_until

pytestmark = pytest.mark.system

SIZE = 24
EARS = "!!window.kvasir && !!document.querySelector('.st-key-points-at-hand button')"


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeskPage]:
    folder = tmp_path_factory.mktemp("desk")
    with DeskPage(folder, quick_model(folder)) as opened:
        yield opened


@pytest.fixture
def browser(tmp_path: Path) -> Iterator[Browser]:
    with Browser(tmp_path / "browser") as opened:
        yield opened


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
    browser.press("css", "[data-testid=stMain] [data-testid=stSelectbox] input")
    browser.click("15")
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
    browser.back()
    wait_until_holds(browser, "Points for works", "3")
    browser.back(-1)
    wait_until_holds(browser, "Points for works", "2")

    # and somebody else's entry is not overwritten unasked
    second = [*drawn(folder).sampled()][1]
    give(folder, second, "clear", "1", "")
    browser.fill("Points for clear", "2")
    browser.wait_for("Somebody has entered 1 here since you looked; yours is 2.")
    assert sheet(folder)[1] == ["2", "1"]
    browser.click("Mine replaces it")
    wait_until(lambda: sheet(folder)[1] == ["2", "2"], "it was asked for", PATIENCE_S)

    # When all are graded, the page says what follows
    for item_id in [*drawn(folder).sampled()][2:]:
        give(folder, item_id, "works", "2", "")
        give(folder, item_id, "clear", "2", "")
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
    browser.wait_for("Other than what the class is graded with: works and clear.")
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

    # A YAML that is no rubric stays, and says why; what is mended is in the form, also after a reload
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
