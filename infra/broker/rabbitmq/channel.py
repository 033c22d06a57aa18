"""Synchronous commands from a caller's thread. Each conversation has its own channel.

The broker refuses a command (404, 406) by closing the channel, so a channel is closed after use anyway.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future, InvalidStateError
from contextlib import closing
from functools import partial
from typing import Any, TypeVar

import pika.channel  # type: ignore[import-untyped]

from infra.broker.rabbitmq.connection import Connection
from infra.broker.rabbitmq.errors import translate
from messages.errors import BrokerUnavailable

T = TypeVar("T")
Answer = Callable[[Any], object]  # a function that is called with the broker's answer


def settle(future: Future[T], value: T | None = None, error: BaseException | None = None) -> bool:
    """Set the future's result or error. Returns False if it was set before, or if its caller gave up."""
    try:
        if error is None:
            future.set_result(value)  # type: ignore[arg-type]
        else:
            future.set_exception(error)
    except InvalidStateError:
        return False
    return True


def await_result(future: Future[T], deadline: float, action: str) -> T:
    """Return the future's result. Raises BrokerUnavailable at `deadline` (monotonic), and cancels the future."""
    try:
        return future.result(max(0.0, deadline - time.monotonic()))
    except TimeoutError:
        if not future.cancel():
            return future.result()
        raise BrokerUnavailable(f"{action}: the broker did not answer in time") from None


class Channel:
    """One conversation. A method raises the translated error if the channel or the connection closes."""

    def __init__(self, connection: Connection, action: str, deadline: float) -> None:
        self._connection = connection
        self._action = action
        self._deadline = deadline
        self._pending: Future[Any] = Future()
        self._raw: pika.channel.Channel = self._ask(self._open)

    def call(self, command: str, **arguments: Any) -> Any:
        """Run one of pika's channel commands. Returns the broker's answer (a method of `pika.spec`)."""
        return self._ask(lambda answer: getattr(self._raw, command)(callback=answer, **arguments)).method

    def close(self) -> None:
        """Close the channel, without waiting for the broker."""
        self._connection.submit(self._close)

    def _ask(self, start: Callable[[Answer], object]) -> Any:
        future: Future[Any] = Future()
        self._pending = future
        self._connection.submit(partial(self._start, start, future))
        return await_result(future, self._deadline, self._action)

    def _start(self, start: Callable[[Answer], object], future: Future[Any]) -> None:
        try:
            start(partial(settle, future))
        except Exception as error:  # noqa: BLE001  any error of pika or the socket is raised in the caller's thread
            settle(future, error=translate(error, self._action))

    def _open(self, answer: Answer) -> None:
        self._connection.raw.channel(on_open_callback=answer).add_on_close_callback(self._closed)

    def _closed(self, _raw: pika.channel.Channel, reason: BaseException) -> None:
        settle(self._pending, error=translate(reason, self._action))

    def _close(self) -> None:
        if self._raw.is_open:
            self._raw.close()


def over_reconnects(connection: Connection, timeout_s: float, attempt: Callable[[float], T]) -> T:
    """Return what `attempt(deadline)` returns.

    It must be repeatable: it is tried again if the connection is lost meanwhile. Raises what `attempt` raises, or
    BrokerUnavailable after `timeout_s`.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        connection.wait_open(deadline - time.monotonic())
        openings = connection.openings
        try:
            return attempt(deadline)
        except BrokerUnavailable:
            is_same_connection = connection.is_open and connection.openings == openings
            if is_same_connection or connection.is_closed or time.monotonic() >= deadline:
                raise


def converse(connection: Connection, action: str, timeout_s: float, talk: Callable[[Channel], T]) -> T:
    """Run `talk`, which must be safe to repeat, on a new channel.

    Raises the error that the broker's refusal means (NoQueue, BatchError, ConfigError), or BrokerUnavailable after
    `timeout_s`.
    """

    def attempt(deadline: float) -> T:
        with closing(Channel(connection, action, deadline)) as channel:
            return talk(channel)

    return over_reconnects(connection, timeout_s, attempt)
