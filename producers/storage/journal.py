"""Append-only files with one JSON object per line. A line is on disk before anything relies on it."""

import fcntl
import io
import itertools
import json
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from typing import Any, BinaryIO, Generic, TypeVar, cast

from messages import checks, codec
from messages.errors import BatchError
from messages.jobs import STATES, JobResult, State
from messages.lines import on_one_line
from producers.storage.private import open_ordinary, open_private
from producers.storage.shapes import row_of

T = TypeVar("T")

MAX_RUN = 1_000_000
_TAIL_BYTES = 64 * 1024
# json.dumps would make a new encoder for each row.
_as_json = json.JSONEncoder(ensure_ascii=False, separators=(",", ":")).encode


class Lines:
    """An append-only file of JSON objects.

    If a crash left an incomplete last line, it is removed when the owner opens the file. Raises BatchError if the file
    can't be opened or repaired.
    """

    def __init__(self, path: Path, is_owner: bool = False) -> None:
        """`is_owner`: this process holds a lock that lets only it write.

        Other processes skip a line that is being written. If they removed an incomplete line, they would remove what
        another process is writing at that moment.
        """
        self.path = path
        if is_owner:
            self._mend()

    def append(self, rows: Iterable[dict[str, Any]]) -> list[int]:
        """Write rows, wait until they are on disk, and return where each begins.

        Raises BatchError, and then the file is as it was before.
        """
        lines = [(on_one_line(_as_json(row)) + "\n").encode() for row in rows]
        if not lines:
            return []
        try:
            with open_private(self.path, "ab") as file:
                size = file.tell()
                try:
                    rest = memoryview(b"".join(lines))
                    while rest:
                        rest = rest[os.write(file.fileno(), rest) :]
                    os.fsync(file.fileno())
                except OSError:
                    # After an error such as a full disk, no incomplete line is allowed to remain.
                    os.ftruncate(file.fileno(), size)
                    raise
        except OSError as error:
            problem = f"can't write {self.path}: {error.strerror}"
            raise BatchError(
                f"{problem}; nothing is lost: fix the problem, then run the command again to resume"
            ) from error
        return list(accumulate(map(len, lines[:-1]), initial=size))

    def read_all(self, make: Callable[[dict[str, Any]], T], kind: str = "line") -> Iterator[tuple[int, T]]:
        """Yield each row as `make` reads it, with its position. Errors call a row `kind`.

        Raises BatchError on a line that is not a JSON object or that `make` rejects.
        """
        start = 0
        with self._open_file("rb") as file:
            whole_lines = itertools.takewhile(lambda line: line.endswith(b"\n"), file)
            for number, line in enumerate(whole_lines, 1):
                yield start, row_of(line, f"{self.path}, line {number}", make, kind)
                start += len(line)

    def read_at(self, start: int, make: Callable[[dict[str, Any]], T], kind: str) -> T:
        """Return the row that begins there, as `make` reads it. Raises as `read_all` does."""
        with self._open_file("rb") as file:
            file.seek(start)
            line = file.readline()
            try:
                return row_of(line, "", make)
            except BatchError:  # lines are counted only for an error, because a journal can be large
                file.seek(0)
                number = file.read(start).count(b"\n") + 1
                return row_of(line, f"{self.path}, line {number}", make, kind)

    @contextmanager
    def _open_file(self, mode: str) -> Iterator[BinaryIO]:
        """Open the file; yield an empty one if it doesn't exist yet. Raises BatchError."""
        try:
            with open_private(self.path, mode) if "+" in mode else open_ordinary(self.path) as file:
                yield cast(BinaryIO, file)
        except FileNotFoundError:
            yield io.BytesIO()
        except OSError as error:
            raise BatchError(f"can't read {self.path}: {error.strerror}") from None

    def _mend(self) -> None:
        with self._open_file("r+b") as file:
            end = file.seek(0, os.SEEK_END)
            whole = _end_of_last_line(file, end)
            if whole < end:
                file.truncate(whole)


@contextmanager
def lock_lines(path: Path, kind: str) -> Iterator[None]:
    """Keep all others from adding to the file within the block, in this process or another. Raises BatchError."""
    try:
        with open_private(path, "ab") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            yield
    except OSError as error:
        raise BatchError(f"can't write {path}: {error.strerror}; the {kind} is not saved") from None


def append_line(path: Path, row: dict[str, Any], kind: str) -> None:
    """Add one row to a file that several processes write. Raises BatchError."""
    with lock_lines(path, kind):
        Lines(path, is_owner=True).append([row])


