"""pika's connection, and every private member of pika that we use. The rest of this package uses public names only.

If a private member is missing, deliveries still work, but the effect noted beside it is lost. A test reads this list,
checks every member in the installed pika, and looks for private members that are not listed:

    SelectConnection._on_connection_workflow_done  overridden: where a broker accepts a connection and then says
        nothing, pika 1.4 reports the class of an error instead of an error, and fails on it
    Channel._cancelled  a consumer's tag is removed: pika would otherwise reject deliveries that arrive while it is
        being cancelled, and quorum queues count each return
    _AsyncTransportBase._MAX_RECV_BYTES  raised for speed by `FastWire`: pika's 4 KiB hold only a message or two
"""

import logging
import threading
from collections.abc import Callable
from typing import Any

import pika.channel  # type: ignore[import-untyped]
from pika.adapters.select_connection import IOLoop  # type: ignore[import-untyped]
from pika.exceptions import StreamLostError  # type: ignore[import-untyped]

from infra.broker.rabbitmq.wire import Wire

log = logging.getLogger(__name__)
REPORT_ONCE = threading.Lock()  # acquired by the one thread that logs the warning, and never released


class GuardedConnection(pika.SelectConnection):  # type: ignore[misc]
    """pika's connection over a wire. All of it runs on the IO thread."""

    def __init__(
        self, settings: pika.URLParameters, on_opened: Any, on_failed: Any, loop: IOLoop, make_wire: Callable[[], Wire]
    ) -> None:
        self.wire = make_wire()
        super().__init__(settings, on_opened, on_failed, on_failed, custom_ioloop=_wired(loop, self.wire))

    def opened(self, later: Callable[[float, Callable[[], None]], object]) -> None:
        """Start the check for silence. If this pika's streams are not as we expect them, use pika without a wire."""
        if self.wire.transport is None:
            report_no_wire()
            self.wire = Wire()
        elif self.params.heartbeat:
            self.wire.listen(self.params.heartbeat, later)

    def cut(self, reason: str) -> None:
        """Close the connection without telling the broker, or with a proper close where only pika can do it."""
        if self.wire.transport is not None:
            self.wire.cut(StreamLostError(reason))
        elif not self.is_closing:
            self.close()

    def _on_connection_workflow_done(self, conn_or_exc: Any) -> None:
        super()._on_connection_workflow_done(conn_or_exc() if isinstance(conn_or_exc, type) else conn_or_exc)


def let_through(channel: pika.channel.Channel, tag: str) -> None:
    """Keep pika from rejecting deliveries that arrive between cancelling a consumer and the broker's answer."""
    getattr(channel, "_cancelled", set()).discard(tag)


def report_no_wire() -> None:
    """Log once per process that pika is used without a wire. Both connections may find this out at the same time."""
    if REPORT_ONCE.acquire(blocking=False):
        log.warning("the streams of pika %s are not as expected: it is used without a wire, slower", pika.__version__)


def _wired(loop: IOLoop, wire: Wire) -> Any:
    """Return what pika gets as its loop: IO services whose streams go through `wire`.

    If this pika has no such services, return `loop` itself. Their names are public, and pika accepts them for a
    connection, but it says that they may change without notice.
    """
    try:
        from pika.adapters.utils.selector_ioloop_adapter import (  # type: ignore[import-untyped]
            SelectorIOServicesAdapter,
        )

        services = SelectorIOServicesAdapter(loop)
        create = services.create_streaming_connection
    except (ImportError, AttributeError):
        return loop

    def create_wired(protocol_factory: Callable[[], Any], sock: Any, on_done: Callable[[Any], None], **tls: Any) -> Any:
        def linked(result: Any) -> None:
            on_done(result if isinstance(result, BaseException) else (wire, wire.protocol))

        return create(lambda: wire.link(protocol_factory()), sock, linked, **tls)

    services.create_streaming_connection = create_wired
    return services
