"""A class's grades beside people's: agreement by criterion and by band, people among themselves, a floor, doubts.

Where several people graded, the model is compared with each of them, as they are with one another: no mean of theirs
stands for the truth. Work that was an example for the others, or that no model gave points to, is left out.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import combinations
from statistics import fmean
from typing import Any

import numpy as np

from grading.evaluation.agreement import Agreement, Estimate, EvaluationError, GradePair, agreement, extra, tfidf_floor
from grading.evaluation.agreement import gain as gain_of
from grading.evaluation.hand_grades import TOTAL, HandGrades
from grading.points import EXAMPLE_REMARK, Doubt, Grade
from grading.report.grades import GradedClass
from grading.rubric.rubric import Points, Rubric, add_points, exact, plain
from producers.words import join_with_and

BANDS = ("none", "partial", "full")  # of a criterion's points, as the person gave them
WHOLE, EVERY_CRITERION = "total", "all criteria"
_LIKELIHOOD_BINS = 10
_Steps = Mapping[str, Points]  # of the points that may be given, by criterion


@dataclass(frozen=True, slots=True)
class ClassWork:
    """What the class handed in, where it is still there: for the floor, and for the steps of points."""

    rubric: Rubric | None = None
    reference: str = ""  # the solution's text; "": each criterion's guidance stands for it
    texts: Mapping[str, str] = field(default_factory=dict)  # by submission


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What was measured of one batch. Of each list of agreements the first is the most general."""

    title: str
    submissions: int
    model: tuple[Agreement, ...]
    by_band: tuple[Agreement, ...]
    people: tuple[Agreement, ...]  # among themselves; () where one person graded
    floor: tuple[Agreement, ...]
    doubts: tuple[Mapping[str, Any], ...]  # kind, flagged, flagged_wrong, unflagged, unflagged_wrong; submissions
    reliability: tuple[tuple[float, float], ...]  # mean likelihood of the points given, share that a person gave too
    pairs: tuple[GradePair, ...]  # model and person

    @property
    def json_form(self) -> dict[str, Any]:
        """As plain data, without anybody's name."""
        return {name: value for name, value in asdict(self).items() if name != "pairs"}


def evaluate(
    graded_class: GradedClass, hand_grades: HandGrades, work: ClassWork, tolerance: Points = 1, seed: int = 0
) -> Evaluation:
    """Measure a class that models have graded.

    Args:
        tolerance: points by which a total may differ before the grade is called wrong.
        seed: of the bootstrap samples and of the floor's third.

    Raises EvaluationError where nothing can be compared.
    """
    steps = {criterion.id: criterion.step for criterion in work.rubric.criteria} if work.rubric else {}
    compared = [
        grade
        for grade in graded_class.grades
        if grade.submission in hand_grades and EXAMPLE_REMARK not in grade.remarks
        if any(item.points is not None for item in grade.criteria)
    ]
    pairs, people = [], []
    for grade in compared:
        by_model = {item.id: item.points for item in grade.criteria} | {TOTAL: grade.points}
        by_rater = _by_rater(hand_grades, grade)
        pairs += [pair for points in by_rater for pair in _pairs(grade, steps, by_model, points)]
        people += [pair for two in combinations(by_rater, 2) for pair in _pairs(grade, steps, *two)]
    if not pairs:
        raise EvaluationError("no submission with hand grades has points of a model's for the same criterion")
    floor = _floor(compared, hand_grades, work, steps, seed)
    model, by_people, by_words = (
        tuple(agreement(name, named_pairs, seed) for name, named_pairs in by_name(source).items())
        for source in (pairs, people, floor)
    )
    doubts = tuple(_doubt_records(compared, pairs, tolerance))
    reliability = _reliability(compared, pairs)
    bands = _by_band(pairs, seed)
    return Evaluation(
        graded_class.title, len(compared), model, bands, by_people, by_words, doubts, reliability, tuple(pairs)
    )


def gains(before: Evaluation, after: Evaluation, seed: int = 0) -> tuple[Agreement, ...]:
    """How much nearer to people `after` is than `before`, over what both have graded; as its `model`."""
    later_pairs = by_name(after.pairs)
    return tuple(
        gain_of(name, pairs, later_pairs[name], seed)
        for name, pairs in by_name(before.pairs).items()
        if name in later_pairs
    )


def _by_rater(hand_grades: HandGrades, grade: Grade) -> list[Mapping[str, Points]]:
    """What each person gave, with the total where it follows. Raises EvaluationError for what the rubric hasn't."""
    ids = {item.id for item in grade.criteria}
    by_rater = [points for _, points in sorted(hand_grades[grade.submission].items())]
    if strangers := {id for points in by_rater for id in points} - ids - {TOTAL}:
        raise EvaluationError(
            f"the rubric has no criterion {min(strangers)!r:.60}; it has {join_with_and(sorted(ids))}"
        )
    return [{TOTAL: add_points(points.values()), **points} if points.keys() == ids else points for points in by_rater]


def _pairs(grade: Grade, steps: _Steps, first: Mapping[str, Points | None], second: _Steps) -> Iterator[GradePair]:
    limits = {TOTAL: grade.max_points} | {item.id: item.max_points for item in grade.criteria}
    for id, max_points in limits.items():
        points = first.get(id)
        if second.get(id, 0) > max_points:
            raise EvaluationError(f"{grade.submission!r}: more than {max_points} points for {id or 'the whole'}")
        if points is not None and id in second:
            step = steps.get(id, min(steps.values(), default=1))
            yield GradePair(grade.submission, id, points, second[id], max_points, step)


