"""Looks at dead letters, runs their jobs again, or drops them.

A letter is read without an ack, so looking removes nothing. Letters that are neither replayed nor dropped return to
their place in the queue when the broker client is closed. Only one process at a time can look.

A replay is the next run of the same job, made from the message's text. Tokens, KV cache, counters and the broker's
headers are left out. The run's number depends only on the letters, and on the batch's folder if it is given. So a crash
between confirm and ack makes a second copy of the same run, but never another run.
"""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field, replace
from functools import cache
from typing import Any

from infra.broker import topology
from infra.broker.base import Broker, Delivery
from infra.broker.envelope import Envelope, open_envelope
from messages import codec
from messages.errors import BatchError, InvalidMessage, KvasirError
from messages.jobs import DecodeJob, PrefillJob
from messages.workers import WorkerStage
from producers.batch.batch import Batch
from producers.client import Client

MAX_LETTERS = 65_535  # held at once; the largest prefetch of the protocol
_FIRST_WAIT_S = 2.0
_SILENCE_S = 0.5


@dataclass(frozen=True, slots=True)
class Letter:
    """One dead letter: which job and batch it belongs to, and why it failed."""

    envelope: Envelope
    error: str  # the name of the error's class
    message: str  # the error in one sentence
    queue: str  # the queue that it last came from
    failed_at: int  # seconds since the epoch, by the clock of the worker that gave the job up; 0: unknown
    delivery: Delivery = field(repr=False)

    @property
    def body(self) -> bytes:
        """The message as it was published."""
        return self.delivery.message.body

    def job(self) -> PrefillJob:
        """The job in the letter. Raises InvalidMessage or NewerMessage if it can't be read."""
        if self.envelope.stage == "decode":
            return codec.decode(self.body, DecodeJob).job
        return codec.decode(self.body, PrefillJob)

    def facts(self) -> dict[str, Any]:
        """Everything except the body, for people and programs."""
        envelope = self.envelope
        return {
            "job": envelope.job_id,
            "batch": envelope.batch_id,
            "item": envelope.item_id,
            "model": envelope.model,
            "stage": envelope.stage,
            "run": envelope.run,
            "error": self.error,
            "message": self.message,
            "attempts": envelope.attempts + 1,
            "kv_transfers": envelope.kv_transfers,
            "returns": envelope.returns,
            "queue": self.queue,
            "failed_at": self.failed_at,
            "bytes": len(self.body),
        }


@dataclass(frozen=True, slots=True)
class LetterFilter:
    """Selects letters; an empty field matches all."""

    batch: str = ""
    model: str = ""
    error: str = ""
    jobs: Collection[str] = ()

    def matches(self, letter: Letter) -> bool:
        """Whether a letter is selected. The start of a job's id is enough to name it."""
        envelope = letter.envelope
        criteria = ((self.batch, envelope.batch_id), (self.model, envelope.model), (self.error, letter.error))
        is_named = not self.jobs or any(envelope.job_id.startswith(job) for job in self.jobs)
        return is_named and all(not filter_text or filter_text == letter_text for filter_text, letter_text in criteria)


@dataclass(frozen=True, slots=True)
class ReplayOutcome:
    """The outcome of a replay."""

    jobs: list[PrefillJob]
    refusals: list[tuple[Letter, str]]  # letters that stay in the queue, each with the reason


