"""Output in a terminal: progress on stderr, results on stdout."""

import codecs
import io
import json
import logging
import re
import sys
import time
import unicodedata
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

import click
from rich.cells import cell_len
from rich.console import Console, Group
from rich.progress import BarColumn, Progress, TaskID, TextColumn
from rich.table import Table
from rich.text import Text

from desk.progress import EXPECTED
from messages.lines import on_one_line
from producers.batch.batch import Counts
from producers.words import plural

log = logging.getLogger(__name__)

_PIPED_WIDTH = 160  # a pipe or file has no width, and the default of 80 would break file names

# A stream is None if its descriptor is closed, as under some supervisors. The import must not fail then.
stdout = Console(width=None if sys.stdout and sys.stdout.isatty() else _PIPED_WIDTH)
stderr = Console(stderr=True, width=None if sys.stderr and sys.stderr.isatty() else _PIPED_WIDTH)

# Blanks between two columns.
_GAP = 2
# Replaces the blanks inside a name while lines are wrapped.
_WHOLE_BLANK = "\N{NO-BREAK SPACE}"
# Finds the command that a line ends with, such as `kvasir grade …`. Text after `kvasir: ` is an error, not a command.
_COMMAND = re.compile(r"(?<=[^r]:) (?=kvasir [^;:,]*\Z)")
_FIGURES = re.compile(r"\d[\d,.]*")
_MAX_LINES, _MAX_NAMES = 11, 12  # maximum number of lines below a table, and maximum number of people named in a line

_PLAIN_EVERY_S = 5.0
# Seconds between two predictions, and seconds between two tries while there is no prediction yet.
_EXPECT_EVERY_S, _ASK_EVERY_S = 30.0, 2.0
_PLAIN_PARTS = 4  # without a progress bar, a line is printed at least once per quarter of the jobs

_NEAR: dict[str, str | int | None] = {
    **{"–": "-", "—": "-", "−": "-", "→": "->", "·": ".", "•": "*", "…": "...", "≥": ">=", "≤": "<=", "×": "x"},
    **dict.fromkeys("‘’“”", "'"),
}


class TerminalProgress:
    """Shows progress: a bar with counts and time left if stderr is a terminal, else a plain line now and then."""

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._last_line = 0.0
        self._last_shown = -1
        self._last_part = 0
        self._expectation: Callable[[], str] = lambda: ""
        self._expected = ""
        self._ask_again = float("inf") if quiet and not log.isEnabledFor(logging.INFO) else 0.0
        self._said_sentences: set[str] = set()

    def __enter__(self) -> "TerminalProgress":
        if stderr.is_terminal and not stderr.is_dumb_terminal and not self._quiet:
            self._bar = Progress(
                # the numbers beside the bar take up to 72 columns, and the bar gets the rest
                BarColumn(bar_width=max(10, min(40, stderr.width - 72))),
                TextColumn("{task.fields[figures]}"),
                console=stderr,
                transient=True,
            )
            self._task = self._bar.add_task("", total=None, figures="starting")
            self._bar.start()
        return self

    def __exit__(self, *_exc: object) -> None:
        if self._bar:
            self._bar.stop()

    def update(self, counts: Counts) -> None:
        """New figures."""
        words = self._words(counts)
        if self._bar and self._task is not None:
            # The bar is refreshed at once, because all jobs of a quick class can end between two frames of it.
            self._bar.update(
                self._task,
                total=counts.total,
                completed=counts.finished_jobs,
                figures=words,
                refresh=True,
            )
        elif not self._quiet and self._due(counts):
            stderr.print(words, highlight=False)

    def expect(self, expectation: Callable[[], str]) -> None:
        """Set the function that predicts how long it will take: in a few words, or "" if unknown."""
        self._expectation = expectation

    def say(self, sentence: str) -> None:
        """Show a sentence at once. The same sentence is shown only once."""
        if sentence not in self._said_sentences:
            self._said_sentences.add(sentence)
            say(sentence, stderr)

    def _due(self, counts: Counts) -> bool:
        if counts.finished_jobs == self._last_shown:
            return False
        now = time.monotonic()
        part = _PLAIN_PARTS * counts.finished_jobs // max(1, counts.total)
        if part == self._last_part and now - self._last_line < _PLAIN_EVERY_S:
            return False
        self._last_line, self._last_shown, self._last_part = now, counts.finished_jobs, part
        return True

    def _words(self, counts: Counts) -> str:
        """Return the counts and how long it will take. The prediction takes a second, so it is made rarely."""
        if counts.open and time.monotonic() > self._ask_again:
            self._expected = self._expectation()
            self._ask_again = time.monotonic() + (_EXPECT_EVERY_S if self._expected else _ASK_EVERY_S)
            if self._expected:
                log.info("%s%s", EXPECTED, self._expected)
        return f"{_figures(counts)}, {self._expected}" if counts.open and self._expected else _figures(counts)


