"""How far two graders agree, with intervals, and a floor that any grader should be above.

    qwk          Cohen's kappa with quadratic weights (Cohen 1968), of points as shares of what there is to earn
    mae          mean absolute difference, points; `mae_share`: as a share of what there is to earn
    bias         mean of the first grader's points minus the second's: above 0 the first is lenient
    exact        share of equal points; `within_step`: of those at most one step apart

The bootstrap draws whole submissions, with all of their criteria and raters, because grades of one submission are not
independent. Every measure is a ratio of sums over submissions, so thousands of bootstrap samples are sums of one array.
SciPy and scikit-learn (extra `evaluate`) are imported only where they are needed.
"""

import importlib
import math
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from grading.rubric.rubric import Points, exact
from messages.errors import UsageError

MEASURES = ("qwk", "mae", "mae_share", "bias", "exact", "within_step")
CONFIDENCE = 0.95
MIN_UNITS = 10  # with fewer submissions than this, there is no confidence interval
RESAMPLES = 1_999
# Number of bootstrap samples that are in memory at the same time.
_BATCH = 200
# The agreement that simple text statistics reach (the floor) is computed only for a criterion with at least this many
# grades, because a line is fitted to a third of them.
MIN_FLOOR_GRADES = 9

_WORD = re.compile(r"\w\w")  # scikit-learn's vectorizer counts only words of at least two characters
_Floats = NDArray[np.float64]


class EvaluationError(UsageError):
    """Nothing can be measured from these grades. The message says what to change."""


@dataclass(frozen=True, slots=True)
class GradePair:
    """Two graders' points for one criterion of one submission. `step` is the step between possible points."""

    submission: str
    criterion: str  # "": the total
    first: Points
    second: Points
    max_points: Points
    step: Points = 1
    min_points: Points = 0  # the fewest possible points; negative if the criterion can deduct points

    @property
    def difference(self) -> float:
        """The first grader's points minus the second's."""
        return float(exact(self.first) - exact(self.second))

    @property
    def shares(self) -> tuple[float, float]:
        """Both graders' points, as shares of the range from the fewest to the most possible points."""
        low, high = float(self.min_points), float(self.max_points)
        return (float(self.first) - low) / (high - low), (float(self.second) - low) / (high - low)


@dataclass(frozen=True, slots=True)
class Estimate:
    """A measure's value and its BCa bootstrap interval.

    The value is None if the measure is undefined. The interval is None if it is unknown.
    """

    value: float | None
    interval: tuple[float, float] | None = None


@dataclass(frozen=True, slots=True)
class Agreement:
    """The agreement of two graders over some of the criteria. `measures` has an entry for each of MEASURES."""

    name: str
    submissions: int
    pairs: int
    measures: Mapping[str, Estimate]


def extra(module: str) -> Any:
    """Import a module that an extra installs. Raises EvaluationError if it is missing."""
    try:
        return importlib.import_module(module)
    except ImportError:
        raise EvaluationError(
            "kvasir evaluate needs SciPy and scikit-learn: pip install 'kvasir-inference[evaluate]'"
        ) from None


def agreement(name: str, pairs: Sequence[GradePair], before: Sequence[GradePair] = (), seed: int = 0) -> Agreement:
    """Compute the agreement of these pairs. The same seed gives the same intervals.

    `before` are another grader's pairs with the same people. With them, the result is how much higher the measures of
    `pairs` are, over the submissions that both graded.
    """
    units = {pair.submission for pair in pairs} & {pair.submission for pair in (before or pairs)}
    sides = [[pair for pair in side if pair.submission in units] for side in (before, pairs) if side]
    return Agreement(
        name,
        len(units),
        len(sides[-1]) if sides else 0,
        estimates([sums_of(side) for side in sides], seed),
    )


