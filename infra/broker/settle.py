"""How a worker's deliveries are settled. Deliveries are acked here; only one that is adopted too late is acked in
`RunningJobs.end`.

Each settlement is a confirmed publish followed by an ack. With this order a crash between the two makes a duplicate;
the other order would lose a job. Publishing waits as long as the broker is away, and never drops a job.
"""

import logging
import random
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

from infra.broker import topology
from infra.broker.base import Address, Broker, Delivery, Message
from infra.broker.control import ring
from infra.broker.envelope import Attempt, Envelope, open_envelope
from infra.broker.failpoints import failpoint
from messages import codec
from messages.errors import (
    AttemptsExhausted,
    BrokerUnavailable,
    KvasirError,
    KVTransferFailed,
    NewerMessage,
    NoQueue,
    Retry,
    Stopped,
)
from messages.jobs import MAX_ERROR_BYTES, DecodeJob, JobError, JobResult, Lane, State
from messages.lifecycle import Event, Step

log = logging.getLogger(__name__)
A = TypeVar("A", bound=Attempt[Any])

MAX_ATTEMPTS = 6
MAX_KV_TRANSFERS = 2  # failed transfers after which the decoder computes the prompt itself


@dataclass(frozen=True, slots=True)
class Settlement:
    """A message that settles an attempt once it is confirmed, with the event and failpoint that follow."""

    attempt: Attempt[Any]
    to: Address | None  # None: there is nobody to tell
    message: Message
    step: Step | None = None  # None: the job goes back to its queue, which is not an event
    place: str = ""
    facts: dict[str, Any] = field(default_factory=dict)


def passing_on(attempt: Attempt[Any], job: DecodeJob) -> Settlement:
    """The settlement after prefill: publish the decode job."""
    envelope = attempt.envelope
    message = envelope.for_stage("decode").seal(codec.encode(job, envelope.version))
    to = topology.work("decode", envelope.model, envelope.lane, envelope.turn)
    return Settlement(attempt, to, message, Step.PASSED_ON, "prefill.passed")


def replying(attempt: Attempt[Any], result: JobResult, body: bytes = b"") -> Settlement:
    """The settlement of a job that has its result. `body` is the encoded result, if it is encoded already."""
    envelope = attempt.envelope
    to = topology.reply(envelope.reply_to) if envelope.reply_to else None
    message = envelope.seal(body or codec.encode(result, envelope.version))
    facts: dict[str, Any] = {"state": result.state, "total_s": result.decode.total_s}
    if result.error:
        facts["error"] = result.error.kind
    return Settlement(attempt, to, message, _STEPS[result.state], "decode.replied", facts)


