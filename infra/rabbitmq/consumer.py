"""Consuming: deliveries, the channels that hold them, and consumers that outlive both.

Every subscription has a channel of its own. So a channel closed by the broker (consumer time-out, deleted queue) takes
no neighbour along, and resuming never re-registers a consumer on a channel with unacked deliveries (which RabbitMQ
3.10.8 answers with a channel exception).
"""

from __future__ import annotations

import logging
import threading
import time
import uuid
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import pika.channel  # type: ignore[import-untyped]
from pika import spec

from infra.broker import Consumer, Delivery, Message
from infra.rabbitmq.channel import await_result, over_reconnects, settle
from infra.rabbitmq.connection import Backoff, Connection
from infra.rabbitmq.errors import describe, translate
from infra.rabbitmq.properties import returns, to_message
from messages.errors import BrokerUnavailable, KvasirError, UsageError

log = logging.getLogger(__name__)

PAUSE_S = 10  # how long to wait for the broker to confirm that the flow has stopped
MAX_IDLE_GETTERS = 4


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
            self.held -= 1
            self._on_acked()


class Subscription(Holder):
    """One basic.consume on a channel of its own. Lives on after its flow has stopped until all it holds is acked."""

    def __init__(self, consumer: RabbitConsumer, connection: Connection, prefetch: int) -> None:
        super().__init__(connection, self._acked)
        self._consumer = consumer
        self._prefetch = prefetch
        self._stop_wanted = False
        self._tag = ""
        self._started = False
        self.flowing = True  # deliveries may still come
        connection.raw.channel(on_open_callback=self._opened)

    @property
    def seats(self) -> int:
        """How much of its consumer's prefetch it takes up."""
        return self._prefetch if self.flowing else self.held

    def stop(self) -> None:
        """Stop the flow; the consumer hears of it through `subscription_stopped`."""
        self._stop_wanted = True
        if self._started and self.flowing and self.raw is not None and self.raw.is_open:
            self.raw.basic_cancel(self._tag, callback=self._flow_ended)
            # pika would reject what still arrives until the broker's answer, and each return is counted by quorum
            # queues. Forgetting that the tag is being cancelled lets these deliveries through to us.
            self.raw._cancelled.discard(self._tag)

    def abandon(self) -> None:
        """Give up on a channel that doesn't answer."""
        self._ended()
        self.close()

    def _opened(self, channel: pika.channel.Channel) -> None:
        self.raw = channel
        channel.add_on_close_callback(self._closed)
        channel.add_on_cancel_callback(self._cancelled_by_broker)
        channel.basic_qos(prefetch_count=self._prefetch)
        # Always a fresh tag: a re-used one leaves messages stuck on quorum queues of older brokers.
        self._tag = f"kvasir-{uuid.uuid4().hex}"
        consumer = self._consumer
        channel.basic_consume(
            consumer.queue,
            self._delivered,
            exclusive=consumer.exclusive,
            consumer_tag=self._tag,
            callback=self._consuming,
        )

    def _consuming(self, _answer: Any) -> None:
        self._started = True
        self._consumer.subscription_started()
        if self._stop_wanted:
            self.stop()

    def _delivered(self, _channel: Any, method: Any, properties: spec.BasicProperties, body: bytes) -> None:
        self._consumer.deliver(self.hold(self._consumer.queue, method, properties, body))

    def _acked(self) -> None:
        if not self.flowing:
            self._close_if_empty()
            self._consumer.fill()

    def _flow_ended(self, _answer: Any) -> None:
        self.flowing = False
        self._close_if_empty()
        self._consumer.subscription_stopped(self, None)

    def _cancelled_by_broker(self, _frame: Any) -> None:
        """Queue deleted, its leader gone, or (RabbitMQ 4.3) a consumer time-out. What is held can still be acked."""
        if self.flowing:
            self.flowing = False
            self._close_if_empty()
            self._consumer.subscription_stopped(self, BrokerUnavailable("the broker cancelled the consumer"))

    def _close_if_empty(self) -> None:
        if not self.held:
            self.close()

    def _closed(self, _channel: pika.channel.Channel, reason: BaseException) -> None:
        if not self.lost:
            was_flowing = self.flowing
            self._ended()
            error = translate(reason, f"reading queue {self._consumer.queue}")
            self._consumer.subscription_gone(self, error if was_flowing else None)

    def _ended(self) -> None:
        self.flowing = False
        self.lose()


