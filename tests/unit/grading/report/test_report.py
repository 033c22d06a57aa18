"""What is written down: a table that a spreadsheet can't misread, and a page that escapes everything."""

import csv
import re
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from grading.evaluation.hand_grades import in_class
from grading.points import Grade, grade_submission
from grading.prompts.answers import ParsedAnswer, criterion_grade
from grading.report.grades import FIXED_COLUMNS, LAST_COLUMNS, count_states, summary_rows, write_grades_csv
from grading.report.page import render_page
from grading.rubric.formats import RESERVED_IDS
from grading.rubric.rubric import Criterion, Rubric
from grading.submissions.reading import Submission, SubmissionPart
from grading.submissions.truncation import Cut
from monitoring.logs import ROOMS
from producers.storage.private import write_atomically

RUBRIC = Rubric(
    "Homework <3>",
    "",
    (
        Criterion("loops", "Uses loops & more", 2, "PRIVATE GUIDANCE", "code", 0.5),
        Criterion("words", "Explains", 4, "PRIVATE GUIDANCE", "feedback"),
    ),
    "d" * 32,
)
HOSTILE = "<script>alert(1)</script><img src=x onerror=alert(1)>\"'&amp;</details></main>"


def graded(name: str, text: str = "Clear.") -> Grade:
    answers = {
        "code": ParsedAnswer({"loops": criterion_grade(RUBRIC.criteria[0], 1.5, evidence=text, feedback=text)}),
        "feedback": ParsedAnswer({"words": criterion_grade(RUBRIC.criteria[1], 0, evidence=text, feedback=text)}, text),
    }
    submission = Submission(name, "R", (SubmissionPart("code", text, text),), 1, (text,))
    return grade_submission(name, RUBRIC, answers, submission, (Cut(text, "text", 1, 2),))  # type: ignore[arg-type]


WORK = Submission("s", "R", (SubmissionPart("text", "I wrote this.", "cell 1"),))
INCOMPLETE = grade_submission(
    "s2",
    RUBRIC,
    {"code": "the deadline passed", "feedback": ParsedAnswer({"words": criterion_grade(RUBRIC.criteria[1], 4)})},
    WORK,
)
FAILED = grade_submission("s3", RUBRIC, {}, Submission("s3", "", (), problem="not a notebook"))
EMPTY = grade_submission("s4", RUBRIC, {}, Submission("s4", "R", ()))


def table(path: Path, *grades: Grade) -> list[list[str]]:
    write_grades_csv(path, grades, RUBRIC)
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.reader(file))


# --- grades.csv ---


@pytest.mark.parametrize("name", ["Gruppe 1  2_90002_assignsubmission_file_", "Bild\u202f9 Uhr.md", " two spaces .py"])
def test_a_submission_is_found_by_the_name_in_the_table(tmp_path: Path, name: str) -> None:
    """Moodle's `clean_filename` takes the & out of "Gruppe 1 & 2", and leaves two spaces."""
    _, row = table(tmp_path / "grades.csv", replace(FAILED, submission=name))
    assert in_class({(row[0], "loops", "Ada"): 1}, [name], ["loops", "words"]) == {(name, "loops", "Ada"): 1}


def test_the_table_has_one_row_a_submission_and_no_zero_that_nobody_gave(tmp_path: Path) -> None:
    header, *rows = table(tmp_path / "grades.csv", graded("s1"), INCOMPLETE, FAILED, EMPTY)

    assert header[:4] == ["submission", "state", "points", "max_points"]
    assert header[4:] == ["loops", "words", "needs_review", "remarks", "reason"]
    assert [row[:6] for row in rows] == [
        ["s1", "graded", "1.5", "6", "1.5", "0"],
        ["s2", "incomplete", "", "6", "", "4"],
        ["s3", "failed", "", "6", "", ""],
        ["s4", "empty", "0", "6", "0", "0"],
    ]
    assert [row[-1] for row in rows] == [
        "",
        "no points for loops: the deadline passed",
        "not a notebook",
        "nothing to grade was handed in",
    ]


def test_no_criterion_can_take_the_name_of_another_column() -> None:
    assert {*FIXED_COLUMNS, *LAST_COLUMNS} <= set(RESERVED_IDS)


@settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@example(text="a\x85b\u2028c\r\nd\0\ud800")
@given(text=st.text(alphabet=st.characters()))
def test_any_text_stays_in_its_cell(tmp_path: Path, text: str) -> None:
    _header, row = table(tmp_path / "grades.csv", graded("x" + text, "x" + text))

    assert len(row) == 9
    assert row[2:6] == ["1.5", "6", "1.5", "0"]
    assert not any(cell.startswith(("=", "+", "-", "@")) for cell in row)


def test_a_file_is_replaced_as_a_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "grades.csv"
    write_atomically(path, "old")

    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "new \ud800")

    assert path.read_text() == "old"
    assert list(tmp_path.iterdir()) == [path]


# --- the terminal ---


def test_the_terminal_shows_points_or_the_reason_and_no_control_characters() -> None:
    rows = summary_rows([graded("s1\x1b[31m\n"), INCOMPLETE, FAILED, EMPTY])

    assert [row[1:3] for row in rows] == [
        ("graded", "1.5 / 6"),
        ("incomplete", "– / 6"),
        ("unreadable", "– / 6"),
        ("empty", "0 / 6"),
    ]
    assert rows[0][0] == "s1�[31m"
    assert rows[0][3:] == ("1 reason", "2 remarks")
    assert rows[2][4] == "not a notebook"


