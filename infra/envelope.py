"""A job's identity and its counters, in AMQP properties and headers.

They are kept outside the body so that even a message nobody can read gets its failed result, and so that counters
survive re-publishing unchanged.
"""

from __future__ import annotations

from dataclasses import dataclass

from infra import trace
from infra.broker import Delivery, Header, Message
from messages import checks, codec
from messages.change import changed
from messages.errors import InvalidMessage
from messages.jobs import DecodeJob, Lane, PrefillJob, Stage

_NOT_GIVEN = "unknown"


@dataclass(frozen=True, slots=True)
class Envelope:
    """Whose message this is, and what has happened to it so far."""

    job_id: str
    batch_id: str
    item_id: str
    model: str
    stage: Stage
    run: int = 1
    lane: Lane = "bulk"
    reply_to: str = ""
    attempts: int = 0  # transient errors met so far
    hand_overs: int = 0  # hand-overs of a KV cache that failed so far
    returns: int = 0  # times the broker took it back, over all copies of this run
    traceparent: str = ""  # passed on unchanged; "": none

    def seal(self, body: bytes) -> Message:
        """A message with this identity.

        A counter at 0 and the usual lane are left out, and read as such: each header costs the broker about 2 µs.
        """
        headers: dict[str, Header] = {
            "kvasir-item": self.item_id,
            "kvasir-model": self.model,
            "kvasir-stage": self.stage,
            "kvasir-run": self.run,
        }
        if self.lane != "bulk":
            headers["kvasir-lane"] = self.lane
        if self.attempts:
            headers["kvasir-attempts"] = self.attempts
        if self.hand_overs:
            headers["kvasir-hand-overs"] = self.hand_overs
        if self.returns:
            headers["kvasir-returns"] = self.returns
        if self.traceparent:
            headers[trace.HEADER] = self.traceparent
        return Message(body, self.job_id, self.batch_id, self.reply_to, headers)

    def at(self, stage: Stage, attempts: int = 0, hand_overs: int | None = None, returns: int = 0) -> Envelope:
        """The same job at another stage: counters start anew, except those given and the failed hand-overs."""
        kept = self.hand_overs if hand_overs is None else hand_overs
        return changed(self, stage=stage, attempts=attempts, hand_overs=kept, returns=returns)


def of_job(job: PrefillJob | DecodeJob) -> Envelope:
    """The envelope of a new message for this job."""
    stage: Stage = "prefill" if isinstance(job, PrefillJob) else "decode"
    inner = job if isinstance(job, PrefillJob) else job.job
    return Envelope(
        inner.job_id,
        inner.batch_id,
        inner.item_id,
        inner.model,
        stage,
        inner.run,
        inner.lane,
        inner.reply_to,
        traceparent=trace.new_traceparent(inner.job_id, inner.run),
    )


def open_envelope(delivery: Delivery, stage: Stage, model: str) -> Envelope:
    """The envelope of a delivery. Never raises: what is missing or absurd is replaced by `stage`, `model` or a default.

    The broker's own count of returns is added to ours.
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
        hand_overs=_count(headers.get("kvasir-hand-overs"), 0),
        returns=_count(headers.get("kvasir-returns"), 0) + delivery.returns,
        traceparent=trace.valid_traceparent(headers.get(trace.HEADER)),
    )


def came_back(delivery: Delivery) -> bool:
    """Whether the broker took this run back from somebody, this copy of it or an earlier one."""
    return bool(delivery.returns or delivery.message.headers.get("kvasir-returns"))


def read_job(delivery: Delivery, kind: type[codec.M]) -> codec.M:
    """The message in a delivery. Raises InvalidMessage or NewerMessage."""
    return codec.decode(delivery.message.body, kind)


def _identifier(value: object) -> str:
    try:
        checks.identifier("id", value)
    except InvalidMessage:
        return _NOT_GIVEN
    return str(value)


def _count(value: object, default: int) -> int:
    sane = isinstance(value, int) and not isinstance(value, bool) and default <= value <= 1_000_000
    return value if sane and isinstance(value, int) else default
