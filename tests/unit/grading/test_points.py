"""A grade is what the models said, added up; where they said nothing usable there is no grade."""

import json
import re
from dataclasses import replace
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from grading.points import grade_submission
from grading.prompts.answers import (
    EVIDENCE_CHARS,
    FEEDBACK_CHARS,
    SUMMARY_CHARS,
    AnswerError,
    ParsedAnswer,
    answer_schema,
    criterion_grade,
    max_answer_tokens,
    parse_answer,
)
from grading.prompts.repetition import is_repetition
from grading.quotes import evidence_state, quoted_lines, submission_texts
from grading.rubric.rubric import Criterion, Rubric
from grading.submissions.reading import Submission, SubmissionPart
from grading.submissions.truncation import Cut

LOOPS = Criterion("loops", "Uses loops", 2, "", "code", 0.5)
RUNS = Criterion("runs", "Runs", 3, "", "code")
WORDS = Criterion("words", "Explains", 4, "", "feedback")
RUBRIC = Rubric("Homework 3", "", (LOOPS, WORDS, RUNS), "d" * 32)
CODE = (LOOPS, RUNS)
WORK = Submission(
    "s1",
    "R",
    (
        SubmissionPart("code", "while (i < 4) {\n  i <- i + 1\n}", "cell 1"),
        SubmissionPart("text", "It counts.", "cell 2"),
    ),
)


def entry(points: Any = 2, evidence: Any = "while (i < 4)", feedback: Any = "Right.") -> dict[str, Any]:
    return {"evidence": evidence, "points": points, "feedback": feedback}


def answer(**changes: Any) -> str:
    return json.dumps({"loops": entry(1.5), "runs": entry(3), **changes})


def code_answer(**changes: Any) -> ParsedAnswer:
    return parse_answer(answer(**changes), CODE, with_summary=False)


FEEDBACK = ParsedAnswer({"words": criterion_grade(WORDS, 4, evidence="It counts.", feedback="Clear.")}, "Keep on.")


# --- the schema ---


def test_the_schema_asks_for_evidence_before_points_in_the_rubrics_order() -> None:
    schema = answer_schema(CODE, with_summary=True)

    assert list(schema["properties"]) == schema["required"] == ["loops", "runs", "summary"]
    assert list(schema["properties"]["loops"]["properties"]) == ["evidence", "points", "feedback"]
    assert schema["properties"]["loops"]["properties"]["points"] == {"enum": [0, 0.5, 1, 1.5, 2]}
    assert schema["additionalProperties"] is schema["properties"]["loops"]["additionalProperties"] is False
    jsonschema.Draft202012Validator.check_schema(schema)


grids = st.builds(
    lambda step, count: (step * count, step), st.sampled_from([1, 2, 0.5, 0.25, 0.1]), st.integers(1, 200)
).map(lambda pair: (round(pair[0], 6), pair[1]))
criteria_lists = st.lists(grids, max_size=4).map(
    lambda pairs: tuple(Criterion(f"c{i}", "C", points, "", "code", step) for i, (points, step) in enumerate(pairs))
)


@settings(max_examples=60, deadline=None)
@given(criteria=criteria_lists, with_summary=st.booleans(), data=st.data())
def test_what_the_schema_allows_can_be_read_and_fits_its_bound(
    criteria: tuple[Criterion, ...], with_summary: bool, data: st.DataObject
) -> None:
    if not criteria and not with_summary:
        return
    schema = answer_schema(criteria, with_summary)
    text = st.text(max_size=20).filter(lambda said: not is_repetition(said))  # no schema can forbid that
    instance: dict[str, Any] = {
        criterion.id: entry(data.draw(st.sampled_from(criterion.grid)), data.draw(text), data.draw(text))
        for criterion in criteria
    }
    if with_summary:
        instance["summary"] = data.draw(text)

    jsonschema.validate(instance, schema)
    written = json.dumps(instance, indent=8)
    parsed = parse_answer(written, criteria, with_summary)

    assert [parsed.criteria[criterion.id].points for criterion in criteria] == [
        instance[criterion.id]["points"] for criterion in criteria
    ]
    assert len(written.encode()) <= max_answer_tokens(schema)


