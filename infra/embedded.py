"""The Broker contract in this process: the same topology and endings as RabbitMQ, nothing outlives the process.

    server = EmbeddedServer()
    producer, worker = EmbeddedBroker(server), EmbeddedBroker(server)

One lock guards everything, and every change ends with handing ready messages to consumers that have room.
"""

from __future__ import annotations

import heapq
import itertools
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from infra import topology
from infra.broker import Address, Broker, Consumer, Delivery, Depth, Header, Message
from messages.errors import BatchError, BrokerUnavailable, NoQueue

# What RabbitMQ adds to a message and its publisher may not.
_BROKERS_OWN = ("x-death", "x-first-death-", "x-last-death-", "x-delivery-count")


@dataclass(eq=False, slots=True)
class _Copy:
    """A message in a queue."""

    message: Message
    key: str  # routing key of its publishing; survives dead-lettering
    order: int  # place in its queue, kept when it comes back
    expires_at: float = 0.0  # monotonic; 0: never
    returns: int = 0


@dataclass(eq=False, slots=True)
class _Queue:
    """A queue and what is ready in it."""

    name: str
    arguments: Mapping[str, str | int] = field(default_factory=dict)
    owner: EmbeddedBroker | None = None  # of a private queue
    ready: list[tuple[int, _Copy]] = field(default_factory=list)  # a heap by order

    @property
    def is_quorum(self) -> bool:
        return self.arguments.get("x-queue-type") == "quorum"


@dataclass(eq=False, slots=True)
class _Exchange:
    kind: str
    alternate: str
    bindings: list[tuple[str, str]] = field(default_factory=list)  # (key, queue)


