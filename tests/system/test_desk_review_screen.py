"""The review screen in a real browser: by keys alone, in sight, over a bad line, and with comments that are reused."""

import json
import random
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from desk import assignments
from grading.reviews import Override, append_override, read_overrides
from infra.config.settings import load_settings
from kvasir.class_run import request_from
from tests.support.browser import PATIENCE_S, Browser
from tests.support.desk import answer, plan
from tests.support.desk_page import (
    ACCOUNT,
    ON_A_PHONE,
    DeskPage,
    axe_finds,
    graded_assignment,
    new_assignment,
    quick_model,
    value,
    wait_until_holds,
)
from tests.support.homework import RUBRIC, tiny_class
from tests.support.waiting import wait_until

pytestmark = pytest.mark.system

GUIDANCE = " ".join(["One point for each step that is there, and half of one where it is there and does not run."] * 12)
LONG_RUBRIC = "title: Means\ncriteria:\n" + "".join(
    f'  - {{id: part{number}, title: Part {number}, points: 20, step: 0.5, model: code, guidance: "{GUIDANCE}"}}\n'
    for number in range(12)
)
DEDUCTION = "  - {id: late, title: Sloppy, points: 0, deduction: 5, model: code, guidance: Nothing is labelled.}\n"
# The open row, or where that is taller its head and its points, is within its panel and the window.
IN_VIEW = """
(function () {
  const row = document.querySelector(".kv-grade .kv-active");
  const panel = document.querySelector(".kv-grade").getBoundingClientRect();
  const inside = (r) => r.top >= panel.top - 1 && r.bottom <= panel.bottom + 1 && r.top >= 0 && r.bottom <= innerHeight;
  const all = row.getBoundingClientRect();
  // On opening a submission its total comes first, and these parts of the row suffice.
  if (all.height <= panel.height && !window.kvasirReview.isNewcomer) return inside(all);
  const parts = [row.querySelector("button"), row.querySelector(".kv-give")];
  return parts.every((each) => !each || inside(each.getBoundingClientRect()));
})()
"""
RUBRIC_OF_FOUR = "title: Means\ncriteria:\n" + "".join(
    f"  - {{id: {id}, title: What {id} asks for, points: {most}, step: 0.5, model: {model},"
    " guidance: One point for each step that is there; half of one where it does not run.}\n"
    for id, most, model in (("works", 3, "code"), ("fast", 10, "code"), ("safe", 4, "code"), ("clear", 5, "feedback"))
)
PAGE_SCROLLS = (
    "(({scrollHeight, clientHeight}) => scrollHeight > clientHeight)(document.querySelector('[data-testid=stMain]'))"
)


@pytest.fixture(scope="module")
def long_class(desk: DeskPage) -> Path:
    """Three students, twelve criteria of up to twenty points with long guidance, and one that takes points off."""
    work = tiny_class(desk.home.parent / "long", 3) / "submissions"
    folder = new_assignment(desk, "Long", work, LONG_RUBRIC + DEDUCTION)
    rubric = Path(assignments.read_inputs(folder).rubric)
    answer(folder, plan(folder, request_from(load_settings(config=desk.config), work, rubric)), range(3), points=0)
    return folder


@pytest.fixture
def wide(tmp_path: Path) -> Iterator[Browser]:
    with Browser(tmp_path / "wide", 1440, 900) as opened:
        yield opened


def open_review(browser: Browser, desk: DeskPage, folder: Path, more: str = "") -> None:
    browser.open(desk.at(folder, "Review") + more)
    browser.wait_for("Final points")


def points_of(browser: Browser) -> dict[str, object]:
    """What the screen shows, by criterion."""
    state = browser.evaluate("window.kvasirReview.state().criteria.map(({id, points}) => [id, points])")
    return dict(state)


def press(browser: Browser, *keys: str) -> None:
    """Keys one after the other, as fast as they come; "…" is a pause that ends a number."""
    codes = {"ArrowDown": 40, "ArrowUp": 38, "Enter": 13, "Escape": 27}
    for key in keys:
        if key == "…":
            time.sleep(0.8)
            continue
        for event in ("rawKeyDown", "keyUp"):
            code = codes.get(key) or ord(key.upper())
            browser.call("Input.dispatchKeyEvent", type=event, key=key, windowsVirtualKeyCode=code)


def wait_until_kept(browser: Browser, folder: Path, count: int) -> list[Override]:
    """The decisions, once there are so many and the page has heard of each."""
    wait_until(lambda: len(read_overrides(folder)) == count, f"{count} decisions are kept", PATIENCE_S)
    wait_until(lambda: browser.evaluate("window.kvasirReview.acts.length") == 0, "all is confirmed", PATIENCE_S)
    return read_overrides(folder)


def test_more_than_nine_points_are_given_by_keys(wide: Browser, desk: DeskPage, long_class: Path) -> None:
    # PrairieLearn's keys end at its ninth rubric item, and its users ask for more (PrairieLearn/PrairieLearn#9231).
    open_review(wide, desk, long_class)
    down = "ArrowDown"
    press(wide, "1", "2", down, "7", down, "2", "…", "5", down, "3", ".", "5", down, "2", "…", ".")
    assert list(points_of(wide).values())[:6] == [12, 7, 5, 3.5, 2.5, 0]
    press(wide, "…", "7", "2")
    wide.wait_for("Points go from 0 to 20.")
    assert points_of(wide)["part4"] == 7, "what may not be given changes nothing"
    press(wide, *[down] * 8, "3")
    assert points_of(wide)["late"] == -3
    press(wide, "9")
    wide.wait_for("Points go from -5 to 0.")
    press(wide, "z")
    assert set(points_of(wide).values()) == {0}


def test_what_points_were_given_to_stays_open_for_its_reason_and_its_comment(browser: Browser, desk: DeskPage) -> None:
    folder = graded_assignment(desk, 1, rubric_text=RUBRIC_OF_FOUR)
    open_review(browser, desk, folder)
    press(browser, "ArrowDown", "7", "…", ".")
    assert points_of(browser)["fast"] == 7.5
    press(browser, "r")
    browser.wait_for("the work shows more than the model saw")
    press(browser, "1")
    press(browser, "e")
    assert browser.evaluate("document.activeElement.ariaLabel") == "Feedback on fast"
    press(browser, "Escape", "ArrowDown", "r")
    browser.wait_for("A reason belongs to a change")
    press(browser, "?")
    browser.wait_for("Keys act on the open criterion, and it stays open")


