"""The steps of a job's life.

submitted ─► prefill queue ─► prefilling ─► KV stored ─► decode queue ─► decoding ─► replied ─► journaled
                  ▲   │            │                          ▲   │            │
                  │   └─ retry ◄───┤ transient                │   └─ retry ◄───┤ transient
                  └────────────────┼──────────────── KV cache gone ────────────┤
                                   └─► dead letter + failed result ◄───────────┘

Rules:
- tests/support/lifecycle.py has the complete table of steps: a step that is not in it is a bug.
- It describes one copy of one run. Crashes make copies (a redelivery, at worst a duplicate), so a *set* of observed
  steps may branch; each branch obeys the table, and the journal keeps one line per (job_id, run).
- A copy that was delivered again after its run was ANSWERED is replied to from the decode queue, without decoding.
- REDELIVERED may happen wherever a worker holds the delivery: the broker takes it back to the queue it came from.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any


class Step(StrEnum):
    """What can happen to a job. Metrics and logs use the same names."""

    SUBMITTED = "submitted"
    PREFILL_STARTED = "prefill_started"
    KV_STORED = "kv_stored"
    PASSED_ON = "passed_on"  # the decode job was published, and the broker confirmed it
    STOLEN = "stolen"  # a decode worker of another model took the job from this model's queue
    DECODE_STARTED = "decode_started"
    KV_CHECKED = "kv_checked"  # the transferred KV cache was compared with the decoder's own prefill
    FIRST_TOKEN = "first_token"
    ANSWERED = "answered"
    REPLIED = "replied"
    JOURNALED = "journaled"
    RETRIED = "retried"
    KV_GONE = "kv_gone"
    REDELIVERED = "redelivered"
    ISOLATED = "isolated"  # the job was moved to the suspects queue
    FAILED = "failed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"


@dataclass(frozen=True, slots=True)
class Event:
    """One observed step of one job, with what was known at that time (each field's name states its unit)."""

    step: Step
    job_id: str
    model: str
    facts: Mapping[str, Any] = field(default_factory=dict)
