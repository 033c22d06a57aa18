"""The rules of `messages.lifecycle` as a table: where a job can be, and where each step leads from there."""

from collections.abc import Mapping
from enum import StrEnum

from messages.lifecycle import Step


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
