"""Fills in Canvas's gradebook: the file that an instructor exports from Canvas, and imports again.

Canvas expects a header with `Student`, `ID`, and a last column of facts about the student that contains "Section".
Each assignment has a column named `Title (assignment id)`; a title without a known id would create a new assignment.
Above the students stands a row `    Points Possible`. Canvas matches students by ID. A blank leaves a grade as it is,
`EX` excuses, and columns with `(read only)` are ignored.
"""

import re
import unicodedata
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from pathlib import Path

from grading.export.final import (
    ExportFile,
    FinalGrade,
    changes,
    fill_in,
    final_grades,
)
from grading.export.format import Choices, ExportFormat, ExportOption, Form
from grading.roster import number_in
from grading.rubric.rubric import Points, exact, plain
from grading.tables import (
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

_ASSIGNMENT_COLUMN = re.compile(r"(?P<title>.*\S)\s*\((?P<id>\d+)\)\s*\Z", re.DOTALL)
_POINTS = re.compile(r"\d{1,9}(?:\.\d{1,9})?\Z")
_POINTS_POSSIBLE = "points possible"
_EXCUSED_MARK = "EX"
_FILE = "canvas-gradebook.csv"


@dataclass(frozen=True, slots=True)
class _Gradebook:
    """A gradebook, and where things are in it."""

    sheet: Sheet
    id_column: int
    last_fact: int  # index of the last column that describes the student
    assignment: int
    possible: int  # index of the row `Points Possible`
    decimal_comma: bool

    @property
    def name(self) -> str:
        """The name of the assignment's column."""
        return self.sheet.rows[0][self.assignment].strip()


def export_canvas(
    folder: Path,
    gradebook: bytes | None = None,
    assignment: str = "",
    *,
    include_unreviewed: bool = False,
    all_columns: bool = False,
    scale: bool = False,
) -> ExportFile:
    """Fill a class's grades into a gradebook that Canvas imports.

    Args:
        gradebook: what the instructor exported from Canvas. It says which student each row belongs to.
        assignment: the column, as an id, a title, or both as in `Homework 4 (1234)`. "" is allowed if the gradebook has
            one assignment, with the class's title: nothing is worse than grades in another assignment's column.
        all_columns: keep the columns of other assignments. By default they are left out, so that the import can't
            overwrite newer grades with old ones.
        scale: scale to Canvas's points possible, if they differ from the rubric's total.

    Raises ExportError, BatchError.
    """
    graded_class, grades = final_grades(folder, include_unreviewed)
    if gradebook is None:
        raise ExportError(
            "the gradebook is missing, and no other file says which student gets which grade: export the gradebook "
            "from Canvas (Grades, Export) and name the file with --gradebook"
        )
    book = _read(gradebook, assignment.strip(), graded_class.title)
    factor, notes = _factor(book, graded_class.total, scale)

    def with_points(row: list[str], final: FinalGrade) -> list[str]:
        points = plain(exact(final.points or 0) * factor)
        return with_cell(row, book.assignment, two_decimals(points, book.decimal_comma))

    filled = fill_in(
        folder,
        book.sheet,
        grades,
        book.sheet.rows[book.possible + 1 :],
        lambda row: cell(row, book.id_column),
        book.assignment,
        0,
        lambda current_text, _row: current_text.upper() == _EXCUSED_MARK,
        with_points,
    )
    excused_words = "is excused in Canvas: left so", "are excused in Canvas: left so"
    notes += [plural(filled.kept_count, "student", *excused_words)] if filled.kept_count else []
    rows = [*book.sheet.rows[: book.possible + 1], *filled.rows]
    if not all_columns:
        facts = range(book.last_fact + 1)
        rows = [[cell(row, index) for index in (*facts, book.assignment)] for row in rows]
    return ExportFile(
        _FILE,
        "text/csv",
        write_sheet(replace(book.sheet, rows=rows), newline="\n"),
        filled.left_blank(_NO_ID, _NOT_LISTED),
        (*notes, f"the grades are in the column {book.name!r}", *_hidden(book)),
        (*_drops(book), *changes(f"the column {book.name!r}", filled.replacements), *graded_class.alarms),
        filled.held_ids,
    )


_NO_ID = "its name holds no Canvas user id, so it is not in the file"
_NOT_LISTED = "its Canvas user id is not in the gradebook, so it is not in the file"
# Canvas ignores every column whose title contains one of these phrases (`NON_ASSIGNMENT_COLUMN_HEADERS` in
# instructure/canvas-lms, `lib/gradebook_importer.rb`).
_IGNORED_TITLE = re.compile("(?:Current|Final) (?:Score|Points|Grade)|Override (?:Score|Grade|Status)")
_PASS_OR_FAIL = frozenset({"complete", "incomplete"})


def assignment_columns(gradebook: bytes) -> list[str]:
    """Return the column names of all assignments in a gradebook that can take grades."""
    sheet = read_sheet(gradebook, "gradebook")
    _, last = _facts(sheet)
    return [name.strip() for name in sheet.rows[0][last + 1 :] if _takes_grades(name)]


def matching_columns(columns: Iterable[str], *names: str) -> list[str]:
    """Return the columns whose title or id is one of these names. Case, punctuation and blanks don't count."""
    sought_names = {_words(name) for name in names} - {""}
    return [column for column in columns if not sought_names.isdisjoint(_names(column))]


def _names(column: str) -> set[str]:
    match = _ASSIGNMENT_COLUMN.match(column)
    return {_words(column), _words(match["title"]), match["id"]} if match else set()


def _words(text: str) -> str:
    """Reduce a text to letters and digits. Signs that belong to a number, such as the dot in 1.5, are kept."""
    words = re.findall(r"\d+(?:[.,]\d+)*|[^\W\d_]+|[+#]+", unicodedata.normalize("NFKC", text).casefold())
    return " ".join(words)


# --- reading the gradebook


def _read(data: bytes, assignment: str, title: str) -> _Gradebook:
    sheet = read_sheet(data, "gradebook")
    id_column, last_fact = _facts(sheet)
    possible = next((i for i, row in enumerate(sheet.rows) if cell(row, 0).strip().casefold() == _POINTS_POSSIBLE), 0)
    if not possible:
        raise ExportError("the gradebook has no row 'Points Possible'; export it from Canvas again")
    assignment_column = _find_assignment_column(sheet.rows[0], last_fact, assignment, title)
    name = sheet.rows[0][assignment_column].strip()
    if _IGNORED_TITLE.search(name):
        raise ExportError(
            f"Canvas ignores the column {name!r} because of its title: give the assignment another title in Canvas"
        )
    if re.search(r"read\s+only", cell(sheet.rows[possible], assignment_column), re.IGNORECASE):
        raise ExportError(
            f"Canvas ignores the column {name!r}, because it is read only: allow grading of the assignment in Canvas"
        )
    rows = [
        with_cell(row, id_column, number_in(cell(row, id_column))) if index > possible else row
        for index, row in enumerate(sheet.rows)
    ]
    sheet = replace(sheet, rows=rows)
    return _Gradebook(sheet, id_column, last_fact, assignment_column, possible, uses_decimal_comma(sheet))


def _facts(sheet: Sheet) -> tuple[int, int]:
    """Return the index of the ID column, and of the last column of facts about the student."""
    header = sheet.rows[0]
    id_column = column(header, "ID")
    sections = [
        index
        for index, name in enumerate(header)
        if "section" in name.casefold() and not _ASSIGNMENT_COLUMN.match(name)
    ]
    if column(header, "Student", "LastName", "Last Name") < 0 or id_column < 0 or not sections:
        raise ExportError("the gradebook lacks a column: it needs Student, ID and Section; export it from Canvas again")
    return id_column, sections[0]


def _takes_grades(name: str) -> bool:
    return bool(_ASSIGNMENT_COLUMN.match(name)) and "(read only)" not in name.casefold()


def _find_assignment_column(header: Sequence[str], last_fact: int, assignment: str, title: str) -> int:
    """Find the assignment's column by its name. Its position is never used to guess."""
    columns = {index: header[index] for index in range(last_fact + 1, len(header)) if _takes_grades(header[index])}
    is_ambiguous = not assignment and len(columns) > 1
    matching_names = [] if is_ambiguous else matching_columns(columns.values(), assignment or title)
    # If a column has exactly the requested name, columns whose longer names contain that name are ignored.
    candidates = [name for name in matching_names if name.strip() == assignment] or matching_names
    indices = [index for index, name in columns.items() if name in candidates]
    if len(indices) == 1:
        return indices[0]
    names = "; ".join(name.strip() for name in columns.values()) or "none"
    problem = "more than one assignment" if indices or is_ambiguous else "no assignment"
    name_clause = "" if is_ambiguous else f" called {assignment or title!r:.100}"
    raise ExportError(
        f"the gradebook has {problem}{name_clause}. Its columns are: {names}. Name the right column", "--assignment"
    )


def _factor(book: _Gradebook, total: Points, scale: bool) -> tuple[Decimal, list[str]]:
    """Return the factor by which points are multiplied, and notes about it."""
    text = cell(book.sheet.rows[book.possible], book.assignment).strip().replace(",", ".")
    if not text:
        return Decimal(1), []
    possible = Decimal(text) if _POINTS.match(text) else Decimal(0)
    if possible == exact(total):
        return Decimal(1), []
    if not scale or not possible:
        problem = (
            f"Canvas gives this assignment {text:.20} points, but the rubric adds up to {total}: correct one of them"
        )
        if not possible:
            raise ExportError(problem)
        raise ExportError(f"{problem}, or let the export scale the points", "--scale")
    return possible / exact(total), [f"points are scaled from {total} to {possible}"]


# --- notes about what Canvas does with the points


def _drops(book: _Gradebook) -> list[str]:
    """Return what Canvas does not store, or does not show, of the points."""
    cells = [cell(row, book.assignment).strip().casefold() for row in book.sheet.rows]
    remark = f"in {book.name!r} Canvas keeps no points, only whether they are complete"
    return [remark] if _PASS_OR_FAIL.intersection(cells) else []


def _hidden(book: _Gradebook) -> list[str]:
    """Return a note if Canvas hides new grades from students until they are posted.

    The row between the header and the points possible then holds `Manual Posting`, possibly with more text
    (`GradebookExporter#hidden_assignment_text`), or `Muted` in older versions.
    """
    return [
        f"students see them only when you post them: of this column Canvas says {text!r:.80}"
        for row in book.sheet.rows[1 : book.possible]
        if (text := cell(row, book.assignment).strip())
    ]


# --- the format


def _fields(form: Form, names: Sequence[str]) -> Choices | None:
    gradebook = form.file("Gradebook exported from Canvas")
    if not gradebook:
        return None
    columns = assignment_columns(gradebook)
    matching = matching_columns(columns, *names)
    # The form preselects the column with the assignment's title, or no column. A column's position says nothing about
    # its content.
    assignment = form.column("Assignment", columns, matching[0] if len(matching) == 1 else None)
    scale = form.flag("Scale the points to Canvas's, where those are others")
    return {"gradebook": gradebook, "assignment": assignment, "scale": scale} if assignment else None


FORMAT = ExportFormat(
    "canvas",
    "Canvas gradebook",
    "Canvas's gradebook, filled in, for its Import Grades.",
    (_FILE,),
    export_canvas,
    (
        ExportOption("--gradebook", "file", "canvas: fill in this gradebook, which you exported there."),
        ExportOption("--assignment", "text", "canvas: use the assignment with this id, or 'Title (id)'.", metavar="A"),
        ExportOption("--all-columns", "flag", "canvas: keep the other assignments' columns."),
        ExportOption("--scale", "flag", "canvas: scale to the points possible there."),
    ),
    fields=_fields,
)
