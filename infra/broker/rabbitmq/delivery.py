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
    """A channel and its unacked deliveries. Acks may come from any thread; everything else runs on the IO thread."""

    def __init__(self, connection: Connection, on_acked: Callable[[], None]) -> None:
        self._connection = connection
        self._on_acked = on_acked
        self._unacked: set[int] = set()  # used by any thread
        self._acks: deque[int] = deque()  # any thread appends tags, and the IO thread removes them
        self._are_acks_due = False  # True if the IO thread already has a task that sends the acks
        self._open_tags: dict[int, None] = {}  # (IO) tags whose acks have not been sent, in order
        self.raw: pika.channel.Channel | None = None
        self.is_lost = False
        connection.holders.add(self)

    @property
    def unacked(self) -> int:
        """(IO) The number of deliveries whose ack has not been sent."""
        return len(self._open_tags)

    def hold(self, queue: str, tag: int, message: Message, returns: int) -> RabbitDelivery:
        """Return a delivery for a message that came on this channel."""
        self._unacked.add(tag)
        self._open_tags[tag] = None
        return RabbitDelivery(queue, message, returns, self, tag)

    def hold_raw(self, queue: str, method: Any, properties: spec.BasicProperties, body: bytes) -> RabbitDelivery:
        """Return a delivery for a message in pika's form."""
        count = returns(properties, method.redelivered)
        return self.hold(queue, method.delivery_tag, to_message(properties, body), count)

    def ack(self, tag: int) -> bool:
        """Hand the ack to the IO thread, once. Returns False if the channel is gone."""
        if self.is_lost:
            return False
        try:
            self._unacked.remove(tag)  # atomic: if two threads ack the same delivery, only one gets past this line
        except KeyError:
            return not self.is_lost
        self._acks.append(tag)
        if not self._are_acks_due:
            self._are_acks_due = True
            self._connection.submit(self._send_acks)
        return True

    def lose(self) -> None:
        """Forget all deliveries, because the channel is gone and they can't be acked."""
        self.is_lost = True
        self._open_tags.clear()
        self._unacked.clear()

    def close(self) -> None:
        """Close the channel. The broker takes the unacked deliveries back."""
        if self.raw is not None and self.raw.is_open:
            self.raw.close()

    def _send_acks(self) -> None:
        # Clear this flag before reading the acks, so that an ack that is added afterwards submits a new task.
        self._are_acks_due = False
        tags = [self._acks.popleft() for _ in range(len(self._acks))]
        if tags and self.raw is not None and self.raw.is_open:
            for tag, multiple in acks(tags, self._open_tags):
                self.raw.basic_ack(tag, multiple)
            self._connection.acked()
            for tag in tags:
                self._open_tags.pop(tag, None)
            self._on_acked()


def acks(tags: Iterable[int], unacked: Iterable[int]) -> list[tuple[int, bool]]:
    """Return the fewest acks that cover `tags`: each is a tag, and whether it stands for all tags up to it.

    `unacked` are all unacked tags of the channel, in order. One ack for many tags saves the broker more work than us,
    because each ack to a quorum queue is a log entry.
    """
    acked_tags = set(tags)
    run = list(itertools.takewhile(acked_tags.__contains__, unacked))
    singles = [(tag, False) for tag in sorted(acked_tags.difference(run))]
    return [(run[-1], True), *singles] if run else singles
