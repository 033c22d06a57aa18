"""Serves the gateway until it is told to stop."""

import asyncio
import contextlib
import logging
import secrets
import signal
import socket
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import closing, contextmanager
from pathlib import Path
from types import FrameType
from typing import Any, Literal

import h11
import uvicorn
from uvicorn.protocols.http.h11_impl import H11Protocol

from gateway.app import make_app
from gateway.batches import Batches
from gateway.batches_api import check_body
from gateway.dispatch import Dispatcher
from gateway.files import open_files
from gateway.gateway import STOP_S, Gateway
from gateway.keys import KeyRing, file_in
from infra.config.types import ModelSettings
from messages.errors import ConfigError
from messages.limits import MAX_CONNECTIONS, MAX_GUESTS, MAX_HEADER_BYTES
from messages.strict_schema import Objects
from monitoring.access import is_loopback
from monitoring.server import Page, PageServer
from producers.client import Client

log = logging.getLogger(__name__)

HEADERS_S = 30.0  # time within which a client must send a request's headers
TAKE_S = 60.0  # time within which a client must read what the gateway sent
_IDLE_S = 30


def check_host(host: str, folder: Path) -> None:
    """Check that only users of this machine could use the gateway without a key. Raises ConfigError."""
    if not KeyRing(file_in(folder)).is_required and not is_loopback(host):
        raise ConfigError(
            f"without API keys the gateway listens only on loopback, not on {host}: "
            f"add a key with kvasir keys add NAME --state {folder}"
        )


def serve(
    client: Client,
    models: Mapping[str, ModelSettings],
    address: tuple[str, int],
    folder: Path,
    on_ready: Callable[[str], None],
    page: tuple[str, int] | None = None,
    objects: Objects = "closed",
    host_names: Collection[str] = (),
) -> None:
    """Serve until SIGTERM or Ctrl-C; streams then get ten seconds to end. `on_ready` is called with the URL.

    `folder` holds the gateway's keys, files and batches. `page` is the host and port of a page like the workers', for
    Prometheus and supervisors, which have no key. `objects`, `host_names`: see `Gateway`.

    Raises ConfigError, BatchError.
    """
    host, port = address
    check_host(host, folder)
    with listening(host, port) as listener, open_files(folder) as files:
        port = listener.getsockname()[1]
        name = f"gateway-{secrets.token_hex(4)}" if address[1] == 0 else own_name(port)
        with (
            closing(Dispatcher(client, name)) as dispatch,
            closing(Batches(files, client, check_body, objects)) as batches,
        ):
            gateway = Gateway(models, client, dispatch, KeyRing(file_in(folder)), batches, objects, host_names)
            server = GatewayServer(gateway)
            with _handle_early_signals(server), _serve_page(gateway, page):
                on_ready(f"http://{f'[{host}]' if ':' in host else host}:{port}")
                server.run([listener])


class TimedConnection(H11Protocol):
    """A connection that is closed if its client is too slow.

    uvicorn has no time limit for headers or for blocked writes.

    A guest is a connection without an admitted request. If there are too many guests the oldest is closed, so they
    can't crowd out other clients.
    """

    def __init__(self, *arguments: Any, **keywords: Any) -> None:
        super().__init__(*arguments, **keywords)
        self._limits: dict[Literal["headers", "take"], asyncio.TimerHandle] = {}
        self._made_at = self.loop.time()

    @property
    def is_guest(self) -> bool:
        """Whether the connection is open without an admitted request under way."""
        is_at_work = self.cycle and not self.cycle.response_complete and self.cycle.scope["state"].get("has_place")
        return not is_at_work and not self.transport.is_closing()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See asyncio.Protocol."""
        super().connection_made(transport)
        guests = [each for each in self.connections if isinstance(each, TimedConnection) and each.is_guest]
        if len(guests) > MAX_GUESTS:
            min(guests, key=lambda guest: guest._made_at).transport.abort()
        # With 0, `pause_writing` is called at the first byte that the client doesn't read.
        transport.set_write_buffer_limits(high=0)
        self._begin("headers", HEADERS_S)

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        super().data_received(data)
        if self.conn.their_state is h11.IDLE:
            self._begin("headers", HEADERS_S)
        else:
            self._end("headers")

    def pause_writing(self) -> None:
        """See asyncio.Protocol."""
        super().pause_writing()
        self._begin("take", TAKE_S)

    def resume_writing(self) -> None:
        """See asyncio.Protocol."""
        super().resume_writing()
        self._end("take")

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._end("headers")
        self._end("take")
        super().connection_lost(exc)

    def _begin(self, limit: Literal["headers", "take"], seconds: float) -> None:
        if limit not in self._limits:
            self._limits[limit] = self.loop.call_later(seconds, self.transport.abort)

    def _end(self, limit: Literal["headers", "take"]) -> None:
        if timer := self._limits.pop(limit, None):
            timer.cancel()


class GatewayServer(uvicorn.Server):
    """A uvicorn server that tells the gateway to stop as soon as it receives the signal itself."""

    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway
        super().__init__(
            uvicorn.Config(
                make_app(gateway),
                http=TimedConnection,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                proxy_headers=False,
                limit_concurrency=MAX_CONNECTIONS,
                timeout_keep_alive=_IDLE_S,
                timeout_graceful_shutdown=int(STOP_S) + 5,
                h11_max_incomplete_event_size=MAX_HEADER_BYTES,
            )
        )

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """See uvicorn. This is called in the main thread, where the event loop runs."""
        with contextlib.suppress(RuntimeError):
            asyncio.get_running_loop().call_soon_threadsafe(self._gateway.stop)
        super().handle_exit(sig, frame)


@contextmanager
def _serve_page(gateway: Gateway, address: tuple[str, int] | None) -> Iterator[None]:
    """Serve the gateway's page for metrics and health while the context is open."""
    if address is None:
        return (yield)
    page = Page(gateway.figures.registry, lambda: {"status": "ok"}, gateway.why_not_ready_now, gateway.status)
    with PageServer(page, *address) as server:
        log.info("metrics, health, readiness and status are at %s", server.url)
        yield


@contextmanager
def _handle_early_signals(server: GatewayServer) -> Iterator[None]:
    """Handle signals that arrive before uvicorn listens, and the one that uvicorn raises again when it ends."""

    def stop(_number: int, _frame: FrameType | None) -> None:
        server.should_exit = True

    handlers = {signal_number: signal.signal(signal_number, stop) for signal_number in (signal.SIGTERM, signal.SIGINT)}
    try:
        yield
    finally:
        for signal_number, handler in handlers.items():
            signal.signal(signal_number, handler)


@contextmanager
def listening(host: str, port: int) -> Iterator[socket.socket]:
    """Yield a socket that listens at this address; port 0 takes a free port. Raises ConfigError."""
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        listener = socket.create_server((host, port), family=family, backlog=MAX_CONNECTIONS)
    except OSError as error:
        raise ConfigError(f"can't listen on {host}:{port}: {error.strerror or error}; choose another --port") from None
    # asyncio sets TCP_NODELAY only on a socket whose `proto` is IPPROTO_TCP, and `create_server` leaves `proto` at 0.
    with socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP, fileno=listener.detach()) as listener:
        yield listener


def own_name(port: int) -> str:
    """Return this gateway's name at the broker.

    It depends on the machine and port, so it stays the same after a restart.
    """
    host = "".join(letter if letter.isascii() and letter.isalnum() else "-" for letter in socket.gethostname())
    return f"gateway-{host[:64]}-{port}"
