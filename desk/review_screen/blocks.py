"""A student's work as data for the browser, which puts every letter of it on the page as text (`work.js`)."""

from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from desk.highlight import highlight_code
from desk.plots import Plot
from desk.tables import Table

_NO_MARKS: Mapping[int, str] = MappingProxyType({})


class WorkBlocks:
    """What `desk.pages.work.draw_work` draws, block by block; lines in `marks`, from 0, are highlighted with why."""

    def __init__(self) -> None:
        self.blocks: list[dict[str, Any]] = []

    def caption(self, text: str, kind: str = "caption") -> None:
        """A line that stands back. Of the kind `cut`, it says how much is left out here."""
        self.blocks.append({"kind": kind, "text": text})

    def code(self, text: str, language: str, marks: Mapping[int, str] = _NO_MARKS) -> None:
        """A cell of code, each line in pieces: [colour, text]."""
        self._lines("code", highlight_code(text, language), marks)

    def prose(self, lines: Sequence[str], marks: Mapping[int, str] = _NO_MARKS) -> None:
        """Lines in which the screen shows headings and emphasis."""
        self._lines("prose", lines, marks)

    def output(self, lines: Sequence[str], marks: Mapping[int, str] = _NO_MARKS) -> None:
        """What a program printed."""
        self._lines("output", lines, marks)

    def table(self, table: Table, marks: Mapping[int, str] = _NO_MARKS) -> None:
        """Rows of text, the head first."""
        row_marks = {number: marks[place] for number, place in enumerate(table.lines) if place in marks}
        self._lines("table", table.rows, row_marks)

    def plot(self, plot: Plot, label: str) -> None:
        """A picture that was drawn again."""
        size = {"width": plot.width, "height": plot.height}
        self.blocks.append({"kind": "plot", "source": plot.source, "text": label, **size})

    def _lines(self, kind: str, lines: Iterable[Any], marks: Mapping[int, str]) -> None:
        # The reasons of the marks, by line number. The line numbers are text, because all keys in JSON are text.
        reasons = {str(number): reason for number, reason in marks.items()}
        self.blocks.append({"kind": kind, "lines": list(lines), "marks": reasons})
