"""Finds data frames in a student's outputs: columns and rows of plain text in the text that the models saw.

No HTML is parsed for this, because the rows shown must be the lines in which evidence is searched for.
"""

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

# The work is shown in about half of the page's width, and a table with more columns than this can't be read there.
MAX_COLUMNS = 12
# Line under the header of a Markdown table.
_SEPARATOR = re.compile(r"[|:\- ]*-[|:\- ]*")
# A line between two tables: an empty line, a heading, or a tibble's comment line.
_BETWEEN = re.compile(r"\s*(?:#|$)")
_TYPES = re.compile(r"\s+(?:<[\w .+]+>\s*)+")  # the second line of a printed tibble, with the columns' types


@dataclass(frozen=True, slots=True)
class Table:
    """Rows with the same number of cells, the header first, and the line of each row, from `start` to before `end`."""

    rows: tuple[tuple[str, ...], ...]
    lines: tuple[int, ...]
    start: int
    end: int


def tables(lines: Sequence[str], with_spaces: bool) -> Iterator[Table]:
    """Return the tables in these lines, in order.

    `with_spaces` also finds columns separated by spaces, as in outputs.
    """
    start = 0
    while start < len(lines):
        end = start
        while end < len(lines) and not _BETWEEN.match(lines[end]):
            end += 1
        block = range(start, end)
        readings = (parse(lines, block, with_spaces) for parse in (_parse_piped, _parse_spaced))
        table = next(filter(None, readings), None)
        if table:
            yield table
        start = end + 1


def _parse_piped(lines: Sequence[str], block: range, _with_spaces: bool) -> Table | None:
    """Parse cells between bars: Markdown, and what is left of a table in HTML."""
    places = [number for number in block if not _SEPARATOR.fullmatch(lines[number])]
    rows = [[cell.strip() for cell in lines[number].strip().strip("|").split(" | ")] for number in places]
    if len(rows) < 2 or not all("|" in lines[number] for number in block):
        return None
    if len(rows[0]) == len(rows[1]) - 1:  # R and pandas write no header above the row names
        rows[0].insert(0, "")
    return _table(rows, places, block)


def _parse_spaced(lines: Sequence[str], block: range, with_spaces: bool) -> Table | None:
    """Parse a table whose header begins further right than the row names, as pandas and R print data frames."""
    if not with_spaces or len(block) < 3 or not lines[block[0]].startswith(" "):
        return None
    places = [number for number in block if number == block[0] or not _TYPES.fullmatch(lines[number])]
    if any(lines[number][:1].isspace() for number in places[1:]):
        return None
    cuts = _cuts([lines[number] for number in block])
    rows = [[lines[number][left:right].strip() for left, right in cuts] for number in places]
    # A backslash at the end of the header means that pandas prints the other columns below.
    if rows[0][-1] == "\\":
        rows = [row[:-1] for row in rows]
    return _table(rows, places, block) if rows[0] and not rows[0][0] and all(rows[0][1:]) else None


def _cuts(lines: Sequence[str]) -> list[tuple[int, int]]:
    """Return where columns begin and end.

    A gap in all lines separates two columns. A column without a header belongs to its neighbour.
    """
    width = max(map(len, lines))
    padded_lines = [line.ljust(width) for line in lines]
    is_filled = [any(line[at] != " " for line in padded_lines) for at in range(width)]
    edges = [at for at in range(width + 1) if (at < width and is_filled[at]) != (at > 0 and is_filled[at - 1])]
    cuts = list(zip(edges[::2], edges[1::2], strict=True))
    columns: list[tuple[int, int]] = []
    for left, right in cuts:
        # The column of row names stays a column, although it has no header.
        last_column = columns[-1] if len(columns) > 1 else None
        has_no_header = last_column and not lines[0][last_column[0] : last_column[1]].strip()
        if last_column and left - last_column[1] == 1 and (has_no_header or not lines[0][left:right].strip()):
            columns[-1] = (last_column[0], right)
        else:
            columns.append((left, right))
    return columns


def _table(rows: Sequence[Sequence[str]], places: Sequence[int], block: range) -> Table | None:
    width = len(rows[0])
    if not 2 <= width <= MAX_COLUMNS or any(len(row) != width for row in rows):
        return None
    return Table(tuple(map(tuple, rows)), tuple(places), block.start, block.stop)
