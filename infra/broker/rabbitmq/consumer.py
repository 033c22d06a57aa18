"""Consumers, which stay while their subscriptions come and go.

Every subscription has its own channel, for two reasons. When the broker closes a channel (consumer timeout, deleted
queue), other consumers are not affected. And RabbitMQ 3.10.8 raises a channel exception when a consumer is registered
again on a channel with unacked deliveries, which `resume` would otherwise do.
"""

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

from infra.broker.base import BufferedConsumer, Delivery, Message
from infra.broker.rabbitmq.channel import await_result, settle
from infra.broker.rabbitmq.connection import Backoff, Connection
from infra.broker.rabbitmq.delivery import Holder, RabbitDelivery
from infra.broker.rabbitmq.errors import describe, translate
from infra.broker.rabbitmq.pika_inside import let_through
from messages.errors import BrokerUnavailable, KvasirError, UsageError

log = logging.getLogger(__name__)

PAUSE_S = 10  # how long to wait for the broker to confirm that the flow has stopped
LINGER_S = 1.0  # how long a channel stays open after its last ack; see `Connection.acked`


class Subscription(Holder):
    """One basic.consume on its own channel. After its flow has stopped, it stays until all its deliveries are acked."""

    def __init__(self, consumer: "RabbitConsumer", connection: Connection, prefetch: int) -> None:
        super().__init__(connection, self._acked)
        self._consumer = consumer
        self._prefetch = prefetch
        self._stop_wanted = False
        self._tag = ""
        self._is_started = False
        self.flowing = True  # whether more deliveries can come
        # The close callback is set now, because the connection can be lost before the channel is open.
        connection.raw.channel(on_open_callback=self._on_opened).add_on_close_callback(self._closed)

    @property
    def capacity(self) -> int:
        """How much of its consumer's prefetch it takes up."""
        return self._prefetch if self.flowing else self.unacked

    def stop(self) -> None:
        """Stop the flow. `subscription_stopped` tells the consumer when it has stopped."""
        self._stop_wanted = True
        if self._is_started and self.flowing and self.raw is not None and self.raw.is_open:
            self.raw.basic_cancel(self._tag, callback=lambda _answer: self._flow_ended(None))
            let_through(self.raw, self._tag)

    def abandon(self) -> None:
        """Give up a channel that doesn't answer."""
        self._end(None)
        self.close()

    def _on_opened(self, channel: pika.channel.Channel) -> None:
        self.raw = channel
        # The broker cancels a consumer when its queue is deleted, when the queue's leader is gone, or on a consumer
        # timeout (RabbitMQ 4.3). Deliveries that have already arrived can still be acked.
        cancelled = BrokerUnavailable("the broker cancelled the consumer")
        channel.add_on_cancel_callback(lambda _frame: self._flow_ended(cancelled))
        channel.basic_qos(prefetch_count=self._prefetch)
        # Each subscription has a new tag. If a tag is used again, messages get stuck in quorum queues of older brokers.
        self._tag = f"kvasir-{uuid.uuid4().hex}"
        self._connection.raw.wire.takers[channel.channel_number, self._tag.encode()] = self._on_message
        consumer = self._consumer
        channel.basic_consume(
            consumer.queue,
            self._on_delivery,
            exclusive=consumer.exclusive,
            consumer_tag=self._tag,
            callback=self._consuming,
        )

    def _consuming(self, _answer: Any) -> None:
        self._is_started = True
        self._consumer.subscription_started()
        if self._stop_wanted:
            self.stop()

    def _on_delivery(self, _channel: Any, method: Any, properties: spec.BasicProperties, body: bytes) -> None:
        self._consumer.deliver(self.hold_raw(self._consumer.queue, method, properties, body))

    def _on_message(self, tag: int, message: Message, returns: int) -> None:
        self._consumer.deliver(self.hold(self._consumer.queue, tag, message, returns))

    def _acked(self) -> None:
        if not self.flowing:
            self._close_if_empty()
            self._consumer.fill()

    def _flow_ended(self, error: KvasirError | None) -> None:
        """Note that no more deliveries come. `error` is given if we did not stop the flow ourselves."""
        if self.flowing:
            self.flowing = False
            self._close_if_empty()
            self._consumer.subscription_stopped(error)

    def _close_if_empty(self) -> None:
        if not self.unacked:
            self._connection.later(LINGER_S, self.close)  # no more deliveries can come, so the channel can be closed

    def _closed(self, _channel: pika.channel.Channel, reason: BaseException) -> None:
        if not self.is_lost:
            self._end(translate(reason, f"reading queue {self._consumer.queue}") if self.flowing else None)

    def _end(self, error: KvasirError | None) -> None:
        self.flowing = False
        self.lose()
        if self.raw is not None and self._connection.is_open:
            self._connection.raw.wire.takers.pop((self.raw.channel_number, self._tag.encode()), None)
        self._consumer.subscription_gone(self, error)


