"""A person's decisions about grades: read as they come, and made from what a form says."""

import getpass
import math
import threading
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from desk.tail import LineTail
from grading.points import CriterionGrade, Grade
from grading.reviews import FILE, ROUND_REASON, Override, decisions_in, version_of
from grading.rubric.rubric import Points
from messages.errors import UsageError

Overrides = Mapping[str | None, Override]  # of one submission, by criterion; None: the whole submission

ACCEPTED_REASON = "looked at, and left as it is"
TOGETHER_REASON = "decided together with the answers that are like it"


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
    grade: Grade,
    overrides: Overrides,
    points: Mapping[str, Points],
    feedback: Mapping[str, str],
    summary: str,
    reason: str,
    reviewer: str = "",
) -> list[Override]:
    """What a filled-in form changes: a decision for each criterion that is not as it stands, and for the summary.

    Empty if nothing is changed. Raises ReviewError if something is changed without a reason, or out of range.
    """
    changes = [
        change
        for item in grade.criteria
        if (change := _criterion_override(grade, item, overrides.get(item.id), points, feedback, reason, reviewer))
    ]
    whole = overrides.get(None)
    standing = whole.feedback if whole and whole.feedback is not None else grade.summary
    if summary.strip() != standing.strip():
        total = whole.points if whole else None
        changes.append(Override(grade.item_id, None, total, summary.strip(), _require_reason(reason), reviewer))
    return changes


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


def _criterion_override(
    grade: Grade,
    item: CriterionGrade,
    last_override: Override | None,
    points: Mapping[str, Points],
    feedback: Mapping[str, str],
    reason: str,
    reviewer: str,
) -> Override | None:
    old_points = last_override.points if last_override and last_override.points is not None else item.points
    old_feedback = last_override.feedback if last_override and last_override.feedback is not None else item.feedback
    new_points, text = points.get(item.id, old_points), feedback.get(item.id, old_feedback).strip()
    if new_points == old_points and text == old_feedback.strip():
        return None
    if new_points is not None and not (math.isfinite(new_points) and item.min_points <= new_points <= item.max_points):
        raise ReviewError(f"{item.id}: points go from {item.min_points} to {item.max_points}, not {new_points}")
    return Override(grade.item_id, item.id, new_points, text, _require_reason(reason), reviewer)


def _require_reason(reason: str) -> str:
    if not reason.strip():
        raise ReviewError("say in a few words why you change the grade: it is kept beside what the model said")
    return reason.strip()
