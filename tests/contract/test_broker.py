"""The Broker contract, kept by the embedded broker and by RabbitMQ alike."""

import threading
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from functools import partial
from typing import Any

import pika
import pytest

from infra.broker import topology
from infra.broker.base import Address, Broker, Consumer, Delivery, Depth, Message
from infra.broker.embedded.broker import EmbeddedBroker, EmbeddedServer
from infra.broker.rabbitmq import RabbitMQBroker
from infra.broker.rabbitmq.fast import FastWire
from infra.broker.rabbitmq.wire import Wire
from messages.errors import BatchError, BrokerUnavailable, NoQueue
from tests.support.faults import drop
from tests.support.other_pika import change_pika
from tests.support.waiting import wait_until

NOBODY = "nobody-declared-this"


class Site:
    """One broker with its clients, and what a person can do to it from outside."""

    def __init__(self, connect: Callable[[], Any], delete_queue: Callable[[str], None], model: str) -> None:
        self._connect = connect
        self._clients: list[Any] = []
        self._queues: list[str] = []
        self.delete_queue = delete_queue
        self.model = model
        self.work = topology.work("prefill", model, "bulk")

    def client(self) -> Any:
        """Another process's broker; `drop` cuts its connection."""
        self._clients.append(self._connect())
        return self._clients[-1]

    def reply_queue(self, broker: Broker) -> str:
        self._queues.append(broker.open_reply_queue(uuid.uuid4().hex))
        return self._queues[-1]

    def clean(self) -> None:
        for client in self._clients:
            client.close()
        self._queues += [spec.name for spec in topology.queues([self.model]) if self.model in spec.name]
        for queue in self._queues:
            self.delete_queue(queue)


@pytest.fixture(params=["embedded", Wire, FastWire, pytest.param("changed pika", marks=pytest.mark.system)])
def site(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Site]:
    model = f"tiny-{uuid.uuid4().hex[:12]}:1b"
    if request.param == "embedded":
        server = EmbeddedServer()
        found = Site(lambda: EmbeddedBroker(server), server.delete_queue, model)
    else:
        url = request.getfixturevalue("broker_url")
        is_changed = request.param == "changed pika"
        if is_changed:
            change_pika(monkeypatch)
        connect = partial(RabbitMQBroker, url, make_wire=FastWire if is_changed else request.param)
        found = Site(connect, lambda queue: delete_on_rabbitmq(url, queue), model)
    yield found
    found.clean()


@pytest.fixture
def broker(site: Site) -> Any:
    """A client on a site where the test's model is declared."""
    broker = site.client()
    assert broker.declare([site.model]) == []
    return broker


def delete_on_rabbitmq(url: str, queue: str) -> None:
    with closing(pika.BlockingConnection(pika.URLParameters(url))) as connection:
        connection.channel().queue_delete(queue)


def message(number: int = 0, **properties: Any) -> Message:
    return Message(body=f"job {number}".encode(), message_id=f"job-{number}", **properties)


def publish(broker: Broker, to: Address, count: int) -> None:
    assert broker.publish_many((to, message(number)) for number in range(count)) == count


def receive(consumer: Consumer, count: int = 1) -> list[Delivery]:
    return [wait_until(lambda: consumer.receive(0.1), f"delivery {n + 1} of {count} comes") for n in range(count)]


def numbers(deliveries: list[Delivery]) -> list[str]:
    return sorted(delivery.message.message_id for delivery in deliveries)


def get(broker: Broker, queue: str) -> Delivery:
    return wait_until(lambda: broker.get(queue), f"a message is ready in {queue}")


def get_own(broker: Broker, queue: str, message_id: str) -> Delivery:
    """The message of this test from a queue that all tests share."""

    def look() -> Delivery | None:
        delivery = broker.get(queue)
        if delivery is None or delivery.message.message_id == message_id:
            return delivery
        return None  # another test's: left unacked, so that it goes back when the broker is closed

    return wait_until(look, f"{message_id} is in {queue}")


def test_a_published_message_arrives_with_all_its_properties(site: Site, broker: Broker) -> None:
    headers = {"stage": "prefill", "run": 3, "big": -(2**60), "queue_s": 0.1, "nothing": "", "whole": 2.0}
    sent = Message(b"\x00\xffbody", "job-1", "batch-1", "reply.batch-1", headers)
    broker.publish(site.work, sent)
    consumer = broker.consume(site.work.key, prefetch=1)
    (delivery,) = receive(consumer)
    assert delivery.message == sent
    assert {name: type(value) for name, value in delivery.message.headers.items()} == {
        name: type(value) for name, value in headers.items()
    }
    assert (delivery.queue, delivery.returns, delivery.is_lost) == (site.work.key, 0, False)


