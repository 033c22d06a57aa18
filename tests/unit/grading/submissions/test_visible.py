"""What no reader of the rendered work sees is no evidence, and a person is asked about it."""

import json
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grading.points import grade_submission
from grading.prompts.answers import ParsedAnswer, criterion_grade
from grading.quotes import evidence_state, private_texts, submission_texts
from grading.rubric.rubric import Criterion, Rubric
from grading.submissions.reading import Submission, SubmissionPart, read_document
from grading.submissions.visible import MAX_PASSAGES, visible_text

HIDDEN = {
    "a comment of HTML": "I checked 58 rows.\n<!--\nn_doubled=37\n-->",
    "a comment that never ends": "I checked 58 rows.\n<!-- n_doubled=37",
    "an element that is not displayed": '<div style="display:none">\nn_doubled=37\n</div>\nI checked 58 rows.',
    "elements within one": "<div hidden><div>a</div>n_doubled=37</div>I checked 58 rows.",
    "letters without size": 'I checked <span style="font-size:0">n_doubled=37</span> 58 rows.',
    "an element that takes its place unseen": '<p style="visibility: hidden">n_doubled=37</p> I checked 58 rows.',
    "letters of a pixel": '<p style="font-size: 1px">n_doubled=37</p> I checked 58 rows.',
    "white letters": '<font color="white">n_doubled=37</font> I checked 58 rows.',
    "white by number": '<p style="color:#FFFFFF">n_doubled=37</p> I checked 58 rows.',
    "letters beside the page": '<p style="position:absolute;left:-9999px">n_doubled=37</p> I checked 58 rows.',
    "a phantom": r"$\phantom{n_doubled=37}$ I checked 58 rows.",
    "white LaTeX": r"$\color{white}{n_doubled=37}$ I checked 58 rows.",
    "white LaTeX to the end of the group": r"{\color{white} n_doubled=37} I checked 58 rows.",
    "the title of a link": 'I checked [58 rows](http://a.example "n_doubled=37").',
    "the title of a definition": '[x]: http://a.example "n_doubled=37"\nI checked 58 rows.',
    "a comment made of a definition": "[//]: # (n_doubled=37)\nI checked 58 rows.",
    # CommonMark: code spans and fences, and blocks of HTML, in which there are none (4.5, 4.6, 6.1)
    "a comment between marks of two paragraphs": "`\n\n<!-- n_doubled=37 -->\n\n` I checked 58 rows.",
    "a comment between marks that are letters": "\\` <!-- n_doubled=37 --> \\` I checked 58 rows.",
    "a comment after code that looks like a fence": "```x```\n<!-- n_doubled=37 -->\nI checked 58 rows.",
    "a comment after a fence that is set in": "```\nx\n  ```\n<!-- n_doubled=37 -->\nI checked 58 rows.",
    "a comment within a block of HTML": "<div>\n`<!-- n_doubled=37 -->`\n</div>\n\nI checked 58 rows.",
    "white letters where the text speaks of a background": (
        'The background: I checked 58 rows. <font color="white">n_doubled=37</font>'
    ),
    "an element with a mark in a value": '<div title=">" style="display:none">n_doubled=37</div>I checked 58 rows.',
    "invisible twins of letters": "I checked 58 rows." + "".join(chr(0xE0000 + ord(char)) for char in "n_doubled=37"),
}
# No evidence either, but usual: nobody is asked about a picture's text or a tag's data.
UNASKED = {
    "a picture's alternative text": "I checked 58 rows. ![n_doubled=37](a.png)",
    "an attachment's name": "I checked 58 rows. ![image.png](attachment:n_doubled=37.png)",
    "a title of a tag": 'I checked <b title="n_doubled=37">58</b> rows.',
    "a style sheet": "<style>.n_doubled=37 {}</style>I checked 58 rows.",
}
VISIBLE = {
    "code in a fence": "```html\n<!-- n_doubled=37 and more -->\n```",
    "code in a sentence": "The comment `<!-- n_doubled=37 and more -->` is not shown.",
    "code after a comment": "<!-- given -->\n```html\n<!-- n_doubled=37 and more -->\n```",
    "code between longer marks": "It prints ``<!-- ` n_doubled=37 and more -->`` here.",
    "an index and a call": 'handlers[i]("n_doubled=37 and more")',
    "white on the colour of a cell": '<td bgcolor="black"><font color="white">n_doubled=37 by Team 4</font></td>',
    "a comparison": "if a < b and c > d then n_doubled=37",
    "white on a colour": '<div style="background:#036"><h1 style="color:white">n_doubled=37 by Team 4</h1></div>',
    "a box that cuts what is too wide": '<div style="overflow: hidden">n_doubled=37 by Team 4</div>',
    "small, but to be read": '<p style="font-size:0.9em">n_doubled=37</p>',
    "a reference": "[1]: Smith (2020) n_doubled=37. Press.",
    "characters without width within": "n_dou\u200bbled=3\u200b7",
    "half a tag": "n_doubled=37 <div",
}
CRITERION = Criterion("doubled", "Counts", 2, "", "code")
RUBRIC = Rubric("Orders", "", (CRITERION,), "d" * 32)


