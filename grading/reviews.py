"""People's decisions about grades: `reviews.jsonl` in the batch's folder, one decision on each line.

    {"item_id": "…", "criterion_id": "loops", "points": 2, "feedback": null, "reason": "…", "by": "…", "time": …,
     "version": "…"}

A decision about a criterion settles the doubts about it. A decision without a criterion settles the whole submission:
with points it sets the total, without points it approves the grade as it is. The last decision about the same thing
counts.

An approval has the field `seen` too: the points that the person saw, by criterion. It covers those points only; if the
model's have changed since, it has lapsed (`grading.export.final.apply_decisions`).

`version` identifies the decisions about the submission that the person saw. If they have changed before the line is
written, somebody else has decided in the meantime, and nothing is written. Lines without a version are accepted too.

A line may also hold a whole review (`submission`, `criteria`, `summary`, `withdrawn`). The last such line about a
submission counts. It is read as the decisions in it.
"""

import hashlib
import json
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from grading.rubric.rubric import MAX_POINTS, Points
from messages.errors import BatchError
from producers.storage.journal import Lines, lock_lines
from producers.storage.shapes import parse_as

FILE = "reviews.jsonl"
# A decision's reason begins with this text if the decision was made by a regrade's round, not by a person.
ROUND_REASON = "regraded in round"
AFTER_A_LOOK = "These hand grades were given with the model's points in sight, which makes people agree with them."
MAX_TEXT = 20_000  # maximum number of characters in feedback or in a reason


@dataclass(frozen=True, slots=True)
class Override:
    """One decision. A field that is None keeps what the models said."""

    item_id: str  # `Grade.item_id`, or the submission's name
    criterion_id: str | None  # None if the decision is about the whole submission
    points: Points | None
    feedback: str | None
    reason: str
    reviewer: str = ""
    time: float = field(default_factory=time.time)  # seconds since the epoch
    # The version (`version_of`) of the decisions that the person saw. If it is None, the decision is written whatever
    # the current version is.
    version: str | None = None
    # In an approval, the approved points of each criterion. None means that they are unknown.
    seen: Mapping[str, Points | None] | None = None

    def __post_init__(self) -> None:
        texts = (self.feedback or "", self.reason, self.reviewer)
        problems = {
            "it names no submission (item_id)": not self.item_id,
            f"points must be from 0 to {MAX_POINTS:,}": not 0 <= (self.points or 0) <= MAX_POINTS,  # also refuses NaN
            f"feedback, reason and reviewer must be texts of at most {MAX_TEXT:,} characters": (
                max(map(len, texts)) > MAX_TEXT
            ),
            "it gives no reason": not self.reason.strip(),
        }
        for problem, is_there in problems.items():
            if is_there:
                raise BatchError(f"a review can't be used: {problem}")


class ReviewConflict(BatchError):
    """Somebody has decided on the same submission since these decisions were made. None of them was written."""


def version_of(standing: Iterable[Override]) -> str:
    """Return a digest of the current decisions about one submission. It changes whenever somebody decides again."""
    lines = sorted(json.dumps(_fields(override)) for override in standing)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def append_override(folder: Path, *overrides: Override) -> None:
    """Add decisions to the batch in `folder`: all of them or none. They are on disk on return.

    Raises ReviewConflict if a decision was based on others than the current ones. This is checked under a lock, so that
    of two processes only one succeeds. Raises BatchError if the file can't be read or written.
    """
    _append(folder, [(override.item_id, override.version, [_row(override)]) for override in overrides])


# (submission, version that the person saw, lines to write)
_Change = tuple[str, str | None, list[dict[str, Any]]]


def _append(folder: Path, changes: Sequence[_Change], leaves_conflicts: bool = False) -> list[str]:
    """Add the lines of changes. Returns the submissions whose decisions have changed in the meantime."""
    with lock_lines(folder / FILE, "decision"):
        standing = read_overrides(folder)
        conflict_ids = [
            item_id
            for item_id, version, _ in changes
            if version not in (None, version_of(current_decisions(standing, item_id).values()))
        ]
        if conflict_ids and not leaves_conflicts:
            raise ReviewConflict(
                "somebody else has decided on this submission since you opened it; load the page again, and "
                "compare both decisions"
            )
        Lines(folder / FILE, is_owner=True).append(
            row for item_id, _, rows in changes if item_id not in conflict_ids for row in rows
        )
    return conflict_ids


