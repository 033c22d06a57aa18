"""A batch's life on disk: `batch.json`, `submitted.jsonl`, `results.jsonl`, and one owner at a time.

Every job id is in `batch.json` before the first job is published, so that whatever happens afterwards, a rerun knows
what was meant. `submitted.jsonl` gets a job's line after the broker has confirmed it, `results.jsonl` its result.
"""

from __future__ import annotations

import fcntl
import json
import os
import secrets
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from messages.errors import BatchError
from messages.jobs import STATES, JobResult, PrefillJob, State
from producers.files import write_atomically
from producers.journal import Journal, Lines

_VERSION = 1
_ENTRIES_A_PIECE = 500
_KEYS = ("batch_id", "created_at", "secret", "request", "runs", "jobs")  # of batch.json, beside the version


@dataclass(frozen=True, slots=True)
class Entry:
    """One job of the manifest. `name` is the submission's own name: it never leaves this folder."""

    job_id: str
    item_id: str
    model: str
    role: str
    name: str


_ENTRY_FIELDS = {field.name for field in fields(Entry)}


@dataclass(frozen=True, slots=True)
class Counts:
    """How many jobs of a batch are in each state; they sum to `total`."""

    total: int
    succeeded: int
    failed: int
    cancelled: int
    expired: int

    @property
    def done(self) -> int:
        """Jobs with a result."""
        return self.succeeded + self.failed + self.cancelled + self.expired

    @property
    def open(self) -> int:
        """Jobs without one."""
        return self.total - self.done


class Batch:
    """A batch folder, held by its owner. Use as a context manager: leaving gives the ownership up."""

    def __init__(self, folder: Path) -> None:
        """Open or create a batch. Raises BatchError if another process owns it or the folder can't be used."""
        self.folder = folder
        self._lock = _lock(folder)
        try:
            self._open(folder)
        except BaseException:
            self.close()
            raise

    def _open(self, folder: Path) -> None:
        manifest = _read_manifest(folder)
        self.batch_id: str = manifest["batch_id"]
        self.created_at: float = manifest["created_at"]
        self.secret: bytes = manifest["secret"]
        self.request: dict[str, Any] = manifest["request"]
        self.entries: list[Entry] = manifest["jobs"]
        self.runs: dict[str, int] = manifest["runs"]
        self._submitted = Lines(folder / "submitted.jsonl")
        self._confirmed: dict[str, int] = {}  # job id -> its highest confirmed run
        for row in self._submitted:
            self._note_confirmed(row["job_id"], row["run"])
        self._states: dict[str, State | None] = {}
        self._tally: Counter[State | None] = Counter()
        self._open_entries: dict[str, Entry] = {}
        self.journal = Journal(folder / "results.jsonl", self._look_at)
        self._look_at_all()

    def __enter__(self) -> Batch:
        return self

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Give the ownership up. Idempotent."""
        os.close(self._lock) if self._lock >= 0 else None
        self._lock = -1

    def plan(self, entries: Iterable[Entry], request: dict[str, Any]) -> None:
        """Set what this batch consists of, on disk on return. Jobs known already keep their results."""
        self.entries = list(entries)
        self.request = request
        self._save()
        self._look_at_all()

    def run_of(self, job_id: str) -> int:
        """The run that is wanted now, from 1."""
        return self.runs.get(job_id, 1)

    def run_again(self, job_ids: Iterable[str]) -> None:
        """Want one more run of these jobs, on disk on return."""
        self.want_runs({job_id: self.run_of(job_id) + 1 for job_id in job_ids})

    def want_runs(self, runs: Mapping[str, int]) -> None:
        """Want these runs of these jobs, on disk on return."""
        self.runs.update(runs)
        self._save()
        self._look_at_all()

    def result(self, job_id: str) -> JobResult | None:
        """What counts for a job now: None while its wanted run has no result and none succeeded before."""
        return self.journal.state_of(job_id) if self._state_of(job_id) else None

    def open_jobs(self) -> list[Entry]:
        """Jobs that have no result yet."""
        return list(self._open_entries.values())

    @property
    def is_done(self) -> bool:
        """Whether every job has its result."""
        return not self._open_entries

    def __contains__(self, job_id: str) -> bool:
        """Whether a job is, or was once, one of this batch: planned now, or confirmed under an earlier plan."""
        return job_id in self._states or job_id in self._confirmed

    def is_confirmed(self, job_id: str) -> bool:
        """Whether the broker confirmed the wanted run."""
        return self._confirmed.get(job_id, 0) >= self.run_of(job_id)

    def confirm(self, jobs: Iterable[PrefillJob]) -> None:
        """The broker has these."""
        runs = [(job.job_id, job.run) for job in jobs]
        self._submitted.append({"job_id": job_id, "run": run} for job_id, run in runs)
        for job_id, run in runs:
            self._note_confirmed(job_id, run)

    def counts(self) -> Counts:
        """Jobs by state."""
        return Counts(len(self.entries), *(self._tally[state] for state in STATES))

    def _note_confirmed(self, job_id: str, run: int) -> None:
        self._confirmed[sys.intern(job_id)] = max(run, self._confirmed.get(job_id, 0))

    def _state_of(self, job_id: str) -> State | None:
        line = self.journal.line_of(job_id)
        settled = line and (line.state == "succeeded" or self.journal.has(job_id, self.run_of(job_id)))
        return line.state if line and settled else None

    def _look_at_all(self) -> None:
        self._states = {entry.job_id: self._state_of(entry.job_id) for entry in self.entries}
        self._tally = Counter(self._states.values())
        self._open_entries = {entry.job_id: entry for entry in self.entries if self._states[entry.job_id] is None}

    def _look_at(self, job_id: str) -> None:
        """A line was added: a batch of 50,000 jobs can't be counted anew for each."""
        if job_id not in self._states:
            return
        before, now = self._states[job_id], self._state_of(job_id)
        self._states[job_id] = now
        self._tally[before] -= 1
        self._tally[now] += 1
        if now is not None:
            self._open_entries.pop(job_id, None)

    def _save(self) -> None:
        write_atomically(self.folder / "batch.json", self._manifest())

    def _manifest(self) -> Iterator[str]:
        """In pieces: a large batch is many megabytes."""
        head = {
            "version": _VERSION,
            "batch_id": self.batch_id,
            "created_at": self.created_at,
            "secret": self.secret.hex(),
            "request": self.request,
            "runs": self.runs,
        }
        yield json.dumps(head, indent=1, ensure_ascii=False).removesuffix("\n}") + ',\n "jobs": ['
        comma = "\n"
        for start in range(0, len(self.entries), _ENTRIES_A_PIECE):
            piece = self.entries[start : start + _ENTRIES_A_PIECE]
            yield comma + ",\n".join(json.dumps(asdict(entry), ensure_ascii=False) for entry in piece)
            comma = ",\n"
        yield "\n ]\n}"