def test_states_are_counted_with_those_that_did_not_occur() -> None:
    counts = count_states([FAILED, FAILED, EMPTY])

    assert counts == {"graded": 0, "incomplete": 0, "failed": 2, "empty": 1, "link only": 0, "waiting": 0}


# --- the page ---


class Page(HTMLParser):
    """What a browser would make of the page: elements with their attributes, and the text outside script and style."""

    def __init__(self, html: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.text = ""
        self.feed(html)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in ("meta", "br"):
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] not in ("script", "style"):
            self.text += data


def page_of(*grades: Grade, notice: str = "", facts: tuple[tuple[str, str], ...] = ()) -> Page:
    return Page(render_page(grades, RUBRIC, facts, notice))


def test_the_page_shows_points_evidence_feedback_flags_cuts_and_reasons() -> None:
    page = page_of(
        graded("s1"), INCOMPLETE, FAILED, EMPTY, notice="These are not real grades.", facts=(("Time", "4 min"),)
    )

    for text in ("These are not real grades.", "Time", "4 min", "4 submissions · 1 graded · 1 incomplete · 1 failed"):
        assert text in page.text
    for text in ("Uses loops & more", "Clear.", "text, Clear.: 2 of 3 tokens", "the deadline passed", "not a notebook"):
        assert text in page.text
    assert [tag for tag, _ in page.elements].count("details") == 4
    assert page.open == []


def test_the_grading_notes_stay_private() -> None:
    assert "PRIVATE" not in render_page([graded("s1")], RUBRIC, (), "")


def test_without_a_notice_there_is_no_banner() -> None:
    assert not [attrs for _, attrs in page_of(EMPTY).elements if attrs.get("class") == "notice"]


def test_the_page_draws_how_often_each_number_of_points_was_given() -> None:
    html = render_page([graded("s1"), graded("s2"), INCOMPLETE, EMPTY], RUBRIC, ())

    assert "Points of 2 graded submissions: median 1.5, mean 1.5" in html
    assert "Submissions by points. model: 0–0.5 ×0, 1–1.5 ×2, 2–2.5 ×0" in html  # 13 steps of half a point
    assert "was given: 0 ×0, 0.5 ×0, 1 ×0, 1.5 ×2, 2 ×0" in html  # loops
    assert "was given: 0 ×2, 1 ×0, 2 ×0, 3 ×0, 4 ×1" in html  # words, the incomplete one too
    assert "<svg" not in render_page([FAILED, EMPTY], RUBRIC, ())


def test_a_class_of_nobody_has_a_page() -> None:
    assert "0 submissions" in page_of().text


def test_every_link_of_the_class_table_leads_to_a_submission() -> None:
    elements = page_of(graded("s1"), EMPTY).elements
    ids = [attrs["id"] for tag, attrs in elements if tag == "details"]

    assert [attrs["href"] for tag, attrs in elements if tag == "a"] == [f"#{id}" for id in ids] == ["#s1", "#s2"]


def test_the_page_asks_for_nothing_from_outside() -> None:
    html = render_page([graded("s1")], RUBRIC, (), "x")

    assert "default-src 'none'" in html
    assert not re.search(r"https?:|url\(|@import|src=|<link", html)


@settings(deadline=None, max_examples=60)
@example(text=HOSTILE)
@given(text=st.text(alphabet=st.characters()) | st.text(alphabet="<>&\"'/=! scriptdeal-[]"))
def test_nothing_anybody_wrote_becomes_markup(text: str) -> None:
    plain, hostile = graded("s1", "x"), graded("s1" + text, "x" + text)

    expected = [tag for tag, _ in page_of(plain, notice="n", facts=(("f", "v"),)).elements]
    page = page_of(hostile, notice="n" + text, facts=(("f" + text, "v" + text),))

    more = len(hostile.remarks) - len(plain.remarks) + len(hostile.doubts) - len(plain.doubts)  # each a line of a list
    assert sorted(tag for tag, _ in page.elements) == sorted(expected + ["li"] * more)
    assert page.open == []
    assert not any(name.startswith("on") for _, attrs in page.elements for name in attrs)


def test_the_page_can_be_stored_whatever_was_written(tmp_path: Path) -> None:
    html = render_page([graded("\ud800\0", "\x1b\ufffe")], RUBRIC, (), "\x85")

    write_atomically(tmp_path / "report.html", html)

    assert not re.search("[\0\x1b\x85\ufffe]", html)


def test_templates_escape_everything() -> None:
    unescaped = r"\|\s*safe|autoescape (false|off)|Markup|xmlattr|<script>[^{]"
    root = Path(__file__).resolve().parents[4]
    templates = [path for room in ROOMS for path in (root / room).rglob("*.j2")]

    assert any(path.name == "report_page.html.j2" for path in templates)
    for path in templates:
        assert not re.search(unescaped, path.read_text("utf-8")), path


def test_a_warning_about_the_class_stands_above_it_like_the_notice() -> None:
    page = render_page([EMPTY], RUBRIC, [("Versions", "rubric 1")], alarms=["<all> are low"])
    assert '<p class="notice" role="note">Look at the class: &lt;all&gt; are low</p>' in page.partition("<h1>")[0]
    assert "Look at the class" not in render_page([EMPTY], RUBRIC, [("Versions", "rubric 1")])
