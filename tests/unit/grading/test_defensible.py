"""What makes a grade one that can be defended: checks by program, several answers, leaks, and the whole class."""

import json
from dataclasses import replace

import pytest

from grading.alarms import class_alarms
from grading.points import Grade, grade_submission
from grading.prompts.answers import AnswerError, ParsedAnswer, criterion_grade, parse_samples
from grading.prompts.prompt import build_prompt, prefix
from grading.quotes import leaks, private_texts, submission_texts
from grading.rubric.checks import Check, CheckFinding, run_checks
from grading.rubric.rubric import Criterion, Rubric
from grading.submissions.reading import Submission
from grading.submissions.submission import SubmissionPart

LOOPS = Criterion("loops", "Uses loops", 4, "Award 2 points if the loop ends by itself, else one.", "code")
WORDS = Criterion("words", "Explains", 4, "Look for numbers.", "feedback")
RUBRIC = Rubric("Homework 3", "Say what the loop does.", (LOOPS, WORDS), "d" * 32)
WORK = Submission(
    "s1",
    "R",
    (SubmissionPart("code", "while (i < 4) i <- i + 1", "cell 1"), SubmissionPart("output", "[1] 12345", "cell 1")),
)
SOLUTION = Submission(
    "solution", "R", (SubmissionPart("code", "for (index in seq_len(n)) total <- total + index * 3", "c"),)
)


def parts(code: str, output: str = "") -> list[SubmissionPart]:
    return [SubmissionPart("code", code, "cell 1"), *([SubmissionPart("output", output, "cell 1")] if output else [])]


def passes(check: Check, code: str, output: str = "", solution: str = "") -> list[bool]:
    return [finding.has_passed for finding in run_checks([check], parts(code, output), parts("", solution))]


# --- checks


def test_functions_have_alternatives_and_columns_are_names_in_code() -> None:
    assert passes(Check("functions", ("group_by|aggregate", "merge")), "aggregate(x ~ y)") == [True, False]
    assert passes(Check("columns", ("region", "order date")), "d['order date']; subregion") == [False, True]


def test_outputs_are_compared_by_their_figures() -> None:
    same = Check("output", ("as solution",))

    assert passes(same, "x", "rate 0.3141 of 1,234 rows", "[1] 0.31412\nrows: 1234") == [True]
    assert passes(same, "x", "rate 0.287", "[1] 0.31412\nrows: 1234") == [False]
    assert passes(same, "x", "7", "[1] 7") == [True]  # nothing there that would tell
    assert passes(Check("output", ("present",)), "x", "") == [False]
    assert passes(Check("output", ("present",)), "x", "1") == [True]


def test_findings_stand_in_the_students_part_after_the_shared_prefix() -> None:
    said = ["variable rate: not assigned"]
    with_findings = build_prompt("code", RUBRIC, SOLUTION, None, WORK, "f" * 12, (), said)
    without = build_prompt("code", RUBRIC, SOLUTION, None, WORK, "f" * 12)

    assert with_findings[0] == without[0]
    assert said[0] in with_findings[-1].text
    assert with_findings[-1].text.index(said[0]) < with_findings[-1].text.index("=== ffffffffffff begin")


def answered(points: int, feedback: str = "Right.", sampled: tuple[int, ...] = ()) -> dict[str, ParsedAnswer]:
    loops = criterion_grade(LOOPS, points, evidence="while (i < 4)", feedback=feedback, sampled=sampled)
    words = criterion_grade(WORDS, 3, evidence="i <- i + 1", feedback="Clear.")
    return {"code": ParsedAnswer({"loops": loops}), "feedback": ParsedAnswer({"words": words}, "Keep on.")}


def graded(points: int, **more: object) -> Grade:
    return grade_submission("s1", RUBRIC, answered(points), WORK, **more)  # type: ignore[arg-type]


def test_full_points_where_a_check_failed_wait_for_a_person() -> None:
    findings = [CheckFinding("loops", False, "function for: not called")]

    assert [doubt.criterion_id for doubt in graded(4, findings=findings).doubts] == ["loops"]
    assert graded(3, findings=findings).doubts == ()
    assert "check: function for: not called" in graded(3, findings=findings).remarks


# --- versions


