"""A worker's page: /metrics, /health, /ready and /status over HTTP, for Prometheus, supervisors and people.

    /metrics   Prometheus text format
    /health    200 as long as the process lives: {"status", "model", "loaded", "backend"}, the keys of the old servers
    /ready     200 if a job could be worked on now, else 503: {"ready", "reasons"}
    /status    the worker's registration and other facts, as JSON

There is no login. The page listens on loopback by default, answers no requests from web pages (`access`), and shows no
prompt, answer or name. It keeps up to 32 connections, each for up to ten seconds, so `/health` always answers.
"""

import json
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from prometheus_client import CONTENT_TYPE_LATEST, CollectorRegistry, generate_latest

from messages.errors import ConfigError
from monitoring.access import LOOPBACK, why_not

MAX_CONNECTIONS = 32
_REQUEST_TIMEOUT_S = 10.0  # time limit for a whole request: connecting, sending, reading the answer

Answer = tuple[int, str, bytes]  # status, content type, body


@dataclass(frozen=True, slots=True)
class Page:
    """The content of the page. Each part is computed for every request, in the request's thread."""

    registry: CollectorRegistry
    health: Callable[[], Mapping[str, Any]]
    why_not_ready: Callable[[], list[str]]  # why the process is not ready, in sentences; empty if it is ready
    status: Callable[[], Mapping[str, Any]]

    def answer(self, path: str) -> Answer:
        """Return the answer to a GET of this path."""
        match path:
            case "/metrics":
                return 200, CONTENT_TYPE_LATEST, generate_latest(self.registry)
            case "/health":
                return _json(200, self.health())
            case "/ready":
                reasons = self.why_not_ready()
                return _json(503 if reasons else 200, {"ready": not reasons, "reasons": reasons})
            case "/status":
                return _json(200, self.status())
        return _json(404, {"error": "there is /metrics, /health, /ready and /status"})


class PageServer(AbstractContextManager["PageServer"]):
    """Serves a page in separate threads until it is closed. Use it as a context manager."""

    def __init__(self, page: Page, host: str = LOOPBACK, port: int = 0) -> None:
        """Listen on a port; 0 takes a free one. Raises ConfigError if the address can't be used."""
        try:
            self._server = _Server((host, port), _handler(page, host))
        except OSError as error:
            raise ConfigError(
                f"can't serve metrics on {host}:{port}: {error.strerror or error}; choose another port"
            ) from None
        self._thread = threading.Thread(target=self._server.serve_forever, name="metrics page", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """The page's URL, without a path."""
        host, port = self._server.server_address[:2]
        return f"http://{host!s}:{port}"

    def __exit__(self, *_exception: object) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False  # a client that stays connected must not delay the end of the process
    request_queue_size = 64

    def __init__(self, address: tuple[str, int], handler: type[BaseHTTPRequestHandler]) -> None:
        self._since: dict[Any, float] = {}  # the time at which each open connection began, oldest first
        super().__init__(address, handler)

    def process_request(self, request: Any, client_address: Any) -> None:
        """Accept a connection. If there are too many, the oldest is closed, since a request takes only a moment."""
        self._since[request] = time.monotonic()
        for oldest in list(self._since)[:-MAX_CONNECTIONS]:
            self._cut(oldest)
        super().process_request(request, client_address)

    def service_actions(self) -> None:
        """Close connections that take too long, whether they send nothing or a byte now and then.

        Called twice a second.
        """
        for request, since in list(self._since.items()):
            if time.monotonic() - since > _REQUEST_TIMEOUT_S:
                self._cut(request)

    def shutdown_request(self, request: Any) -> None:
        """Forget a connection that was answered or closed."""
        self._since.pop(request, None)
        super().shutdown_request(request)

    def _cut(self, request: Any) -> None:
        self._since.pop(request, None)
        with suppress(OSError):
            request.shutdown(socket.SHUT_RDWR)  # the connection's thread then ends on its own

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Ignore a client that disconnected in the middle."""


def _handler(page: Page, listens_on: str) -> type[BaseHTTPRequestHandler]:
    class PageHandler(BaseHTTPRequestHandler):
        timeout = _REQUEST_TIMEOUT_S

        def do_GET(self) -> None:
            """Answer one request."""
            # A request without a Host header is accepted. It can come from a probe that uses HTTP/1.0, but not from a
            # browser, which always sends this header.
            problem = why_not(listens_on, self.headers.get("Host", LOOPBACK), self.headers.get("Origin"))
            path = self.path.partition("?")[0]
            status, kind, body = _json(403, {"error": problem}) if problem else page.answer(path)
            self.send_response(status)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            """Log nothing, because scrapes are not worth a line."""

    return PageHandler


def _json(status: int, fields: Mapping[str, Any]) -> Answer:
    return status, "application/json", json.dumps(fields, ensure_ascii=False).encode() + b"\n"
