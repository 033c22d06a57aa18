"""A batch on disk: `batch.json`, `submitted.jsonl`, `results.jsonl`, and one owner at a time.

Every job id is in `batch.json` before the first job is published, so a rerun knows what was planned, whatever happens
meanwhile. A job's line is written to `submitted.jsonl` after the broker has confirmed the job, and its result to
`results.jsonl`.
"""

import json
import os
import re
import secrets
import sys
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Literal, cast

from infra.config.next_command import UPGRADE_COMMAND, next_command
from infra.config.ownership import is_foreign
from messages import checks
from messages.errors import BatchError, InvalidMessage
from messages.jobs import MAX_ANSWERS, STATES, JobResult, PrefillJob, State
from producers.batch.forms import NEWEST_FORM, PROMPT_FORM, form_of
from producers.storage.journal import MAX_RUN, Journal, Lines, run_of
from producers.storage.private import make_folder, read_ordinary, take_lock, tighten, write_atomically
from producers.storage.shapes import from_json, parse_as
from producers.words import plural

VERSION = 1
_ENTRIES_A_PIECE = 500
_SECRET_BYTES = 16


@dataclass(frozen=True, slots=True)
class BatchEntry:
    """A job in the manifest. `name` is the submission's own name, which never leaves this folder.

    `asked` has a key for each of the job's questions: its name, the number of answers, and a digest of the prompt, the
    question and its sampling, separated by colons.
    """

    job_id: str
    item_id: str
    model: str
    role: str
    name: str
    asked: tuple[str, ...] = ()


_ENTRY_FIELDS = {field.name for field in fields(BatchEntry)}
_KEY = re.compile(r"\.?[A-Za-z][A-Za-z0-9_-]{0,39}:[1-9]\d?:[0-9a-f]{12}\Z")
_SETTINGS = {"name": str, "context": int, "temperature": float, "top_p": float, "letters_per_token": float}
# The options of `kvasir grade`, as batch.json keeps them. Of the options of `kvasir run`, it keeps only `prompts` and
# `objects`.
_REQUEST = {
    **dict.fromkeys(("folder", "rubric", "solution", "template", "examples", "prompts", "title", "out"), str),
    "models": Mapping[str, str],
    # Digests of files. `inputs` maps each kind of input to the digest of its copy in this folder. `submissions` maps
    # each submission's name to the digest of the original file.
    **dict.fromkeys(("inputs", "submissions"), Mapping[str, str]),
    "settings": {"code": _SETTINGS, "feedback": _SETTINGS},
    "only": tuple[str, ...],
    "limit": int,
    "max_submission_tokens": int,
    "samples": int,
    "ask": str,
    "objects": Literal["closed", "open"],  # how the schemas in prompt lines are read; see messages.strict_schema
}
# The keys of batch.json, except for the version, and their types. A missing key is read as null, so a new key needs a
# type such as `int | None`.
_SHAPE: dict[str, Any] = {
    "batch_id": str,
    "created_at": float,
    "secret": str,
    "prompt_form": int,
    "request": _REQUEST,
    "runs": Mapping[str, int],
    "jobs": list[BatchEntry],
}


@dataclass(frozen=True, slots=True)
class Counts:
    """How many jobs of a batch are in each state. The numbers add up to `total`."""

    total: int
    succeeded: int
    failed: int
    cancelled: int
    expired: int
    unreadable: int = 0  # how many jobs failed because their submission could not be read

    @property
    def finished_jobs(self) -> int:
        """The number of jobs with a result."""
        return self.succeeded + self.failed + self.cancelled + self.expired

    @property
    def open(self) -> int:
        """The number of jobs without a result."""
        return self.total - self.finished_jobs