def test_enter_with_nothing_changed_leaves_the_grade_as_it_is_but_pressed_twice_decides_once(
    browser: Browser, desk: DeskPage
) -> None:
    folder = graded_assignment(desk, 3, doubtful=[0, 1, 2])
    open_review(browser, desk, folder)
    wait_until(lambda: not browser.evaluate("window.kvasirReview.state().isBlank"), "the grade is there", PATIENCE_S)
    time.sleep(0.5)  # in which it is read
    press(browser, "Enter", "Enter")
    browser.wait_for("once more accepts it as it is")
    browser.wait_for("Accept as it is")
    [accepted] = wait_until_kept(browser, folder, 1)
    assert (accepted.criterion_id, accepted.reason) == (None, "looked at, and left as it is")
    assert browser.evaluate("window.kvasirReview.queue.indexOf(window.kvasirReview.shown)") == 1
    time.sleep(0.5)
    press(browser, "Enter")
    wait_until_kept(browser, folder, 2)
    press(browser, "k", "Enter")
    browser.wait_for("Accept as it is")
    press(browser, "k", "…")
    browser.wait_gone("Accept as it is")
    browser.wait_gone("once more accepts it as it is")
    press(browser, "j", "Enter")
    browser.wait_for("Accept as it is")
    browser.click("1")
    browser.wait_for("Save and next")
    browser.wait_gone("once more accepts it as it is")


def test_after_a_click_on_a_toggle_enter_does_what_the_blue_button_says(browser: Browser, desk: DeskPage) -> None:
    folder = graded_assignment(desk, 1, doubtful=[0])
    open_review(browser, desk, folder)
    wait_until(lambda: not browser.evaluate("window.kvasirReview.state().isBlank"), "the grade is there", PATIENCE_S)
    browser.evaluate("""
        (function () {
          const screen = window.kvasirReview, { state } = screen;
          const long = "⚑ needs review: " + "speaks to the grader ".repeat(30);
          screen.state = (id) => ({ ...state.call(screen, id), state: long });
          screen.render();
        })()""")
    focus = "document.activeElement.tagName"
    browser.press("css", ".kv-head summary")
    wait_until(lambda: browser.evaluate(focus) != "SUMMARY", "the click leaves no focus", PATIENCE_S)
    assert browser.evaluate("document.querySelector('.kv-head details').open")
    browser.evaluate("document.querySelector('.kv-head summary').focus(); 0")  # as Tab does
    press(browser, "Enter")
    assert read_overrides(folder) == []
    assert browser.evaluate(focus) == "SUMMARY"
    press(browser, "Escape")
    assert browser.evaluate("document.activeElement.className") == "kv"
    press(browser, "…", "Enter")
    [accepted] = wait_until_kept(browser, folder, 1)
    assert accepted.criterion_id is None


def test_a_shared_account_is_no_name_so_it_is_asked_for_before_the_first_decision(
    browser: Browser, tmp_path: Path
) -> None:
    config = quick_model(tmp_path)
    with DeskPage(tmp_path, config, account="root") as desk:
        folder = graded_assignment(desk, 1)
        open_review(browser, desk, folder)
        wait_until_holds(browser, "Feedback on works", "Fine.")
        assert value(browser, "Your name") == ""
        press(browser, "1", "…", "Enter")
        browser.wait_for("Write your name first")
        assert browser.evaluate("document.activeElement.ariaLabel") == "Your name"
        assert points_of(browser)["works"] == 1, "nothing is lost"
        browser.call("Input.insertText", text="Ada")
        press(browser, "Enter", "…", "Enter")
        [decided] = wait_until_kept(browser, folder, 1)
        assert (decided.points, decided.reviewer) == (1, "Ada")


def test_a_comment_is_replaced_by_what_is_typed_and_ended_by_enter(browser: Browser, desk: DeskPage) -> None:
    folder = graded_assignment(desk, 2)
    open_review(browser, desk, folder)
    wait_until_holds(browser, "Feedback on works", "Fine.")
    press(browser, "e")
    browser.call("Input.insertText", text="It runs.")
    browser.call(
        "Input.dispatchKeyEvent", type="keyDown", key="Enter", text="\r", windowsVirtualKeyCode=13, modifiers=8
    )
    browser.call("Input.insertText", text="Nearly.")
    press(browser, "Enter")
    assert browser.evaluate("window.kvasirReview.state().criteria[0].feedback") == "It runs.\nNearly."
    assert browser.evaluate("document.activeElement.className") == "kv", "keys are the screen's again"
    press(browser, "…", "Enter")
    [decided] = wait_until_kept(browser, folder, 1)
    assert decided.feedback == "It runs.\nNearly."


def test_enter_ends_each_field_and_saves_only_then(browser: Browser, desk: DeskPage) -> None:
    folder = graded_assignment(desk, 2)
    open_review(browser, desk, folder)
    texts = {"Points for works": "1", "Reason for the change": "I ran it", "Feedback on works": "Nearly."}
    for field, text in texts.items():
        browser.press("field", field)
        browser.evaluate("document.activeElement.select()")
        browser.call("Input.insertText", text=text)
        press(browser, "Enter")
        assert browser.evaluate("document.activeElement.className") == "kv", f"{field} is left"
        assert browser.evaluate("window.kvasirReview.acts.length") == 0, f"after {field} nothing is saved"
    press(browser, "Enter")
    browser.wait_for("Enter once more saves. In the feedback, Shift Enter is a new line.")
    press(browser, "…", "Enter")
    [decided] = wait_until_kept(browser, folder, 1)
    assert (decided.points, decided.feedback, decided.reason) == (1, "Nearly.", "I ran it")


def test_a_text_that_is_being_written_ends_where_its_submission_is_left(browser: Browser, desk: DeskPage) -> None:
    open_review(browser, desk, graded_assignment(desk, 2))
    wait_until_holds(browser, "Feedback on works", "Fine.")
    press(browser, "e")
    browser.call("Input.insertText", text="For the first.")
    browser.evaluate("window.kvasirReview.move(1); 0")  # as the browser's Back does
    browser.call("Input.insertText", text="For whom?")
    drafts = "Object.values(window.kvasirReview.drafts).map(({changes}) => changes.works.feedback)"
    assert browser.evaluate(drafts) == ["For the first."]


def test_a_saves_the_change_with_the_acceptance_of_the_rest_and_one_z_undoes_both(
    browser: Browser, desk: DeskPage
) -> None:
    folder = graded_assignment(desk, 2, doubtful=[0])
    open_review(browser, desk, folder, "&show=all")
    browser.wait_for("Accept and next")
    press(browser, "1", "a")
    browser.wait_for("Saved and accepted: student0")
    changed, accepted = wait_until_kept(browser, folder, 2)
    assert (changed.criterion_id, changed.points) == ("works", 1)
    assert (accepted.criterion_id, accepted.seen) == (None, {"works": 1, "clear": 2})
    press(browser, "z")
    browser.wait_for("Undone: what you saved for student0")
    wait_until_kept(browser, folder, 0)
    assert points_of(browser) == {"works": 2, "clear": 2}


