"""The desk as browsers are used: reloaded, gone back in, two at a time, on a phone."""

import json
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from desk.assignments import grading_work, read_inputs
from grading.export import Request, add_requests, read_requests, save_reply
from grading.reviews import Override, append_override
from tests.support.browser import PATIENCE_S, Browser
from tests.support.desk_page import (
    ON_A_PHONE,
    DeskPage,
    axe_finds,
    graded_assignment,
    new_assignment,
    type_key,
    wait_until_holds,
)
from tests.support.homework import RUBRIC, tiny_class
from tests.support.processes import ModelEntry, config_text
from tests.support.waiting import wait_until

pytestmark = pytest.mark.system

SECTIONS = {
    "Grade": "Look before you grade",
    "Results": "Name contains",
    "Review": "Accept and next",
    "Like answers": "like no other",
    "Regrade": "Rubric and instructions",
    "Agreement": "compares the model's points",
    "Bound": "can be drawn",
    "Export": "Make the file",
    "Fleet": "Nothing is running",
}


def wait_until_shown(browser: Browser, student: int) -> None:
    """Return when the work of this student of `tiny_class` is on the page, and can be reviewed."""
    browser.wait_for(f"(len(values) + {student})")
    # The page shows it at once; the address, and with it the browser's Back, follows when the desk has heard of it.
    followed = "new URLSearchParams(location.search).get('submission') === window.kvasirReview?.shown"
    wait_until(lambda: browser.evaluate(followed), "the address says whose", PATIENCE_S)


def section(browser: Browser) -> str:
    """Which is chosen in the side bar; "" while none is drawn."""
    chosen = "document.querySelector('[data-testid=stRadioOption][data-selected]')"
    return str(browser.evaluate(f"({chosen} || {{innerText: ''}}).innerText.trim()"))


def open_review(browser: Browser, desk: DeskPage, folder: Path, name: str = "") -> None:
    browser.open(desk.at(folder, "Review"))
    browser.wait_for("Final points")
    if name:
        browser.fill("Your name", name)


def find(browser: Browser, name: str) -> None:
    """Go to the submission of this name, by the review screen's search."""
    type_key(browser, "/")
    browser.call("Input.insertText", text=name)
    browser.key("Enter", 13)


def open_row(browser: Browser, criterion: str) -> None:
    """Open a criterion of the review screen; "" is the summary."""
    browser.press("css", f'[data-row="{criterion}"] > button')


def change(browser: Browser, points: int, reason: str) -> None:
    browser.fill("Points for works", str(points))
    browser.fill("Reason for the change", reason)


def wait_until_decided(folder: Path, *points: float | None) -> None:
    """Return when the record holds just these points, in this order."""
    wait_until(
        lambda: [row["points"] for row in decisions(folder)] == list(points),
        f"{list(points)} are decided, not {[row['points'] for row in decisions(folder)]}",
        PATIENCE_S,
    )


def decisions(folder: Path) -> list[dict[str, object]]:
    path = folder / "reviews.jsonl"
    return [json.loads(line) for line in path.read_text("utf-8").splitlines()] if path.exists() else []


# --- reload, Back, links


def test_a_reload_in_the_middle_of_any_page_stays_there(browser: Browser, desk: DeskPage) -> None:
    folder = graded_assignment(desk, 3)
    browser.open(desk.url)
    browser.wait_for("New assignment")
    browser.reload()
    browser.wait_for("New assignment")
    browser.open(desk.at(folder, "Grade"))
    browser.wait_for(SECTIONS["Grade"])
    for name, words in SECTIONS.items():
        browser.click(name)
        browser.wait_for(words)
        browser.reload()
        browser.wait_for(words)
        wait_until(lambda name=name: section(browser) == name, f"the section is {name}", PATIENCE_S)
        assert browser.evaluate("new URLSearchParams(location.search).get('assignment')") == str(folder)


def test_a_class_is_drawn_and_each_picture_says_what_it_shows(browser: Browser, desk: DeskPage) -> None:
    browser.open(desk.at(graded_assignment(desk, 3), "Results"))
    browser.wait_for("The class in pictures")
    pictures = "[...document.querySelectorAll('img')].filter((e) => e.naturalWidth > 0).map((e) => e.alt)"
    wait_until(lambda: browser.evaluate(pictures), "a picture is shown", PATIENCE_S)
    assert browser.evaluate(pictures)[0].startswith("Submissions by points. by the model: 0 ×0")


