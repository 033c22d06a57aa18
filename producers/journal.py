"""Files that only grow: one JSON object a line, on disk before anybody relies on it."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from messages import codec
from messages.errors import BatchError, InvalidMessage
from messages.jobs import JobResult


class Lines:
    """An append-only file of JSON objects. A last line torn by a crash is cut off when the file is opened."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._mend()

    def append(self, rows: Iterable[dict[str, Any]]) -> None:
        """Write rows and wait until they are on disk. Raises BatchError, with the file as it was before."""
        data = "".join(json.dumps(row, ensure_ascii=False, separators=(",", ":")) + "\n" for row in rows).encode()
        if not data:
            return
        try:
            with self.path.open("ab") as file:
                size = file.tell()
                self._write(file.fileno(), data, size)
        except OSError as error:
            why = f"can't write {self.path}: {error.strerror}"
            raise BatchError(f"{why}; nothing is lost: mend that, and run again to resume") from error

    def __iter__(self) -> Iterator[dict[str, Any]]:
        """All rows so far. Raises BatchError on a line that is not a JSON object."""
        if not self.path.exists():
            return
        with self.path.open("rb") as file:
            for number, line in enumerate(file, 1):
                yield self._parse(line, number)

    def _parse(self, line: bytes, number: int) -> dict[str, Any]:
        try:
            row = json.loads(line)
        except ValueError as error:
            raise BatchError(f"{self.path}, line {number}: not JSON ({error}); remove the line to go on") from None
        if not isinstance(row, dict):
            raise BatchError(f"{self.path}, line {number}: not a JSON object; remove the line to go on")
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
            data = file.read()
            whole = data.rfind(b"\n") + 1
            if whole < len(data):
                file.truncate(whole)


class Journal:
    """A batch's results: the first line of each (job_id, run) counts.

    A job's state is its `succeeded` line if it has one, else the line of its highest run.
    """

    def __init__(self, path: Path) -> None:
        self._lines = Lines(path)
        self._seen: set[tuple[str, int]] = set()
        self._current: dict[str, JobResult] = {}
        for row in self._lines:
            self._count(_result(row, path))

    def record(self, results: Iterable[JobResult]) -> list[JobResult]:
        """Append those that are new, on disk on return; returns them. Duplicates are dropped."""
        new = {(result.job_id, result.run): result for result in reversed(list(results))}
        fresh = [result for key, result in reversed(new.items()) if key not in self._seen]
        self._lines.append(codec.to_dict(result) for result in fresh)
        for result in fresh:
            self._count(result)
        return fresh

    def state_of(self, job_id: str) -> JobResult | None:
        """The result that counts for this job, or None."""
        return self._current.get(job_id)

    def has(self, job_id: str, run: int) -> bool:
        """Whether this run has its line."""
        return (job_id, run) in self._seen

    def __len__(self) -> int:
        return len(self._seen)

    def _count(self, result: JobResult) -> None:
        if (result.job_id, result.run) in self._seen:
            return
        self._seen.add((result.job_id, result.run))
        known = self._current.get(result.job_id)
        if known is None or (known.state != "succeeded" and (result.state == "succeeded" or result.run > known.run)):
            self._current[result.job_id] = result


def _result(row: dict[str, Any], path: Path) -> JobResult:
    try:
        return codec.result_from_dict(row)
    except InvalidMessage as error:
        raise BatchError(f"{path}: a line is no result of ours: {error}") from None