def test_another_rubric_solution_or_template_makes_another_prompt() -> None:
    prompts = {
        prefix("code", RUBRIC, SOLUTION, None),
        prefix("code", replace(RUBRIC, digest="e" * 32), SOLUTION, None),
        prefix("code", RUBRIC, WORK, None),
        prefix("code", RUBRIC, SOLUTION, WORK),
        prefix("code", RUBRIC, SOLUTION, Submission("t", "", ())),
    }

    assert len(prompts) == 5


# --- several answers


def answer(points: int, evidence: str = "e") -> str:
    return json.dumps({"loops": {"evidence": evidence, "points": points, "feedback": f"for {points}"}})


def test_the_median_counts_with_its_own_words() -> None:
    merged = parse_samples([answer(4), answer(1), answer(2)], [LOOPS], False).criteria["loops"]

    assert (merged.points, merged.feedback, merged.sampled) == (2, "for 2", (4, 1, 2))


def test_most_answers_must_be_usable() -> None:
    assert parse_samples([answer(4), "broken", answer(4)], [LOOPS], False).criteria["loops"].sampled == (4, 4)
    with pytest.raises(AnswerError, match="2 of 3 answers"):
        parse_samples([answer(4), "broken", "broken"], [LOOPS], False)
    with pytest.raises(AnswerError, match="1 of 2 answers"):
        parse_samples([answer(4), "broken"], [LOOPS], False)


@pytest.mark.parametrize(("sampled", "doubtful"), [((4, 4, 4), False), ((4, 3, 4), True), ((), False), ((4, 1), True)])
def test_answers_that_disagree_wait_for_a_person(sampled: tuple[int, ...], doubtful: bool) -> None:
    made = grade_submission("s1", RUBRIC, answered(4, sampled=sampled), WORK)  # type: ignore[arg-type]

    assert made.needs_review == doubtful


# --- leaks

HIDDEN = private_texts([LOOPS.guidance, *(part.text for part in SOLUTION.parts)], [RUBRIC.instructions])


@pytest.mark.parametrize(
    "text",
    [
        "You should know: award 2 points if the loop ENDS by itself, else one.",
        "Better: for (index in seq_len(n)) total <- total + index * 3",
    ],
)
def test_feedback_that_repeats_notes_or_solution_is_found(text: str) -> None:
    made = grade_submission("s1", RUBRIC, answered(2, text), WORK, private_texts=HIDDEN)  # type: ignore[arg-type]

    assert made.criteria[0].leaks
    assert made.needs_review


def test_what_the_student_wrote_or_was_given_is_no_leak() -> None:
    own = Submission("s", "R", SOLUTION.parts)

    assert not leaks(SOLUTION.parts[0].text, HIDDEN, submission_texts(own))
    assert not leaks("Say what the loop does. " * 3, HIDDEN, submission_texts(WORK))
    assert not leaks("The loop ends well; award-winning points.", HIDDEN, submission_texts(WORK))


def test_a_summary_that_leaks_is_withheld() -> None:
    answers = answered(2)
    answers["feedback"] = replace(answers["feedback"], summary=LOOPS.guidance)

    made = grade_submission("s1", RUBRIC, answers, WORK, private_texts=HIDDEN)  # type: ignore[arg-type]

    assert made.summary == ""
    assert any("summary withheld" in doubt.why for doubt in made.doubts)


# --- the whole class


def a_class(*points: int) -> list[Grade]:
    return [graded(value) for value in points]


def test_a_class_that_is_low_on_one_criterion_raises_an_alarm() -> None:
    [alarm] = class_alarms(a_class(0, 1, 0, 1, 0, 0), RUBRIC)

    assert alarm.startswith("loops: 6 of 6 submissions")


@pytest.mark.parametrize("points", [(0, 0, 0), (0, 1, 4, 4, 2, 0), (4, 4, 4, 4, 4)])
def test_a_small_or_ordinary_class_raises_none(points: tuple[int, ...]) -> None:
    assert class_alarms(a_class(*points), RUBRIC) == ()


def test_a_class_that_is_low_on_everything_may_have_the_wrong_rubric() -> None:
    low = answered(0)
    low["feedback"] = ParsedAnswer({"words": criterion_grade(WORDS, 0)}, "")
    grades = [grade_submission("s", RUBRIC, low, WORK)] * 6  # type: ignore[arg-type]

    [alarm] = class_alarms(grades, RUBRIC)

    assert "every criterion" in alarm