def test_a_reload_keeps_filters_and_page(browser: Browser, desk: DeskPage) -> None:
    folder = graded_assignment(desk, 30)
    browser.open(desk.at(folder, "Results"))
    browser.fill("Name contains", "student")
    browser.fill("Page", "2")
    wait_until(lambda: "page=2" in browser.evaluate("location.search"), "the address says the page", PATIENCE_S)
    browser.reload()
    wait_until_holds(browser, "Name contains", "student")
    wait_until_holds(browser, "Page", "2")
    browser.fill("Name contains", "student1_")
    browser.wait_gone("Page")
    browser.reload()
    wait_until_holds(browser, "Name contains", "student1_")


def test_a_reload_stays_on_its_student(browser: Browser, desk: DeskPage) -> None:
    folder = graded_assignment(desk, 3)
    open_review(browser, desk, folder)
    browser.click("Next")
    wait_until_shown(browser, 1)
    browser.reload()
    wait_until_shown(browser, 1)
    assert "student1" not in browser.evaluate("location.search"), "an address is passed on: it names nobody"


def test_back_and_forward_show_what_was_seen(browser: Browser, desk: DeskPage) -> None:
    folder = graded_assignment(desk, 3)
    browser.open(desk.at(folder, "Results"))
    browser.fill("Name contains", "student")
    browser.click("Review")
    wait_until_shown(browser, 0)
    for student in (1, 2):
        browser.click("Next")
        wait_until_shown(browser, student)
    browser.go_back()
    wait_until_shown(browser, 1)
    browser.go_back()
    wait_until_shown(browser, 0)
    browser.go_back()
    browser.wait_for(SECTIONS["Results"])
    wait_until_holds(browser, "Name contains", "student")
    wait_until(lambda: section(browser) == "Results", "the section is Results", PATIENCE_S)
    browser.go_back()
    wait_until_holds(browser, "Name contains", "")
    browser.go_back(-3)
    wait_until_shown(browser, 1)


def test_back_pressed_again_before_the_page_is_drawn_goes_back_twice(browser: Browser, desk: DeskPage) -> None:
    folder = graded_assignment(desk, 5)
    open_review(browser, desk, folder)
    for student in (1, 2, 3, 4):
        browser.click("Next")
        wait_until_shown(browser, student)
    for student in (2, 0):
        browser.go_back()
        browser.go_back()
        wait_until_shown(browser, student)


def test_a_place_that_back_has_left_is_not_told_to_the_desk(browser: Browser, desk: DeskPage) -> None:
    open_review(browser, desk, graded_assignment(desk, 3))
    for student in (1, 2):
        browser.click("Next")
        wait_until_shown(browser, student)
    rest = "window.kvasirReview.heard === window.kvasirReview.sent && !window.kvasirReview.isUntold"
    wait_until(lambda: browser.evaluate(f"{rest} && !window.kvasirReview.hasMoved"), "all is told", PATIENCE_S)
    told = browser.evaluate("""
        (function () {
          const screen = window.kvasirReview, told = [], shown = screen.shown, data = screen.data;
          const [first, second] = data.queues.all;
          const tell = (name, message) => told.push(message.submission);
          screen.setStateValue = tell;
          history.replaceState({}, "", `?submission=${first}`);  // as Back twice, of which the desk has heard one
          screen.receive({...data, current: second, led: true, parts: {}}, tell, document);
          told.push(screen.isUntold, screen.shown === shown);
          screen.send();
          screen.move(-1);
          screen.send();
          return told.map((each) => each === second ? "second" : each);
        })()""")
    assert told == [False, True, "", "second"], "who goes on is where they have gone"


def test_back_shows_what_was_typed_just_before_leaving(browser: Browser, desk: DeskPage) -> None:
    folder = graded_assignment(desk, 3)
    browser.open(desk.at(folder, "Results"))
    browser.press("field", "Name contains")
    browser.call("Input.insertText", text="student")
    browser.click("Review")  # the field is left by this very press
    wait_until_shown(browser, 0)
    browser.go_back()
    browser.wait_for(SECTIONS["Results"])
    wait_until_holds(browser, "Name contains", "student")


