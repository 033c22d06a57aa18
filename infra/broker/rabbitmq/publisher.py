"""Publishing with confirms in a window, across reconnects.

A message is tracked by its delivery tag, which is also sent in the AMQP property `type`. RabbitMQ returns an unroutable
message without saying which confirm belongs to it, and neither message_id nor the address is unique.
"""

import itertools
import logging
import queue
import re
import threading
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from functools import partial
from typing import Any

import pika.channel  # type: ignore[import-untyped]
from pika import spec
from pika.exceptions import ChannelClosedByBroker  # type: ignore[import-untyped]

from infra.broker.base import Address, Message
from infra.broker.rabbitmq.connection import Backoff, Connection
from infra.broker.rabbitmq.errors import NOT_FOUND, translate
from infra.broker.rabbitmq.wire import Wire
from messages.errors import BrokerUnavailable, InvalidMessage, NoQueue

log = logging.getLogger(__name__)

# When the broker closes the channel because of a bad message, all unconfirmed messages on the channel are published
# again. After this many closings, a message that was unconfirmed each time counts as the bad one.
MAX_REFUSALS = 3
MAX_LOSSY_BACKLOG = 10_000


class Outgoing:
    """A message that is not confirmed yet, and the stream that waits for it."""

    __slots__ = ("is_returned", "message", "refusals", "stream", "to")

    def __init__(self, to: Address, message: Message, stream: "Stream") -> None:
        self.to = to
        self.message = message
        self.stream = stream
        self.is_returned = False
        self.refusals = 0

    def describe(self) -> str:
        """Return the message's id and address, for error messages."""
        return f"message {self.message.message_id or '(no id)'} to {self.to.exchange or '(default)'}/{self.to.key}"


