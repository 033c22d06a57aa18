"""Turns AMQP properties into messages. Headers that the broker adds are removed, and unreadable ones are left out."""

import struct
import time
from collections.abc import Mapping
from typing import Any

from pika import spec  # type: ignore[import-untyped]

from infra.broker.base import BROKERS_OWN, Header, Message

CONTENT_TYPE = "application/msgpack"
PERSISTENT, TRANSIENT = 2, 1

# Up to 4.2 a quorum queue counts in x-delivery-count how often it took a message back. Since 4.3 that header only
# counts failures, and x-acquired-count counts all returns (rabbitmq.com/docs/quorum-queues, "Poison Message Handling").
RETURN_COUNTS = ("x-acquired-count", "x-delivery-count")
_DEATH_SUMMARY = ("x-first-death-reason", "x-first-death-queue")


def to_message(properties: spec.BasicProperties, body: bytes) -> Message:
    """The message as it was published, with the two headers that describe its first dead-lettering, if there was
    one."""
    return Message(
        body=body,
        message_id=_text(properties.message_id),
        correlation_id=_text(properties.correlation_id),
        reply_to=_text(properties.reply_to),
        headers=_readable(properties.headers),
        persistent=properties.delivery_mode == PERSISTENT,
    )


def returns(properties: spec.BasicProperties, redelivered: bool) -> int:
    """How often the broker took this copy back. Quorum queues count; classic ones only tell whether it happened."""
    headers = properties.headers or {}
    counts = [headers[name] for name in RETURN_COUNTS if isinstance(headers.get(name), int)]
    return max(counts, default=int(redelivered))


def to_properties(message: Message, kind: str) -> spec.BasicProperties:
    """The properties of a message. `kind` is the property `type`.

    They say whose message it is, so that even an unreadable body can be answered.
    """
    return spec.BasicProperties(
        content_type=CONTENT_TYPE,
        headers={name: _writable(value) for name, value in message.headers.items() if not is_brokers(name)},
        delivery_mode=PERSISTENT if message.persistent else TRANSIENT,
        correlation_id=message.correlation_id or None,
        reply_to=message.reply_to or None,
        message_id=message.message_id or None,
        timestamp=int(time.time()),
        type=kind or None,
    )


def without_headers(header_frame: bytes) -> bytes:
    """A content header's frame with an empty headers table, for a table that pika can't decode. Everything else is
    kept."""
    at = spec.FRAME_HEADER_SIZE + 12  # the flags come first, then fields in the order of their flags
    (flags,) = struct.unpack_from(">H", header_frame, at)
    at += 2
    for flag in (spec.BasicProperties.FLAG_CONTENT_TYPE, spec.BasicProperties.FLAG_CONTENT_ENCODING):
        if flags & flag:
            at += 1 + header_frame[at]
    if not flags & spec.BasicProperties.FLAG_HEADERS:
        return header_frame
    (length,) = struct.unpack_from(">I", header_frame, at)
    payload = header_frame[spec.FRAME_HEADER_SIZE : at] + bytes(4) + header_frame[at + 4 + length : -1]
    return header_frame[:3] + struct.pack(">I", len(payload)) + payload + header_frame[-1:]


def is_brokers(name: str) -> bool:
    """Whether a header is one that the broker writes.

    If such a header is sent back, RabbitMQ up to 3.13 reads its own x-death and silently drops messages as "cycles".
    """
    return name.startswith(BROKERS_OWN)


def is_ours(name: str) -> bool:
    """Whether a header belongs to the message: one of Kvasir's, or the summary of its first dead-lettering."""
    return not is_brokers(name) or name in _DEATH_SUMMARY


def _readable(headers: Mapping[Any, Any] | None) -> dict[str, Header]:
    readable_headers: dict[str, Header] = {}
    for name, value in (headers or {}).items():
        if not isinstance(name, str) or not is_ours(name):
            continue
        plain = _plain(value)
        if plain is not None:
            readable_headers[name] = plain
    return readable_headers


def _plain(value: Any) -> Header | None:
    """A header as str, int or float; None if it is something else."""
    if isinstance(value, dict) and list(value) == ["float"]:
        try:
            return float(value["float"])
        except (TypeError, ValueError):
            return None
    if isinstance(value, bool):
        return None
    return int(value) if isinstance(value, int) else value if isinstance(value, str) else None


def _writable(value: Header) -> str | int | dict[str, str]:
    """A value that pika can write: it reads floats as whole numbers, so a float travels as a small table."""
    if isinstance(value, float):
        return {"float": repr(value)}
    return value if isinstance(value, str) else int(value)


def _text(value: object) -> str:
    """A short string. pika returns bytes if it is not UTF-8."""
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return value if isinstance(value, str) else ""
