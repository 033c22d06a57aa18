"""The hand grades: read from `hand-grades.csv`, or written into it one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path

from grading.error_bound import BoundError
from grading.export.tables import Sheet, cell, with_cell, write_sheet
from grading.hand_sample.draw import SHEET, Draw, header_of, limits, load_draw, lock_sheet, read_rows
from grading.report.graded import GradedClass, load_graded
from grading.rubric.rubric import Points, add_points, exact, plain
from producers.storage.private import write_atomically
from producers.words import shorten_names


@dataclass(frozen=True, slots=True)
class HandGrade:
    """What a person gave one submission."""

    criteria: Mapping[str, Points]
    total: Points


def read_sheet_of(folder: Path, draw: Draw, graded_class: GradedClass, place: Path | None) -> dict[str, HandGrade]:
    """The hand grades by item id: of all who were drawn, or none.

    Raises BoundError for a sheet that is half filled in, was changed, or holds others than were drawn.
    """
    place = place or folder / SHEET
    cells_by_name = _rows(place, draw, graded_class)
    ids = {member.submission: id for id, member in draw.sampled_members().items()}
    empty = [name for name in ids if not any(cells_by_name[name])]
    if empty:
        raise BoundError(
            f"{place}: {len(empty)} of {len(ids)} submissions have no points yet ({shorten_names(empty)}); fill them "
            "in first: a part of a sample, chosen by who was graded first, promises nothing"
        )
    return {ids[name]: _grade(place, name, cells, limits(graded_class)) for name, cells in cells_by_name.items()}


def entered_points(folder: Path, draw: Draw, graded_class: GradedClass) -> dict[str, dict[str, str]]:
    """What the sheet holds by now of each who was drawn, by item id: a text for each criterion, "" for none.

    Raises BoundError for a sheet that was changed, or holds others than were drawn.
    """
    cells_by_name = _rows(folder / SHEET, draw, graded_class)
    ids = {member.submission: id for id, member in draw.sampled_members().items()}
    return {ids[name]: dict(zip(limits(graded_class), cells, strict=True)) for name, cells in cells_by_name.items()}


class SheetConflict(BoundError):
    """The cell holds something else than when it was looked at; `stands` is what."""

    def __init__(self, stands: str) -> None:
        super().__init__(f"somebody has entered {stands or 'nothing'} here meanwhile; nothing of yours is saved")
        self.stands = stands


def enter_points(folder: Path, item_id: str, criterion: str, points: str, seen_text: str) -> None:
    """Write the points for one criterion of one submission into the sheet, on disk on return; "" takes them out.

    Args:
        seen_text: what the cell held when whoever grades looked at it.

    Raises SheetConflict where it holds something else by now, and BoundError: points out of range, a sheet that was
    changed, somebody who was not drawn. Nothing is written then.
    """
    with lock_sheet(folder):
        draw, graded_class = load_draw(folder), load_graded(folder)
        member, max_points = draw.sampled_members().get(item_id), limits(graded_class)
        stands = entered_points(folder, draw, graded_class).get(item_id, {}).get(criterion)
        if member is None or stands is None:
            raise BoundError("this was not drawn, or the rubric is another one by now; load the page anew")
        text = (
            str(_points(f"{member.submission!r}, {criterion}", points, max_points[criterion])) if points.strip() else ""
        )
        if stands not in (seen_text, text):
            raise SheetConflict(stands)
        sheet = read_rows(folder / SHEET)
        column = [*max_points].index(criterion) + 1
        rows = [
            with_cell(row, column, text) if cell(row, 0).strip() == member.submission else row for row in sheet.rows
        ]
        write_atomically(folder / SHEET, write_sheet(Sheet(rows, sheet.delimiter, sheet.bom), newline="\n"))


def _rows(place: Path, draw: Draw, graded_class: GradedClass) -> dict[str, list[str]]:
    """The cells of each submission that was drawn, by name."""
    max_points = limits(graded_class)
    sheet = read_rows(place)
    header = [text.strip() for text in sheet.rows[0]]
    if header[: len(max_points) + 1] != header_of(max_points)[:-1]:
        raise BoundError(f"{place}: the columns were changed; they must be {', '.join(header_of(max_points))}")
    names = [member.submission for member in draw.sampled_members().values()]
    cells_by_name: dict[str, list[str]] = {}
    for row in sheet.rows[1:]:
        name = cell(row, 0).strip()
        cells = [cell(row, index).strip() for index in range(1, len(max_points) + 1)]
        if not name and not any(cells):
            continue
        if name in cells_by_name:
            raise BoundError(f"{place}: {name!r} has two rows; keep one")
        if name not in names:
            raise BoundError(_stranger(place, name, graded_class))
        cells_by_name[name] = cells
    missing_names = [name for name in names if name not in cells_by_name]
    if missing_names:
        raise BoundError(
            f"{place}: rows were taken out ({shorten_names(missing_names)}); all who were drawn must be in it"
        )
    return cells_by_name


def _stranger(place: Path, name: str, graded_class: GradedClass) -> str:
    if any(grade.submission == name for grade in graded_class.grades):
        return (
            f"{place}: {name!r} was not drawn; a grade that somebody chose says nothing of the others. Take the row out"
        )
    return f"{place}: nobody in this class is called {name!r}; names must stay as they were written"


def _grade(place: Path, name: str, cells: Sequence[str], max_points: Mapping[str, Points]) -> HandGrade:
    empty_criteria = [id for id, text in zip(max_points, cells, strict=True) if not text]
    if empty_criteria:
        raise BoundError(f"{place}: {name!r} is half filled in: no points for {', '.join(empty_criteria)}")
    points_by_criterion = {
        id: _points(f"{place}: {name!r}, {id}", text, max_points[id])
        for id, text in zip(max_points, cells, strict=True)
    }
    return HandGrade(points_by_criterion, add_points(points_by_criterion.values()))


def _points(place: str, text: str, max_points: Points) -> Points:
    try:
        value = Decimal(text.replace(",", "."))
    except InvalidOperation:
        raise BoundError(f"{place}: {text!r} is no number of points") from None
    if not (value.is_finite() and 0 <= value <= exact(max_points)):
        raise BoundError(f"{place}: points go from 0 to {max_points}, not {text}")
    return plain(value)
