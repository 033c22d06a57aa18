"""Batches as `kvasir top` watches them: from their folders, whoever owns them, reading only what is new."""

from __future__ import annotations

import json
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from messages.errors import BatchError
from producers import batch as batches

# The rate is that of the last minutes: a night's mean says nothing of a worker that has just left.
_RATE_OVER_S = 300.0


@dataclass(frozen=True, slots=True)
class BatchState:
    """How far a batch is. `left_s` is None while nothing is known of its rate."""

    batch_id: str
    total: int
    done: int
    failed: int  # of those done: everything but succeeded
    left_s: float | None

    @property
    def open(self) -> int:
        """Jobs without a result."""
        return self.total - self.done


class BatchWatch:
    """One batch folder, read again and again. Takes no lock and writes nothing."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time) -> None:
        """Raises BatchError if the folder holds no batch that can be read."""
        self._folder = folder
        self._clock = clock
        self._read_up_to = 0
        self._states: dict[str, dict[int, str]] = {}  # job id: run: state
        self._manifest_changed = -1
        self._manifest: dict[str, Any] = {}
        self._seen: deque[tuple[float, int]] = deque()
        self._read_manifest()

    def look(self) -> BatchState:
        """How far it is now. Raises BatchError if the folder has gone."""
        self._read_manifest()
        self._read_results()
        ended = [state for entry in self._manifest["jobs"] if (state := self._state_of(entry.job_id))]
        total, done = len(self._manifest["jobs"]), len(ended)
        failed = sum(state != "succeeded" for state in ended)
        return BatchState(self._manifest["batch_id"], total, done, failed, self._left_s(total, done))

    def _state_of(self, job_id: str) -> str:
        """What counts for a job: a success of any run, else how the wanted run ended; "" while it has not."""
        runs = self._states.get(job_id, {})
        wanted = self._manifest["runs"].get(job_id, 1)
        return "succeeded" if "succeeded" in runs.values() else runs.get(wanted, "")

    def _left_s(self, total: int, done: int) -> float | None:
        now = self._clock()
        if not self._seen:  # the first look: all that is known is when the batch was made
            self._seen.append((self._manifest["created_at"], 0))
        self._seen.append((now, done))
        while len(self._seen) > 2 and self._seen[1][0] < now - _RATE_OVER_S:
            self._seen.popleft()
        since, before = self._seen[0]
        if done <= before or now <= since:
            return 0.0 if done >= total else None
        return (total - done) * (now - since) / (done - before)

    def _read_manifest(self) -> None:
        try:
            changed = (self._folder / "batch.json").stat().st_mtime_ns
        except OSError:
            raise BatchError(f"{self._folder} holds no batch; name the folder given to --out") from None
        if changed != self._manifest_changed:
            self._manifest = batches.manifest_of(self._folder)
            self._manifest_changed = changed

    def _read_results(self) -> None:
        """What was added since the last look; a last line that is still being written waits for the next one."""
        path = self._folder / "results.jsonl"
        if not path.exists():
            return
        with path.open("rb") as file:
            file.seek(self._read_up_to)
            for line in file:
                if not line.endswith(b"\n"):
                    break
                self._read_up_to += len(line)
                row = json.loads(line)
                self._states.setdefault(row["job_id"], {}).setdefault(row["run"], row["state"])


def find_batches(folders: tuple[Path, ...]) -> list[BatchWatch]:
    """The batches in these folders; without any, those that live in `results/`. Raises BatchError."""
    found = sorted(path.parent for path in Path("results").glob("*/batch.json"))
    return [BatchWatch(folder) for folder in folders or found]
