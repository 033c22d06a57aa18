"""The control exchange: best-effort broadcasts to every worker. Losing one costs time and changes nothing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import msgpack

from infra import topology
from infra.broker import Address, Broker, Message


def ring(broker: Broker, queue: str) -> None:
    """Say that `queue` has something for whoever is free, so that its workers need not poll it often."""
    _send(broker, {"bell": queue})


def announce_cancel(broker: Broker, batch_id: str) -> None:
    """Ask every worker to stop what it runs of this batch."""
    _send(broker, {"cancel": batch_id})


class ControlListener:
    """Receives broadcasts on a private queue; `poll` hands each to its handler, in the caller's thread."""

    def __init__(
        self, broker: Broker, name: str, on_bell: Callable[[str], None], on_cancel: Callable[[str], None]
    ) -> None:
        queue = broker.open_private_queue(f"control.{name}", topology.CONTROL)
        self._consumer = broker.consume(queue, prefetch=100)
        self._handlers = {"bell": on_bell, "cancel": on_cancel}

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
        content = msgpack.unpackb(body)
    except Exception:  # noqa: BLE001  anybody may publish here; nonsense is ignored
        return {}
    return content if isinstance(content, dict) else {}
