"""Deliveries, and the channels that hold them."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pika.channel  # type: ignore[import-untyped]
from pika import spec

from infra.broker import Message
from infra.rabbitmq.connection import Connection
from infra.rabbitmq.properties import returns, to_message


class RabbitDelivery:
    """A `Delivery` from RabbitMQ."""

    __slots__ = ("_acked", "_holder", "_tag", "message", "queue", "returns")

    def __init__(self, queue: str, message: Message, returns: int, holder: Holder, tag: int) -> None:
        self.queue = queue
        self.message = message
        self.returns = returns
        self._holder = holder
        self._tag = tag
        self._acked = False

    @property
    def lost(self) -> bool:
        """See `Delivery`."""
        return self._holder.lost and not self._acked

    def ack(self) -> bool:
        """See `Delivery`."""
        self._acked = self._acked or self._holder.ack(self._tag)
        return self._acked


class Holder:
    """A channel and its unacked deliveries. Acks come from any thread, all else happens on the IO thread."""

    def __init__(self, connection: Connection, on_acked: Callable[[], None]) -> None:
        self._connection = connection
        self._on_acked = on_acked
        self._unacked: set[int] = set()  # any thread
        self.held = 0  # (IO) deliveries whose ack has not been sent
        self.raw: pika.channel.Channel | None = None
        self.lost = False

    def hold(self, queue: str, method: Any, properties: spec.BasicProperties, body: bytes) -> RabbitDelivery:
        """A delivery that came on this channel."""
        self._unacked.add(method.delivery_tag)
        self.held += 1
        count = returns(properties, method.redelivered)
        return RabbitDelivery(queue, to_message(properties, body), count, self, method.delivery_tag)

    def ack(self, tag: int) -> bool:
        """Hand the ack to the IO thread, once; False if the channel is gone."""
        if self.lost:
            return False
        try:
            self._unacked.remove(tag)  # atomic: of two threads that ack the same delivery one comes through
        except KeyError:
            return not self.lost
        self._connection.submit(partial(self._ack, tag))
        return True

    def lose(self) -> None:
        """The channel is gone, and with it the right to ack."""
        self.lost = True
        self.held = 0
        self._unacked.clear()

    def close(self) -> None:
        """Close the channel; the broker takes back what is unacked."""
        if self.raw is not None and self.raw.is_open:
            self.raw.close()

    def _ack(self, tag: int) -> None:
        if self.raw is not None and self.raw.is_open:
            self.raw.basic_ack(tag)
            self._connection.acked()
            self.held -= 1
            self._on_acked()
