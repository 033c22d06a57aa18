"""A job's identity and counters in AMQP properties and headers, and a worker's attempt at a job.

They are kept outside the body for two reasons: a job whose body can't be read still gets its failed result, and the
counters survive when a message is published again. Most counters start again at 0 when a job changes its stage.
"""

import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Generic, Literal, TypeVar

from infra.broker import topology, trace
from infra.broker.base import Address, Delivery, Header, Message
from messages import checks, codec
from messages.change import replace_fields
from messages.errors import InvalidMessage
from messages.jobs import DecodeJob, Lane, PrefillJob
from messages.lifecycle import Event, Step
from messages.workers import WorkerStage

J = TypeVar("J", PrefillJob, DecodeJob)
StopReason = Literal["", "cancelled", "expired", "suspect", "not now"]


@dataclass(frozen=True, slots=True)
class Envelope:
    """Which job a message belongs to, and what has happened to the job so far."""

    job_id: str
    batch_id: str
    item_id: str
    model: str
    stage: WorkerStage
    run: int = 1
    lane: Lane = "bulk"
    reply_to: str = ""
    # transient errors at this stage so far
    attempts: int = 0
    # KV transfers that failed so far
    kv_transfers: int = 0
    # How often this run of the job came back to its queue at this stage because a connection was lost.
    returns: int = 0
    traceparent: str = ""  # the trace header, which is passed on unchanged; "" if the job has none
    version: int = codec.VERSION  # version of the job's message; the answer gets the same version
    turn: int = 0  # index of the job's queue among the queues of its lane; 0: the first queue

    def seal(self, body: bytes) -> Message:
        """Return a message with this identity.

        Counters at 0 and the lane `bulk` are left out, because each header costs the broker about 2 µs. A reader takes
        them as 0 and `bulk`.
        """
        headers: dict[str, Header] = {
            "kvasir-item": self.item_id,
            "kvasir-model": self.model,
            "kvasir-stage": self.stage,
            "kvasir-run": self.run,
        }
        if self.lane != "bulk":
            headers["kvasir-lane"] = self.lane
        if self.turn:
            headers["kvasir-turn"] = self.turn
        if self.attempts:
            headers["kvasir-attempts"] = self.attempts
        if self.kv_transfers:
            headers["kvasir-kv-transfers"] = self.kv_transfers
        if self.returns:
            headers["kvasir-returns"] = self.returns
        if self.traceparent:
            headers[trace.HEADER] = self.traceparent
        return Message(body, self.job_id, self.batch_id, self.reply_to, headers)

    def event(self, step: Step, **facts: Any) -> Event:
        """Return an event of this job, with the job's identity and these facts."""
        identity = {"batch_id": self.batch_id, "stage": self.stage, "run": self.run, "lane": self.lane}
        context = {trace.HEADER: self.traceparent} if self.traceparent else {}
        return Event(step, self.job_id, self.model, {**identity, **context, "item_id": self.item_id, **facts})

    def for_stage(self, stage: WorkerStage) -> "Envelope":
        """Return the envelope of the same job at another stage.

        Its counters start again, except that of failed KV transfers.
        """
        return replace_fields(self, stage=stage, attempts=0, returns=0)


def submit_message(job: PrefillJob, turn: int = 0) -> tuple[Address, Message]:
    """Return the address and the message that submit a new job."""
    envelope = Envelope(
        job.job_id,
        job.batch_id,
        job.item_id,
        job.model,
        "prefill",
        job.run,
        job.lane,
        job.reply_to,
        traceparent=trace.new_traceparent(job.job_id, job.run),
        turn=turn,
    )
    return topology.work("prefill", job.model, job.lane, turn), envelope.seal(codec.encode(job))


def open_envelope(delivery: Delivery, stage: WorkerStage, model: str) -> Envelope:
    """Return the envelope of a delivery.

    Never raises: missing or invalid values are replaced by `stage`, `model` or a default. The broker's own count of
    returns is added to ours.
    """
    message = delivery.message
    headers = message.headers
    return Envelope(
        job_id=_identifier(message.message_id),
        batch_id=_identifier(message.correlation_id),
        item_id=_identifier(headers.get("kvasir-item")),
        model=model,
        stage=stage,
        run=_count(headers.get("kvasir-run"), 1),
        lane="now" if headers.get("kvasir-lane") == "now" else "bulk",
        reply_to=message.reply_to,
        attempts=_count(headers.get("kvasir-attempts"), 0),
        kv_transfers=_count(headers.get("kvasir-kv-transfers"), 0),
        returns=_count(headers.get("kvasir-returns"), 0) + delivery.returns,
        traceparent=trace.valid_traceparent(headers.get(trace.HEADER)),
        version=codec.answer_version(message.body),
        turn=_count(headers.get("kvasir-turn"), 0) % topology.TURNS,
    )


@dataclass(eq=False)
class Attempt(Generic[J]):
    """One try at a job, from its delivery to the ack. Its fields are filled in as the job goes on.

    A worker may hold several deliveries of one job, because it adopts a redelivery of a job that it is running. They
    are settled together, and `deliveries` is empty after that.
    """

    deliveries: list[Delivery]  # unacked
    envelope: Envelope
    job: J = field(init=False)  # set when the message's body has been read
    stop: threading.Event = field(default_factory=threading.Event)
    why_stopped: StopReason = ""
    # True if the job's outcome is settled. Any further delivery of the job can then be acked at once.
    is_outcome_confirmed: bool = False
    # True if the job ended without an answer. Its own blocks are then no longer needed.
    has_ended_unanswered: bool = False

    @property
    def is_read(self) -> bool:
        """Whether its message has been read."""
        return hasattr(self, "job")

    def stop_for(self, reason: StopReason) -> None:
        """Stop the attempt. If it is stopped several times, the first reason counts."""
        self.why_stopped = self.why_stopped or reason
        self.stop.set()


def run_of(delivery: Delivery) -> tuple[str, int]:
    """Return the job id and the run of a delivery, read in the same way as by `open_envelope`."""
    message = delivery.message
    return _identifier(message.message_id), _count(message.headers.get("kvasir-run"), 1)


def is_redelivery(delivery: Delivery) -> bool:
    """Whether the broker took any copy of this run back from a worker."""
    return bool(delivery.returns or delivery.message.headers.get("kvasir-returns"))


def valid_or(default: str, check: Callable[[str, object], None], value: object) -> str:
    """Return what a message says, or `default` if the check refuses it."""
    try:
        check("", value)
    except InvalidMessage:
        return default
    return str(value)


def _identifier(value: object) -> str:
    return valid_or("unknown", checks.identifier, value)


def _count(value: object, default: int) -> int:
    sane = isinstance(value, int) and not isinstance(value, bool) and default <= value <= 1_000_000
    return value if sane and isinstance(value, int) else default