class RabbitConsumer(Consumer):
    """A `Consumer` on RabbitMQ: subscriptions come and go beneath it.

    Usually there is one. After `pause` and `resume` with deliveries still held, a first one takes the free part of
    the prefetch and further ones take what gets free; an exclusive consumer can have only one and waits for the next
    pause with the rest.
    """

    def __init__(
        self,
        connection: Connection,
        queue: str,
        prefetch: int,
        exclusive: bool,
        on_closed: Callable[[RabbitConsumer], None],
    ) -> None:
        if prefetch < 1:
            raise ValueError(f"prefetch must be at least 1, not {prefetch}")
        self.queue = queue
        self.exclusive = exclusive
        self._prefetch = prefetch
        self._connection = connection
        self._on_closed = on_closed
        self._changed = threading.Condition()  # guards the buffer and the two flags
        self._buffer: deque[RabbitDelivery] = deque()
        self._paused = False
        self._closed = False
        self._subscriptions: set[Subscription] = set()  # IO thread only, like the three below
        self._backoff = Backoff()
        self._quiet: list[Future[None]] = []  # who waits until nothing flows
        self._first: Future[None] = Future()

    def start(self, timeout_s: float) -> None:
        """Subscribe. Raises NoQueue, BatchError, ConfigError, BrokerUnavailable."""
        deadline = time.monotonic() + timeout_s
        self._connection.wait_open(timeout_s)
        self._connection.submit(self.fill)
        try:
            await_result(self._first, deadline, f"reading queue {self.queue}")
        except KvasirError:
            self.close()
            raise

    def receive(self, timeout_s: float) -> Delivery | None:
        """See `Consumer`."""
        with self._changed:
            self._changed.wait_for(lambda: self._buffer or self._is_over(), timeout_s)
            return self._buffer.popleft() if self._buffer else None

    def pause(self) -> list[Delivery]:
        """See `Consumer`."""
        with self._changed:
            self._paused = True
        self._wait_quiet()
        with self._changed:
            taken: list[Delivery] = [delivery for delivery in self._buffer if not delivery.lost]
            self._buffer.clear()
        return taken

    def resume(self) -> None:
        """See `Consumer`."""
        with self._changed:
            self._paused = False
        self._connection.submit(self.fill)

    def close(self) -> list[Delivery]:
        """See `Consumer`."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        taken = self.pause()
        self._on_closed(self)
        return taken

    def wake(self) -> None:
        """Let waiting receivers see that the connection was closed."""
        with self._changed:
            self._changed.notify_all()

    def fill(self) -> None:
        """(IO) Subscribe for the part of the prefetch that nothing takes up."""
        if self._paused or self._closed or not self._connection.is_open:
            return
        free = self._prefetch - sum(subscription.seats for subscription in self._subscriptions)
        taken = self.exclusive and any(subscription.flowing for subscription in self._subscriptions)
        if free > 0 and not taken:
            self._subscriptions.add(Subscription(self, self._connection, free))

    def deliver(self, delivery: RabbitDelivery) -> None:
        """(IO) Something came."""
        with self._changed:
            self._buffer.append(delivery)
            self._changed.notify()

    def subscription_started(self) -> None:
        """(IO) The broker accepted."""
        self._backoff.reset()
        settle(self._first)

    def subscription_stopped(self, _subscription: Subscription, why: KvasirError | None) -> None:
        """(IO) No more deliveries come; `why` is given if we didn't ask for it."""
        self._tell_if_quiet()
        if why:
            self._again(why)

    def subscription_gone(self, subscription: Subscription, why: KvasirError | None) -> None:
        """(IO) Its channel is closed; `why` is given if it was flowing."""
        self._subscriptions.discard(subscription)
        with self._changed:
            self._buffer = deque(delivery for delivery in self._buffer if not delivery.lost)
        self._tell_if_quiet()
        if isinstance(why, UsageError):
            settle(self._first, error=why)  # only who asked first can be told
        if why:
            self._again(why)

    def _again(self, why: KvasirError) -> None:
        if self._connection.is_open and not self._is_over():
            log.warning("queue %s: subscribing again: %s", self.queue, why)
            self._connection.later(self._backoff.next_s(), self.fill)

    def _is_over(self) -> bool:
        return self._closed or self._connection.is_closed

    def _wait_quiet(self) -> None:
        quiet: Future[None] = Future()
        self._connection.submit(partial(self._stop_all, quiet))
        try:
            await_result(quiet, time.monotonic() + PAUSE_S, f"pausing queue {self.queue}")
        except BrokerUnavailable as error:
            log.warning("%s; its channel is closed instead", describe(error))
            self._connection.submit(self._abandon_all)

    def _stop_all(self, quiet: Future[None]) -> None:
        self._quiet.append(quiet)
        for subscription in list(self._subscriptions):
            subscription.stop()
        self._tell_if_quiet()

    def _abandon_all(self) -> None:
        for subscription in list(self._subscriptions):
            if subscription.flowing:
                subscription.abandon()
                self.subscription_gone(subscription, None)

    def _tell_if_quiet(self) -> None:
        if not any(subscription.flowing for subscription in self._subscriptions):
            for future in self._quiet:
                settle(future)
            self._quiet.clear()


