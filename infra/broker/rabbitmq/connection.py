"""One AMQP connection with its own IO thread. It reconnects without limit until it is closed.

With several addresses (nodes of a cluster, or links to one node) it uses the first that answers. It returns to the
preferred address when that costs nothing: while no delivery is held and no answer is being streamed.

pika is not thread-safe, so everything that touches it runs on the IO thread, as a task given to `submit`. Methods
marked (IO) may be called only there. The IO thread answers heartbeats while the other threads compute.
"""

import logging
import ssl
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from copy import copy
from functools import partial
from typing import Any, Protocol
from urllib.parse import parse_qs, urlsplit
from weakref import WeakSet

import pika  # type: ignore[import-untyped]
from pika.adapters.select_connection import IOLoop  # type: ignore[import-untyped]
from pika.exceptions import ConnectionClosedByClient  # type: ignore[import-untyped]
from tenacity import RetryCallState, Retrying, wait_exponential, wait_random

from infra.broker.rabbitmq.errors import describe, is_hopeless, translate
from infra.broker.rabbitmq.pika_inside import GuardedConnection
from infra.broker.rabbitmq.wire import Wire
from messages.errors import BrokerUnavailable, ConfigError
from messages.urls import addresses

log = logging.getLogger(__name__)
# pika logs each lost connection several times, as an error with a traceback. Kvasir logs it once, and raises an error.
logging.getLogger("pika").setLevel(logging.CRITICAL)

Task = Callable[[], None]

# When a process is killed, the system closes its sockets. So heartbeats are needed only when a machine or a network
# vanishes. With this interval, the broker notices the loss within 40 to 60 s, and this process notices it within 25 s.
#
# With a shorter interval, a working connection could be given up by mistake. Every job that was delivered on it would
# then be decoded again.
HEARTBEAT_S = 20
# A memory or disk alarm blocks publishers. If they stay blocked for this many seconds, the connection is closed and
# opened again.
BLOCKED_S = 300
CONNECT_S = 5
# If there are several addresses, the first attempt at each address takes at most this many seconds. Later attempts take
# at most CONNECT_S.
GLANCE_S = 0.8
RETURN_S = 10.0  # pause between two checks for a better address
_BATCH_TASKS = 200
CLOSE_S = 5
SETTLE_S = 0.1  # pause between the last ack and closing the connection; see `Connection.acked`

_BACKOFF = wait_exponential(multiplier=0.05, max=1.8) + wait_random(0, 0.2)


class Backoff:
    """Growing pauses between tries, at most 2 s."""

    def __init__(self) -> None:
        self._state = RetryCallState(Retrying(), None, (), {})

    def next_s(self) -> float:
        """Return the next pause in seconds."""
        pause: float = _BACKOFF(self._state)
        self._state.attempt_number += 1
        return pause

    def reset(self) -> None:
        """Begin with short pauses again, after a success."""
        self._state.attempt_number = 1


class DeliveryHolder(Protocol):
    """A channel that holds deliveries."""

    @property
    def unacked(self) -> int:
        """(IO) How many of its deliveries would come again if the connection were lost."""


def all_parameters(url: str, name: str, ca_file: str = "") -> list[pika.URLParameters]:
    """Return the `parameters` of each address in the URL, in order of preference."""
    return [parameters(address, name, ca_file) for address in addresses(url)]


def parameters(url: str, name: str, ca_file: str = "") -> pika.URLParameters:
    """Return connection parameters for `amqp://` and `amqps://`. Options in the URL's query win. Raises ConfigError.

    Certificates are checked against `ca_file` (PEM) or the system's CAs, and against the host's name.
    """
    settings = _read(url)
    if settings is None:
        raise ConfigError(_mistake(url))
    options = parse_qs(urlsplit(url).query)
    defaults = {
        "heartbeat": HEARTBEAT_S,
        "blocked_connection_timeout": BLOCKED_S,
        "socket_timeout": CONNECT_S,
        "stack_timeout": CONNECT_S,
    }
    for option, value in defaults.items():
        if option not in options:
            setattr(settings, option, value)
    if settings.ssl_options is not None and "ssl_options" not in options:
        # pika's default TLS options contain no host name, so the check of the certificate would fail with them.
        settings.ssl_options = pika.SSLOptions(_tls(ca_file), settings.host)
    settings.connection_attempts = 1
    settings.client_properties = {"connection_name": name}
    return settings


