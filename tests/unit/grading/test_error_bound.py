"""The arithmetic of a bound: known values, brute force, and somebody else's kappa."""

import random
from math import comb

import pytest
from sklearn.metrics import cohen_kappa_score

from grading.error_bound import (
    BoundError,
    SamplingUnit,
    best_release,
    bonferroni_confidence,
    check_plan,
    compare,
    most_off,
    no_promise,
    percent,
    percent_without_error,
    promise,
    quadratic_kappa,
    releases,
    same_distribution_p,
    share_off,
    uniform_sample,
)


def test_no_error_in_30_still_allows_seven_percent_and_in_15_fourteen() -> None:
    assert share_off(0, 30) == pytest.approx(1 - 0.1 ** (1 / 30))
    assert percent_without_error(30) == "7.4%"
    assert percent_without_error(15) == "14.3%"
    assert share_off(30, 30) == 1.0


def chance_of_so_few(off: int, sampled: int, population: int, bad: int) -> float:
    ways = (comb(bad, k) * comb(population - bad, sampled - k) for k in range(off + 1))
    return sum(ways) / comb(population, sampled)


@pytest.mark.parametrize(("off", "sampled", "population"), [(0, 15, 60), (2, 30, 80), (0, 30, 31), (5, 12, 40)])
@pytest.mark.parametrize("confidence", [0.9, 0.98])
def test_the_largest_number_that_may_be_off_is_the_last_that_the_sample_does_not_rule_out(
    off: int, sampled: int, population: int, confidence: float
) -> None:
    possible = range(off, population - (sampled - off) + 1)
    allowed = [bad for bad in possible if chance_of_so_few(off, sampled, population, bad) > 1 - confidence]
    assert most_off(off, sampled, population, confidence) == max(allowed)


def test_a_class_graded_whole_leaves_nothing_open_and_nothing_graded_leaves_everything() -> None:
    assert most_off(3, 40, 40, 0.9) == 3
    assert most_off(0, 0, 40, 0.9) == 40


def test_a_larger_class_is_never_promised_more_than_one_without_end() -> None:
    assert most_off(1, 30, 10_000, 0.9) / 10_000 == pytest.approx(share_off(1, 30), abs=2e-4)


def test_kappa_is_scikit_learns() -> None:
    draw = random.Random(1)
    pairs = [(draw.randint(0, 5), draw.randint(0, 5)) for _ in range(200)]
    theirs = cohen_kappa_score(*zip(*pairs, strict=True), weights="quadratic", labels=list(range(6)))
    assert quadratic_kappa(pairs) == pytest.approx(theirs)
    assert quadratic_kappa([(2, 2), (2, 2)]) is None


def test_agreement_says_how_often_how_far_and_in_which_direction() -> None:
    found = compare("joins", "Joins", [(2, 2), (1, 2), (3, 2), (0, 2)])
    assert (found.compared, found.same, found.bias, found.largest) == (4, 1, 0.5, 2)
    low, high = found.interval or (0, 0)
    assert low < 0.5 < high
    assert compare("joins", "Joins", [(1, 2), (2, 3)]).interval is None


def units(doubts: list[float], off: list[bool | None]) -> list[SamplingUnit]:
    return [SamplingUnit(doubt, bad) for doubt, bad in zip(doubts, off, strict=True)]


def test_a_bound_is_about_the_grades_up_to_a_threshold_that_nobody_graded() -> None:
    everybody = units([0.0] * 60 + [2.0] * 40, [False] * 20 + [None] * 40 + [True] * 10 + [None] * 30)
    low, high = releases(everybody, [0.0, 2.0], bonferroni_confidence(0.9, 2))
    assert (low.released, low.sampled, low.off, low.unseen_count) == (60, 20, 0, 40)
    assert (high.released, high.sampled, high.off, high.unseen_count) == (100, 30, 10, 70)
    assert low.at_most == (most_off(0, 20, 60, bonferroni_confidence(0.9, 2))) / 40
    assert best_release([low, high], 0.2) is low
    assert best_release([low, high], 0.9) is high
    assert best_release([low, high], 0.01) is None


def test_sentences_name_the_bound_or_the_sample_that_could() -> None:
    everybody = units([0.0] * 200, [False] * 15 + [None] * 185)
    (found,) = releases(everybody, [0.0], 0.9)
    assert promise(found, 1, 0.9) == (
        "With 90% confidence at most 14.6% of the grades that nobody looks at differ from yours by more than 1 point."
    )
    assert no_promise([found], 15, 0.1, 0.9) == "15 grades can't promise that; 30 could."
    assert "nor could 60" in no_promise([found], 15, 0.001, 0.9)


def test_a_percentage_is_never_rounded_down() -> None:
    assert percent(0.07001) == "7.1%"
    assert percent(0.07) == "7%"
    assert percent(0.0) == "0%"


def test_a_smaller_sample_is_the_beginning_of_a_larger_one() -> None:
    ids = [f"s{number}" for number in range(50)]
    assert uniform_sample(ids, 10, "7") == uniform_sample(list(reversed(ids)), 30, "7")[:10]
    assert sorted(uniform_sample(ids, 80, "7")) == sorted(ids)
    drawn = [uniform_sample(ids, 1, str(seed))[0] for seed in range(5000)]
    assert max(drawn.count(id) for id in ids) < 2 * 5000 / 50


def test_a_shift_is_seen_and_sameness_is_not() -> None:
    draw = random.Random(3)
    same = [[draw.random() for _ in range(60)] for _ in range(2)]
    assert same_distribution_p(*same) > 0.01
    assert same_distribution_p(same[0], [value + 0.5 for value in same[1]]) < 0.001


@pytest.mark.parametrize(
    ("thresholds", "sizes", "at_most", "confidence"),
    [
        ((), (30,), 0.1, 0.9),
        (tuple(range(6)), (30,), 0.1, 0.9),
        ((1.0, 0.0), (30,), 0.1, 0.9),
        ((float("nan"),), (30,), 0.1, 0.9),
        ((0.0,), (30, 15), 0.1, 0.9),
        ((0.0,), (0,), 0.1, 0.9),
        ((0.0,), (30,), 0.0, 0.9),
        ((0.0,), (30,), 0.1, 1.0),
    ],
)
def test_what_cannot_be_promised_of_any_class_is_refused(
    thresholds: tuple[float, ...], sizes: tuple[int, ...], at_most: float, confidence: float
) -> None:
    with pytest.raises(BoundError):
        check_plan(thresholds, sizes, at_most, confidence)