def test_what_has_no_points_is_not_accepted_and_what_to_do_is_said(
    browser: Browser, desk: DeskPage, tmp_path: Path
) -> None:
    work = tiny_class(tmp_path / "class", 1) / "submissions"
    (work / "broken_7_1_homework.ipynb").write_text("{", "utf-8")
    folder = new_assignment(desk, "Broken", work, RUBRIC)
    assignment = plan(
        folder, request_from(load_settings(config=desk.config), work, Path(assignments.read_inputs(folder).rubric))
    )
    answer(folder, assignment, [1])
    open_review(browser, desk, folder, "&show=without points")
    wait_until(lambda: not browser.evaluate("window.kvasirReview.state().isBlank"), "the grade is there", PATIENCE_S)
    said = "There are no points to accept for It runs, It can be read: give points, or see on Grade what can be tried"
    assert browser.text().count("not valid JSON") == 1, "one place says why it can't be read"
    button = "(({ariaDisabled, title}) => [ariaDisabled, title])(document.querySelector('.kv-save'))"
    is_disabled, title = browser.evaluate(button)
    assert is_disabled == "true"
    assert title.startswith(said)
    for key in ("a", "Enter"):
        press(browser, key)
        browser.wait_for(said)
        browser.evaluate("window.kvasirReview.say(''); 0")
    press(browser, "1")
    browser.wait_for("If you save now, It can be read has no decision and the grade stays blank.")
    assert browser.evaluate(button) == ["false", ""], "what is changed can be saved"
    press(browser, "a")
    browser.wait_for("There are no points to accept for It can be read")
    assert read_overrides(folder) == []
    press(browser, "ArrowDown", "2", "a")
    assert len(wait_until_kept(browser, folder, 3)) == 3


def test_z_asks_before_it_undoes_what_was_saved_for_somebody_who_is_not_shown(browser: Browser, desk: DeskPage) -> None:
    folder = graded_assignment(desk, 3)
    open_review(browser, desk, folder)
    press(browser, "1", "Enter")
    wait_until_kept(browser, folder, 1)
    press(browser, "j", "z")
    browser.wait_for("You saved last for student0_100_1_homework.py, not here: z once more undoes that")
    browser.wait_for("(len(values) + 2)")
    press(browser, "k", "j", "z")
    assert len(read_overrides(folder)) == 1, "whoever has gone elsewhere since is asked again"
    press(browser, "z")
    browser.wait_for("Undone: what you saved for student0_100_1_homework.py, who is shown again.")
    browser.wait_for("(len(values) + 0)")
    wait_until_kept(browser, folder, 0)


def test_the_models_points_typed_again_settle_its_doubt(browser: Browser, desk: DeskPage) -> None:
    folder = graded_assignment(desk, 2, doubtful=[0])
    open_review(browser, desk, folder, "&show=all")
    browser.wait_for("Accept and next")
    press(browser, "2")
    browser.wait_for("If you save now, It can be read has no decision and the grade stays blank;")
    wait_until_holds(browser, "Reason for the change", "the model's points are right")
    press(browser, "Enter")
    [decided] = wait_until_kept(browser, folder, 1)
    assert (decided.criterion_id, decided.points, decided.feedback) == ("works", 2, "Fine.")
    press(browser, "2", "…", "Enter")
    browser.wait_for("Accepted: student1")  # where nothing is in doubt, the same points change nothing


def test_a_grade_on_which_all_is_decided_says_that_it_is_not_saved(browser: Browser, desk: DeskPage) -> None:
    open_review(browser, desk, graded_assignment(desk, 1, doubtful=[0]))
    state = "document.querySelector('.kv-head .state').innerText"
    flags = "[...document.querySelectorAll('button > .kv-flag')].map((flag) => flag.innerText)"
    wait_until(lambda: browser.evaluate(flags) == ["⚑ open"] * 2, "both are open", PATIENCE_S)
    assert browser.evaluate(state).startswith("⚑")
    press(browser, "2")
    assert browser.evaluate(flags) == ["⚑ open"]
    assert browser.evaluate(state).startswith("⚑"), "one is left to decide"
    press(browser, "ArrowDown", "2")
    browser.wait_for("Final points 4 / 5")
    assert browser.evaluate(flags) == []
    assert browser.evaluate(state) == "Not saved yet."


def test_a_filter_that_shows_nobody_any_more_is_left_and_a_choice_gives_the_keys_back(
    browser: Browser, desk: DeskPage
) -> None:
    folder = graded_assignment(desk, 3, doubtful=[0])
    open_review(browser, desk, folder)
    browser.wait_for("1 of 1 shown (needs review, most doubts first) · in the class: 1 of 3 needs review")
    wait_until(lambda: not browser.evaluate("window.kvasirReview.state().isBlank"), "the grade is there", PATIENCE_S)
    time.sleep(0.5)  # in which it is read
    press(browser, "a")
    wait_until_kept(browser, folder, 1)
    browser.click("Results")
    browser.wait_for("Name contains")
    browser.click("Review")
    browser.wait_for("Nobody is left in “needs review”: “all” is shown.")
    browser.wait_for("1 of 3 shown (all, in the order of the files)")
    browser.evaluate("document.querySelector('.kv-show').focus()")
    press(browser, "w")  # the letter of "without points", which the select box takes
    browser.evaluate("window.kvasirReview.fields.show.value = 'all'; 0")
    browser.evaluate("window.kvasirReview.fields.show.dispatchEvent(new Event('change')); 0")
    assert browser.evaluate("document.activeElement.className") == "kv"
    press(browser, "j")
    browser.wait_for("2 of 3 shown (all, in the order of the files)")


def test_a_quote_that_is_not_in_the_work_is_said_to_be_the_models_and_settled_by_a_decision(
    browser: Browser, desk: DeskPage
) -> None:
    folder = graded_assignment(desk, 1, doubtful=[0])
    open_review(browser, desk, folder)
    browser.wait_for("The model quoted this; it is not in the work:\nnowhere to be found")
    assert browser.evaluate("document.querySelectorAll('.kv-quote').length") == 0
    assert browser.evaluate("document.querySelector('p.kv-flag').textContent") == "⚑ works: evidence not found"
    press(browser, "1", "…", "Enter")
    wait_until_kept(browser, folder, 1)
    browser.wait_for("settled: works: evidence not found")


def test_feedback_that_was_written_for_other_points_is_said_to_be_and_left_out_by_a_key(
    browser: Browser, desk: DeskPage
) -> None:
    folder = graded_assignment(desk, 2)
    open_review(browser, desk, folder)
    wait_until_holds(browser, "Feedback on works", "Fine.")
    said = "This feedback was written for 2 of 3; you gave 1. Edit it, or leave it out."
    press(browser, "1")
    browser.wait_for(said)
    press(browser, "x")
    browser.wait_gone(said)
    press(browser, "Enter")
    [decided] = wait_until_kept(browser, folder, 1)
    assert (decided.points, decided.feedback) == (1, "")
    press(browser, "3", "…", "Enter")
    # Of the last one: there is nothing to go back from, and nothing is left to do.
    browser.wait_for(
        "For other points: feedback on It runs; the summary. There is none after this one, and none needs you any more."
    )
    assert wait_until_kept(browser, folder, 2)[1].feedback == "Fine."
    browser.wait_for("This feedback was written for 2 of 3; it is now 3.")


