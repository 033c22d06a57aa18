"""A job's life as data.

    submitted ─► prefill queue ─► prefilling ─► KV stored ─► decode queue ─► decoding ─► replied ─► journaled
                      ▲   │            │                          ▲   │            │
                      │   └─ retry ◄───┤ transient                │   └─ retry ◄───┤ transient
                      └────────────────┼──────────────── KV cache gone ────────────┤
                                       └─► dead letter + failed result ◄───────────┘

Rules:
- The table below is complete: a step that is not in it is a bug.
- It describes one copy of one run. Crashes make copies (a redelivery, at worst a duplicate), so a *set* of observed
  steps may branch; each branch obeys the table, and the journal keeps one line per (job_id, run).
- A copy that was delivered again after its run was ANSWERED is replied to from the decode queue, without decoding.
- REDELIVERED may happen wherever a worker holds the delivery: the broker takes it back to the queue it came from.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Position(StrEnum):
    """The place of a job in its life."""

    NEW = "new"
    PREFILL_QUEUE = "prefill queue"
    PREFILLING = "prefilling"
    KV_STORED = "kv stored"
    DECODE_QUEUE = "decode queue"
    DECODING = "decoding"
    ANSWERED = "answered"  # result stored, not yet confirmed by the broker
    REPLIED = "replied"
    JOURNALED = "journaled"


class Step(StrEnum):
    """What can happen to a job. Also the names under which metrics and logs know it."""

    SUBMITTED = "submitted"
    PREFILL_STARTED = "prefill_started"
    KV_STORED = "kv_stored"
    PASSED_ON = "passed_on"  # decode job published and confirmed
    STOLEN = "stolen"  # taken from its queue by a decode worker of another model
    DECODE_STARTED = "decode_started"
    KV_CHECKED = "kv_checked"  # compared with the decoder's own prefill
    FIRST_TOKEN = "first_token"
    ANSWERED = "answered"
    REPLIED = "replied"
    JOURNALED = "journaled"
    RETRIED = "retried"
    KV_GONE = "kv_gone"
    REDELIVERED = "redelivered"
    ISOLATED = "isolated"  # moved to the suspects queue
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"


_P, _S = Position, Step
_ENDINGS: dict[Step, Position] = {_S.FAILED: _P.REPLIED, _S.CANCELLED: _P.REPLIED, _S.EXPIRED: _P.REPLIED}

TABLE: Mapping[Position, Mapping[Step, Position]] = {
    _P.NEW: {_S.SUBMITTED: _P.PREFILL_QUEUE, **_ENDINGS},
    _P.PREFILL_QUEUE: {_S.PREFILL_STARTED: _P.PREFILLING, _S.ISOLATED: _P.PREFILL_QUEUE, **_ENDINGS},
    _P.PREFILLING: {
        _S.KV_STORED: _P.KV_STORED,
        _S.PASSED_ON: _P.DECODE_QUEUE,  # there is no KV cache to transfer
        _S.RETRIED: _P.PREFILL_QUEUE,
        _S.REDELIVERED: _P.PREFILL_QUEUE,
        **_ENDINGS,
    },
    _P.KV_STORED: {
        _S.PASSED_ON: _P.DECODE_QUEUE,
        _S.RETRIED: _P.PREFILL_QUEUE,
        _S.REDELIVERED: _P.PREFILL_QUEUE,
        **_ENDINGS,
    },
    _P.DECODE_QUEUE: {
        _S.STOLEN: _P.DECODE_QUEUE,
        _S.DECODE_STARTED: _P.DECODING,
        _S.ISOLATED: _P.DECODE_QUEUE,
        **_ENDINGS,
    },
    _P.DECODING: {
        _S.KV_CHECKED: _P.DECODING,
        _S.FIRST_TOKEN: _P.DECODING,
        _S.ANSWERED: _P.ANSWERED,
        _S.KV_GONE: _P.PREFILL_QUEUE,
        _S.RETRIED: _P.DECODE_QUEUE,
        _S.REDELIVERED: _P.DECODE_QUEUE,
        **_ENDINGS,
    },
    _P.ANSWERED: {_S.REPLIED: _P.REPLIED, _S.REDELIVERED: _P.DECODE_QUEUE, **_ENDINGS},
    _P.REPLIED: {_S.JOURNALED: _P.JOURNALED},
    _P.JOURNALED: {},
}


@dataclass(frozen=True, slots=True)
class Event:
    """One observed step of one job, with what was known then (seconds, bytes, tokens: named with their unit)."""

    step: Step
    job_id: str
    model: str
    facts: Mapping[str, Any] = field(default_factory=dict)
