"""The Broker contract. It has two implementations: `rabbitmq` and `embedded` (in-process).

Delivery is at least once. The broker owns a message once `publish` has returned. A worker owns a delivery until it
acks; if the worker's channel closes before that, the broker delivers the message again, to any worker. All methods may
be called from any thread.

Our code settles a delivery by an ack, or by a confirmed publish followed by an ack (`infra.broker.settle`). It never
uses nack, reject or requeue, because their effect on the broker's delivery count differs between RabbitMQ 3.10 and 4.3.
"""

import threading
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar

Header = str | int | float
# Headers whose names begin with one of these are added by RabbitMQ. A publisher must not set them.
BROKERS_OWN = ("x-death", "x-first-death-", "x-last-death-", "x-delivery-count", "x-acquired-count")


@dataclass(frozen=True, slots=True)
class Message:
    """A body with its identity. Even if the body can't be read, the properties say which job it belongs to."""

    body: bytes
    message_id: str = ""  # job_id
    correlation_id: str = ""  # batch_id
    reply_to: str = ""
    headers: Mapping[str, Header] = field(default_factory=dict)
    persistent: bool = True


@dataclass(frozen=True, slots=True)
class Address:
    """An exchange and a routing key. For our direct exchanges the key is the queue's name."""

    exchange: str
    key: str


@dataclass(frozen=True, slots=True)
class Depth:
    """The number of ready messages and of consumers of a queue.

    A zero from a quorum queue may be wrong: RabbitMQ answers 0 when the queue is slow to reply.
    """

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
        """How often the broker took this copy back from a consumer, whether or not work on it had begun.

        This is not the crash count, which is kept in the cluster state.
        """

    @property
    def is_lost(self) -> bool:
        """Whether the delivery's channel is gone.

        An ack then has no effect, and the message will be delivered again.
        """

    def ack(self) -> bool:
        """Ack the delivery. Returns False if it was lost, so that a copy will come back. Never raises.

        True means that the ack was handed to the connection. It doesn't mean that the broker has it: AMQP has no answer
        to an ack.
        """


D = TypeVar("D", bound=Delivery)


class Consumer(ABC):
    """A stream of deliveries from one queue. At most `prefetch` of them are unacked at a time, received or not."""

    @abstractmethod
    def receive(self, timeout_s: float) -> Delivery | None:
        """Return the next delivery, or None after `timeout_s` (0: don't wait) or a nudge. Reconnects on its own."""

    @abstractmethod
    def nudge(self) -> None:
        """Make the waiting `receive`, or the next one that would wait, return None at once.

        May be called from any thread.
        """

    @abstractmethod
    def widen(self, prefetch: int) -> None:
        """Raise the limit of unacked deliveries to `prefetch`, which must be more than before."""

    @abstractmethod
    def pause(self) -> list[Delivery]:
        """Stop the flow, and return the deliveries that arrived and were not received, for the caller to settle.

        Idempotent.
        """

    @abstractmethod
    def resume(self) -> None:
        """Start the flow again after `pause`. Idempotent."""

    @abstractmethod
    def close(self) -> list[Delivery]:
        """Stop for good, and return unreceived deliveries as `pause` does.

        They can be acked until the broker is closed.
        """


class BufferedConsumer(Consumer, Generic[D]):
    """A consumer with a buffer. The broker's client fills the buffer, and `receive` empties it.

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
        """Whether no more deliveries can come."""

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

    # True if the broker has several nodes; its reply queues are then quorum queues (`topology.reply_queue`)
    is_clustered = False

    @abstractmethod
    def declare(self, models: Sequence[str]) -> list[str]:
        """Declare every exchange and queue of `infra.broker.topology` for these models. It is safe to repeat.

        Returns a sentence for each queue that exists with other arguments than ours. Such queues are used as they are.
        """

    @abstractmethod
    def publish(self, to: Address, message: Message, timeout_s: float | None = 30.0) -> None:
        """Publish a message as mandatory and wait for its confirm.

        On return the broker has it (on disk, if persistent). A message whose confirm was lost with its connection is
        published again, so duplicates are normal.

        Args:
            timeout_s: how long to wait for the broker and the confirm, reconnects included; None: without limit.

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
        """Publish a stream of messages, at most `window` of them unconfirmed. Returns how many were confirmed.

        `on_confirmed` is called once for each message, in the caller's thread, not necessarily in order. `timeout_s`
        bounds the time without progress. Raises as `publish` does; messages that were confirmed before the error stay
        published.
        """

    @abstractmethod
    def publish_lossy(self, to: Address, message: Message) -> None:
        """Publish without a confirm, a wait or an error, for token events and wakeups.

        The message is lost if the broker is away.
        """

    @abstractmethod
    def consume(self, queue: str, prefetch: int, exclusive: bool = False) -> Consumer:
        """Start consuming. Raises NoQueue; raises BatchError if `exclusive` and another consumer reads the queue."""

    @abstractmethod
    def get(self, queue: str) -> Delivery | None:
        """Take one ready message (`basic_get`), or None if there is none. Raises NoQueue, BrokerUnavailable."""

    @abstractmethod
    def depths(self, *queues: str) -> dict[str, Depth | None]:
        """Return how full each queue is, or None for a queue that doesn't exist. Raises BrokerUnavailable."""

    def depth(self, queue: str) -> Depth | None:
        """Return how full a queue is, or None if it doesn't exist. Raises BrokerUnavailable."""
        return self.depths(queue)[queue]

    def ready(self, *queues: str) -> int:
        """Return the number of ready messages in these queues, of which some may not exist. Raises as `depths` does."""
        return sum(depth.ready for depth in self.depths(*queues).values() if depth)

    @abstractmethod
    def open_reply_queue(self, batch_id: str) -> str:
        """Declare the durable reply queue of a batch and return its name. It is safe to repeat."""

    @abstractmethod
    def open_private_queue(self, name: str, exchange: str) -> str:
        """Declare a transient queue that only this process reads, bound to `exchange` with its own name as the key."""

    @abstractmethod
    def delete_queue(self, queue: str) -> None:
        """Delete a reply queue or a private queue with its messages. Raises ValueError for a work queue."""

    @property
    @abstractmethod
    def is_connected(self) -> bool:
        """Whether both connections, for publishing and for consuming, are open now (always True in-process)."""

    @abstractmethod
    def close(self) -> None:
        """Send the pending acks, then disconnect. Unacked deliveries go back to their queues. Idempotent."""