def test_a_summary_that_was_written_for_other_points_is_said_to_be_and_left_out_by_a_key(
    browser: Browser, desk: DeskPage
) -> None:
    folder = graded_assignment(desk, 1)
    open_review(browser, desk, folder)
    wait_until_holds(browser, "Feedback on works", "Fine.")
    assert "for other points" not in browser.text()
    press(browser, "1", "x")
    browser.wait_for("Summary\n⚑ for other points")
    state = "document.querySelector('.kv-head .state').innerText"
    assert browser.evaluate(state) == "Not saved yet."
    press(browser, "…", "Enter")
    browser.wait_for("Saved: student0_100_1_homework.py. For other points: the summary.")
    wait_until_kept(browser, folder, 1)
    wait_until(
        lambda: browser.evaluate(state) == "The grade is final. For other points: the summary.",
        "the mark is not denied",
        PATIENCE_S,
    )
    press(browser, "ArrowDown", "ArrowDown")
    browser.wait_for("This summary was written for 4 of 5. Edit it, or leave it out.")
    press(browser, "x")
    browser.wait_gone("This summary was written for 4 of 5")
    wait_until_holds(browser, "Reason for the change", "removed")
    press(browser, "Enter")
    wait_until_kept(browser, folder, 2)
    assert {each.criterion_id: each.feedback for each in read_overrides(folder)}[None] == ""


def test_points_that_cannot_be_given_are_not_taken_for_no_change(browser: Browser, desk: DeskPage) -> None:
    folder = graded_assignment(desk, 2)
    open_review(browser, desk, folder)
    wait_until_holds(browser, "Points for works", "2")
    browser.press("field", "Points for works")
    browser.evaluate("document.activeElement.select()")
    browser.call("Input.insertText", text="9")
    press(browser, "Enter")
    browser.wait_for("These points can't be given: Esc brings back what stands.")
    assert browser.evaluate("document.activeElement.ariaLabel") == "Points for works", "they can be typed again"
    browser.call("Input.dispatchKeyEvent", type="keyDown", key="Enter", windowsVirtualKeyCode=13, modifiers=2)
    browser.wait_for("These points can't be given: nothing is saved.")
    assert read_overrides(folder) == []


def test_the_open_criterion_stays_in_sight_and_the_page_never_scrolls(
    wide: Browser, desk: DeskPage, long_class: Path
) -> None:
    # Where the criteria stand below each other people scroll to grade (PrairieLearn/PrairieLearn#14633).
    open_review(wide, desk, long_class)
    rng = random.Random(1)
    keys = [*"0123456789.agjkz", *["ArrowDown", "ArrowUp"] * 8, "Enter"]
    for number in range(150):
        key = rng.choice(keys)
        press(wide, key)
        assert wide.evaluate(IN_VIEW), f"after {number} keys, and then {key}"
    assert not wide.evaluate(PAGE_SCROLLS)
    wide.press("css", '[data-row="part9"] > button')
    guidance = "document.querySelector('.kv-active .kv-text')?.textContent"
    wait_until(lambda: wide.evaluate(guidance) == GUIDANCE, "its guidance can be read", PATIENCE_S)


def test_the_work_jumps_to_the_quote_of_the_open_criterion(browser: Browser, desk: DeskPage) -> None:
    folder = graded_assignment(desk, 1)
    open_review(browser, desk, folder)
    now = "[...document.querySelectorAll('.kv-work .kv-now')].map((e) => e.innerText.trim())"
    wait_until(lambda: browser.evaluate(now) == ["return sum(values) / (len(values) + 0)"], "it is marked", PATIENCE_S)
    press(browser, "ArrowDown", "ArrowDown")
    assert browser.evaluate(now) == []


def test_space_scrolls_a_long_work_and_a_quote_beyond_what_is_shown_of_it_is_said_to_be(
    browser: Browser, desk: DeskPage, tmp_path: Path
) -> None:
    work = tiny_class(tmp_path / "class", 1) / "submissions"
    [path] = work.iterdir()
    path.write_text("".join(f"total = total + {number}\n" for number in range(3_000)) + "print(total)\n", "utf-8")
    folder = new_assignment(desk, "Long work", work, RUBRIC)
    rubric = Path(assignments.read_inputs(folder).rubric)
    assignment = plan(folder, request_from(load_settings(config=desk.config), work, rubric))
    answer(folder, assignment, [0], evidence="print(total)")
    open_review(browser, desk, folder)
    browser.wait_for("This is further on in the work than what is shown.")
    scrolled = "document.querySelector('.kv-work').scrollTop"
    press(browser, " ")
    assert browser.evaluate(scrolled) > 100
    browser.press("css", ".kv-grade .kv-faint button")
    browser.wait_gone("This is further on in the work than what is shown.")
    now = "document.querySelector('.kv-work .kv-now')?.innerText.trim()"
    wait_until(lambda: browser.evaluate(now) == "print(total)", "it is shown", PATIENCE_S)


def test_all_of_a_long_work_is_asked_for_where_it_is_cut_and_read_on_there(
    browser: Browser, desk: DeskPage, tmp_path: Path
) -> None:
    work = tiny_class(tmp_path / "class", 1) / "submissions"
    [path] = work.iterdir()
    path.write_text("print(total)\n" + "".join(f"total = total + {number}\n" for number in range(3_000)), "utf-8")
    folder = new_assignment(desk, "Long work", work, RUBRIC)
    rubric = Path(assignments.read_inputs(folder).rubric)
    assignment = plan(folder, request_from(load_settings(config=desk.config), work, rubric))
    answer(folder, assignment, [0], evidence="print(total)")
    open_review(browser, desk, folder)
    browser.wait_for("more, not shown Show all")
    browser.press("css", ".kv-work .work-cut button")
    browser.wait_gone("more, not shown")
    now = "document.querySelector('.kv-work .kv-now')?.innerText.trim()"
    assert browser.evaluate(now) == "print(total)"
    scrolled = "document.querySelector('.kv-work').scrollTop"
    assert browser.evaluate(scrolled) > 1_000, "what follows stands where the reader was"
    press(browser, "ArrowDown")
    wait_until(lambda: browser.evaluate(scrolled) < 1_000, "another criterion leads to its quote", PATIENCE_S)


