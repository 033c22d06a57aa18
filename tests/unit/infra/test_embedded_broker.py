"""What only the embedded broker has: a shared server, a clock thread, dead letters that wait for their queue."""

import threading

import pytest

from infra.broker import topology
from infra.broker.base import Address, Message
from infra.broker.embedded.broker import EmbeddedBroker, EmbeddedServer
from messages.errors import NoQueue
from tests.support.waiting import wait_until

MODEL = "tiny:1b"
WORK = topology.work("decode", MODEL, "now")


@pytest.fixture
def server() -> EmbeddedServer:
    server = EmbeddedServer()
    EmbeddedBroker(server).declare([MODEL])
    return server


def test_messages_outlive_the_client_that_published_them(server: EmbeddedServer) -> None:
    producer = EmbeddedBroker(server)
    producer.publish(WORK, Message(b"job"))
    producer.close()
    delivery = EmbeddedBroker(server).get(WORK.key)
    assert delivery is not None
    assert delivery.message.body == b"job"


def test_a_client_without_a_server_shares_nothing(server: EmbeddedServer) -> None:
    with pytest.raises(NoQueue):
        EmbeddedBroker().publish(WORK, Message(b"job"))


def test_the_body_is_a_copy(server: EmbeddedServer) -> None:
    broker, body = EmbeddedBroker(server), bytearray(b"before")
    broker.publish(WORK, Message(body))  # type: ignore[arg-type]
    body[:] = b"after!"
    delivery = broker.get(WORK.key)
    assert delivery is not None
    assert delivery.message.body == b"before"


def test_consumers_take_turns(server: EmbeddedServer) -> None:
    consumers = [EmbeddedBroker(server).consume(WORK.key, prefetch=2) for _ in range(2)]
    EmbeddedBroker(server).publish_many((WORK, Message(b"", f"job-{n}")) for n in range(4))
    shares = [[consumer.receive(0), consumer.receive(0)] for consumer in consumers]
    assert all(delivery is not None for share in shares for delivery in share)


def test_returned_messages_keep_their_place(server: EmbeddedServer) -> None:
    first, second = EmbeddedBroker(server), EmbeddedBroker(server)
    first.publish_many((WORK, Message(b"", f"job-{n}")) for n in range(3))
    assert first.get(WORK.key) is not None
    assert first.get(WORK.key) is not None
    first.close()
    ids = [delivery.message.message_id for _ in range(3) if (delivery := second.get(WORK.key))]
    assert ids == ["job-0", "job-1", "job-2"]


def test_an_expired_message_whose_queue_is_missing_waits_for_it(server: EmbeddedServer) -> None:
    broker, later = EmbeddedBroker(server), topology.work("decode", "later:1b", "bulk")
    broker.publish(topology.retry(1, later.key), Message(b"", "job-1"))
    wait_until(lambda: broker.depth("retry.1s").ready == 0, "the message has expired")  # type: ignore[union-attr]
    broker.declare(["later:1b"])
    delivery = broker.get(later.key)
    assert delivery is not None
    assert delivery.message.message_id == "job-1"


def test_the_clock_ends_when_nothing_can_expire(server: EmbeddedServer) -> None:
    def clocks() -> int:
        return sum(thread.name == "embedded broker clock" for thread in threading.enumerate())

    before = clocks()
    broker = EmbeddedBroker(server)
    consumer = broker.consume(WORK.key, prefetch=1)
    broker.publish(topology.retry(1, WORK.key), Message(b"", "job-1"))
    assert clocks() == before + 1
    assert consumer.receive(10.0) is not None
    wait_until(lambda: clocks() == before, "its thread has ended")


def test_a_queue_can_be_bound_only_to_a_declared_exchange() -> None:
    with pytest.raises(NoQueue, match="declare the topology first"):
        EmbeddedBroker().open_reply_queue("batch-1")


def test_a_private_queue_is_read_by_its_owner_alone_and_goes_with_it(server: EmbeddedServer) -> None:
    owner, other = EmbeddedBroker(server), EmbeddedBroker(server)
    name = owner.open_private_queue("stream.1", topology.STREAM)
    other.publish(Address(topology.STREAM, name), Message(b"token"))
    with pytest.raises(ValueError, match="can't be deleted: it is not a reply queue"):
        other.delete_queue(name)
    owner.close()
    assert other.depth(name) is None
