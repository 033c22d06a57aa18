"""What we write as AMQP frames is what pika reads."""

import struct
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pika import frame, spec  # type: ignore[import-untyped]

from infra.broker.base import Address, Message
from infra.broker.rabbitmq.fast import publication
from infra.broker.rabbitmq.properties import to_message, to_properties

FRAME_MAX = 4096
short = st.text(max_size=60)
header = st.one_of(st.text(max_size=300), st.integers(-(2**63), 2**63 - 1), st.floats(allow_nan=False))
names = st.text(max_size=60).filter(lambda name: not name.startswith("x-"))
messages = st.builds(Message, st.binary(max_size=3 * FRAME_MAX), short, short, short, st.dictionaries(names, header))


def read(data: bytes) -> list[frame.Frame]:
    frames = []
    while data:
        used, found = frame.decode_frame(data)
        assert used <= FRAME_MAX
        frames.append(found)
        data = data[used:]
    return frames


@given(messages, short, short, short)
def test_pika_reads_the_message_that_was_written(message: Message, exchange: str, key: str, kind: str) -> None:
    method, head, *bodies = read(publication(7, Address(exchange, key), message, kind, FRAME_MAX))
    assert isinstance(method.method, spec.Basic.Publish)
    assert (method.method.exchange, method.method.routing_key, method.method.mandatory) == (exchange, key, bool(kind))
    assert to_message(head.properties, b"".join(body.fragment for body in bodies)) == message
    assert head.body_size == len(message.body)
    assert (head.properties.type or "") == kind
    assert {each.channel_number for each in (method, head, *bodies)} == {7}


@given(messages, short)
def test_pika_is_given_the_same_properties(message: Message, kind: str) -> None:
    _, head, *_ = read(publication(7, Address("", "q"), message, kind, FRAME_MAX))
    (ours,) = read(frame.Header(7, len(message.body), to_properties(message, kind)).marshal())
    assert ours.body_size == head.body_size
    assert stated(ours.properties) == stated(head.properties)


def stated(properties: spec.BasicProperties) -> dict[str, Any]:
    return {name: value for name, value in vars(properties).items() if name != "timestamp"}


def test_headers_that_the_broker_writes_are_not_sent_back() -> None:
    message = Message(b"", headers={"x-death": "a", "x-delivery-count": 7, "x-acquired-count": 7, "kvasir-run": 1})
    _, head = read(publication(1, Address("", "q"), message, "", FRAME_MAX))
    assert head.properties.headers == {"kvasir-run": 1}


@pytest.mark.parametrize(
    "message",
    [
        Message(b"", message_id="x" * 256),
        Message(b"", headers={"n" * 256: 1}),
        Message(b"", headers={"big": 2**63}),
        Message(b"", headers={"half": "\ud800"}),
    ],
)
def test_what_amqp_can_not_say_is_refused(message: Message) -> None:
    with pytest.raises((struct.error, ValueError)):
        publication(1, Address("", "q"), message, "", FRAME_MAX)
