"""Reads and writes CSV as spreadsheets and LMSs do, with the file's own delimiter (see grading/cells.py)."""

import csv
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal

from grading.cells import csv_text, plain_cell
from grading.rubric.rubric import Points, exact
from messages.errors import UsageError

MAX_BYTES = 32 << 20
_HEADER_CHARS = 1 << 16  # maximum number of characters in the header
PARTICIPANT = re.compile(r"\D*(\d+)\s*\Z")  # the form of Moodle's identifiers: `Participant 11`
_CENT = Decimal("0.01")  # LMSs store points with two decimals


class ExportError(UsageError):
    """The export can't be made from this input. The message says what to do; `option` names the option that helps."""

    def __init__(self, message: str, option: str = "") -> None:
        super().__init__(message)
        self.option = option


@dataclass(frozen=True, slots=True)
class Sheet:
    """A CSV file as rows of text, and how it was written."""

    rows: list[list[str]]
    delimiter: str = ","
    bom: bool = False


def read_sheet(data: bytes, label: str) -> Sheet:
    """Read a CSV file. `label` names it in errors. Raises ExportError if it can't be read."""
    if len(data) > MAX_BYTES:
        raise ExportError(f"the {label} is larger than {MAX_BYTES >> 20} MiB; is it the right file?")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    # UTF-16 text has many NUL bytes. Spreadsheets call UTF-16 "Unicode text".
    if "\0" in text:
        raise ExportError(f"the {label} is not UTF-8; open it in the spreadsheet and save it as 'CSV UTF-8'")
    first = re.sub(r'"[^"]*"', "", text[:_HEADER_CHARS]).partition("\n")[0]
    delimiter = max(",;\t", key=first.count)
    try:
        rows = list(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True))
    except csv.Error as error:
        raise ExportError(f"the {label} can't be read as CSV: {error}; save or download it again") from None
    if not rows or not rows[0]:
        raise ExportError(f"the {label} is empty; is it the right file?")
    _refuse_longer(rows, delimiter, label)
    return Sheet(
        [[plain_cell(cell, number=index > 0) for index, cell in enumerate(row)] for row in rows],
        delimiter,
        data.startswith(b"\xef\xbb\xbf"),
    )


def _refuse_longer(rows: Sequence[Sequence[str]], delimiter: str, label: str) -> None:
    """Raise ExportError if a row has more fields than the header.

    An unquoted text that contains the delimiter would be cut there, and everything after it would shift.
    """
    for number, row in enumerate(rows, 1):
        if any(text.strip() for text in row[len(rows[0]) :]):  # spreadsheets add empty fields at the end of a row
            sign = {",": "a comma", ";": "a semicolon"}.get(delimiter, "a tab")
            raise ExportError(
                f"the {label}, row {number}: there are more fields than in the header; put quotes around values with "
                f"{sign}"
            )


def write_sheet(sheet: Sheet, newline: str = "\r\n") -> bytes:
    """Write a CSV file. `read_sheet` reads the same sheet from it."""
    text = csv_text(sheet.rows, sheet.delimiter, newline)
    return (b"\xef\xbb\xbf" if sheet.bom else b"") + text.encode("utf-8", "replace")


def two_decimals(points: Points | None, decimal_comma: bool = False) -> str:
    """Format points: `7`, `7.5`, `7.25`, or an empty text for None."""
    if points is None:
        return ""
    text = f"{exact(points).quantize(_CENT, ROUND_HALF_UP):f}".rstrip("0").rstrip(".")
    return text.replace(".", ",") if decimal_comma else text


def differs(before: str, after: str) -> bool:
    """Whether a cell holds a grade that is not `after`. Moodle writes a dash for "no grade"."""
    try:
        return before not in ("", "-") and Decimal(before.replace(",", ".")) != Decimal(after.replace(",", "."))
    except ArithmeticError:
        # A text that is not a number counts as different, because the export would replace it.
        return True


def column(header: Sequence[str], *captions: str) -> int:
    """Return the index of the first column with one of these captions, or -1.

    Case and surrounding blanks don't count.
    """
    folded_captions = {caption.casefold() for caption in captions}
    return next((index for index, cell in enumerate(header) if cell.strip().casefold() in folded_captions), -1)


def students(sheet: Sheet) -> list[int]:
    """Return the columns that identify a row's student: by a submission's name, or by the learning platform's id."""
    header = sheet.rows[0]
    return [place for name in ("submission", "student_id", "ID", "Identifier") if (place := column(header, name)) >= 0]


def student(sheet: Sheet, row: int, place: int) -> str:
    """Return a row's entry in one of the `students` columns. For Moodle's identifier, it is only the number."""
    text, name = cell(sheet.rows[row], place), sheet.rows[0][place]
    match = PARTICIPANT.match(text) if name.strip().casefold() == "identifier" else None
    return match[1] if match else text.strip()


def cell(row: Sequence[str], index: int) -> str:
    """Return a cell, or "" if the row is too short."""
    return row[index] if 0 <= index < len(row) else ""


def with_cell(row: Sequence[str], index: int, text: str) -> list[str]:
    """Return the row with one cell replaced, extended if needed."""
    longer = [*row, *[""] * (index + 1 - len(row))]
    longer[index] = text
    return longer


def uses_decimal_comma(sheet: Sheet) -> bool:
    """Whether numbers in this file have a decimal comma.

    A single such cell is enough, unless commas are the delimiter.
    """
    decimal = re.compile(r"-?\d+,\d+")
    return sheet.delimiter != "," and any(decimal.fullmatch(cell.strip()) for row in sheet.rows for cell in row)