def test_an_address_opens_only_what_the_desk_knows(browser: Browser, desk: DeskPage, tmp_path: Path) -> None:
    elsewhere = graded_assignment(desk, 1)
    moved = tmp_path / "elsewhere"
    elsewhere.rename(moved)
    for folder in (moved, tmp_path / "nowhere"):
        browser.open(desk.at(folder, "Review"))
        browser.wait_for(f"This desk has no assignment '{folder.name}'")
        browser.wait_for("New assignment")
    folder = graded_assignment(desk, 2)
    browser.open(desk.at(folder, "Review") + "&submission=nobody&show=nothing&page=x&order=%27&state=%3Cb%3E")
    browser.wait_for("(len(values) + 0)")
    assert "Traceback" not in desk.text()


def test_every_page_lists_its_keys(browser: Browser, desk: DeskPage) -> None:
    folder = graded_assignment(desk, 2)
    pages = {desk.url: "the next field or button", desk.at(folder, "Export"): "the next field or button"}
    pages |= {desk.at(folder, "Results"): "the name in the next row", desk.at(folder, "Bound"): "so many points"}
    for address, words in pages.items():
        browser.open(address)
        browser.wait_for("Keys")
        assert words not in browser.text()
        type_key(browser, "?")
        browser.wait_for(words)
        type_key(browser, "?")
        browser.wait_gone(words)


# --- several windows


def test_two_tabs_on_one_assignment_keep_their_own_place(browser: Browser, desk: DeskPage) -> None:
    folder = graded_assignment(desk, 3)
    open_review(browser, desk, folder)
    browser.click("Next")
    wait_until_shown(browser, 1)
    browser.tab(1)
    browser.open(desk.at(folder, "Results"))
    browser.wait_for(SECTIONS["Results"])
    browser.tab(0)
    browser.reload()
    wait_until_shown(browser, 1)
    change(browser, 3, "I ran it")
    browser.click("Save and next")
    wait_until_decided(folder, 3)
    browser.tab(1)
    browser.click("Needs review only")
    browser.wait_for("1 reviewed")


def test_of_two_people_the_second_is_shown_both_decisions_and_asked(
    browser: Browser, desk: DeskPage, tmp_path: Path
) -> None:
    folder = graded_assignment(desk, 2)
    with Browser(tmp_path / "other") as other:
        open_review(browser, desk, folder)
        wait_until(lambda: "submission=" in browser.evaluate("location.search"), "the address says whose", PATIENCE_S)
        other.open(browser.evaluate("location.href"))
        other.wait_for("Somebody else has this one open")
        other.wait_for("Final points")
        change(browser, 3, "I ran it")
        change(other, 1, "It fails on none")
        browser.click("Save and next")
        wait_until_decided(folder, 3)

        other.click("Save and next")  # and is on the next submission when the answer comes
        other.wait_for("Not saved yet: student0")
        other.click("student0_100_1_homework.py")
        for words in ("Somebody has decided on this submission", "works: 3 — I ran it", "works: 1 — It fails on none"):
            other.wait_for(words)
        wait_until_decided(folder, 3)

        find(browser, "student0")  # nobody is led to what somebody else has open
        open_row(browser, "")
        browser.fill("Summary", "Well done.")
        browser.fill("Reason for the change", "kinder")
        other.click("Mine replaces it")
        other.wait_gone("Somebody has decided")
        wait_until_decided(folder, 3, 1)

        browser.wait_for("Somebody has decided on this submission")  # while the change was being made
        browser.click("Keep theirs")
        browser.wait_gone("Somebody has decided")
        open_row(browser, "works")
        wait_until_holds(browser, "Points for works", "1")
        wait_until_decided(folder, 3, 1)


def test_who_only_looked_does_not_settle_what_was_decided_meanwhile(
    browser: Browser, desk: DeskPage, tmp_path: Path
) -> None:
    folder = graded_assignment(desk, 1, doubtful=[0])
    with Browser(tmp_path / "other") as other:
        open_review(browser, desk, folder)
        open_review(other, desk, folder)
        change(browser, 1, "half of it is missing")
        browser.click("Save and next")
        wait_until_decided(folder, 1)
        time.sleep(0.5)  # in which the other one reads
        other.click("Accept and next")
        other.wait_for("Somebody has decided on this submission")
        other.wait_for("accepted as it is")
        other.click("Keep theirs")
        open_row(other, "works")
        wait_until_holds(other, "Points for works", "1")
        assert [row["criterion_id"] for row in decisions(folder)] == ["works"]

        change(other, 0, "none of it runs")
        other.wait_for("Not saved yet.")
        browser.click("Undo")
        browser.wait_for("Undone: what you saved for student0")
        wait_until(lambda: len(decisions(folder)) == 2, "it is undone", PATIENCE_S)
        other.click("Save and next")
        other.wait_for("works: the decision was undone")


