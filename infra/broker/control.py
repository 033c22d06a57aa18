"""The control exchange: best-effort broadcasts to every worker.

A lost broadcast costs time, but no result depends on it.
"""

from collections.abc import Callable, Mapping
from typing import Any

import msgpack

from infra.broker import topology
from infra.broker.base import Address, Broker, Message
from messages.codec import MAX_MESSAGE_BYTES, unpack
from messages.errors import InvalidMessage


def ring(broker: Broker, queue: str) -> None:
    """Tell the workers that `queue` has a message, so that they need not poll it often."""
    _send(broker, {"wakeup": queue})


def announce_cancel(broker: Broker, batch_id: str) -> None:
    """Ask every worker to stop the jobs of this batch."""
    _send(broker, {"cancel": batch_id})


def announce_pause(broker: Broker, worker: str, should_pause: bool) -> None:
    """Ask a worker to take no more jobs, or to take jobs again.

    `worker` is a worker's id, or the part of ids before a dot, which is the host: then all workers of that host are
    asked.
    """
    _send(broker, {"pause" if should_pause else "resume": worker})


class ControlListener:
    """Receives broadcasts on a private queue. `poll` calls the handler of each one, in the caller's thread."""

    def __init__(self, broker: Broker, name: str, handlers: Mapping[str, Callable[[str], None]]) -> None:
        """`handlers` has keys "wakeup" (called with a queue), "cancel" (a batch), "pause" and "resume" (a worker)."""
        queue = broker.open_private_queue(f"control.{name}", topology.CONTROL)
        self._consumer = broker.consume(queue, prefetch=100)
        self._handlers = handlers

    def poll(self, timeout_s: float) -> None:
        """Handle the next broadcast, waiting at most `timeout_s` for it."""
        delivery = self._consumer.receive(timeout_s)
        if delivery is None:
            return
        delivery.ack()
        for kind, value in _read(delivery.message.body).items():
            handler = self._handlers.get(kind)
            if handler and isinstance(value, str):
                handler(value)

    def close(self) -> None:
        """Stop listening."""
        self._consumer.close()


def _send(broker: Broker, content: dict[str, str]) -> None:
    broker.publish_lossy(Address(topology.CONTROL, ""), Message(msgpack.packb(content), persistent=False))


def _read(body: bytes) -> dict[str, Any]:
    try:
        content = unpack(body[:MAX_MESSAGE_BYTES])
    except InvalidMessage:  # any client can publish here, so a message that can't be read is ignored
        return {}
    return content if isinstance(content, dict) else {}