def _figures(counts: Counts) -> str:
    """Format counts: `12/29 jobs, 41%, 1 not sent`. The percentage is rounded down, so 100% means all."""
    parts = [
        (counts.failed - counts.unreadable, "failed"),
        (counts.unreadable, "not sent"),  # or unassigned
        (counts.cancelled, "cancelled"),
        (counts.expired, "expired"),
    ]
    problem_counts = "".join(f", {number:,} {word}" for number, word in parts if number)
    percent = 100 * counts.finished_jobs // counts.total if counts.total else 100
    return f"{counts.finished_jobs:,}/{plural(counts.total, 'job')}, {percent}%{problem_counts}"


def say(sentence: str, console: Console = stdout) -> None:
    """Print a sentence literally, without markup. In a terminal, lines are wrapped between words."""
    lines = sentence.split("\n")
    if console.is_terminal:
        lines = [part for line in lines for part in wrap(line, console.width)]
    console.print(Text("\n".join(lines).replace(_WHOLE_BLANK, " ")), soft_wrap=True)


def wrap(line: str, width: int) -> Iterator[str]:
    """Wrap a line. A command at its end is never broken, so that people can copy it."""
    text = line.lstrip(" ")
    indent = " " * (len(line) - len(text))
    before, *command = _COMMAND.split(text, maxsplit=1)
    words = [*before.split(" "), *command]
    part = words[0]
    for word in words[1:]:
        if cell_len(f"{indent}{part} {word}") > width:
            yield indent + part
            part = word
        else:
            part = f"{part} {word}"
    yield indent + part


def print_groups(sayings: Iterable[tuple[str, str, str]], where_all: str = "--json has all") -> None:
    """Print remarks, each given as heading, name and text. Each text is printed once, with all its names.

    Texts that differ only in numbers are joined. There is room for a dozen lines; the most frequent text comes first.
    """
    # groups[heading][text without numbers][name] is the whole text.
    groups: dict[str, dict[str, dict[str, str]]] = {}
    for heading, name, text in sayings:
        groups.setdefault(heading, {}).setdefault(_FIGURES.sub("…", text), {})[name] = text
    lines: list[str] = []
    for heading, kinds in groups.items():
        lines.append(f"{len({name for texts in kinds.values() for name in texts}):,} {heading}:")
        for kind, texts in sorted(kinds.items(), key=lambda kind_texts: -len(kind_texts[1])):
            shown_text = kind if len({*texts.values()}) > 1 else next(iter(texts.values()))
            lines.append(shortened(f"  {shown_text}: ", list(texts)))
    room = _MAX_LINES
    for number, line in enumerate(lines):
        room -= len(list(wrap(line, stdout.width)))
        if room < 0:
            say(f"and {plural(len(lines) - number, 'more line')}: {where_all}")
            break
        say(line)


def shortened(start: str, names: Sequence[str]) -> str:
    """Return `handed in late: Aldertree, Ada; Berg, Bo; and 5 more`, with as many names as fit on two lines.

    Print it with `say`, which does not break lines inside a name.
    """
    line = ""
    for count in range(min(len(names), _MAX_NAMES), 0, -1):
        rest = [f"and {len(names) - count:,} more"] if len(names) > count else []
        line = start + "; ".join([*map(_whole, names[:count]), *rest])
        if len(list(wrap(line, stdout.width))) <= 2:
            break
    return line


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str | Text]], right: Sequence[str] = ()) -> None:
    """Print a table on stdout. `right` names the columns to align right."""
    stdout.print(make_table(columns, rows, right), crop=False)  # a word that is wider than the terminal is not cut


def make_table(
    columns: Sequence[str], rows: Iterable[Sequence[str | Text]], right: Sequence[str] = ()
) -> Table | Group:
    """Make a table to print.

    In a terminal no word is broken; if there is no room for that, each row becomes a paragraph.
    """
    cells = [[Text(cell) if isinstance(cell, str) else cell for cell in row] for row in rows]
    widths: Sequence[int | None] = [None] * len(columns)
    if stdout.is_terminal:
        widths = _widths(columns, cells, (columns[0], *right))
        if not widths and (table := _with_long_names(columns, cells, right)):
            return table
        widths = widths or _widths(columns, cells, right)
        if not widths:
            return Group(*(_paragraph(columns, row) for row in cells))
    return _grid(columns, widths, right, cells)


def _grid(
    columns: Sequence[str],
    widths: Sequence[int | None],
    right: Sequence[str],
    rows: Iterable[Sequence[Text]],
    with_header: bool = True,
) -> Table:
    grid = Table(box=None, header_style="bold", pad_edge=False, show_header=with_header)
    for column, width in zip(columns, widths, strict=True):
        grid.add_column(column, justify="right" if column in right else "left", overflow="fold", width=width)
    for row in rows:
        grid.add_row(*row)
    return grid