def test_each_submission_opens_at_its_total(wide: Browser, desk: DeskPage, long_class: Path) -> None:
    open_review(wide, desk, long_class)
    scrolled = "document.querySelector('.kv-grade').scrollTop"
    press(wide, *["ArrowDown"] * 8)
    assert wide.evaluate(scrolled) > 100
    # Not by a key, which would pass over those that an earlier test has opened
    wide.evaluate("((s) => s.go(s.data.queues.all.find((id) => id !== s.shown)))(window.kvasirReview); 0")
    assert wide.evaluate(scrolled) == 0


def test_a_long_name_moves_no_button(browser: Browser, desk: DeskPage) -> None:
    open_review(browser, desk, graded_assignment(desk, 1))
    places = """
        (function (name) {
          const screen = window.kvasirReview;
          screen.data.people[screen.shown].name = name;
          screen.render();
          return [...document.querySelectorAll(".kv-bar button, .kv-bar select, .kv-split")].map((each) => {
            const {x, y} = each.getBoundingClientRect();
            return [x, y];
          });
        })"""
    assert browser.evaluate(f"{places}('Bo')") == browser.evaluate(f"{places}('Bo'.repeat(100))")
    assert browser.evaluate("document.querySelector('.kv-who').title") == "Bo" * 100


def test_s_chooses_what_is_shown_and_who_no_longer_belongs_there_is_counted_apart(
    browser: Browser, desk: DeskPage
) -> None:
    open_review(browser, desk, graded_assignment(desk, 3, doubtful=[0, 1]))
    wait_until(lambda: not browser.evaluate("window.kvasirReview.state().isBlank"), "the grade is there", PATIENCE_S)
    time.sleep(0.5)  # in which it is read
    press(browser, "a")
    browser.wait_for("2 of 2 shown (needs review: 1, others: 1, most doubts first) · in the class: 1 of 3 needs review")
    press(browser, "s", "4")
    browser.wait_for("2 of 3 shown (all, in the order of the files)")


def test_whoever_comes_back_from_another_section_begins_where_a_decision_is_needed(
    browser: Browser, desk: DeskPage
) -> None:
    open_review(browser, desk, graded_assignment(desk, 1, doubtful=[0]))
    active = "document.querySelector('.kv-active').dataset.row"
    press(browser, "ArrowDown")
    assert browser.evaluate(active) == "clear"
    browser.click("Results")
    browser.wait_for("Name contains")
    browser.click("Review")
    browser.wait_for("Final points")
    assert browser.evaluate(active) == "works"


def test_find_says_that_there_are_more_and_the_name_field_holds_what_is_written(
    browser: Browser, desk: DeskPage
) -> None:
    open_review(browser, desk, graded_assignment(desk, 11))
    assert value(browser, "Your name") == ACCOUNT
    press(browser, "/")
    browser.wait_for("2 more: type a part of the name.")
    browser.call("Input.insertText", text="student1")
    browser.wait_gone("more: type a part of the name.")


def test_a_desk_that_is_gone_is_said_and_nothing_that_was_decided_is_lost(tmp_path: Path) -> None:
    config = quick_model(tmp_path)
    with Browser(tmp_path / "browser") as browser:
        with DeskPage(tmp_path, config) as desk:
            folder = graded_assignment(desk, 4)
            open_review(browser, desk, folder)
            wait_until(
                lambda: browser.evaluate("[...window.kvasirReview.cache.values()].filter((e) => e.work).length") >= 3,
                "the next ones are there",
                PATIENCE_S,
            )
            desk.kill()
            press(browser, "1", "Enter", "0", "Enter")
            browser.wait_for("The desk does not answer. 2 of your decisions are kept in this browser")
            assert read_overrides(folder) == []
        with DeskPage(tmp_path, config, home=desk.home, port=desk.port):
            first, second = wait_until_kept(browser, folder, 2)
            assert (first.points, second.points, first.criterion_id) == (1, 0, "works")
            browser.wait_gone("The desk does not answer")


def test_what_a_closed_browser_could_not_send_is_sent_when_it_is_opened_again(tmp_path: Path) -> None:
    config = quick_model(tmp_path)
    with DeskPage(tmp_path, config) as desk:
        folder = graded_assignment(desk, 2)
        with Browser(tmp_path / "browser") as browser:
            open_review(browser, desk, folder)
            desk.kill()
            press(browser, "1", "Enter")
            wait_until(lambda: browser.evaluate("window.kvasirReview.acts.length") == 1, "it is noted", PATIENCE_S)
            browser.quit()  # one that is killed may not have written down yet what a page keeps
    with (
        DeskPage(tmp_path, config, home=desk.home, port=desk.port) as again,
        Browser(tmp_path / "browser") as browser,
    ):
        open_review(browser, again, folder)
        [override] = wait_until_kept(browser, folder, 1)
        assert override.points == 1


def test_two_tabs_send_what_is_unanswered_and_it_is_done_once(browser: Browser, desk: DeskPage) -> None:
    folder = graded_assignment(desk, 4)
    open_review(browser, desk, folder)
    browser.tab(1)
    open_review(browser, desk, folder)
    press(browser, "1", "Enter")
    browser.tab(0)
    press(browser, "j", "j")
    browser.wait_for("(len(values) + 2)")
    press(browser, "0", "Enter", "z")

    def lines() -> list[object]:
        path = folder / "reviews.jsonl"
        text = path.read_text("utf-8") if path.exists() else ""
        return [json.loads(line).get("points", "undone") for line in text.splitlines()]

    wait_until(lambda: len(lines()) == 3, "all three are done", PATIENCE_S)
    browser.tab(1)
    browser.reload()
    browser.wait_for("Final points")
    assert lines() == [1, 0, "undone"]


def keep_what_is_said(browser: Browser) -> None:
    """Keep what the desk says last in `window.said`."""
    browser.evaluate("""
        (function () {
          const screen = window.kvasirReview, receive = screen.receive.bind(screen);
          screen.receive = (...said) => { window.said = said; receive(...said); };
        })(); 0""")


def check_that_the_screen_stays(browser: Browser, desk: DeskPage, steps: str) -> None:
    """After `steps`, in which the person goes on and the element is made again, the screen is where they have gone.

    `steps` are JavaScript that sets `gone` to that place. `data` is what the desk said last.
    """
    open_review(browser, desk, graded_assignment(desk, 4))
    keep_what_is_said(browser)
    press(browser, "j", "k")
    wait_until_heard(browser)
    before, after = browser.evaluate(f"""
        (function () {{
          const screen = window.kvasirReview, [data, setStateValue, parent] = window.said;
          let gone;
          const makeAgain = (data) => {{
            screen.root.replaceWith(screen.root.cloneNode(true));
            screen.receive(data, setStateValue, parent);
          }};
          {steps}
          return [gone, screen.shown];
        }})()""")
    assert before == after
    wait_until_heard(browser)
    assert browser.evaluate("kvasirReview.shown") == after


