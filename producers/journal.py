"""Files that only grow: one JSON object a line, on disk before anybody relies on it."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, cast

from messages import checks, codec
from messages.errors import BatchError, InvalidMessage
from messages.jobs import STATES, JobResult, State

_TAIL_BYTES = 64 * 1024
_as_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode  # json.dumps makes one for each row


class Lines:
    """An append-only file of JSON objects. A last line torn by a crash is cut off when the file is opened."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._mend()

    def append(self, rows: Iterable[dict[str, Any]]) -> list[int]:
        """Write rows and wait until they are on disk; returns where each begins.

        Raises BatchError, with the file as it was before.
        """
        lines = [(_as_json(row) + "\n").encode() for row in rows]
        if not lines:
            return []
        try:
            with self.path.open("ab") as file:
                size = file.tell()
                self._write(file.fileno(), b"".join(lines), size)
        except OSError as error:
            why = f"can't write {self.path}: {error.strerror}"
            raise BatchError(f"{why}; nothing is lost: mend that, and run again to resume") from error
        return list(accumulate(map(len, lines[:-1]), initial=size))

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """All rows so far. Raises BatchError on a line that is not a JSON object."""
        for _, row in self.numbered():
            yield row

    def numbered(self) -> Iterator[tuple[int, dict[str, Any]]]:
        """All rows so far, each with where it begins. Raises as iterating."""
        if not self.path.exists():
            return
        start = 0
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                yield start, self._parse(line, number)
                start += len(line)

    def at(self, start: int) -> dict[str, Any]:
        """The row that begins there. Raises BatchError if it can't be read any more."""
        try:
            with self.path.open("rb") as file:
                file.seek(start)
                return self._parse(file.readline(), 0)
        except OSError as error:
            raise BatchError(f"can't read {self.path}: {error.strerror}") from error

    def _parse(self, line: bytes, number: int) -> dict[str, Any]:
        where = f"{self.path}, line {number}" if number else f"{self.path}, which was changed meanwhile"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise BatchError(f"{where}: not JSON ({error}); remove the line to go on") from None
        if not isinstance(row, dict):
            raise BatchError(f"{where}: not a JSON object; remove the line to go on")
        return row

    @staticmethod
    def _write(descriptor: int, data: bytes, size_before: int) -> None:
        try:
            view = memoryview(data)
            while view:
                view = view[os.write(descriptor, view) :]
            os.fsync(descriptor)
        except OSError:
            os.ftruncate(descriptor, size_before)  # a full disk must not leave half a line
            raise

    def _mend(self) -> None:
        if not self.path.exists():
            return
        with self.path.open("r+b") as file:
            end = file.seek(0, os.SEEK_END)
            whole = _end_of_last_line(file, end)
            if whole < end:
                file.truncate(whole)


def _end_of_last_line(file: Any, end: int) -> int:
    """Where the last line break of a file ends: found from its end, since a journal may be large."""
    while end > 0:
        start = max(0, end - _TAIL_BYTES)
        file.seek(start)
        found = file.read(end - start).rfind(b"\n")
        if found >= 0:
            return start + int(found) + 1
        end = start
    return 0


@dataclass(frozen=True, slots=True)
class Line:
    """What is kept in memory of a result: the rest is read from the file when it is asked for."""

    run: int
    state: State
    start: int  # where its line begins


class Journal:
    """A batch's results: the first line of each (job_id, run) counts.

    A job's state is its `succeeded` line if it has one, else the line of its highest run. `on_new` is told of each
    line that counts, also of those that are found in the file.
    """

    def __init__(self, path: Path, on_new: Callable[[str], None] = lambda _job_id: None) -> None:
        self._lines = Lines(path)
        self._on_new = on_new
        self._current: dict[str, Line] = {}
        self._others: dict[str, set[int]] = {}  # runs beside the one that counts; most jobs have none
        self._count = 0
        for start, row in self._lines.numbered():
            job_id, run, state = _identity(row, path)
            self._note(sys.intern(job_id), Line(run, state, start))

    def record(self, results: Iterable[JobResult]) -> list[JobResult]:
        """Append those that are new, on disk on return; returns them. Duplicates are dropped."""
        new = {(result.job_id, result.run): result for result in reversed(list(results))}
        fresh = [result for key, result in reversed(new.items()) if not self.has(*key)]
        starts = self._lines.append(codec.to_dict(result) for result in fresh)
        for result, start in zip(fresh, starts, strict=True):
            self._note(result.job_id, Line(result.run, result.state, start))
        return fresh

    def state_of(self, job_id: str) -> JobResult | None:
        """The result that counts for this job, or None."""
        line = self._current.get(job_id)
        return _result(self._lines.at(line.start), self._lines.path) if line else None

    def line_of(self, job_id: str) -> Line | None:
        """The same without its text, which costs nothing."""
        return self._current.get(job_id)

    def has(self, job_id: str, run: int) -> bool:
        """Whether this run has its line."""
        known = self._current.get(job_id)
        return known is not None and (known.run == run or run in self._others.get(job_id, ()))

    def last_run(self, job_id: str) -> int:
        """The highest run that has a line; 0: none."""
        known = self._current.get(job_id)
        return max(known.run, *self._others.get(job_id, ()), 0) if known else 0

    def __len__(self) -> int:
        return self._count

    def _note(self, job_id: str, line: Line) -> None:
        if self.has(job_id, line.run):
            return
        self._count += 1
        known = self._current.get(job_id)
        better = known is None or (known.state != "succeeded" and (line.state == "succeeded" or line.run > known.run))
        if known:
            self._others.setdefault(job_id, set()).add(known.run if better else line.run)
        if better:
            self._current[job_id] = line
        self._on_new(job_id)


def _identity(row: dict[str, Any], path: Path) -> tuple[str, int, State]:
    """What opening a journal needs of a line. The rest is checked when it is asked for: a night's results are many."""
    job_id, run, state = row.get("job_id"), row.get("run"), row.get("state")
    try:
        checks.identifier("job_id", job_id)
        checks.whole("run", run, 1, 1_000_000)
        checks.one_of("state", cast(str, state), STATES)
    except InvalidMessage as error:
        raise BatchError(f"{path}: a line is no result of ours: {error}") from None
    return cast(str, job_id), cast(int, run), cast(State, state)


def _result(row: dict[str, Any], path: Path) -> JobResult:
    try:
        return codec.result_from_dict(row)
    except InvalidMessage as error:
        raise BatchError(f"{path}: a line is no result of ours: {error}") from None
