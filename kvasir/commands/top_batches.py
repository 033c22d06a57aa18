"""Batches as `kvasir top` watches them: from their folders, whoever owns them, reading only what is new."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from desk.tail import LineTail
from messages.errors import BatchError
from producers.batch import batch as batches
from producers.storage.journal import JournalLine, Standings, result_line


@dataclass(frozen=True, slots=True)
class BatchState:
    """How far a batch is. `finish_words`: when it will be done, in words; `name` is its folder's."""

    batch_id: str
    total: int
    result_count: int
    failure_count: int  # jobs that are done but did not succeed
    finish_words: str = field(default="", compare=False)
    name: str = field(default="", compare=False)

    @property
    def open(self) -> int:
        """Jobs without a result."""
        return self.total - self.result_count


class BatchWatch:
    """One batch folder, read again and again. Takes no lock and writes nothing."""

    def __init__(self, folder: Path) -> None:
        """Raises BatchError if the folder holds no batch that can be read."""
        self.folder = folder
        self._tail = LineTail(folder / "results.jsonl", make=result_line)
        self._standings: Standings[JournalLine] = Standings()
        self._manifest_changed = -1
        self._manifest: dict[str, Any] = {}
        self._read_manifest()

    def look(self) -> BatchState:
        """How far it is now. Raises BatchError if the folder has gone."""
        self._read_manifest()
        rows, was_replaced = self._tail.read()  # rows added since the last look
        if was_replaced:
            self._standings = Standings()
        for job_id, run, state in rows:
            self._standings.note(job_id, JournalLine(run, state, 0))
        jobs, runs = self._manifest["jobs"], self._manifest["runs"]
        lines = [self._standings.line_of(entry.job_id, runs.get(entry.job_id, 1)) for entry in jobs]
        total, result_count = len(lines), sum(line is not None for line in lines)
        failure_count = sum(line is not None and line.state != "succeeded" for line in lines)
        return BatchState(
            self._manifest["batch_id"],
            total,
            result_count,
            failure_count,
            name=self.folder.name,
        )

    def _read_manifest(self) -> None:
        try:
            modified_ns = (self.folder / "batch.json").stat().st_mtime_ns
        except OSError:
            raise BatchError(f"{self.folder} holds no batch; name the folder given to --out") from None
        if modified_ns != self._manifest_changed:
            self._manifest = batches.manifest_of(self.folder)
            self._manifest_changed = modified_ns


def find_batches(folders: tuple[Path, ...], current_watches: Iterable[BatchWatch] = ()) -> list[BatchWatch]:
    """The batches in these folders; without any, those that live in `results/`, the grading desk's too.

    Those that are watched already stay what they are. Raises BatchError.
    """
    watches = {watch.folder: watch for watch in current_watches}
    return [watches.get(folder) or BatchWatch(folder) for folder in folders or batch_folders()]


def batch_folders() -> list[Path]:
    """Those that live in `results/`, the grading desk's too."""
    return [path.parent for place in ("*", "desk/*") for path in sorted(Path("results").glob(f"{place}/batch.json"))]