class DeadLetters(AbstractContextManager["DeadLetters"]):
    """All letters that are in the queue now. Raises BatchError if another process is looking, and BrokerUnavailable.

    Leaving the context stops reading. The letters go back when the broker client is closed.
    """

    def __init__(self, broker: Broker) -> None:
        depth = broker.depth(topology.DEAD_LETTERS)
        self._consumer = broker.consume(topology.DEAD_LETTERS, MAX_LETTERS, exclusive=True)
        try:
            self.letters = list(self._read(depth.ready if depth else 0))
        except BaseException:
            self.close()
            raise

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop reading."""
        self._consumer.close()

    def matching(self, letter_filter: LetterFilter) -> list[Letter]:
        """The selected letters, oldest first."""
        return [letter for letter in self.letters if letter_filter.matches(letter)]

    def drop(self, letters: Iterable[Letter]) -> int:
        """Delete these letters for good. Returns how many were deleted; fewer than asked if the connection was lost
        meanwhile."""
        return sum(letter.delivery.ack() for letter in letters)

    def replay(self, letters: Sequence[Letter], client: Client, batch: Batch | None = None) -> ReplayOutcome:
        """Publish each letter's job as its next run, confirmed, and then ack the letters of that job.

        If the owning `batch` is given, its folder requests the new runs before they are published. Raises the errors of
        `Client.submit`. Jobs confirmed before an error are replayed; the other letters stay.
        """
        plan = _Plan(self.letters, client, batch)
        letters_by_job: dict[str, list[Letter]] = defaultdict(list)
        refusals: list[tuple[Letter, str]] = []
        jobs: dict[str, PrefillJob] = {}
        for letter in letters:
            try:
                job = plan.next_run(letter)
            except KvasirError as reason:
                refusals.append((letter, str(reason)))
                continue
            jobs[job.job_id] = job
            letters_by_job[job.job_id].append(letter)

        def on_confirmed(job: PrefillJob) -> None:
            if batch:
                batch.note_confirmed([job])
            self.drop(letters_by_job[job.job_id])

        if batch and jobs:
            batch.want_runs({job.job_id: job.run for job in jobs.values() if job.job_id in batch})
        client.submit(jobs.values(), on_confirmed)
        return ReplayOutcome(list(jobs.values()), refusals)

    def _read(self, expected: int) -> Iterator[Letter]:
        """Read until the expected number of letters has come, or until none comes for a while, because a busy quorum
        queue may report 0."""
        wait_s, count = _FIRST_WAIT_S, 0
        while (not expected or count < expected) and (delivery := self._consumer.receive(wait_s)):
            yield _letter(delivery)
            wait_s, count = (_FIRST_WAIT_S if expected else _SILENCE_S), count + 1


class _Plan:
    """Decides what happens to each letter's job."""

    def __init__(self, letters: Iterable[Letter], client: Client, batch: Batch | None) -> None:
        self._client = client
        self._batch = batch
        self._is_cancelled = cache(client.cluster_state.is_cancelled)
        self._now = client.cluster_state.now()
        by_run = sorted(letters, key=lambda letter: letter.envelope.run)
        self._last_run = {_key(letter): letter.envelope.run for letter in by_run}

    def next_run(self, letter: Letter) -> PrefillJob:
        """The job to publish, as the run after the highest one among the letters and results. Raises KvasirError, which
        says why not."""
        job = letter.job()
        self._client.check_model(job.model)
        if self._is_cancelled(job.batch_id):
            raise BatchError(
                f"batch {job.batch_id} is cancelled, so workers would drop the job; use kvasir retry on its folder"
            )
        run = max(self._last_run[_key(letter)], job.run) + 1
        if self._batch:
            journal = self._batch.journal
            if (line := journal.line_of(job.job_id)) and line.state == "succeeded":
                raise BatchError(f"the job has succeeded meanwhile, as run {line.run}; its letter can be dropped")
            run = max(run, self._batch.runs.get(job.job_id, 1))
            run = journal.last_run(job.job_id) + 1 if journal.has(job.job_id, run) else run
        deadline = job.deadline if job.deadline > self._now else 0.0
        return replace(job, run=run, tokens=(), shared_tokens=0, stream_to="", deadline=deadline)


def readable(letter: Letter) -> dict[str, Any]:
    """A letter and its job as a dict; if the job can't be read, the first bytes of the message."""
    try:
        job = letter.job()
    except (InvalidMessage, KvasirError) as error:
        return letter.facts() | {"unreadable": str(error), "begins": letter.body[:64].hex(" ")}
    return letter.facts() | {
        "prompt": [asdict(part) for part in job.prompt],
        "max_tokens": job.sampling.max_tokens,
        "temperature": job.sampling.temperature,
        "lane": job.lane,
        "reply_to": job.reply_to,
        "submitted_at": job.submitted_at,
        "deadline": job.deadline,
    }


def _key(letter: Letter) -> tuple[str, str]:
    return letter.envelope.batch_id, letter.envelope.job_id


def _letter(delivery: Delivery) -> Letter:
    headers = delivery.message.headers
    stage: WorkerStage = "decode" if headers.get("kvasir-stage") == "decode" else "prefill"
    envelope = open_envelope(delivery, stage, str(headers.get("kvasir-model", "")) or "unknown")
    failed_at = headers.get("kvasir-failed-at", 0)
    return Letter(
        # Returns of the letter to this queue after somebody looked at it are not returns of the job.
        replace(envelope, returns=max(0, envelope.returns - delivery.returns)),
        str(headers.get("kvasir-error", "")) or "unknown",
        str(headers.get("kvasir-error-message", "")),
        str(headers.get("kvasir-from", "")),
        failed_at if isinstance(failed_at, int) else 0,
        delivery,
    )
