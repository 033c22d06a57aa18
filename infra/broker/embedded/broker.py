"""The Broker contract in this process, with RabbitMQ's topology and settlement. Nothing outlives the process.

server = EmbeddedServer()
producer, worker = EmbeddedBroker(server), EmbeddedBroker(server)
"""

import threading
from collections.abc import Callable, Iterable, Sequence

from infra.broker import topology
from infra.broker.base import Address, Broker, BufferedConsumer, Consumer, Delivery, Depth, Message
from infra.broker.embedded.server import Copy, EmbeddedQueue, EmbeddedServer
from messages.errors import BatchError, BrokerUnavailable, NoQueue

__all__ = ["EmbeddedBroker", "EmbeddedServer"]


class EmbeddedDelivery:
    """A `Delivery` from the embedded server."""

    __slots__ = ("_broker", "_is_settled", "_on_ack", "copy", "is_lost", "message", "queue", "returns")

    def __init__(self, broker: "EmbeddedBroker", queue: EmbeddedQueue, copy: Copy, on_ack: Callable[[], None]) -> None:
        self.queue = queue.name
        self.copy = copy
        self.message = copy.message
        # A quorum queue counts how often a message came back. A classic queue only records that it came back.
        self.returns = copy.returns if queue.arguments.get("x-queue-type") == "quorum" else min(copy.returns, 1)
        self.is_lost = False
        self._on_ack = on_ack
        self._broker = broker
        self._is_settled = False

    def lose(self) -> None:
        """Mark the delivery as lost, because its channel is gone."""
        self.is_lost = not self._is_settled

    def ack(self) -> bool:
        """See `Delivery`."""
        with self._broker.server.lock:
            if not self._is_settled and not self.is_lost:
                self._is_settled = True
                self._broker.unacked.discard(self)
                self._on_ack()
            return not self.is_lost


class EmbeddedConsumer(BufferedConsumer[EmbeddedDelivery]):
    """A `Consumer` on the embedded server."""

    def __init__(self, broker: "EmbeddedBroker", queue: str, prefetch: int, exclusive: bool) -> None:
        super().__init__(queue, prefetch, exclusive, threading.Condition(broker.server.lock))
        self.flowing = True
        self._broker = broker
        self._unacked: set[EmbeddedDelivery] = set()

    @property
    def has_capacity(self) -> bool:
        """Whether the server may give it another message."""
        return self.flowing and len(self._unacked) < self._prefetch

    def widen(self, prefetch: int) -> None:
        """See `Consumer`."""
        with self._condition:
            self._prefetch = prefetch
            self._broker.server.dispatch(self.queue)

    def pause(self) -> list[Delivery]:
        """See `Consumer`."""
        with self._condition:
            self.flowing = False
            deliveries: list[Delivery] = list(self._buffer)
            self._buffer.clear()
            return deliveries

    def resume(self) -> None:
        """See `Consumer`."""
        with self._condition:
            self.flowing = not self._closed
            self._broker.server.dispatch(self.queue)

    def close(self) -> list[Delivery]:
        """See `Consumer`."""
        with self._condition:
            self._closed = True
            self._broker.forget(self)
            self._condition.notify_all()
            return self.pause()

    def deliver(self, copy: Copy) -> None:
        """Put a message into the buffer. The server calls this under its lock."""
        server = self._broker.server

        def acked() -> None:
            self._unacked.discard(delivery)
            server.dispatch(self.queue)

        delivery = EmbeddedDelivery(self._broker, server.queue(self.queue), copy, acked)
        self._broker.unacked.add(delivery)
        self._unacked.add(delivery)
        self._buffer.append(delivery)
        self._condition.notify()

    def lose(self) -> None:
        """Forget all deliveries, because the channel is gone. The server delivers them again."""
        self._unacked.clear()
        self._buffer.clear()
        self._condition.notify_all()

    def _is_over(self) -> bool:
        return self._closed or self._broker.closed


