"""A batch's life on disk: `batch.json`, `submitted.jsonl`, `results.jsonl`, and one owner at a time.

Every job id is in `batch.json` before the first job is published, so that whatever happens afterwards, a rerun knows
what was meant. `submitted.jsonl` gets a job's line after the broker has confirmed it, `results.jsonl` its result.
"""

from __future__ import annotations

import fcntl
import json
import os
import re
import secrets
import time
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from messages.errors import BatchError
from messages.jobs import JobResult, PrefillJob
from producers.files import write_atomically
from producers.journal import Journal, Lines

_VERSION = 1
_KEYS = ("batch_id", "created_at", "secret", "request", "runs", "jobs")  # of batch.json, beside the version


@dataclass(frozen=True, slots=True)
class Entry:
    """One job of the manifest. `name` is the submission's own name: it never leaves this folder."""

    job_id: str
    item_id: str
    model: str
    role: str
    name: str


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
        self._confirmed = {(row["job_id"], row["run"]) for row in self._submitted}
        self.journal = Journal(folder / "results.jsonl")

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

    def run_of(self, job_id: str) -> int:
        """The run that is wanted now, from 1."""
        return self.runs.get(job_id, 1)

    def run_again(self, job_ids: Iterable[str]) -> None:
        """Want one more run of these jobs, on disk on return."""
        for job_id in job_ids:
            self.runs[job_id] = self.run_of(job_id) + 1
        self._save()

    def result(self, job_id: str) -> JobResult | None:
        """What counts for a job now: None while its wanted run has no result and none succeeded before."""
        state = self.journal.state_of(job_id)
        settled = state and (state.state == "succeeded" or self.journal.has(job_id, self.run_of(job_id)))
        return state if settled else None

    def open_jobs(self) -> list[Entry]:
        """Jobs that have no result yet."""
        return [entry for entry in self.entries if self.result(entry.job_id) is None]

    def is_confirmed(self, job_id: str) -> bool:
        """Whether the broker confirmed the wanted run."""
        return (job_id, self.run_of(job_id)) in self._confirmed

    def confirm(self, jobs: Iterable[PrefillJob]) -> None:
        """The broker has these."""
        rows = [{"job_id": job.job_id, "run": job.run} for job in jobs]
        self._submitted.append(rows)
        self._confirmed.update((row["job_id"], row["run"]) for row in rows)

    def counts(self) -> Counts:
        """Jobs by state."""
        states = [result.state for entry in self.entries if (result := self.result(entry.job_id))]
        return Counts(
            len(self.entries), *(states.count(state) for state in ("succeeded", "failed", "cancelled", "expired"))
        )

    def _save(self) -> None:
        manifest = {
            "version": _VERSION,
            "batch_id": self.batch_id,
            "created_at": self.created_at,
            "secret": self.secret.hex(),
            "request": self.request,
            "runs": self.runs,
            "jobs": [asdict(entry) for entry in self.entries],
        }
        write_atomically(self.folder / "batch.json", json.dumps(manifest, indent=1, ensure_ascii=False))


def exists(folder: Path) -> bool:
    """Whether a batch lives in this folder."""
    return (folder / "batch.json").is_file()


def batch_id(folder: Path) -> str:
    """Id of the batch in this folder, whoever owns it. Raises BatchError if there is none that can be read."""
    if not exists(folder):
        raise BatchError(f"{folder} holds no batch; name the folder given to --out")
    return str(_read_manifest(folder)["batch_id"])


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
        return _new_manifest(folder)
    try:
        manifest = json.loads(path.read_text("utf-8"))
        known = manifest["version"] == _VERSION
        if known:
            manifest["secret"] = bytes.fromhex(manifest["secret"])
            manifest["jobs"] = [Entry(**entry) for entry in manifest["jobs"]]
            manifest = {key: manifest[key] for key in _KEYS}
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise BatchError(f"{path} can't be read ({error}); restore it, or use another --out folder") from None
    if not known:
        raise BatchError(f"{path} was written by another version of kvasir; use another --out folder")
    loaded: dict[str, Any] = manifest
    return loaded


def _new_manifest(folder: Path) -> dict[str, Any]:
    slug = re.sub(r"[^a-z0-9]+", "-", folder.name.lower()).strip("-")[:32] or "batch"
    return {
        "batch_id": f"{slug}-{secrets.token_hex(4)}",
        "created_at": time.time(),
        "secret": secrets.token_bytes(16),
        "request": {},
        "runs": {},
        "jobs": [],
    }
