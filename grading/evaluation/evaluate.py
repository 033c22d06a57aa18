"""Compares a class's grades with people's.

It gives agreement by criterion and by band, people's agreement among themselves, a floor, and what the doubts are
worth. If several people graded, the model is compared with each of them, as they are with one another; their mean is
never used as the truth. Work that was an example for the models, or that no model gave points to, is left out.
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

BANDS = ("none", "partial", "full")  # whether the person gave the fewest possible points, some points or full points
WHOLE, EVERY_CRITERION = "the total", "all criteria"  # labels that can't be the id of a criterion
_LIKELIHOOD_BINS = 10


@dataclass(frozen=True, slots=True)
class Evaluation:
    """What was measured of one batch.

    `agreements` has those of the `model` with people, by `band`, of `people`, of the `floor`.

    The most general agreement comes first in each list. `people` is empty if only one person graded.
    """

    title: str
    submissions: int
    agreements: Mapping[str, Sequence[Agreement]]
    # For each kind of doubt, the counts of submissions under the keys flagged, flagged_wrong, unflagged and
    # unflagged_wrong.
    doubts: Sequence[Mapping[str, Any]]
    # For each bin of likelihoods, the share of grades that equal the person's, and the mean likelihood.
    reliability: Sequence[Sequence[float]]
    pairs: Sequence[GradePair]  # the model is the first grader, and the person the second


def evaluate(
    graded_class: GradedClass,
    hand_grades: HandGrades,
    assignment: Assignment | None = None,
    tolerance: Points = 1,
    seed: int = 0,
) -> Evaluation:
    """Measure how well models graded a class.

    Args:
        assignment: the class's work, if it still exists. The floor needs it, and the steps of points.
        tolerance: a grade counts as wrong if its total differs by more points than this.
        seed: seed of the bootstrap samples and of the floor's third.

    Raises EvaluationError if there is nothing to compare, or if a person gave points that the rubric doesn't allow.
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
            raise EvaluationError(
                f"{name!r}: {points} points are outside the rubric's range for {id or 'the total'!r}; correct this row"
            )

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
        raise EvaluationError(
            "no submission has both a hand grade and a model's points: enter hand grades, and write the submissions' "
            "names as in the batch"
        )
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
    # Within a band, one grader's points hardly vary, so kappa is not computed for bands.
    agreements["band"] = [
        replace(each, measures={**each.measures, "qwk": Estimate(None)}) for each in agreements["band"]
    ]
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
    """Group the pairs: the total, all criteria together if there are several, and each criterion.

    Empty groups are left out.
    """
    criteria = dict.fromkeys(pair.criterion for pair in pairs)
    named_pairs = {id or WHOLE: [pair for pair in pairs if pair.criterion == id] for id in criteria}
    several = {EVERY_CRITERION: finest(pairs)} if len(named_pairs.keys() - {WHOLE}) > 1 else {}
    return {WHOLE: [], **several, **named_pairs} if WHOLE in named_pairs else {**several, **named_pairs}


def finest(pairs: Sequence[GradePair]) -> list[GradePair]:
    """Return the pairs for criteria, or those for totals if people gave nothing else."""
    return [pair for pair in pairs if pair.criterion] or [*pairs]


def band_of(pair: GradePair) -> str:
    """Of BANDS."""
    return BANDS[0] if pair.second == pair.min_points else BANDS[2] if pair.second == pair.max_points else BANDS[1]


def _floor(pairs_by_name: Mapping[str, Sequence[GradePair]], assignment: Assignment, seed: int) -> list[GradePair]:
    """Pair the points that counting words would give with a person's, for two thirds of each criterion's grades.

    The reference text is the solution. Without a solution it is each criterion's guidance, and for the total all
    guidance.
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


# --- doubts, and the model's certainty


def kind_of(doubt: Doubt) -> str:
    """Return the kind of a doubt: its sentence without names of criteria, numbers and quotes."""
    text = doubt.why.removeprefix(f"{doubt.criterion_id}: ")
    return re.sub(r"\d[\d.,]*", "…", re.split(r"[:(“]", text)[0]).strip()


def _doubt_records(grades: Sequence[Grade], pairs: Sequence[GradePair], tolerance: Points) -> list[dict[str, Any]]:
    """Count wrong grades with and without doubts: first for any doubt, then for each kind.

    A submission is wrong if most of the totals that people gave it differ by more than `tolerance`. If they gave no
    totals, it is wrong if most criteria differ by more than a step.
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
