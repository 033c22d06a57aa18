"""Records what was exported, in `exports.jsonl` in the batch's folder, and says what has changed since then.

    {"kind": "canvas", "at": …, "points": {"<item_id>": 7.5, "<item_id>": null}}

Kinds are kept apart: a table that was only looked at says nothing about what the gradebook holds.
"""

import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from grading.export.final import FinalGrade
from grading.report.grades import one_line, show_points
from grading.rubric.rubric import Points
from producers.storage.journal import Lines, append_line
from producers.storage.shapes import parse_as
from producers.words import plural

FILE = "exports.jsonl"


@dataclass(frozen=True, slots=True)
class ExportedPoints:
    """The points that one export gave out, by item. None means that the item was left blank."""

    kind: str
    points: Mapping[str, Points | None]
    at: float = field(default_factory=time.time)  # seconds since the epoch


@dataclass(frozen=True, slots=True)
class SinceLast:
    """A new export compared with the last one of its kind. `last` is None if there was none."""

    now: ExportedPoints
    last: ExportedPoints | None
    # (submission, earlier points, new points), in the order of the class
    differences: tuple[tuple[str, Points | None, Points | None], ...]

    def summary(self) -> str:
        """Return the comparison in one sentence, without names of submissions."""
        if self.last is None:
            return "No export of this kind has been given out before."
        export_time = time.strftime("%Y-%m-%d %H:%M", time.localtime(self.last.at))
        if not self.differences:
            return f"Nothing would differ from the last export of this kind ({export_time})."
        return (
            f"{plural(len(self.differences), 'grade')} would differ from the last export of this kind ({export_time}):"
        )

    def lines(self) -> list[str]:
        """Return one line for each difference: `name: 6 → 7`."""
        return [
            one_line(f"{name}: {show_points(old_points) or 'blank'} → {show_points(now) or 'blank'}")
            for name, old_points, now in self.differences
        ]


def since_last(
    folder: Path, kind: str, grades: Sequence[FinalGrade], held_ids: Collection[str] | None = None
) -> SinceLast:
    """Compare grades with those last exported as this kind. Raises BatchError.

    Args:
        grades: all grades of the class.
        held_ids: ids of the grades that the file holds; None: all. Other grades are neither compared nor recorded.
    """
    now = {final.grade.id: final for final in grades}
    current_export = ExportedPoints(
        kind, {final.grade.id: final.points for final in grades if held_ids is None or final.grade.id in held_ids}
    )
    lines = Lines(folder / FILE).read_all(lambda row: parse_as(ExportedPoints, row, "the export"), "export")
    earlier = [export for _, export in lines if export.kind == kind]
    if not earlier:
        return SinceLast(current_export, None, ())
    # All earlier exports are compared, because the last export may contain only the students of another section.
    before = {item: points for export in earlier for item, points in export.points.items()}
    after, last = current_export.points, earlier[-1]
    items = [*after, *(item for item in last.points if item not in now)]
    differences = ((item, before.get(item), after.get(item)) for item in items if before.get(item) != after.get(item))
    return SinceLast(
        current_export,
        last,
        tuple(
            (now[item].grade.display_name if item in now else item, old_points, new_points)
            for item, old_points, new_points in differences
        ),
    )


def record_export(folder: Path, export: ExportedPoints) -> None:
    """Record that this was given out. Raises BatchError."""
    row = {"kind": export.kind, "at": export.at, "points": dict(export.points)}
    append_line(folder / FILE, row, "export")
