"""Fills in Moodle's offline grading worksheet.

The worksheet must have the columns `Identifier` ("Participant 123"), `Grade` and `Last modified (grade)`. Moodle
compares the last one with its own record and keeps grades that are newer, so this column is left unchanged.
"""

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from grading.cells import safe_cell, safe_html
from grading.export.feedback import feedback_fragment
from grading.export.final import (
    ExportFile,
    FilledIn,
    FinalGrade,
    changes,
    fill_in,
    final_grades,
)
from grading.export.format import Choices, ExportFormat, ExportOption, Form
from grading.rubric.rubric import Points
from grading.tables import (
    PARTICIPANT,
    ExportError,
    Sheet,
    cell,
    column,
    read_sheet,
    two_decimals,
    uses_decimal_comma,
    with_cell,
    write_sheet,
)
from producers.words import plural

_FILE = "moodle-worksheet.csv"
_REQUIRED_COLUMNS = ("Identifier", "Grade", "Last modified (grade)")
NO_ID = "its folder's name holds no Moodle participant number, so it is not in the file"
_NOT_LISTED = "its participant number is not in the worksheet, so it is not in the file"


def export_moodle(
    folder: Path,
    worksheet: bytes | None = None,
    *,
    include_unreviewed: bool = False,
) -> ExportFile:
    """Fill grades and feedback comments into a downloaded grading worksheet. Raises ExportError, BatchError."""
    if worksheet is None:
        raise ExportError(
            "the grading worksheet is missing, and Moodle imports only its own worksheets: download the file "
            "(Assignment, Download grading worksheet) and name the file with --worksheet"
        )
    graded_class, grades = final_grades(folder, include_unreviewed)
    sheet = _read(worksheet)
    _check_maximum(sheet, graded_class.total)
    filled = _fill_in(folder, sheet, grades)
    lock_words = "can't be changed in Moodle: left as it is", "can't be changed in Moodle: left as they are"
    notes = (plural(filled.kept_count, "grade", *lock_words),) if filled.kept_count else ()
    return ExportFile(
        _FILE,
        "text/csv",
        write_sheet(replace(sheet, rows=[sheet.rows[0], *filled.rows]), newline="\n"),
        filled.left_blank(NO_ID, _NOT_LISTED),
        notes,
        (*changes("the worksheet", filled.replacements), *graded_class.alarms),
        filled.held_ids,
    )


def _read(worksheet: bytes) -> Sheet:
    sheet = read_sheet(worksheet, "worksheet")
    missing_columns = [name for name in _REQUIRED_COLUMNS if column(sheet.rows[0], name) < 0]
    if missing_columns:
        raise ExportError(
            f"the worksheet lacks the column {missing_columns[0]!r}; download the grading worksheet again"
        )
    return sheet


def _check_maximum(sheet: Sheet, total: Points) -> None:
    index = column(sheet.rows[0], "Maximum grade")
    maxima = {cell(row, index).strip().replace(",", ".") for row in sheet.rows[1:]} - {"", "-"} if index >= 0 else set()
    wrong = sorted(text for text in maxima if re.fullmatch(r"\d+(\.\d+)?", text) and float(text) != float(total))
    if wrong:
        raise ExportError(
            f"Moodle gives this assignment {wrong[0]} points, but the rubric adds up to {total}: correct one of them"
        )


def _fill_in(folder: Path, sheet: Sheet, grades: Sequence[FinalGrade]) -> FilledIn:
    header, comma = sheet.rows[0], uses_decimal_comma(sheet)
    comments, grade = column(header, "Feedback comments"), column(header, "Grade")

    def with_grade(row: list[str], final: FinalGrade) -> list[str]:
        row = with_cell(row, grade, two_decimals(final.points, comma))
        return with_cell(row, comments, safe_html(feedback_fragment("", final))) if comments >= 0 else row

    # Students read these comments, so the comments must not contain the apostrophes that `safe_cell` adds.
    def as_students_read(row: list[str]) -> list[str]:
        comment = cell(row, comments)
        return with_cell(row, comments, safe_html(comment)) if safe_cell(comment) != comment else row

    return fill_in(
        folder,
        sheet,
        grades,
        map(as_students_read, sheet.rows[1:]),
        lambda row: match[1] if (match := PARTICIPANT.match(cell(row, column(header, "Identifier")))) else "",
        grade,
        column(header, "Full name"),
        lambda _text, row: cell(row, column(header, "Grade can be changed")).strip().casefold() == "no",
        with_grade,
    )


def _fields(form: Form, _names: Sequence[str]) -> Choices | None:
    worksheet = form.file("Grading worksheet downloaded from Moodle, which takes only its own back")
    return None if worksheet is None else {"worksheet": worksheet}


FORMAT = ExportFormat(
    "moodle",
    "Moodle worksheet",
    "Moodle's offline grading worksheet, filled in, for its Upload grading worksheet.",
    (_FILE,),
    export_moodle,
    (ExportOption("--worksheet", "file", "moodle: fill in this grading worksheet, which you downloaded there."),),
    fields=_fields,
)