# --- names


def test_a_name_is_asked_once_kept_in_the_browser_and_in_no_address(browser: Browser, desk: DeskPage) -> None:
    folder = graded_assignment(desk, 2)
    open_review(browser, desk, folder, "Ada Lovelace")
    wait_until(lambda: "Lovelace" in browser.evaluate("document.cookie"), "the browser keeps the name", PATIENCE_S)
    browser.reload()
    wait_until_holds(browser, "Your name", "Ada Lovelace")
    change(browser, 3, "I ran it")
    browser.click("Save and next")
    wait_until_decided(folder, 3)
    assert [row["by"] for row in decisions(folder)] == ["Ada Lovelace"]
    assert "Lovelace" not in browser.evaluate("location.href")
    browser.tab(1)
    open_review(browser, desk, folder)
    wait_until_holds(browser, "Your name", "Ada Lovelace")
    browser.fill("Your name", "</script><b>Bobby; path=/x")
    wait_until(lambda: "Bobby" in browser.evaluate("document.cookie"), "the browser keeps the name", PATIENCE_S)
    browser.reload()
    wait_until_holds(browser, "Your name", "</script><b>Bobby; path=/x")


# --- what is not saved


@pytest.mark.parametrize("leave", ["Next", "Previous", "Results", "back"])
def test_unsaved_changes_stay_where_they_were_made_and_are_said_elsewhere(
    browser: Browser, desk: DeskPage, leave: str
) -> None:
    folder = graded_assignment(desk, 3)
    open_review(browser, desk, folder)
    browser.click("Next")
    wait_until_shown(browser, 1)
    browser.fill("Feedback on works", "Half of it.")
    browser.wait_for("Not saved yet.")

    browser.go_back() if leave == "back" else browser.click(leave)
    if leave == "Results":
        browser.wait_for("Name contains")
        browser.click("Review")
    else:
        browser.wait_for("Not saved yet: student1")
        assert decisions(folder) == [], "nobody has said that they count"
        browser.click("student1_101_1_homework.py")
    wait_until_shown(browser, 1)
    wait_until_holds(browser, "Feedback on works", "Half of it.")
    browser.fill("Reason for the change", "I ran it")
    browser.click("Save and next")
    wait_until_decided(folder, 2)
    assert [(row["feedback"], row["reason"]) for row in decisions(folder)] == [("Half of it.", "I ran it")]


def test_discarding_leaves_nothing_behind(browser: Browser, desk: DeskPage) -> None:
    folder = graded_assignment(desk, 2)
    open_review(browser, desk, folder)
    change(browser, 1, "too much")
    browser.click("Next")
    wait_until_shown(browser, 1)
    browser.click("student0_100_1_homework.py")
    browser.click("Undo")
    browser.wait_for("Discarded.")
    browser.reload()
    wait_until_shown(browser, 0)
    wait_until_holds(browser, "Points for works", "2")
    assert decisions(folder) == []


def test_a_reload_keeps_what_is_typed_even_in_the_field_that_is_being_typed_in(
    browser: Browser, desk: DeskPage
) -> None:
    folder = graded_assignment(desk, 2)
    open_review(browser, desk, folder)
    open_row(browser, "clear")
    browser.press("field", "Feedback on clear")
    browser.evaluate("document.activeElement.select()")
    browser.call("Input.insertText", text="Half a sen")
    browser.reload()
    browser.wait_for("Not saved yet.")
    open_row(browser, "clear")
    wait_until_holds(browser, "Feedback on clear", "Half a sen")


# --- what waits for a person


