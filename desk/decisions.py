"""A person's decisions about grades: read while they are being written, and made from the fields of a form."""

import getpass
import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import MappingProxyType

from desk.tail import LineTail
from grading.export.final import apply_decisions
from grading.points import CriterionGrade, Grade
from grading.reviews import FILE, ROUND_REASON, Override, decisions_in, version_of
from grading.rubric.rubric import Points
from messages.errors import UsageError

# The decisions on one submission. The keys are criterion ids; the key None means the whole submission.
Overrides = Mapping[str | None, Override]

ACCEPTED_REASON = "looked at, and left as it is"
TOGETHER_REASON = "decided together with the answers that are like it"
WHOLE = ""  # used in place of a criterion's id for the summary of the submission


@dataclass(frozen=True, slots=True)
class GradeChange:
    """A change to one criterion, or to the summary. A field that is None stays as it is."""

    reason: str = ""
    points: Points | None = None
    feedback: str | None = None


class ReviewError(UsageError):
    """A decision can't be kept as it is. The message says what to change."""


def account() -> str:
    """Return the login name, or "" if there is none, as in some containers."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return ""


class Decisions:
    """The decisions about one batch. May be used from several threads. Only new lines are read."""

    def __init__(self, folder: Path) -> None:
        self.version = 0  # increases whenever decisions have changed
        self._tail = LineTail(folder / FILE, make=decisions_in)
        self._lock = threading.RLock()
        self._by_item: dict[str, dict[str | None, Override]] = {}

    def refresh(self) -> Mapping[str, Overrides]:
        """Return the current decisions by item id. Raises BatchError for an invalid line."""
        with self._lock:
            rows, is_replaced = self._tail.read()
            self.version += bool(rows or is_replaced)
            if is_replaced:
                self._by_item = {}
            for whole, row_overrides in rows:
                self._by_item.pop(str(whole), None)
                for override in row_overrides:
                    self._by_item.setdefault(override.item_id, {})[override.criterion_id] = override
            return {item: dict(overrides) for item, overrides in self._by_item.items()}


def make_overrides(
    grade: Grade, overrides: Overrides, changes: Mapping[str, GradeChange], reviewer: str = ""
) -> list[Override]:
    """Return a decision for each change that differs from the current state. `changes` are by criterion or WHOLE.

    Points that a person gives where the model's are in doubt are a decision even if they are the same. The result is
    empty if nothing changes. Raises ReviewError if a change has no reason or is out of range, or if the
    grade has no such criterion.
    """
    criteria = {item.id: item for item in grade.criteria}
    missing_ids = changes.keys() - criteria.keys() - {WHOLE}
    if missing_ids:
        raise ReviewError(f"the rubric no longer has the criterion {min(missing_ids)}; load the page again")
    decisions = [
        _override(grade, criteria.get(id), overrides.get(id or None), change, reviewer)
        for id, change in changes.items()
    ]
    return [
        decision if decision.criterion_id else replace(decision, seen=_seen_points(grade, overrides))
        for decision in decisions
        if decision
    ]


def accept_grade(grade: Grade, reviewer: str = "", overrides: Overrides = MappingProxyType({})) -> Override:
    """Return a decision that approves the grade with the `overrides`, and keeps their total and summary.

    Raises ReviewError if there are no points to approve.
    """
    whole, points_by_id = overrides.get(None), _seen_points(grade, overrides)
    stands = (whole.points, whole.feedback) if whole else (None, None)
    if stands[0] is None and (missing_ids := [id for id, points in points_by_id.items() if points is None]):
        raise ReviewError(f"{', '.join(missing_ids)}: there are no points to accept; give points first")
    return Override(grade.item_id, None, *stands, ACCEPTED_REASON, reviewer, seen=points_by_id)


def _seen_points(grade: Grade, overrides: Overrides) -> dict[str, Points | None]:
    """Return the points by criterion that a person sees who decides now."""
    return {item.id: item.points for item in apply_decisions(grade, overrides).criteria}


def round_overrides(
    old: Grade, new: Grade, reason: str, reviewer: str = "", overrides: Overrides = MappingProxyType({})
) -> list[Override]:
    """Return decisions that give `old` the points and feedback of `new`, for the criteria that both have.

    If a person has decided on the submission, there are none: decisions of earlier rounds are replaced, but never a
    person's.
    """
    if any(not override.reason.startswith(ROUND_REASON) for override in overrides.values()):
        return []
    scored_criteria = {item.id: item for item in new.criteria if item.points is not None}
    version = version_of(overrides.values())
    return [
        Override(old.item_id, item.id, new_item.points, new_item.feedback, reason, reviewer, version=version)
        for item in old.criteria
        if (new_item := scored_criteria.get(item.id)) and item.min_points <= new_item.points <= item.max_points  # type: ignore[operator]
        if new_item.points != (overrides.get(item.id) or item).points
    ]


def _override(
    grade: Grade, item: CriterionGrade | None, last_override: Override | None, change: GradeChange, reviewer: str
) -> Override | None:
    """Return the decision for a change to a criterion, or to the summary if `item` is None.

    The total stays as it is.
    """
    model_points, model_text = (item.points, item.feedback) if item else (None, grade.summary)
    old_points = last_override.points if last_override and last_override.points is not None else model_points
    old_text = last_override.feedback if last_override and last_override.feedback is not None else model_text
    points = change.points if item and change.points is not None else old_points
    text = (old_text if change.feedback is None else change.feedback).strip()
    is_confirmed = (
        change.points is not None
        and last_override is None
        and any(item and doubt.criterion_id == item.id for doubt in grade.doubts)
    )
    if points == old_points and text == old_text.strip() and not is_confirmed:
        return None
    if item and points is not None and not (math.isfinite(points) and item.min_points <= points <= item.max_points):
        raise ReviewError(f"{item.id}: points must be from {item.min_points} to {item.max_points}, not {points}")
    if not change.reason.strip():
        raise ReviewError("the change has no reason: write a short reason for the change")
    return Override(grade.item_id, item.id if item else None, points, text, change.reason.strip(), reviewer)