class Getter:
    """basic_get, with a channel for each delivery until it is acked: a missing queue closes nobody else's channel."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._idle: list[_GetChannel] = []  # IO thread only

    def get(self, queue: str, timeout_s: float) -> RabbitDelivery | None:
        """One ready message or None. Raises NoQueue, BrokerUnavailable."""

        def attempt(deadline: float) -> RabbitDelivery | None:
            future: Future[RabbitDelivery | None] = Future()
            self._connection.submit(partial(self._get, queue, future))
            return await_result(future, deadline, f"getting from queue {queue}")

        return over_reconnects(self._connection, timeout_s, attempt)

    def free(self, channel: _GetChannel) -> None:
        """(IO) A channel that holds nothing."""
        if len(self._idle) < MAX_IDLE_GETTERS:
            self._idle.append(channel)
        else:
            channel.close()

    def forget(self, channel: _GetChannel) -> None:
        """(IO) A channel that is closed."""
        if channel in self._idle:
            self._idle.remove(channel)

    def _get(self, queue: str, future: Future[RabbitDelivery | None]) -> None:
        try:
            channel = self._idle.pop() if self._idle else _GetChannel(self, self._connection)
        except KvasirError as error:
            settle(future, error=error)
        else:
            channel.get(queue, future)


class _GetChannel(Holder):
    """A channel for one basic_get at a time. IO thread only, acks excepted."""

    def __init__(self, getter: Getter, connection: Connection) -> None:
        super().__init__(connection, lambda: getter.free(self))
        self._getter = getter
        self._queue = ""
        self._future: Future[RabbitDelivery | None] = Future()
        connection.raw.channel(on_open_callback=self._opened)

    def get(self, queue: str, future: Future[RabbitDelivery | None]) -> None:
        """Ask, now or once the channel is open."""
        self._queue, self._future = queue, future
        if self.raw is not None:
            self.raw.basic_get(queue, self._got)

    def _opened(self, channel: pika.channel.Channel) -> None:
        self.raw = channel
        channel.add_on_close_callback(self._closed)
        channel.add_callback(self._empty, [spec.Basic.GetEmpty], one_shot=False)
        channel.basic_get(self._queue, self._got)

    def _got(self, _channel: Any, method: Any, properties: spec.BasicProperties, body: bytes) -> None:
        if not settle(self._future, self.hold(self._queue, method, properties, body)):
            self.close()  # the caller gave up waiting: the broker takes it back

    def _empty(self, _frame: Any) -> None:
        settle(self._future)
        self._getter.free(self)

    def _closed(self, _channel: pika.channel.Channel, reason: BaseException) -> None:
        self.lose()
        self._getter.forget(self)
        settle(self._future, error=translate(reason, f"getting from queue {self._queue}"))
