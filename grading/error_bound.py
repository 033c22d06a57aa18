"""What a sample graded by hand says of the grades that nobody looks at: agreement, and a bound that is exact.

Everything here is arithmetic; `grading.hand_sample` reads and writes the files. SciPy, which the extra `bound` brings,
is imported where it is needed. docs/explanation/grading.md has the sources.
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
SIGNIFICANCE_LEVEL = 0.01  # two groups with a smaller p-value are not called alike
_ROUNDING = 1e-9  # tolerance on a probability: where it decides, the looser bound counts


class BoundError(UsageError):
    """No bound can be computed from this; the message says what to change."""


# --- signals of doubt ---


@dataclass(frozen=True, slots=True)
class Signal:
    """What says how doubtful a grade is, before anybody has looked; and up to which values grades may go unseen."""

    title: str
    thresholds: tuple[float, ...]  # preset, ascending
    of: Callable[[Grade], float]


def _spread(grade: Grade) -> float:
    spreads = [
        (exact(max(item.sampled)) - exact(min(item.sampled))) / (exact(item.max_points) - exact(item.min_points))
        for item in grade.criteria
        if item.sampled
    ]
    return round(float(max(spreads, default=0)), 6)


# One threshold by default: grades with a reason for review are exported blank anyway, and each further one costs.
SIGNALS: Mapping[str, Signal] = MappingProxyType(
    {
        "reasons": Signal("reasons why a person must look", (0.0,), lambda grade: float(len(grade.doubts))),
        "spread": Signal("how far several answers are apart, as a part of a criterion's points", (0.0, 0.2), _spread),
    }
)


# --- the sample ---


def uniform_sample(ids: Sequence[str], size: int, seed: str) -> tuple[str, ...]:
    """`size` of the ids, or all where there are fewer: each subset is as likely, and so is each order.

    The first n of them are a uniform sample as well, so that a second look can take more of the same.
    """
    return tuple(random.Random(seed).sample(sorted(ids), min(size, len(ids))))


# --- exact bounds ---


@cache
def most_off(off: int, sample_size: int, population: int, confidence: float) -> int:
    """The largest number of a finite class's grades that may be off, if `off` of a uniform sample are.

    A larger number would have shown so few with a probability of at most 1 − confidence (hypergeometric).
    """
    from numpy import arange

    possible = arange(off, population - (sample_size - off) + 1)
    chance = _stats().hypergeom.cdf(off, population, possible, sample_size)
    return int(possible[chance >= 1 - confidence - _ROUNDING].max())


@cache
def share_off(off: int, sample_size: int, confidence: float = CONFIDENCE) -> float:
    """The same as a share, of a class without end (Clopper and Pearson): no error in 30 still allows 0.074."""
    return float(_stats().beta.ppf(confidence, off + 1, sample_size - off)) if off < sample_size else 1.0


@dataclass(frozen=True, slots=True)
class SamplingUnit:
    """One submission of the class that the sample was drawn from."""

    doubt: float
    off: bool | None = None  # whether the hand grade is further away than promised; None: not graded by hand


@dataclass(frozen=True, slots=True)
class Release:
    """What may be said of the grades whose doubt is at most `threshold`."""

    threshold: float
    released: int  # grades, those graded by hand among them
    sampled: int  # of these, graded by hand
    off: int  # how many of these are further off than promised
    at_most: float  # share of the unseen that are off, with the confidence asked for; 0 to 1

    @property
    def unseen_count(self) -> int:
        """Grades that nobody looks at."""
        return self.released - self.sampled


def bonferroni_confidence(confidence: float, statements: int) -> float:
    """The confidence of each of several statements, all of which are to hold together (Bonferroni)."""
    return 1 - (1 - confidence) / statements


def releases(units: Iterable[SamplingUnit], thresholds: Sequence[float], confidence: float) -> list[Release]:
    """A bound for each threshold. `confidence` is each one's own: see `bonferroni_confidence`."""
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
    """The one that leaves most grades unseen among those that keep what is wanted; None where none does.

    All bounds hold together, so the choice may be made after seeing them.
    """
    good = [release for release in candidates if release.unseen_count and release.at_most <= at_most]
    return max(good, key=lambda release: (release.unseen_count, -release.at_most), default=None)


def sufficient_size(release: Release, sample_size: int, at_most: float, confidence: float) -> int:
    """The smallest of SIZES that could keep what `sample_size` can't, if as many of each hundred are off; 0: none."""
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
    """The sentence that is promised."""
    off_by = f"differ from yours by more than {plural_points(tolerance)}"
    share = percent(release.at_most)
    return f"With {confidence:.0%} confidence at most {share} of the grades that nobody looks at {off_by}."


def no_promise(candidates: Sequence[Release], sample_size: int, at_most: float, confidence: float) -> str:
    """Why nothing is promised, and what would help. `confidence` is each bound's own."""
    able = [size for release in candidates if (size := sufficient_size(release, sample_size, at_most, confidence))]
    if able:
        return f"{sample_size} grades can't promise that; {min(able)} could."
    return (
        f"{sample_size} grades can't promise that, nor could {SIZES[-1]} if as many differed: look at more, or promise "
        "less."
    )


def percent(share: float) -> str:
    """A bound in percent, rounded up: `7.4%` says no less than is known."""
    up = (Decimal(repr(share)) * 100 - Decimal("1e-9")).quantize(Decimal("0.1"), ROUND_CEILING)
    return f"{up:f}".removesuffix(".0").replace("-0", "0") + "%"


def plural_points(points: Points) -> str:
    """`1 point`, `0.5 points`."""
    return f"{points} point{'' if points == 1 else 's'}"


def percent_without_error(sample_size: int) -> str:
    """The share that may differ still, after a sample without any error."""
    return percent(share_off(0, sample_size, CONFIDENCE))


# --- agreement ---


@dataclass(frozen=True, slots=True)
class PointComparison:
    """One criterion, or the total, over the sample: a person's points and the model's."""

    criterion: str  # "": the total
    title: str
    compared: int
    same: int
    kappa: float | None  # quadratic weights; None where both gave everybody the same, or nobody was compared
    bias: float  # person minus model, points
    interval: tuple[float, float] | None  # interval of the bias, by Student's t; None if the differences don't vary
    largest: float  # difference, without its sign


def compare(
    criterion: str, title: str, pairs: Sequence[tuple[Points, Points]], confidence: float = CONFIDENCE
) -> PointComparison:
    """Agreement of pairs (model, person)."""
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
    """Cohen's kappa with weights that grow with the square of the difference in points.

    1 − the mean square between the two, over what it would be if one didn't know of the other.
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
    """p-value of two groups having one distribution (Kolmogorov and Smirnov; with ties it errs to the safe side)."""
    return float(_stats().ks_2samp(first, second, method="asymp").pvalue) if first and second else 1.0


def _stats() -> Any:
    try:
        from scipy import stats
    except ImportError:
        raise BoundError("the bound needs SciPy: pip install 'kvasir-inference[bound]'") from None
    return stats


def check_plan(thresholds: Sequence[float], sizes: Sequence[int], at_most: float, confidence: float) -> None:
    """Raises BoundError for what can't be promised of any class."""
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
