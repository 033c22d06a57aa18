"""The hand grades: read from `hand-grades.csv`, or written into it one by one."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal, InvalidOperation
from pathlib import Path

from grading.error_bound import BoundError
from grading.export.tables import Sheet, cell, with_cell, write_sheet
from grading.hand_sample.draw import SHEET, Draw, drawn, header_of, held, limits, read_rows
from grading.report.graded import GradedClass, load_graded
from grading.rubric.rubric import Points, add_points, exact, plain
from producers.files.private import write_atomically
from producers.words import some


@dataclass(frozen=True, slots=True)
class HandGrade:
    """What a person gave one submission."""

    criteria: Mapping[str, Points]
    total: Points


def read_sheet_of(folder: Path, made: Draw, graded: GradedClass, place: Path | None) -> dict[str, HandGrade]:
    """The hand grades by item id: of all who were drawn, or none.

    Raises BoundError for a sheet that is half filled in, was changed, or holds others than were drawn.
    """
    place = place or folder / SHEET
    found = _rows(place, made, graded)
    ids = {one.submission: id for id, one in made.sampled().items()}
    empty = [name for name in ids if not any(found[name])]
    if empty:
        raise BoundError(
            f"{place}: {len(empty)} of {len(ids)} submissions have no points yet ({some(empty)}); fill them in first: "
            "a part of a sample, chosen by who was graded first, promises nothing"
        )
    return {ids[name]: _grade(place, name, cells, limits(graded)) for name, cells in found.items()}


def given(folder: Path, made: Draw, graded: GradedClass) -> dict[str, dict[str, str]]:
    """What the sheet holds by now of each who was drawn, by item id: a text for each criterion, "" for none.

    Raises BoundError for a sheet that was changed, or holds others than were drawn.
    """
    found = _rows(folder / SHEET, made, graded)
    ids = {one.submission: id for id, one in made.sampled().items()}
    return {ids[name]: dict(zip(limits(graded), cells, strict=True)) for name, cells in found.items()}


class SheetConflict(BoundError):
    """The cell holds something else than when it was looked at; `stands` is what."""

    def __init__(self, stands: str) -> None:
        super().__init__(f"somebody has entered {stands or 'nothing'} here meanwhile; nothing of yours is saved")
        self.stands = stands


def give(folder: Path, item_id: str, criterion: str, points: str, before: str) -> None:
    """Write the points for one criterion of one submission into the sheet, on disk on return; "" takes them out.

    Args:
        before: what the cell held when whoever grades looked at it.

    Raises SheetConflict where it holds something else by now, and BoundError: points out of range, a sheet that was
    changed, somebody who was not drawn. Nothing is written then.
    """
    with held(folder):
        made, graded = drawn(folder), load_graded(folder)
        one, most = made.sampled().get(item_id), limits(graded)
        stands = given(folder, made, graded).get(item_id, {}).get(criterion)
        if one is None or stands is None:
            raise BoundError("this was not drawn, or the rubric is another one by now; load the page anew")
        text = str(_points(f"{one.submission!r}, {criterion}", points, most[criterion])) if points.strip() else ""
        if stands not in (before, text):
            raise SheetConflict(stands)
        sheet = read_rows(folder / SHEET)
        column = [*most].index(criterion) + 1
        rows = [with_cell(row, column, text) if cell(row, 0).strip() == one.submission else row for row in sheet.rows]
        write_atomically(folder / SHEET, write_sheet(Sheet(rows, sheet.delimiter, sheet.bom), newline="\n"))


def _rows(place: Path, made: Draw, graded: GradedClass) -> dict[str, list[str]]:
    """The cells of each submission that was drawn, by name."""
    most = limits(graded)
    sheet = read_rows(place)
    header = [text.strip() for text in sheet.rows[0]]
    if header[: len(most) + 1] != header_of(most)[:-1]:
        raise BoundError(f"{place}: the columns were changed; they must be {', '.join(header_of(most))}")
    names = [one.submission for one in made.sampled().values()]
    found: dict[str, list[str]] = {}
    for row in sheet.rows[1:]:
        name = cell(row, 0).strip()
        cells = [cell(row, index).strip() for index in range(1, len(most) + 1)]
        if not name and not any(cells):
            continue
        if name in found:
            raise BoundError(f"{place}: {name!r} has two rows; keep one")
        if name not in names:
            raise BoundError(_stranger(place, name, graded))
        found[name] = cells
    missing = [name for name in names if name not in found]
    if missing:
        raise BoundError(f"{place}: rows were taken out ({some(missing)}); all who were drawn must be in it")
    return found


def _stranger(place: Path, name: str, graded: GradedClass) -> str:
    if any(grade.submission == name for grade in graded.grades):
        return (
            f"{place}: {name!r} was not drawn; a grade that somebody chose says nothing of the others. Take the row out"
        )
    return f"{place}: nobody in this class is called {name!r}; names must stay as they were written"


def _grade(place: Path, name: str, cells: Sequence[str], most: Mapping[str, Points]) -> HandGrade:
    lacking = [id for id, text in zip(most, cells, strict=True) if not text]
    if lacking:
        raise BoundError(f"{place}: {name!r} is half filled in: no points for {', '.join(lacking)}")
    given = {id: _points(f"{place}: {name!r}, {id}", text, most[id]) for id, text in zip(most, cells, strict=True)}
    return HandGrade(given, add_points(given.values()))


def _points(where: str, text: str, most: Points) -> Points:
    try:
        value = Decimal(text.replace(",", "."))
    except InvalidOperation:
        raise BoundError(f"{where}: {text!r} is no number of points") from None
    if not (value.is_finite() and 0 <= value <= exact(most)):
        raise BoundError(f"{where}: points go from 0 to {most}, not {text}")
    return plain(value)
