"""HTTP requests to a llama.cpp or vLLM server that can be cancelled while the server computes.

Each request has its own connection and runs in its caller's thread, because passing a token between threads costs more
time than a small model needs to compute it. Ten times a second, reads check whether the answer is still wanted. If not,
closing the connection tells the server.
"""

import base64
import http.client
import io
import json
import logging
import socket
import threading
import time
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import quote, unquote, urlsplit

from engines.waiting import POLL_S, check_running
from messages.errors import EngineUnavailable
from messages.limits import MAX_SERVER_REPLY_BYTES, MAX_STREAM_BYTES

_log = logging.getLogger(__name__)

_CONNECT_S = 10.0
_SEND_S = 30.0
_END_S = 1.0  # how long `close` waits for requests in progress to end
_ANSWER_S = 30.0  # time limit for requests that need no computing
_HEALTH = "/health"
# HTTP statuses from a proxy whose server is unavailable, or from a server that is still loading its model.
_NOT_THERE = (502, 503, 504)
PATIENCE_S = 10.0  # how long to wait for an answer to /health
_HEALTH_EVERY_S = 2.0
_END = b"[DONE]"  # of vLLM's streams
_WITHOUT_END = "the server's answer is longer than any answer may be"


def socket_url(path: Path) -> str:
    """The address of a server that listens on a socket in the file system."""
    return f"unix://{quote(str(path))}"


class ServerRefused(EngineUnavailable):
    """The server answered with an error; `kind` is its own name for it."""

    def __init__(self, message: str, status: int, kind: str = "") -> None:
        super().__init__(message)
        self.status = status
        self.kind = kind


class LlamaServer:
    """The HTTP connection to one server. All methods may be called from any thread, and raise EngineUnavailable."""

    def __init__(self, url: str, name: str = "llama.cpp", api_key: str = "") -> None:
        self.url = url.rstrip("/")
        self._name = name
        parts = urlsplit(self.url)
        self.connect: Callable[..., http.client.HTTPConnection]  # makes a new connection with the given `timeout`
        if parts.scheme == "unix":
            self.connect = partial(_UnixConnection, unquote(parts.path))
        else:
            kind = http.client.HTTPSConnection if parts.scheme == "https" else http.client.HTTPConnection
            self.connect = partial(kind, parts.hostname or "", parts.port)
        self._path = "" if parts.scheme == "unix" else parts.path
        self._headers = {"Content-Type": "application/json"}
        if parts.username:
            account = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
            self._headers["Authorization"] = f"Basic {base64.b64encode(account).decode()}"
        elif api_key:
            self._headers["Authorization"] = f"Bearer {api_key}"
        self.outage = ""  # why the server does not answer; empty while it answers
        self.is_watched = False  # whether `watch` keeps checking the server
        self._closed = threading.Event()
        self._silent = threading.Event()
        self._answering: set[object] = set()  # connections that wait for an answer
        self._answer_ended = threading.Condition()

    def get(self, path: str) -> Any:
        """The server's answer, parsed as JSON."""
        with self._response("GET", path, None, None, _ANSWER_S) as response:
            return self._json(response.read())

    def post(
        self, path: str, body: dict[str, Any], stop: threading.Event | None = None, timeout_s: float = float("inf")
    ) -> Any:
        """The server's answer, parsed as JSON. Raises Cancelled soon after `stop` is set."""
        with self._response("POST", path, body, stop, timeout_s) as response:
            return self._json(response.read())

    def stream(self, path: str, body: dict[str, Any], stop: threading.Event | None = None) -> Generator[Any]:
        """The server-sent events, each parsed as JSON. Raises Cancelled soon after `stop` is set."""
        with self._response("POST", path, body, stop, most_bytes=MAX_STREAM_BYTES) as response:
            for line in _lines(response):
                self._check_running(stop)
                kind, _, value = line.partition(b": ")
                if kind == b"error":
                    raise self._refusal(500, value)
                if kind == b"data" and value != _END:
                    yield self._json(value)
            self._check_running(stop)  # the stream of a killed server ends without an error

    def is_silent(self, patience_s: float) -> bool:
        """Ask /health, and wait `patience_s` for any answer. If there is none, requests raise EngineUnavailable until
        there is.

        A refused connection is not silence, because then no server is running that could hang. The server counts as
        away in that case, and while it loads.
        """
        silent, outage = False, ""
        try:
            with self._response("GET", _HEALTH, None, None, patience_s):
                pass
        except ServerRefused as error:
            outage = str(error) if error.status in _NOT_THERE else ""
        except EngineUnavailable as error:
            silent, outage = isinstance(error.__cause__, TimeoutError), str(error)
        (self._silent.set if silent else self._silent.clear)()
        self.outage = outage
        return silent

    def watch(self, patience_s: float, on_silence: Callable[[], None] = lambda: None) -> None:
        """Until this object is closed, check every two seconds whether the server answers, because a hung server would
        hold its jobs for ever.

        A healthy server answers /health even while it computes or loads. After `patience_s` without an answer, its
        requests end as transient errors, and `on_silence` is called in the watching thread. A server that is gone or
        still loading counts as away, and its worker takes no jobs.
        """
        self.is_watched = True
        self._watcher = threading.Thread(
            target=self._watch, args=(patience_s, on_silence), name="llama-health", daemon=True
        )
        self._watcher.start()

    def _watch(self, patience_s: float, on_silence: Callable[[], None]) -> None:
        while not self._closed.wait(_HEALTH_EVERY_S):
            if self.is_silent(patience_s) and not self._closed.is_set():
                _log.warning("%s has not answered /health for %g s", self.url, patience_s)
                on_silence()

    def close(self) -> None:
        """Requests in progress raise EngineUnavailable. Idempotent.

        Waits a moment for these calls to end, because a server in this process would block the whole process while it
        waits for a stream.
        """
        self._closed.set()
        if self.is_watched:
            self._watcher.join()
        with self._answer_ended:
            self._answer_ended.wait_for(lambda: not self._answering, _END_S)

    @contextmanager
    def _response(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None,
        stop: threading.Event | None,
        timeout_s: float = float("inf"),  # no limit, as a long prefill is silent for minutes, and `stop` ends the wait
        most_bytes: int = MAX_SERVER_REPLY_BYTES,
    ) -> Iterator[http.client.HTTPResponse]:
        """The answer to a request. Its connection is closed afterwards. Raises ServerRefused for an error status."""
        check = partial(check_running, self._name, self._closed, None)
        if path != _HEALTH:
            check = partial(self._check_running, stop)
        check()
        connection = self.connect(timeout=min(_CONNECT_S, timeout_s))
        self._answering.add(connection)
        try:
            connection.connect()
            connection.sock.settimeout(_SEND_S)
            content = None if body is None else json.dumps(body).encode()
            connection.request(method, self._path + path, content, self._headers)
            patient: Any = _PollingSocket(connection.sock, timeout_s, most_bytes, check)
            response = http.client.HTTPResponse(patient, method=method)
            response.begin()
            if response.status >= 400:
                raise self._refusal(response.status, response.read(MAX_SERVER_REPLY_BYTES))
            yield response
        except (OSError, http.client.HTTPException) as error:
            problem = f"the {self._name} server at {self.url} does not answer: {error or type(error).__name__}"
            self.outage = problem if self.is_watched else ""
            raise EngineUnavailable(problem) from error
        finally:
            connection.close()
            with self._answer_ended:
                self._answering.remove(connection)
                self._answer_ended.notify_all()

    def _check_running(self, stop: threading.Event | None) -> None:
        if self._silent.is_set() and not self._closed.is_set():
            raise EngineUnavailable(f"the {self._name} server at {self.url} does not answer: it hangs")
        check_running(self._name, self._closed, stop)

    def _refusal(self, status: int, body: bytes) -> ServerRefused:
        try:
            error = json.loads(body)
            error = error.get("error", error)
            message, kind = str(error["message"]), str(error.get("type", ""))
        except (ValueError, RecursionError, KeyError, AttributeError, TypeError):
            message, kind = body[:200].decode("utf-8", "replace"), ""
        return ServerRefused(f"the {self._name} server answered {status}: {message}", status, kind)

    def _json(self, body: bytes) -> Any:
        try:
            value = json.loads(body)
        except (ValueError, RecursionError):
            problem = f"something other than JSON: {body[:80]!r}"
            raise EngineUnavailable(f"the {self._name} server answered {problem}") from None
        if isinstance(value, dict) and "error" in value:
            raise self._refusal(500, body)
        return value


