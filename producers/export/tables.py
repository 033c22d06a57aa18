"""CSV as spreadsheets and LMSs write it: read with its own delimiter, written so that no cell becomes a formula."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from decimal import ROUND_HALF_UP, Decimal

from messages.errors import UsageError
from producers.report import FORMULA_STARTS
from producers.rubric import Points, exact

MAX_BYTES = 32 << 20
_NUMBER = re.compile(r"[+-]?\d{1,15}(?:[.,]\d{1,15})?%?\Z")
_CENT = Decimal("0.01")  # LMSs keep two decimals


class ExportError(UsageError):
    """The export can't be made from this input; the message says what to do."""


@dataclass(frozen=True, slots=True)
class Sheet:
    """A CSV file as rows of text, and how it was written."""

    rows: list[list[str]]
    delimiter: str = ","
    bom: bool = False


def read_sheet(data: bytes, what: str) -> Sheet:
    """The rows of a CSV file; `what` names it in errors. Raises ExportError if it is none."""
    if len(data) > MAX_BYTES:
        raise ExportError(f"the {what} is larger than {MAX_BYTES >> 20} MiB; is it the right file?")
    try:
        text = data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ExportError(f"the {what} is not UTF-8 (byte {error.start:,}); download it anew") from None
    first = text.partition("\n")[0]
    delimiter = max(",;\t", key=first.count)
    try:
        rows = list(csv.reader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True))
    except csv.Error as error:
        raise ExportError(f"the {what} is no CSV that can be read: {error}; download it anew") from None
    if not rows or not rows[0]:
        raise ExportError(f"the {what} is empty; download it anew")
    return Sheet(rows, delimiter, data.startswith(b"\xef\xbb\xbf"))


def write_sheet(sheet: Sheet, newline: str = "\r\n") -> bytes:
    """The file's bytes. Every cell that a spreadsheet would compute gets an apostrophe in front."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, delimiter=sheet.delimiter, lineterminator=newline)
    writer.writerows([safe_cell(cell) for cell in row] for row in sheet.rows)
    return (b"\xef\xbb\xbf" if sheet.bom else b"") + text.getvalue().encode("utf-8", "replace")


def safe_cell(text: str) -> str:
    """Text that a spreadsheet shows instead of computing; numbers, negative ones too, and a lone dash stay as they are.

    Moodle compares a dash (never graded) with its own record, letter by letter.
    """
    if _NUMBER.match(text.strip()) or text.strip() == "-":
        return text
    return f"'{text}" if text.lstrip().startswith(FORMULA_STARTS) or text.startswith(("\t", "\r")) else text


def two_decimals(points: Points | None, decimal_comma: bool = False) -> str:
    """`7`, `7.5`, `7.25`; nothing for None."""
    if points is None:
        return ""
    shown = f"{exact(points).quantize(_CENT, ROUND_HALF_UP):f}".rstrip("0").rstrip(".")
    return shown.replace(".", ",") if decimal_comma else shown


def column(header: Sequence[str], *captions: str) -> int:
    """The index of the first column with one of these captions, or -1; case and blanks don't count."""
    wanted = {caption.casefold() for caption in captions}
    return next((index for index, cell in enumerate(header) if cell.strip().casefold() in wanted), -1)


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
    return sheet.delimiter != "," and any(re.fullmatch(r"-?\d+,\d+", cell.strip()) for cell in _cells(sheet.rows))


def _cells(rows: Iterable[Sequence[str]]) -> Iterable[str]:
    return (cell for row in rows for cell in row)
