"""basic_get, with a separate channel for each delivery until it is acked.

The broker closes a channel that asks for a missing queue; other deliveries must not be lost with it.
"""

from concurrent.futures import Future
from functools import partial
from typing import Any

import pika.channel  # type: ignore[import-untyped]
from pika import spec

from infra.broker.rabbitmq.channel import await_result, over_reconnects, settle
from infra.broker.rabbitmq.connection import Connection
from infra.broker.rabbitmq.delivery import Holder, RabbitDelivery
from infra.broker.rabbitmq.errors import translate
from messages.errors import KvasirError

MAX_IDLE = 4  # maximum number of idle channels that are kept for later gets


class Getter:
    """Gets single messages. It keeps a few idle channels for the next calls."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection
        self._idle: list[_GetChannel] = []  # IO thread only

    def get(self, queue: str, timeout_s: float) -> RabbitDelivery | None:
        """Return one ready message, or None. Raises NoQueue, BrokerUnavailable."""

        def attempt(deadline: float) -> RabbitDelivery | None:
            future: Future[RabbitDelivery | None] = Future()
            self._connection.submit(partial(self._get, queue, future))
            return await_result(future, deadline, f"getting from queue {queue}")

        return over_reconnects(self._connection, timeout_s, attempt)

    def free(self, channel: "_GetChannel") -> None:
        """(IO) Take back a channel that holds no delivery."""
        if len(self._idle) < MAX_IDLE:
            self._idle.append(channel)
        else:
            channel.close()

    def forget(self, channel: "_GetChannel") -> None:
        """(IO) Forget a channel that is closed."""
        if channel in self._idle:
            self._idle.remove(channel)

    def _get(self, queue: str, future: Future[RabbitDelivery | None]) -> None:
        try:
            # pika sends a get even on a channel that is being closed. The broker then closes the connection (504).
            channel = (
                self._idle.pop() if self._idle and self._connection.is_open else _GetChannel(self, self._connection)
            )
        except KvasirError as error:
            settle(future, error=error)
        else:
            channel.get(queue, future)


class _GetChannel(Holder):
    """A channel for one basic_get at a time. Everything but acks runs on the IO thread."""

    def __init__(self, getter: Getter, connection: Connection) -> None:
        super().__init__(connection, lambda: getter.free(self))
        self._getter = getter
        self._queue = ""
        self._future: Future[RabbitDelivery | None] = Future()
        # The close callback is set now, because the connection can be lost before the channel is open.
        connection.raw.channel(on_open_callback=self._on_opened).add_on_close_callback(self._closed)

    def get(self, queue: str, future: Future[RabbitDelivery | None]) -> None:
        """Ask for a message, now or once the channel is open."""
        self._queue, self._future = queue, future
        if self.raw is not None:
            self.raw.basic_get(queue, self._on_message)

    def _on_opened(self, channel: pika.channel.Channel) -> None:
        self.raw = channel
        channel.add_callback(self._empty, [spec.Basic.GetEmpty], one_shot=False)
        channel.basic_get(self._queue, self._on_message)

    def _on_message(self, _channel: Any, method: Any, properties: spec.BasicProperties, body: bytes) -> None:
        if not settle(self._future, self.hold_raw(self._queue, method, properties, body)):
            self.close()  # the caller gave up waiting; closing returns the message to the broker

    def _empty(self, _frame: Any) -> None:
        settle(self._future)
        self._getter.free(self)

    def _closed(self, _channel: pika.channel.Channel, reason: BaseException) -> None:
        self.lose()
        self._getter.forget(self)
        settle(self._future, error=translate(reason, f"getting from queue {self._queue}"))
