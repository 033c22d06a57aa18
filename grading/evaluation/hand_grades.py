"""Grades that people gave, from a table or from the desk's reviews.

One form of CSV, with a header: `submission`, `criterion`, `points`, `rater`. A submission is named as the batch names
it, or by its number at the learning platform; `criterion` is an id of the rubric's, empty or left out for the total;
`rater` tells two people apart. A row without points is one that nobody has graded. Of another table, such as a
gradebook, one column may be read as the totals.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from grading.evaluation.agreement import EvaluationError
from grading.export.final import final_grades
from grading.hand_sample.draw import points_in
from grading.reviews import ROUND_REASON, read_overrides
from grading.rubric.rubric import MAX_POINTS, Points
from grading.submissions.lms_names import student_id
from grading.tables import MAX_BYTES, cell, column, read_sheet, student, students
from producers.storage.private import open_ordinary
from producers.words import shorten_names

TOTAL = ""  # in the place of a criterion


@dataclass(frozen=True, slots=True)
class HandPoints:
    """What one person gave for one criterion of one submission."""

    submission: str
    criterion: str
    points: Points
    rater: str = ""


# By submission, rater and criterion.
HandGrades = Mapping[str, Mapping[str, Mapping[str, Points]]]


def read_hand_grades(place: Path, total_column: str = "") -> list[HandPoints]:
    """The rows of a table that have points. Raises EvaluationError, ExportError."""
    try:
        with open_ordinary(place) as file:
            sheet = read_sheet(file.read(MAX_BYTES + 1), str(place))
    except OSError as error:
        raise EvaluationError(f"{place} can't be read: {error.strerror}") from None
    header = sheet.rows[0]
    of_points, of_criterion, of_rater = (
        column(header, name) for name in (total_column or "points", "criterion", "rater")
    )
    if total_column:
        of_criterion = of_rater = -1
    if of_points < 0 or not students(sheet):
        raise EvaluationError(
            f"{place} needs the columns submission, criterion, points and rater; or one that says whose a row is, and "
            "--column names that of the totals"
        )
    named_rows = [(row, number, student(sheet, number, students(sheet)[0])) for number, row in enumerate(sheet.rows)]
    return [
        HandPoints(
            name,
            cell(row, of_criterion).strip(),
            points_in(f"{place}, row {number + 1}", cell(row, of_points).strip(), MAX_POINTS),
            cell(row, of_rater).strip(),
        )
        for row, number, name in named_rows[1:]
        if name and cell(row, of_points).strip()
    ]


def reviewed_grades(folder: Path) -> list[HandPoints]:
    """What stands about each submission of the batch in `folder` that a person has decided on. Raises BatchError."""
    decided_names = {
        override.item_id for override in read_overrides(folder) if not override.reason.startswith(ROUND_REASON)
    }
    _, finals = final_grades(folder, include_unreviewed=True)
    return [
        HandPoints(final.submission, id, points)
        for final in finals
        if {final.grade.item_id, final.submission} & decided_names
        for id, points in [*((item.id, item.points) for item in final.criteria), (TOTAL, final.earned_points)]
        if points is not None
    ]


def by_submission(rows: Iterable[HandPoints], submissions: Iterable[str]) -> tuple[HandGrades, str]:
    """The rows by submission, rater and criterion, and a sentence about those of nobody in the class, if any are.

    Raises EvaluationError where one person graded the same twice, or nobody is in the class.
    """
    known_names = {alias: name for name in submissions for alias in (student_id(name), name)}
    grades: dict[str, dict[str, dict[str, Points]]] = {}
    strangers = []
    for row in rows:
        name = known_names.get(row.submission)
        if name is None:
            strangers.append(row.submission)
            continue
        points = grades.setdefault(name, {}).setdefault(row.rater, {})
        if row.criterion in points:
            twice = f"{row.criterion or 'the total'} by {row.rater or 'one person'}"
            raise EvaluationError(f"{row.submission!r} has two rows of {twice}; keep one")
        points[row.criterion] = row.points
    if not grades:
        raise EvaluationError("none of the hand grades is of a submission in this class; names must be the batch's")
    return grades, f"Of nobody in this class: {shorten_names(dict.fromkeys(strangers))}." if strangers else ""
