"""Like answers in groups: what is equal, what is alike, and what is ticked by itself."""

import sys

import pytest

from benchmarks.evaluate_sets import saf
from benchmarks.groups import MOST_ADDED, planted_class, question_answers, spread, wrong_spreads
from grading.evaluation.agreement import EvaluationError
from grading.likeness import MAX_DISTANCE, CriterionAnswer, answer_of, group_answers
from grading.prompts.answers import CriterionGrade
from grading.submissions.submission import Submission, SubmissionPart


def answer(id: str, text: str, quote: str = "", points: float | None = 1) -> CriterionAnswer:
    return CriterionAnswer(id, points, quote, text)


def ids(groups: list[list[CriterionAnswer]]) -> list[list[str]]:
    return [[each.item_id for each in group] for group in groups]


def test_equal_evidence_and_equal_points_form_a_group_and_nothing_else() -> None:
    answers = [
        answer("ann", "total = 1\nmean = total / n", "mean = total / n"),
        answer("ben", "total = 2\nmean =  total / n", "mean =  total / n"),
        answer("cat", "mean = total / n", "mean = total / n", points=2),
        answer("dan", "mean = Total / n", "mean = Total / n"),
        answer("eva", "mean = total / n", "mean = total / n", points=None),
    ]
    assert sorted(ids(group_answers(answers))) == [["ann", "ben"], ["cat"], ["dan"], ["eva"]]


def test_without_a_quote_only_equal_work_forms_a_group() -> None:
    answers = [answer("ann", "", points=0), answer("ben", "nothing yet", points=0), answer("cat", "Nothing", points=0)]
    assert ids(group_answers([*answers, answer("dan", " nothing\nyet", points=0)])) == [
        ["ben", "dan"],
        ["ann"],
        ["cat"],
    ]


def test_in_a_group_what_most_of_it_say_comes_first() -> None:
    quote = "mean = total / n"
    answers = [answer(name, f"{before}\n{quote}", quote) for name, before in zip("abcd", "1223", strict=True)]
    (group,) = group_answers(answers)
    assert ids([group]) == [["b", "c", "a", "d"]]


def test_an_answer_is_the_cell_that_holds_its_evidence_and_shows_the_lines_around_it() -> None:
    long_cell = "\n".join([*(f"line {number}" for number in range(40)), "mean = total / n", "print(mean)"])
    given = SubmissionPart("text", "Compute the mean.", "cell 1", holds_only_given_text=True)
    parts = (given, SubmissionPart("code", "x = 1", "cell 2"), SubmissionPart("code", long_cell, "cell 3"))
    work = Submission("ann.ipynb", "Python", (*parts, SubmissionPart("output", "3", "cell 3")))
    grade = CriterionGrade("mean", "Mean", 2, 1, "mean = total / n", "found")

    found = answer_of("ann", grade, work)
    assert (found.points, found.quote, found.text) == (1, "mean = total / n", long_cell)
    assert found.passage.split("\n") == long_cell.split("\n")[28:]

    made_up = answer_of("ann", CriterionGrade("mean", "Mean", 2, 1, "mean = 7", "not found"), work)
    assert (made_up.quote, made_up.text) == ("", f"x = 1\n{long_cell}")


def test_like_texts_are_joined_only_where_their_points_are_equal() -> None:
    pytest.importorskip("sklearn")
    text = "The window grows until a packet is lost and is halved then."
    answers = [
        answer("ann", text),
        answer("ben", f"{text} "),
        answer("cat", text.replace("grows", "grows slowly")),
        answer("dan", text.replace("grows", "grows slowly"), points=0),
        answer("eva", "Routers forward what they are given, in the order in which it came."),
    ]
    assert sorted(ids(group_answers(answers, MAX_DISTANCE))) == [["cat", "ann", "ben"], ["dan"], ["eva"]]
    assert ids(group_answers([answer("ann", ""), answer("ben", " ", "x")], MAX_DISTANCE)) == [["ben"], ["ann"]]


def test_without_scikit_learn_equal_answers_still_form_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn.feature_extraction.text", None)
    answers = [answer("ann", "a b"), answer("ben", "a  b"), answer("cat", "c")]
    assert ids(group_answers(answers)) == [["ann", "ben"], ["cat"]]
    with pytest.raises(EvaluationError, match="evaluate"):
        group_answers(answers, MAX_DISTANCE)


def test_of_planted_duplicates_nobody_gets_another_answers_points_by_what_is_ticked_by_itself() -> None:
    answers, shares = planted_class(seed=7)
    assert wrong_spreads(answers, shares, is_read=True) == 0
    assert wrong_spreads(answers, shares, is_read=False) > 0, "the class holds twins that are worth less"
    assert len(group_answers(answers)) < len(answers) / 3


@pytest.mark.parametrize("language", ["english", "german"])
def test_as_shipped_like_texts_add_at_most_2_percent_on_published_answers(language: str) -> None:
    pytest.importorskip("sklearn")
    questions = saf(language)[:3]
    if not questions:
        pytest.skip("the published answers are not there")
    share, error = spread(question_answers(questions), MAX_DISTANCE)
    assert share < 0.95
    assert error <= MOST_ADDED