class Batch(AbstractContextManager["Batch"]):
    """A batch folder, held by its owner. It is a context manager: leaving it releases the ownership."""

    def __init__(self, folder: Path, is_owner: bool = True) -> None:
        """Open or create a batch. Raises BatchError if another process owns it or the folder can't be used.

        Without ownership, the batch is read as it is now, while its owner may be writing, and nothing is changed.
        """
        self.folder = folder
        self._is_owner = is_owner
        with suppress(OSError):  # the batch's owner may be creating or deleting files
            tighten(folder)
        self._lock = _lock(folder) if is_owner else -1
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
        self.prompt_form: int = manifest["prompt_form"]
        self.request: dict[str, Any] = manifest["request"]
        self.entries: list[BatchEntry] = manifest["jobs"]
        # Maps a job's id to the number of the run that is wanted. If a job has no entry, run 1 is wanted.
        self.runs: dict[str, int] = manifest["runs"]

        # Whether jobs made now would get the ids of the planned jobs. Only then may they be published.
        self.may_publish: bool = self.prompt_form == form_of(self.request)
        self._submitted_lines = Lines(folder / "submitted.jsonl", self._is_owner)
        self.confirmed_runs: dict[str, int] = {}  # job id -> the last run that the broker confirmed
        for _, (job_id, run) in self._submitted_lines.read_all(run_of):
            self.confirmed_runs[sys.intern(job_id)] = max(run, self.confirmed_runs.get(job_id, 0))
        self._passive_ids: set[str] = set()
        self.journal = Journal(folder / "results.jsonl", self._look_at, self._is_owner)
        self._look_at_all()

    def __repr__(self) -> str:
        counts = self.counts()
        return f"<Batch {self.batch_id} in {self.folder}: {counts.finished_jobs} of {plural(counts.total, 'job')} done>"

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the ownership. Idempotent."""
        os.close(self._lock) if self._lock >= 0 else None
        self._lock = -1

    def plan(
        self,
        entries: Iterable[BatchEntry],
        request: dict[str, Any],
        passive_entries: Iterable[BatchEntry] = (),
    ) -> None:
        """Set the jobs of this batch, and write them to disk. Jobs that are known already keep their results.

        `passive_entries` belong to the batch too, but this process does not wait for them, so they are neither open nor
        counted. Raises BatchError if other jobs were planned in an older form: a person should first see what changes.
        """
        passives = list(passive_entries)
        planned_entries = [*passives, *entries]
        if self.entries and not self.may_publish and _work_of(planned_entries) != _work_of(self.entries):
            problem = f"{self.folder} was planned in an older form, and its input has changed since"
            raise BatchError(f"{problem}; to see what would change, run: {next_command('migrate', self.folder)}")
        self.entries = planned_entries
        self._passive_ids = {entry.job_id for entry in passives}
        self.request = request
        self.prompt_form, self.may_publish = form_of(request), True
        self._save()

    def check_may_publish(self) -> None:
        """Raise BatchError, with what to do instead, if the batch may not publish."""
        if not self.may_publish:
            raise BatchError(other_form(self.folder, self.prompt_form))

    @property
    def go_on_command(self) -> str:
        """The command that goes on with the batch; one of prompts takes the options that it had."""
        source = self.request.get("prompts")
        return next_command("run", source, "--out", self.folder) if source else next_command("watch", self.folder)

    @property
    def may_plan(self) -> bool:
        """Whether its jobs may be planned now.

        They may if the batch has our form, or an older one and none of its jobs has been sent.
        """
        if self.may_publish or self.prompt_form > NEWEST_FORM:
            return self.may_publish
        is_answered = any(self.states[entry.job_id] for entry in self.entries if entry.role != "intake")
        return not (is_answered or self.confirmed_runs)

    def drop_plan(self) -> None:
        """Forget the planned jobs, none of which has been sent, and write that to disk."""
        self.may_publish = True
        self.plan([], self.request)

    def run_again(self, job_ids: Iterable[str]) -> None:
        """Request one more run of these jobs, and write that to disk."""
        self.want_runs({job_id: self.runs.get(job_id, 1) + 1 for job_id in job_ids})

    def want_runs(self, runs: Mapping[str, int]) -> None:
        """Request these runs of these jobs, and write that to disk."""
        self.runs.update(runs)
        self._save()

    def result(self, job_id: str) -> JobResult | None:
        """Return the result that counts for a job now; None while the wanted run has none."""
        return self.journal.result_of(job_id, self.runs.get(job_id, 1))

    @property
    def succeeded_ids(self) -> set[str]:
        """The ids of the jobs that have succeeded."""
        return {job_id for job_id, state in self.states.items() if state == "succeeded"}

    def jobs_to_retry(self, names: Set[str] = frozenset(), runnable_ids: Set[str] | None = None) -> list[str]:
        """Return the ids of jobs that did not succeed; with `names`, of all jobs of these submissions with a result.

        Input that could not be read has no job, and needs another file instead of another run. `runnable_ids` are the
        jobs that can still be made from the input; None: all of them.
        """
        job_ids = []
        for entry in self.entries:
            result = self.result(entry.job_id)
            if (
                entry.role == "intake"
                or result is None
                or (runnable_ids is not None and entry.job_id not in runnable_ids)
            ):
                continue
            if entry.name in names or (not names and result.state != "succeeded"):
                job_ids.append(entry.job_id)
        return job_ids

    def __contains__(self, job_id: str) -> bool:
        """Whether a job is planned now, or was confirmed under an earlier plan."""
        return job_id in self.states or job_id in self.confirmed_runs

    def every_job(self) -> set[str]:
        """Return the ids of all jobs that it has now or had under earlier plans."""
        return {*self.states, *self.confirmed_runs, *self.journal.job_ids()}

    def is_confirmed(self, job_id: str) -> bool:
        """Whether the broker confirmed the wanted run."""
        return self.confirmed_runs.get(job_id, 0) >= self.runs.get(job_id, 1)

    def copy(self, place: Path) -> None:
        """Create a batch with the same id in the folder `place`, with the jobs that ask questions, and their answers.

        Jobs without an answer get another run.
        """
        asking = [entry for entry in self.entries if entry.asked]
        write_atomically(place / "batch.json", self._manifest({}, asking, form_of({})))
        with Batch(place) as copied_batch:
            answered_ids = [entry.job_id for entry in asking if self.states[entry.job_id] == "succeeded"]
            copied_batch.journal.record(result for job_id in answered_ids if (result := self.result(job_id)))
            copied_batch.run_again(job_id for job_id in copied_batch.open_jobs if self.states[job_id])

    def note_confirmed(self, jobs: Iterable[PrefillJob]) -> None:
        """Note that the broker has these jobs."""
        runs = [(job.job_id, job.run) for job in jobs]
        self._submitted_lines.append({"job_id": job_id, "run": run} for job_id, run in runs)
        for job_id, run in runs:
            self.confirmed_runs[sys.intern(job_id)] = max(run, self.confirmed_runs.get(job_id, 0))

    def counts(self) -> Counts:
        """Return how many jobs are in each state."""
        unreadable = sum(self.states[job_id] == "failed" for job_id in self._intake)
        by_state = {state: self._tally[state] for state in STATES}
        return Counts(self._tally.total(), **by_state, unreadable=unreadable)

    def _look_at_all(self) -> None:
        counted_entries = [entry for entry in self.entries if entry.job_id not in self._passive_ids]
        self._intake = [entry.job_id for entry in counted_entries if entry.role == "intake"]
        # How each planned job ended; None if the job has not ended.
        self.states: dict[str, State | None] = {entry.job_id: None for entry in self.entries}
        # `open_jobs` contains only jobs that this process waits for.
        self.open_jobs = {entry.job_id: entry for entry in counted_entries}
        self._tally: Counter[State | None] = Counter({None: len(self.open_jobs)})
        for job_id in self.states:
            self._look_at(job_id)

    def _look_at(self, job_id: str) -> None:
        """Update the counts after a line was added. A batch of 50,000 jobs can't be counted again for each line."""
        line = self.journal.line_of(job_id, self.runs.get(job_id, 1))
        if line is None or job_id not in self.states:
            return
        if job_id not in self._passive_ids:
            self._tally[self.states[job_id]] -= 1
            self._tally[line.state] += 1
            self.open_jobs.pop(job_id, None)
        self.states[job_id] = line.state

    def _save(self) -> None:
        write_atomically(self.folder / "batch.json", self._manifest(self.request, self.entries, self.prompt_form))
        self._look_at_all()

    def _manifest(self, request: Mapping[str, Any], entries: Sequence[BatchEntry], form: int) -> Iterator[str]:
        """Yield the manifest in pieces, because that of a large batch has many megabytes."""
        head = {
            "version": VERSION,
            "batch_id": self.batch_id,
            "created_at": self.created_at,
            "secret": self.secret.hex(),
            "prompt_form": form,
            "request": request,
            "runs": self.runs,
        }
        yield json.dumps(head, indent=1, ensure_ascii=False).removesuffix("\n}") + ',\n "jobs": ['
        comma = "\n"
        for start in range(0, len(entries), _ENTRIES_A_PIECE):
            piece = entries[start : start + _ENTRIES_A_PIECE]
            yield comma + ",\n".join(json.dumps(_entry_json(entry), ensure_ascii=False) for entry in piece)
            comma = ",\n"
        yield "\n ]\n}"


