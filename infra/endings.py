"""How a delivery ends. The one place that acks.

Each ending is a confirmed publish followed by an ack, in that order: a crash between the two makes a duplicate, the
other order would lose a job. Publishing waits as long as the broker is away; a job is never dropped for that.
"""

from __future__ import annotations

import logging
import random
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from infra import topology
from infra.broker import Address, Broker, Delivery, Message
from infra.envelope import Envelope, of_job, open_envelope
from infra.fault_points import reached
from messages import codec
from messages.errors import AttemptsExhausted, BrokerUnavailable, KvasirError, NewerMessage, NoQueue, Retry
from messages.jobs import MAX_ERROR_BYTES, DecodeJob, JobError, JobResult, Lane, PrefillJob, Stage, State
from messages.lifecycle import Moment, Step

log = logging.getLogger(__name__)

MAX_ATTEMPTS = 6
SUSPECT_AFTER_FALLS = 3  # of workers that held the job
POISON_AFTER_FALLS = SUSPECT_AFTER_FALLS + 2

Deliveries = list[Delivery]


@dataclass(frozen=True, slots=True)
class Outgoing:
    """A message that settles deliveries once it is confirmed; and what is seen and reached then."""

    held: Deliveries
    envelope: Envelope
    to: Address | None  # None: nobody is to be told
    message: Message
    step: Step | None  # None: it has not left its queue, as far as its lifecycle goes
    place: str
    facts: dict[str, Any] = field(default_factory=dict)


def passing_on(held: Deliveries, envelope: Envelope, job: DecodeJob) -> Outgoing:
    """Prefill is done: the decode job."""
    to = topology.work("decode", envelope.model, envelope.lane)
    message = envelope.at("decode").seal(codec.encode(job))
    return Outgoing(held, envelope, to, message, Step.PASSED_ON, "prefill.passed")


def _handing_back(delivery: Delivery, stage: Stage) -> Outgoing:
    envelope = open_envelope(delivery, stage, topology.model_of(delivery.queue))
    message = envelope.seal(delivery.message.body)
    return Outgoing([delivery], envelope, Address(topology.WORK, delivery.queue), message, None, "")


def replying(held: Deliveries, envelope: Envelope, result: JobResult, body: bytes = b"") -> Outgoing:
    """The job has its result; `body` is that, if it is encoded already."""
    to = topology.reply(envelope.reply_to) if envelope.reply_to else None
    message = envelope.seal(body or codec.encode(result))
    return Outgoing(held, envelope, to, message, _STEPS[result.state], "decode.replied", _facts(result))


