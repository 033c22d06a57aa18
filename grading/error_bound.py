"""Agreement and an exact error bound for the grades that nobody looks at, from a sample that was graded by hand.

This module only computes; `grading.hand_sample` reads and writes the files. SciPy (extra `bound`) is imported only
where it is needed. docs/explanation/grading.md names the sources.
"""

import math
import random
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from decimal import ROUND_CEILING, Decimal
from functools import cache
from statistics import fmean, pvariance
from types import MappingProxyType
from typing import Any

from grading.points import Grade
from grading.rubric.rubric import Points, exact
from messages.errors import UsageError

CONFIDENCE = 0.9
SIZES = (15, 30, 60)
MAX_THRESHOLDS = 5
# Two groups count as different if the p-value of their comparison is below this.
SIGNIFICANCE_LEVEL = 0.01
# If two probabilities differ by less than this, rounding may be the cause. The looser bound is then used.
_ROUNDING = 1e-9


class BoundError(UsageError):
    """No bound can be computed. The message says what to change."""


# --- signals of doubt ---


@dataclass(frozen=True, slots=True)
class Signal:
    """A measure of how doubtful a grade is before anybody has looked.

    Grades up to one of its thresholds may go unseen.
    """

    title: str
    thresholds: tuple[float, ...]  # set in advance, in ascending order
    of: Callable[[Grade], float]


def _spread(grade: Grade) -> float:
    spreads = [
        (exact(max(item.sampled)) - exact(min(item.sampled))) / (exact(item.max_points) - exact(item.min_points))
        for item in grade.criteria
        if item.sampled
    ]
    return round(float(max(spreads, default=0)), 6)


# By default, the only threshold is 0 reasons for review. Each further threshold would make all bounds looser, and an
# export leaves grades with a reason for review blank anyway.
SIGNALS: Mapping[str, Signal] = MappingProxyType(
    {
        "reasons": Signal("reasons why a person must look", (0.0,), lambda grade: float(len(grade.doubts))),
        "spread": Signal("how far several answers are apart, as a part of a criterion's points", (0.0, 0.2), _spread),
    }
)


# --- the sample ---


def uniform_sample(ids: Sequence[str], size: int, seed: str) -> tuple[str, ...]:
    """Draw `size` of the ids at random, or all of them if there are fewer.

    Each subset and each order is equally likely.

    The first n of the result are a uniform sample as well, so a later look can simply take more of the same sample.
    """
    return tuple(random.Random(seed).sample(sorted(ids), min(size, len(ids))))


# --- exact bounds ---


@cache
def most_off(off: int, sample_size: int, population: int, confidence: float) -> int:
    """Return the largest number of grades in a class that may be off, if `off` grades of a uniform sample are.

    If more grades than that were off, a sample would show so few with a probability of at most 1 − confidence
    (hypergeometric).
    """
    from numpy import arange

    possible = arange(off, population - (sample_size - off) + 1)
    chance = _stats().hypergeom.cdf(off, population, possible, sample_size)
    return int(possible[chance >= 1 - confidence - _ROUNDING].max())


@cache
def share_off(off: int, sample_size: int, confidence: float = CONFIDENCE) -> float:
    """Return the same bound as a share, for an infinite class (Clopper and Pearson).

    For example, no error in 30 still allows 0.074.
    """
    return float(_stats().beta.ppf(confidence, off + 1, sample_size - off)) if off < sample_size else 1.0


@dataclass(frozen=True, slots=True)
class SamplingUnit:
    """One submission of the class from which the sample was drawn."""

    doubt: float
    # Whether the hand grade differs from the model's grade by more than the tolerance. None means that there is no hand
    # grade.
    off: bool | None = None


@dataclass(frozen=True, slots=True)
class Release:
    """What can be promised about the grades whose doubt is at most `threshold`."""

    threshold: float
    released: int  # number of grades whose doubt is at most the threshold
    sampled: int  # how many of the released grades a person has also graded by hand
    off: int  # how many hand grades differ from the model's grade by more than the tolerance
    at_most: float  # upper bound, from 0 to 1, of the share of unseen grades that are off by more than the tolerance

    @property
    def unseen_count(self) -> int:
        """The number of grades that nobody looks at."""
        return self.released - self.sampled


def bonferroni_confidence(confidence: float, statements: int) -> float:
    """Return the confidence for each of several statements that must all hold together (Bonferroni)."""
    return 1 - (1 - confidence) / statements


def releases(units: Iterable[SamplingUnit], thresholds: Sequence[float], confidence: float) -> list[Release]:
    """Return a bound for each threshold. `confidence` is that of each single bound: see `bonferroni_confidence`."""
    all_units = list(units)
    return [_release([unit for unit in all_units if unit.doubt <= limit], limit, confidence) for limit in thresholds]


def _release(units: Sequence[SamplingUnit], threshold: float, confidence: float) -> Release:
    off_flags = [unit.off for unit in units if unit.off is not None]
    unseen_count = len(units) - len(off_flags)
    unseen_off = (
        most_off(sum(off_flags), len(off_flags), len(units), confidence) - sum(off_flags) if unseen_count else 0
    )
    return Release(
        threshold, len(units), len(off_flags), sum(off_flags), unseen_off / unseen_count if unseen_count else 0.0
    )


def best_release(candidates: Iterable[Release], at_most: float) -> Release | None:
    """Return the release with the most unseen grades among those within `at_most`, or None.

    All bounds hold together, so the choice may be made after seeing them.
    """
    good = [release for release in candidates if release.unseen_count and release.at_most <= at_most]
    return max(good, key=lambda release: (release.unseen_count, -release.at_most), default=None)


