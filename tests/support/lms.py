"""What Canvas and Moodle do with an uploaded file, by their sources. Shares no code with the exporters.

Canvas: instructure/canvas-lms, `lib/gradebook_importer.rb`. Moodle: moodle/moodle, `mod/assign/feedback/offline`,
`importgradeslib.php` and `locallib.php`.

Each reader gives the grades that the LMS would set, or raises ImportRejected with the rule that the file breaks.
"""

import csv
import io
import re
import zipfile
from dataclasses import dataclass, field


class ImportRejected(Exception):
    """The LMS would not take this file, or would do something that nobody wants."""


@dataclass
class CanvasImport:
    """What an upload would change: grades by assignment id and user id; blanks change nothing."""

    grades: dict[str, dict[str, float]] = field(default_factory=dict)
    excuses: set[tuple[str, str]] = field(default_factory=set)
    points_possible: dict[str, float] = field(default_factory=dict)


def canvas_import(data: bytes, assignments: set[str], users: set[str]) -> CanvasImport:
    """Read a gradebook as Canvas does, in a course with these assignment ids and user ids."""
    text = data.decode("utf-8-sig")
    beginning = "".join(text.splitlines(keepends=True)[:3])  # `GradebookImporter#csv_stream`
    delimiter = ";" if beginning.count(";") > beginning.count(",") else ","
    rows = list(csv.reader(io.StringIO(text), delimiter=delimiter))
    header = rows[0]
    columns = _assignment_columns(header, assignments)
    points_row = next((n for n, row in enumerate(rows) if row and "Points Possible" in row[0]), None)
    if points_row is None or rows[points_row][0][:1] != " ":
        raise ImportRejected("no row '    Points Possible'; without its blanks it would be a student of that name")
    # `readonly_assignment?`
    columns = {i: id for i, id in columns.items() if not re.search(r"read\s+only", rows[points_row][i])}
    gradebook = CanvasImport()
    gradebook.points_possible = {
        columns[i]: _number(rows[points_row][i]) for i in columns if rows[points_row][i].strip()
    }
    for row in rows[points_row + 1 :]:
        _student(row, header, columns, users, gradebook)
    return gradebook


def _assignment_columns(header: list[str], assignments: set[str]) -> dict[int, str]:
    """Assignment id by column; what `NON_ASSIGNMENT_COLUMN_HEADERS` finds anywhere in a title is ignored."""
    columns = {}
    for index in range(_fact_columns(header), len(header)):
        kinds = r"(?:Current|Final) (?:Score|Points|Grade)|Override (?:Score|Grade|Status)"
        if re.search(rf"{kinds}|\(read only\)", header[index]) or not header[index].strip():
            continue
        match = re.search(r"\((\d+)\)\s*$", header[index])
        if match is None or match.group(1) not in assignments:
            raise ImportRejected(f"column {header[index]!r} would create a new assignment")
        columns[index] = match.group(1)
    return columns


def _student(
    row: list[str], header: list[str], columns: dict[int, str], users: set[str], gradebook: CanvasImport
) -> None:
    user = row[header.index("ID")].strip()
    if user not in users:
        raise ImportRejected(f"no user {user!r} in the course")
    for index, assignment in columns.items():
        value = row[index].strip() if index < len(row) else ""
        if value.upper() == "EX":
            gradebook.excuses.add((assignment, user))
        elif value:
            if user in gradebook.grades.setdefault(assignment, {}):
                raise ImportRejected(f"user {user} is there twice")
            gradebook.grades[assignment][user] = _number(value)


def _fact_columns(header: list[str]) -> int:
    """How many columns say who the student is; the last holds "Section"."""
    if "Student" not in header and not {"LastName", "FirstName"} <= set(header):
        raise ImportRejected("no column Student")
    if "ID" not in header:
        raise ImportRejected("no column ID")
    sections = [index for index, name in enumerate(header) if "Section" in name and "(" not in name]
    if not sections:
        raise ImportRejected("the last column of facts must hold 'Section'")
    return sections[0] + 1


def _number(text: str) -> float:
    if not re.fullmatch(r"-?\d+([.,]\d{1,2})?", text.strip()):
        raise ImportRejected(f"{text!r} is no grade with at most two decimals")
    return float(text.strip().replace(",", "."))


@dataclass
class MoodleImport:
    """What a worksheet would set, by participant number."""

    grades: dict[str, float] = field(default_factory=dict)
    comments: dict[str, str] = field(default_factory=dict)


def moodle_worksheet(data: bytes, last_modified: dict[str, str], maximum: float) -> MoodleImport:
    """Read a worksheet as Moodle's offline grading does.

    `last_modified` is Moodle's own record by participant: a row whose time differs is older and is skipped.
    """
    text = data.decode("utf-8-sig")  # the separator is chosen on upload
    first = text.split("\n", 1)[0]
    rows = list(csv.reader(io.StringIO(text), delimiter=max(",;\t", key=first.count)))
    header = rows[0]
    for column in ("Identifier", "Grade", "Last modified (grade)"):
        if column not in header:
            raise ImportRejected(f"no column {column}")
    worksheet = MoodleImport()
    for row in rows[1:]:
        if len(row) != len(header):
            raise ImportRejected("a row of another length than the header")
        cells = dict(zip(header, row, strict=True))
        match = re.fullmatch(r"Participant (\d+)", cells["Identifier"])
        if match is None or match.group(1) not in last_modified:
            continue
        if cells["Last modified (grade)"] != last_modified[match.group(1)]:
            continue
        if cells["Grade"].strip():
            value = float(cells["Grade"].replace(",", "."))  # `unformat_float`
            if not 0 <= value <= maximum:  # such a row is passed over, and nobody is told
                raise ImportRejected(f"grade {value} is out of range")
            worksheet.grades[match.group(1)] = value
        if cells.get("Feedback comments"):
            worksheet.comments[match.group(1)] = cells["Feedback comments"]
    return worksheet


def moodle_feedback_zip(data: bytes, participants: set[str]) -> dict[str, bytes]:
    """Read a feedback zip: the file of each participant."""
    files = {}
    with zipfile.ZipFile(io.BytesIO(data)) as archive:
        for name in archive.namelist():
            folder, slash, file = name.partition("/")
            parts = folder.split("_")
            if not slash or not file or len(parts) < 4 or parts[2] != "assignsubmission":
                raise ImportRejected(f"{name!r} is not in a folder fullname_participant_assignsubmission_plugin_")
            if parts[1] not in participants:
                raise ImportRejected(f"no participant {parts[1]}")
            files[parts[1]] = archive.read(name)
    return files


def formulas(data: bytes) -> list[str]:
    """Cells that a spreadsheet would compute instead of showing; numbers are none."""
    text = data.decode("utf-8-sig")
    delimiter = ";" if text.split("\n", 1)[0].count(";") > text.split("\n", 1)[0].count(",") else ","
    cells = [cell for row in csv.reader(io.StringIO(text), delimiter=delimiter) for cell in row]
    return [
        cell for cell in cells if re.match(r"\s*[=+\-@]", cell) and not re.fullmatch(r"[+-]?[\d.,]+%?|-", cell.strip())
    ]
