"""The Broker contract. Two implementations keep it: `rabbitmq` and `embedded` (in-process).

Delivery is at least once. A message is the broker's once `publish` has returned; a delivery is the worker's until
it acks, and comes back (to somebody) if the worker's channel goes first. All methods may be called from any thread.

Our code settles a delivery by an ack, or by a confirmed publish followed by an ack (`infra.broker.settle`): nack,
reject and requeue are never used, because what they do to the broker's delivery count differs between RabbitMQ 3.10
and 4.3.
"""

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

Header = str | int | float
# What begins the names of headers that RabbitMQ adds to a message, and its publisher may not.
BROKERS_OWN = ("x-death", "x-first-death-", "x-last-death-", "x-delivery-count", "x-acquired-count")


@dataclass(frozen=True, slots=True)
class Message:
    """Bytes with identity: even if nobody can read the body, the properties say whose it is."""

    body: bytes
    message_id: str = ""  # job_id
    correlation_id: str = ""  # batch_id
    reply_to: str = ""
    headers: Mapping[str, Header] = field(default_factory=dict)
    persistent: bool = True


@dataclass(frozen=True, slots=True)
class Address:
    """An exchange and a routing key; for our direct exchanges the key is the queue's name."""

    exchange: str
    key: str


@dataclass(frozen=True, slots=True)
class Depth:
    """Ready messages and consumers of a queue. A zero from a quorum queue may be false (it answers 0 when slow)."""

    ready: int
    consumers: int


class Delivery(Protocol):
    """One delivery of a message to this process."""

    @property
    def queue(self) -> str:
        """The queue it came from."""

    @property
    def message(self) -> Message:
        """The published message."""

    @property
    def returns(self) -> int:
        """How often the broker took this copy back from a consumer, begun or not. Crashes are counted elsewhere."""

    @property
    def is_lost(self) -> bool:
        """True once the channel it came on is gone: acking is void, and the broker hands it out again."""

    def ack(self) -> bool:
        """Settle it. False if it was lost: the caller then knows that a copy will come back. Never raises.

        True means that the ack was handed to the connection, not that the broker has it; no protocol tells.
        """


D = TypeVar("D", bound=Delivery)


class Consumer(ABC):
    """A stream of deliveries from one queue. Holds at most `prefetch` unacked ones, received or not."""

    @abstractmethod
    def receive(self, timeout_s: float) -> Delivery | None:
        """The next delivery, or None after `timeout_s` (0: don't wait) or a nudge. Reconnects happen inside."""

    @abstractmethod
    def nudge(self) -> None:
        """Let the `receive` that waits now, or the next one that would, return None at once. From any thread."""

    @abstractmethod
    def widen(self, prefetch: int) -> None:
        """From now on hold at most `prefetch` unacked deliveries, which must be more than before."""

    @abstractmethod
    def pause(self) -> list[Delivery]:
        """Stop the flow; returns what had arrived and nobody received, for the caller to settle. Idempotent."""

    @abstractmethod
    def resume(self) -> None:
        """Let it flow again after `pause`. Idempotent."""

    @abstractmethod
    def close(self) -> list[Delivery]:
        """Stop for good; like `pause` returns unreceived deliveries. Their acks work until the broker is closed."""


class BufferedConsumer(Consumer, Generic[D]):
    """A consumer with a buffer: a broker's client puts into it what comes, and `receive` takes it out.

    `condition` guards the buffer and the flags.
    """

    def __init__(self, queue: str, prefetch: int, exclusive: bool, condition: threading.Condition) -> None:
        if prefetch < 1:
            raise ValueError(f"prefetch must be at least 1, not {prefetch}")
        self.queue = queue
        self.exclusive = exclusive
        self._prefetch = prefetch
        self._condition = condition
        self._buffer: deque[D] = deque()
        self._closed = False
        self._is_nudged = False

    @abstractmethod
    def _is_over(self) -> bool:
        """Whether nothing can come any more."""

    def receive(self, timeout_s: float) -> Delivery | None:
        """See `Consumer`."""
        with self._condition:
            self._condition.wait_for(lambda: self._buffer or self._is_nudged or self._is_over(), timeout_s)
            if self._buffer:
                return self._buffer.popleft()
            self._is_nudged = False
            return None

    def nudge(self) -> None:
        """See `Consumer`."""
        with self._condition:
            self._is_nudged = True
            self._condition.notify_all()


class Broker(ABC):
    """Publishing, consuming, and the topology."""

    is_clustered = False  # several nodes: reply queues are quorum queues (`topology.reply_queue`)

    @abstractmethod
    def declare(self, models: Sequence[str]) -> list[str]:
        """Declare every exchange and queue of `infra.broker.topology` for these models; safe to repeat.

        Returns sentences about queues that exist with other arguments than ours (they are used as they are).
        """

    @abstractmethod
    def publish(self, to: Address, message: Message, timeout_s: float | None = 30.0) -> None:
        """Publish, mandatory and confirmed: on return the broker has it (on disk, if persistent).

        A message whose confirm was lost with its connection is published again: duplicates are normal.

        Args:
            timeout_s: how long to wait for broker and confirm, reconnects included; None: as long as it takes.

        Raises:
            NoQueue: no queue is bound for this address.
            BrokerUnavailable: not confirmed within `timeout_s`, refused (queue full), or the broker is closed.
        """

    @abstractmethod
    def publish_many(
        self,
        sends: Iterable[tuple[Address, Message]],
        on_confirmed: Callable[[Message], None] = lambda _message: None,
        window: int = 1000,
        timeout_s: float | None = 30.0,
    ) -> int:
        """Publish a stream with at most `window` messages unconfirmed; returns how many were confirmed.

        `on_confirmed` is called once for each message, in the caller's thread, not necessarily in order.
        `timeout_s` bounds the time without any progress. Raises as `publish`; what was confirmed before stays so.
        """

    @abstractmethod
    def publish_lossy(self, to: Address, message: Message) -> None:
        """Publish without confirm, waiting or complaint: token events, wakeups. Dropped if the broker is away."""

    @abstractmethod
    def consume(self, queue: str, prefetch: int, exclusive: bool = False) -> Consumer:
        """Start consuming. Raises NoQueue; BatchError if `exclusive` and somebody else consumes."""

    @abstractmethod
    def get(self, queue: str) -> Delivery | None:
        """Take one ready message (`basic_get`), or None if there is none. Raises NoQueue, BrokerUnavailable."""

    @abstractmethod
    def depth(self, queue: str) -> Depth | None:
        """How full a queue is, or None if it doesn't exist. Raises BrokerUnavailable."""

    @abstractmethod
    def open_reply_queue(self, batch_id: str) -> str:
        """Declare the durable reply queue of a batch and return its name; safe to repeat."""

    @abstractmethod
    def open_private_queue(self, name: str, exchange: str) -> str:
        """Declare a transient queue that only this process reads, bound to `exchange` under its own name."""

    @abstractmethod
    def delete_queue(self, queue: str) -> None:
        """Delete a reply or private queue with all it holds. Never a work queue: raises ValueError."""

    @property
    @abstractmethod
    def is_connected(self) -> bool:
        """Whether both directions have a live connection now (always True in-process)."""

    @abstractmethod
    def close(self) -> None:
        """Flush acks, then leave. Unacked deliveries go back to their queues. Idempotent."""