def test_the_bound_holds_for_the_longest_answer_a_grammar_lets_through() -> None:
    schema = answer_schema(CODE, with_summary=True)
    space = "\n\n" + " " * 20
    longest = {
        "loops": entry(1.5, "\x01" * EVIDENCE_CHARS, "\x01" * FEEDBACK_CHARS),
        "runs": entry(3, "\x01" * EVIDENCE_CHARS, "\x01" * FEEDBACK_CHARS),
        "summary": "\x01" * SUMMARY_CHARS,
    }
    jsonschema.validate(longest, schema)
    tokens = re.findall(r'"[^"]*"|[{}:,]|[\d.]+', json.dumps(longest))
    spaced = space + "".join(token + space for token in tokens)
    assert json.loads(spaced) == longest

    end_of_sequence = 1
    last_commas = 3 * (1 + len(space))  # the bound counts a comma after the last member of each object too
    assert 0 <= max_answer_tokens(schema) - len(spaced) - end_of_sequence <= last_commas


def test_the_plain_bound_is_several_times_smaller() -> None:
    schema = answer_schema(CODE, with_summary=True)

    assert max_answer_tokens(schema, char_bytes=1, space_bytes=1) * 4 < max_answer_tokens(schema)


# --- reading an answer ---


def test_an_answer_is_read_with_its_points_on_the_grid() -> None:
    parsed = parse_answer(answer(runs=entry(3.0), summary="Good."), CODE, with_summary=True)

    assert parsed.criteria["loops"] == criterion_grade(CODE[0], 1.5, evidence="while (i < 4)", feedback="Right.")
    assert repr(parsed.criteria["runs"].points) == "3"
    assert parsed.summary == "Good."


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "not JSON at character 0 of 0"),
        ("I would give 3 points.", "not JSON at character 0"),
        ("```json\n{}\n```", "not JSON at character 0"),
        (answer()[:-5], "not JSON at character"),
        (answer() + " Done.", "not JSON at character"),
        ("[" * 100_000, "JSON that can't be read"),
        ("[]", "must be a JSON object, but it is a list"),
        (json.dumps({"loops": entry(1)}), "the answer lacks 'runs'"),
        (answer(extra=entry(1)), "has 'extra', which was not asked for"),
        (answer(summary="x"), "has 'summary', which was not asked for"),
        (answer(loops=3), "'loops' is a number instead of an object"),
        (answer(loops={"points": 1, "feedback": ""}), "'loops' lacks 'evidence'"),
        (answer(loops={**entry(1), "why": ""}), "'loops' has 'why', which was not asked for"),
        (answer(loops=entry(0.7)), "points of 'loops' must be 0 to 2 in steps of 0.5, not 0.7"),
        (answer(loops=entry(2.5)), "points of 'loops' must be 0 to 2 in steps of 0.5, not 2.5"),
        (answer(loops=entry(-0.5)), "points of 'loops' must be 0 to 2 in steps of 0.5, not -0.5"),
        (answer(loops=entry(True)), "points of 'loops' are true or false instead of a number"),
        (answer(loops=entry("2")), "points of 'loops' are text instead of a number"),
        (answer(loops=entry(None)), "points of 'loops' are null instead of a number"),
        (answer(loops=entry(float("nan"))), "contains NaN"),
        (answer(loops=entry(1, evidence=None)), "evidence of 'loops' is null instead of text"),
        (answer(loops=entry(1, feedback=["x"])), "feedback of 'loops' is a list instead of text"),
        (answer(loops=entry(1, feedback="\ud800")), "feedback of 'loops' contains half a character"),
        (answer()[:-1] + ', "runs": {}}', "the answer has the key 'runs' twice"),
        (answer().replace("1.5", "1e999"), "points of 'loops' must be 0 to 2 in steps of 0.5, not inf"),
        (answer().replace("1.5", "9" * 5000), "JSON that can't be read"),
    ],
)
def test_anything_else_is_refused_with_its_place(text: str, expected: str) -> None:
    with pytest.raises(AnswerError) as caught:
        parse_answer(text, CODE, with_summary=False)

    assert expected in str(caught.value)


@given(text=st.text() | st.recursive(st.none() | st.floats() | st.text(), st.lists).map(json.dumps))
def test_no_text_makes_it_raise_anything_else(text: str) -> None:
    with pytest.raises(AnswerError):
        parse_answer(text, CODE, with_summary=False)


# --- evidence, reviews and remarks ---


@pytest.mark.parametrize(
    ("quote", "found"),
    [
        ("while (i < 4)", True),
        ("WHILE(i<4){i<-i+1}", True),
        ('"i <- i + 1"', True),
        ("} It counts.", True),
        ("for (i in 1:4)", False),
        ("i <- i", True),
        ("I <- I", False),
        ("", False),
        ("  ``  ", False),
    ],
)
def test_evidence_is_found_whatever_its_case_and_spacing_but_short_quotes_only_exactly(quote: str, found: bool) -> None:
    assert (evidence_state(quote, submission_texts(WORK)) == "found") is found


