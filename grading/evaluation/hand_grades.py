"""Grades that people gave, read from a table or from the desk's reviews.

The table is a CSV with a header: `submission`, `criterion`, `points`, `rater`. A submission is given by its name in the
batch or by its number at the learning platform. `criterion` is a criterion's id, and is empty or missing for the total.
`rater` tells several people apart. A row without points means that nobody graded it. In another table, such as a
gradebook, one column may be read as the totals.
"""

from collections.abc import Collection, Iterable, Mapping
from pathlib import Path

from grading.evaluation.agreement import EvaluationError
from grading.export.final import final_grades
from grading.hand_sample.draw import points_in
from grading.reviews import ROUND_REASON, read_overrides
from grading.rubric.rubric import MAX_POINTS, Points, total_points
from grading.submissions.lms_names import student_id
from grading.tables import cell, column, read_sheet, student, students

TOTAL = ""  # used in place of a criterion's id if the points are a total
HandGrades = Mapping[tuple[str, str, str], Points]  # each key is (submission, criterion, rater)


def read_hand_grades(data: bytes, label: str, total_column: str = "") -> HandGrades:
    """Read the grades in a table. `label` names the table in errors.

    Raises EvaluationError, ExportError, BoundError.
    """
    sheet = read_sheet(data, label)
    of_points, of_criterion, of_rater = (
        column(sheet.rows[0], caption)
        for caption in ((total_column, "", "") if total_column else ("points", "criterion", "rater"))
    )
    if of_points < 0 or not students(sheet):
        raise EvaluationError(
            f"{label} needs the columns submission, criterion, points and rater. Instead of the last three columns, "
            "it can have one column of totals, named with --column"
        )
    graded_rows = [number for number, row in enumerate(sheet.rows) if number and cell(row, of_points).strip()]
    grades = {
        (student(sheet, number, students(sheet)[0]), cell(row, of_criterion).strip(), cell(row, of_rater).strip()): (
            points_in(f"{label}, row {number + 1}", cell(row, of_points).strip(), (-MAX_POINTS, MAX_POINTS))
        )
        for number in graded_rows
        for row in [sheet.rows[number]]
    }
    if len(grades) < len(graded_rows):
        raise EvaluationError(f"{label}: one person has graded the same work twice; keep only one of the rows")
    return grades


def reviewed_grades(folder: Path) -> HandGrades:
    """Return the grades of all submissions in the batch in `folder` on which a person has decided.

    Raises BatchError.
    """
    names = {override.item_id for override in read_overrides(folder) if not override.reason.startswith(ROUND_REASON)}
    return {
        (final.submission, id, "reviews"): points
        for final in final_grades(folder, include_unreviewed=True)[1]
        if final.is_reviewed and {final.grade.item_id, final.submission} & names
        for id, points in [*((item.id, item.points) for item in final.criteria), (TOTAL, final.earned_points)]
        if points is not None
    }


def in_class(grades: HandGrades, submissions: Iterable[str], criteria: Collection[str]) -> HandGrades:
    """Return the grades of the class's submissions under their names.

    A total is added where every criterion was graded.
    """
    names = {alias: name for name in submissions for alias in (student_id(name), name) if alias}
    known = {(names[name], id, rater): points for (name, id, rater), points in grades.items() if name in names}
    totals = {
        (name, TOTAL, rater): total_points(known[name, id, rater] for id in criteria)
        for name, rater in {(name, rater) for name, _, rater in known}
        if all((name, id, rater) in known for id in criteria)
    }
    return totals | known
