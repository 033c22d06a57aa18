"""Like answers on the desk in a real browser: decided together, logged per student, undone as one."""

import json
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from desk import assignments
from desk.assignments import Inputs
from grading.reviews import Override, append_override, read_overrides
from infra.config.settings import load_settings
from kvasir import class_run
from kvasir.class_run import request_from
from tests.support.browser import Browser
from tests.support.desk import answer, plan
from tests.support.desk_page import DeskPage, quick_model, wait_until_chosen
from tests.support.homework import RUBRIC, tiny_class
from tests.support.waiting import wait_until

pytestmark = pytest.mark.system

HOSTILE = "<script>document.title='taken'</script>"
DECIDE = "Decide on those that are ticked"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with Browser(tmp_path_factory.mktemp("browser"), 1440, 900) as opened:
        yield opened


@pytest.fixture(scope="module")
def desk(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeskPage]:
    folder = tmp_path_factory.mktemp("desk")
    with DeskPage(folder, quick_model(folder)) as running:
        yield running


def class_with_duplicates(desk: DeskPage, folder: Path) -> Path:
    """Six who return the same line, four of them in the same file, and a seventh with evidence of their own."""
    work = tiny_class(folder / "class", 7)
    files = sorted((work / "submissions").iterdir())
    for number, file in enumerate(files):
        before = f"# {HOSTILE}\n" if number == 4 else f"total = {number}\n" if number == 5 else ""
        quote = "return max(values)" if number == 6 else "return sum(values) / len(values)"
        file.write_text(f"{before}def mean(values):\n    {quote}\n", "utf-8")
    made = assignments.create_folder(desk.home, "Means")
    rubric = assignments.save_rubric(made, "rubric.yaml", RUBRIC.encode())
    assignments.save_inputs(made, Inputs("Means", str(work / "submissions"), str(rubric)))
    settings = load_settings(config=desk.config)
    assignment = plan(made, request_from(settings, work / "submissions", rubric))
    answer(made, assignment, range(6), evidence="return sum(values) / len(values)")
    answer(made, assignment, [6], evidence="return max(values)")
    class_run.look(settings, made)
    return made


def lines(folder: Path) -> list[dict[str, object]]:
    path = folder / "reviews.jsonl"
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []


def open_all_answers(browser: Browser, desk: DeskPage, folder: Path) -> None:
    browser.open(desk.at(folder, "Like answers"))
    browser.wait_for("0 doubtful answers to decide on")
    browser.click("Answers without a doubt too")
    browser.wait_for("7 answers to decide on: 6 in 1 group, 1 like no other")
    browser.wait_for(DECIDE)


def test_a_group_is_decided_on_at_once_and_undone_as_one(browser: Browser, desk: DeskPage, tmp_path: Path) -> None:
    folder = class_with_duplicates(desk, tmp_path)
    open_all_answers(browser, desk, folder)
    three = "student0_100_1_homework.py, student1_101_1_homework.py, student2_102_1_homework.py"
    wait_until_chosen(browser, f"6 answers, by {three} and 3 others: “return sum(values) / len(values)”")
    browser.click("Without names")
    browser.wait_gone("student0")
    browser.click("Without names")
    browser.wait_for("student0_100_1_homework.py: in the same words")
    said = browser.text()
    assert (said.count("in the same words"), said.count("differs where it is highlighted")) == (4, 2)
    assert browser.evaluate("document.title") == "Kvasir grading desk"
    highlighted = browser.evaluate("[...document.querySelectorAll('ins')].map((each) => each.innerText.trim())")
    assert HOSTILE in " ".join(highlighted)

    browser.fill("Points for those that are ticked", "3")
    browser.click(DECIDE)
    browser.wait_for("Decided.")
    made = read_overrides(folder)
    assert [(each.criterion_id, each.points) for each in made] == [("works", 3)] * 4
    assert len({each.item_id for each in made}) == 4, "each student has a line"

    # Those that were not ticked are a group still; what is undone is undone for all of it
    browser.wait_for("3 answers to decide on: 2 in 1 group, 1 like no other")
    browser.wait_for("4 answers, by ")
    browser.wait_for(" and 2 others: 3 — ")
    browser.click("Undo")
    browser.wait_for("What stood before stands again.")
    assert read_overrides(folder) == []
    assert len(lines(folder)) == 8, "nothing is rewritten"
    browser.wait_for("7 answers to decide on")

    # All of a group
    browser.click("Tick all")
    ticked = "document.querySelectorAll('[data-testid=stForm] input:checked').length"
    wait_until(lambda: browser.evaluate(ticked) == 6, "all are ticked")
    browser.click(DECIDE)
    browser.wait_for("1 answer to decide on: 0 in 0 groups, 1 like no other")
    assert [each.points for each in read_overrides(folder)] == [2] * 6
    assert "Traceback" not in desk.text()


def test_whom_somebody_has_decided_on_meanwhile_is_left_and_named(
    browser: Browser, desk: DeskPage, tmp_path: Path
) -> None:
    folder = class_with_duplicates(desk, tmp_path)
    open_all_answers(browser, desk, folder)
    graded = json.loads((folder / "grades.json").read_text("utf-8"))["grades"]
    theirs = next(grade["item_id"] for grade in graded if grade["submission"].startswith("student1_"))
    append_override(folder, Override(theirs, "works", 0, None, "it is copied", "Ben"))

    browser.click(DECIDE)
    browser.wait_for("Not changed, because somebody else has decided on them: student1_101_1_homework.py.")

    by_item = {each.item_id: each for each in read_overrides(folder)}
    assert (by_item[theirs].points, by_item[theirs].reviewer) == (0, "Ben")
    assert len(by_item) == 4
    # Their reason can be chosen for the rest
    browser.wait_for("3 answers to decide on: 2 in 1 group")
    wait_until_chosen(browser, "decided together with the answers that are like it")


def test_what_was_clicked_is_kept_though_the_browser_is_closed_at_once(desk: DeskPage, tmp_path: Path) -> None:
    folder = class_with_duplicates(desk, tmp_path)
    with Browser(tmp_path / "browser", 1440, 900) as closing:
        open_all_answers(closing, desk, folder)
        closing.click(DECIDE)
    wait_until(lambda: len(lines(folder)) == 4, "the decision is on disk")


def test_the_start_page_and_the_results_say_how_the_class_stands(
    browser: Browser, desk: DeskPage, tmp_path: Path
) -> None:
    folder = class_with_duplicates(desk, tmp_path)
    browser.open(desk.url)
    browser.wait_for("none of 7 needs review")
    browser.open(desk.at(folder, "Results"))
    browser.wait_for("7 submissions: 7 graded. 0 reviewed; none of 7 needs review.")


def test_differences_are_highlighted_word_by_word_and_nothing_in_them_is_html() -> None:
    from desk.pages.markup import Markup  # Streamlit, which the default tests' environment does not have

    markup = Markup()
    markup.changes("mean = total / <b>", "mean = total / (count - 1)")
    html = markup._repr_html_()
    assert re.findall(r"<del>(.*?)</del>", html) == [" &lt;b&gt;"]
    assert re.findall(r"<ins[^>]*>(.*?)</ins>", html) == [" (count - 1)"]
    assert re.sub(r"<del>.*?</del>|<[^>]+>", "", html) == "\nmean = total / (count - 1)"
