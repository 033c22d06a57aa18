"""Several addresses of one Redis, in order of preference: a fast link first, and a slow one for when it fails.

A connection goes to the first address that answers. While that is not the preferred one, a thread checks whether the
preferred one answers again. Idle connections are then closed, and new ones go there.
"""

import logging
import socket
import threading
from collections.abc import Callable
from typing import Any, TypeVar
from urllib.parse import urlsplit

import redis
from redis import exceptions
from redis.backoff import NoBackoff
from redis.connection import Connection, SSLConnection
from redis.retry import Retry

from messages.urls import addresses

T = TypeVar("T")
log = logging.getLogger(__name__)

# If there are several addresses, a dead address is given up within 2 s: it has 1 s to make progress, and then half a
# second to accept a new connection.
TIMEOUT_S = 1.0
GLANCE_S = 0.5
RETURN_S = 5.0
_CONNECTION_ERRORS = (exceptions.ConnectionError, exceptions.TimeoutError, OSError)


class Links:
    """Which of several addresses is in use. May be used from any thread."""

    def __init__(self, url: str) -> None:
        self.urls = addresses(url)
        self.current = 0
        # A separate thread calls these functions when the address has changed. If the list is empty, no thread looks
        # for a better address.
        self.on_change: list[Callable[[], object]] = []
        self._lock = threading.Lock()
        self._close_event = threading.Event()
        self._is_looking = False

    @property
    def has_choice(self) -> bool:
        """Whether there are several addresses."""
        return len(self.urls) > 1

    def timeout_s(self, wanted_s: float) -> float:
        """Return how long to wait for progress on a connection."""
        return min(wanted_s, TIMEOUT_S) if self.has_choice else wanted_s

    def first(self, attempt: Callable[[int], T]) -> T:
        """Return what `attempt` (index of an address) returns for the first address that works.

        Raises the first failure.
        """
        failures: list[Exception] = []
        order = [self.current, *(index for index in range(len(self.urls)) if index != self.current)]
        for index in order:
            try:
                connection = attempt(index)
            except _CONNECTION_ERRORS as failure:
                failures.append(failure)
            else:
                if index != self.current:
                    self._move(index)
                return connection
        raise failures[0]

    def close(self) -> None:
        """Stop looking for a better address."""
        self._close_event.set()

    def _move(self, index: int) -> None:
        host = urlsplit(self.urls[index]).netloc.rpartition("@")[2]
        log.log(logging.WARNING if index else logging.INFO, "the store is reached at %s", host)
        with self._lock:
            self.current = index
            if self._is_looking or self._close_event.is_set() or not self.on_change:
                return
            self._is_looking = True
        threading.Thread(target=self._look, name="links of the store", daemon=True).start()

    def _look(self) -> None:
        """Have idle connections to other addresses closed, and look for a better address.

        Ends when the preferred address is in use.
        """
        announced_index = 0
        while True:
            with self._lock:
                current = self.current
                if announced_index == current == 0 or self._close_event.is_set():
                    self._is_looking = False
                    return
            if announced_index != current:
                announced_index = current
                for tell in self.on_change:
                    tell()
            if current:
                self._close_event.wait(RETURN_S)
                self._return()

    def _return(self) -> None:
        for index in range(0 if self._close_event.is_set() else self.current):
            if self._answers(index):
                self._move(index)
                return

    def _answers(self, index: int) -> bool:
        no_retry = Retry(NoBackoff(), 0)
        limits = {"socket_timeout": TIMEOUT_S, "socket_connect_timeout": GLANCE_S}
        client = redis.Redis.from_url(self.urls[index], protocol=2, retry=no_retry, **limits)
        try:
            return bool(client.ping())
        except (exceptions.RedisError, OSError):
            return False
        finally:
            client.close()


def connection_class(links: Links) -> type[Connection]:
    """Return redis-py's connection class, changed to connect to the first address that answers."""
    base: Any = SSLConnection if links.urls[0].startswith("rediss:") else Connection

    class FailoverConnection(base):  # type: ignore[misc]
        index = 0

        def should_reconnect(self) -> bool:
            return self.index != links.current or bool(super().should_reconnect())

        def _connect(self) -> socket.socket:
            return links.first(self._connect_at)

        def _connect_at(self, index: int) -> socket.socket:
            parts = urlsplit(links.urls[index])
            self.index, self.host, self.port = index, parts.hostname, parts.port or 6379
            raw_socket: socket.socket = super()._connect()
            return greet(raw_socket)

    return FailoverConnection


def greet(connection: socket.socket) -> socket.socket:
    """Return the socket if a server answers on it, even if only to ask for a password. Raises OSError."""
    timeout = connection.gettimeout()
    try:
        connection.settimeout(GLANCE_S)
        connection.sendall(b"PING\r\n")
        answer = b""
        while not answer.endswith(b"\r\n"):
            chunk = connection.recv(1024)
            if not chunk:
                raise ConnectionResetError("the store closed the connection before it answered")
            answer += chunk
        connection.settimeout(timeout)
    except OSError:
        connection.close()
        raise
    return connection