def _entry_json(entry: BatchEntry) -> dict[str, Any]:
    """Return an entry as JSON fields, without `asked` if the job asks no questions."""
    entry_fields = asdict(entry)
    return entry_fields if entry.asked else {name: value for name, value in entry_fields.items() if name != "asked"}


def exists(folder: Path) -> bool:
    """Whether this folder contains a batch."""
    try:
        return (folder / "batch.json").is_file()
    except OSError:  # the name is too long, or this user is not allowed to enter the folder
        return False


def check_exists(folder: Path) -> None:
    """Raises BatchError unless this folder contains a batch."""
    if not exists(folder):
        raise BatchError(f"{folder} holds no batch: name the folder that was given to --out")


def batch_id(folder: Path) -> str:
    """Return the id of the batch in this folder, whether or not it is owned. Raises BatchError if it can't be read."""
    return str(manifest_of(folder)["batch_id"])


def id_or_folder(text: str) -> str:
    """Return the id of a batch that is given by its folder or by its id. Raises BatchError."""
    return batch_id(Path(text)) if text and exists(Path(text)) else text


def manifest_of(folder: Path) -> dict[str, Any]:
    """Return the content of `batch.json`, whether or not the batch is owned. "jobs" are BatchEntry, "secret" is bytes.

    Raises BatchError if there is no manifest that can be read.
    """
    if not exists(folder):
        raise BatchError(f"{folder} holds no batch; name the folder given to --out")
    return _read_manifest(folder)