def work(text: str, kind: str = "text") -> Submission:
    return Submission("s", "R", (SubmissionPart(kind, text, "cell 2"),))  # type: ignore[arg-type]


def doubts_of(submission: Submission, public: str = "") -> list[str]:
    answer = ParsedAnswer({"doubled": criterion_grade(CRITERION, 0, evidence="")})
    texts = private_texts([], [public])
    return list(grade_submission("s", RUBRIC, {"code": answer}, submission, private_texts=texts).review_reasons)


@pytest.mark.parametrize("text", [*HIDDEN.values(), *UNASKED.values()], ids=[*HIDDEN, *UNASKED])
def test_hidden_text_is_no_evidence(text: str) -> None:
    assert evidence_state("n_doubled=37", submission_texts(work(text))) != "found"
    assert evidence_state("I checked", submission_texts(work(text))) == "found"


@pytest.mark.parametrize("text", HIDDEN.values(), ids=HIDDEN)
def test_a_person_is_asked_about_hidden_text(text: str) -> None:
    [doubt] = doubts_of(work(text))

    assert doubt.startswith("hidden text (cell 2): “")
    assert "n_doubled=37" in doubt


@pytest.mark.parametrize("text", UNASKED.values(), ids=UNASKED)
def test_nobody_is_asked_about_what_is_usual(text: str) -> None:
    assert doubts_of(work(text)) == []


@pytest.mark.parametrize("text", VISIBLE.values(), ids=VISIBLE)
def test_what_a_reader_sees_is_evidence(text: str) -> None:
    assert evidence_state("n_doubled=37", submission_texts(work(text))) == "found"
    assert visible_text(text, "text").hidden_passages == ()


def test_source_code_is_visible_whatever_it_says() -> None:
    line = "# <!-- n_doubled=37 and more -->"

    assert evidence_state("n_doubled=37", submission_texts(work(line, "code"))) == "found"
    assert doubts_of(work(f"{line}\nI checked 58 rows.", "code")) == []


def test_hidden_text_that_the_class_was_given_is_nobodys_doubt() -> None:
    given_comment = "<!-- write at least three sentences here -->"

    assert doubts_of(work(f"{given_comment}\nI checked 58 rows."), public=given_comment) == []
    assert len(doubts_of(work(f"{given_comment}\nI checked 58 rows."))) == 1


def test_a_cell_that_one_student_alone_calls_given_is_asked_about() -> None:
    part = SubmissionPart("text", "<!-- n_doubled=37 and more -->\nI checked 58 rows.", "cell 2", is_given_cell=True)

    assert len(doubts_of(Submission("s", "R", (part,)))) == 1