class Settler:
    """Settles a worker's attempts. Each method settles all deliveries of one attempt, including any adopted
    meanwhile."""

    def __init__(self, broker: Broker, models: Sequence[str], observe: Callable[[Event], None]) -> None:
        self._broker = broker
        self._models = models
        self.observe = observe
        self._settling_since: list[float] = []  # start of each call of `settle` that has not returned; monotonic clock
        self._lock = threading.Lock()
        self.jobs_finished = 0  # jobs finished at this stage; those handed back, or sent back to prefill, don't count

    @property
    def late_s(self) -> float:
        """For how many seconds the oldest outcome has been on its way to the broker; about 0 if there is none."""
        return time.monotonic() - min(self._settling_since, default=time.monotonic())

    def begin(self, kind: type[A], delivery: Delivery) -> A:
        """Begin an attempt of this kind at a job that has just arrived. The event says whether it was returned from
        another worker."""
        attempt = kind([delivery], open_envelope(delivery, *topology.stage_and_model(delivery.queue)))
        if delivery.returns:
            self.observe(attempt.envelope.event(Step.REDELIVERED, returns=delivery.returns))
        return attempt

    @contextmanager
    def settling_errors(self, attempt: Attempt[Any]) -> Iterator[None]:
        """Turns every error of a job into the end of its attempt. After that end, an error changes nothing."""
        try:
            try:
                yield
            except BrokerUnavailable:
                raise
            except Stopped:
                self.settle_stop(attempt)
            except Exception as error:  # noqa: BLE001  settle_error sorts errors by kind
                self.settle_error(attempt, error)
        except BrokerUnavailable:  # only if this broker object was closed; the broker delivers the job again
            log.warning("job %s: left unacked, the broker connection is closed", attempt.envelope.job_id)

    def settle(self, *ready: Settlement) -> None:
        """Publish these in a window, and ack the deliveries of each as soon as it is confirmed."""
        start = time.monotonic()
        self._settling_since.append(start)
        pending = {id(settlement.message): settlement for settlement in ready}

        def on_confirmed(message: Message) -> None:
            settlement = pending.pop(id(message))
            try:
                if settlement.step:
                    self._note_finish(settlement.attempt.envelope.event(settlement.step, **settlement.facts))
                    failpoint(settlement.place, settlement.attempt.envelope.job_id)
            except Exception as error:  # noqa: BLE001  one job's error must not affect the others
                return self.settle_error(settlement.attempt, error)
            self._ack(settlement.attempt)

        try:
            try:
                sends = [(settlement.to, settlement.message) for settlement in ready if settlement.to]
                self._broker.publish_many(sends, on_confirmed, timeout_s=None)
            except (NoQueue, BrokerUnavailable) as error:
                log.info("publishing %d messages one by one: %s", len(pending), error)
            for settlement in list(pending.values()):
                if settlement.to:
                    self._publish(settlement.to, settlement.message)
                on_confirmed(settlement.message)
        finally:
            self._settling_since.remove(start)

    def settle_stop(self, attempt: Attempt[Any]) -> None:
        """Settle an attempt that a person or a limit stopped, by its reason. Without a reason the job goes back to its
        queue."""
        envelope, reason = attempt.envelope, attempt.why_stopped
        if reason == "cancelled":  # silently, because the batch's owner has written the result itself
            self._ack(attempt)
        elif reason == "expired":
            self.settle(replying(attempt, _result(envelope, "expired", None)))
        elif reason == "suspect":  # too many workers died while holding it, so it will run alone
            self._move(attempt, topology.suspects(envelope.stage, envelope.model), Step.ISOLATED)
        else:  # not now, and no error: publish a copy for the next free worker, which unlike a requeue is not counted
            self._move(attempt, topology.ahead_of_bulk(attempt.deliveries[-1].queue), Step.REDELIVERED)
        attempt.has_ended_unanswered = reason in ("cancelled", "expired")

    def settle_error(self, attempt: Attempt[Any], error: BaseException) -> None:
        """Settle a job that met an error: let it wait for an upgrade, prefill it again, retry it, or fail it.

        Does nothing if the attempt has already ended.
        """
        if not attempt.deliveries:
            return
        envelope = attempt.envelope
        attempts = envelope.attempts + 1
        if isinstance(error, NewerMessage):
            self._later(attempt, envelope, 60)
        elif isinstance(error, KVTransferFailed) and prefill_helps(envelope):
            self._prefill_again(attempt)
        elif isinstance(error, Retry) and attempts < MAX_ATTEMPTS:
            self._retry(attempt, error)
        elif isinstance(error, Retry):
            self.fail(attempt, AttemptsExhausted(f"{attempts} attempts; the last: {error}"))
        else:
            if not isinstance(error, KvasirError):  # a bug in Kvasir: log the traceback, and don't run the job again
                log.error("job %s: bug in %s", envelope.job_id, envelope.stage, exc_info=error)
            self.fail(attempt, error)

    def fail(self, attempt: Attempt[Any], error: BaseException) -> None:
        """The job can't succeed: publish its failed result, then its dead letter, then ack."""
        envelope = attempt.envelope
        problem = JobError(envelope.stage, type(error).__name__, _sentence(error))
        reply = replying(attempt, _result(envelope, "failed", problem))
        if reply.to:
            self._publish(reply.to, reply.message)
        self._note_finish(envelope.event(Step.FAILED, **reply.facts))
        letter = _dead_letter(attempt.deliveries[-1], envelope, problem)
        self._publish(Address(topology.DEAD, topology.DEAD_LETTERS), letter)
        self._ack(attempt)
        attempt.has_ended_unanswered = True

    def hand_back_all(self, deliveries: Iterable[Delivery], keep_turn: bool = False) -> None:
        """Hand back deliveries on which no work has begun. If the broker is away, it still has them and will deliver
        them again.

        Each goes to the end of its queue. With `keep_turn` it goes ahead of `bulk`, and so does a job with which a
        worker died. Such a job has already waited its turn, and at the end of the queue it might wait for another
        class's whole batch.
        """
        settlements = []
        for delivery in deliveries:
            envelope = open_envelope(delivery, *topology.stage_and_model(delivery.queue))
            message = envelope.seal(delivery.message.body)
            has_turn = keep_turn or envelope.returns
            to = topology.ahead_of_bulk(delivery.queue) if has_turn else Address(topology.WORK, delivery.queue)
            settlements.append(Settlement(Attempt[Any]([delivery], envelope), to, message))
        if settlements:
            with suppress(BrokerUnavailable):
                self.settle(*settlements)

    def defer(self, attempt: Attempt[Any]) -> None:
        """Another worker holds the job, or died while holding it, so look again in a second. This is not counted.

        It comes back in the `now` lane, because it has already waited its turn, and a dead worker's job must not wait
        again.
        """
        self._later(attempt, attempt.envelope, topology.RETRY_LEVELS_S[0], lane="now")

    def _prefill_again(self, attempt: Attempt[DecodeJob]) -> None:
        """The KV cache is gone: send the job back to prefill, ahead of `bulk`, and count the failed KV transfer."""
        envelope = attempt.envelope
        prefill_envelope = replace(envelope.for_stage("prefill"), kv_transfers=envelope.kv_transfers + 1)
        message = prefill_envelope.seal(codec.encode(attempt.job.job, envelope.version))
        self._publish(topology.work("prefill", envelope.model, "now"), message)
        self.observe(envelope.event(Step.KV_GONE))
        self._ack(attempt)
        ring(self._broker, topology.work_queue("prefill", envelope.model, "now"))

    def _retry(self, attempt: Attempt[Any], error: Retry) -> None:
        envelope = attempt.envelope
        attempts = envelope.attempts + 1
        level = _retry_level(attempts)
        log.warning("job %s: attempt %d failed, again in %d s: %s", envelope.job_id, attempts, level, error)
        self._later(attempt, replace(envelope, attempts=attempts), level)
        self.observe(envelope.event(Step.RETRIED, error=type(error).__name__))

    def _later(self, attempt: Attempt[Any], envelope: Envelope, level: int, lane: Lane | None = None) -> None:
        queue = topology.work_queue(envelope.stage, envelope.model, lane or envelope.lane, envelope.turn)
        self._publish(topology.retry(level, queue), envelope.seal(attempt.deliveries[-1].message.body))
        self._ack(attempt)

    def _move(self, attempt: Attempt[Any], to: Address, step: Step) -> None:
        self._publish(to, attempt.envelope.seal(attempt.deliveries[-1].message.body))
        self.observe(attempt.envelope.event(step))
        self._ack(attempt)

    def _publish(self, to: Address, message: Message) -> None:
        while True:
            try:
                return self._broker.publish(to, message, timeout_s=None)
            except NoQueue:  # a queue was deleted
                log.warning("no queue for %s: declaring the topology again", to.key)
                self._broker.declare(self._models)
                _pause()
            except BrokerUnavailable as error:  # refused by a full queue, or the broker object was closed
                if not self._broker.is_connected:
                    raise
                log.warning("the broker refused a message for %s, trying again: %s", to.key, error)
                _pause()

    def _note_finish(self, event: Event) -> None:
        with self._lock:
            self.jobs_finished += 1
        self.observe(event)

    def _ack(self, attempt: Attempt[Any]) -> None:
        attempt.is_outcome_confirmed = True
        while attempt.deliveries:
            attempt.deliveries.pop().ack()