def _work_of(entries: Iterable[BatchEntry]) -> set[tuple[str, str, str]]:
    """Return what these jobs are about, independently of their ids."""
    return {(entry.item_id, entry.model, entry.role) for entry in entries}


def other_form(folder: Path, form: int) -> str:
    """Return why no more jobs are published from a folder whose prompts have this form, and what to do."""
    if form > NEWEST_FORM:
        return (
            f"a newer kvasir made the prompts of {folder}, so nothing is sent from it here; upgrade: {UPGRADE_COMMAND}"
        )
    return (
        f"the prompts of {folder} are of an older form, so nothing new is sent from it: kvasir watch, kvasir results "
        "and kvasir run still gather and show what it has; to send the work again, name a new folder with --out"
    )


@contextmanager
def report_lock(folder: Path) -> Iterator[None]:
    """Hold a lock while the grades are read and written, so that a later writer has also read the later state."""
    descriptor = cast(int, take_lock(folder / "report.lock", wait=True))
    try:
        yield
    finally:
        os.close(descriptor)


def is_owned(folder: Path) -> bool:
    """Whether a process owns the batch in this folder now."""
    try:
        os.close(_lock(folder))
    except BatchError:
        return True
    return False


def _lock(folder: Path) -> int:
    try:
        make_folder(folder)
        descriptor = take_lock(folder / "batch.lock")
    except OSError as error:
        raise BatchError(f"can't use {folder} for results: {error.strerror}; name another folder with --out") from None
    if descriptor is None:
        raise BatchError(
            f"{folder} is in use by another kvasir process; wait until that process ends, or run kvasir watch"
        )
    return descriptor


