"""All that we use of pika's private members; the rest of this package goes by public names alone.

pika 1.4 has five gaps that its public names can't close. Bytes are read 4 KiB at a time and frame by frame, although
most of them are deliveries and confirms (see `FrameReader`). A headers table that pika can't decode costs the
connection, and so for ever, since the broker then delivers the message again. Each message is written with three system
calls, and each lets go of the interpreter lock: that is most of the time that publishing takes. Silence is noticed
late. And a broker that accepts a connection and then says nothing ends in an AssertionError.

A test reads this list, asks the installed pika for every member, and looks for private ones that are not listed:

    SelectConnection._adapter_emit_data          sends bytes; overridden, to hold them back while it is corked
    SelectConnection._create_heartbeat_checker   makes the heartbeat checker; overridden, to make a `PatientListener`
    SelectConnection._on_data_available          takes what was received; overridden, for `FrameReader` and odd headers
    SelectConnection._on_connection_workflow_done  called when connecting has ended; overridden, for that error
    SelectConnection._process_frame              does what a frame asks for; called with each that `FrameReader` leaves
    SelectConnection._terminate_stream           cuts the connection at once, with a reason
    SelectConnection._transport                  the socket: whether there is one, and how much it reads
    _AsyncTransportBase._MAX_RECV_BYTES          how many bytes one read takes at most; set
    HeartbeatChecker._check_interval             seconds between two looks; set
    HeartbeatChecker._idle_byte_intervals        how many looks in a row found nothing new
    HeartbeatChecker._start_check_timer          called before each wait for the next look; overridden, to set it
    HeartbeatChecker._timeout                    the heartbeat that both sides agreed on, in seconds
    Channel._cancelled                           tags being cancelled, whose deliveries pika rejects; ours is taken out
"""

from __future__ import annotations

import struct
from typing import Any

import pika.channel  # type: ignore[import-untyped]
from pika import frame
from pika.exceptions import AMQPError, StreamLostError  # type: ignore[import-untyped]
from pika.heartbeat import HeartbeatChecker  # type: ignore[import-untyped]

from infra.broker.rabbitmq.properties import header_frame
from infra.broker.rabbitmq.reading import FrameReader

_BATCH_BYTES = 64 * 1024
_READ_BYTES = 64 * 1024
_LOOKS = 8


class GuardedConnection(pika.SelectConnection):  # type: ignore[misc]
    """pika's connection without these gaps. All of it on the IO thread."""

    def __init__(self, *args: Any, **keywords: Any) -> None:
        self.reader = FrameReader()
        self._corked_frames: list[bytes] | None = None
        self._unread_bytes = b""
        super().__init__(*args, **keywords)

    def cork(self) -> None:
        """Hold frames back."""
        self._corked_frames = []

    def uncork(self) -> None:
        """Send what was held back."""
        frames, self._corked_frames = self._corked_frames, None
        if frames and self._transport is not None:
            super()._adapter_emit_data(b"".join(frames))

    def emit(self, frames: bytes) -> None:
        """Send frames that are made already; held back while it is corked."""
        if self._corked_frames is None or len(frames) >= _BATCH_BYTES:
            self.uncork()
            super()._adapter_emit_data(frames)
        else:
            self._corked_frames.append(frames)

    _adapter_emit_data = emit

    @property
    def frame_max(self) -> int:
        """The most bytes of one frame that both sides agreed on."""
        return int(self.params.frame_max)

    def read_more_at_once(self) -> None:
        """Once it is open: pika's 4 KiB are a message or two."""
        self._transport._MAX_RECV_BYTES = _READ_BYTES

    def cut(self, reason: str) -> None:
        """End it without a word to the broker."""
        self._terminate_stream(StreamLostError(reason))

    def _on_connection_workflow_done(self, conn_or_exc: Any) -> None:
        # Of a broker that accepts and says nothing pika 1.4.4 reports the class of an error, and stumbles over it.
        super()._on_connection_workflow_done(conn_or_exc() if isinstance(conn_or_exc, type) else conn_or_exc)

    def _on_data_available(self, data_in: bytes) -> None:
        self._unread_bytes += data_in
        while self._unread_bytes:
            size, next_frame = self.reader.read(self._unread_bytes), None
            if not size:
                size, next_frame = _read_frame(self._unread_bytes)
            if not size:
                return
            self.bytes_received += size
            self._unread_bytes = self._unread_bytes[size:]
            if next_frame:
                self._process_frame(next_frame)

    def _create_heartbeat_checker(self) -> PatientListener | None:
        return PatientListener(self, self.params.heartbeat) if self.params.heartbeat else None


class PatientListener(HeartbeatChecker):  # type: ignore[misc]
    """Takes a connection for dead that said nothing in a heartbeat and a half, or a heartbeat and 5 s.

    pika looks once in a heartbeat and 5 s, so that it may take two of those to see a dead connection. This one looks
    eight times in that while, and gives up when it has heard nothing at any of them. Looks are counted, not seconds: a
    process that was stopped, or had no processor, first reads what came meanwhile.
    """

    @property
    def connection_is_idle(self) -> bool:
        """Whether it is taken for dead."""
        return bool(self._idle_byte_intervals >= _LOOKS)

    def _start_check_timer(self) -> None:
        self._check_interval = (self._timeout + min(5.0, self._timeout / 2)) / _LOOKS
        super()._start_check_timer()


def let_through(channel: pika.channel.Channel, tag: str) -> None:
    """Right after cancelling a consumer: what still arrives until the broker's answer comes to us.

    pika would reject it, and quorum queues count each return.
    """
    channel._cancelled.discard(tag)


def _read_frame(buffer: bytes) -> tuple[int, Any]:
    """The frame at the start of `buffer` and its bytes, 0 if it is cut off; a headers table that is odd is left out."""
    try:
        size_and_frame: tuple[int, Any] = frame.decode_frame(buffer)
    except (ValueError, OverflowError, OSError, RecursionError, struct.error, AMQPError):
        header = header_frame(buffer)
        if header is None:
            raise
        return header
    return size_and_frame
