"""CSV in which no cell becomes a formula, whichever delimiter a spreadsheet expects.

Every field is quoted. A spreadsheet may split lines at another character than this file uses, such as the semicolon in
half of Europe. Wherever a cell could then begin with `=`, `+`, `-` or `@`, an apostrophe is put before it. `plain_cell`
removes what `safe_cell` added.
"""

import csv
import io
import re
from collections.abc import Iterable, Sequence

from messages.lines import with_plain_breaks

_STARTS = r"[=+\-@＝＋－＠]"
# Spreadsheets ignore these characters, or do not display them.
_INVISIBLE = "[\x00-\x08\x0e-\x1f\u00ad\u061c\u180e\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufe00-\ufe0f\ufeff]"
_BLANKS = rf'[^\S\t\r\n"]|{_INVISIBLE}'
# Finds the start of a formula at the beginning of a text, or after a character at which a spreadsheet can split the
# text into cells.
_OUTER = re.compile(rf"(\A(?='*[\t\r\n])|(?:\A|[;,\t\r\n\"])(?='*(?:{_BLANKS})*{_STARTS}))('*)")
# Finds the start of a formula after a space. The minus in "7 - 2" and the number in "by -2" do not start a formula.
_INNER = re.compile(
    rf"( (?='*(?:[^\S \t\r\n]|{_INVISIBLE})*{_STARTS}\S)(?!'*[+-]\d{{1,15}}(?:[.,]\d{{1,15}})?(?:\s|\Z)))('*)"
)
_NUMBER = re.compile(r"'*(?:[+-]?\d{1,15}(?:[.,]\d{1,15})?%?|-)\Z")


def safe_cell(text: str, number: bool = True) -> str:
    """Return text that a spreadsheet displays and never computes.

    With `number`, a number (also a negative one) and a single dash stay unchanged. Moodle writes a dash for "never
    graded" and compares it letter by letter.
    """
    is_number = number and _NUMBER.match(text.strip(" "))
    return text if is_number else _INNER.sub(r"\1'\2", _OUTER.sub(r"\1'\2", text))


def plain_cell(text: str, number: bool) -> str:
    """Return the text that `safe_cell` was given, from the text that it made."""
    is_number = number and _NUMBER.match(text.strip(" "))
    return text if is_number else _OUTER.sub(_with_one_less, _INNER.sub(_with_one_less, text))


def _with_one_less(site: re.Match[str]) -> str:
    return site[1] + site[2][1:]


def csv_text(rows: Iterable[Sequence[str]], delimiter: str = ",", newline: str = "\n") -> str:
    """Return the rows as a CSV file with every field quoted.

    A row's first cell is always text, because it begins the line.
    """
    text = io.StringIO(newline="")
    writer = csv.writer(text, delimiter=delimiter, lineterminator=newline, quoting=csv.QUOTE_ALL)
    writer.writerows(
        [safe_cell(with_plain_breaks(cell), number=index > 0) for index, cell in enumerate(row)] for row in rows
    )
    return text.getvalue()


def safe_html(fragment: str) -> str:
    """Escape signs in HTML that could begin a formula.

    A browser shows the same page, so students see no apostrophes.
    """
    return re.sub(rf"(?<!\w){_STARTS}", lambda sign: f"&#{ord(sign[0])};", fragment)
