"""A message as the frames that publish it, in one piece of bytes (AMQP 0-9-1, sections 2.3.5 and 4.2).

pika makes four objects of each message and asks each of their fields what it is: that took half of the time that
publishing a small message takes. Here the method frame is made once for each address.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Mapping
from functools import lru_cache

from infra.broker.base import Address, Header, Message
from infra.broker.rabbitmq.properties import CONTENT_TYPE, PERSISTENT, TRANSIENT, is_brokers

_METHOD, _HEADER, _BODY = 1, 2, 3
_END = b"\xce"
_BASIC, _PUBLISH = 60, 40
_MANDATORY = 1
_FRAME_BYTES = 8  # of each frame beyond its payload

# Which properties are there, in the order in which they follow.
_CONTENT_TYPE, _HEADERS, _DELIVERY_MODE = 1 << 15, 1 << 13, 1 << 12
_CORRELATION_ID, _REPLY_TO, _MESSAGE_ID, _TIMESTAMP, _TYPE = 1 << 10, 1 << 9, 1 << 7, 1 << 6, 1 << 5
_FLAGS = _CONTENT_TYPE | _HEADERS | _DELIVERY_MODE | _TIMESTAMP

_pack_frame = struct.Struct(">BHI").pack  # type, channel, bytes of the payload
_pack_content = struct.Struct(">HHQH").pack  # class, weight, bytes of the body, flags
_pack_u8 = struct.Struct("B").pack
_pack_u32 = struct.Struct(">I").pack
_pack_i64 = struct.Struct(">q").pack
_pack_u64 = struct.Struct(">Q").pack


def publication(channel: int, to: Address, message: Message, kind: str, frame_max: int, mandatory: bool) -> bytes:
    """basic.publish of a message on a channel. `kind`: its property `type`; `frame_max`: most bytes of one frame.

    Raises struct.error or UnicodeEncodeError for what AMQP can't say: a name of more than 255 bytes, a number of more
    than 64 bits, half a surrogate pair.
    """
    parts = [_method(channel, to.exchange, to.key, mandatory), _frame(_HEADER, channel, _header(message, kind))]
    max_payload = frame_max - _FRAME_BYTES
    if 0 < len(message.body) <= max_payload:
        parts.append(_frame(_BODY, channel, message.body))
    else:
        parts += (
            _frame(_BODY, channel, message.body[at : at + max_payload])
            for at in range(0, len(message.body), max_payload)
        )
    return b"".join(parts)


@lru_cache(maxsize=256)
def _method(channel: int, exchange: str, key: str, mandatory: bool) -> bytes:
    arguments = struct.pack(">HHH", _BASIC, _PUBLISH, 0) + _short(exchange) + _short(key)
    return _frame(_METHOD, channel, arguments + bytes([_MANDATORY if mandatory else 0]))


def _frame(kind: int, channel: int, payload: bytes) -> bytes:
    return _pack_frame(kind, channel, len(payload)) + payload + _END


def _header(message: Message, kind: str) -> bytes:
    """The properties say whose message it is, so that even an unreadable body can be answered."""
    flags = _FLAGS
    fields = [
        _common_short(CONTENT_TYPE),
        _table(message.headers),
        _pack_u8(PERSISTENT if message.persistent else TRANSIENT),
    ]
    if message.correlation_id:
        flags |= _CORRELATION_ID
        fields.append(_common_short(message.correlation_id))
    if message.reply_to:
        flags |= _REPLY_TO
        fields.append(_common_short(message.reply_to))
    if message.message_id:
        flags |= _MESSAGE_ID
        fields.append(_short(message.message_id))
    fields.append(_pack_u64(int(time.time())))
    if kind:
        flags |= _TYPE
        fields.append(_short(kind))
    return _pack_content(_BASIC, 0, len(message.body), flags) + b"".join(fields)


def _table(headers: Mapping[str, Header]) -> bytes:
    pairs = b"".join([_pair(name, value) for name, value in headers.items()])
    return _pack_u32(len(pairs)) + pairs


@lru_cache(maxsize=1024, typed=True)  # a batch's messages differ in few of them; typed, since 1 == 1.0
def _pair(name: str, value: Header) -> bytes:
    return b"" if is_brokers(name) else _short(name) + _value(value)


def _value(value: Header) -> bytes:
    """pika reads floats as whole numbers, so a float travels as a small table."""
    if isinstance(value, str):
        text_bytes = value.encode()
        return b"S" + _pack_u32(len(text_bytes)) + text_bytes
    if isinstance(value, float):
        return b"F" + _table({"float": repr(value)})
    return b"l" + _pack_i64(value)


def _short(text: str) -> bytes:
    text_bytes = text.encode()
    return _pack_u8(len(text_bytes)) + text_bytes


@lru_cache(maxsize=256)
def _common_short(text: str) -> bytes:
    """A short string that many messages have in common."""
    return _short(text)