def wait_until_heard(browser: Browser) -> None:
    heard = "!!window.said && kvasirReview.heard === kvasirReview.sent && !kvasirReview.isUntold"
    wait_until(lambda: browser.evaluate(heard), "the desk has heard all", PATIENCE_S)


def test_the_screen_follows_the_browsers_back_and_no_address_that_was_left(browser: Browser, desk: DeskPage) -> None:
    # Given a person who has gone on to the second submission
    open_review(browser, desk, graded_assignment(desk, 4))
    keep_what_is_said(browser)
    press(browser, "j")
    wait_until_heard(browser)
    # When a run of Streamlit that was asked for before still has the address of the first
    before, after = browser.evaluate("""
        (function () {
          const screen = window.kvasirReview, [data, setStateValue, parent] = window.said, gone = screen.shown;
          screen.receive({...data, current: screen.data.queues.all[0], led: true}, setStateValue, parent);
          return [gone, screen.shown];
        })()""")
    # Then the screen stays, and the desk is told so
    assert before == after
    wait_until_heard(browser)
    assert browser.evaluate("kvasirReview.shown") == after
    # And Back, which changes the address, leads there, and closes what is open about the second; Forward leads again
    press(browser, "/")
    browser.go_back()
    browser.wait_for("(len(values) + 0)")
    assert browser.evaluate("kvasirReview.over.hidden")
    wait_until_heard(browser)
    browser.evaluate("history.forward(); 0")
    browser.wait_for("(len(values) + 1)")


def test_a_place_that_the_screen_told_the_desk_before_does_not_lead_back_to_it(
    browser: Browser, desk: DeskPage
) -> None:
    # The person goes two on before the desk has answered about the first of them, and it has heard half a message.
    steps = """
        screen.move(1);
        screen.send();
        const told = screen.shown;
        history.replaceState(history.state, "", location.href.replace(/submission=[^&]*/, `submission=${told}`));
        screen.move(1);
        gone = screen.shown;
        makeAgain({...data, current: told, led: true});"""
    check_that_the_screen_stays(browser, desk, steps)


def test_digits_are_one_number_by_when_they_were_pressed_not_by_when_the_page_had_time(
    browser: Browser, desk: DeskPage
) -> None:
    open_review(browser, desk, graded_assignment(desk, 1, rubric_text=RUBRIC_OF_FOUR))
    press(browser, "ArrowDown")
    given = """
        (async function () {
          const screen = window.kvasirReview;
          screen.typeDigit("1", 1000);
          await new Promise((then) => setTimeout(then, 800));
          screen.typeDigit("0", 1300);
          const together = screen.current().points;
          screen.typeDigit("3", 2000);
          return [together, screen.current().points];
        })()"""
    assert browser.evaluate(given) == [10, 3]


def test_what_saving_leaves_open_is_said_before_it_is_saved(browser: Browser, desk: DeskPage) -> None:
    folder = graded_assignment(desk, 2, doubtful=[0])
    open_review(browser, desk, folder, "&show=all")
    browser.wait_for("Accept and next")
    press(browser, "1")
    browser.wait_for("Save and next")
    browser.wait_for(
        "It can be read has no decision and the grade stays blank; press a to save this and accept the rest."
    )
    browser.wait_for("Final points – / 5; 3 once all is decided")
    browser.wait_for("This feedback was written for 2 of 3; you gave 1.")
    press(browser, "ArrowDown")
    browser.wait_for("For other points: feedback on It runs.")
    press(browser, "1", "x")
    browser.wait_for("Final points 2 / 5")
    browser.wait_gone("If you save now")
    assert read_overrides(folder) == []


def test_what_the_last_one_still_needs_is_said_after_it_is_saved(browser: Browser, desk: DeskPage) -> None:
    folder = graded_assignment(desk, 1, doubtful=[0])
    open_review(browser, desk, folder)
    browser.wait_for("Accept and next")
    press(browser, "1", "x", "…", "Enter")
    browser.wait_for("Still to decide, and until then the grade is blank: It can be read.")
    browser.wait_for("There is none after this one; only this one still needs you.")
    wait_until_kept(browser, folder, 1)


def test_a_pressed_twice_decides_on_one_submission(browser: Browser, desk: DeskPage) -> None:
    folder = graded_assignment(desk, 2)
    open_review(browser, desk, folder)
    wait_until(lambda: not browser.evaluate("window.kvasirReview.state().isBlank"), "the grade is there", PATIENCE_S)
    time.sleep(0.5)  # in which it is read
    press(browser, "a", "a")
    browser.wait_for("Nothing is changed here: once more accepts it as it is.")
    time.sleep(0.5)
    press(browser, "a", "a")
    wait_until_kept(browser, folder, 2)


def test_a_long_doubt_is_two_lines_and_the_rest_behind_a_click(browser: Browser, desk: DeskPage) -> None:
    open_review(browser, desk, graded_assignment(desk, 1))
    shown = browser.evaluate("""
        (function () {
          const screen = window.kvasirReview, [id] = screen.cache.keys();
          screen.cache.get(id).state = "⚑ needs review: " + "speaks to the grader ".repeat(30);
          screen.render();
          const top = (each) => each.getBoundingClientRect().top;
          return [...document.querySelectorAll(".kv-head .state summary")].map((each) =>
            [each.textContent.length < 140, top(each) - top(each.closest(".state")) < 5]);
        })()""")
    assert shown == [[True, True]], "short, and beside the dot"


def test_a_screen_that_is_made_again_stays_where_the_person_has_gone(browser: Browser, desk: DeskPage) -> None:
    # Streamlit makes its element again before the desk has heard where the person has gone.
    check_that_the_screen_stays(browser, desk, "screen.move(1); gone = screen.shown; makeAgain(data);")