def test_of_a_class_the_few_that_need_review_are_shown_and_the_last_decision_makes_it_final(
    browser: Browser, desk: DeskPage
) -> None:
    students = sorted(range(45), key=lambda number: f"{number}_")  # as their files are
    folder = graded_assignment(desk, 45, doubtful=range(10, 18))
    browser.open(desk.at(folder, "Results"))
    browser.wait_for("8 of 45 need review")
    browser.click("Review")
    wait_until_shown(browser, students[10])
    wait_until_holds(browser, "Show", "needs review")
    browser.wait_for("in the class: 8 of 45 need review")
    for number in range(11, 18):
        browser.click("Next")
        wait_until_shown(browser, students[number])
    assert browser.evaluate(
        "[...document.querySelectorAll('button')].find((e) => e.innerText.startsWith('Next')).disabled"
    )

    browser.fill("Feedback on works", "Yes.")
    browser.fill("Reason for the change", "I ran it")
    browser.click("Save and next")
    browser.wait_for("needs review: clear: evidence not found")
    assert "final" not in browser.text().replace("Final points", "")
    open_row(browser, "clear")
    browser.fill("Feedback on clear", "Yes.")
    browser.fill("Reason for the change", "I read it")
    browser.click("Save and next")
    browser.wait_for("The grade is final")
    wait_until_shown(browser, students[17])
    browser.wait_for("in the class: 7 of 45 need review")
    assert browser.text().count("need review") == 1, "one place counts"
    browser.click("Results")
    browser.wait_for("left blank: 7 of 45 need review")  # in the side bar


def test_a_class_is_reviewed_by_keyboard_alone(browser: Browser, desk: DeskPage) -> None:
    folder = graded_assignment(desk, 3, doubtful=[1, 2])
    open_review(browser, desk, folder)
    wait_until_shown(browser, 1)
    type_key(browser, "1")
    browser.key("ArrowDown", 40)
    type_key(browser, "0")
    browser.wait_for("Not saved yet.")
    type_key(browser, "r")
    browser.wait_for("Another reason …")
    type_key(browser, "2")
    browser.call("Input.insertText", text="I read it")
    browser.key("Enter", 13)
    time.sleep(0.5)  # Enter pressed twice at once would only end the field
    browser.key("Enter", 13)
    wait_until_shown(browser, 2)
    wait_until_decided(folder, 1, 0)
    first, second = (row["reason"] for row in decisions(folder))
    assert "less than the model saw" in first, "of the list the first, unless another is chosen"
    assert second == "I read it"

    type_key(browser, "z")
    browser.wait_for("Undone: what you saved for student1")
    wait_until_shown(browser, 1)
    wait_until_holds(browser, "Points for works", "2")
    wait_until(lambda: len(decisions(folder)) == 3, "an undo is a line of its own", PATIENCE_S)

    type_key(browser, "j")
    wait_until_shown(browser, 2)
    time.sleep(0.5)  # in which it is read
    type_key(browser, "a")
    browser.wait_for("The grade is final")
    type_key(browser, "g")
    wait_until_shown(browser, 1)
    type_key(browser, "?")
    browser.wait_for("the next, or the previous, submission")
    browser.key("Escape", 27)
    type_key(browser, "e")
    focused = "document.activeElement.ariaLabel"
    wait_until(lambda: browser.evaluate(focused) == "Feedback on works", "feedback can be written", PATIENCE_S)
    browser.key("Escape", 27)
    find(browser, "dent0")
    wait_until_shown(browser, 0)


def test_a_comma_in_a_number_is_its_point_and_not_passed_over(browser: Browser, desk: DeskPage) -> None:
    folder = graded_assignment(desk, 1)
    open_review(browser, desk, folder)
    browser.press("field", "Points for works")
    browser.evaluate("document.activeElement.select()")
    for key, code in ("1", 49), (",", 188), ("5", 53):
        browser.call("Input.dispatchKeyEvent", type="keyDown", key=key, text=key, windowsVirtualKeyCode=code)
        browser.call("Input.dispatchKeyEvent", type="keyUp", key=key, windowsVirtualKeyCode=code)
    browser.key("Enter", 13)
    browser.wait_for("Not saved yet.")
    browser.click("Save and next")
    wait_until_decided(folder, 1.5)


