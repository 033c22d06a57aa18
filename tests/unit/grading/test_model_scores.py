"""The figures of the demo model's evaluation, on cases whose right value is plain."""

import math

import pytest

from examples.model.evaluate import assess, make_exam
from examples.model.scores import Assessed, Judged, as_json, baseline, figures, kendall_tau, keyword_share
from grading.points import Grade, grade_submission
from grading.prompts.answers import parse_answer
from grading.rubric.rubric import ASPECTS
from grading.submissions.reading import Submission


def perfect(seed: int) -> Assessed:
    """An exam graded by its labels."""
    exam = make_exam(seed)
    graded: dict[str, Grade] = {"empty": grade_submission("empty", exam.made.rubric, {}, Submission("empty", "R", ()))}
    for labelled in exam.submissions:
        answers = {
            role: parse_answer(exam.made.answer(role, labelled), exam.made.rubric.for_model(role), role == "feedback")
            for role in ASPECTS
        }
        name = labelled.submission.name
        graded[name] = grade_submission(name, exam.made.rubric, answers, labelled.submission)
    return assess(exam, graded)


@pytest.fixture(scope="module")
def all_perfect() -> list[Assessed]:
    return [perfect(seed) for seed in range(10)]


def test_a_grader_that_knows_the_labels_gets_every_figure_right(all_perfect: list[Assessed]) -> None:
    found = figures(all_perfect, seed=1, resamples=50)

    assert found["criteria_accuracy"].value == 1
    assert found["quotes_found"].value == 1
    assert found["empty_score"].value == 0
    assert found["injection_gain"].value == found["injection_gain"].high == 0
    assert found["rank_tau"].value == pytest.approx(1)
    assert found["injection_gain"].count >= 10 * 3


def test_neither_a_constant_nor_a_keyword_count_comes_near_the_labels(all_perfect: list[Assessed]) -> None:
    assert baseline(all_perfect) < 0.65


def test_the_keyword_count_is_no_straw_man() -> None:
    told_apart = [Judged(1.0, None, 0.9), Judged(0.5, None, 0.5), Judged(0.0, None, 0.1)] * 3

    assert baseline([Assessed(told_apart)]) == 1
    assert keyword_share("n_rope is 41.7", "we had 41.7 of it: n_rope") == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("pairs", "tau"),
    [
        ([(1, 1), (2, 2), (3, 3)], 1.0),
        ([(1, 3), (2, 2), (3, 1)], -1.0),
        ([(1, 1), (1, 2), (2, 3)], 2 / math.sqrt(2 * 3)),
        ([(1, 5), (2, 5), (3, 5)], math.nan),  # everyone has the same grade
    ],
)
def test_kendall_s_tau_counts_pairs_in_order_and_allows_for_ties(pairs: list[tuple[float, float]], tau: float) -> None:
    assert kendall_tau(pairs) == pytest.approx(tau, nan_ok=True)


def test_an_interval_holds_its_value_and_is_the_same_for_the_same_seed() -> None:
    assessed = [Assessed([Judged(1.0, given, 0.0)]) for given in (1.0, 1.0, 0.0, 0.5, 1.0, 0.0)]

    once, again = (figures(assessed, seed=5, resamples=200)["criteria_accuracy"] for _ in range(2))

    assert once == again
    assert once.low < once.value == 0.5 < once.high


def test_a_criterion_without_points_is_not_graded_right() -> None:
    assert figures([Assessed([Judged(0.0, None, 0.0)])], seed=1, resamples=10)["criteria_accuracy"].value == 0


def test_a_figure_of_nothing_is_null_in_json() -> None:
    assert as_json(figures([Assessed()], seed=1, resamples=10))["rank_tau"]["value"] is None
