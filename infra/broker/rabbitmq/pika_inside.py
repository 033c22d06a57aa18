"""pika's connection, and every private member of pika that Kvasir uses. The rest of this package uses only public
names.

A pika without these members still works, except for the effect that is listed with each. A test reads this list, checks
that the installed pika has every member, and searches for private members that are not listed:

SelectConnection._on_connection_workflow_done  overridden: pika 1.4 reports the class of an error where a broker
    accepts and then says nothing, and stumbles over it
Channel._cancelled  a consumer's tag is taken out: pika would reject what still arrives while it is cancelled, and
    quorum queues count each return
_AsyncTransportBase._MAX_RECV_BYTES  for speed, set by `FastWire`: pika's 4 KiB are a message or two
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
REPORT_ONCE = threading.Lock()  # the first caller takes it, reports, and never releases it


class GuardedConnection(pika.SelectConnection):  # type: ignore[misc]
    """pika's connection through a wire. Used only on the IO thread."""

    def __init__(
        self, settings: pika.URLParameters, on_opened: Any, on_failed: Any, loop: IOLoop, make_wire: Callable[[], Wire]
    ) -> None:
        self.wire = make_wire()
        super().__init__(settings, on_opened, on_failed, on_failed, custom_ioloop=_wired(loop, self.wire))

    def opened(self, later: Callable[[float, Callable[[], None]], object]) -> None:
        """Start to listen. If this pika's streams have an unknown form, the connection works without a wire, by pika
        alone."""
        if self.wire.transport is None:
            report_no_wire()
            self.wire = Wire()
        elif self.params.heartbeat:
            self.wire.listen(self.params.heartbeat, later)

    def cut(self, reason: str) -> None:
        """End the connection without a goodbye to the broker, or with one if only pika can end it."""
        if self.wire.transport is not None:
            self.wire.cut(StreamLostError(reason))
        elif not self.is_closing:
            self.close()

    def _on_connection_workflow_done(self, conn_or_exc: Any) -> None:
        super()._on_connection_workflow_done(conn_or_exc() if isinstance(conn_or_exc, type) else conn_or_exc)


def let_through(channel: pika.channel.Channel, tag: str) -> None:
    """Called right after cancelling a consumer, so that deliveries that still arrive before the broker's answer are not
    rejected."""
    getattr(channel, "_cancelled", set()).discard(tag)


def report_no_wire() -> None:
    """Warn once per process, even if two connections find out at the same time."""
    if REPORT_ONCE.acquire(blocking=False):
        log.warning("pika %s has no streams as we know them: it is used without a wire, slower", pika.__version__)


def _wired(loop: IOLoop, wire: Wire) -> Any:
    """The loop for pika: services whose streams go through `wire`, or just `loop` if this pika has no such services.

    These services have public names and may be passed to a connection, but pika says that they may change without
    notice.
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