def sums_of(pairs: Sequence[GradePair]) -> _Floats:
    """Return the sums from which the measures are computed.

    There is a row for each sum and a column for each submission, sorted by name.
    """
    places = {unit: place for place, unit in enumerate(sorted({pair.submission for pair in pairs}))}
    sums = np.zeros((10, len(places)))
    for pair in pairs:
        (first, second), distance = pair.shares, abs(pair.difference)
        sums[:, places[pair.submission]] += (
            *(1, first, second, first**2 + second**2, (first - second) ** 2),
            *(distance, abs(first - second), pair.difference, not distance, distance <= pair.step),
        )
    return sums


def _measures(sums: _Floats) -> _Floats:
    """Compute MEASURES from sums over submissions, along the first axis. An undefined measure is nan.

    Kappa is 1 − the mean squared difference, divided by its expected value if the two graders were independent.
    """
    count, first, second, squares, between, *others = sums
    with np.errstate(divide="ignore", invalid="ignore"):
        by_chance = squares - 2 * first * second / count
        kappa = 1 - np.where(by_chance > 1e-12 * count, between / by_chance, math.nan)
        return np.stack([kappa, *(other / count for other in others)])


def estimates(sums: Sequence[_Floats], seed: int = 0, resamples: int = RESAMPLES) -> dict[str, Estimate]:
    """Compute MEASURES with their intervals from the sums of one comparison.

    For two comparisons, it is the second's measures minus the first's.
    """
    unit_count = sums[0].shape[1] if sums else 0
    if not unit_count:
        return dict.fromkeys(MEASURES, Estimate(None))

    def statistic(drawn: NDArray[np.int_], axis: int = -1) -> _Floats:
        ends = [_measures(each[:, drawn].sum(axis)) for each in sums]
        return ends[0] if len(ends) == 1 else ends[1] - ends[0]

    values, bounds = statistic(np.arange(unit_count)), np.full((2, len(MEASURES)), math.nan)
    if unit_count >= MIN_UNITS and resamples:
        with warnings.catch_warnings():
            # If all values are equal, SciPy warns, and the result has no interval.
            warnings.simplefilter("ignore")
            bounds = np.stack(
                extra("scipy.stats")
                .bootstrap(
                    (np.arange(unit_count),),
                    statistic,
                    vectorized=True,
                    n_resamples=resamples,
                    batch=_BATCH,
                    confidence_level=CONFIDENCE,
                    rng=np.random.default_rng(seed),
                )
                .confidence_interval
            )
    return {
        name: Estimate(
            None if math.isnan(value) else float(value),
            (float(low), float(high)) if math.isfinite(low) and math.isfinite(high) else None,
        )
        for name, value, low, high in zip(MEASURES, values, *bounds, strict=True)
    }


def tfidf_floor(
    reference: str, answers: Sequence[str], shares: Sequence[float], draw: np.random.Generator
) -> list[tuple[int, float]]:
    """Return the points that counting words would give: a floor that any grader should beat.

    A line is fitted from an answer's likeness to the reference to its share of the points. The likeness is the cosine
    of tf-idf vectors (sublinear tf; vocabulary and weights come from these texts). A random third of the answers is
    used for the fit. The result holds, for each other answer, its place and the predicted share from 0 to 1. It is None
    if there are fewer than MIN_FLOOR_GRADES answers, or the reference has no word.
    """
    if len(answers) < MIN_FLOOR_GRADES or not _WORD.search(reference):
        return []
    vectorizer = extra("sklearn.feature_extraction.text").TfidfVectorizer(sublinear_tf=True)
    vectors = vectorizer.fit_transform([reference, *answers])
    likeness = (vectors[1:] @ vectors[0].T).toarray()
    fitted, held_out = np.split(draw.permutation(len(answers)), [len(answers) // 3])
    line = extra("sklearn.linear_model").LinearRegression().fit(likeness[fitted], np.asarray(shares)[fitted])
    held_out_shares = np.clip(line.predict(likeness[held_out]), 0, 1)
    return list(zip(held_out.tolist(), held_out_shares.tolist(), strict=True))
