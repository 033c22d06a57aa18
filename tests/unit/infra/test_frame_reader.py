"""What we read from the broker's bytes at one go is what pika reads from them frame by frame."""

from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from pika import amqp_object, frame, spec  # type: ignore[import-untyped]

from infra.broker.base import Message
from infra.broker.rabbitmq.fast import FastWire
from infra.broker.rabbitmq.properties import returns, to_message
from infra.broker.rabbitmq.wire import Wire

CHANNEL, TAG = 3, b"kvasir-tag"
Taken = tuple[int, Message, int]

short = st.text(max_size=60).filter(lambda text: len(text.encode()) < 256)
value = st.one_of(st.text(max_size=100), st.integers(-(2**63), 2**63 - 1), st.booleans(), st.none(), st.binary())
name = st.one_of(
    short, st.sampled_from(["x-delivery-count", "x-acquired-count", "x-death", "x-first-death-queue", "kvasir-run"])
)
properties = st.builds(
    spec.BasicProperties,
    content_type=st.none() | short,
    content_encoding=st.none() | short,
    headers=st.none() | st.dictionaries(name, value, max_size=6),
    delivery_mode=st.none() | st.sampled_from([1, 2]),
    priority=st.none() | st.integers(0, 9),
    correlation_id=st.none() | short,
    reply_to=st.none() | short,
    expiration=st.none() | short,
    message_id=st.none() | short,
    timestamp=st.none() | st.integers(0, 2**40),
    type=st.none() | short,
    app_id=st.none() | short,
)


def delivery(
    found: spec.BasicProperties, body: bytes, tag: int = 7, redelivered: bool = False, channel: int = CHANNEL
) -> bytes:
    """The frames of a delivery as the broker writes them."""
    method: amqp_object.Method = spec.Basic.Deliver(TAG.decode(), tag, redelivered, "kvasir.work", "prefill.m.bulk")
    frames = [frame.Method(channel, method), frame.Header(channel, len(body), found)]
    frames += [frame.Body(channel, body)] if body else []
    return b"".join(each.marshal() for each in frames)


def read(data: bytes) -> tuple[list[Taken], int]:
    """What our reader takes, and how many bytes it leaves to pika."""
    taken: list[Taken] = []
    wire = FastWire()
    wire.takers[CHANNEL, TAG] = lambda *one: taken.append(one)
    return taken, len(data) - read_past_pika(wire, data)


def read_past_pika(wire: FastWire, data: bytes) -> int:
    with patch.object(Wire, "read", return_value=0):
        return wire.read(data)


def read_by_pika(data: bytes) -> Taken:
    frames: list[Any] = []
    while data:
        used, found = frame.decode_frame(data)
        frames.append(found)
        data = data[used:]
    method, head, *bodies = frames
    body = b"".join(each.fragment for each in bodies)
    return (
        method.method.delivery_tag,
        to_message(head.properties, body),
        returns(head.properties, method.method.redelivered),
    )


@given(properties, st.binary(max_size=300), st.integers(1, 2**63), st.booleans())
def test_a_delivery_is_read_as_pika_reads_it_or_left_to_it(
    found: spec.BasicProperties, body: bytes, tag: int, redelivered: bool
) -> None:
    data = delivery(found, body, tag, redelivered)
    taken, left = read(data)
    assert (taken, left) in (([read_by_pika(data)], 0), ([], len(data)))


@given(short, short, short, st.dictionaries(short, st.one_of(st.text(), st.integers(0, 9))), st.binary(max_size=9))
def test_a_message_of_ours_is_read_at_one_go(
    message_id: str, batch: str, reply_to: str, headers: dict[str, Any], body: bytes
) -> None:
    usual = spec.BasicProperties(
        content_type="application/msgpack",
        headers={**headers, "x-delivery-count": 2},
        delivery_mode=2,
        message_id=message_id,
        correlation_id=batch,
        reply_to=reply_to,
        timestamp=1,
        type="1",
    )
    data = delivery(usual, body)
    assert read(data + data) == ([read_by_pika(data)] * 2, 0)


@pytest.mark.parametrize(
    ("headers", "expected"),
    [
        ({}, 1),
        ({"x-delivery-count": 3}, 3),  # RabbitMQ up to 4.2
        ({"x-acquired-count": 3}, 3),  # from 4.3: taken back, and no failure
        ({"x-acquired-count": 3, "x-delivery-count": 1}, 3),
        ({"x-delivery-count": 3, "x-acquired-count": 1}, 3),
        ({"x-acquired-count": "3"}, 1),
    ],
)
def test_returns_are_what_the_broker_counts_old_or_new(headers: dict[str, Any], expected: int) -> None:
    data = delivery(spec.BasicProperties(headers=headers, message_id="m"), b"x", redelivered=True)
    [(_, _, count)], _ = read(data)
    assert (count, read_by_pika(data)[2]) == (expected, expected)


@given(st.integers(0, 309), st.integers(0, 255))
def test_damaged_and_cut_off_bytes_are_left_to_pika(at: int, byte: int) -> None:
    whole = delivery(spec.BasicProperties(headers={"a": "b", "n": 1}, message_id="m"), b"body " * 40)
    damaged = whole[:at] + bytes([byte]) + whole[at + 1 :]
    assume(damaged[70:78] != bytes(8))  # a body of no bytes is whole at once; pika refuses the frame that follows
    for data in (whole[:at], damaged):
        taken, left = read(data)
        assert left in (0, len(data))
        assert bool(taken) == (left == 0 and bool(data))


def test_what_comes_on_another_channel_or_for_nobody_known_is_left_to_pika() -> None:
    data = delivery(spec.BasicProperties(message_id="m"), b"x", channel=CHANNEL + 1)
    assert read(data) == ([], len(data))


def test_a_body_of_several_frames_is_left_to_pika() -> None:
    whole = delivery(spec.BasicProperties(message_id="m"), b"x" * 20)
    head = whole[: -(20 + 8)]
    data = head + frame.Body(CHANNEL, b"x" * 15).marshal() + frame.Body(CHANNEL, b"x" * 5).marshal()
    assert read(data) == ([], len(data))


@pytest.mark.parametrize("multiple", [False, True])
def test_a_confirm_is_told_to_whoever_publishes_on_its_channel(multiple: bool) -> None:
    confirmed: list[tuple[int, bool]] = []
    wire = FastWire()
    wire.confirmers[1] = lambda *one: confirmed.append(one)
    ours, others = (frame.Method(channel, spec.Basic.Ack(9, multiple)).marshal() for channel in (1, 2))
    assert read_past_pika(wire, ours + ours + others) == 2 * len(ours)
    assert confirmed == [(9, multiple)] * 2