def test_an_acked_message_never_comes_back(site: Site, broker: Broker) -> None:
    publish(broker, site.work, 3)
    consumer = broker.consume(site.work.key, prefetch=3)
    deliveries = receive(consumer, 3)
    assert [delivery.ack() for delivery in deliveries] == [True] * 3
    assert deliveries[0].ack()  # a second time changes nothing
    broker.close()
    assert site.client().get(site.work.key) is None


def test_headers_that_brokers_write_are_not_passed_on(site: Site, broker: Broker) -> None:
    broker.publish(site.work, message(headers={"x-death": "a", "x-first-death-reason": "b", "x-acquired-count": 7}))
    delivery = get(broker, site.work.key)
    assert (delivery.message.headers, delivery.returns) == ({}, 0)


def test_a_megabyte_arrives_whole(site: Site, broker: Broker) -> None:
    body = bytes(range(256)) * 4096
    broker.publish(site.work, Message(body))
    assert get(broker, site.work.key).message.body == body


@pytest.mark.parametrize("exchange", [topology.WORK, "kvasir.nothing"])
def test_a_message_for_no_queue_is_refused_and_the_next_one_is_not(site: Site, broker: Broker, exchange: str) -> None:
    with pytest.raises(NoQueue, match="job-7"):
        broker.publish(Address(exchange, NOBODY), message(7))
    broker.publish(site.work, message(8))
    assert get(broker, site.work.key).message.message_id == "job-8"


def test_of_a_stream_exactly_the_unroutable_message_is_refused(site: Site, broker: Broker) -> None:
    sends = [(site.work, message(n)) for n in range(5)] + [(Address(topology.WORK, NOBODY), message(5))]
    confirmed: list[str] = []
    with pytest.raises(NoQueue, match="job-5"):
        broker.publish_many(sends, lambda sent: confirmed.append(sent.message_id))
    assert sorted(confirmed) == [f"job-{n}" for n in range(5)]
    assert broker.depth(site.work.key) == Depth(ready=5, consumers=0)


def test_two_messages_with_one_id_are_told_apart(site: Site, broker: Broker) -> None:
    routed, unroutable = Message(b"routed", "twin"), Message(b"unroutable", "twin")
    confirmed: list[Message] = []
    with pytest.raises(NoQueue):
        broker.publish_many([(site.work, routed), (Address(topology.WORK, NOBODY), unroutable)], confirmed.append)
    assert confirmed == [routed]


def test_a_queue_deleted_while_publishing_ends_in_no_queue(site: Site, broker: Broker) -> None:
    def sends() -> Iterator[tuple[Address, Message]]:
        for number in range(20):
            if number == 10:
                site.delete_queue(site.work.key)
            yield site.work, message(number)

    with pytest.raises(NoQueue):
        broker.publish_many(sends(), window=1)


def test_every_message_of_a_stream_is_confirmed_once_in_the_callers_thread(site: Site, broker: Broker) -> None:
    confirmed: list[tuple[str, int]] = []
    sends = ((site.work, message(number)) for number in range(500))
    count = broker.publish_many(
        sends, lambda sent: confirmed.append((sent.message_id, threading.get_ident())), window=20
    )
    assert count == 500
    assert sorted(confirmed) == sorted((f"job-{n}", threading.get_ident()) for n in range(500))


def test_many_threads_publish_and_ack_at_once(site: Site, broker: Broker) -> None:
    consumer = broker.consume(site.work.key, prefetch=50)

    def publish_some() -> None:
        for number in range(10):
            broker.publish(site.work, message(number))

    def ack_all() -> None:
        while (delivery := consumer.receive(2.0)) is not None:
            assert delivery.ack()
            acked.append(delivery)

    acked: list[Delivery] = []
    threads = [threading.Thread(target=target) for target in [publish_some] * 8 + [ack_all] * 4]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert numbers(acked) == sorted([f"job-{n}" for n in range(10)] * 8)


def test_a_consumer_never_holds_more_than_its_prefetch(site: Site, broker: Broker) -> None:
    publish(broker, site.work, 10)
    consumer = broker.consume(site.work.key, prefetch=3)
    held = receive(consumer, 3)
    assert consumer.receive(0.3) is None
    assert broker.depth(site.work.key) == Depth(ready=7, consumers=1)
    held[0].ack()
    receive(consumer)
    assert consumer.receive(0.3) is None


