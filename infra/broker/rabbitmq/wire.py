"""The layer between pika and the socket.

pika writes to a transport, and what arrives reaches pika as a protocol (`pika.adapters.utils.nbio_interface`). A `Wire`
is the transport for pika and the protocol for the socket. It runs on the IO thread. It corrects three things that would
cost deliveries:

- If pika can't decode a headers table, it closes the connection. The broker then delivers the same message again, so
  this would never end. The wire leaves such a table out.
- pika checks for silence only once per heartbeat and 5 s. It may take two checks to notice a dead connection, and it
  gives up a live one if this process was stopped in between. See `listen`.
- pika can't be told to give up a connection at once. See `cut`.

`infra.broker.rabbitmq.fast` has a wire that does the same faster.
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

# A function that handles a delivery. It gets the delivery's tag, its message, and its number of returns.
Taker = Callable[[int, Message, int], None]
# A function that handles a confirm. It gets the tag, and whether the confirm covers all messages up to that tag.
Confirmer = Callable[[int, bool], None]

_LOOKS = 8


class Wire:
    """The wire of one connection, without speed-ups: pika writes and reads every frame."""

    def __init__(self) -> None:
        # The values of `takers` and `confirmers` are functions that a faster wire calls itself, without pika.
        # `takers`: (channel, consumer tag) -> function. `confirmers`: channel -> function.
        self.takers: dict[tuple[int, bytes], Taker] = {}
        self.confirmers: dict[int, Confirmer] = {}
        self.cut_reason: Exception | None = None
        self.protocol: Any = None
        self.transport: Any = None  # None while there is no socket
        self._unread_bytes = b""
        self._silent_looks = 0

    def link(self, protocol: Any) -> "Wire":
        """Connect the wire to pika, whose end is `protocol`. The caller then calls `connection_made`."""
        self.protocol = protocol
        return self

    def publish(self, channel: pika.channel.Channel, to: Address, message: Message, tag: str) -> None:
        """Send a message. If the broker returns it, the return names `tag`; "" means that it may be lost.

        Raises pika's error for a message that it can't write.
        """
        properties = to_properties(message, tag)
        channel.basic_publish(to.exchange, to.key, message.body, properties, mandatory=bool(tag))

    def cork(self) -> None:
        """Allow data to be held back until `uncork`, since more is about to be sent."""

    def uncork(self) -> None:
        """Send the data that was held back."""

    def cut(self, reason: Exception) -> None:
        """Drop the connection without telling the broker."""
        self.cut_reason = reason
        self.transport.abort()

    def listen(self, heartbeat_s: float, later: Callable[[float, Callable[[], None]], object]) -> None:
        """Give up the connection if it is silent for 1.5 heartbeats, or for a heartbeat and 5 s if that is shorter.

        There are eight checks in that time, and the checks are counted instead of the seconds. So a process that was
        stopped, or got no CPU time, first reads what has arrived. Each check gives pika a heartbeat, so that pika's own
        check never acts.
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
        """Part of the protocol for the socket."""
        self.transport = transport
        self.protocol.connection_made(self)

    def connection_lost(self, error: BaseException | None) -> None:
        """Part of the protocol for the socket."""
        self.transport = None
        self.protocol.connection_lost(error or self.cut_reason)

    def eof_received(self) -> Any:
        """Part of the protocol for the socket."""
        return self.protocol.eof_received()

    def data_received(self, data: bytes) -> None:
        """Part of the protocol for the socket."""
        self._silent_looks = 0
        self._unread_bytes += data
        while size := self.read(self._unread_bytes):
            self._unread_bytes = self._unread_bytes[size:]

    def write(self, data: bytes) -> None:
        """Part of the transport for pika."""
        if self.transport is not None:
            self.transport.write(data)

    def abort(self) -> None:
        """Part of the transport for pika."""
        self.transport.abort()

    def read(self, data: bytes) -> int:
        """Give pika the frame at the start of `data`. Returns its size in bytes, or 0 if it is incomplete."""
        if len(data) < spec.FRAME_HEADER_SIZE:
            return 0
        size: int = spec.FRAME_HEADER_SIZE + struct.unpack_from(">L", data, 3)[0] + spec.FRAME_END_SIZE
        if size > len(data):
            return 0
        self.protocol.data_received(_decodable(data[:size]))
        return size


def _decodable(frame_bytes: bytes) -> bytes:
    """Return the frame, without its headers table if pika can't decode the table."""
    if frame_bytes[0] != spec.FRAME_HEADER:
        return frame_bytes
    try:
        frame.decode_frame(frame_bytes)
    except (ValueError, OverflowError, OSError, RecursionError, struct.error, AMQPError):
        return without_headers(frame_bytes)
    return frame_bytes
