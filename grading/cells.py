"""CSV in which no cell becomes a formula, whichever delimiter a spreadsheet takes the file to have.

Every field is quoted. Where a spreadsheet that cuts the lines elsewhere (at semicolons, in half of Europe) could see a
cell begin with `=`, `+`, `-` or `@`, an apostrophe stands before it. `plain_cell` takes away what `safe_cell` added.
"""

import csv
import io
import re
from collections.abc import Iterable, Sequence

from messages.lines import with_plain_breaks

_STARTS = r"[=+\-@＝＋－＠]"
# Spreadsheets look past these, or show nothing for them.
_INVISIBLE = "[\x00-\x08\x0e-\x1f\u00ad\u061c\u180e\u200b-\u200f\u202a-\u202e\u2060-\u206f\ufe00-\ufe0f\ufeff]"
_BLANKS = rf'[^\S\t\r\n"]|{_INVISIBLE}'
# At the beginning, and after what another spreadsheet may take for the end of a cell.
_OUTER = re.compile(rf"(\A(?='*[\t\r\n])|(?:\A|[;,\t\r\n\"])(?='*(?:{_BLANKS})*{_STARTS}))('*)")
# After a blank: what would be a formula by itself, which the minus of "7 - 2" and the figure in "by -2" are not.
_INNER = re.compile(
    rf"( (?='*(?:[^\S \t\r\n]|{_INVISIBLE})*{_STARTS}\S)(?!'*[+-]\d{{1,15}}(?:[.,]\d{{1,15}})?(?:\s|\Z)))('*)"
)
_NUMBER = re.compile(r"'*(?:[+-]?\d{1,15}(?:[.,]\d{1,15})?%?|-)\Z")


def safe_cell(text: str, number: bool = True) -> str:
    """Text that a spreadsheet shows instead of computing.

    With `number`, a number (a negative one too) and a lone dash stay as they are: Moodle compares a dash (never graded)
    with its own record, letter by letter.
    """
    is_number = number and _NUMBER.match(text.strip(" "))
    return text if is_number else _INNER.sub(r"\1'\2", _OUTER.sub(r"\1'\2", text))


def plain_cell(text: str, number: bool) -> str:
    """The text of which `safe_cell` made this, or would leave this."""
    is_number = number and _NUMBER.match(text.strip(" "))
    return text if is_number else _OUTER.sub(_with_one_less, _INNER.sub(_with_one_less, text))


def _with_one_less(site: re.Match[str]) -> str:
    return site[1] + site[2][1:]


def csv_text(rows: Iterable[Sequence[str]], delimiter: str = ",", newline: str = "\n") -> str:
    """The rows as a file, every field in quotes. A row's first is text even if it is a number: it begins the line."""
    text = io.StringIO(newline="")
    writer = csv.writer(text, delimiter=delimiter, lineterminator=newline, quoting=csv.QUOTE_ALL)
    writer.writerows(
        [safe_cell(with_plain_breaks(cell), number=index > 0) for index, cell in enumerate(row)] for row in rows
    )
    return text.getvalue()


def safe_html(fragment: str) -> str:
    """HTML that a browser shows as before, without a sign that could begin a formula: students see no apostrophes."""
    return re.sub(rf"(?<!\w){_STARTS}", lambda sign: f"&#{ord(sign[0])};", fragment)
