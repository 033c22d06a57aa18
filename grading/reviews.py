"""What a person decided about a grade: `reviews.jsonl` in the batch's folder, one decision a line.

    {"item_id": "…", "criterion_id": "loops", "points": 2, "feedback": null, "reason": "…", "by": "…", "time": …,
     "version": "…"}

A decision about a criterion settles what was doubtful there. One without a criterion settles the whole submission: with
points it sets the total, without it accepts what stands. The last decision about the same thing counts.

`version` names what stood about the submission when its decider looked at it. Where something else stands by the time
that the line is written, somebody decided meanwhile: nothing is written then. Lines without one are read as ever.

One line may also stand for a whole review (`submission`, `criteria`, `summary`, `withdrawn`), of which the last about
a submission counts; such a line is read as the decisions that it stands for.
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
ROUND_REASON = "regraded in round"  # how the reason of a decision begins that a round made, not a person
AFTER_A_LOOK = "These hand grades were given with the model's points in sight, which makes people agree with them."
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
    version: str | None = None  # `version_of` the decisions it was based on; None: it replaces any

    def __post_init__(self) -> None:
        texts = (self.feedback or "", self.reason, self.reviewer)
        problems = {
            "it names no submission (item_id)": not self.item_id,
            f"points must be from 0 to {MAX_POINTS:,}": not 0 <= (self.points or 0) <= MAX_POINTS,  # NaN neither
            f"feedback, reason and reviewer must be texts of at most {MAX_TEXT:,} characters": (
                max(map(len, texts)) > MAX_TEXT
            ),
            "it gives no reason": not self.reason.strip(),
        }
        for problem, is_there in problems.items():
            if is_there:
                raise BatchError(f"a review can't be used: {problem}")


class ReviewConflict(BatchError):
    """Somebody has decided on the same submission since these decisions were made; none of them was written."""


def version_of(standing: Iterable[Override]) -> str:
    """Names what stands about one submission: another name as soon as anybody has decided again."""
    lines = sorted(json.dumps(asdict(override)) for override in standing)
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def append_override(folder: Path, *overrides: Override) -> None:
    """Add decisions to the batch in `folder`: all of them or none, on disk on return.

    Raises ReviewConflict where a decision was made on something else than what stands now, which is looked up under a
    lock, so that of two processes one is told. Raises BatchError if the file can't be read or written.
    """
    _append(folder, [(override.item_id, override.version, [_row(override)]) for override in overrides])


_Change = tuple[str, str | None, list[dict[str, Any]]]  # a submission, the version that a change was made on, its lines


def _append(folder: Path, changes: Sequence[_Change], leaves_conflicts: bool = False) -> list[str]:
    """Add their lines; the submissions of those that were made on something else than what stands now."""
    with lock_lines(folder / FILE, "decision"):
        standing = read_overrides(folder)
        conflict_ids = [
            item_id
            for item_id, version, _ in changes
            if version not in (None, version_of(current_decisions(standing, item_id).values()))
        ]
        if conflict_ids and not leaves_conflicts:
            raise ReviewConflict("somebody has decided on this submission meanwhile; look at both decisions")
        Lines(folder / FILE, is_owner=True).append(
            row for item_id, _, rows in changes if item_id not in conflict_ids for row in rows
        )
    return conflict_ids


def undo_override(
    folder: Path, item_id: str, version: str, restored_overrides: Iterable[Override], reviewer: str
) -> None:
    """Let `restored_overrides` stand again about a submission, in place of what `version` names; no line is lost.

    Raises ReviewConflict where something else stands by now, and BatchError as `append_override`.
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
    """Keep a decision about each of these submissions, made in sight of what is `standing` about each.

    All have one time, by which `decided_together` knows them. Returns the submissions on which somebody has decided
    meanwhile: they are left as they are. Raises BatchError as `append_override`.
    """
    now, versions = time.time(), {id: version_of(standing.get(id, {}).values()) for id in item_ids}
    decisions = [
        Override(id, criterion_id, points, None, reason, reviewer, now, version) for id, version in versions.items()
    ]
    return _append(folder, [(each.item_id, each.version, [_row(each)]) for each in decisions], leaves_conflicts=True)


def decided_together(standing: Mapping[str, Mapping[str | None, Override]], criterion_id: str) -> list[list[Override]]:
    """What people decided on this criterion, the latest first; decisions of one moment are together.

    Of a line without a time (0) nobody knows with which others it was made: it is left out.
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
    """Withdraw these decisions about several submissions; all else that is `standing` there counts on.

    Returns the submissions on which somebody has decided meanwhile, as `decide_together`.
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
    row = asdict(override)
    row["by"] = row.pop("reviewer")
    return row


def read_overrides(folder: Path) -> list[Override]:
    """All decisions that stand about the batch in `folder`, oldest first. Raises BatchError on a line that is none."""
    standing: list[Override] = []
    for _, (whole, overrides) in Lines(folder / FILE).read_all(decisions_in, "review"):
        standing = [override for override in standing if override.item_id != whole] + overrides
    return standing


def decisions_in(row: dict[str, Any]) -> tuple[str | None, list[Override]]:
    """The submission whose earlier decisions a line replaces, None for none, and the decisions in it.

    Raises ValueError, BatchError on a line that is none.
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
    """What counts for the submission of these names: for each criterion decided on, and for None, the last decision."""
    return {override.criterion_id: override for override in overrides if override.item_id in names}