def test_a_consumer_that_is_widened_holds_more_and_gives_nothing_back(site: Site, broker: Broker) -> None:
    publish(broker, site.work, 10)
    consumer = broker.consume(site.work.key, prefetch=2)
    held = receive(consumer, 2)

    consumer.widen(6)

    held += receive(consumer, 4)
    assert consumer.receive(0.3) is None
    assert broker.depth(site.work.key).ready == 4
    for delivery in held:
        delivery.ack()
    rest = receive(consumer, 4)
    assert [delivery.returns for delivery in held + rest] == [0] * 10
    assert sorted(numbers(held + rest)) == sorted(f"job-{n}" for n in range(10))


def test_acks_in_any_order_settle_what_was_acked_and_nothing_else(site: Site, broker: Broker) -> None:
    publish(broker, site.work, 60)
    client = site.client()
    held = receive(client.consume(site.work.key, prefetch=60), 60)
    acked = held[3:1:-1] + held[::5] + held[40:]
    for delivery in acked:
        assert delivery.ack()
    client.close()

    left = receive(broker.consume(site.work.key, prefetch=60), 60 - len(set(map(id, acked))))
    assert sorted(numbers(left)) == sorted(set(numbers(held)) - set(numbers(acked)))


def test_a_pause_hands_back_what_nobody_received_and_nothing_flows_until_resume(site: Site, broker: Broker) -> None:
    publish(broker, site.work, 5)
    consumer = broker.consume(site.work.key, prefetch=3)
    (received,) = receive(consumer)
    wait_until(lambda: broker.depth(site.work.key).ready == 2, "the prefetch is full")

    handed_back = consumer.pause()
    assert len(handed_back) == 2
    assert consumer.pause() == []
    assert consumer.receive(0.3) is None
    assert broker.depth(site.work.key).ready == 2
    assert all(delivery.ack() for delivery in [received, *handed_back])

    consumer.resume()
    rest = receive(consumer, 2)
    assert [delivery.returns for delivery in rest] == [0, 0]  # pausing gave nothing back to the broker


def test_a_nudge_ends_the_wait_of_one_receive(site: Site, broker: Broker) -> None:
    consumer = broker.consume(site.work.key, prefetch=1)
    waiting = ThreadPoolExecutor(1)
    with waiting:
        answer = waiting.submit(consumer.receive, 60.0)
        consumer.nudge()
        assert answer.result(10.0) is None
        publish(broker, site.work, 1)
        assert waiting.submit(consumer.receive, 60.0).result(10.0) is not None


def test_a_nudge_keeps_no_delivery_back(site: Site, broker: Broker) -> None:
    publish(broker, site.work, 1)
    consumer = broker.consume(site.work.key, prefetch=1)
    wait_until(lambda: broker.depth(site.work.key).ready == 0, "the message is on its way")
    consumer.nudge()
    assert receive(consumer)


def test_pausing_in_full_flow_every_message_comes_once(site: Site, broker: Broker) -> None:
    publish(broker, site.work, 600)
    consumer = broker.consume(site.work.key, prefetch=40)
    seen: list[Delivery] = []
    while len(seen) < 600:
        seen += receive(consumer) + consumer.pause()
        assert all(delivery.ack() for delivery in seen)
        consumer.resume()
    assert len(set(numbers(seen))) == 600
    # RabbitMQ counts as returned what it was about to deliver when the flow stopped, though nobody has seen it.
    assert sum(delivery.returns for delivery in seen) < 15
    assert max(delivery.returns for delivery in seen) <= 1


def test_after_a_pause_what_is_still_held_counts_for_the_prefetch(site: Site, broker: Broker) -> None:
    publish(broker, site.work, 6)
    consumer = broker.consume(site.work.key, prefetch=2)
    first, second = receive(consumer, 2)
    consumer.pause()
    consumer.resume()
    assert consumer.receive(0.3) is None
    first.ack()
    receive(consumer)
    assert consumer.receive(0.3) is None
    second.ack()
    receive(consumer)
    assert consumer.receive(0.3) is None


def test_deliveries_of_a_closed_consumer_can_be_acked_until_the_broker_closes(site: Site, broker: Broker) -> None:
    publish(broker, site.work, 3)
    consumer = broker.consume(site.work.key, prefetch=2)
    (received,) = receive(consumer)
    wait_until(lambda: broker.depth(site.work.key).ready == 1, "the prefetch is full")
    (unreceived,) = consumer.close()
    assert received.ack()
    assert unreceived.ack()
    assert consumer.receive(0.1) is None
    broker.close()
    assert numbers([get(site.client(), site.work.key)]) == ["job-2"]


