"""The layer between pika and the socket.

pika writes to a transport, and acts as the protocol that receives data (`pika.adapters.utils.nbio_interface`). A `Wire`
is the transport for pika and the protocol for the socket's side, all on the IO thread. It fixes problems that would
cost deliveries:

- A headers table that pika can't decode ends its connection, and so for ever, since the broker then delivers the
  message again. Such a table is left out.
- pika looks for silence once in a heartbeat and 5 s. It may take two of those to see a dead connection, and takes a
  live one for dead when this process was stopped meanwhile. See `listen`.
- It can't be told to give a connection up at once. See `cut`.

`infra.broker.rabbitmq.fast` has one that does the same faster.
"""

import struct
from collections.abc import Callable
from functools import partial
from typing import Any

import pika.channel  # type: ignore[import-untyped]
from pika import frame, spec
from pika.exceptions import AMQPError, AMQPHeartbeatTimeout  # type: ignore[import-untyped]

from infra.broker.base import Address, Message
from infra.broker.rabbitmq.properties import to_properties, without_headers

# Handles a delivery: its tag, the message, and how often the broker took it back.
Taker = Callable[[int, Message, int], None]
# Handles a confirm: the delivery tag, and whether it covers all messages up to that tag.
Confirmer = Callable[[int, bool], None]

_LOOKS = 8


class Wire:
    """The wire of one connection, without speed-ups: pika writes and reads every frame."""

    def __init__(self) -> None:
        # Handlers that a faster wire calls without pika: deliveries by channel and consumer tag, confirms by channel.
        self.takers: dict[tuple[int, bytes], Taker] = {}
        self.confirmers: dict[int, Confirmer] = {}
        self.cut_reason: Exception | None = None
        self.protocol: Any = None
        self.transport: Any = None  # None while there is no socket behind it
        self._unread_bytes = b""
        self._silent_looks = 0

    def link(self, protocol: Any) -> "Wire":
        """Connect the two sides: `protocol` is pika, and the other side is the caller of `connection_made`."""
        self.protocol = protocol
        return self

    def publish(self, channel: pika.channel.Channel, to: Address, message: Message, tag: str) -> None:
        """Send a message. If the broker returns it, the return names `tag`; "" means that the message may be lost.
        Raises pika's errors for what can't be written."""
        properties = to_properties(message, tag)
        channel.basic_publish(to.exchange, to.key, message.body, properties, mandatory=bool(tag))

    def cork(self) -> None:
        """More data will be sent soon, so it may be held back until `uncork`."""

    def uncork(self) -> None:
        """Send the data that was held back."""

    def cut(self, reason: Exception) -> None:
        """End the connection without a goodbye to the broker."""
        self.cut_reason = reason
        self.transport.abort()

    def listen(self, heartbeat_s: float, later: Callable[[float, Callable[[], None]], object]) -> None:
        """From now on, give the connection up when it was silent for a heartbeat and a half, or for a heartbeat and 5
        s.

        The wire looks eight times during that time. It counts looks and not seconds, so that a process that was
        stopped, or got no CPU time, first reads what arrived meanwhile. At each look pika is given a heartbeat, so that
        its own check never acts.
        """
        if self.transport is None:
            return
        if self._silent_looks >= _LOOKS:
            self.cut(
                AMQPHeartbeatTimeout(f"the broker was silent in {_LOOKS} looks, with a heartbeat of {heartbeat_s} s")
            )
            return
        self._silent_looks += 1
        self.protocol.data_received(frame.Heartbeat().marshal())
        later((heartbeat_s + min(5.0, heartbeat_s / 2)) / _LOOKS, partial(self.listen, heartbeat_s, later))

    def connection_made(self, transport: Any) -> None:
        """Part of the protocol's interface."""
        self.transport = transport
        self.protocol.connection_made(self)

    def connection_lost(self, error: BaseException | None) -> None:
        """Part of the protocol's interface."""
        self.transport = None
        self.protocol.connection_lost(error or self.cut_reason)

    def eof_received(self) -> Any:
        """Part of the protocol's interface."""
        return self.protocol.eof_received()

    def data_received(self, data: bytes) -> None:
        """Part of the protocol's interface."""
        self._silent_looks = 0
        self._unread_bytes += data
        while size := self.read(self._unread_bytes):
            self._unread_bytes = self._unread_bytes[size:]

    def write(self, data: bytes) -> None:
        """Part of the transport's interface."""
        if self.transport is not None:
            self.transport.write(data)

    def abort(self) -> None:
        """Part of the transport's interface."""
        self.transport.abort()

    def read(self, data: bytes) -> int:
        """Pass on the frame at the start of `data`. Returns its length in bytes; 0 if it is incomplete."""
        if len(data) < spec.FRAME_HEADER_SIZE:
            return 0
        size: int = spec.FRAME_HEADER_SIZE + struct.unpack_from(">L", data, 3)[0] + spec.FRAME_END_SIZE
        if size > len(data):
            return 0
        self.protocol.data_received(_decodable(data[:size]))
        return size


def _decodable(frame_bytes: bytes) -> bytes:
    """The frame, without its headers table if pika can't decode that table."""
    if frame_bytes[0] != spec.FRAME_HEADER:
        return frame_bytes
    try:
        frame.decode_frame(frame_bytes)
    except (ValueError, OverflowError, OSError, RecursionError, struct.error, AMQPError):
        return without_headers(frame_bytes)
    return frame_bytes