class EmbeddedServer:
    """Exchanges, queues and their clock. Its clients are `EmbeddedBroker`s."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._exchanges: dict[str, _Exchange] = {}
        self._queues: dict[str, _Queue] = {}
        self._readers: dict[str, deque[EmbeddedConsumer]] = {}  # by queue name; they outlive a deleted queue
        self._order = itertools.count()
        self._expiries: list[tuple[float, int, _Queue]] = []  # a heap: when, tie-break, whose head to look at
        self._clock = threading.Condition(self.lock)
        self._clock_thread: threading.Thread | None = None
        self._stranded: list[tuple[_Copy, str, str]] = []  # dead letters that no queue takes yet: copy, exchange, key

    def declare_exchange(self, spec: topology.ExchangeSpec) -> None:
        """Safe to repeat."""
        with self.lock:
            self._exchanges.setdefault(spec.name, _Exchange(spec.kind, spec.arguments.get("alternate-exchange", "")))

    def declare_queue(self, spec: topology.QueueSpec, owner: EmbeddedBroker | None = None) -> None:
        """Declare and bind; safe to repeat. Raises NoQueue if there is no such exchange."""
        with self.lock:
            exchange = self._exchanges.get(spec.exchange)
            if exchange is None:
                raise NoQueue(f"queue {spec.name}: no exchange {spec.exchange}; declare the topology first")
            self._queues.setdefault(spec.name, _Queue(spec.name, spec.arguments, owner))
            if (spec.key, spec.name) not in exchange.bindings:
                exchange.bindings.append((spec.key, spec.name))
            stranded, self._stranded = self._stranded, []
            for copy, to, key in stranded:
                self._dead_letter_to(copy, to, key)
            self.dispatch(spec.name)

    def delete_queue(self, name: str) -> None:
        """With all it holds; a missing one is fine. Its consumers wait for a new one of that name."""
        with self.lock:
            self._queues.pop(name, None)
            for exchange in self._exchanges.values():
                exchange.bindings = [(key, queue) for key, queue in exchange.bindings if queue != name]

    def queue(self, name: str) -> _Queue:
        """The queue. Raises NoQueue."""
        found = self._queues.get(name)
        if found is None:
            raise NoQueue(f"reading queue {name}: there is no such queue")
        return found

    def readers(self, name: str) -> deque[EmbeddedConsumer]:
        """Who consumes from this queue, next in turn first."""
        return self._readers.setdefault(name, deque())

    def private_queues(self, owner: EmbeddedBroker) -> list[str]:
        """Names of the queues that only `owner` reads."""
        return [queue.name for queue in self._queues.values() if queue.owner is owner]

    def publish(self, to: Address, message: Message) -> bool:
        """Put a copy into every queue bound for this address; False if there is none."""
        headers = {name: value for name, value in message.headers.items() if not name.startswith(_BROKERS_OWN)}
        copied = replace(message, body=bytes(message.body), headers=headers)
        with self.lock:
            return self._route(to.exchange, to.key, copied)

    def take(self, queue: _Queue) -> _Copy | None:
        """The first ready message."""
        with self.lock:
            self._expire(queue)
            return heapq.heappop(queue.ready)[1] if queue.ready else None

    def depth(self, name: str) -> Depth | None:
        """Ready messages and flowing consumers, or None."""
        with self.lock:
            queue = self._queues.get(name)
            if queue is None:
                return None
            self._expire(queue)
            return Depth(len(queue.ready), sum(consumer.flowing for consumer in self.readers(name)))

    def give_back(self, deliveries: Iterable[EmbeddedDelivery]) -> None:
        """Their channel is gone: back to their places, counted, or dead if that was once too often."""
        with self.lock:
            for delivery in deliveries:
                delivery.lose()
                queue = self._queues.get(delivery.queue)
                if queue is not None:
                    self._return(queue, delivery.copy)
            for name in {delivery.queue for delivery in deliveries}:
                self.dispatch(name)

    def dispatch(self, name: str) -> None:
        """Hand ready messages to consumers with room, in turn."""
        queue = self._queues.get(name)
        if queue is None:
            return
        self._expire(queue)
        while queue.ready and (consumer := _next_with_room(self.readers(name))):
            consumer.deliver(heapq.heappop(queue.ready)[1])

    def _route(self, exchange_name: str, key: str, message: Message) -> bool:
        exchange = self._exchanges.get(exchange_name)
        if exchange is None:
            return False
        names = {queue for bound, queue in exchange.bindings if exchange.kind == "fanout" or bound == key}
        for name in names:
            self._append(self._queues[name], _Copy(message, key, 0))
        if names:
            return True
        return bool(exchange.alternate) and self._route(exchange.alternate, key, message)

    def _append(self, queue: _Queue, copy: _Copy) -> None:
        copy.order = next(self._order)
        ttl_ms = queue.arguments.get("x-message-ttl")
        if isinstance(ttl_ms, int):
            copy.expires_at = time.monotonic() + ttl_ms / 1000
            self._watch(queue, copy.expires_at)
        heapq.heappush(queue.ready, (copy.order, copy))
        self.dispatch(queue.name)

    def _return(self, queue: _Queue, copy: _Copy) -> None:
        copy.returns += 1
        limit = queue.arguments.get("x-delivery-limit")
        if isinstance(limit, int) and copy.returns > limit:
            self._die(queue, copy, "delivery_limit")
        else:
            heapq.heappush(queue.ready, (copy.order, copy))

    def _die(self, queue: _Queue, copy: _Copy, reason: str) -> None:
        exchange = queue.arguments.get("x-dead-letter-exchange")
        if not isinstance(exchange, str):
            return
        deaths: dict[str, Header] = {"x-first-death-reason": reason, "x-first-death-queue": queue.name}
        copy.message = replace(copy.message, headers=deaths | dict(copy.message.headers))
        self._dead_letter_to(copy, exchange, str(queue.arguments.get("x-dead-letter-routing-key", copy.key)))

    def _dead_letter_to(self, copy: _Copy, exchange: str, key: str) -> None:
        """At least once: without a queue it waits until one is declared."""
        if not self._route(exchange, key, copy.message):
            self._stranded.append((copy, exchange, key))

    def _expire(self, queue: _Queue) -> None:
        """All messages of a queue have the same TTL, so the head expires first."""
        now = time.monotonic()
        while queue.ready and 0 < queue.ready[0][1].expires_at <= now:
            self._die(queue, heapq.heappop(queue.ready)[1], "expired")

    def _watch(self, queue: _Queue, when: float) -> None:
        heapq.heappush(self._expiries, (when, next(self._order), queue))
        if self._clock_thread is None:
            self._clock_thread = threading.Thread(target=self._run_clock, name="embedded broker clock", daemon=True)
            self._clock_thread.start()
        self._clock.notify()

    def _run_clock(self) -> None:
        with self.lock:
            while self._expiries:
                when, _, queue = self._expiries[0]
                if when > time.monotonic():
                    self._clock.wait(when - time.monotonic())
                    continue
                heapq.heappop(self._expiries)
                self._expire(queue)
            self._clock_thread = None  # the next message with a TTL starts another


def _next_with_room(readers: deque[EmbeddedConsumer]) -> EmbeddedConsumer | None:
    for _ in range(len(readers)):
        readers.rotate(-1)
        if readers[-1].room:
            return readers[-1]
    return None


class EmbeddedDelivery:
    """A `Delivery` from the embedded server."""

    __slots__ = ("_broker", "_settled", "copy", "lost", "on_ack", "queue", "returns")

    def __init__(self, broker: EmbeddedBroker, queue: _Queue, copy: _Copy, on_ack: Callable[[], None]) -> None:
        self.queue = queue.name
        self.copy = copy
        self.returns = copy.returns if queue.is_quorum else min(copy.returns, 1)
        self.lost = False
        self.on_ack = on_ack
        self._broker = broker
        self._settled = False

    @property
    def message(self) -> Message:
        """See `Delivery`."""
        return self.copy.message

    def lose(self) -> None:
        """Its channel is gone."""
        self.lost = not self._settled

    def ack(self) -> bool:
        """See `Delivery`."""
        with self._broker.server.lock:
            if not self._settled and not self.lost:
                self._settled = True
                self._broker.unacked.discard(self)
                self.on_ack()
            return not self.lost


class EmbeddedConsumer(Consumer):
    """A `Consumer` on the embedded server."""

    def __init__(self, broker: EmbeddedBroker, queue: str, prefetch: int, exclusive: bool) -> None:
        self.queue = queue
        self.exclusive = exclusive
        self.flowing = True
        self._broker = broker
        self._prefetch = prefetch
        self._held: set[EmbeddedDelivery] = set()
        self._buffer: deque[EmbeddedDelivery] = deque()
        self._arrived = threading.Condition(broker.server.lock)
        self._closed = False

    @property
    def room(self) -> bool:
        """Whether it may be handed another message."""
        return self.flowing and len(self._held) < self._prefetch

    def receive(self, timeout_s: float) -> Delivery | None:
        """See `Consumer`."""
        with self._arrived:
            self._arrived.wait_for(lambda: self._buffer or self._closed or self._broker.closed, timeout_s)
            return self._buffer.popleft() if self._buffer else None

    def pause(self) -> list[Delivery]:
        """See `Consumer`."""
        with self._arrived:
            self.flowing = False
            taken: list[Delivery] = list(self._buffer)
            self._buffer.clear()
            return taken

    def resume(self) -> None:
        """See `Consumer`."""
        with self._arrived:
            self.flowing = not self._closed
            self._broker.server.dispatch(self.queue)

    def close(self) -> list[Delivery]:
        """See `Consumer`."""
        with self._arrived:
            self._closed = True
            self._broker.forget(self)
            self._arrived.notify_all()
            return self.pause()

    def deliver(self, copy: _Copy) -> None:
        """Called by the server, under its lock."""
        server = self._broker.server
        delivery = EmbeddedDelivery(self._broker, server.queue(self.queue), copy, lambda: self._acked(delivery))
        self._broker.unacked.add(delivery)
        self._held.add(delivery)
        self._buffer.append(delivery)
        self._arrived.notify()

    def lose(self) -> None:
        """The channel is gone: what it held is the server's again."""
        self._held.clear()
        self._buffer.clear()
        self._arrived.notify_all()

    def _acked(self, delivery: EmbeddedDelivery) -> None:
        self._held.discard(delivery)
        self._broker.server.dispatch(self.queue)