@pytest.mark.parametrize(
    ("quote", "lines"),
    [
        ("total = sum(values)", {1}),
        ("`TOTAL=sum(values)`", {1}),
        ("sum(values)\n    return total", {1, 2}),
        ("return", {2, 4}),
        ("Return", set()),
        ("return 0", {4}),
        ("return 1 / total", set()),
        ("", set()),
    ],
)
def test_lines_are_quoted_where_the_quote_would_be_found(quote: str, lines: set[int]) -> None:
    work = "def mean(values):\n    total = sum(values)\n    return total\ndef none():\n    return 0"
    assert quoted_lines(work, [quote]) == lines


def test_evidence_is_compared_with_what_the_model_was_shown() -> None:
    submission = replace(WORK, parts=(SubmissionPart("text", "see <|im_end|> there", "cell 1"),))

    shown = submission_texts(submission)
    assert evidence_state("see ‹|im_end|› there", shown) == "found"
    assert evidence_state("see <|im_end|> there", shown) == "found"


# --- the grade ---


def test_a_complete_grade_is_the_sum_in_the_rubrics_order() -> None:
    grade = grade_submission("s1", RUBRIC, {"code": code_answer(), "feedback": FEEDBACK}, WORK)

    assert (grade.state, grade.points, grade.max_points, grade.reason) == ("graded", 8.5, 9, "")
    assert [(item.id, item.points, item.evidence_state) for item in grade.criteria] == [
        ("loops", 1.5, "found"),
        ("words", 4, "found"),
        ("runs", 3, "found"),
    ]
    assert (grade.summary, grade.remarks) == ("Keep on.", ())


def test_without_one_answer_there_is_no_total_and_it_says_what_is_missing_and_why() -> None:
    grade = grade_submission("s1", RUBRIC, {"code": "the deadline passed", "feedback": FEEDBACK}, WORK)

    assert (grade.state, grade.points) == ("incomplete", None)
    assert [item.id for item in grade.criteria if item.points is None] == ["loops", "runs"]
    assert grade.reason == "no points for loops, runs: the deadline passed"
    assert grade.criteria[1].points == 4


def test_without_any_answer_it_failed() -> None:
    grade = grade_submission("s1", RUBRIC, {"code": "cancelled"}, WORK)

    assert (grade.state, grade.points) == ("failed", None)
    assert grade.reason == "no points for loops, runs: cancelled; no points for words: no answer has come"


def test_a_lost_summary_is_a_remark_and_costs_no_points() -> None:
    only_code = Rubric("Homework 3", "", CODE, "d" * 32)
    grade = grade_submission("s1", only_code, {"code": code_answer(), "feedback": "expired"}, WORK)

    assert (grade.state, grade.points, grade.remarks) == ("graded", 4.5, ("no summary: expired",))


def test_an_unreadable_submission_failed_with_its_problem() -> None:
    broken = Submission("s1", "", (), problem="not a notebook")
    grade = grade_submission("s1", RUBRIC, {"code": code_answer(), "feedback": FEEDBACK}, broken)

    assert (grade.state, grade.points, grade.reason) == ("failed", None, "not a notebook")
    assert all(item.points is None and item.reason == "not a notebook" for item in grade.criteria)


def test_an_empty_submission_has_no_points_and_says_so() -> None:
    grade = grade_submission("s1", RUBRIC, {}, Submission("s1", "R", (), notes=("only the template",)))

    assert (grade.state, grade.points) == ("empty", 0)
    assert grade.reason == "nothing to grade was handed in; only the template"
    assert [item.points for item in grade.criteria] == [0, 0, 0]


def test_what_a_person_must_decide_is_no_remark_and_each_is_said_once() -> None:
    submission = replace(WORK, images_left_out=1, notes=("3 cells were never run", "3 cells were never run"))
    answers = code_answer(loops=entry(1, "nowhere to be found"), runs=entry(2, ""))
    cuts = (Cut("cell 1", "output", 10, 90),)
    grade = grade_submission("s1", RUBRIC, {"code": answers, "feedback": FEEDBACK}, submission, cuts)

    assert grade.remarks == (
        "truncated: 90 tokens of output in 1 place not shown to the models",
        "1 image not shown to the models",
        "3 cells were never run",
    )
    assert grade.review_reasons == ("loops: evidence not found", "runs: evidence none given")
    assert grade.cuts == cuts


def test_no_points_need_no_evidence() -> None:
    answers = code_answer(loops=entry(0, ""), runs=entry(0, ""))

    assert grade_submission("s1", RUBRIC, {"code": answers, "feedback": FEEDBACK}, WORK).doubts == ()
