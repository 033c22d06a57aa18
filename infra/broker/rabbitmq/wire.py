"""The layer between pika and the socket.

pika writes to a transport, and hears as a protocol of what came (`pika.adapters.utils.nbio_interface`). A `Wire` is the
transport to pika and the protocol to the socket's side, all on the IO thread. It fixes what would cost deliveries:

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

# What is done with a delivery: its tag, the message, how often the broker took it back.
Taker = Callable[[int, Message, int], None]
# What is done with a confirm: the delivery tag, and whether it is of all messages up to that one.
Confirmer = Callable[[int, bool], None]

_LOOKS = 8


class Wire:
    """The wire of one connection. Without speed-ups: pika writes and reads every frame."""

    def __init__(self) -> None:
        # Who is served without pika by a wire that can: by channel and consumer tag, and by channel.
        self.takers: dict[tuple[int, bytes], Taker] = {}
        self.confirmers: dict[int, Confirmer] = {}
        self.cut_reason: Exception | None = None
        self.protocol: Any = None
        self.transport: Any = None  # None: there is no socket behind it
        self._unread_bytes = b""
        self._silent_looks = 0

    def link(self, protocol: Any) -> "Wire":
        """Lie between pika, which is `protocol`, and whoever calls `connection_made`."""
        self.protocol = protocol
        return self

    def publish(self, channel: pika.channel.Channel, to: Address, message: Message, tag: str) -> None:
        """Send a message, whose return by the broker names `tag`; "": it may be lost. Raises what pika can't write."""
        properties = to_properties(message, tag)
        channel.basic_publish(to.exchange, to.key, message.body, properties, mandatory=bool(tag))

    def cork(self) -> None:
        """More is about to be sent: it may be held back until `uncork`."""

    def uncork(self) -> None:
        """Send what was held back."""

    def cut(self, reason: Exception) -> None:
        """End it without a word to the broker."""
        self.cut_reason = reason
        self.transport.abort()

    def listen(self, heartbeat_s: float, later: Callable[[float, Callable[[], None]], object]) -> None:
        """From now on give it up when it has said nothing in a heartbeat and a half, or a heartbeat and 5 s.

        There are eight looks in that while. They are counted, not seconds: a process that was stopped, or had no
        processor, first reads what came meanwhile. pika hears a heartbeat at each look, which keeps its own from doing
        anything.
        """
        if self.transport is None:
            return
        if self._silent_looks >= _LOOKS:
            self.cut(AMQPHeartbeatTimeout(f"it said nothing in {_LOOKS} looks, with a heartbeat of {heartbeat_s} s"))
            return
        self._silent_looks += 1
        self.protocol.data_received(frame.Heartbeat().marshal())
        later((heartbeat_s + min(5.0, heartbeat_s / 2)) / _LOOKS, partial(self.listen, heartbeat_s, later))

    def connection_made(self, transport: Any) -> None:
        """Of the protocol."""
        self.transport = transport
        self.protocol.connection_made(self)

    def connection_lost(self, error: BaseException | None) -> None:
        """Of the protocol."""
        self.transport = None
        self.protocol.connection_lost(error or self.cut_reason)

    def eof_received(self) -> Any:
        """Of the protocol."""
        return self.protocol.eof_received()

    def data_received(self, data: bytes) -> None:
        """Of the protocol."""
        self._silent_looks = 0
        self._unread_bytes += data
        while size := self.read(self._unread_bytes):
            self._unread_bytes = self._unread_bytes[size:]

    def write(self, data: bytes) -> None:
        """Of the transport."""
        if self.transport is not None:
            self.transport.write(data)

    def abort(self) -> None:
        """Of the transport."""
        self.transport.abort()

    def read(self, data: bytes) -> int:
        """Hand on the frame at the start of `data`; returns its bytes, 0 if it is cut off."""
        if len(data) < spec.FRAME_HEADER_SIZE:
            return 0
        size: int = spec.FRAME_HEADER_SIZE + struct.unpack_from(">L", data, 3)[0] + spec.FRAME_END_SIZE
        if size > len(data):
            return 0
        self.protocol.data_received(_decodable(data[:size]))
        return size


def _decodable(frame_bytes: bytes) -> bytes:
    """A frame, without its headers table if pika can't decode that."""
    if frame_bytes[0] != spec.FRAME_HEADER:
        return frame_bytes
    try:
        frame.decode_frame(frame_bytes)
    except (ValueError, OverflowError, OSError, RecursionError, struct.error, AMQPError):
        return without_headers(frame_bytes)
    return frame_bytes
