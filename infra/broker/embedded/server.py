"""The queues of a broker in this process: routing, delivery counts, dead letters and TTLs of `infra.broker.topology`.

One lock guards everything. Every change ends by giving ready messages to readers that have capacity.
"""

import heapq
import itertools
import threading
import time
from collections import deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Protocol

from infra.broker import topology
from infra.broker.base import BROKERS_OWN, Address, Depth, Header, Message
from messages.errors import NoQueue


@dataclass(eq=False, slots=True)
class Copy:
    """A message in a queue."""

    message: Message
    key: str  # the original routing key; a dead-lettered message keeps it
    order: int  # the message's position in the queue; a returned message keeps its position
    expires_at: float = 0.0  # monotonic time; 0 if the message never expires
    returns: int = 0


@dataclass(eq=False, slots=True)
class EmbeddedQueue:
    """A queue and its ready messages."""

    name: str
    arguments: Mapping[str, str | int] = field(default_factory=dict)
    owner: object = None  # the only client that is allowed to read the queue; None if every client is allowed
    ready: list[tuple[int, Copy]] = field(default_factory=list)  # a heap, ordered by `order`


class QueueReader(Protocol):
    """A consumer, as the server sees it."""

    @property
    def flowing(self) -> bool:
        """Whether it takes messages now, apart from its capacity."""

    @property
    def has_capacity(self) -> bool:
        """Whether it can take one more message now."""

    @property
    def exclusive(self) -> bool:
        """Whether it wants to be the queue's only reader."""

    def deliver(self, copy: Copy) -> None:
        """Take a message. It is called under the server's lock."""


@dataclass(eq=False, slots=True)
class _Exchange:
    kind: str
    alternate: str
    bindings: list[tuple[str, str]] = field(default_factory=list)  # (key, queue)


