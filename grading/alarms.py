"""Warnings about a whole class.

If nearly everybody is low on one criterion, the rubric or the solution is probably wrong.
"""

from collections.abc import Sequence
from statistics import median

from grading.points import EARLIER_REMARK, Grade
from grading.rubric.rubric import Rubric
from producers.words import plural

MIN_CLASS = 5
LOW = 0.34  # points are low if they are at most this share of the criterion's full points
NEARLY_ALL = 0.9  # of the class
# There is a warning about a criterion only if its median share of points is at least this much below the median share
# of all other criteria.
CONTRAST = 0.2


def class_alarms(grades: Sequence[Grade], rubric: Rubric) -> tuple[str, ...]:
    """Return the warnings about a class, one sentence each.

    There is a warning for each criterion on which nearly everybody is low, one if the class is low on every criterion,
    and one if not all submissions were graded with the same rubric.
    """
    shares = {
        criterion.id: [
            float(item.points) / float(item.max_points)
            for grade in grades
            if grade.state in ("graded", "incomplete")
            for item in grade.criteria
            if item.id == criterion.id and item.points is not None and item.max_points
        ]
        for criterion in rubric.criteria
    }
    earlier = sum(EARLIER_REMARK in grade.remarks for grade in grades)
    subject = f"{earlier} of {plural(len(grades), 'submission')} {'is' if earlier == 1 else 'are'}"
    version_alarm = (f"{subject} graded with another rubric, solution or template than the others",)
    return (
        *(version_alarm if 0 < earlier < sum(grade.state == "graded" for grade in grades) else ()),
        *_low_alarms(shares),
    )


def _low_alarms(shares: dict[str, list[float]]) -> tuple[str, ...]:
    low = [
        id
        for id, values in shares.items()
        if len(values) >= MIN_CLASS and sum(value <= LOW for value in values) >= NEARLY_ALL * len(values)
    ]
    if low and len(low) == len(shares):
        return ("nearly everybody is low on every criterion: is this the rubric and the solution of this assignment?",)
    return tuple(
        f"{id}: {sum(value <= LOW for value in shares[id])} of {len(shares[id])} submissions have at most a third "
        "of the points: does the rubric, or the solution, say there what was asked?"
        for id in low
        if _median_of_rest(shares, id) >= median(shares[id]) + CONTRAST
    )


def _median_of_rest(shares: dict[str, list[float]], id: str) -> float:
    return median([value for criterion_id, values in shares.items() if criterion_id != id for value in values] or [1.0])