class Publisher:
    """The publishing connection. It has one channel with confirms, and one for messages that may be lost.

    `send`, `send_lossy` and `close` may be called from any thread; everything else runs on the IO thread.
    """

    def __init__(self, settings: Sequence[pika.URLParameters], make_wire: Callable[[], Wire]) -> None:
        self.connection = Connection(settings, self._on_opened, lambda: self.connection.submit(self._drain), make_wire)
        self.connection.is_pinned = lambda: bool(self._in_flight or self._backlog)
        self._channel: pika.channel.Channel | None = None  # set while the channel is in confirm mode
        self._next_tag = 1
        self._in_flight: dict[int, Outgoing] = {}  # delivery tag -> message, in the order of the tags
        self._backlog: deque[Outgoing] = deque()  # any thread appends messages, and the IO thread removes them
        self._is_drain_due = False  # True if the IO thread already has a task that publishes the backlog
        self._lossy: pika.channel.Channel | None = None
        self._lossy_backlog = 0
        self._backoff = Backoff()
        self._closed = False
        self.ready = threading.Event()  # set when both channels are open; the lossy channel opens first

    def send(self, outgoing: Outgoing) -> None:
        """Publish a message, now or once there is a connection. The outcome is put into its stream's `outcomes`."""
        self._backlog.append(outgoing)
        if not self._is_drain_due:
            self._is_drain_due = True
            self.connection.submit(self._drain)

    def send_lossy(self, to: Address, message: Message) -> None:
        """Publish a message if that is possible now; otherwise drop it."""
        if self._lossy_backlog < MAX_LOSSY_BACKLOG and self.connection.is_open:
            self._lossy_backlog += 1
            self.connection.submit(partial(self._send_lossy, to, message))

    def close(self) -> None:
        """Fail all unconfirmed messages, and every message that is sent later."""
        self.connection.submit(self._close)

    def _on_opened(self) -> None:
        """Open both channels, since the connection is new."""
        self._lossy = None
        self._open(self._lossy_opened)
        self._open(self._channel_opened)

    def _drain(self) -> None:
        """Publish the backlog, if that is possible now.

        It runs as a separate task, so that many messages go in one write.
        """
        # Clear this flag before reading the backlog. A message that is added later then submits another task.
        self._is_drain_due = False
        if self._closed:
            self._close()
        channel = self._usable()
        while channel is not None and self._backlog:
            self._publish_next(channel)

    def _open(self, on_opened: Callable[[pika.channel.Channel], None]) -> None:
        if self.connection.is_open and not self._closed:
            self.connection.raw.channel(on_open_callback=on_opened)

    def _channel_opened(self, channel: pika.channel.Channel) -> None:
        channel.add_on_close_callback(self._channel_closed)
        channel.add_on_return_callback(self._on_return)
        channel.confirm_delivery(self._on_confirm, callback=partial(self._ready, channel))

    def _ready(self, channel: pika.channel.Channel, _answer: Any) -> None:
        self._channel = channel
        self.connection.raw.wire.confirmers[channel.channel_number] = self._acked
        self.ready.set()
        self._next_tag = 1
        self.connection.submit(self._drain)

    def _usable(self) -> pika.channel.Channel | None:
        """Return the confirming channel, or None if nothing can be published on it now."""
        channel = self._channel
        usable = channel is not None and channel.is_open and self.connection.is_open and not self.connection.alarm
        return channel if usable else None

    def _publish_next(self, channel: pika.channel.Channel) -> None:
        """Publish the next message of the backlog.

        It fails if it can't be written, and is dropped if its caller is gone.
        """
        outgoing = self._backlog.popleft()
        if outgoing.stream.is_abandoned:
            return
        try:
            self.connection.raw.wire.publish(channel, outgoing.to, outgoing.message, str(self._next_tag))
        # The message can't be written as AMQP, for example because a value is too long, not UTF-8 or out of range.
        except Exception as error:  # noqa: BLE001
            self._fail(outgoing, InvalidMessage(f"{outgoing.describe()} can't be written as AMQP: {error!r:.200}"))
            return
        self._in_flight[self._next_tag] = outgoing
        self._next_tag += 1

    def _on_confirm(self, frame: Any) -> None:
        """Handle basic.ack or basic.nack."""
        answer = frame.method
        self._acked(answer.delivery_tag, answer.multiple, is_refusal=isinstance(answer, spec.Basic.Nack))

    def _acked(self, tag: int, multiple: bool, is_refusal: bool = False) -> None:
        """Handle a confirm of one message, or of all messages up to one."""
        for outgoing in self._take(tag, multiple):
            if outgoing.is_returned:
                self._fail(outgoing, _no_queue(outgoing))
            elif is_refusal:
                self._fail(outgoing, BrokerUnavailable(f"{outgoing.describe()}: the broker refused it (queue full?)"))
            else:
                outgoing.stream.outcomes.put((outgoing, None))
        if is_refusal:
            self._renew()

    def _renew(self) -> None:
        """Close the channel. A new one is opened, and unconfirmed messages are published again on it.

        A channel always uses the node that led a queue when the channel first published to it (seen on 3.10.8). If it
        was opened before the queues of a lost node had new leaders, publishing on it is refused until that node is
        back. A new channel finds the new leaders.
        """
        if self._channel is not None and self._channel.is_open:
            self._channel.close()

    def _take(self, tag: int, multiple: bool) -> list[Outgoing]:
        last = tag or self._next_tag  # tag 0 means all messages
        tags = list(itertools.takewhile(last.__ge__, self._in_flight)) if multiple else [tag]
        self._backoff.reset()
        return [self._in_flight.pop(confirmed_tag) for confirmed_tag in tags if confirmed_tag in self._in_flight]

    def _on_return(self, _channel: Any, _method: Any, properties: spec.BasicProperties, _body: bytes) -> None:
        """Note that a message is unroutable. Its confirm follows."""
        outgoing = self._in_flight.get(int(properties.type or 0))
        if outgoing:
            outgoing.is_returned = True

    def _channel_closed(self, _channel: pika.channel.Channel, reason: BaseException) -> None:
        """Publish unconfirmed messages again.

        The channel was closed with its connection, or by the broker for a bad message.
        """
        self._channel = None
        retries = [outgoing for outgoing in self._in_flight.values() if not self._is_refused(outgoing, reason)]
        self._in_flight.clear()
        self._backlog.extendleft(reversed(retries))
        if self.connection.is_open:
            if isinstance(reason, ChannelClosedByBroker):
                log.warning("the broker closed the publishing channel: %s", reason)
            self.connection.later(self._backoff.next_s(), partial(self._open, self._channel_opened))

    def _is_refused(self, outgoing: Outgoing, reason: BaseException) -> bool:
        """Whether the closed channel means that this message failed. If so, it is reported as failed here."""
        exchange = _missing_exchange(reason)
        if outgoing.is_returned or exchange == outgoing.to.exchange:
            self._fail(outgoing, _no_queue(outgoing))
            return True
        if isinstance(reason, ChannelClosedByBroker) and exchange is None:
            outgoing.refusals += 1
        if outgoing.refusals < MAX_REFUSALS:
            return False
        self._fail(outgoing, translate(reason, outgoing.describe()))
        return True

    def _fail(self, outgoing: Outgoing, error: Exception) -> None:
        outgoing.stream.outcomes.put((outgoing, error))

    def _lossy_opened(self, channel: pika.channel.Channel) -> None:
        channel.add_on_close_callback(self._lossy_closed)
        self._lossy = channel

    def _lossy_closed(self, _channel: pika.channel.Channel, _reason: BaseException) -> None:
        self._lossy = None
        if self.connection.is_open:
            self.connection.later(1.0, partial(self._open, self._lossy_opened))

    def _send_lossy(self, to: Address, message: Message) -> None:
        self._lossy_backlog -= 1
        if self._lossy is None or not self._lossy.is_open or self.connection.alarm:
            return
        try:
            self.connection.raw.wire.publish(self._lossy, to, message, "")
        except Exception as error:  # noqa: BLE001  no caller waits for the outcome
            log.debug("dropped a message to %s: %r", to, error)

    def _close(self) -> None:
        self._closed = True
        self._backlog.extendleft(reversed(self._in_flight.values()))
        self._in_flight.clear()
        while self._backlog:
            outgoing = self._backlog.popleft()
            self._fail(outgoing, BrokerUnavailable(f"{outgoing.describe()}: closed before it was confirmed"))


