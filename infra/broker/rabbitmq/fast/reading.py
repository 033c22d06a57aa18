"""Deliveries and confirms, straight from the bytes that the broker sent (AMQP 0-9-1, sections 2.3.5 and 4.2).

pika makes three frames of each delivery, copies what is left of its buffer after each, and asks a table of callbacks
about each: two thirds of the time that receiving a small message takes. Here what lies in the buffer as a whole and
looks as usual is read in one go. Everything else is left to pika, from its first frame on.
"""

from __future__ import annotations

import struct

from infra.broker.base import Header, Message
from infra.broker.rabbitmq.properties import PERSISTENT, is_ours
from infra.broker.rabbitmq.wire import Confirmer, Taker

_METHOD, _HEADER, _BODY, _END = 1, 2, 3, 0xCE
_DELIVER, _ACK = b"\x00\x3c\x00\x3c", b"\x00\x3c\x00\x50"
_FRAME_START = 7  # bytes before its payload

_CONTENT_TYPE, _HEADERS, _DELIVERY_MODE = 1 << 15, 1 << 13, 1 << 12
_CORRELATION_ID, _REPLY_TO, _MESSAGE_ID, _TIMESTAMP, _TYPE = 1 << 10, 1 << 9, 1 << 7, 1 << 6, 1 << 5
_USUAL = _CONTENT_TYPE | _HEADERS | _DELIVERY_MODE | _CORRELATION_ID | _REPLY_TO | _MESSAGE_ID | _TIMESTAMP | _TYPE

_frame = struct.Struct(">BHI").unpack_from  # type, channel, bytes of the payload
_tag = struct.Struct(">QB").unpack_from  # delivery tag, one bit
_content = struct.Struct(">QH").unpack_from  # bytes of the body, property flags
_u32 = struct.Struct(">I").unpack_from
_i32 = struct.Struct(">i").unpack_from
_i64 = struct.Struct(">q").unpack_from


class _Unusual(Exception):
    """Not for us: pika reads it."""


class FrameReader:
    """Of one connection, on its IO thread. Who is in neither table (see `Wire`) is served by pika."""

    def __init__(self, takers: dict[tuple[int, bytes], Taker], confirmers: dict[int, Confirmer]) -> None:
        self._takers = takers
        self._confirmers = confirmers

    def read(self, data: bytes) -> int:
        """Hand on whatever of the start of `data` is usual and complete; returns how many bytes that was."""
        at = 0
        try:
            while True:
                at = self._read_next(data, at)
        except (_Unusual, struct.error, IndexError, UnicodeDecodeError):  # or cut off: the rest is to come
            return at

    def _read_next(self, data: bytes, at: int) -> int:
        """Read what begins at `at`; returns where it ends."""
        kind, channel, size = _frame(data, at)
        start = at + _FRAME_START
        end = _end(data, start, size)
        method = data[start : start + 4]
        if kind != _METHOD:
            raise _Unusual
        if method == _DELIVER:
            return self._delivery(data, channel, start + 4, end)
        if method == _ACK and channel in self._confirmers:
            tag, multiple = _tag(data, start + 4)
            self._confirmers[channel](tag, bool(multiple))
            return end
        raise _Unusual

    def _delivery(self, data: bytes, channel: int, at: int, end: int) -> int:
        name_end = at + 1 + data[at]
        taker = self._takers.get((channel, data[at + 1 : name_end]))
        if taker is None:
            raise _Unusual
        tag, redelivered = _tag(data, name_end)
        head, head_end = _payload(data, end, _HEADER, channel)
        body_bytes, flags = _content(data, head + 4)  # class and weight come first
        if flags & ~_USUAL:
            raise _Unusual
        body, body_end = _payload(data, head_end, _BODY, channel) if body_bytes else (head_end, head_end)
        if body_bytes and body + body_bytes + 1 != body_end:  # the first of several
            raise _Unusual
        message, count = _message(data, head + 14, flags, data[body : body + body_bytes])
        taker(tag, message, int(bool(redelivered)) if count is None else count)
        return body_end


def _end(data: bytes, start: int, size: int) -> int:
    """Where the frame ends whose payload is `size` bytes from `start` on."""
    if data[start + size] != _END:
        raise _Unusual
    return start + size + 1


def _payload(data: bytes, at: int, kind: int, channel: int) -> tuple[int, int]:
    """Where the payload of the frame at `at` begins, and where the frame ends."""
    frame_kind, on, size = _frame(data, at)
    if frame_kind != kind or on != channel:
        raise _Unusual
    return at + _FRAME_START, _end(data, at + _FRAME_START, size)


def _message(data: bytes, at: int, flags: int, body: bytes) -> tuple[Message, int | None]:
    """The message, and the broker's count of returns if it sent one. Properties follow in the order of their flags."""
    headers: dict[str, Header] = {}
    count, persistent = None, False
    correlation_id = reply_to = message_id = ""
    if flags & _CONTENT_TYPE:
        at += 1 + data[at]
    if flags & _HEADERS:
        headers, count, at = _table(data, at)
    if flags & _DELIVERY_MODE:
        persistent = data[at] == PERSISTENT
        at += 1
    if flags & _CORRELATION_ID:
        correlation_id, at = _short(data, at)
    if flags & _REPLY_TO:
        reply_to, at = _short(data, at)
    if flags & _MESSAGE_ID:
        message_id, at = _short(data, at)
    return Message(body, message_id, correlation_id, reply_to, headers, persistent), count


def _table(data: bytes, at: int) -> tuple[dict[str, Header], int | None, int]:
    """Texts and whole numbers that are ours, the count of returns, and where the table ends."""
    end = at + 4 + _u32(data, at)[0]
    at += 4
    headers: dict[str, Header] = {}
    count: int | None = None
    while at < end:
        name, at = _short(data, at)
        value, at = _value(data, at)
        if name == "x-delivery-count" and isinstance(value, int):
            count = value
        if is_ours(name):
            headers[name] = value
    if at != end:
        raise _Unusual
    return headers, count, end


def _value(data: bytes, at: int) -> tuple[Header, int]:
    kind = data[at]
    if kind == 0x53:  # S, a text
        start = at + 5
        end = start + _u32(data, at + 1)[0]
        if end > len(data):
            raise _Unusual
        return data[start:end].decode(), end
    if kind == 0x6C:  # l
        return _i64(data, at + 1)[0], at + 9
    if kind == 0x49:  # I
        return _i32(data, at + 1)[0], at + 5
    raise _Unusual


def _short(data: bytes, at: int) -> tuple[str, int]:
    start = at + 1
    end = start + data[at]
    return data[start:end].decode(), end
