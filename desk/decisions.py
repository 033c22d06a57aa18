"""A person's decisions about grades: read as they come, and made from what a form says."""

import getpass
import math
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType

from desk.tail import LineTail
from grading.points import CriterionGrade, Grade
from grading.reviews import FILE, ROUND_REASON, Override, decisions_in, version_of
from grading.rubric.rubric import Points
from messages.errors import UsageError

Overrides = Mapping[str | None, Override]  # decisions on one submission, by criterion; None: on all of it

ACCEPTED_REASON = "looked at, and left as it is"
TOGETHER_REASON = "decided together with the answers that are like it"
WHOLE = ""  # in place of a criterion's id: the submission's summary


@dataclass(frozen=True, slots=True)
class GradeChange:
    """What becomes of one criterion, or of the summary; None stays as it is."""

    reason: str = ""
    points: Points | None = None
    feedback: str | None = None


class ReviewError(UsageError):
    """A decision that can't be kept as it is; the message says what to change."""


def account() -> str:
    """Who is logged in; "" where that has no name, as in some containers."""
    try:
        return getpass.getuser()
    except (KeyError, OSError):
        return ""


class Decisions:
    """What was decided about one batch. May be used from several threads; only what is new is read."""

    def __init__(self, folder: Path) -> None:
        self.version = 0  # grows with each change
        self._tail = LineTail(folder / FILE, make=decisions_in)
        self._lock = threading.RLock()
        self._by_item: dict[str, dict[str | None, Override]] = {}

    def refresh(self) -> Mapping[str, Overrides]:
        """What counts now, by item id. Raises BatchError on a line that is no decision."""
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
    """A decision for each change, by criterion or WHOLE, that is not as it stands; each with its own reason.

    Empty if nothing is changed. Raises ReviewError if something is changed without a reason, or out of range, or if the
    grade has no such criterion.
    """
    criteria = {item.id: item for item in grade.criteria}
    missing_ids = changes.keys() - criteria.keys() - {WHOLE}
    if missing_ids:
        raise ReviewError(f"{min(missing_ids)}: the rubric has no such criterion any more")
    decisions = [
        _override(grade, criteria.get(id), overrides.get(id or None), change, reviewer)
        for id, change in changes.items()
    ]
    return [decision for decision in decisions if decision]


def accept_grade(grade: Grade, reviewer: str = "", whole: Override | None = None) -> Override:
    """The decision that the grade stands as it is, with what was decided of the `whole` before."""
    stands = (whole.points, whole.feedback) if whole else (None, None)
    return Override(grade.item_id, None, *stands, ACCEPTED_REASON, reviewer)


def round_overrides(
    old: Grade, new: Grade, reason: str, reviewer: str = "", overrides: Overrides = MappingProxyType({})
) -> list[Override]:
    """Decisions that give `old` the points and feedback of `new`, where both have the criterion.

    Nothing where a person has decided: what other rounds gave is replaced, what somebody looked at is not.
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
    """What the change makes of a criterion, or without one of the summary; its total stays then."""
    model_points, model_text = (item.points, item.feedback) if item else (None, grade.summary)
    old_points = last_override.points if last_override and last_override.points is not None else model_points
    old_text = last_override.feedback if last_override and last_override.feedback is not None else model_text
    points = change.points if item and change.points is not None else old_points
    text = (old_text if change.feedback is None else change.feedback).strip()
    if points == old_points and text == old_text.strip():
        return None
    if item and points is not None and not (math.isfinite(points) and item.min_points <= points <= item.max_points):
        raise ReviewError(f"{item.id}: points go from {item.min_points} to {item.max_points}, not {points}")
    criterion_id = item.id if item else None
    return Override(grade.item_id, criterion_id, points, text, _require_reason(change.reason), reviewer)


def _require_reason(reason: str) -> str:
    if not reason.strip():
        raise ReviewError("say in a few words why you change the grade: it is kept beside what the model said")
    return reason.strip()
