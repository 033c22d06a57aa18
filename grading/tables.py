"""CSV as spreadsheets and LMSs write it: read and written with its own delimiter (grading/cells.py)."""

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
_HEADER_CHARS = 1 << 16  # in which the header ends
PARTICIPANT = re.compile(r"\D*(\d+)\s*\Z")  # `Participant 11`, as Moodle identifies them
_CENT = Decimal("0.01")  # LMSs keep two decimals


class ExportError(UsageError):
    """The export can't be made from this input; the message says what to do, and `option` with which option of ours."""

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
    """The rows of a CSV file; `label` names it in errors. Raises ExportError if it is none."""
    if len(data) > MAX_BYTES:
        raise ExportError(f"the {label} is larger than {MAX_BYTES >> 20} MiB; is it the right file?")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError:
        text = "\0"
    if "\0" in text:  # in UTF-16 every other byte is 0, and a spreadsheet's "Unicode text" is that
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
    """A text with the delimiter in it, without quotes, would be cut off there, and what follows it be shifted."""
    for number, row in enumerate(rows, 1):
        if any(text.strip() for text in row[len(rows[0]) :]):  # spreadsheets leave empty ones behind
            sign = {",": "a comma", ";": "a semicolon"}.get(delimiter, "a tab")
            raise ExportError(
                f"the {label}, row {number}: it has more fields than the header; put a text that holds {sign} in quotes"
            )


def write_sheet(sheet: Sheet, newline: str = "\r\n") -> bytes:
    """The file's bytes; `read_sheet` gives the same sheet again."""
    text = csv_text(sheet.rows, sheet.delimiter, newline)
    return (b"\xef\xbb\xbf" if sheet.bom else b"") + text.encode("utf-8", "replace")


def two_decimals(points: Points | None, decimal_comma: bool = False) -> str:
    """`7`, `7.5`, `7.25`; nothing for None."""
    if points is None:
        return ""
    text = f"{exact(points).quantize(_CENT, ROUND_HALF_UP):f}".rstrip("0").rstrip(".")
    return text.replace(".", ",") if decimal_comma else text


def differs(before: str, after: str) -> bool:
    """Whether a cell holds a grade, and another than `after`. A dash, as Moodle writes it, is none."""
    try:
        return before not in ("", "-") and Decimal(before.replace(",", ".")) != Decimal(after.replace(",", "."))
    except ArithmeticError:
        return True  # no number: whatever it says is replaced by one


def column(header: Sequence[str], *captions: str) -> int:
    """The index of the first column with one of these captions, or -1; case and blanks don't count."""
    folded_captions = {caption.casefold() for caption in captions}
    return next((index for index, cell in enumerate(header) if cell.strip().casefold() in folded_captions), -1)


def students(sheet: Sheet) -> list[int]:
    """The columns that say whose a row is: a submission's name, or the learning platform's id. Empty if none does."""
    header = sheet.rows[0]
    return [place for name in ("submission", "student_id", "ID", "Identifier") if (place := column(header, name)) >= 0]


def student(sheet: Sheet, row: int, place: int) -> str:
    """What a row says in one of the `students` columns; of a `PARTICIPANT` the number."""
    text, name = cell(sheet.rows[row], place), sheet.rows[0][place]
    match = PARTICIPANT.match(text) if name.strip().casefold() == "identifier" else None
    return match[1] if match else text.strip()


def cell(row: Sequence[str], index: int) -> str:
    """A cell, or "" where a row is shorter than the header."""
    return row[index] if 0 <= index < len(row) else ""


def with_cell(row: Sequence[str], index: int, text: str) -> list[str]:
    """The row with one cell replaced, made longer if need be."""
    longer = [*row, *[""] * (index + 1 - len(row))]
    longer[index] = text
    return longer


def uses_decimal_comma(sheet: Sheet) -> bool:
    """Whether numbers in this file have a decimal comma: one such cell tells, in a file that isn't cut at commas."""
    decimal = re.compile(r"-?\d+,\d+")
    return sheet.delimiter != "," and any(decimal.fullmatch(cell.strip()) for row in sheet.rows for cell in row)
