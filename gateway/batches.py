"""Batches that clients send to the gateway. Each runs in a thread, in the same way as `kvasir run`.

A batch's description is on disk before the client gets its id. While the batch runs, it has a folder like one of
`kvasir run`. The journal in that folder records which answers have come, so a gateway that was killed continues from
there. At the end the answers are written to files, the description is marked as over, and the folder is deleted.
"""

import json
import logging
import secrets
import shutil
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from itertools import chain
from pathlib import Path
from typing import Any, Literal

from gateway.files import Files, StoredFile, read_all, write_description
from gateway.refusal import ApiError
from infra.broker.failpoints import failpoint
from messages.errors import ConfigError, KvasirError
from messages.jobs import PrefillJob
from messages.limits import MAX_BATCHES, MAX_BATCHES_PER_KEY
from messages.lines import on_one_line
from messages.strict_schema import Objects
from producers.batch import prompt_lines
from producers.batch.batch import Batch, Counts
from producers.batch.openai_body import Defaults
from producers.batch.prompt_lines import PromptLine
from producers.batch.runner import Runner, cancelled_results
from producers.client import Client

log = logging.getLogger(__name__)

WINDOW_S = 24 * 3600.0
_LATE_S = 30.0  # after a batch's deadline, workers have this many seconds to report its expired jobs
_RETRY_S = 10.0
_PROBLEMS = 20  # if a file has no usable line, at most this many of its problems are shown
_TURN_S = 0.005  # after reading lines for this many seconds, the reader turns to the next batch
_reader = ThreadPoolExecutor(1, "lines")  # with more threads, the event loop would wait too long for the GIL

Status = Literal["validating", "failed", "in_progress", "finalizing", "completed", "expired", "cancelling", "cancelled"]
_FINAL_STATUSES = ("failed", "completed", "expired", "cancelled")


@dataclass(frozen=True, slots=True)
class StoredBatch:
    """A batch's description.

    `owner` is the name of the key that sent it, as in `StoredFile`. `models` are the models that its lines may name;
    they are fixed when the batch is created.
    """

    id: str
    owner: str
    input_file_id: str
    sha256: str  # of that file
    idempotency_key: str
    created: float  # seconds since the epoch
    metadata: Mapping[str, str]
    models: Mapping[str, Defaults]
    status: Status = "validating"
    since: Mapping[str, int] = field(default_factory=dict)  # when each status began; the first status is left out
    total: int = 0
    completed: int = 0
    failed: int = 0
    output_file_id: str = ""
    error_file_id: str = ""
    errors: tuple[str, ...] = ()
    endpoint: str = prompt_lines.CHAT
    output_expires_s: int = 0  # seconds until an output file is deleted; with 0, it is never deleted

    @property
    def expires(self) -> float:
        """When its jobs expire, in seconds since the epoch."""
        return self.created + WINDOW_S

    @property
    def is_over(self) -> bool:
        """Whether the batch has reached a final status."""
        return self.status in _FINAL_STATUSES