def test_unacked_messages_come_back_counted_after_a_close(site: Site, broker: Broker) -> None:
    publish(broker, site.work, 2)
    receive(broker.consume(site.work.key, prefetch=2), 1)  # the other one has arrived, too, and counts as well
    wait_until(lambda: broker.depth(site.work.key).ready == 0, "both have been transferred")
    broker.close()
    again = receive(site.client().consume(site.work.key, prefetch=2), 2)
    assert numbers(again) == ["job-0", "job-1"]
    assert [delivery.returns for delivery in again] == [1, 1]


def test_a_cut_connection_loses_its_deliveries_and_the_consumer_goes_on(site: Site, broker: Any) -> None:
    publish(broker, site.work, 2)
    consumer = broker.consume(site.work.key, prefetch=2)
    acked, held = receive(consumer, 2)
    acked.ack()
    wait_until(lambda: broker.depth(site.work.key) == Depth(0, 1), "the ack has been sent")
    drop(broker)
    wait_until(lambda: held.is_lost, "the delivery is lost")
    assert not held.ack()
    assert not acked.is_lost

    (again,) = receive(consumer)
    assert again.message == held.message
    assert (again.returns, again.is_lost) == (1, False)
    assert again.ack()
    broker.publish(site.work, message(9))  # so does publishing
    assert numbers(receive(consumer)) == ["job-9"]


def test_a_got_message_is_like_any_other_delivery(site: Site, broker: Any) -> None:
    assert broker.get(site.work.key) is None
    publish(broker, site.work, 2)
    first, second = get(broker, site.work.key), get(broker, site.work.key)
    assert first.ack()
    assert broker.get(site.work.key) is None  # its answer comes after the broker has seen the ack
    drop(broker)
    wait_until(lambda: second.is_lost, "the delivery is lost")
    assert not second.ack()
    again = get(broker, site.work.key)
    assert (again.message, again.returns) == (second.message, 1)


def test_getting_from_a_missing_queue_harms_no_delivery(site: Site, broker: Broker) -> None:
    publish(broker, site.work, 1)
    delivery = get(broker, site.work.key)
    with pytest.raises(NoQueue, match=NOBODY):
        broker.get(NOBODY)
    assert not delivery.is_lost
    assert delivery.ack()


def test_what_does_not_exist_has_no_depth_and_no_consumers(site: Site, broker: Broker) -> None:
    assert broker.depth(NOBODY) is None
    found = broker.depths(NOBODY, site.work.key, f"{NOBODY}-2", site.work.key)
    assert found == {NOBODY: None, site.work.key: Depth(0, 0), f"{NOBODY}-2": None}
    assert broker.depths() == {}
    with pytest.raises(NoQueue, match=NOBODY):
        broker.consume(NOBODY, prefetch=1)


def test_only_one_consumer_can_be_exclusive(site: Site, broker: Broker) -> None:
    queue = site.reply_queue(broker)
    owner = broker.consume(queue, prefetch=5, exclusive=True)
    for exclusive in (True, False):
        with pytest.raises(BatchError, match=queue):
            site.client().consume(queue, prefetch=5, exclusive=exclusive)
    owner.close()
    site.client().consume(queue, prefetch=5, exclusive=True)


def test_an_exclusive_consumer_comes_back_after_pause_and_cut(site: Site, broker: Any) -> None:
    queue = site.reply_queue(broker)
    consumer = broker.consume(queue, prefetch=5, exclusive=True)
    publish(broker, topology.reply(queue), 2)
    held, _ = receive(consumer, 2)
    consumer.pause()
    consumer.resume()
    broker.publish(topology.reply(queue), message(2))
    assert numbers(receive(consumer)) == ["job-2"]
    drop(broker)
    wait_until(lambda: held.is_lost, "the delivery is lost")
    again = receive(consumer, 3)
    assert numbers(again) == ["job-0", "job-1", "job-2"]
    assert [delivery.returns for delivery in again] == [1, 1, 1]


def test_a_retry_level_brings_a_message_to_its_queue_with_its_headers(site: Site, broker: Broker) -> None:
    sent = message(1, headers={"attempts": 2, "model": site.model})
    broker.publish(topology.retry(1, site.work.key), sent)
    assert broker.get(site.work.key) is None
    delivery = get(broker, site.work.key)
    assert dict(delivery.message.headers) == {
        "attempts": 2,
        "model": site.model,
        "x-first-death-reason": "expired",
        "x-first-death-queue": "retry.1s",
    }
    assert (delivery.message.message_id, delivery.returns) == ("job-1", 0)


