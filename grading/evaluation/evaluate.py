"""A class's grades beside people's: agreement by criterion and by band, people among themselves, a floor, doubts.

Where several people graded, the model is compared with each of them, as they are with one another: no mean of theirs
stands for the truth. Work that was an example for the others, or that no model gave points to, is left out.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import Any

import numpy as np

from grading.evaluation.agreement import Agreement, Estimate, EvaluationError, GradePair, agreement, extra, tfidf_floor
from grading.evaluation.hand_grades import TOTAL, HandGrades, in_class
from grading.jobs import Assignment
from grading.own_work import own_text
from grading.points import EXAMPLE_REMARK, Doubt, Grade
from grading.report.grades import GradedClass
from grading.rubric.rubric import Points, exact, plain

BANDS = ("none", "partial", "full")  # bands of a criterion's points, as the person gave them
WHOLE, EVERY_CRITERION = "the total", "all criteria"  # no criterion can be called so
_LIKELIHOOD_BINS = 10


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What was measured of one batch. `agreements`: of the `model` with people, by `band`, of `people`, of the `floor`.

    Of each the most general comes first; `people` is empty where one person graded.
    """

    title: str
    submissions: int
    agreements: Mapping[str, Sequence[Agreement]]
    doubts: Sequence[Mapping[str, Any]]  # kind, flagged, flagged_wrong, unflagged, unflagged_wrong; submissions
    reliability: Sequence[Sequence[float]]  # share that a person gave too, mean likelihood of the points given
    pairs: Sequence[GradePair]  # model and person


def evaluate(
    graded_class: GradedClass,
    hand_grades: HandGrades,
    assignment: Assignment | None = None,
    tolerance: Points = 1,
    seed: int = 0,
) -> Evaluation:
    """Measure a class that models have graded.

    Args:
        assignment: the class's work, where it is still there: for the floor, and for the steps of points.
        tolerance: points by which a total may differ before the grade is called wrong.
        seed: of the bootstrap samples and of the floor's third.

    Raises EvaluationError where nothing can be compared, or a person gave what the rubric doesn't allow.
    """
    grades = [
        grade
        for grade in graded_class.grades
        if EXAMPLE_REMARK not in grade.remarks and grade.state in ("graded", "incomplete")
    ]
    limits = {item.id: (item.min_points, item.max_points) for grade in graded_class.grades for item in grade.criteria}
    limits[TOTAL] = (0, graded_class.total)
    steps = {criterion.id: criterion.step for criterion in assignment.rubric.criteria} if assignment else {}
    by_hand = in_class(hand_grades, [grade.submission for grade in graded_class.grades], limits.keys() - {TOTAL})
    for (name, id, _), points in by_hand.items():
        low, high = limits.get(id, (1, 0))
        if not low <= points <= high:
            raise EvaluationError(f"{name!r}: the rubric has no {points} points for {id or 'the whole'!r}")

    def pairs_of(first: Mapping[tuple[str, str], Points], second: Mapping[tuple[str, str], Points]) -> list[GradePair]:
        step = min(steps.values(), default=1)
        keys = [key for id in limits for key in second if key[1] == id and key in first]
        return [
            GradePair(*key, first[key], second[key], limits[key[1]][1], steps.get(key[1], step), limits[key[1]][0])
            for key in keys
        ]

    by_rater: dict[str, dict[tuple[str, str], Points]] = defaultdict(dict)
    for (name, id, rater), points in sorted(by_hand.items()):
        by_rater[rater][name, id] = points
    by_model = {
        (grade.submission, id): points
        for grade in grades
        for id, points in [(TOTAL, grade.points), *((item.id, item.points) for item in grade.criteria)]
        if points is not None
    }
    pairs = [pair for points in by_rater.values() for pair in pairs_of(by_model, points)]
    if not pairs:
        raise EvaluationError("no hand grade belongs to a submission that has a model's points; use the batch's names")
    parts = {
        "model": by_name(pairs),
        "band": {band: [pair for pair in finest(pairs) if band_of(pair) == band] for band in BANDS},
        "people": by_name([pair for two in combinations(by_rater.values(), 2) for pair in pairs_of(*two)]),
    }
    one_person = {key: points for rater in reversed(by_rater.values()) for key, points in rater.items()}
    parts["floor"] = by_name(_floor(by_name(pairs_of(one_person, one_person)), assignment, seed) if assignment else [])
    agreements = {
        part: [agreement(name, some, seed=seed) for name, some in named.items()] for part, named in parts.items()
    }
    agreements["band"] = [
        replace(each, measures={**each.measures, "qwk": Estimate(None)}) for each in agreements["band"]
    ]  # within a band one of the two hardly varies, and kappa says nothing
    judged = {pair.submission for pair in pairs}
    return Evaluation(
        graded_class.title,
        len(judged),
        agreements,
        _doubt_records([grade for grade in grades if grade.submission in judged], pairs, tolerance),
        _reliability(grades, pairs),
        pairs,
    )