class EmbeddedBroker(Broker):
    """A client of an `EmbeddedServer`: of its own, if none is given."""

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
                f"message {message.message_id or '(no id)'} to {to.exchange}/{to.key}: no such queue on the broker. "
                "Is the model in the configuration of everyone involved?"
            )

    def publish_many(
        self,
        sends: Iterable[tuple[Address, Message]],
        on_confirmed: Callable[[Message], None] = lambda _message: None,
        window: int = 1000,
        timeout_s: float | None = 30.0,
    ) -> int:
        """See `Broker`."""
        confirmed = 0
        for to, message in sends:
            self.publish(to, message)
            confirmed += 1
            on_confirmed(message)
        return confirmed

    def publish_lossy(self, to: Address, message: Message) -> None:
        """See `Broker`."""
        if not self.closed:
            self.server.publish(to, message)

    def consume(self, queue: str, prefetch: int, exclusive: bool = False) -> Consumer:
        """See `Broker`."""
        if prefetch < 1:
            raise ValueError(f"prefetch must be at least 1, not {prefetch}")
        with self.server.lock:
            self._check_open()
            self._check_readable(self.server.queue(queue))
            readers = self.server.readers(queue)
            if readers and (exclusive or readers[0].exclusive):
                raise BatchError(f"reading queue {queue}: another process reads this queue")
            consumer = EmbeddedConsumer(self, queue, prefetch, exclusive)
            self._consumers.append(consumer)
            readers.append(consumer)
            self.server.dispatch(queue)
        return consumer

    def get(self, queue: str) -> Delivery | None:
        """See `Broker`."""
        with self.server.lock:
            self._check_open()
            found = self.server.queue(queue)
            self._check_readable(found)
            copy = self.server.take(found)
            if copy is None:
                return None
            delivery = EmbeddedDelivery(self, found, copy, lambda: None)
            self.unacked.add(delivery)
            return delivery

    def depth(self, queue: str) -> Depth | None:
        """See `Broker`."""
        self._check_open()
        return self.server.depth(queue)

    def open_reply_queue(self, batch_id: str) -> str:
        """See `Broker`."""
        self._check_open()
        name = topology.reply_queue(batch_id)
        self.server.declare_queue(topology.QueueSpec(name, topology.REPLY, name, topology.reply_arguments()))
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
                raise ValueError(f"{queue} is neither a reply queue nor a private queue of this process: not deleted")
            self.server.delete_queue(queue)

    @property
    def connected(self) -> bool:
        """See `Broker`."""
        return True

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

    def drop(self) -> None:
        """What a network fault does: everything unacked goes back, then consumers go on. For tests."""
        with self.server.lock:
            self._lose_all()

    def forget(self, consumer: EmbeddedConsumer) -> None:
        """Take a consumer off its queue; what it handed out can still be acked."""
        consumer.flowing = False
        if consumer in self._consumers:
            self._consumers.remove(consumer)
            self.server.readers(consumer.queue).remove(consumer)

    def _lose_all(self) -> None:
        lost = list(self.unacked)
        self.unacked.clear()
        for consumer in self._consumers:
            consumer.lose()
        self.server.give_back(lost)
        for name in self.server.private_queues(self):
            self.server.queue(name).ready.clear()  # it would have gone with the connection, and come again empty

    def _check_readable(self, queue: _Queue) -> None:
        if queue.owner not in (None, self):
            raise BatchError(f"reading queue {queue.name}: another process reads this queue")

    def _check_open(self) -> None:
        if self.closed:
            raise BrokerUnavailable("the connection to the broker was closed by this process")