def test_a_comment_is_reused_and_changed_wherever_it_is_ones_own(browser: Browser, desk: DeskPage) -> None:
    folder = graded_assignment(desk, 4)
    open_review(browser, desk, folder)
    items = browser.evaluate("window.kvasirReview.data.queues.all")
    append_override(folder, Override(items[3], "works", 2, "It runs.", "kinder", "Bob"))
    browser.reload()
    browser.fill("Your name", "Ada")
    for number in range(2):
        browser.wait_for(f"(len(values) + {number})")
        press(browser, "c")
        browser.wait_for("Comments used here, people's first")
        press(browser, "1", "Enter")
    assert [each.feedback for each in wait_until_kept(browser, folder, 3)] == ["It runs."] * 3
    press(browser, "k", "k")
    browser.fill("Feedback on works", "It runs, and it is short.")
    browser.click("Save and next")
    browser.wait_for("For student0_100_1_homework.py you changed “It runs.” to “It runs, and it is short.”.")
    browser.wait_for("Decided by others, and not changed: student3_103_1_homework.py (Bob)")
    browser.press("css", '.kv-alert input[type="checkbox"]')
    browser.wait_for("Change it on 1 of 2")
    press(browser, "y")
    browser.wait_for("The comment is changed on 1 more.")
    wait_until_kept(browser, folder, 5)
    standing = {each.item_id: each.feedback for each in read_overrides(folder)}
    assert [standing[item] for item in (items[0], items[1], items[3])] == ["It runs, and it is short."] * 2 + [
        "It runs."
    ]

    # And what is undone, or was written for new points, is not offered for others
    press(browser, "k")
    browser.fill("Feedback on works", "Short.")
    browser.click("Save and next")
    browser.wait_for("to “Short.”")
    press(browser, "z")
    browser.wait_gone("to “Short.”")
    press(browser, "1")
    browser.fill("Feedback on works", "It stops early.")
    browser.click("Save and next")
    wait_until_kept(browser, folder, 5)
    assert browser.evaluate("window.kvasirReview.same ?? null") is None


def change_a_comment_of_four(browser: Browser, desk: DeskPage) -> tuple[Path, list[str]]:
    """A class of four with one comment of Ada's on all, and its ids; she has changed it on the first."""
    folder = graded_assignment(desk, 4)
    open_review(browser, desk, folder)
    items = browser.evaluate("window.kvasirReview.data.queues.all")
    for item in items:
        append_override(folder, Override(item, "works", 2, "It runs.", "kinder", "Ada"))
    browser.reload()
    browser.fill("Your name", "Ada")
    browser.wait_for("(len(values) + 0)")
    browser.fill("Feedback on works", "It runs, and it is short.")
    browser.click("Save and next")
    browser.wait_for("Change it on 0 of 3")
    return folder, items


def test_one_key_takes_back_a_comment_on_all_submissions_where_one_key_changed_it(
    browser: Browser, desk: DeskPage
) -> None:
    folder, items = change_a_comment_of_four(browser, desk)
    browser.click("Tick all")
    browser.wait_for("Change it on 3 of 3")
    browser.press("css", f'.kv-alert [data-key="same {items[2]}"]')
    browser.wait_for("Change it on 2 of 3")
    press(browser, " ")
    browser.wait_for("Change it on 3 of 3")
    press(browser, "y")
    browser.wait_for("The comment is changed on 3 more.")

    def comments() -> list[str | None]:
        standing = {each.item_id: each.feedback for each in read_overrides(folder)}
        return [standing[item] for item in items]

    wait_until(lambda: comments() == ["It runs, and it is short."] * 4, "all are changed", PATIENCE_S)
    press(browser, "z")
    browser.wait_for("Undone: the comment on 3 more.")
    wait_until(
        lambda: comments() == ["It runs, and it is short."] + ["It runs."] * 3, "three are taken back", PATIENCE_S
    )


def test_a_comment_is_changed_only_where_it_is_ticked(browser: Browser, desk: DeskPage) -> None:
    folder, items = change_a_comment_of_four(browser, desk)
    press(browser, "y")
    browser.wait_for("None is ticked: tick those that get the new comment, or press n.")
    widest = "Math.max(...[...document.querySelectorAll('.kv-alert input')].map((box) => box.offsetWidth))"
    assert browser.evaluate(widest) < 30, "each box stands beside its name"
    browser.press("css", f'.kv-alert [data-key="same {items[2]}"]')
    press(browser, "y")
    browser.wait_for("The comment is changed on 1 more.")
    wait_until_kept(browser, folder, 6)
    standing = {each.item_id: each.feedback for each in read_overrides(folder)}
    assert [standing[item] for item in items] == ["It runs, and it is short.", "It runs."] * 2


def test_a_summary_is_never_offered_for_other_submissions(browser: Browser, desk: DeskPage) -> None:
    folder = graded_assignment(desk, 3)
    open_review(browser, desk, folder)
    wait_until_holds(browser, "Feedback on works", "Fine.")
    press(browser, "ArrowDown", "ArrowDown")
    browser.fill("Summary", "You forgot the empty list.")
    browser.click("Save and next")
    [decided] = wait_until_kept(browser, folder, 1)
    assert (decided.criterion_id, decided.feedback) == (None, "You forgot the empty list.")
    assert browser.evaluate("window.kvasirReview.same ?? null") is None


def test_one_criterion_is_gone_through_without_names_and_in_shares(browser: Browser, desk: DeskPage) -> None:
    folder = graded_assignment(desk, 7)
    open_review(browser, desk, folder, "&show=all")
    browser.evaluate("window.kvasirReview.choose({order: 'clear', share: '2/3', blind: true}); 0")
    assert browser.evaluate("window.kvasirReview.queue.length") == 2, "a third of seven"
    chosen = "document.querySelector('.kv-order').selectedOptions[0].textContent"
    assert browser.evaluate(chosen) == "only It can be read"
    assert "student" not in browser.evaluate("document.querySelector('.kv-who').innerText")
    for _ in range(2):
        wait_until(
            lambda: not browser.evaluate("window.kvasirReview.state().isBlank"), "the grade is there", PATIENCE_S
        )
        press(browser, "1", "Enter")
    decided = wait_until_kept(browser, folder, 2)
    assert [(each.criterion_id, each.points) for each in decided] == [("clear", 1)] * 2


def test_what_the_screen_has_of_a_class_is_not_sent_to_it_again(browser: Browser, desk: DeskPage) -> None:
    folder = graded_assignment(desk, 4, doubtful=[0, 1])
    open_review(browser, desk, folder)
    press(browser, "1", "Enter")
    wait_until_kept(browser, folder, 1)
    assert browser.evaluate("'people' in window.kvasirReview.data.parts") is False
    assert browser.evaluate("Object.keys(window.kvasirReview.data.people).length") == 4
    browser.click("Results")
    browser.wait_for("Name contains")
    browser.click("Review")
    browser.wait_for("Final points")
    assert browser.evaluate("window.kvasirReview.data.queues.all.length") == 4


def test_a_row_of_the_table_is_opened_by_a_click_and_by_enter(browser: Browser, desk: DeskPage) -> None:
    folder = graded_assignment(desk, 3)
    browser.open(desk.at(folder, "Results"))
    browser.wait_for("student1_101_1_homework.py")
    browser.press("css", ".kv-class tbody tr:nth-child(2) td:nth-child(4)")
    browser.wait_for("(len(values) + 1)")
    wait_until(lambda: "submission=" in browser.evaluate("location.search"), "the address says whose", PATIENCE_S)
    browser.go_back()
    browser.wait_for("Name contains")
    browser.press("css", ".kv-class tbody tr:nth-child(1) input")
    can_regrade = (
        "[...document.querySelectorAll('button')].some((e) => e.innerText === 'Regrade selected' && !e.disabled)"
    )
    wait_until(lambda: browser.evaluate(can_regrade), "what is chosen can be graded again", PATIENCE_S)
    assert browser.evaluate("document.activeElement.dataset.key").startswith("box "), "it is left where it was"
    browser.evaluate("document.querySelector('.kv-class tbody tr:nth-child(2) button').focus()")
    press(browser, "ArrowDown")
    browser.call("Input.dispatchKeyEvent", type="keyDown", key="Enter", text="\r", windowsVirtualKeyCode=13)
    browser.wait_for("(len(values) + 2)")
    wait_until_holds(browser, "Points for works", "2")