class RabbitConsumer(BufferedConsumer[RabbitDelivery]):
    """A `Consumer` on RabbitMQ, whose subscriptions come and go.

    Usually it has one subscription. If deliveries are still held at `pause` and `resume`, a new subscription uses the
    free part of the prefetch, and further ones follow as deliveries are acked. An exclusive consumer can have only one
    subscription at a time, so it uses the rest of its prefetch only after the next pause.
    """

    def __init__(
        self,
        connection: Connection,
        queue: str,
        prefetch: int,
        exclusive: bool,
        on_closed: "Callable[[RabbitConsumer], None]",
    ) -> None:
        super().__init__(queue, prefetch, exclusive, threading.Condition())
        self._connection = connection
        self._on_closed = on_closed
        self._is_paused = False  # guarded by `_condition`, like the buffer
        self._subscriptions: set[Subscription] = set()  # only the IO thread uses this field and the next four
        self._backoff = Backoff()
        self._backing_off = False  # True if the broker has just refused a subscription
        self._quiet: list[Future[None]] = []  # these futures get their result when all subscriptions have stopped
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

    def widen(self, prefetch: int) -> None:
        """See `Consumer`. A subscription's prefetch can't be changed, so another subscription takes the difference."""
        self._prefetch = prefetch
        self._connection.submit(self.fill)

    def pause(self) -> list[Delivery]:
        """See `Consumer`."""
        quiet: Future[None] = Future()
        with self._condition:
            self._is_paused = True
        self._connection.submit(partial(self._stop_all, quiet))
        try:
            await_result(quiet, time.monotonic() + PAUSE_S, f"pausing queue {self.queue}")
        except BrokerUnavailable as error:
            log.warning("%s; its channel is closed instead", describe(error))
            self._connection.submit(self._abandon_all)
        with self._condition:
            deliveries: list[Delivery] = [delivery for delivery in self._buffer if not delivery.is_lost]
            self._buffer.clear()
        return deliveries

    def resume(self) -> None:
        """See `Consumer`."""
        if not self._is_paused:  # `resume` is called for every delivery, so it wakes the IO thread only if needed
            return
        with self._condition:
            self._is_paused = False
        self._connection.submit(self.fill)

    def close(self) -> list[Delivery]:
        """See `Consumer`."""
        self._closed = True
        self.nudge()
        deliveries = self.pause()
        self._on_closed(self)
        return deliveries

    def fill(self) -> None:
        """(IO) Subscribe for the unused part of the prefetch."""
        if self._is_paused or self._closed or self._backing_off or not self._connection.is_open:
            return
        free = self._prefetch - sum(subscription.capacity for subscription in self._subscriptions)
        is_in_use = self.exclusive and any(subscription.flowing for subscription in self._subscriptions)
        if free > 0 and not is_in_use:
            self._subscriptions.add(Subscription(self, self._connection, free))

    def on_connected(self) -> None:
        """(IO) Subscribe after the connection was opened. Refusals on an earlier connection don't count any more."""
        self._backing_off = False
        self.fill()

    def deliver(self, delivery: RabbitDelivery) -> None:
        """(IO) Put a delivery into the buffer."""
        with self._condition:
            self._buffer.append(delivery)
            self._condition.notify()

    def subscription_started(self) -> None:
        """(IO) Note that the broker accepted the subscription."""
        self._backoff.reset()
        settle(self._first)

    def subscription_stopped(self, error: KvasirError | None) -> None:
        """(IO) Note that a subscription gets no more deliveries. `error` is given if we did not stop it ourselves."""
        self._tell_if_quiet()
        if error:
            self._resubscribe(error)

    def subscription_gone(self, subscription: Subscription, error: KvasirError | None) -> None:
        """(IO) Note that a subscription's channel is closed. `error` is given if it was flowing."""
        self._subscriptions.discard(subscription)
        with self._condition:
            self._buffer = deque(delivery for delivery in self._buffer if not delivery.is_lost)
        self._tell_if_quiet()
        if isinstance(error, UsageError):
            settle(self._first, error=error)  # `start` raises this error to its caller
        if error:
            self._resubscribe(error)

    def _resubscribe(self, error: KvasirError) -> None:
        if self._connection.is_open and not self._is_over():
            log.warning("queue %s: subscribing again: %s", self.queue, error)
            self._backing_off = True
            self._connection.later(self._backoff.next_s(), self.on_connected)

    def _is_over(self) -> bool:
        return self._closed or self._connection.is_closed

    def _stop_all(self, quiet: Future[None]) -> None:
        self._quiet.append(quiet)
        for subscription in list(self._subscriptions):
            subscription.stop()
        self._tell_if_quiet()

    def _abandon_all(self) -> None:
        for subscription in list(self._subscriptions):
            if subscription.flowing:
                subscription.abandon()

    def _tell_if_quiet(self) -> None:
        if not any(subscription.flowing for subscription in self._subscriptions):
            for future in self._quiet:
                settle(future)
            self._quiet.clear()