def undo_override(
    folder: Path, item_id: str, version: str, restored_overrides: Iterable[Override], reviewer: str
) -> None:
    """Restore earlier decisions about a submission in place of those that `version` identifies. No line is lost.

    Raises ReviewConflict if the decisions have changed in the meantime, and BatchError as `append_override`.
    """
    _append(folder, [_withdrawal(item_id, version, restored_overrides, reviewer)])


def decide_together(
    folder: Path,
    item_ids: Iterable[str],
    criterion_id: str,
    points: Points,
    reason: str,
    standing: Mapping[str, Mapping[str | None, Override]],
    reviewer: str,
) -> list[str]:
    """Record the same decision about several submissions. `standing` are the decisions about each that the person saw.

    All lines get the same time, by which `decided_together` recognises them. Returns the submissions on which somebody
    else has decided in the meantime; these are not changed. Raises BatchError as `append_override`.
    """
    now, versions = time.time(), {id: version_of(standing.get(id, {}).values()) for id in item_ids}
    decisions = [
        Override(id, criterion_id, points, None, reason, reviewer, now, version) for id, version in versions.items()
    ]
    return _append(folder, [(each.item_id, each.version, [_row(each)]) for each in decisions], leaves_conflicts=True)


def decided_together(standing: Mapping[str, Mapping[str | None, Override]], criterion_id: str) -> list[list[Override]]:
    """Group people's decisions on this criterion by the moment at which they were made, latest first.

    A line without a time (0) is left out, because nobody knows which others were made with it.
    """
    by_moment: dict[tuple[float, str, str], list[Override]] = {}
    for decision in (decisions[criterion_id] for decisions in standing.values() if criterion_id in decisions):
        by_moment.setdefault((decision.time, decision.reviewer, decision.reason), []).append(decision)
    return [by_moment[at] for at in sorted(by_moment, reverse=True) if at[0] and not at[2].startswith(ROUND_REASON)]


def undo_together(
    folder: Path,
    decisions: Iterable[Override],
    standing: Mapping[str, Mapping[str | None, Override]],
    reviewer: str,
) -> list[str]:
    """Withdraw these decisions about several submissions. All other decisions in `standing` remain valid.

    Returns the submissions on which somebody else has decided in the meantime, as `decide_together`.
    """
    changes = [
        _withdrawal(decision.item_id, version_of(before), [each for each in before if each != decision], reviewer)
        for decision in decisions
        for before in [[*standing[decision.item_id].values()]]
    ]
    return _append(folder, changes, leaves_conflicts=True)


def _withdrawal(item_id: str, version: str, restored_overrides: Iterable[Override], reviewer: str) -> _Change:
    withdrawal = {"submission": item_id, "withdrawn": True, "by": reviewer, "at": time.time()}
    return item_id, version, [withdrawal, *map(_row, restored_overrides)]


def _row(override: Override) -> dict[str, Any]:
    row = _fields(override)
    row["by"] = row.pop("reviewer")
    return row


def _fields(override: Override) -> dict[str, Any]:
    return {name: value for name, value in asdict(override).items() if name != "seen" or value is not None}


def read_overrides(folder: Path) -> list[Override]:
    """Read all current decisions about the batch in `folder`, oldest first. Raises BatchError for an invalid line."""
    standing: list[Override] = []
    for _, (whole, overrides) in Lines(folder / FILE).read_all(decisions_in, "review"):
        standing = [override for override in standing if override.item_id != whole] + overrides
    return standing


def decisions_in(row: dict[str, Any]) -> tuple[str | None, list[Override]]:
    """Return the submission whose earlier decisions a line replaces, or None, and the decisions in the line.

    Raises ValueError or BatchError for an invalid line.
    """
    if "submission" not in row:
        return None, [parse_as(Override, {"reviewer": row.get("by", "")} | row, "the review")]
    common_fields = {
        "item_id": row["submission"],
        "criterion_id": None,
        "points": None,
        "feedback": row.get("summary"),
        "reason": row.get("reason") or "looked at",
        "reviewer": row.get("by", ""),
        "time": row.get("at", 0.0),
        "v": row.get("v", 1),
    }
    criteria = parse_as(Mapping[str, dict], row.get("criteria", {}), "the review.criteria")  # type: ignore[type-arg]
    changes = [{**common_fields, "feedback": None, **change, "criterion_id": id} for id, change in criteria.items()]
    decisions = [parse_as(Override, fields, "the review") for fields in (common_fields, *changes)]
    return row["submission"], [] if row.get("withdrawn") else decisions


def current_decisions(overrides: Iterable[Override], *names: str) -> dict[str | None, Override]:
    """Return the last decision on each criterion, and on None (the whole), for the submission with these names."""
    return {override.criterion_id: override for override in overrides if override.item_id in names}
