"""What lies between pika and the socket: whole frames, legible headers, and an end to silence."""

import struct
from collections.abc import Callable
from typing import Any

import pytest
from pika import frame, spec
from pika.exceptions import AMQPHeartbeatTimeout

from infra.broker.base import Message
from infra.broker.rabbitmq.fast import FastWire
from infra.broker.rabbitmq.wire import Wire

Task = Callable[[], None]


class Ends:
    """Both sides of a wire."""

    def __init__(self, wire: Wire) -> None:
        self.wire = wire
        self.received: list[bytes] = []
        self.sent: list[bytes] = []
        self.lost: BaseException | None = None
        self.later: list[Task] = []
        wire.link(self).connection_made(self)

    def connection_made(self, transport: object) -> None:
        assert transport in (self, self.wire)

    def data_received(self, data: bytes) -> None:
        self.received.append(data)

    def connection_lost(self, error: BaseException | None) -> None:
        self.lost = error

    def write(self, data: bytes) -> None:
        self.sent.append(data)

    def abort(self) -> None:
        self.wire.connection_lost(None)

    def listen(self) -> None:
        self.wire.listen(20, lambda _s, task: self.later.append(task))

    def look(self) -> None:
        self.later.pop()()


@pytest.fixture(params=[Wire, FastWire])
def ends(request: pytest.FixtureRequest) -> Ends:
    return Ends(request.param())


def header(properties: bytes) -> bytes:
    payload = struct.pack(">HHQ", 60, 0, 5) + properties
    return struct.pack(">BHL", spec.FRAME_HEADER, 1, len(payload)) + payload + b"\xce"


def test_pika_gets_whole_frames_however_they_come(ends: Ends) -> None:
    frames = [frame.Body(1, b"x" * size).marshal() for size in (1, 300, 2)]
    for byte in b"".join(frames):
        ends.wire.data_received(bytes([byte]))
    assert ends.received == frames


def test_headers_that_pika_cannot_read_are_left_out_and_no_others(ends: Ends) -> None:
    flags = struct.pack(">H", spec.BasicProperties.FLAG_HEADERS | spec.BasicProperties.FLAG_MESSAGE_ID)
    date_in_year_10000 = b"\x01aT" + struct.pack(">Q", 2**62)
    odd, usual = (
        header(flags + struct.pack(">I", len(table)) + table + b"\x05job-1")
        for table in (date_in_year_10000, b"\x01nI\x00\x00\x00\x07")
    )
    ends.wire.data_received(odd + usual)
    found: list[Any] = [frame.decode_frame(data)[1] for data in ends.received]
    assert [(each.properties.message_id, each.properties.headers, each.body_size) for each in found] == [
        ("job-1", {}, 5),
        ("job-1", {"n": 7}, 5),
    ]


def test_it_is_cut_after_eight_silent_looks_in_a_row(ends: Ends) -> None:
    ends.listen()
    for _ in range(7):
        ends.look()
    ends.wire.data_received(b"\x08")  # the start of a frame is a sign of life
    for _ in range(8):
        ends.look()
        assert ends.lost is None
    ends.look()
    assert isinstance(ends.lost, AMQPHeartbeatTimeout)
    assert ends.lost is ends.wire.cut_reason
    assert not ends.later


def test_pika_hears_a_heartbeat_at_each_look(ends: Ends) -> None:
    ends.listen()
    ends.look()
    assert [type(frame.decode_frame(data)[1]) for data in ends.received] == [frame.Heartbeat] * 2


def test_a_wire_that_is_lost_looks_no_more_and_sends_nothing(ends: Ends) -> None:
    ends.listen()
    ends.wire.connection_lost(None)
    ends.look()
    ends.wire.write(b"late")
    assert not ends.later
    assert not ends.sent


def test_a_fast_wire_sends_in_one_piece_what_it_held_back_and_not_too_much() -> None:
    ends = Ends(FastWire())
    ends.wire.cork()
    for piece in (b"a", b"b", b"c" * 70_000, b"d"):
        ends.wire.write(piece)
    assert ends.sent == [b"ab" + b"c" * 70_000]
    ends.wire.uncork()
    ends.wire.write(b"e")
    assert ends.sent[1:] == [b"d", b"e"]


def test_a_fast_wire_hands_on_deliveries_without_pika() -> None:
    ends, taken = Ends(FastWire()), list[tuple[int, Message, int]]()
    ends.wire.takers[1, b"tag"] = lambda *delivery: taken.append(delivery)
    method: Any = spec.Basic.Deliver("tag", 7, False, "", "queue")
    properties = spec.BasicProperties(message_id="job-1", delivery_mode=2)
    frames = (frame.Method(1, method), frame.Header(1, 4, properties), frame.Body(1, b"body"))
    ends.wire.data_received(b"".join(each.marshal() for each in frames))
    assert taken == [(7, Message(b"body", "job-1"), 0)]
    assert not ends.received
