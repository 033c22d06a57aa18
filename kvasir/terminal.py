"""What people see in a terminal: progress on stderr, results on stdout."""

from __future__ import annotations

import codecs
import io
import json
import sys
import time
import unicodedata
from collections.abc import Iterable, Sequence
from types import TracebackType
from typing import Any

import click
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from messages.lines import on_one_line
from producers.batch.batch import Counts
from producers.words import plural

_PIPED_WIDTH = 160  # a pipe or a file has no width; 80 would break file names

# A stream is None where its descriptor is closed, as under some supervisors; to import us must not fail there.
stdout = Console(width=None if sys.stdout and sys.stdout.isatty() else _PIPED_WIDTH)
stderr = Console(stderr=True, width=None if sys.stderr and sys.stderr.isatty() else _PIPED_WIDTH)

_PLAIN_EVERY_S = 5.0
_PLAIN_PARTS = 4  # a line for each quarter, where a class takes less than that

_NEAR: dict[str, str | int | None] = {
    **{"–": "-", "—": "-", "−": "-", "→": "->", "·": ".", "•": "*", "…": "...", "≥": ">=", "≤": "<=", "×": "x"},
    **dict.fromkeys("‘’“”", "'"),
}


class TerminalProgress:
    """A bar with counts and time left where stderr is a terminal, else a plain line now and then."""

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._last_line = 0.0
        self._last_shown = -1
        self._last_part = 0
        self._start_s = time.monotonic()
        self._finished_before: int | None = None
        self._said_sentences: set[str] = set()

    def __enter__(self) -> TerminalProgress:
        if stderr.is_terminal and not stderr.is_dumb_terminal and not self._quiet:
            self._bar = Progress(
                BarColumn(bar_width=max(10, min(40, stderr.width - 55))),  # the figures beside it come first
                TextColumn("{task.fields[figures]}"),
                TimeRemainingColumn(),
                console=stderr,
                transient=True,
            )
            self._task = self._bar.add_task("", total=None, figures="starting")
            self._bar.start()
        return self

    def __exit__(self, _k: type[BaseException] | None, _e: BaseException | None, _t: TracebackType | None) -> None:
        if self._bar:
            self._bar.stop()

    def update(self, counts: Counts) -> None:
        """New figures."""
        if self._finished_before is None:
            self._finished_before = counts.finished_jobs
        if self._bar and self._task is not None:
            # Drawn now: the jobs of a quick class may all end between two of the bar's own frames.
            self._bar.update(
                self._task, total=counts.total, completed=counts.finished_jobs, figures=_figures(counts), refresh=True
            )
        elif not self._quiet and self._due(counts):
            stderr.print(f"{_figures(counts)}{self._time_left(counts)}", highlight=False)

    def say(self, sentence: str) -> None:
        """Something to know now; once each."""
        if sentence not in self._said_sentences:
            self._said_sentences.add(sentence)
            stderr.print(sentence, highlight=False, soft_wrap=True, markup=False)

    def _due(self, counts: Counts) -> bool:
        if counts.finished_jobs == self._last_shown:
            return False
        now = time.monotonic()
        part = _PLAIN_PARTS * counts.finished_jobs // max(1, counts.total)
        if part == self._last_part and now - self._last_line < _PLAIN_EVERY_S:
            return False
        self._last_line, self._last_shown, self._last_part = now, counts.finished_jobs, part
        return True

    def _time_left(self, counts: Counts) -> str:
        newly_finished = counts.finished_jobs - (self._finished_before or 0)
        if not newly_finished or not counts.open:
            return ""
        seconds = (time.monotonic() - self._start_s) / newly_finished * counts.open
        return f", about {duration(seconds)} left"


def _figures(counts: Counts) -> str:
    """`12/29 jobs, 41%, 1 unreadable`; rounded down, so that only all of them are 100%."""
    parts = [
        (counts.failed - counts.unreadable, "failed"),
        (counts.unreadable, "unreadable"),
        (counts.cancelled, "cancelled"),
        (counts.expired, "expired"),
    ]
    problem_counts = "".join(f", {number:,} {word}" for number, word in parts if number)
    percent = 100 * counts.finished_jobs // counts.total if counts.total else 100
    return f"{counts.finished_jobs:,}/{plural(counts.total, 'job')}, {percent}%{problem_counts}"


def duration(seconds: float) -> str:
    """`42 s`, `7 min`, `3 h 20 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


def say(sentence: str) -> None:
    """Print a sentence on stdout, as it is: never wrapped, never read as markup."""
    stdout.print(sentence, soft_wrap=True, markup=False, highlight=False)


def print_table(columns: Sequence[str], rows: Iterable[Sequence[str | Text]], right: Sequence[str] = ()) -> None:
    """Print a table on stdout; `right` names the columns of figures."""
    stdout.print(make_table(columns, rows, right))


def make_table(columns: Sequence[str], rows: Iterable[Sequence[str | Text]], right: Sequence[str] = ()) -> Table:
    """The same, to be printed."""
    grid = Table(box=None, header_style="bold", pad_edge=False)
    for column in columns:
        grid.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        grid.add_row(*(Text(cell) if isinstance(cell, str) else cell for cell in row))
    return grid


def say_json(value: Any) -> None:
    """Print JSON on stdout; what the terminal can't show as escapes, so that nothing is lost."""
    click.echo(on_one_line(json.dumps(value, ensure_ascii=not _takes_everything(sys.stdout))))


def confirm(question: str, no_change_message: str) -> bool:
    """Ask before something is deleted. Answered n, or by nobody, it says `no_change_message`."""
    try:
        if click.confirm(question, err=True):
            return True
    except click.Abort as abort:
        click.echo(f"\n{no_change_message}", err=True)  # the question's line has no end yet
        if isinstance(abort.__context__, KeyboardInterrupt):
            raise
        return False
    click.echo(no_change_message, err=True)
    return False


def adapt_streams_to_locale() -> None:
    """Let stdout and stderr write something near for what their encoding lacks, instead of failing."""
    codecs.register_error("kvasir", _near)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper) and not _takes_everything(stream):
            stream.reconfigure(errors="kvasir")


def _takes_everything(stream: Any) -> bool:
    encoding = getattr(stream, "encoding", None)
    return not encoding or codecs.lookup(encoding).name.startswith("utf")


def _near(error: UnicodeError) -> tuple[str, int]:
    """`-` for a dash, a letter without its accent, `?` where nothing is near."""
    assert isinstance(error, UnicodeEncodeError)
    text = error.object[error.start : error.end].translate(str.maketrans(_NEAR))
    letters = (char for char in unicodedata.normalize("NFKD", text) if not unicodedata.combining(char))
    return "".join(char if char.isascii() else "?" for char in letters), error.end
