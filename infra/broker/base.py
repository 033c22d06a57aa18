"""The Broker contract. Two implementations keep it: `rabbitmq` and `embedded` (in-process).

Messages are delivered at least once. After `publish` has returned, the broker is responsible for the message. A
delivery belongs to a worker until it acks. If the worker's channel closes first, the broker delivers the message again,
to any worker. All methods may be called from any thread.

Kvasir settles a delivery by an ack, or by a confirmed publish followed by an ack (`infra.broker.settle`). It never uses
nack, reject or requeue, because their effect on the broker's delivery count differs between RabbitMQ 3.10 and 4.3.
"""

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

Header = str | int | float
# Prefixes of header names that only RabbitMQ may add to a message.
BROKERS_OWN = ("x-death", "x-first-death-", "x-last-death-", "x-delivery-count", "x-acquired-count")


@dataclass(frozen=True, slots=True)
class Message:
    """Bytes with an identity: even if the body can't be read, the properties say whose message it is."""

    body: bytes
    message_id: str = ""  # job_id
    correlation_id: str = ""  # batch_id
    reply_to: str = ""
    headers: Mapping[str, Header] = field(default_factory=dict)
    persistent: bool = True


@dataclass(frozen=True, slots=True)
class Address:
    """An exchange and a routing key. For Kvasir's direct exchanges the key is the queue's name."""

    exchange: str
    key: str


@dataclass(frozen=True, slots=True)
class Depth:
    """A queue's ready messages and consumers. A zero from a quorum queue may be wrong, because a slow queue answers
    0."""

    ready: int
    consumers: int


class Delivery(Protocol):
    """One delivery of a message to this process."""

    @property
    def queue(self) -> str:
        """The queue it came from."""

    @property
    def message(self) -> Message:
        """The message as it was published."""

    @property
    def returns(self) -> int:
        """How often the broker took this copy back from a consumer, whether or not work on it had begun. Crashes are
        counted elsewhere."""

    @property
    def is_lost(self) -> bool:
        """True once the delivery's channel is gone: an ack then has no effect, and the broker delivers the message
        again."""

    def ack(self) -> bool:
        """Ack the delivery. False if it was lost: the caller then knows that the message will be delivered again. Never
        raises.

        True means that the ack was handed to the connection, not that the broker has received it; AMQP does not confirm
        acks.
        """


D = TypeVar("D", bound=Delivery)


class Consumer(ABC):
    """A stream of deliveries from one queue. It holds at most `prefetch` unacked deliveries, received or not."""

    @abstractmethod
    def receive(self, timeout_s: float) -> Delivery | None:
        """The next delivery, or None after `timeout_s` (0: don't wait) or a nudge. Reconnects happen inside."""

    @abstractmethod
    def nudge(self) -> None:
        """Make the waiting `receive`, or else the next one, return None at once. May be called from any thread."""

    @abstractmethod
    def widen(self, prefetch: int) -> None:
        """Raise the limit of unacked deliveries to `prefetch`, which must be more than before."""

    @abstractmethod
    def pause(self) -> list[Delivery]:
        """Stop deliveries. Returns those that had arrived and were not received, for the caller to settle.
        Idempotent."""

    @abstractmethod
    def resume(self) -> None:
        """Let deliveries flow again after `pause`. Idempotent."""

    @abstractmethod
    def close(self) -> list[Delivery]:
        """Stop for good, and return unreceived deliveries as `pause` does. They can be acked until the broker object is
        closed."""


class BufferedConsumer(Consumer, Generic[D]):
    """A consumer with a buffer: the broker's client adds arriving deliveries, and `receive` takes them out.

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
        """Whether nothing can arrive any more."""

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

    is_clustered = False  # True with several nodes: reply queues are then quorum queues (`topology.reply_queue`)

    @abstractmethod
    def declare(self, models: Sequence[str]) -> list[str]:
        """Declare every exchange and queue of `infra.broker.topology` for these models; safe to repeat.

        Returns one sentence for each queue that exists with different arguments. Such queues are used as they are.
        """

    @abstractmethod
    def publish(self, to: Address, message: Message, timeout_s: float | None = 30.0) -> None:
        """Publish a message, mandatory and confirmed: on return the broker has it (on disk, if it is persistent).

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
        """Publish many messages, of which at most `window` are unconfirmed at any time. Returns how many were
        confirmed.

        `on_confirmed` is called once for each message, in the caller's thread, not necessarily in order. `timeout_s`
        limits the time without any progress. Raises the errors of `publish`; messages confirmed before stay confirmed.
        """

    @abstractmethod
    def publish_lossy(self, to: Address, message: Message) -> None:
        """Publish without waiting for a confirm, and without errors: for token events and wakeups. The message is
        dropped if the broker is away."""

    @abstractmethod
    def consume(self, queue: str, prefetch: int, exclusive: bool = False) -> Consumer:
        """Start consuming. Raises NoQueue, and BatchError if `exclusive` is set and another process consumes."""

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
        """Declare a transient queue that only this process reads. It is bound to `exchange` under its own name."""

    @abstractmethod
    def delete_queue(self, queue: str) -> None:
        """Delete a reply queue or private queue with everything in it. Raises ValueError for a work queue."""

    @property
    @abstractmethod
    def is_connected(self) -> bool:
        """Whether the connections for publishing and for consuming are both open now (always True in-process)."""

    @abstractmethod
    def close(self) -> None:
        """Send outstanding acks, then disconnect. Unacked deliveries go back to their queues. Idempotent."""
