"""What people see in a terminal: progress on stderr, results on stdout."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterable, Sequence
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table
from rich.text import Text

from producers.batch import Counts

_PIPED_WIDTH = 160  # a pipe or a file has no width; 80 would break file names

stdout = Console(width=None if sys.stdout.isatty() else _PIPED_WIDTH)
stderr = Console(stderr=True, width=None if sys.stderr.isatty() else _PIPED_WIDTH)

_PLAIN_EVERY_S = 5.0


class TerminalProgress:
    """A bar with counts and time left where stderr is a terminal, else a plain line now and then."""

    def __init__(self, quiet: bool = False) -> None:
        self._quiet = quiet
        self._bar: Progress | None = None
        self._task: TaskID | None = None
        self._last_line = 0.0
        self._last_shown = -1
        self._started = time.monotonic()
        self._done_before: int | None = None
        self._said: set[str] = set()

    def __enter__(self) -> TerminalProgress:
        if stderr.is_terminal and not self._quiet:
            self._bar = Progress(
                TextColumn("{task.description}"),
                BarColumn(),
                TextColumn("{task.completed:.0f}/{task.total:.0f} jobs{task.fields[more]}"),
                TimeRemainingColumn(),
                console=stderr,
                transient=True,
            )
            self._task = self._bar.add_task("grading", total=None, more="")
            self._bar.start()
        return self

    def __exit__(self, _k: type[BaseException] | None, _e: BaseException | None, _t: TracebackType | None) -> None:
        if self._bar:
            self._bar.stop()

    def update(self, counts: Counts) -> None:
        """New figures."""
        if self._done_before is None:
            self._done_before = counts.done
        if self._bar and self._task is not None:
            self._bar.update(self._task, total=counts.total, completed=counts.done, more=_more(counts))
        elif not self._quiet and self._due(counts):
            stderr.print(f"{counts.done}/{counts.total} jobs{_more(counts)}{self._time_left(counts)}", highlight=False)

    def say(self, sentence: str) -> None:
        """Something to know now; once each."""
        if sentence not in self._said:
            self._said.add(sentence)
            stderr.print(sentence, highlight=False, soft_wrap=True)

    def _due(self, counts: Counts) -> bool:
        if counts.done == self._last_shown:
            return False
        now = time.monotonic()
        if counts.open and now - self._last_line < _PLAIN_EVERY_S:
            return False
        self._last_line, self._last_shown = now, counts.done
        return True

    def _time_left(self, counts: Counts) -> str:
        done = counts.done - (self._done_before or 0)
        if not done or not counts.open:
            return ""
        seconds = (time.monotonic() - self._started) / done * counts.open
        return f", about {duration(seconds)} left"


def _more(counts: Counts) -> str:
    parts = [(counts.failed, "failed"), (counts.cancelled, "cancelled"), (counts.expired, "expired")]
    return "".join(f", {number} {word}" for number, word in parts if number)


def duration(seconds: float) -> str:
    """`42 s`, `7 min`, `3 h 20 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60} min"


def say(sentence: str) -> None:
    """Print a sentence on stdout, as it is: never wrapped, never read as markup."""
    stdout.print(sentence, soft_wrap=True, markup=False, highlight=False)


def table(columns: Sequence[str], rows: Iterable[Sequence[str]], right: Sequence[str] = ()) -> None:
    """Print a table on stdout; `right` names the columns of figures."""
    made = Table(box=None, header_style="bold", pad_edge=False)
    for column in columns:
        made.add_column(column, justify="right" if column in right else "left", overflow="fold")
    for row in rows:
        made.add_row(*(Text(cell) for cell in row))
    stdout.print(made)
