"""What a person decided about a grade: `reviews.jsonl` in the batch's folder, one decision a line.

    {"item_id": "…", "criterion_id": "loops", "points": 2, "feedback": null, "reason": "…", "reviewer": "…", "time": …}

A decision about a criterion settles what was doubtful there. One without a criterion settles the whole submission: with
points it sets the total, without it accepts what stands. The last decision about the same thing counts.

The desk writes one line for a whole review (`submission`, `criteria`, `summary`, `withdrawn`), of which the last about
a submission counts; such a line is read as the decisions that it stands for.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any

from messages.errors import BatchError
from producers.journal import Lines
from producers.rubric import MAX_POINTS, Points

FILE = "reviews.jsonl"
MAX_TEXT = 20_000  # characters of a feedback or a reason


@dataclass(frozen=True, slots=True)
class Override:
    """One decision. None leaves what the models said."""

    item_id: str  # `Grade.item_id`, or the submission's name
    criterion_id: str | None  # None: the whole submission
    points: Points | None
    feedback: str | None
    reason: str
    reviewer: str = ""
    time: float = field(default_factory=time.time)  # seconds since the epoch

    def __post_init__(self) -> None:
        problem = _problem(self)
        if problem:
            raise BatchError(f"a review can't be used: {problem}")


def _problem(override: Override) -> str:
    if not isinstance(override.item_id, str) or not override.item_id:
        return "it names no submission (item_id)"
    if override.criterion_id is not None and not isinstance(override.criterion_id, str):
        return "criterion_id must be a criterion's id, or null for the whole submission"
    points = override.points
    if points is not None and (not isinstance(points, int | float) or isinstance(points, bool)):
        return "points must be a number, or null"
    if points is not None and not (math.isfinite(points) and 0 <= points <= MAX_POINTS):
        return f"points must be from 0 to {MAX_POINTS:,}"
    texts = (override.feedback or "", override.reason, override.reviewer)
    if any(not isinstance(text, str) or len(text) > MAX_TEXT for text in texts):
        return f"feedback, reason and reviewer must be texts of at most {MAX_TEXT:,} characters"
    if not override.reason.strip():
        return "it gives no reason"
    return ""


def append_override(folder: Path, override: Override) -> None:
    """Add a decision to the batch in `folder`, on disk on return. Raises BatchError."""
    Lines(folder / FILE).append([asdict(override)])


def read_overrides(folder: Path) -> list[Override]:
    """All decisions that stand about the batch in `folder`, oldest first. Raises BatchError on a line that is none."""
    made: list[Override] = []
    for row in Lines(folder / FILE):
        if "submission" in row:
            made = [override for override in made if override.item_id != row["submission"]]
            made += _of_review(row)
        else:
            made.append(_override(row))
    return made


def _override(row: dict[str, Any]) -> Override:
    known = {spec.name for spec in fields(Override)}
    try:
        return Override(**{key: value for key, value in row.items() if key in known})
    except TypeError as error:
        raise BatchError(f"{FILE}: a line is no review: {error}") from None


def _of_review(row: dict[str, Any]) -> Iterable[Override]:
    """The decisions in one line of the desk's; none if it was withdrawn."""
    if row.get("withdrawn"):
        return
    try:
        name, by, at = row["submission"], row.get("by", ""), row.get("at", 0.0)
        reason = row.get("reason") or "looked at"
        yield Override(name, None, None, row.get("summary"), reason, by, at)
        for id, change in row.get("criteria", {}).items():
            yield Override(name, id, change["points"], change.get("feedback"), reason, by, at)
    except (TypeError, KeyError, AttributeError) as error:
        raise BatchError(f"{FILE}: a line is no review: {error!r}") from None


def current(overrides: Iterable[Override], *names: str) -> dict[str | None, Override]:
    """What counts for the submission of these names: for each criterion decided on, and for None, the last decision."""
    return {override.criterion_id: override for override in overrides if override.item_id in names}
