"""How far two graders agree: as scikit-learn has it, with intervals that hold the truth, and a floor that is known."""

import builtins
import random
from typing import Any

import numpy as np
import pytest
from sklearn.metrics import cohen_kappa_score, mean_absolute_error

from benchmarks.evaluate import MEASURES, coverage, draw_pairs, floor, truth_of
from benchmarks.evaluate_sets import DATA, saf
from grading.evaluation.agreement import MIN_UNITS, EvaluationError, GradePair, agreement, tfidf_floor


def pairs_of(points: list[tuple[int, int]]) -> list[GradePair]:
    return [GradePair(str(number), "c", *pair, 4) for number, pair in enumerate(points)]


@pytest.mark.parametrize("seed", range(5))
def test_kappa_and_mean_difference_are_those_of_scikit_learn(seed: int) -> None:
    draw = random.Random(seed)
    points = [(draw.randint(0, 4), draw.randint(0, 4)) for _ in range(60)]
    model, person = zip(*points, strict=True)

    measures = agreement("c", pairs_of(points)).measures

    assert measures["qwk"].value == pytest.approx(cohen_kappa_score(model, person, weights="quadratic"))
    assert measures["mae"].value == pytest.approx(mean_absolute_error(person, model))
    assert measures["mae_share"].value == pytest.approx(mean_absolute_error(person, model) / 4)
    assert measures["bias"].value == pytest.approx(np.mean(model) - np.mean(person))
    assert measures["exact"].value == pytest.approx(np.equal(model, person).mean())
    assert measures["within_step"].value == pytest.approx((abs(np.subtract(model, person)) <= 1).mean())


def test_a_lenient_first_grader_has_a_bias_above_zero() -> None:
    assert agreement("c", pairs_of([(3, 2), (4, 4), (2, 0)])).measures["bias"].value == 1


def test_where_both_give_everybody_the_same_there_is_no_kappa_and_no_interval() -> None:
    measured = agreement("c", pairs_of([(2, 2)] * 30))

    assert measured.measures["qwk"].value is None
    assert measured.measures["exact"].value == 1
    assert all(measure.interval is None for measure in measured.measures.values())


def test_of_few_submissions_no_interval_is_said_however_many_criteria_they_have() -> None:
    few = [GradePair(str(unit), f"c{id}", unit % 3, id % 3, 4) for unit in range(MIN_UNITS - 1) for id in range(20)]

    assert agreement("c", few).measures["mae"].interval is None
    assert agreement("c", [*few, GradePair("last", "c0", 0, 3, 4)]).measures["mae"].interval


def test_intervals_are_the_same_again_and_hold_the_truth_of_planted_raters() -> None:
    pairs = draw_pairs(np.random.default_rng(3), 200, 5)
    assert agreement("c", pairs, seed=1) == agreement("c", pairs, seed=1)

    held = coverage(40, 0)

    assert {world: min(shares.values()) > 0.8 for world, shares in held.items()} == {"flat": True, "clustered": True}


def test_the_planted_truth_is_what_very_many_pairs_have() -> None:
    measures = agreement("c", draw_pairs(np.random.default_rng(0), 4_000, 5)).measures

    assert {name: measures[name].value for name in MEASURES} == pytest.approx(truth_of(5), abs=0.02)


def test_a_gain_is_measured_over_what_both_have_graded() -> None:
    worse = pairs_of([(4, 2), (0, 2), (1, 3), (0, 4)] * 10)
    better = [GradePair(pair.submission, "c", pair.second, pair.second, 4) for pair in worse[:30]]

    gained = agreement("c", better, worse)

    assert (gained.submissions, gained.pairs) == (30, 30)
    low, high = gained.measures["mae"].interval or (0, 0)
    assert low <= (gained.measures["mae"].value or 0) <= high < 0
    assert agreement("c", better, pairs_of([(1, 1)])[:0]).measures["mae"].value == 0
    stranger = [GradePair("somebody else", "c", 1, 1, 4)]
    assert agreement("c", better, stranger).measures["mae"].value is None


def test_the_floor_knows_an_answer_by_its_words_and_says_nothing_of_few_or_wordless_ones() -> None:
    answers = ["a dog and a cat", "a house", "a cat", "nothing at all"] * 6
    shares = [1.0, 0.0, 0.5, 0.0] * 6
    draw = np.random.default_rng(0)

    scored = tfidf_floor("a dog and a cat", answers, shares, draw)

    assert len(scored) == 16
    assert np.corrcoef([share for _, share in scored], [shares[place] for place, _ in scored])[0, 1] > 0.8
    assert tfidf_floor("a dog", answers[:8], shares[:8], draw) == []
    assert tfidf_floor("…", answers, shares, draw) == []
    assert len(tfidf_floor("a dog", [""] * 12, [0.5] * 12, draw)) == 8


@pytest.mark.skipif(not (DATA / "saf").is_dir(), reason="the published answers (SAF) are not on this machine")
@pytest.mark.parametrize(("language", "kappa"), [("english", 0.667), ("german", 0.370)])
def test_the_floor_on_published_answers_is_what_others_measured(language: str, kappa: float) -> None:
    measured = floor(saf(language), 0)

    assert measured
    assert measured.measures["qwk"].value == pytest.approx(kappa, abs=0.02)


def test_without_its_packages_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    plain_import = builtins.__import__

    def lacking(name: str, *rest: Any, **more: Any) -> Any:
        if name.startswith(("scipy", "sklearn")):
            raise ModuleNotFoundError(name)
        return plain_import(name, *rest, **more)

    monkeypatch.setattr("importlib.import_module", lacking)

    with pytest.raises(EvaluationError, match=r"kvasir-inference\[evaluate\]"):
        agreement("c", pairs_of([(1, 2), (2, 2)] * 20))