def _read(url: str) -> pika.URLParameters | None:
    """Return pika's parameters, or None if the URL can't be read."""
    try:
        return pika.URLParameters(url) if url.startswith(("amqp://", "amqps://")) else None
    except (ValueError, TypeError, AttributeError, IndexError):
        return None


def _mistake(url: str) -> str:
    """Say what is wrong with an unreadable URL, without its values, since one may be a password."""
    bare, _, query = url.partition("?")
    if query and _read(bare):
        return f"the broker's URL has an option that can't be used: {' or '.join(parse_qs(query, True)) or query:.80}"
    with suppress(ValueError):
        parts = urlsplit(bare)
        if parts.username and parts.password is None:
            return (
                f"there is no password for the broker's user {parts.username!r:.80}: "
                "set broker_password_file in [services], or KVASIR_BROKER_PASSWORD"
            )
    return "the broker's URL must look like amqp://user@host:5672/vhost (or amqps://…), with the password in a file"


def _tls(ca_file: str) -> ssl.SSLContext:
    try:
        return ssl.create_default_context(cafile=ca_file or None)
    except OSError as error:  # ssl.SSLError is a subclass of OSError
        raise ConfigError(f"the broker's CA file {ca_file} can't be used: {error}") from None


def _place(settings: pika.connection.Parameters) -> str:
    return f"{settings.host}:{settings.port}"