def exists(folder: Path) -> bool:
    """Whether a batch lives in this folder."""
    return (folder / "batch.json").is_file()


def batch_id(folder: Path) -> str:
    """Id of the batch in this folder, whoever owns it. Raises BatchError if there is none that can be read."""
    return str(manifest_of(folder)["batch_id"])


def manifest_of(folder: Path) -> dict[str, Any]:
    """What `batch.json` says now, whoever owns the batch; "jobs" are Entries, "secret" is bytes.

    Raises BatchError if there is none that can be read.
    """
    if not exists(folder):
        raise BatchError(f"{folder} holds no batch; name the folder given to --out")
    return _read_manifest(folder)


def is_owned(folder: Path) -> bool:
    """Whether some process owns the batch in this folder now."""
    try:
        os.close(_lock(folder))
    except BatchError:
        return True
    return False


def _lock(folder: Path) -> int:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(folder / "batch.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise BatchError(f"can't use {folder} for results: {error.strerror}; name another folder with --out") from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(descriptor)
        raise BatchError(f"{folder} is in use by another kvasir process; wait for it, or watch its results") from None
    return descriptor


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / "batch.json"
    if not path.exists():
        return _new_manifest()
    try:
        manifest = json.loads(path.read_text("utf-8"), object_hook=_entry_or_dict)
        known = manifest["version"] == _VERSION
        if known:
            manifest["secret"] = bytes.fromhex(manifest["secret"])
            if not all(isinstance(entry, Entry) for entry in manifest["jobs"]):
                raise ValueError("an entry of jobs lacks a field")
            manifest = {key: manifest[key] for key in _KEYS}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise BatchError(f"{path} can't be read ({error}); restore it, or use another --out folder") from None
    if not known:
        raise BatchError(f"{path} was written by another version of kvasir; use another --out folder")
    loaded: dict[str, Any] = manifest
    return loaded


def _entry_or_dict(fields_read: dict[str, Any]) -> Any:
    """An entry as soon as it is read: 50,000 of them as dicts would take several times the memory."""
    if fields_read.keys() != _ENTRY_FIELDS:
        return fields_read
    shared = {name: sys.intern(fields_read[name]) for name in ("model", "role")}
    return Entry(**{**fields_read, **shared, "job_id": sys.intern(fields_read["job_id"])})


def _new_manifest() -> dict[str, Any]:
    return {
        # Not from the folder's name: it is often a student's, and the id travels.
        "batch_id": f"batch-{time.strftime('%Y%m%d')}-{secrets.token_hex(4)}",
        "created_at": time.time(),
        "secret": secrets.token_bytes(16),
        "request": {},
        "runs": {},
        "jobs": [],
    }