def _end_of_last_line(file: Any, end: int) -> int:
    """Return the position after a file's last line break. It is searched from the end, since a journal may be large."""
    while end > 0:
        start = max(0, end - _TAIL_BYTES)
        file.seek(start)
        index = file.read(end - start).rfind(b"\n")
        if index >= 0:
            return start + int(index) + 1
        end = start
    return 0


@dataclass(frozen=True, slots=True)
class JournalLine:
    """The part of a result that is kept in memory. The rest is read from the file when it is needed."""

    run: int
    state: State
    start: int  # the position in the file where the line begins


L = TypeVar("L", JournalLine, JobResult)


class Standings(Generic[L]):
    """The line that counts for each job: that of its highest successful run, else of its highest run.

    If a run has several lines, the first one counts.
    """

    def __init__(self) -> None:
        self._current: dict[str, L] = {}
        # job id -> the runs that don't count; most jobs have no such runs
        self._other_runs: dict[str, set[int]] = {}

    def note(self, job_id: str, line: L) -> None:
        """Note another line of a journal."""
        if self.has(job_id, line.run):
            return
        current = self._current.get(job_id)
        is_success = line.state == "succeeded"
        better = current is None or (is_success, line.run) > (current.state == "succeeded", current.run)
        if current:
            self._other_runs.setdefault(job_id, set()).add(current.run if better else line.run)
        if better:
            self._current[job_id] = line

    def line_of(self, job_id: str, run: int = 1) -> L | None:
        """Return the line that counts for this job.

        None while the wanted run has no line and no later run succeeded.
        """
        line = self._current.get(job_id)
        is_replayed = line and line.state == "succeeded" and line.run > run
        return line if is_replayed or self.has(job_id, run) else None

    def has(self, job_id: str, run: int) -> bool:
        """Whether this run has a line."""
        current = self._current.get(job_id)
        return current is not None and (current.run == run or run in self._other_runs.get(job_id, ()))

    def last_run(self, job_id: str) -> int:
        """Return the highest run that has a line; 0: none."""
        current = self._current.get(job_id)
        return max(current.run, *self._other_runs.get(job_id, ()), 0) if current else 0

    def job_ids(self) -> Iterable[str]:
        """Return the ids of jobs that have a line."""
        return self._current


class Journal(Standings[JournalLine]):
    """A batch's results on disk. `on_new` is called for each job that got a line."""

    def __init__(self, path: Path, on_new: Callable[[str], None] = lambda _job_id: None, is_owner: bool = True) -> None:
        super().__init__()
        self._lines = Lines(path, is_owner)
        self._on_new = on_new
        for start, (job_id, run, state) in self._lines.read_all(result_line, "result"):
            self.note(sys.intern(job_id), JournalLine(run, state, start))

    def record(self, results: Iterable[JobResult]) -> list[JobResult]:
        """Append the results that are new, wait until they are on disk, and return them. Duplicates are dropped."""
        new: dict[tuple[str, int], JobResult] = {}
        for result in results:
            if not self.has(result.job_id, result.run):
                new.setdefault((result.job_id, result.run), result)
        fresh = list(new.values())
        starts = self._lines.append(codec.to_dict(result) for result in fresh)
        for result, start in zip(fresh, starts, strict=True):
            self.note(result.job_id, JournalLine(result.run, result.state, start))
            self._on_new(result.job_id)
        return fresh

    def result_of(self, job_id: str, run: int = 1) -> JobResult | None:
        """Return the result of `line_of`, read from the file. Raises BatchError if it can't be read."""
        line = self.line_of(job_id, run)
        return self._lines.read_at(line.start, codec.result_from_dict, "result") if line else None


def run_of(row: dict[str, Any]) -> tuple[str, int]:
    """Return the job and the run of a row. Raises InvalidMessage."""
    job_id, run = row.get("job_id"), row.get("run")
    checks.identifier("job_id", job_id)
    checks.whole("run", run, 1, MAX_RUN)
    return cast(str, job_id), cast(int, run)


def result_line(row: dict[str, Any]) -> tuple[str, int, State]:
    """Return the job, run and state of a line, which is enough to open a journal.

    The rest is checked when it is read.
    """
    job_id, run = run_of(row)
    checks.one_of("state", cast(str, row.get("state")), STATES)
    return job_id, run, cast(State, row["state"])