def test_of_very_many_hidden_texts_a_few_are_shown() -> None:
    doubts = doubts_of(work("I checked 58 rows.\n" + "".join(f"<!-- n_doubled={n} -->\n" for n in range(500))))

    assert len(doubts) == MAX_PASSAGES + 1
    assert doubts[-1] == f"{500 - MAX_PASSAGES} more hidden texts"


def test_work_that_only_hides_something_is_empty_and_a_person_looks() -> None:
    submission = work("<!-- n_doubled=37, n_incomplete=58 -->")

    assert submission.empty
    assert len(doubts_of(submission)) == 1


def notebook(folder: Path, *cells: dict[str, object]) -> Submission:
    path = folder / "a.ipynb"
    path.write_text(json.dumps({"nbformat": 4, "metadata": {}, "cells": list(cells)}), "utf-8")
    return read_document(path)


def code(source: str, output: str = "", count: int | None = None) -> dict[str, object]:
    outputs = [{"output_type": "stream", "name": "stdout", "text": output}] if output else []
    return {"cell_type": "code", "source": source, "outputs": outputs, "execution_count": count, "metadata": {}}


def test_an_output_without_a_run_is_a_remark_and_no_evidence(tmp_path: Path) -> None:
    forged = notebook(tmp_path, code("print(1)", "1", count=1), code("report(n)", "n_doubled=37"))

    assert evidence_state("n_doubled=37", submission_texts(forged)) == "not found"
    assert "1 output has no run that could have made it" in forged.notes


def test_a_tool_that_counts_no_runs_has_outputs_all_the_same(tmp_path: Path) -> None:
    uncounted = notebook(tmp_path, code("report(n)", "n_doubled=37"))

    assert evidence_state("n_doubled=37", submission_texts(uncounted)) == "found"
    assert not any("no run" in note for note in uncounted.notes)


def test_a_page_of_the_platform_says_what_it_hides(tmp_path: Path) -> None:
    path = tmp_path / "a.html"
    path.write_text('<p>I checked 58 rows.</p><p style="display:none">n_doubled=37</p>', "utf-8")
    page = read_document(path)

    assert [part.text for part in page.parts] == ["I checked 58 rows."]
    assert page.doubtful_notes == ("hidden text left out: “n_doubled=37”",)


@pytest.mark.parametrize(
    "text",
    ['handlers[i]("hello")', "![my plot](a.png) shows it", "a ` and a `", r"\phantom{x} is a command", "```"],
)
def test_marks_of_markdown_are_letters_on_a_page(tmp_path: Path, text: str) -> None:
    path = tmp_path / "a.html"
    path.write_text(f"<!DOCTYPE html><p>{text}</p><p hidden>n_doubled=37</p>\n<p>{text}</p>", "utf-8")
    page = read_document(path)

    assert [part.text for part in page.parts] == [f"{text}\n{text}"]
    assert page.doubtful_notes == ("hidden text left out: “n_doubled=37”",)


CASES = Path(__file__).parents[4].parent / "shared" / "cases" / "hidden_values"


@pytest.mark.skipif(not CASES.is_dir(), reason="the notebooks with hidden values are not beside this checkout")
def test_values_that_four_notebooks_hide_are_no_evidence() -> None:
    for path in sorted(CASES.glob("*.ipynb")):
        submission = read_document(path)
        states = [evidence_state(value, submission_texts(submission)) for value in ("mean_amount=84", "max_month=62")]
        passages = [passage for part in submission.parts for passage in part.visible.hidden_passages]

        assert states == ["not found", "not found"], path.name
        assert bool(passages) is (path.stem != "00-none"), path.name


@settings(deadline=None, max_examples=100)
@given(st.text(alphabet="<>!-/`\\{}[]()\"' \nadivhidden:=12$"))
def test_every_character_is_told_apart(text: str) -> None:
    visible = visible_text(text, "text")

    assert len(visible.flags) == len(text)
    assert len(visible.shown(text)) <= len(visible.shown(text, with_markup=True)) <= len(text)
