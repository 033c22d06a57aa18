"""A person's decisions about grades: read as they come, and made from what a form says."""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from dataclasses import fields
from pathlib import Path

from messages.errors import BatchError, UsageError
from producers.desk.tail import Tail
from producers.grading import CriterionGrade, Grade
from producers.reviews import FILE, Override, append_override
from producers.rubric import Points

Decided = Mapping[str | None, Override]  # of one submission, by criterion; None: the whole submission

ACCEPTED = "looked at, and left as it is"
_KNOWN = frozenset(spec.name for spec in fields(Override))


class ReviewError(UsageError):
    """A decision that can't be kept as it is; the message says what to change."""


class Decisions:
    """What was decided about one batch. May be used from several threads; only what is new is read."""

    def __init__(self, folder: Path) -> None:
        self.version = 0  # grows with each change
        self._folder = folder
        self._tail = Tail(folder / FILE)
        self._lock = threading.RLock()
        self._by_item: dict[str, dict[str | None, Override]] = {}

    def refresh(self) -> Mapping[str, Decided]:
        """What counts now, by item id. Raises BatchError on a line that is no decision."""
        with self._lock:
            rows, replaced = self._tail.read()
            self.version += bool(rows or replaced)
            if replaced:
                self._by_item = {}
            for row in rows:
                override = self._override(row)
                self._by_item.setdefault(override.item_id, {})[override.criterion_id] = override
            return {item: dict(decided) for item, decided in self._by_item.items()}

    def add(self, *overrides: Override) -> None:
        """Keep these, on disk on return. Raises BatchError."""
        with self._lock:
            for override in overrides:
                append_override(self._folder, override)

    def _override(self, row: Mapping[str, object]) -> Override:
        try:
            return Override(**{key: value for key, value in row.items() if key in _KNOWN})  # type: ignore[arg-type]
        except TypeError as error:
            raise BatchError(f"{self._folder / FILE}: a line is no decision of ours: {error}") from None


def overrides(
    grade: Grade,
    decided: Decided,
    points: Mapping[str, Points],
    feedback: Mapping[str, str],
    summary: str,
    reason: str,
    reviewer: str = "",
) -> list[Override]:
    """What a filled-in form changes: a decision for each criterion that is not as it stands, and for the summary.

    Empty if nothing is changed. Raises ReviewError if something is changed without a reason, or out of range.
    """
    made = [
        change
        for item in grade.criteria
        if (change := _criterion(grade, item, decided.get(item.id), points, feedback, reason, reviewer))
    ]
    whole = decided.get(None)
    standing = whole.feedback if whole and whole.feedback is not None else grade.summary
    if summary.strip() != standing.strip():
        made.append(Override(grade.item_id, None, None, summary.strip(), _needed(reason), reviewer))
    return made


def accepted(grade: Grade, reviewer: str = "") -> Override:
    """The decision that the grade stands as it is."""
    return Override(grade.item_id, None, None, None, ACCEPTED, reviewer)


def taken_over(old: Grade, new: Grade, reason: str, reviewer: str = "") -> list[Override]:
    """Decisions that give `old` the points and feedback of `new`, where both have the criterion."""
    better = {item.id: item for item in new.criteria if item.points is not None}
    return [
        Override(old.item_id, item.id, better[item.id].points, better[item.id].feedback, reason, reviewer)
        for item in old.criteria
        if item.id in better and better[item.id].points != item.points and better[item.id].points <= item.max_points  # type: ignore[operator]
    ]


def _criterion(
    grade: Grade,
    item: CriterionGrade,
    before: Override | None,
    points: Mapping[str, Points],
    feedback: Mapping[str, str],
    reason: str,
    reviewer: str,
) -> Override | None:
    standing = before.points if before and before.points is not None else item.points
    said = before.feedback if before and before.feedback is not None else item.feedback
    wanted, text = points.get(item.id, standing), feedback.get(item.id, said).strip()
    if wanted is None or (wanted == standing and text == said.strip()):
        return None
    if not math.isfinite(wanted) or not 0 <= wanted <= item.max_points:
        raise ReviewError(f"{item.id}: points go from 0 to {item.max_points}, not {wanted}")
    return Override(grade.item_id, item.id, wanted, text, _needed(reason), reviewer)


def _needed(reason: str) -> str:
    if not reason.strip():
        raise ReviewError("say in a few words why you change the grade: it is kept beside what the model said")
    return reason.strip()
