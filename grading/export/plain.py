"""A CSV for all other uses. It has a row for each submission, with the models' points beside a person's decisions."""

from collections.abc import Sequence
from pathlib import Path

from grading.export.final import ExportFile, FinalGrade, final_grades, left_blank, with_people
from grading.export.format import ExportFormat
from grading.report.grades import name_cell, one_line, show_points
from grading.roster import Roster, kept_files, read_rosters
from grading.tables import Sheet, write_sheet

# The file can't be called grades.csv, because a file of that name in the same folder holds the models' grades.
FILE = "final-grades.csv"
FIRST = ("submission", "student_id", "state", "reviewed", "reviewer", "points", "max_points", "points_by_models")
LAST = ("late", "needs_review", "remarks", "left_blank_because", "reason")


def export_csv(folder: Path, *, include_unreviewed: bool = False) -> ExportFile:
    """Make a table of the class with the columns FIRST, each criterion's points, and LAST. Raises BatchError.

    If anybody is known, the last column is `person`.
    """
    graded_class, grades = final_grades(folder, include_unreviewed)
    roster = read_rosters(kept_files(folder))
    ids = [criterion.id for criterion in graded_class.grades[0].criteria] if graded_class.grades else []
    rows = with_people([[*FIRST, *ids, *LAST], *(_row(final, ids, roster) for final in grades)], grades)
    return ExportFile(
        FILE, "text/csv", write_sheet(Sheet(rows), newline="\n"), left_blank(grades), asks=graded_class.alarms
    )


def _row(final: FinalGrade, ids: Sequence[str], roster: Roster) -> list[str]:
    grade = final.grade
    points_by_criterion = (
        {criterion.id: criterion.points for criterion in final.criteria} if final.points is not None else {}
    )
    return [
        name_cell(grade.submission),
        "; ".join(roster.names(grade.submission)[1:]),
        grade.state,
        "yes" if final.is_reviewed else "no",
        one_line(", ".join(final.reviewers)),
        show_points(final.points),
        show_points(grade.max_points),
        show_points(grade.points),
        *(show_points(points_by_criterion.get(id)) for id in ids),
        final.penalty.words if final.penalty else "",
        one_line("; ".join(final.open_doubts)),
        one_line("; ".join(grade.remarks)),
        one_line(final.why_blank),
        one_line(grade.reason),
    ]


FORMAT = ExportFormat(
    "csv",
    "Table (CSV)",
    "One row for each submission, for a spreadsheet.",
    (FILE,),
    export_csv,
)