class _UnixConnection(http.client.HTTPConnection):
    """A connection to a server that listens on a Unix socket."""

    def __init__(self, path: str, timeout: float) -> None:
        super().__init__("localhost", timeout=timeout)
        self._path = path

    def connect(self) -> None:
        """See http.client."""
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.settimeout(self.timeout)
        self.sock.connect(self._path)


class _PollingSocket(io.RawIOBase):
    """Reads from a socket, up to a limit of bytes. While it waits, it calls `check`, which may raise."""

    def __init__(self, inner: socket.socket, timeout_s: float, most_bytes: int, check: Callable[[], None]) -> None:
        inner.settimeout(POLL_S)
        self._inner = inner
        self._deadline = time.monotonic() + timeout_s
        self._bytes_left = most_bytes
        self._check = check

    def readable(self) -> bool:
        """See io.RawIOBase."""
        return True

    def readinto(self, buffer: Any) -> int:
        """See io.RawIOBase."""
        while True:
            try:
                size = self._inner.recv_into(buffer)
                self._bytes_left -= size
                if self._bytes_left < 0:
                    raise EngineUnavailable(_WITHOUT_END)
                return size
            except TimeoutError:
                self._check()
                if time.monotonic() > self._deadline:
                    raise

    def makefile(self, mode: str) -> io.BufferedReader:
        """The only method of a socket that http.client calls."""
        return io.BufferedReader(self)


def _lines(response: http.client.HTTPResponse) -> Iterator[bytes]:
    """Each line as soon as it is complete. Raises IncompleteRead if the stream is cut off; iterating over the response
    would just end."""
    rest = b""
    while piece := response.read1(1 << 16):
        *lines, rest = (rest + piece).split(b"\n")
        yield from lines
        if len(rest) > MAX_SERVER_REPLY_BYTES:
            raise EngineUnavailable(_WITHOUT_END)
    yield rest