class Stream:
    """The messages of one call. At most `window` of them are unconfirmed."""

    def __init__(self, publisher: Publisher, window: int, timeout_s: float | None) -> None:
        self._publisher = publisher
        self._window = max(1, window)
        self._timeout_s = timeout_s
        self._in_flight = 0
        self._confirm_count = 0
        self._error: Exception | None = None
        self.outcomes: queue.SimpleQueue[tuple[Outgoing, Exception | None]] = queue.SimpleQueue()
        self.is_abandoned = False  # True if the caller is gone; its messages are then not published again

    def publish_all(self, sends: Iterable[tuple[Address, Message]], on_confirmed: Callable[[Message], None]) -> int:
        """Publish all messages, and return how many were confirmed.

        Raises the first error once no message is in flight.
        """
        try:
            for to, message in sends:
                self._wait_for_window(on_confirmed)
                if self._error:
                    break
                self._in_flight += 1
                self._publisher.send(Outgoing(to, message, self))
            while self._in_flight:
                self._settle_one(on_confirmed)
        finally:
            self.is_abandoned = True
        if self._error:
            raise self._error
        return self._confirm_count

    def _wait_for_window(self, on_confirmed: Callable[[Message], None]) -> None:
        if self._in_flight >= self._window:
            # Wait until a tenth of the window is free. If this thread went on after every confirm, the CPU would switch
            # between it and the IO thread for each message. If this thread waited until more is free, the broker would
            # run out of messages, because the IO thread sends hardly any while this thread makes new ones.
            while self._in_flight > self._window - max(1, self._window // 10):
                self._settle_one(on_confirmed)
        while not self.outcomes.empty():
            self._settle_one(on_confirmed)

    def _settle_one(self, on_confirmed: Callable[[Message], None]) -> None:
        try:
            outgoing, error = self.outcomes.get(timeout=self._timeout_s)
        except queue.Empty:
            raise BrokerUnavailable(
                f"no confirmation from the broker within {self._timeout_s:g} s; {self._in_flight} messages "
                "are unconfirmed"
            ) from self._error
        self._in_flight -= 1
        if error:
            self._error = self._error or error
        else:
            self._confirm_count += 1
            on_confirmed(outgoing.message)


def _missing_exchange(reason: BaseException) -> str | None:
    """Return the exchange whose absence made the broker close the channel; None if it was closed for another reason."""
    if not isinstance(reason, ChannelClosedByBroker) or reason.reply_code != NOT_FOUND:
        return None
    match = re.search(r"no exchange '(.*)' in vhost", reason.reply_text)
    return match[1] if match else None


def _no_queue(outgoing: Outgoing) -> NoQueue:
    return NoQueue(
        f"{outgoing.describe()}: the broker has no queue for the message. "
        "Check that the model is in the configuration of every machine."
    )