def prefill_helps(envelope: Envelope) -> bool:
    """Whether a decode job without a KV cache goes back to prefill, judged by its failed KV transfers so far."""
    return envelope.stage == "decode" and envelope.kv_transfers + 1 < MAX_KV_TRANSFERS


_STEPS: dict[State, Step] = {
    "succeeded": Step.REPLIED,
    "failed": Step.FAILED,
    "cancelled": Step.CANCELLED,
    "expired": Step.EXPIRED,
}


def _result(envelope: Envelope, state: State, error: JobError | None) -> JobResult:
    return JobResult(
        envelope.job_id,
        envelope.run,
        envelope.batch_id,
        envelope.item_id,
        envelope.model,
        state,
        error=error,
        attempts=envelope.attempts + 1,
    )


def _retry_level(attempts: int) -> int:
    """Seconds until the next attempt. The first retry comes soon, because most faults are short.

    From the second retry on, half of the jobs wait one level longer, so that jobs that failed together don't all come
    back together. (A spread within a level would need a TTL for each message, and a quorum queue expires only its
    head.)
    """
    levels = topology.RETRY_LEVELS_S
    at = min(attempts, len(levels)) - 1
    return random.choice(levels[at : at + 2]) if at else levels[0]


def _dead_letter(delivery: Delivery, envelope: Envelope, problem: JobError) -> Message:
    message = envelope.seal(delivery.message.body)
    error_headers = {
        "kvasir-error": problem.kind,
        "kvasir-error-message": problem.message,
        "kvasir-from": delivery.queue,
    }
    headers = {**message.headers, **error_headers, "kvasir-failed-at": int(time.time())}
    return Message(message.body, message.message_id, message.correlation_id, message.reply_to, headers)


def _sentence(error: BaseException) -> str:
    text = str(error) if isinstance(error, KvasirError) else f"bug: {type(error).__name__}: {error}"
    # A library's error text may hold a lone surrogate, which can't be encoded in a message.
    return text.encode(errors="replace")[: MAX_ERROR_BYTES - 8].decode(errors="ignore") or type(error).__name__


def _pause() -> None:
    time.sleep(random.uniform(0.2, 1.0))
