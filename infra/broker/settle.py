"""How a worker's deliveries are settled. All acks are here, except for one in `RunningJobs.end` (late adoptions).

Each way is a confirmed publish followed by an ack, in that order. A crash between the two makes a duplicate; with the
other order it would lose a job. While the broker is away, publishing waits without limit, so no job is dropped for
that.
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
from infra.broker.envelope import Attempt, Envelope, open_envelope, valid_or
from infra.broker.failpoints import failpoint
from messages import checks, codec
from messages.errors import (
    AttemptsExhausted,
    BrokerUnavailable,
    KvasirError,
    KVTransferFailed,
    NewerMessage,
    NoQueue,
    Poison,
    Retry,
    Stopped,
)
from messages.jobs import MAX_ERROR_BYTES, DecodeJob, JobError, JobResult, Lane, State
from messages.lifecycle import Event, Step
from messages.workers import WorkerStage

log = logging.getLogger(__name__)
A = TypeVar("A", bound=Attempt[Any])

MAX_ATTEMPTS = 6
MAX_KV_TRANSFERS = 2  # after this many failed KV transfers the decode worker computes the prompt itself


@dataclass(frozen=True, slots=True)
class Settlement:
    """A message whose confirm settles an attempt, and the event and the failpoint that follow."""

    attempt: Attempt[Any]
    to: Address | None  # None if there is no message to publish
    message: Message
    step: Step | None = None  # None if the job goes back to its queue, and there is no event
    place: str = ""
    facts: dict[str, Any] = field(default_factory=dict)


def passing_on(attempt: Attempt[Any], job: DecodeJob) -> Settlement:
    """Return the settlement of a finished prefill, which publishes the decode job."""
    envelope = attempt.envelope
    message = envelope.for_stage("decode").seal(codec.encode(job, envelope.version))
    to = topology.work("decode", envelope.model, envelope.lane, envelope.turn)
    return Settlement(attempt, to, message, Step.PASSED_ON, "prefill.passed")


def replying(attempt: Attempt[Any], result: JobResult, body: bytes = b"") -> Settlement:
    """Return the settlement that publishes a job's result. `body` is the result if it is encoded already."""
    envelope = attempt.envelope
    to = topology.reply(envelope.reply_to) if envelope.reply_to else None
    message = envelope.seal(body or codec.encode(result, envelope.version))
    facts: dict[str, Any] = {"state": result.state, "total_s": result.decode.total_s}
    if result.error:
        facts["error"] = result.error.kind
    return Settlement(attempt, to, message, _STEPS[result.state], "decode.replied", facts)


