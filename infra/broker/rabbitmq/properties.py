"""Translates AMQP properties into messages. Headers of the broker and values that can't be read are left out."""

import struct
import time
from collections.abc import Mapping
from typing import Any

from pika import spec  # type: ignore[import-untyped]

from infra.broker.base import BROKERS_OWN, Header, Message

CONTENT_TYPE = "application/msgpack"
PERSISTENT, TRANSIENT = 2, 1

# Up to RabbitMQ 4.2, x-delivery-count is how often a quorum queue took a message back. Since 4.3 it counts only
# failures, and x-acquired-count counts all returns (rabbitmq.com/docs/quorum-queues, "Poison Message Handling").
RETURN_COUNTS = ("x-acquired-count", "x-delivery-count")
_DEATH_SUMMARY = ("x-first-death-reason", "x-first-death-queue")


def to_message(properties: spec.BasicProperties, body: bytes) -> Message:
    """Return the message that was published. If it was dead-lettered, two headers about its first death are kept."""
    return Message(
        body=body,
        message_id=_text(properties.message_id),
        correlation_id=_text(properties.correlation_id),
        reply_to=_text(properties.reply_to),
        headers=_readable(properties.headers),
        persistent=properties.delivery_mode == PERSISTENT,
    )


def returns(properties: spec.BasicProperties, redelivered: bool) -> int:
    """Return how often the broker took this copy back. A classic queue only knows whether it did: 0 or 1."""
    headers = properties.headers or {}
    counts = [headers[name] for name in RETURN_COUNTS if isinstance(headers.get(name), int)]
    return max(counts, default=int(redelivered))


def to_properties(message: Message, kind: str) -> spec.BasicProperties:
    """Return the AMQP properties of a message. `kind` becomes the property `type`.

    The properties identify the job even if the body can't be read.
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
    """Return a content header frame with an empty headers table, for a table that pika can't decode."""
    at = spec.FRAME_HEADER_SIZE + 12  # the flags begin here; the properties follow in the order of their flags
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

    Such headers must not be sent back: RabbitMQ up to 3.13 reads its own x-death and silently drops messages whose path
    is a cycle.
    """
    return name.startswith(BROKERS_OWN)


def is_ours(name: str) -> bool:
    """Whether a header belongs to the message: one of ours, or one of the two about its first death."""
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
    """Return a header as str, int or float; None if it has another type."""
    if isinstance(value, dict) and list(value) == ["float"]:
        try:
            return float(value["float"])
        except (TypeError, ValueError):
            return None
    if isinstance(value, bool):
        return None
    return int(value) if isinstance(value, int) else value if isinstance(value, str) else None


def _writable(value: Header) -> str | int | dict[str, str]:
    """Return a header's value for pika. A float becomes a small table, because pika reads AMQP floats as integers."""
    if isinstance(value, float):
        return {"float": repr(value)}
    return value if isinstance(value, str) else int(value)


def _text(value: object) -> str:
    """Return a short string. pika gives bytes if it is not UTF-8."""
    if isinstance(value, bytes):
        return value.decode(errors="replace")
    return value if isinstance(value, str) else ""