class EmbeddedBroker(Broker):
    """A client of an `EmbeddedServer`. It creates one if none is given."""

    def __init__(self, server: EmbeddedServer | None = None) -> None:
        self.server = server or EmbeddedServer()
        self.closed = False
        self.unacked: set[EmbeddedDelivery] = set()
        self._consumers: list[EmbeddedConsumer] = []

    def declare(self, models: Sequence[str]) -> list[str]:
        """See `Broker`."""
        for exchange in topology.exchanges():
            self.server.declare_exchange(exchange)
        for queue in topology.queues(models):
            self.server.declare_queue(queue)
        return []

    def publish(self, to: Address, message: Message, timeout_s: float | None = 30.0) -> None:
        """See `Broker`."""
        self._check_open()
        if not self.server.publish(to, message):
            raise NoQueue(
                f"message {message.message_id or '(no id)'} to {to.exchange}/{to.key}: the broker has no queue for "
                "the message. Check that the model is in the configuration of every machine."
            )

    def publish_many(
        self,
        sends: Iterable[tuple[Address, Message]],
        on_confirmed: Callable[[Message], None] = lambda _message: None,
        window: int = 1000,
        timeout_s: float | None = 30.0,
    ) -> int:
        """See `Broker`."""
        count = 0
        for to, message in sends:
            self.publish(to, message)
            count += 1
            on_confirmed(message)
        return count

    def publish_lossy(self, to: Address, message: Message) -> None:
        """See `Broker`."""
        if not self.closed:
            self.server.publish(to, message)

    def consume(self, queue: str, prefetch: int, exclusive: bool = False) -> Consumer:
        """See `Broker`."""
        with self.server.lock:
            self._check_open()
            self._check_readable(self.server.queue(queue))
            readers = self.server.readers(queue)
            if readers and (exclusive or readers[0].exclusive):
                raise BatchError(f"can't read queue {queue}: another process reads this queue")
            consumer = EmbeddedConsumer(self, queue, prefetch, exclusive)
            self._consumers.append(consumer)
            readers.append(consumer)
            self.server.dispatch(queue)
        return consumer

    def get(self, queue: str) -> Delivery | None:
        """See `Broker`."""
        with self.server.lock:
            self._check_open()
            embedded_queue = self.server.queue(queue)
            self._check_readable(embedded_queue)
            copy = self.server.dequeue(embedded_queue)
            if copy is None:
                return None
            delivery = EmbeddedDelivery(self, embedded_queue, copy, lambda: None)
            self.unacked.add(delivery)
            return delivery

    def depths(self, *queues: str) -> dict[str, Depth | None]:
        """See `Broker`."""
        self._check_open()
        return {queue: self.server.depth(queue) for queue in queues}

    def open_reply_queue(self, batch_id: str) -> str:
        """See `Broker`."""
        self._check_open()
        name = topology.reply_queue(batch_id)
        self.server.declare_queue(topology.reply_spec(name))
        return name

    def open_private_queue(self, name: str, exchange: str) -> str:
        """See `Broker`."""
        self._check_open()
        self.server.declare_queue(topology.QueueSpec(name, exchange, name, {"x-queue-type": "classic"}), owner=self)
        return name

    def delete_queue(self, queue: str) -> None:
        """See `Broker`."""
        self._check_open()
        with self.server.lock:
            if queue not in self.server.private_queues(self) and not queue.startswith(topology.reply_queue("")):
                raise ValueError(f"{queue} can't be deleted: it is not a reply queue or this process's private queue")
            self.server.delete_queue(queue)

    @property
    def is_connected(self) -> bool:
        """See `Broker`."""
        return not self.closed

    def close(self) -> None:
        """See `Broker`."""
        with self.server.lock:
            if self.closed:
                return
            self.closed = True
            for consumer in list(self._consumers):
                consumer.lose()
                self.forget(consumer)
            for name in self.server.private_queues(self):
                self.server.delete_queue(name)
            self._lose_all()

    def forget(self, consumer: EmbeddedConsumer) -> None:
        """Remove a consumer from its queue. Its deliveries can still be acked."""
        consumer.flowing = False
        if consumer in self._consumers:
            self._consumers.remove(consumer)
            self.server.readers(consumer.queue).remove(consumer)

    def _lose_all(self) -> None:
        deliveries = list(self.unacked)
        self.unacked.clear()
        for delivery in deliveries:
            delivery.lose()
        for consumer in self._consumers:
            consumer.lose()
        self.server.give_back((delivery.queue, delivery.copy) for delivery in deliveries)
        for name in self.server.private_queues(self):
            # RabbitMQ deletes a private queue when its connection closes, so the next queue with this name starts
            # empty.
            self.server.queue(name).ready.clear()

    def _check_readable(self, queue: EmbeddedQueue) -> None:
        if queue.owner not in (None, self):
            raise BatchError(f"can't read queue {queue.name}: another process reads this queue")

    def _check_open(self) -> None:
        if self.closed:
            raise BrokerUnavailable("this process has closed the connection to the broker")