class Settler:
    """Settles a worker's attempts.

    Each method settles all deliveries of an attempt, including one that is adopted meanwhile.
    """

    def __init__(self, broker: Broker, models: Sequence[str], observe: Callable[[Event], None]) -> None:
        self._broker = broker
        self._models = models
        self.observe = observe
        # Start times of the calls of `settle` that are still running; monotonic clock.
        self._settling_since: list[float] = []
        self._lock = threading.Lock()
        self.jobs_finished = 0  # jobs finished at this stage; jobs that go back to a queue or to prefill don't count

    @property
    def late_s(self) -> float:
        """For how many seconds the oldest outcome has waited for the broker; about 0 if none is waiting."""
        return time.monotonic() - min(self._settling_since, default=time.monotonic())

    def begin(self, kind: type[A], delivery: Delivery) -> A:
        """Begin an attempt at a job that has just come. If the job came back from another worker, an event says so."""
        attempt = kind([delivery], open_envelope(delivery, *topology.stage_and_model(delivery.queue)))
        if delivery.returns:
            self.observe(attempt.envelope.event(Step.REDELIVERED, returns=delivery.returns))
        return attempt

    @contextmanager
    def settling_errors(self, attempt: Attempt[Any]) -> Iterator[None]:
        """Settle the attempt if the block raises. Errors after the attempt was settled change nothing."""
        try:
            try:
                yield
            except BrokerUnavailable:
                raise
            except Stopped:
                self.settle_stop(attempt)
            except Exception as error:  # noqa: BLE001  `settle_error` distinguishes the errors
                self.settle_error(attempt, error)
        except BrokerUnavailable:  # raised only if this process closed its connection; the broker redelivers the job
            log.warning("job %s: left unacked, the broker connection is closed", attempt.envelope.job_id)

    def settle(self, *ready: Settlement) -> None:
        """Publish these settlements in a window, and ack the deliveries of each one as soon as it is confirmed."""
        start = time.monotonic()
        self._settling_since.append(start)
        pending = {id(settlement.message): settlement for settlement in ready}

        def on_confirmed(message: Message) -> None:
            settlement = pending.pop(id(message))
            try:
                if settlement.step:
                    self._note_finish(settlement.attempt.envelope.event(settlement.step, **settlement.facts))
                    failpoint(settlement.place, settlement.attempt.envelope.job_id)
            except Exception as error:  # noqa: BLE001  an error of one job must not affect the others
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
        """Settle an attempt that was stopped, by its reason. Without a reason, the job goes back to its queue."""
        envelope, reason = attempt.envelope, attempt.why_stopped
        if reason == "cancelled":  # no result is sent, because the batch's owner has written one itself
            self._ack(attempt)
        elif reason == "expired":
            self.settle(replying(attempt, _result(envelope, "expired", None)))
        # Too many workers died while they ran this job. So it goes to the suspects queue, and jobs from that queue run
        # alone.
        elif reason == "suspect":
            self._move(attempt, topology.suspects(envelope.stage, envelope.model), Step.ISOLATED)
        # This worker can't run the job now. Another worker gets a copy, which does not count as a retry or a return.
        else:
            self._move(attempt, topology.ahead_of_bulk(attempt.deliveries[-1].queue), Step.REDELIVERED)
        attempt.has_ended_unanswered = reason in ("cancelled", "expired")

    def settle_error(self, attempt: Attempt[Any], error: BaseException) -> None:
        """Settle an attempt that met an error: wait for an upgrade, prefill again, retry, or fail.

        Does nothing if the attempt was settled before.
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
            # The job is not run again. An error that is not a KvasirError is a bug in Kvasir, so its traceback is
            # logged.
            if not isinstance(error, KvasirError):
                log.error("job %s: bug in %s", envelope.job_id, envelope.stage, exc_info=error)
            self.fail(attempt, error)

    def fail(self, attempt: Attempt[Any], error: BaseException) -> None:
        """Settle a job that can't succeed: publish a failed result and a dead letter, then ack."""
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

    def answer_deaths(self, model: str) -> None:
        """Answer up to 100 messages that the broker gave up after too many returns: each of their jobs fails.

        `model` is the model of a message that doesn't name its own. Raises BrokerUnavailable.
        """
        for _ in range(100):
            delivery = self._broker.get(topology.DEATHS)
            if delivery is None:
                return
            headers = delivery.message.headers
            stage: WorkerStage = "decode" if headers.get("kvasir-stage") == "decode" else "prefill"
            envelope = open_envelope(delivery, stage, valid_or(model, checks.model_name, headers.get("kvasir-model")))
            reason = (
                f"the broker gave the job up, because it came back more than {topology.BROKER_DELIVERY_LIMIT} times"
            )
            self.fail(Attempt[Any]([delivery], envelope), Poison(reason))

    def hand_back_all(self, deliveries: Iterable[Delivery], keep_turn: bool = False) -> None:
        """Publish deliveries to their queues again that were not begun.

        If the broker is gone, it delivers them again anyway. Each goes to the end of its queue. With `keep_turn` it
        goes ahead of the bulk instead, because it has waited its turn already, and at the end the whole batch of
        another class might be before it. A job with which a worker died always keeps its turn.
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
        """Let the job come back in a second, because another worker runs it or has died with it. This counts nowhere.

        It comes back in the lane `now`: it has waited its turn, and a dead worker's job must not wait again.
        """
        self._later(attempt, attempt.envelope, topology.RETRY_LEVELS_S[0], lane="now")

    def _prefill_again(self, attempt: Attempt[DecodeJob]) -> None:
        """Send the job back to prefill, ahead of the bulk, because its KV cache is gone.

        The failed KV transfer is counted.
        """
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
        log.warning("job %s: attempt %d failed, next in %d s: %s", envelope.job_id, attempts, level, error)
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
            except NoQueue:  # somebody deleted one of our queues
                log.warning("no queue for %s: declaring the topology again", to.key)
                self._broker.declare(self._models)
                _pause()
            except BrokerUnavailable as error:  # the queue is full, or this process closed its connection
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
    """Whether a decode job without a KV cache goes back to prefill, considering how many of its KV transfers failed."""
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
    """Return the seconds until the next attempt. The first retry comes soon, since most faults are short.

    From the second retry on, half of the jobs wait one level longer, so that jobs that failed together don't all come
    back together. (Varying the wait within a level would need a TTL for each message, and a quorum queue expires only
    its first message.)
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
    # A library's text can contain a lone surrogate, which can't be encoded in a message.
    return text.encode(errors="replace")[: MAX_ERROR_BYTES - 8].decode(errors="ignore") or type(error).__name__


def _pause() -> None:
    time.sleep(random.uniform(0.2, 1.0))
