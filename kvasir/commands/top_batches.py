"""Batches as `kvasir top` watches them: read from their folders, whoever owns them, and only what is new."""

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
    """How far a batch is.

    `name` is its folder's name. `finish_words` says in words when it will be done.
    """

    batch_id: str
    total: int
    result_count: int
    failure_count: int  # jobs that ended without success
    finish_words: str = field(default="", compare=False)
    name: str = field(default="", compare=False)

    @property
    def open(self) -> int:
        """The number of jobs without a result."""
        return self.total - self.result_count


class BatchWatch:
    """Watches one batch folder by reading it repeatedly. It takes no lock and writes nothing."""

    def __init__(self, folder: Path) -> None:
        """Raises BatchError if the folder holds no readable batch."""
        self.folder = folder
        self._tail = LineTail(folder / "results.jsonl", make=result_line)
        self._standings: Standings[JournalLine] = Standings()
        self._manifest_changed = -1
        self._manifest: dict[str, Any] = {}
        self._read_manifest()

    def look(self) -> BatchState:
        """Return how far the batch is now. Raises BatchError if the folder is gone."""
        self._read_manifest()
        rows, was_replaced = self._tail.read()  # rows that were added to the journal since the last call
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
            raise BatchError(f"{self.folder} holds no batch: name the folder that was given to --out") from None
        if modified_ns != self._manifest_changed:
            self._manifest = batches.manifest_of(self.folder)
            self._manifest_changed = modified_ns


def find_batches(folders: tuple[Path, ...], current_watches: Iterable[BatchWatch] = ()) -> list[BatchWatch]:
    """Return watches for the batches in these folders, by default all batches in `results/`, including the desk's.

    Batches that are already watched keep their watch. Raises BatchError.
    """
    watches = {watch.folder: watch for watch in current_watches}
    return [watches.get(folder) or BatchWatch(folder) for folder in folders or batch_folders()]


def batch_folders() -> list[Path]:
    """Return the folders of all batches in `results/`, including the desk's."""
    return [path.parent for place in ("*", "desk/*") for path in sorted(Path("results").glob(f"{place}/batch.json"))]