class Endings:
    """The endings of a worker's deliveries.

    A worker may hold several deliveries of one job (it adopts the redelivery of what it runs); they end together.
    Each method takes the list of them and leaves it empty; one adopted meanwhile is settled with the rest.
    """

    def __init__(
        self,
        broker: Broker,
        models: Sequence[str],
        observe: Callable[[Moment], None],
        max_attempts: int = MAX_ATTEMPTS,
    ) -> None:
        self._broker = broker
        self._models = models
        self._observe = observe
        self._max_attempts = max_attempts

    def received(self, delivery: Delivery, envelope: Envelope) -> None:
        """Note that a delivery has come back from somebody."""
        if delivery.returns:
            self._seen(Step.REDELIVERED, envelope, returns=delivery.returns)

    def settle(self, *ready: Outgoing) -> None:
        """Publish these in a window, and ack the deliveries of each as soon as it is confirmed."""
        unconfirmed = {id(one.message): one for one in ready}

        def confirmed(message: Message) -> None:
            self._confirmed(unconfirmed.pop(id(message)))

        try:
            sends = [(one.to, one.message) for one in ready if one.to]
            self._broker.publish_many(sends, confirmed, timeout_s=None)
        except (NoQueue, BrokerUnavailable) as error:
            log.info("publishing %d messages one by one: %s", len(unconfirmed), error)
        for one in unconfirmed.values():
            if one.to:
                self._publish(one.to, one.message)
            self._confirmed(one)

    def pass_on(self, held: Deliveries, envelope: Envelope, job: DecodeJob) -> None:
        """Prefill is done: publish the decode job, then ack."""
        self.settle(passing_on(held, envelope, job))

    def reply(self, held: Deliveries, envelope: Envelope, result: JobResult) -> None:
        """The job has its result: publish it, then ack."""
        self.settle(replying(held, envelope, result))

    def _confirmed(self, one: Outgoing) -> None:
        try:
            if one.step:
                self._seen(one.step, one.envelope, **one.facts)
                reached(one.place, one.envelope.job_id)
        except Exception as error:  # noqa: BLE001  one job's trouble, not its neighbours'
            return self.error(one.held, one.envelope, error)
        self._ack(one.held)

    def error(self, held: Deliveries, envelope: Envelope, error: BaseException) -> None:
        """The job met an error: retry it, let it wait for an upgrade, or fail it. Nothing if it has ended already."""
        if not held:
            return
        if isinstance(error, NewerMessage):
            self._later(held, envelope, 60)
        elif isinstance(error, Retry) and envelope.attempts + 1 < self._max_attempts:
            self._retry(held, envelope, error)
        elif isinstance(error, Retry):
            self.fail(held, envelope, AttemptsExhausted(f"{envelope.attempts + 1} attempts; the last: {error}"))
        else:
            self.fail(held, envelope, error)

    def fail(self, held: Deliveries, envelope: Envelope, error: BaseException) -> None:
        """The job can't succeed: failed result, then dead-letters, then ack."""
        problem = JobError(envelope.stage, type(error).__name__, _sentence(error))
        self._answer(envelope, _result(envelope, "failed", problem))
        self._publish(Address(topology.DEAD, topology.DEAD_LETTERS), _dead_letter(held[-1], envelope, problem))
        self._ack(held)

    def expire(self, held: Deliveries, envelope: Envelope) -> None:
        """The deadline has passed."""
        self.reply(held, envelope, _result(envelope, "expired", None))

    def drop(self, held: Deliveries) -> None:
        """Ack silently: the batch is cancelled, and its owner has written the job's result itself."""
        self._ack(held)

    def prefill_again(self, held: Deliveries, envelope: Envelope, job: PrefillJob) -> None:
        """The KV cache is gone: back to prefill, ahead of the bulk, with the failed hand-over counted."""
        back = envelope.at("prefill", hand_overs=envelope.hand_overs + 1)
        self._publish(topology.work("prefill", envelope.model, "now"), back.seal(codec.encode(job)))
        self._seen(Step.KV_GONE, envelope)
        self._ack(held)

    def isolate(self, held: Deliveries, envelope: Envelope) -> None:
        """It came back too often: to the suspects, where it runs alone."""
        where = topology.suspects(_work_stage(envelope), envelope.model)
        self._publish(where, envelope.seal(held[-1].message.body))
        self._seen(Step.ISOLATED, envelope)
        self._ack(held)

    def hand_back(self, held: Deliveries, envelope: Envelope) -> None:
        """Not now, and nobody's fault: a copy to the end of its queue. Unlike a requeue it counts nowhere."""
        where = Address(topology.WORK, held[-1].queue)
        self._publish(where, envelope.seal(held[-1].message.body))
        self._seen(Step.REDELIVERED, envelope)
        self._ack(held)

    def hand_back_all(self, deliveries: Iterable[Delivery], stage: Stage) -> None:
        """Deliveries that nobody has begun. If the broker is gone, it has them and will hand them out again."""
        with suppress(BrokerUnavailable):
            self.settle(*(_handing_back(delivery, stage) for delivery in deliveries))

    def defer(self, held: Deliveries, envelope: Envelope) -> None:
        """Somebody else is on it, or has died on it: look again in a second. Counts nowhere.

        It comes back in the `now` lane: it has waited its turn, and a dead worker's job must not wait for it again.
        """
        self._later(held, envelope, topology.RETRY_LEVELS_S[0], lane="now")

    def _retry(self, held: Deliveries, envelope: Envelope, error: Retry) -> None:
        attempts = envelope.attempts + 1
        level = _retry_level(attempts)
        log.warning("job %s: attempt %d failed, again in %d s: %s", envelope.job_id, attempts, level, error)
        self._later(held, replace(envelope, attempts=attempts), level)
        self._seen(Step.RETRIED, envelope, error=type(error).__name__)

    def _later(self, held: Deliveries, envelope: Envelope, seconds: int, lane: Lane | None = None) -> None:
        level = min(topology.RETRY_LEVELS_S, key=lambda s: abs(s - seconds))
        queue = topology.work_queue(_work_stage(envelope), envelope.model, lane or envelope.lane)
        self._publish(topology.retry(level, queue), envelope.seal(held[-1].message.body))
        self._ack(held)

    def _answer(self, envelope: Envelope, result: JobResult) -> None:
        if envelope.reply_to:
            self._publish(topology.reply(envelope.reply_to), envelope.seal(codec.encode(result)))
        self._seen(_STEPS[result.state], envelope, **_facts(result))

    def _publish(self, to: Address, message: Message) -> None:
        while True:
            try:
                return self._broker.publish(to, message, timeout_s=None)
            except NoQueue:  # somebody deleted a queue of ours
                log.warning("no queue for %s: declaring the topology again", to.key)
                self._broker.declare(self._models)
                _pause()
            except BrokerUnavailable as error:  # refused by a full queue, or the broker object was closed
                if not self._broker.connected:
                    raise
                log.warning("the broker refused a message for %s, trying again: %s", to.key, error)
                _pause()

    def _ack(self, held: Deliveries) -> None:
        while held:
            held.pop().ack()

    def _seen(self, step: Step, envelope: Envelope, **facts: Any) -> None:
        identity = {"batch_id": envelope.batch_id, "stage": envelope.stage, "run": envelope.run, "lane": envelope.lane}
        identity["item_id"] = envelope.item_id
        self._observe(Moment(step, envelope.job_id, envelope.model, identity | facts))