class Batches:
    """All batches of a gateway. Methods may be called from any thread; methods that change something block."""

    def __init__(
        self,
        files: Files,
        client: Client,
        check_body: Callable[[dict[str, Any], str], None],
        objects: Objects = "closed",
    ) -> None:
        """Continue the batches that were under way. `check_body` raises BadLine for a body that its URL does not serve.

        `objects`: see `strict_schema`. It applies to batches that begin from now on.
        """
        self._folder = files.folder.with_name("batches")
        self.files = files
        self._client = client
        self._check_body = check_body
        self._objects: Objects = objects
        self._batches = read_all(self._folder, StoredBatch)
        self._changing = threading.Lock()
        self._closing = threading.Event()
        self._threads: dict[str, tuple[threading.Thread, threading.Event]] = {}
        for batch in self._batches.values():
            if batch.is_over:
                self._clear(batch.id)
            else:
                self._start(batch.id)

    def of(self, owner: str) -> list[StoredBatch]:
        """Return all batches of one owner, oldest first."""
        return sorted(
            (batch for batch in list(self._batches.values()) if batch.owner == owner), key=lambda b: b.created
        )

    def get(self, name: str, owner: str) -> StoredBatch:
        """Return a batch. Raises ApiError if it does not exist or belongs to another owner."""
        batch = self._batches.get(name)
        if batch is None or batch.owner != owner:
            raise ApiError(404, f"there is no batch {name!r:.80}", "batch_id", "not_found")
        return batch

    def create(
        self,
        file: StoredFile,
        key: str,
        metadata: Mapping[str, str],
        models: Mapping[str, Defaults],
        **details: Any,
    ) -> StoredBatch:
        """Begin a batch; its description is on disk on return.

        The same content with the same key returns the existing batch.

        `details` are further fields of the description. Raises ApiError, BatchError.
        """
        with self._changing:
            for earlier in self._batches.values() if key else ():
                if (earlier.owner, earlier.idempotency_key, earlier.sha256) == (file.owner, key, file.sha256):
                    return earlier
            owners = [batch.owner for batch in self._batches.values() if not batch.is_over]
            for number, most in ((owners.count(file.owner), MAX_BATCHES_PER_KEY), (len(owners), MAX_BATCHES)):
                if number >= most:
                    message = f"{most} batches are under way already"
                    raise ApiError(429, message, code="too_many_batches", retry_s=60)
            self.files.get(file.id, file.owner)  # the file may have been deleted since it was looked up
            name = f"batch_{secrets.token_hex(12)}"
            batch = StoredBatch(name, file.owner, file.id, file.sha256, key, time.time(), metadata, models, **details)
            self._keep(batch)
            failpoint("gateway.created", name)
            self._start(name)
        return batch

    def cancel(self, name: str, owner: str) -> StoredBatch:
        """End a batch early with the answers that it has. The change is on disk on return.

        Raises ApiError, BatchError.
        """
        with self._changing:
            batch = self.get(name, owner)
            if batch.status == "cancelling":
                return batch
            if batch.status not in ("validating", "in_progress"):
                raise ApiError(409, f"a batch that is {batch.status} can't be cancelled", "batch_id", "invalid_value")
            cancelling = self._turn(batch, "cancelling")
            self._threads[name][1].set()
        return cancelling

    def delete_file(self, name: str, owner: str) -> None:
        """Delete a file that no batch reads. Raises ApiError."""
        with self._changing:
            for batch in self._batches.values():
                if batch.input_file_id == name and batch.owner == owner and not batch.is_over:
                    raise ApiError(
                        409,
                        f"batch {batch.id} still reads this file: cancel the batch, or wait until it ends",
                        "id",
                        "file_in_use",
                    )
            self.files.delete(name, owner)

    def close(self) -> None:
        """Stop working on all batches without ending them: the next gateway continues them. Idempotent."""
        self._closing.set()
        threads = list(self._threads.values())
        for _, stop in threads:
            stop.set()
        for thread, _ in threads:
            thread.join()

    def _keep(self, batch: StoredBatch) -> StoredBatch:
        write_description(self._folder, batch.id, batch)
        self._batches[batch.id] = batch
        return batch

    def _turn(self, batch: StoredBatch, status: Status, **fields: Any) -> StoredBatch:
        return self._keep(replace(batch, status=status, since={**batch.since, status: int(time.time())}, **fields))

    def _clear(self, name: str) -> None:
        shutil.rmtree(self._folder / name, ignore_errors=True)

    # All methods below run in the batch's thread.

    def _start(self, name: str) -> None:
        stop = threading.Event()
        if self._batches[name].status == "cancelling":
            stop.set()
        thread = threading.Thread(target=self._run, args=(name, stop), name=name, daemon=True)
        self._threads[name] = thread, stop
        thread.start()

    def _run(self, name: str, stop: threading.Event) -> None:
        while not (self._closing.is_set() or self._batches[name].is_over):
            try:
                with Batch(self._folder / name) as batch:
                    self._work(name, batch, stop)
            except (KvasirError, OSError) as error:
                log.warning("%s waits: %s", name, error)
                self._fail_if_overdue(name, str(error))
                self._closing.wait(_RETRY_S)
        if self._batches[name].is_over:
            self._clear(name)
            self._threads.pop(name, None)

    def _work(self, name: str, batch: Batch, stop: threading.Event) -> None:
        description = self._batches[name]
        is_cut_off = any(entry.role == "intake" for entry in batch.open_jobs.values())
        if not batch.entries or is_cut_off or (batch.may_plan and not batch.may_publish):
            lines = self._lines(description, batch, self._check_body)
            objects = prompt_lines.objects_of(batch, self._objects)
            prompt_lines.plan(batch, lines, self.files.path(description.input_file_id), "none", objects)
            failpoint("gateway.planned", name)
        progress = _Progress(lambda counts: self._count(name, counts))
        progress.update(batch.counts())
        self._advance(name, "validating", "in_progress")
        left_s = description.expires - time.time()
        if left_s > 0 and not stop.is_set():
            jobs = self._jobs(description, batch, stop)
            Runner(batch, jobs, self._client, progress, left_s).run(left_s + _LATE_S, stop)
        if self._closing.is_set():
            return
        if batch.open_jobs:
            self._end_early(batch, progress, "cancelled" if stop.is_set() else "expired")
        self._advance(name, "in_progress", "finalizing")
        self._finish(name, batch)

    def _lines(
        self,
        description: StoredBatch,
        batch: Batch,
        check: Callable[[dict[str, Any], str], None] = lambda _body, _url: None,
    ) -> Iterator[PromptLine]:
        def resolve(model: str) -> Defaults:
            if model not in description.models:
                raise ConfigError(f"model {model!r:.120} not found; there are: {', '.join(description.models)}")
            return description.models[model]

        path = self.files.path(description.input_file_id)
        lines = prompt_lines.read_lines(
            path,
            batch.batch_id,
            batch.secret,
            resolve,
            shares=not description.owner,
            check=check,
            objects=prompt_lines.objects_of(batch, self._objects),
        )
        return chain.from_iterable(iter(lambda: _reader.submit(_next_lines, lines).result(), []))

    def _jobs(self, description: StoredBatch, batch: Batch, stop: threading.Event) -> Iterator[PrefillJob]:
        for line in self._lines(description, batch):
            if stop.is_set():
                return
            if line.job:
                yield line.job

    def _end_early(self, batch: Batch, progress: "_Progress", state: Literal["cancelled", "expired"]) -> None:
        """End the batch with the results that have come. Its other jobs get no result."""
        runner = Runner(batch, (), self._client, progress)
        runner.run(0)
        self._client.cancel(batch.batch_id)
        batch.journal.record(replace(result, state=state) for result in cancelled_results(batch))
        runner.run(0)  # deletes the batch's reply queue

    def _finish(self, name: str, batch: Batch) -> None:
        """Write the answers to files, each whole or not at all, then mark the batch as over."""
        stored_batch, counts, file_ids = self._batches[name], batch.counts(), {}
        expires = time.time() + stored_batch.output_expires_s if stored_batch.output_expires_s else 0.0
        for kind, count in (("output", counts.succeeded), ("error", counts.total - counts.succeeded)):
            if count:
                file_id = f"{name.replace('batch_', 'file-')}-{kind}"
                title, rows = f"{name}_{kind}.jsonl", _rows(batch, kind == "output")
                self.files.write(file_id, stored_batch.owner, title, rows, expires)
                failpoint("gateway.written", name)
                file_ids[f"{kind}_file_id"] = file_id
        is_unreadable = counts.unreadable == counts.total
        errors = tuple(_problems(batch, self.files.path(stored_batch.input_file_id))) if is_unreadable else ()
        self._count(name, counts)
        with self._changing:
            description = self._batches[name]
            status: Status = "cancelled" if description.status == "cancelling" else "completed"
            if status == "completed" and counts.expired + counts.cancelled:
                status = "expired"
            self._turn(description, "failed" if is_unreadable else status, errors=errors, **file_ids)
            failpoint("gateway.over", name)

    def _fail_if_overdue(self, name: str, reason: str) -> None:
        with self._changing:
            description = self._batches[name]
            if time.time() > description.expires + WINDOW_S and not description.is_over:
                self._turn(description, "failed", errors=(reason,), failed=description.total - description.completed)

    def _advance(self, name: str, before: Status, after: Status) -> None:
        with self._changing:
            if self._batches[name].status == before:
                self._turn(self._batches[name], after)
                failpoint("gateway.advanced", name)

    def _count(self, name: str, counts: Counts) -> None:
        with self._changing:
            self._batches[name] = replace(
                self._batches[name],
                total=counts.total,
                completed=counts.succeeded,
                failed=counts.finished_jobs - counts.succeeded,
            )


