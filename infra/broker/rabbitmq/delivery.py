"""Deliveries, and the channels that hold them."""

import itertools
from collections import deque
from collections.abc import Callable, Iterable
from typing import Any

import pika.channel  # type: ignore[import-untyped]
from pika import spec

from infra.broker.base import Message
from infra.broker.rabbitmq.connection import Connection
from infra.broker.rabbitmq.properties import returns, to_message


class RabbitDelivery:
    """A `Delivery` from RabbitMQ."""

    __slots__ = ("_acked", "_holder", "_tag", "message", "queue", "returns")

    def __init__(self, queue: str, message: Message, returns: int, holder: "Holder", tag: int) -> None:
        self.queue = queue
        self.message = message
        self.returns = returns
        self._holder = holder
        self._tag = tag
        self._acked = False

    @property
    def is_lost(self) -> bool:
        """See `Delivery`."""
        return self._holder.is_lost and not self._acked

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
        self._acks: deque[int] = deque()  # any thread appends, the IO thread takes
        self._are_acks_due = False  # a task will send them
        self._open_tags: dict[int, None] = {}  # (IO) tags whose ack has not been sent, in order
        self.raw: pika.channel.Channel | None = None
        self.is_lost = False
        connection.holders.add(self)

    @property
    def unacked(self) -> int:
        """(IO) Deliveries whose ack has not been sent."""
        return len(self._open_tags)

    def hold(self, queue: str, tag: int, message: Message, returns: int) -> RabbitDelivery:
        """A delivery that came on this channel."""
        self._unacked.add(tag)
        self._open_tags[tag] = None
        return RabbitDelivery(queue, message, returns, self, tag)

    def hold_raw(self, queue: str, method: Any, properties: spec.BasicProperties, body: bytes) -> RabbitDelivery:
        """The same, as pika gives it."""
        count = returns(properties, method.redelivered)
        return self.hold(queue, method.delivery_tag, to_message(properties, body), count)

    def ack(self, tag: int) -> bool:
        """Hand the ack to the IO thread, once; False if the channel is gone."""
        if self.is_lost:
            return False
        try:
            self._unacked.remove(tag)  # atomic: of two threads that ack the same delivery one comes through
        except KeyError:
            return not self.is_lost
        self._acks.append(tag)
        if not self._are_acks_due:
            self._are_acks_due = True
            self._connection.submit(self._send_acks)
        return True

    def lose(self) -> None:
        """The channel is gone, and with it the right to ack."""
        self.is_lost = True
        self._open_tags.clear()
        self._unacked.clear()

    def close(self) -> None:
        """Close the channel; the broker takes back what is unacked."""
        if self.raw is not None and self.raw.is_open:
            self.raw.close()

    def _send_acks(self) -> None:
        self._are_acks_due = False  # before the look: whoever appends after it has another task sent
        tags = [self._acks.popleft() for _ in range(len(self._acks))]
        if tags and self.raw is not None and self.raw.is_open:
            for tag, multiple in acks(tags, self._open_tags):
                self.raw.basic_ack(tag, multiple)
            self._connection.acked()
            for tag in tags:
                self._open_tags.pop(tag, None)
            self._on_acked()


def acks(tags: Iterable[int], unacked: Iterable[int]) -> list[tuple[int, bool]]:
    """What acks `tags`, as few as there can be: a tag each, and whether it stands for all up to it.

    `unacked`: all of that channel, in order. One ack for many saves the broker more than us: to a quorum queue each is
    a log entry.
    """
    acked_tags = set(tags)
    run = list(itertools.takewhile(acked_tags.__contains__, unacked))
    singles = [(tag, False) for tag in sorted(acked_tags.difference(run))]
    return [(run[-1], True), *singles] if run else singles