_STEPS: dict[State, Step] = {
    "succeeded": Step.REPLIED,
    "failed": Step.FAILED,
    "cancelled": Step.CANCELLED,
    "expired": Step.EXPIRED,
}


def _facts(result: JobResult) -> dict[str, Any]:
    facts: dict[str, Any] = {"state": result.state, "total_s": result.decode.total_s}
    return facts | ({"error": result.error.kind} if result.error else {})


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
    """Seconds until the next attempt. The first comes soon, since most faults are short.

    From the second on half of the jobs wait one level longer: what failed together shall not come back together.
    (A spread within a level would need a TTL for each message, and a quorum queue expires only its head.)
    """
    levels = topology.RETRY_LEVELS_S
    at = min(attempts, len(levels)) - 1
    return random.choice(levels[at : at + 2]) if at else levels[0]


def _dead_letter(delivery: Delivery, envelope: Envelope, problem: JobError) -> Message:
    sealed = envelope.seal(delivery.message.body)
    why = {"kvasir-error": problem.kind, "kvasir-error-message": problem.message, "kvasir-from": delivery.queue}
    headers = {**sealed.headers, **why, "kvasir-failed-at": int(time.time())}
    return Message(sealed.body, sealed.message_id, sealed.correlation_id, sealed.reply_to, headers)


def _work_stage(envelope: Envelope) -> topology.WorkStage:
    return "decode" if envelope.stage == "decode" else "prefill"


def _sentence(error: BaseException) -> str:
    text = str(error) if isinstance(error, KvasirError) else f"bug: {type(error).__name__}: {error}"
    # A library's text may hold half a character, which no message could carry.
    return text.encode(errors="replace")[: MAX_ERROR_BYTES - 8].decode(errors="ignore") or type(error).__name__


def _pause() -> None:
    time.sleep(random.uniform(0.2, 1.0))


def submit_message(job: PrefillJob) -> tuple[Address, Message]:
    """Where and how a new job is published."""
    return topology.work("prefill", job.model, job.lane), of_job(job).seal(codec.encode(job))