def by_name(pairs: Iterable[GradePair]) -> dict[str, list[GradePair]]:
    """Pairs of the total, of all criteria together where there are several, and of each; those that there are."""
    pairs_by_name: dict[str, list[GradePair]] = {WHOLE: [], EVERY_CRITERION: []}
    for pair in pairs:
        for name in (pair.criterion, EVERY_CRITERION) if pair.criterion else (WHOLE,):
            pairs_by_name.setdefault(name, []).append(pair)
    is_one = len(pairs_by_name) == 3
    return {name: some for name, some in pairs_by_name.items() if some and not (is_one and name == EVERY_CRITERION)}


def finest(pairs: Sequence[GradePair]) -> Sequence[GradePair]:
    """Those of criteria, or the totals where people gave nothing else."""
    return [pair for pair in pairs if pair.criterion] or pairs


def band_of(pair: GradePair) -> str:
    """Of BANDS."""
    return BANDS[0] if not pair.second else BANDS[2] if pair.second == pair.max_points else BANDS[1]


def _by_band(pairs: Sequence[GradePair], seed: int) -> tuple[Agreement, ...]:
    """Kappa says nothing within a band: there one of the two hardly varies."""
    bands = (agreement(band, [pair for pair in finest(pairs) if band_of(pair) == band], seed) for band in BANDS)
    return tuple(replace(each, measures={**each.measures, "qwk": Estimate(None)}) for each in bands)


def _floor(
    grades: Sequence[Grade], hand_grades: HandGrades, work: ClassWork, steps: _Steps, seed: int
) -> list[GradePair]:
    """What counting words gives to two thirds of each criterion's grades, beside what the first person gave."""
    hand_pairs: dict[str, list[GradePair]] = defaultdict(list)
    for grade in grades:
        points = _by_rater(hand_grades, grade)[0]
        for pair in _pairs(grade, steps, points, points) if grade.submission in work.texts else ():
            hand_pairs[pair.criterion].append(pair)
    guidance = {item.id: item.guidance or item.title for item in work.rubric.criteria} if work.rubric else {}
    floor, draw = [], np.random.default_rng(seed)
    for id, pairs in hand_pairs.items():
        reference = work.reference or guidance.get(id, " ".join(guidance.values()))
        texts, shares = zip(
            *((work.texts[pair.submission], pair.second / pair.max_points) for pair in pairs), strict=True
        )
        for place, share in tfidf_floor(reference, texts, shares, draw):
            step_number = round(share * pairs[place].max_points / pairs[place].step)
            floor.append(replace(pairs[place], first=plain(step_number * exact(pairs[place].step))))
    return floor


# --- doubts, and how sure the model was


def kind_of(doubt: Doubt) -> str:
    """A reason for doubt without what is this submission's own: names of criteria, figures, quotes."""
    text = doubt.why.removeprefix(f"{doubt.criterion_id}: ")
    return re.sub(r"\d[\d.,]*", "…", re.split(r"[:(“]", text)[0]).strip()


def _doubt_records(grades: Sequence[Grade], pairs: Sequence[GradePair], tolerance: Points) -> Iterator[dict[str, Any]]:
    """Each kind of doubt, the most frequent first; before them whether there was any.

    Wrong is a total that is more than `tolerance` from what people gave on average; without one, any criterion that is
    more than a step from it.
    """
    wrong = {}
    for grade in grades:
        named_pairs = by_name(pair for pair in pairs if pair.submission == grade.submission)
        judged = {WHOLE: named_pairs[WHOLE]} if WHOLE in named_pairs else named_pairs
        wrong[grade.id] = any(
            abs(fmean(pair.difference for pair in each)) > (each[0].step if name != WHOLE else tolerance)
            for name, each in judged.items()
            if name != EVERY_CRITERION
        )
    kinds = {grade.id: {kind_of(doubt) for doubt in grade.doubts} for grade in grades}
    counts = Counter(kind for names in kinds.values() for kind in names)
    for kind in ("any reason for review", *(kind for kind, _ in counts.most_common())):
        flags = {id: kind in names if kind in counts else bool(names) for id, names in kinds.items()}
        outcomes = Counter((flag, wrong[id]) for id, flag in flags.items())
        yield {
            "kind": kind,
            "flagged": sum(flags.values()),
            "flagged_wrong": outcomes[True, True],
            "unflagged": len(flags) - sum(flags.values()),
            "unflagged_wrong": outcomes[False, True],
        }


def _reliability(grades: Sequence[Grade], pairs: Sequence[GradePair]) -> tuple[tuple[float, float], ...]:
    """For bins of the likelihood of the points given: its mean, and how often a person gave the same."""
    likelihoods = {
        (grade.submission, item.id): min(1.0, item.distribution[str(item.points)])
        for grade in grades
        for item in grade.criteria
        if str(item.points) in item.distribution
    }
    judged = [(not pair.difference, likelihoods.get((pair.submission, pair.criterion))) for pair in pairs]
    same, likely = (
        zip(*((flag, share) for flag, share in judged if share is not None), strict=True) if likelihoods else ((), ())
    )
    if not likely:
        return ()
    curve = extra("sklearn.calibration").calibration_curve(same, likely, n_bins=_LIKELIHOOD_BINS)
    return tuple((float(mean), float(right)) for right, mean in zip(*curve, strict=True))