class EmbeddedServer:
    """The exchanges, the queues and the clock that expires messages. Its clients are `EmbeddedBroker`s."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self._exchanges: dict[str, _Exchange] = {}
        self._queues: dict[str, EmbeddedQueue] = {}
        # Queue name -> readers of the queue. The readers are kept when the queue is deleted.
        self._readers: dict[str, deque[QueueReader]] = {}
        self._order = itertools.count()
        # A heap of (time, tie-breaker, queue). At each time, the queue's expired messages are dead-lettered.
        self._expiries: list[tuple[float, int, EmbeddedQueue]] = []
        self._clock = threading.Condition(self.lock)
        self._clock_thread: threading.Thread | None = None
        # Dead-lettered messages for which no queue is bound yet, as (copy, exchange, key).
        self._unrouted_letters: list[tuple[Copy, str, str]] = []

    def declare_exchange(self, spec: topology.ExchangeSpec) -> None:
        """Declare an exchange. It is safe to repeat."""
        with self.lock:
            self._exchanges.setdefault(spec.name, _Exchange(spec.kind, spec.arguments.get("alternate-exchange", "")))

    def declare_queue(self, spec: topology.QueueSpec, owner: object = None) -> None:
        """Declare a queue and bind it. It is safe to repeat. Raises NoQueue if the exchange doesn't exist."""
        with self.lock:
            exchange = self._exchanges.get(spec.exchange)
            if exchange is None:
                raise NoQueue(
                    f"queue {spec.name} needs exchange {spec.exchange}, which is missing: declare the topology first"
                )
            self._queues.setdefault(spec.name, EmbeddedQueue(spec.name, spec.arguments, owner))
            if (spec.key, spec.name) not in exchange.bindings:
                exchange.bindings.append((spec.key, spec.name))
            letters, self._unrouted_letters = self._unrouted_letters, []
            for copy, to, key in letters:
                self._dead_letter_to(copy, to, key)
            self.dispatch(spec.name)

    def delete_queue(self, name: str) -> None:
        """Delete a queue with its messages, if it exists. Its consumers wait for a new queue of that name."""
        with self.lock:
            self._queues.pop(name, None)
            for exchange in self._exchanges.values():
                exchange.bindings = [(key, queue) for key, queue in exchange.bindings if queue != name]

    def queue(self, name: str) -> EmbeddedQueue:
        """Return the queue of this name. Raises NoQueue."""
        queue = self._queues.get(name)
        if queue is None:
            raise NoQueue(f"can't read queue {name}: it does not exist")
        return queue

    def readers(self, name: str) -> deque[QueueReader]:
        """Return the consumers of this queue, in the order of their turns."""
        return self._readers.setdefault(name, deque())

    def private_queues(self, owner: object) -> list[str]:
        """Return the names of the queues that only `owner` reads."""
        return [queue.name for queue in self._queues.values() if queue.owner is owner]

    def publish(self, to: Address, message: Message) -> bool:
        """Put a copy into every queue bound for this address. Returns False if there is no such queue."""
        copy = replace(
            message,
            body=bytes(message.body),
            headers={name: value for name, value in message.headers.items() if not name.startswith(BROKERS_OWN)},
        )
        with self.lock:
            return self._route(to.exchange, to.key, copy)

    def dequeue(self, queue: EmbeddedQueue) -> Copy | None:
        """Take the first ready message, or None."""
        with self.lock:
            self._expire(queue)
            return heapq.heappop(queue.ready)[1] if queue.ready else None

    def depth(self, name: str) -> Depth | None:
        """Return the number of ready messages and flowing consumers, or None if the queue doesn't exist."""
        with self.lock:
            queue = self._queues.get(name)
            if queue is None:
                return None
            self._expire(queue)
            return Depth(len(queue.ready), sum(consumer.flowing for consumer in self.readers(name)))

    def give_back(self, copies: Iterable[tuple[str, Copy]]) -> None:
        """Return the messages of a lost channel to their places in their queues, and count the returns.

        A message that has come back more often than its queue's delivery limit is dead-lettered.
        """
        with self.lock:
            names = set()
            for name, copy in copies:
                queue = self._queues.get(name)
                if queue is not None:
                    self._return(queue, copy)
                    names.add(name)
            for name in names:
                self.dispatch(name)

    def dispatch(self, name: str) -> None:
        """Give ready messages to consumers that have capacity, in turn."""
        queue = self._queues.get(name)
        if queue is None:
            return
        self._expire(queue)
        while queue.ready and (consumer := _next_with_capacity(self.readers(name))):
            consumer.deliver(heapq.heappop(queue.ready)[1])

    def _route(self, exchange_name: str, key: str, message: Message) -> bool:
        exchange = self._exchanges.get(exchange_name)
        if exchange is None:
            return False
        names = {queue for bound, queue in exchange.bindings if exchange.kind == "fanout" or bound == key}
        for name in names:
            self._append(self._queues[name], Copy(message, key, 0))
        if names:
            return True
        return bool(exchange.alternate) and self._route(exchange.alternate, key, message)

    def _append(self, queue: EmbeddedQueue, copy: Copy) -> None:
        copy.order = next(self._order)
        ttl_ms = queue.arguments.get("x-message-ttl")
        if isinstance(ttl_ms, int):
            copy.expires_at = time.monotonic() + ttl_ms / 1000
            self._watch(queue, copy.expires_at)
        heapq.heappush(queue.ready, (copy.order, copy))
        self.dispatch(queue.name)

    def _return(self, queue: EmbeddedQueue, copy: Copy) -> None:
        copy.returns += 1
        limit = queue.arguments.get("x-delivery-limit")
        if isinstance(limit, int) and copy.returns > limit:
            self._die(queue, copy, "delivery_limit")
        else:
            heapq.heappush(queue.ready, (copy.order, copy))

    def _die(self, queue: EmbeddedQueue, copy: Copy, reason: str) -> None:
        exchange = queue.arguments.get("x-dead-letter-exchange")
        if not isinstance(exchange, str):
            return
        deaths: dict[str, Header] = {"x-first-death-reason": reason, "x-first-death-queue": queue.name}
        copy.message = replace(copy.message, headers=deaths | dict(copy.message.headers))
        self._dead_letter_to(copy, exchange, str(queue.arguments.get("x-dead-letter-routing-key", copy.key)))

    def _dead_letter_to(self, copy: Copy, exchange: str, key: str) -> None:
        """Route a dead letter. If no queue is bound for it, keep it until one is declared, so that it is not lost."""
        if not self._route(exchange, key, copy.message):
            self._unrouted_letters.append((copy, exchange, key))

    def _expire(self, queue: EmbeddedQueue) -> None:
        """Dead-letter expired messages. All messages of a queue have the same TTL, so the first one expires first."""
        now = time.monotonic()
        while queue.ready and 0 < queue.ready[0][1].expires_at <= now:
            self._die(queue, heapq.heappop(queue.ready)[1], "expired")

    def _watch(self, queue: EmbeddedQueue, due_at: float) -> None:
        heapq.heappush(self._expiries, (due_at, next(self._order), queue))
        if self._clock_thread is None:
            self._clock_thread = threading.Thread(target=self._run_clock, name="embedded broker clock", daemon=True)
            self._clock_thread.start()
        self._clock.notify()

    def _run_clock(self) -> None:
        with self.lock:
            while self._expiries:
                due_at, _, queue = self._expiries[0]
                if due_at > time.monotonic():
                    self._clock.wait(due_at - time.monotonic())
                    continue
                heapq.heappop(self._expiries)
                self._expire(queue)
            self._clock_thread = None  # the next message with a TTL starts a new thread


def _next_with_capacity(readers: deque[QueueReader]) -> QueueReader | None:
    for _ in range(len(readers)):
        readers.rotate(-1)
        if readers[-1].has_capacity:
            return readers[-1]
    return None