def test_the_table_of_a_class_is_whole_on_a_wide_screen(wide: Browser, desk: DeskPage) -> None:
    criteria = [f"n_share_of_orders_churned_{number}" for number in range(4)]
    rubric = "title: Means\ncriteria:\n" + "".join(
        f"  - {{id: {id}, title: {id}, points: 3, model: code, guidance: One for each step.}}\n" for id in criteria
    )
    folder = graded_assignment(desk, 3, doubtful=[0, 1], rubric_text=rubric)
    wide.open(desk.at(folder, "Results"))
    wide.wait_for("student0_100_1_homework.py")
    widths = "((table) => [table.scrollWidth, table.clientWidth])(document.querySelector('.kv-class'))"
    scrolled, seen = wide.evaluate(widths)
    assert scrolled <= seen


# --- small, dark, large letters, no eyes, no network


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_four_criteria_fit_a_phone_with_a_change_in_hand(desk: DeskPage, tmp_path: Path, scheme: str) -> None:
    folder = graded_assignment(desk, 4, doubtful=[0], rubric_text=RUBRIC_OF_FOUR)
    with Browser(tmp_path / "phone", 390, 844) as phone:
        phone.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
        open_review(phone, desk, folder)
        for criterion in ("works", "fast", "safe", "clear"):
            phone.press("css", f'[data-row="{criterion}"] > button')
            phone.fill(f"Points for {criterion}", "1")
            wait_until_holds(phone, "Reason for the change", "the work shows less than the model saw")
            height = phone.evaluate("document.querySelector('[data-testid=stMain]').scrollHeight")
            assert height <= 1_200, f"{height} px with {criterion} open"
            assert phone.evaluate(ON_A_PHONE) == [0, []], criterion
        assert axe_finds(phone) == []


def test_at_twice_the_size_nothing_scrolls_sideways_and_keys_keep_the_open_criterion_in_sight(
    desk: DeskPage, tmp_path: Path
) -> None:
    # 1440 by 900 at 200 %: half as many of the units that a page is laid out in (WCAG 2.2, 1.4.4 and 1.4.10).
    folder = graded_assignment(desk, 4, doubtful=[0], rubric_text=RUBRIC_OF_FOUR)
    head = "document.querySelector('.kv-active > button').getBoundingClientRect()"
    with Browser(tmp_path / "large", 720, 450) as large:
        open_review(large, desk, folder)
        for key in ["ArrowDown"] * 4 + ["ArrowUp"] * 4 + ["1", "2"]:
            press(large, key)
            assert large.evaluate(f"{head}.top >= 0 && {head}.bottom <= innerHeight"), key
        assert large.evaluate(ON_A_PHONE) == [0, []]
        assert axe_finds(large) == []


def test_a_screen_reader_is_told_which_criterion_is_open_with_which_points(browser: Browser, desk: DeskPage) -> None:
    # What is said of a change elsewhere on the page is a live region's (WAI-ARIA 1.2, status).
    folder = graded_assignment(desk, 2, doubtful=[0], rubric_text=RUBRIC_OF_FOUR)
    open_review(browser, desk, folder)
    spoken = "document.querySelector('.kv-spoken[role=status]').textContent"
    press(browser, "ArrowDown")
    assert browser.evaluate(spoken).startswith("What fast asks for: 2 of 10.")
    press(browser, "1", "0")
    assert browser.evaluate(spoken).startswith("What fast asks for: 10 of 10.")
    unnamed = [
        node["role"]["value"]
        for node in browser.call("Accessibility.getFullAXTree")["nodes"]
        if node.get("role", {}).get("value") in ("button", "textbox", "combobox", "checkbox", "spinbutton")
        and not node.get("ignored")
        and not node.get("name", {}).get("value")
    ]
    assert unnamed == []


def test_nothing_is_loaded_from_elsewhere(browser: Browser, desk: DeskPage) -> None:
    folder = graded_assignment(desk, 2, doubtful=[0], rubric_text=RUBRIC_OF_FOUR)
    open_review(browser, desk, folder)
    press(browser, "1", "Enter")
    wait_until_kept(browser, folder, 1)
    addresses = browser.evaluate("performance.getEntriesByType('resource').map((entry) => entry.name)")
    assert addresses
    assert [each for each in addresses if not each.startswith((desk.url, "data:", "blob:"))] == []


def test_every_key_of_the_list_does_something_or_says_why_not(browser: Browser, desk: DeskPage) -> None:
    folder = graded_assignment(desk, 1, rubric_text=RUBRIC_OF_FOUR)
    open_review(browser, desk, folder)
    said = "document.querySelector('.kv-status').textContent"
    for key in ("-", "z", "r", "c", "y", "n", "g", "j", "k", "ArrowUp", " "):
        browser.evaluate("window.kvasirReview.say(''); 0")
        press(browser, key)
        assert browser.evaluate(said), key
    press(browser, *["ArrowDown"] * 5)
    for key in ("ArrowDown", "1", ".", "-"):
        browser.evaluate("window.kvasirReview.say(''); 0")
        press(browser, key)
        assert browser.evaluate(said), key
    press(browser, "?")
    browser.wait_for("accept the rest of the grade, and on to the next")
    cut = "(({scrollHeight, clientHeight}) => scrollHeight - clientHeight)(document.querySelector('.kv-over > div'))"
    assert browser.evaluate(cut) <= 0, "the list is whole"


def test_whoever_scrolls_the_criteria_is_not_led_back_until_they_press_a_key(
    wide: Browser, desk: DeskPage, long_class: Path
) -> None:
    open_review(wide, desk, long_class)
    press(wide, "ArrowDown")
    wide.call("Input.dispatchMouseEvent", type="mouseWheel", x=1200, y=500, deltaX=0, deltaY=600)
    scrolled = "document.querySelector('.kv-grade').scrollTop"
    wait_until(lambda: wide.evaluate(scrolled) > 100, "the criteria are scrolled", PATIENCE_S)
    time.sleep(6)  # in which the desk draws the screen again
    assert wide.evaluate(scrolled) > 100
    press(wide, "ArrowDown")
    assert wide.evaluate(IN_VIEW)