def sufficient_size(release: Release, sample_size: int, at_most: float, confidence: float) -> int:
    """Return the smallest of SIZES that could keep the promise if the same share of grades is off, or 0."""
    for size in SIZES:
        released_sample = math.floor(release.sampled * size / sample_size)
        off = math.ceil(release.off * size / sample_size)
        unseen_count = release.released - released_sample
        is_possible = size > sample_size and unseen_count > 0 and off <= released_sample
        if (
            is_possible
            and (most_off(off, released_sample, release.released, confidence) - off) / unseen_count <= at_most
        ):
            return size
    return 0


# --- sentences ---


def promise(release: Release, tolerance: Points, confidence: float) -> str:
    """Return the sentence that promises the bound."""
    off_by = f"differ from yours by more than {plural_points(tolerance)}"
    share = percent(release.at_most)
    return f"With {confidence:.0%} confidence at most {share} of the grades that nobody looks at {off_by}."


def no_promise(candidates: Sequence[Release], sample_size: int, at_most: float, confidence: float) -> str:
    """Say why nothing is promised, and what would help. `confidence` is that of each single bound."""
    able = [size for release in candidates if (size := sufficient_size(release, sample_size, at_most, confidence))]
    if able:
        return f"{sample_size} grades can't promise that; {min(able)} could."
    return (
        f"{sample_size} grades can't promise that, nor could {SIZES[-1]} if as many differed: look at more, or promise "
        "less."
    )


def percent(share: float) -> str:
    """Format a bound in percent, rounded up, so that the text never promises more than the bound: `7.4%`."""
    up = (Decimal(repr(share)) * 100 - Decimal("1e-9")).quantize(Decimal("0.1"), ROUND_CEILING)
    return f"{up:f}".removesuffix(".0").replace("-0", "0") + "%"


def plural_points(points: Points) -> str:
    """Format points with their unit: `1 point`, `0.5 points`."""
    return f"{points} point{'' if points == 1 else 's'}"


def percent_without_error(sample_size: int) -> str:
    """Return the share that may still differ after a sample without any error."""
    return percent(share_off(0, sample_size, CONFIDENCE))


# --- agreement ---


@dataclass(frozen=True, slots=True)
class PointComparison:
    """A person's points and the model's over the sample, for one criterion or for the total."""

    criterion: str  # "": the total
    title: str
    compared: int
    same: int
    # Cohen's kappa with quadratic weights. None if there are no pairs, or if person and model gave every submission the
    # same number of points.
    kappa: float | None
    # The average of the person's points minus the model's points.
    bias: float
    # The confidence interval of the bias, from Student's t distribution. None if all differences are equal.
    interval: tuple[float, float] | None
    largest: float  # largest absolute difference


def compare(
    criterion: str, title: str, pairs: Sequence[tuple[Points, Points]], confidence: float = CONFIDENCE
) -> PointComparison:
    """Compute the agreement of pairs (model, person)."""
    differences = [float(exact(person) - exact(model)) for model, person in pairs]
    return PointComparison(
        criterion,
        title,
        len(pairs),
        same=sum(not difference for difference in differences),
        kappa=quadratic_kappa(pairs),
        bias=fmean(differences) if differences else 0.0,
        interval=_interval(differences, confidence),
        largest=max(map(abs, differences), default=0.0),
    )


def quadratic_kappa(pairs: Sequence[tuple[Points, Points]]) -> float | None:
    """Compute Cohen's kappa with weights that grow with the square of the difference in points.

    It is 1 − the mean squared difference, divided by its expected value if the two graders were independent.
    """
    if not pairs:
        return None
    model, person = ([float(value) for value in side] for side in zip(*pairs, strict=True))
    by_chance = pvariance(model) + pvariance(person) + (fmean(model) - fmean(person)) ** 2
    between = fmean((model_value - person_value) ** 2 for model_value, person_value in zip(model, person, strict=True))
    return 1 - between / by_chance if by_chance else None


def _interval(values: Sequence[float], confidence: float) -> tuple[float, float] | None:
    if len(set(values)) < 2:
        return None
    low, high = _stats().ttest_1samp(values, 0.0).confidence_interval(confidence)
    return float(low), float(high)


def same_distribution_p(first: Sequence[float], second: Sequence[float]) -> float:
    """Return the p-value that two groups have the same distribution (Kolmogorov-Smirnov).

    With ties, it errs on the safe side.
    """
    return float(_stats().ks_2samp(first, second, method="asymp").pvalue) if first and second else 1.0


def _stats() -> Any:
    try:
        from scipy import stats
    except ImportError:
        raise BoundError("the bound needs SciPy: pip install 'kvasir-inference[bound]'") from None
    return stats


def check_plan(thresholds: Sequence[float], sizes: Sequence[int], at_most: float, confidence: float) -> None:
    """Check that a plan could be kept for some class. Raises BoundError if it could not."""
    problems = {
        f"name one to {MAX_THRESHOLDS} thresholds, ascending, each once: {_list(thresholds)}": (
            not 1 <= len(thresholds) <= MAX_THRESHOLDS or list(thresholds) != sorted(set(thresholds))
        ),
        f"a threshold is a number from 0: {_list(thresholds)}": not all(0 <= limit < math.inf for limit in thresholds),
        f"name sample sizes ascending, each once, from 1: {_list(sizes)}": (
            not sizes or min(sizes) < 1 or list(sizes) != sorted(set(sizes))
        ),
        "a promise is of more than 0% and less than 100%, with a confidence from 50% to below 100%": (
            not 0 < at_most < 1 or not 0.5 <= confidence < 1
        ),
    }
    for problem, is_there in problems.items():
        if is_there:
            raise BoundError(problem)


def _list(values: Iterable[float]) -> str:
    return ", ".join(f"{value:g}" for value in values) or "none"
