"""A wire that joins what is sent, and makes and reads the frames of messages itself."""

from __future__ import annotations

from typing import Any

import pika.channel  # type: ignore[import-untyped]

from infra.broker.base import Address, Message
from infra.broker.rabbitmq.fast.frames import publication
from infra.broker.rabbitmq.fast.reading import FrameReader
from infra.broker.rabbitmq.wire import Wire

_BATCH_BYTES = 64 * 1024


class FastWire(Wire):
    """pika sends each frame with a system call of its own, and each lets go of the interpreter lock.

    That is most of the time that publishing takes.
    """

    def __init__(self) -> None:
        super().__init__()
        self._reader = FrameReader(self.takers, self.confirmers)
        self._held_back: list[bytes] | None = None
        self._held_bytes = 0

    def publish(self, channel: pika.channel.Channel, to: Address, message: Message, tag: str) -> None:
        """See `Wire`."""
        frame_max = channel.connection.params.frame_max
        self.write(publication(channel.channel_number, to, message, tag, frame_max, bool(tag)))

    def cork(self) -> None:
        """See `Wire`."""
        self._held_back = []
        self._held_bytes = 0

    def uncork(self) -> None:
        """See `Wire`."""
        frames, self._held_back = self._held_back, None
        if frames:
            super().write(b"".join(frames))

    def write(self, data: bytes) -> None:
        """See `Wire`."""
        if self._held_back is None:
            super().write(data)
            return
        self._held_back.append(data)
        self._held_bytes += len(data)
        if self._held_bytes >= _BATCH_BYTES:
            self.uncork()
            self.cork()

    def connection_made(self, transport: Any) -> None:
        """See `Wire`."""
        super().connection_made(transport)
        if hasattr(transport, "_MAX_RECV_BYTES"):
            transport._MAX_RECV_BYTES = _BATCH_BYTES

    def read(self, data: bytes) -> int:
        """See `Wire`."""
        return self._reader.read(data) or super().read(data)