def test_a_request_is_read_in_decided_on_and_replied_to(browser: Browser, desk: DeskPage, tmp_path: Path) -> None:
    # Given a class, and a table of requests as a form collected them
    folder = graded_assignment(desk, 3)
    name = sorted(path.name for path in Path(read_inputs(folder).submissions).iterdir())[1]
    asked = tmp_path / "asked.csv"
    asked.write_text(f'submission,criterion,request\n{name},works,"<b>I did</b> run it, see cell 2"\n', "utf-8")
    browser.open(desk.at(folder, "Results"))
    browser.wait_for("Name contains")
    browser.press("css", ".st-key-requests label")
    browser.upload("CSV", asked)
    browser.wait_for("1 request read, 1 of them new")
    browser.wait_for("1 submission with a request that waits for its reply")

    # When it is gone to, and its criterion decided on
    browser.open(desk.at(folder, "Review"))
    browser.wait_for("Asked for another look about works; points then: 2")
    browser.wait_for("in the class: 1 request waits for a reply")
    browser.wait_for("<b>I did</b> run it, see cell 2")
    wait_until_shown(browser, 1)

    # Then a reply that was begun is there when somebody comes back from another section
    browser.fill("Reply, which the student gets", "It runs. Thank you.")
    browser.click("Export")
    browser.wait_for("Make the file")
    browser.click("Review")
    wait_until_holds(browser, "Reply, which the student gets", "It runs. Thank you.")
    browser.click("Reply")
    browser.wait_for("Replied")
    browser.wait_for("It runs. Thank you.")
    browser.wait_gone("1 request waits for a reply")

    # and one of another student is entered by hand
    browser.click("Decisions, requests, prompts")
    browser.fill("The student's words", "And the plot?")
    browser.click("Enter it")
    browser.click("⚑ Asked for another look")
    browser.wait_for("Asked for another look; points then: 4")
    lines = [json.loads(line) for line in (folder / "requests.jsonl").read_text("utf-8").splitlines()]
    assert [line.get("text") or line.get("reply") for line in lines] == [
        "<b>I did</b> run it, see cell 2",
        "It runs. Thank you.",
        "And the plot?",
    ]

    browser.open(desk.at(folder, "Export"))
    browser.wait_for("Make the file")


def test_of_two_who_reply_to_one_request_the_second_is_shown_the_first_ones_reply(
    browser: Browser, desk: DeskPage, tmp_path: Path
) -> None:
    folder = graded_assignment(desk, 2)
    jobs = json.loads((folder / "batch.json").read_text("utf-8"))["jobs"]
    add_requests(folder, [Request("1" * 12, jobs[0]["item_id"].rpartition(".")[0], "works", "I ran it", 2)])
    with Browser(tmp_path / "other") as other:
        open_review(browser, desk, folder, "Ada")
        open_review(other, desk, folder, "Bob")
        for each in (browser, other):
            each.wait_for("Asked for another look about works")
        other.fill("Reply, which the student gets", "It stands.")
        browser.fill("Reply, which the student gets", "It runs.")
        browser.click("Reply")
        browser.wait_for("Replied (Ada)")

        other.click("Reply")
        other.wait_for("somebody else has replied in the meantime (Ada)")
        other.wait_for("It runs.")
        wait_until_holds(other, "Reply, which the student gets", "It stands.")
        assert [(request.answer.by, request.answer.reply) for request in read_requests(folder) if request.answer] == [
            ("Ada", "It runs.")
        ]


def test_nobody_is_led_to_what_a_colleague_has_open(browser: Browser, desk: DeskPage, tmp_path: Path) -> None:
    folder = graded_assignment(desk, 4, doubtful=[1, 2, 3])
    with Browser(tmp_path / "other") as other:
        open_review(browser, desk, folder)
        wait_until_shown(browser, 1)
        open_review(other, desk, folder)
        wait_until_shown(other, 2)
        elsewhere = "window.kvasirReview.data.elsewhere.length"
        wait_until(lambda: browser.evaluate(elsewhere) == 1, "the first has heard of the second", PATIENCE_S)
        browser.click("Next")
        wait_until_shown(browser, 3)


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[tuple[DeskPage, Path]]:
    """A desk, and an assignment of six that takes seconds to grade."""
    config = tmp_path / "kvasir.toml"
    model = ModelEntry("simulated", "sim:prefill=600,decode=20,scale=1,answer=120", 32768)
    config.write_text(config_text({"slow": model}), "utf-8")
    with DeskPage(tmp_path, config) as desk:
        yield desk, new_assignment(desk, "Means", tiny_class(tmp_path / "class", 6) / "submissions", RUBRIC)