def test_a_message_returned_too_often_lands_in_deaths_with_its_headers(site: Site, broker: Any) -> None:
    own = f"poison-{site.model}"
    broker.publish(site.work, Message(b"kills", own, "batch-1", "reply.batch-1", {"stage": "prefill"}))
    consumer = broker.consume(site.work.key, prefetch=1)
    for returns in range(topology.BROKER_DELIVERY_LIMIT + 1):
        (delivery,) = receive(consumer)
        assert delivery.returns == returns
        drop(broker)
    dead = get_own(broker, topology.DEATHS, own)
    assert dead.message.headers["stage"] == "prefill"
    assert dead.message.headers["x-first-death-reason"] == "delivery_limit"
    assert dead.message.headers["x-first-death-queue"] == site.work.key
    assert (dead.message.correlation_id, dead.message.reply_to) == ("batch-1", "reply.batch-1")
    assert dead.ack()


def test_a_reply_without_a_queue_is_parked(site: Site, broker: Broker) -> None:
    own = f"result-{site.model}"
    broker.publish(topology.reply("reply.gone"), Message(b"answer", own))
    parked = get_own(broker, topology.RESULTS_PARKED, own)
    assert parked.message.body == b"answer"
    assert parked.ack()


def test_a_reply_queue_counts_a_return_once_at_most(site: Site, broker: Any) -> None:
    queue = site.reply_queue(broker)
    publish(broker, topology.reply(queue), 1)
    consumer = broker.consume(queue, prefetch=1)
    receive(consumer)
    for _ in range(2):
        drop(broker)
        (delivery,) = receive(consumer)
    assert delivery.returns == 1


def test_only_reply_and_private_queues_can_be_deleted(site: Site, broker: Broker) -> None:
    queue = site.reply_queue(broker)
    assert broker.depth(queue) is not None
    broker.delete_queue(queue)
    broker.delete_queue(queue)  # safe to repeat
    assert broker.depth(queue) is None
    for kept in (site.work.key, topology.DEATHS, "retry.1s"):
        with pytest.raises(ValueError, match="can't be deleted: it is not a reply queue"):
            broker.delete_queue(kept)
    assert broker.depth(site.work.key) is not None


def test_a_private_queue_takes_token_events_and_is_there_again_after_a_cut(site: Site, broker: Any) -> None:
    name = broker.open_private_queue(f"stream.{site.model}", topology.STREAM)
    consumer = broker.consume(name, prefetch=10)
    speaker = site.client()
    speaker.publish_lossy(Address(topology.STREAM, name), message(1))
    assert numbers(receive(consumer)) == ["job-1"]

    drop(broker)

    def hears_again() -> bool:
        speaker.publish_lossy(Address(topology.STREAM, name), message(2))
        delivery = consumer.receive(0.1)
        return delivery is not None and delivery.message.message_id == "job-2"

    wait_until(hears_again, "the private queue is there again")
    broker.delete_queue(name)
    assert broker.depth(name) is None


def test_a_wakeup_reaches_every_private_queue_and_nobody_minds_if_there_is_none(site: Site, broker: Broker) -> None:
    broker.publish_lossy(Address("kvasir.nothing", ""), message(1))
    listeners = [site.client() for _ in range(2)]
    consumers = [
        listener.consume(listener.open_private_queue(f"bell.{n}.{site.model}", topology.CONTROL), prefetch=5)
        for n, listener in enumerate(listeners)
    ]

    def rings() -> bool:  # the first message above may have cost the lossy channel
        broker.publish_lossy(Address(topology.CONTROL, ""), message(2))
        return all(consumer.receive(0.2) is not None for consumer in consumers)

    wait_until(rings, "both receive the wakeup")


def test_a_consumer_waits_for_its_deleted_queue_to_be_declared_again(site: Site, broker: Broker) -> None:
    consumer = broker.consume(site.work.key, prefetch=1)
    site.delete_queue(site.work.key)
    assert consumer.receive(0.3) is None
    broker.declare([site.model])
    publish(broker, site.work, 1)
    assert receive(consumer)[0].ack()


def test_a_closed_broker_publishes_and_reads_nothing(site: Site, broker: Broker) -> None:
    consumer = broker.consume(site.work.key, prefetch=1)
    waiting = threading.Thread(target=consumer.receive, args=(60,))
    waiting.start()
    broker.close()
    broker.close()
    waiting.join(5)
    assert not waiting.is_alive()
    for call in (
        lambda: broker.publish(site.work, message()),
        lambda: broker.get(site.work.key),
        lambda: broker.consume(site.work.key, prefetch=1),
        lambda: broker.depth(site.work.key),
    ):
        with pytest.raises(BrokerUnavailable, match="closed"):
            call()
    broker.publish_lossy(site.work, message())
    assert consumer.close() == []
    assert site.client().depth(site.work.key) == Depth(0, 0)