class Connection:
    """One connection; see the module's description.

    `on_open` runs on the IO thread after every opening. `on_unblocked` runs there when an alarm has ended.
    """

    def __init__(
        self,
        settings: Sequence[pika.URLParameters],
        on_open: Task,
        on_unblocked: Task,
        make_wire: Callable[[], Wire],
    ) -> None:
        self._choices = list(settings)
        self._make_wire = make_wire
        self._choice = 0
        # How many times all addresses have been tried since the connection was last open.
        self._rounds = 0
        # While another address is in use, this second connection tries the preferred address.
        self._better: GuardedConnection | None = None
        self._on_open = on_open
        self._on_unblocked = on_unblocked
        self._loop = IOLoop()
        self._raw: GuardedConnection | None = None
        self._tasks: deque[Task] = deque()
        self._wake_pending = False
        self._condition = threading.Condition()
        self._open = False
        self._closing = False
        self._has_ended = False
        # The error that makes further attempts pointless. It is set only before the connection opens for the first
        # time, because any later failure can be temporary.
        self._hopeless: BaseException | None = None
        self._failure: BaseException | None = None
        self._backoff = Backoff()
        self._acked_at = -SETTLE_S
        self._refusals = 0  # refusals in the current round through all addresses
        self.openings = 0
        # (IO) channels that can have unacked deliveries
        self.holders: WeakSet[DeliveryHolder] = WeakSet()
        # (IO) Whether leaving this address would lose something besides deliveries, for example streamed tokens.
        self.is_pinned: Callable[[], bool] = lambda: False
        self.alarm = ""  # (IO) the broker's reason for blocking publishers, or ""
        self.server: dict[str, Any] = {}  # the server's properties, read when the connection last opened
        name = str(settings[0].client_properties["connection_name"])
        self._thread = threading.Thread(target=self._run, name=f"amqp {name}", daemon=True)

    def start(self) -> None:
        """Begin to connect. Call it once, when the callbacks are ready to be called."""
        self._thread.start()

    @property
    def peer(self) -> str:
        """The `host:port` that it is connected to or tries to reach."""
        return _place(self._choices[self._choice])

    @property
    def is_open(self) -> bool:
        """Whether the connection is open now, as far as pika knows."""
        raw = self._raw
        return self._open and raw is not None and raw.is_open

    @property
    def is_closed(self) -> bool:
        """Whether `close` was called."""
        return self._closing

    @property
    def raw(self) -> GuardedConnection:
        """(IO) pika's connection. Raises BrokerUnavailable while there is none."""
        if self._raw is None or not self.is_open:
            raise self.unavailable()
        return self._raw

    def unavailable(self) -> BrokerUnavailable:
        """Return an error that says why the connection is not open."""
        if self._closing:
            return BrokerUnavailable("the connection to the broker was closed by this process")
        reason = f": {describe(self._failure)}" if self._failure else ""
        hosts = " or ".join(map(_place, self._choices))
        return BrokerUnavailable(f"no connection to the broker at {hosts}{reason}")

    def wait_open(self, timeout_s: float) -> None:
        """Wait until the connection is open. Raises BrokerUnavailable, or ConfigError if waiting can't help."""
        with self._condition:
            self._condition.wait_for(lambda: self._open or self._closing or self._hopeless, timeout_s)
            if self._hopeless:
                raise translate(self._hopeless, f"can't connect to the broker at {self.peer}")
            if not self._open:
                raise self.unavailable()

    def submit(self, task: Task) -> None:
        """Run `task` on the IO thread, in the order of submission. The task must not raise.

        Once that thread has ended, the task runs in the caller's thread. It then finds no connection, and reports that
        to its own caller.
        """
        self._tasks.append(task)
        if self._has_ended:
            self._run_tasks()
        elif not self._wake_pending:
            self._wake_pending = True
            self._loop.add_callback_threadsafe(self._run_tasks)

    def later(self, delay_s: float, task: Task) -> None:
        """(IO) Run `task` after a while."""
        self._loop.call_later(delay_s, task)

    def acked(self) -> None:
        """(IO) Note that an ack was sent, so that closing waits for a moment.

        RabbitMQ handles acks to a quorum queue in a pipeline. If more than 32 are in it, the rest waits in the
        channel's process and is lost when the channel closes: the messages then come again (seen on 3.10.8).
        """
        self._acked_at = time.monotonic()

    def close(self) -> None:
        """Run the submitted tasks, close the connection properly, and end the thread. Idempotent."""
        self.submit(self._begin_close)
        self._thread.join(CLOSE_S)
        if self._thread.is_alive():  # a broker with an active resource alarm reads nothing here, so it doesn't answer
            self.submit(lambda: self._cut("no answer to closing"))
            self._thread.join(CLOSE_S)

    def _run(self) -> None:
        self._connect()
        while True:
            try:
                self._loop.start()
                break
            except Exception:  # a bug in one task must not end the thread that all callers use
                log.exception("broker connection to %s: bug in a task; connecting again", self.peer)
                self._cut("a bug of ours")
        # This flag is set before the tasks run for the last time. A task that is added later runs in its caller's
        # thread.
        self._has_ended = True
        self._run_tasks()
        self._loop.close()

    def _run_tasks(self) -> None:
        # Clear this flag before the loop, not after it, so that a task that is added after the loop wakes the thread.
        self._wake_pending = False
        while self._tasks:
            wire = self._raw.wire if self._raw is not None else Wire()
            wire.cork()
            for _ in range(min(len(self._tasks), _BATCH_TASKS)):
                self._tasks.popleft()()
            wire.uncork()

    def _connect(self) -> None:
        if not self._closing:
            self._raw = self._try(self._choice, self._on_opened, self._on_lost, glance=self._rounds == 0)

    def _try(self, choice: int, on_opened: Any, on_failed: Any, *, glance: bool) -> GuardedConnection:
        settings = copy(self._choices[choice])
        if glance and len(self._choices) > 1:
            settings.socket_timeout = settings.stack_timeout = GLANCE_S
        return GuardedConnection(settings, on_opened, on_failed, self._loop, self._make_wire)

    def _on_opened(self, raw: GuardedConnection) -> None:
        raw.add_on_connection_blocked_callback(lambda _, frame: self._set_alarm(str(frame.method.reason or "an alarm")))
        raw.add_on_connection_unblocked_callback(lambda *_: self._set_alarm(""))
        self._backoff.reset()
        self._rounds = self._refusals = 0
        if self._choice:
            log.warning("connected to the broker at %s: no better address answers", self.peer)
            self.later(RETURN_S, partial(self._look_for_better, raw))
        raw.opened(self.later)
        previous_cluster, now = self.server.get("cluster_name"), dict(raw.server_properties or {})
        if previous_cluster and previous_cluster != now.get("cluster_name"):
            log.error(
                "the broker at %s is not the one used before: messages that wait in one are not in the other", self.peer
            )
        with self._condition:
            self.alarm = ""
            self.server = now
            self._open = True
            self.openings += 1
            self._hopeless = None
            self._condition.notify_all()
        self._on_open()

    def _set_alarm(self, reason: str) -> None:
        log.warning("broker at %s: publishing is %s", self.peer, "blocked by an alarm" if reason else "free again")
        self.alarm = reason
        if not reason:
            self._on_unblocked()

    def _on_lost(self, raw: GuardedConnection, reason: BaseException) -> None:
        """Handle an open connection that was lost, or one that could not be opened."""
        reason = raw.wire.cut_reason or reason
        if self._open and not self._closing and not isinstance(reason, ConnectionClosedByClient):
            log.warning("connection to the broker at %s is lost: %s", self.peer, describe(reason))
        was_open = self._open
        with self._condition:
            self._open = False
            self._failure = reason
            self._refusals += is_hopeless(reason)
            if self._refusals == len(self._choices) and not self.openings:
                self._hopeless = reason
            self._condition.notify_all()
        self._raw = None
        if self._closing:
            self._loop.stop()
        else:
            self.later(self._pause_s(was_open), self._connect)

    def _pause_s(self, was_open: bool) -> float:
        """Choose the next address: the next by preference, or the first after the last.

        Returns how long to wait before trying.
        """
        if not was_open and self._choice + 1 < len(self._choices):
            self._choice += 1
            return 0.0
        self._choice = self._refusals = 0
        self._rounds += not was_open
        return self._backoff.next_s()

    def _look_for_better(self, raw: GuardedConnection) -> None:
        """(IO) Try the preferred address. `raw` is the connection that was open when this was planned."""
        if raw is not self._raw or not self.is_open or self._closing:
            return
        if self._in_use():
            self.later(RETURN_S, partial(self._look_for_better, raw))
        else:
            self._better = self._try(0, partial(self._return, raw), partial(self._stay, raw), glance=True)

    def _return(self, old: GuardedConnection, better: GuardedConnection) -> None:
        """(IO) Close the current connection, so that it is opened again at the preferred address.

        Nothing is done if the connection is in use now.
        """
        if old is self._raw and not self._closing and not self._in_use():
            log.info("the broker at %s answers again: going back to it", _place(better.params))
            old.close()
        better.close()

    def _in_use(self) -> bool:
        """(IO) Whether leaving this address would have work done twice, or lose something."""
        return self.is_pinned() or any(holder.unacked for holder in self.holders)

    def _stay(self, old: GuardedConnection, _better: object, _reason: BaseException) -> None:
        """(IO) Note that the preferred address did not answer, and plan the next try."""
        self._better = None
        self.later(RETURN_S, partial(self._look_for_better, old))

    def _begin_close(self) -> None:
        with self._condition:
            self._closing = True
            self._condition.notify_all()
        if self._raw is None:
            self._loop.stop()
        else:
            self.later(max(0.0, self._acked_at + SETTLE_S - time.monotonic()), self._say_goodbye)

    def _say_goodbye(self) -> None:
        if self._raw is not None and not self._raw.is_closing and not self._raw.is_closed:
            self._raw.close()

    def _cut(self, reason: str) -> None:
        if self._raw is not None and not self._raw.is_closed:
            self._raw.cut(reason)
        elif self._closing:
            self._loop.stop()