def test_the_fleet_says_what_is_in_hand_and_names_nobody(browser: Browser, slow: tuple[DeskPage, Path]) -> None:
    desk, folder = slow
    browser.open(desk.at(folder, "Grade"))
    browser.click("Grade all")  # while the page is still being drawn: Streamlit answers both clicks by one run
    browser.click("Fleet")
    browser.wait_for("on this machine is grading")
    for words in ("in decode", "from a transferred KV cache"):
        browser.wait_for(words)
    assert "student" not in browser.text()
    assert axe_finds(browser) == []
    assert "Traceback" not in desk.text()


def test_a_second_tab_is_told_that_the_class_is_being_graded_already(
    browser: Browser, slow: tuple[DeskPage, Path]
) -> None:
    desk, folder = slow
    for tab in (0, 1):
        browser.tab(tab)
        browser.open(desk.at(folder, "Grade"))
        browser.wait_for("Nothing is graded yet")
    browser.tab(0)
    browser.click("Grade all")
    browser.wait_for("This page may be closed")
    browser.tab(1)
    browser.click("Grade all")
    for words in ("this work is running already; wait until it ends, or stop it", "This page may be closed"):
        browser.wait_for(words)
    browser.click("Pause")
    browser.wait_gone("this work is running already")


def test_a_grading_that_was_stopped_before_it_began_is_no_error(browser: Browser, slow: tuple[DeskPage, Path]) -> None:
    desk, folder = slow
    grading_work(folder).start(["sleep", "60"])
    grading_work(folder).stop()
    wait_until(lambda: not grading_work(folder).is_alive, "it has ended")
    browser.open(desk.at(folder, "Grade"))
    browser.wait_for("Stopped before it began")
    browser.click("Grade all")
    browser.wait_for("This page may be closed")


# --- a phone


def test_on_a_phone_nothing_scrolls_sideways_and_no_buttons_overlap(desk: DeskPage, tmp_path: Path) -> None:
    folder = graded_assignment(desk, 30, doubtful=[0])
    with Browser(tmp_path / "phone", 390, 844) as phone:
        phone.open(desk.url)
        phone.wait_for("New assignment")
        assert phone.evaluate(ON_A_PHONE) == [0, []]
        for name, words in SECTIONS.items():
            phone.open(desk.at(folder, name))
            phone.wait_for(words)
            assert phone.evaluate(ON_A_PHONE) == [0, []], name
        open_review(phone, desk, folder)
        change(phone, 3, "I ran it")
        assert phone.evaluate("document.querySelector('[data-testid=stMain]').scrollHeight") <= 1_200
        phone.wait_for("Not saved yet.")
        assert phone.evaluate(ON_A_PHONE) == [0, []]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_no_serious_problem_on_any_page(browser: Browser, desk: DeskPage, scheme: str) -> None:
    folder = graded_assignment(desk, 4, doubtful=[2])
    jobs = json.loads((folder / "batch.json").read_text("utf-8"))["jobs"]
    asking, answered = sorted({job["item_id"].rpartition(".")[0] for job in jobs})[:2]
    add_requests(
        folder, [Request("1" * 12, asking, "works", "I ran it", 2), Request("2" * 12, answered, None, "Why?", 4)]
    )
    save_reply(folder, read_requests(folder)[1], "It stands.", 4, "Ada")
    append_override(folder, Override(answered, "works", 1, None, "I ran it", "Ada"))
    browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])
    pages = {desk.url: "New assignment"} | {desk.at(folder, name): words for name, words in SECTIONS.items()}
    for item in (asking, answered):
        pages[f"{desk.at(folder, 'Review')}&submission={item}"] = "Asked for another look"
    for address, words in pages.items():
        browser.open(address)
        browser.wait_for(words)
        assert axe_finds(browser) == [], address
    open_row(browser, " requests")
    browser.wait_for("Replied (Ada)")
    assert axe_finds(browser) == [], "the reply"
    for key, title in (("?", "Keys"), ("/", "Find a submission")):
        type_key(browser, key)
        browser.wait_for(title)
        assert axe_finds(browser) == [], title
        browser.key("Escape", 27)