def by_name(pairs: Sequence[GradePair]) -> dict[str, list[GradePair]]:
    """Pairs of the total, of all criteria together where there are several, and of each; those that there are."""
    criteria = dict.fromkeys(pair.criterion for pair in pairs)
    named_pairs = {id or WHOLE: [pair for pair in pairs if pair.criterion == id] for id in criteria}
    several = {EVERY_CRITERION: finest(pairs)} if len(named_pairs.keys() - {WHOLE}) > 1 else {}
    return {WHOLE: [], **several, **named_pairs} if WHOLE in named_pairs else {**several, **named_pairs}


def finest(pairs: Sequence[GradePair]) -> list[GradePair]:
    """Those of criteria, or the totals where people gave nothing else."""
    return [pair for pair in pairs if pair.criterion] or [*pairs]


def band_of(pair: GradePair) -> str:
    """Of BANDS."""
    return BANDS[0] if pair.second == pair.min_points else BANDS[2] if pair.second == pair.max_points else BANDS[1]


def _floor(pairs_by_name: Mapping[str, Sequence[GradePair]], assignment: Assignment, seed: int) -> list[GradePair]:
    """What counting words gives to two thirds of each criterion's grades, beside what a person gave.

    The reference is the solution; without one each criterion's guidance, and for the total all of it.
    """
    texts = {item.submission.name: own_text(item.submission) for item in assignment.items}
    guidance = {criterion.id: criterion.guidance or criterion.title for criterion in assignment.rubric.criteria}
    floor, draw = [], np.random.default_rng(seed)
    for name, named_pairs in pairs_by_name.items():
        pairs = [pair for pair in named_pairs if pair.submission in texts and name != EVERY_CRITERION]
        answers, shares = [texts[pair.submission] for pair in pairs], [pair.shares[1] for pair in pairs]
        words = guidance.get(name, " ".join(guidance.values()))
        reference = own_text(assignment.solution) if assignment.solution else words
        for place, share in tfidf_floor(reference, answers, shares, draw):
            pair = pairs[place]
            step_number = round((pair.min_points + share * (pair.max_points - pair.min_points)) / pair.step)
            floor.append(replace(pair, first=plain(step_number * exact(pair.step))))
    return floor


# --- doubts, and how sure the model was


def kind_of(doubt: Doubt) -> str:
    """A reason for doubt without what is this submission's own: names of criteria, figures, quotes."""
    text = doubt.why.removeprefix(f"{doubt.criterion_id}: ")
    return re.sub(r"\d[\d.,]*", "…", re.split(r"[:(“]", text)[0]).strip()


def _doubt_records(grades: Sequence[Grade], pairs: Sequence[GradePair], tolerance: Points) -> list[dict[str, Any]]:
    """Whether there was any doubt, then each kind of it.

    Wrong is a submission of which most of the totals that people gave, or of the criteria where they gave no totals,
    are further off than `tolerance`, or than a step.
    """
    far: dict[str, list[bool]] = defaultdict(list)
    for pair in [pair for pair in pairs if not pair.criterion] or pairs:
        far[pair.submission].append(abs(pair.difference) > (pair.step if pair.criterion else tolerance))
    wrong = {name for name, flags in far.items() if 2 * sum(flags) > len(flags)}
    flagged: dict[str, set[str]] = {
        "any reason for review": {grade.submission for grade in grades if grade.doubts} & far.keys()
    }
    for grade in grades:
        for doubt in grade.doubts if grade.submission in far else ():
            flagged.setdefault(kind_of(doubt), set()).add(grade.submission)
    return [
        {"kind": kind, "flagged": len(names), "flagged_wrong": len(names & wrong)}
        | {"unflagged": len(far) - len(names), "unflagged_wrong": len(wrong - names)}
        for kind, names in flagged.items()
    ]


def _reliability(grades: Iterable[Grade], pairs: Iterable[GradePair]) -> list[list[float]]:
    likelihoods = {
        (grade.submission, item.id): min(1.0, item.distribution.get(str(item.points), 0.0))
        for grade in grades
        for item in grade.criteria
    }
    judged = [(not pair.difference, likelihoods.get((pair.submission, pair.criterion), 0.0)) for pair in pairs]
    known = [(is_same, likelihood) for is_same, likelihood in judged if likelihood]
    curve = extra("sklearn.calibration").calibration_curve
    return np.transpose(curve(*zip(*known, strict=True), n_bins=_LIKELIHOOD_BINS)).tolist() if known else []