def _with_long_names(columns: Sequence[str], rows: Sequence[Sequence[Text]], right: Sequence[str]) -> Group | None:
    """Make a table in which a few long first cells may exceed their column.

    Return None if the other cells need the room.
    """
    widths = [
        max(cell_len(text) for text in (*column.split(), *(row[number].plain for row in rows)))
        for number, column in enumerate(columns)
    ]
    widths[0] = stdout.width - sum(widths[1:]) - _GAP * (len(widths) - 1)
    if widths[0] < cell_len(columns[0]):
        return None
    parts: list[Table | Text] = [_grid(columns, widths, right, ())]
    for fits, group in groupby(rows, key=lambda row: cell_len(row[0].plain) <= widths[0]):
        if fits:
            parts.append(_grid(columns, widths, right, group, with_header=False))
        else:
            parts += [_long_row(row, widths, [column in right for column in columns]) for row in group]
    return Group(*parts)


def _long_row(row: Sequence[Text], widths: Sequence[int], is_right: Sequence[bool]) -> Text:
    """Return a row whose first cell is too long, with the other cells moved right, or below it if there is no room."""
    figures = "".join(
        " " * _GAP + (cell.plain.rjust if right else cell.plain.ljust)(width - cell_len(cell.plain) + len(cell.plain))
        for cell, width, right in zip(row[1:], widths[1:], is_right[1:], strict=True)
    )
    *lines, last = wrap(_whole(row[0].plain), stdout.width)
    squeezed = re.sub(rf" {{{_GAP},}}", " " * _GAP, figures)
    room = stdout.width - cell_len(last)
    lines += [last + squeezed.rjust(room)] if cell_len(squeezed) <= room else [last, " " * widths[0] + figures]
    return Text("\n".join(lines).replace(_WHOLE_BLANK, " "), no_wrap=True, overflow="ignore")


def _whole(name: str) -> str:
    """Protect the blanks in a name, so that `wrap` does not break it.

    A line may still end between the names of a group.
    """
    return name.replace(" ", _WHOLE_BLANK).replace(f";{_WHOLE_BLANK}", "; ")


def _widths(columns: Sequence[str], rows: Sequence[Sequence[Text]], unbroken: Sequence[str]) -> list[int]:
    """Return column widths that break no word, and no cell of the columns `unbroken`; [] if there is no room."""
    widths, missing = [], []
    for number, column in enumerate(columns):
        texts = [row[number].plain for row in rows]
        words = [*column.split(), *(texts if column in unbroken else (word for text in texts for word in text.split()))]
        widths.append(max(map(cell_len, words), default=0))
        missing.append(max(map(cell_len, (column, *texts))) - widths[-1])
    spare = stdout.width - sum(widths) - _GAP * (len(widths) - 1)
    if spare < 0:
        return []
    share = spare // max(1, sum(map(bool, missing)))
    return [width + min(share, more) for width, more in zip(widths, missing, strict=True)]


def _paragraph(columns: Sequence[str], row: Sequence[Text]) -> Text:
    """Return a row as its first cell, with the other cells and their headings below it.

    A heading is never parted from its cell by the end of a line.
    """
    facts = [
        f"{head}:{_WHOLE_BLANK}{cell.plain}" for head, cell in zip(columns[1:], row[1:], strict=True) if cell.plain
    ]
    lines = [row[0].plain, *wrap(f"  {'; '.join(facts)}", stdout.width)]
    return Text("\n".join(lines).replace(_WHOLE_BLANK, " "), no_wrap=True, overflow="ignore")


def say_json(value: Any) -> None:
    """Print JSON on stdout. Characters that the terminal can't show are escaped, so that nothing is lost."""
    click.echo(on_one_line(json.dumps(value, ensure_ascii=not _takes_everything(sys.stdout))))


def confirm(question: str, no_change_message: str) -> bool:
    """Ask before something is deleted. If the answer is n, or there is none, `no_change_message` is printed."""
    try:
        if click.confirm(question, err=True):
            return True
    except click.Abort as abort:
        click.echo(f"\n{no_change_message}", err=True)  # the line break ends the question's line
        if isinstance(abort.__context__, KeyboardInterrupt):
            raise
        return False
    click.echo(no_change_message, err=True)
    return False


def adapt_streams_to_locale() -> None:
    """Let stdout and stderr replace characters that their encoding lacks by similar ones, instead of failing."""
    codecs.register_error("kvasir", _near)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and not _takes_everything(stream):
            stream.reconfigure(errors="kvasir")


def _takes_everything(stream: Any) -> bool:
    encoding = getattr(stream, "encoding", None)
    return not encoding or codecs.lookup(encoding).name.startswith("utf")


def _near(error: UnicodeError) -> tuple[str, int]:
    """Return `-` for a dash, a letter without its accent, or `?` if nothing is similar."""
    assert isinstance(error, UnicodeEncodeError)
    text = error.object[error.start : error.end].translate(str.maketrans(_NEAR))
    letters = (char for char in unicodedata.normalize("NFKD", text) if not unicodedata.combining(char))
    return "".join(char if char.isascii() else "?" for char in letters), error.end