def _read_manifest(folder: Path) -> dict[str, Any]:
    path = folder / "batch.json"
    try:
        text = read_ordinary(path)
        if is_foreign(path):  # another user's batch.json could make Kvasir read or delete wrong files
            raise BatchError(f"{path} belongs to another user, so it is not read; copy the file if you trust it")
        manifest = from_json(text, _entry_or_dict)
        if not isinstance(manifest, dict):
            raise ValueError("the file does not contain a JSON object")
        if manifest.get("version") != VERSION:
            raise BatchError(f"{path} was written by another version of kvasir; to upgrade, run: {UPGRADE_COMMAND}")
        checked_manifest = parse_as(_SHAPE, dict.fromkeys(_SHAPE) | {"prompt_form": 1} | manifest, "the batch")
        _check(checked_manifest)
        return {**checked_manifest, "secret": bytes.fromhex(checked_manifest["secret"])}
    except FileNotFoundError:
        return _new_manifest()
    except (OSError, ValueError, InvalidMessage) as error:
        raise BatchError(f"{path} can't be read ({error}); restore it, or use another --out folder") from None


def _entry_or_dict(fields_read: dict[str, Any]) -> Any:
    """Return an object that is an entry as a BatchEntry, while it is read.

    50,000 dicts would take several times the memory.
    """
    if fields_read.keys() | {"asked"} != _ENTRY_FIELDS:
        return fields_read
    asked_keys = parse_as(tuple[str, ...], fields_read.get("asked", []), "asked")
    if any(not _KEY.match(key) for key in asked_keys):
        raise ValueError("each key in 'asked' must have the form name:answers:digest")
    for name in ("job_id", "item_id"):
        checks.identifier(name, fields_read[name])
    checks.model_name("model", fields_read["model"])
    for name in ("role", "name"):
        parse_as(str, fields_read[name], name)
    interned_fields = {name: sys.intern(fields_read[name]) for name in ("model", "role")}
    return BatchEntry(
        **{**fields_read, **interned_fields, "job_id": sys.intern(fields_read["job_id"]), "asked": asked_keys}
    )


def _check(manifest: Mapping[str, Any]) -> None:
    """Check what the types don't express. Raises ValueError, InvalidMessage."""
    checks.identifier("batch_id", manifest["batch_id"])
    checks.number("created_at", manifest["created_at"], 0, 1e11)
    if len(bytes.fromhex(manifest["secret"])) != _SECRET_BYTES:
        raise ValueError(f"secret must be {_SECRET_BYTES} bytes in hexadecimal")
    for run in manifest["runs"].values():
        checks.whole("a run", run, 1, MAX_RUN - 1)
    request = manifest["request"]
    if "\0" in "".join(value for value in request.values() if isinstance(value, str)):
        raise ValueError("request contains a path with a null character")
    checks.whole("request.limit", request.get("limit", 0), 0, 1_000_000)
    checks.whole("request.max_submission_tokens", request.get("max_submission_tokens", 0), 0, 1_000_000_000)
    checks.whole("request.samples", request.get("samples", 1), 1, MAX_ANSWERS)
    for model in request.get("models", {}).values():
        checks.model_name("request.models", model)


def _new_manifest() -> dict[str, Any]:
    return {
        # The id leaves this machine, so it is not made from the folder's name, which is often a student's name.
        "batch_id": f"batch-{time.strftime('%Y%m%d')}-{secrets.token_hex(4)}",
        "created_at": time.time(),
        "secret": secrets.token_bytes(_SECRET_BYTES),
        "prompt_form": PROMPT_FORM,
        "request": {},
        "runs": {},
        "jobs": [],
    }
