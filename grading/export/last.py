"""What was given out last: `exports.jsonl` in the batch's folder, one export a line, and what would differ now.

    {"kind": "canvas", "at": …, "points": {"<item_id>": 7.5, "<item_id>": null}}

Kinds are kept apart: a table made for a look says nothing about what the gradebook holds.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from grading.export.final import FinalGrade
from grading.report.grades import one_line, show_points
from grading.rubric.rubric import Points
from producers.files.journal import Lines
from producers.files.shapes import shaped
from producers.words import plural

FILE = "exports.jsonl"


@dataclass(frozen=True, slots=True)
class ExportedPoints:
    """The points that an export gave out, by item; None was left blank."""

    kind: str
    points: Mapping[str, Points | None]
    at: float = field(default_factory=time.time)  # seconds since the epoch


@dataclass(frozen=True, slots=True)
class SinceLast:
    """An export as it would be now, beside the last one of its kind; `last` is None if there was none."""

    now: ExportedPoints
    last: ExportedPoints | None
    changed: tuple[tuple[str, Points | None, Points | None], ...]  # submission, then, now; in the class's order

    def said(self) -> str:
        """In a sentence, without the submissions."""
        if self.last is None:
            return "This would be the first export of this kind."
        when = time.strftime("%Y-%m-%d %H:%M", time.localtime(self.last.at))
        if not self.changed:
            return f"Nothing would differ from the last export of this kind ({when})."
        return f"{plural(len(self.changed), 'grade')} would differ from the last export of this kind ({when}):"

    def lines(self) -> list[str]:
        """`name: 6 → 7`, one each."""
        return [one_line(f"{name}: {_shown(then)} → {_shown(now)}") for name, then, now in self.changed]


def since_last(
    folder: Path, kind: str, grades: Sequence[FinalGrade], held: Iterable[FinalGrade] | None = None
) -> SinceLast:
    """How these grades differ from those that were last given out as this kind. Raises BatchError.

    Args:
        grades: the class's.
        held: those of them that the file holds; None: all. Of the others nothing is compared, or noted as given out.
    """
    now = {final.grade.id: final for final in grades}
    given = ExportedPoints(kind, {final.grade.id: final.points for final in (grades if held is None else held)})
    earlier = [each for each in _read(folder) if each.kind == kind]
    if not earlier:
        return SinceLast(given, None, ())
    # Of all earlier exports: the last one may have held another section's students.
    before = {item: points for each in earlier for item, points in each.points.items()}
    after, last = given.points, earlier[-1]
    items = [*after, *(item for item in last.points if item not in now)]
    changed = ((item, before.get(item), after.get(item)) for item in items if before.get(item) != after.get(item))
    return SinceLast(
        given, last, tuple((now[item].submission if item in now else item, then, here) for item, then, here in changed)
    )


def note_given(folder: Path, given: ExportedPoints) -> None:
    """Keep that this was given out. Raises BatchError."""
    Lines(folder / FILE).append([{"kind": given.kind, "at": given.at, "points": dict(given.points)}])


def _read(folder: Path) -> list[ExportedPoints]:
    def made(row: dict[str, Any]) -> ExportedPoints:
        given: ExportedPoints = shaped(ExportedPoints, row, "the export")
        return given

    return [given for _, given in Lines(folder / FILE).made(made, "export")]


def _shown(points: Points | None) -> str:
    return show_points(points) or "blank"
