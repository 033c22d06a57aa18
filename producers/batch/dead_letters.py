"""Dead letters: look at them, run their jobs again, or drop them.

A letter is read without being acked, so looking removes nothing: letters that are neither replayed nor dropped go back
to their places in the queue when the broker client is closed. Only one process can look at a time.

A replay is the next run of the same job, made from the text of its message. Tokens, KV cache, counters and the broker's
own headers are left out. The number of the run follows from the letters (and from the batch's folder, if it is given),
so a crash between the confirm and the ack makes a second copy of that run, never another run.
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

MAX_LETTERS = 65_535  # maximum number of dead letters read at once, because AMQP allows no larger prefetch count
_FIRST_WAIT_S = 2.0
_SILENCE_S = 0.5


@dataclass(frozen=True, slots=True)
class Letter:
    """A dead letter: which job it is about, and why the job died."""

    envelope: Envelope
    error: str  # name of Kvasir's error class
    message: str  # the error's text
    queue: str  # the queue from which the job was last taken
    failed_at: int  # seconds since the epoch, by the clock of the worker that gave up on the job; 0: unknown
    delivery: Delivery = field(repr=False)

    @property
    def body(self) -> bytes:
        """The body of the message as it was published."""
        return self.delivery.message.body

    def job(self) -> PrefillJob:
        """Return the job in it. Raises InvalidMessage or NewerMessage if it can't be read."""
        if self.envelope.stage == "decode":
            return codec.decode(self.body, DecodeJob).job
        return codec.decode(self.body, PrefillJob)

    def facts(self) -> dict[str, Any]:
        """Return everything but the body, for people and programs."""
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
    """Which letters to take. An empty field matches every letter."""

    batch: str = ""
    model: str = ""
    error: str = ""
    jobs: Collection[str] = ()

    def matches(self, letter: Letter) -> bool:
        """Whether a letter matches. A job may be given by the start of its id."""
        envelope = letter.envelope
        criteria = ((self.batch, envelope.batch_id), (self.model, envelope.model), (self.error, letter.error))
        is_named = not self.jobs or any(envelope.job_id.startswith(job) for job in self.jobs)
        return is_named and all(not filter_text or filter_text == letter_text for filter_text, letter_text in criteria)


@dataclass(frozen=True, slots=True)
class ReplayOutcome:
    """The outcome of a replay."""

    jobs: list[PrefillJob]
    refusals: list[tuple[Letter, str]]  # dead letters that stay in the queue, and why each of them stays


class DeadLetters(AbstractContextManager["DeadLetters"]):
    """All dead letters in the queue now. Raises BatchError if another process looks at them, BrokerUnavailable.

    Leaving the context stops the reading. The letters go back when the broker client is closed.
    """

    def __init__(self, broker: Broker) -> None:
        letter_count = broker.ready(topology.DEAD_LETTERS)
        self._consumer = broker.consume(topology.DEAD_LETTERS, MAX_LETTERS, exclusive=True)
        try:
            self.letters = list(self._read(letter_count))
        except BaseException:
            self.close()
            raise

    def __exit__(self, *_exc: object) -> None:
        self.close()

    def close(self) -> None:
        """Stop reading."""
        self._consumer.close()

    def matching(self, letter_filter: LetterFilter) -> list[Letter]:
        """Return the letters that match the filter, oldest first."""
        return [letter for letter in self.letters if letter_filter.matches(letter)]

    def drop(self, letters: Iterable[Letter]) -> int:
        """Delete these letters for good, and return how many were deleted.

        If that is fewer than given, the connection was lost meanwhile.
        """
        return sum(letter.delivery.ack() for letter in letters)

    def replay(self, letters: Sequence[Letter], client: Client, batch: Batch | None = None) -> ReplayOutcome:
        """Publish each letter's job as its next run with a confirm, and then ack the letters of that job.

        If the `batch` that owns the jobs is given, its folder requests the new runs before they are published. Raises
        as `Client.submit` does; jobs that were confirmed before the error are replayed, and the other letters stay.
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
        """Yield letters until as many as expected have come, or none comes any more.

        The expected number may be wrong: a quorum queue answers 0 when it is slow to reply.
        """
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
        """Return the job to publish.

        Its run is higher than that of any letter or result. Raises KvasirError with a reason.
        """
        job = letter.job()
        self._client.check_model(job.model)
        if self._is_cancelled(job.batch_id):
            raise BatchError(
                f"batch {job.batch_id} is cancelled, so workers would drop the job; "
                "run kvasir retry on the batch's folder"
            )
        run = max(self._last_run[_key(letter)], job.run) + 1
        if self._batch:
            journal = self._batch.journal
            if (line := journal.line_of(job.job_id)) and line.state == "succeeded":
                raise BatchError(f"run {line.run} of the job has succeeded since then; drop the job's dead letter")
            run = max(run, self._batch.runs.get(job.job_id, 1))
            run = journal.last_run(job.job_id) + 1 if journal.has(job.job_id, run) else run
        return replace(
            job,
            run=run,
            tokens=(),
            shared_tokens=0,
            stream_to="",
            deadline=job.deadline if job.deadline > self._now else 0.0,
        )


def readable(letter: Letter) -> dict[str, Any]:
    """Return a letter with its job, or with the first bytes of the body if it can't be read."""
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
        # The broker also counts how often it returned the dead letter itself to its queue. These returns say nothing
        # about the job, so they are subtracted.
        replace(envelope, returns=max(0, envelope.returns - delivery.returns)),
        str(headers.get("kvasir-error", "")) or "unknown",
        str(headers.get("kvasir-error-message", "")),
        str(headers.get("kvasir-from", "")),
        failed_at if isinstance(failed_at, int) else 0,
        delivery,
    )