def _next_lines(lines: Iterator[PromptLine]) -> list[PromptLine]:
    """Return the lines read in one turn; an empty list at the end."""
    end, read_lines = time.monotonic() + _TURN_S, []
    for line in lines:
        read_lines.append(line)
        if time.monotonic() > end:
            break
    return read_lines


@dataclass
class _Progress:
    """Batch progress in the form that a Runner calls."""

    update: Callable[[Counts], None]

    def say(self, sentence: str) -> None:
        """Write a line to the log of the gateway."""
        log.info(sentence)


def _rows(batch: Batch, successful: bool) -> Iterator[str]:
    """Yield the lines of the output file or the error file, in the order of the input."""
    for entry in batch.entries:
        if (batch.states[entry.job_id] == "succeeded") == successful and (result := batch.result(entry.job_id)):
            line = prompt_lines.output_line(entry, result, batch.created_at)
            yield on_one_line(json.dumps(line, ensure_ascii=False)) + "\n"


def _problems(batch: Batch, prompts: Path) -> Iterator[str]:
    for number, entry in zip(prompt_lines.numbers_of_lines(prompts), batch.entries[:_PROBLEMS], strict=False):
        if (result := batch.result(entry.job_id)) and result.error:
            place = f"line {number}"
            yield f"{place if entry.name == place else f'{place}, {entry.name}'}: {result.error.message}"
