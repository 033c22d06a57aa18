"""What only a real RabbitMQ can show: lost connections, refusals, alarms, and properties that others wrote."""

import socket
import struct
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import closing
from functools import partial
from typing import Any
from urllib.parse import urlsplit

import pika
import pytest
from pika import exceptions as pika_errors

from infra.broker import topology
from infra.broker.base import Address, Message
from infra.broker.rabbitmq import RabbitMQBroker, channel, connection, errors
from infra.broker.rabbitmq.fast import FastWire
from infra.broker.rabbitmq.wire import Wire
from kvasir.commands.status import queue_depths
from messages.errors import BrokerUnavailable, ConfigError, InvalidMessage, NoQueue
from producers.client import Replies
from tests.acceptance.faults.proxy import TcpProxy
from tests.support.faults import drop
from tests.support.other_pika import change_pika
from tests.support.servers import RabbitMQServer, free_port
from tests.support.waiting import wait_until

Connect = Callable[..., RabbitMQBroker]


@pytest.fixture
def queue(broker_url: str) -> Iterator[str]:
    """A reply queue of this test's own."""
    with closing(RabbitMQBroker(broker_url)) as broker:
        broker.declare([])
        name = broker.open_reply_queue(uuid.uuid4().hex)
        yield name
        broker.delete_queue(name)


@pytest.fixture(params=[Wire, FastWire])
def connect(request: pytest.FixtureRequest) -> Connect:
    return partial(RabbitMQBroker, make_wire=request.param)


@pytest.fixture
def broker(broker_url: str, connect: Connect) -> Iterator[RabbitMQBroker]:
    with closing(connect(broker_url)) as broker:
        yield broker


def numbered(to: Address, count: int) -> Iterator[tuple[Address, Message]]:
    return ((to, Message(b"x" * 200, f"job-{number}")) for number in range(count))


def read_ids(broker: RabbitMQBroker, queue: str) -> list[str]:
    """Message ids of all that is in the queue, acked."""
    consumer, found = broker.consume(queue, prefetch=500), []
    while (delivery := consumer.receive(1.0)) is not None:
        found.append(delivery.message.message_id)
        delivery.ack()
    consumer.close()
    return found


def test_depths_take_one_channel_and_one_more_for_each_missing_queue(
    broker: RabbitMQBroker, queue: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = []

    class CountedChannel(channel.Channel):
        def __init__(self, *arguments: Any) -> None:
            opened.append(arguments)
            super().__init__(*arguments)

    monkeypatch.setattr(channel, "Channel", CountedChannel)
    there = [queue, topology.DEATHS, topology.DEAD_LETTERS]
    for missing, channels in (([], 1), (["nobody-1", "nobody-2"], 3)):
        opened.clear()
        found = broker.depths(*missing, *there)
        assert [name for name, depth in found.items() if depth is None] == missing
        assert len(found) == len(missing) + len(there)
        assert len(opened) == channels


def test_nothing_is_lost_when_connections_die_while_publishing(broker: RabbitMQBroker, queue: str) -> None:
    cuts, count = 5, 6000
    cut_at = {count * (n + 1) // (cuts + 1) for n in range(cuts)}

    def sends() -> Iterator[tuple[Address, Message]]:
        for number, send in enumerate(numbered(topology.reply(queue), count)):
            if number in cut_at:
                threading.Thread(target=drop, args=(broker,)).start()
            yield send

    confirmed: list[str] = []
    assert broker.publish_many(sends(), lambda sent: confirmed.append(sent.message_id), window=200) == count
    expected = {f"job-{number}" for number in range(count)}
    assert len(confirmed) == count
    assert set(confirmed) == expected
    assert set(read_ids(broker, queue)) == expected  # some perhaps twice


def test_publishing_waits_for_the_connection_to_come_back(broker: RabbitMQBroker, queue: str) -> None:
    for number in range(5):
        drop(broker)
        broker.publish(topology.reply(queue), Message(b"", f"job-{number}"))
    assert set(read_ids(broker, queue)) == {f"job-{number}" for number in range(5)}


def test_commands_wait_for_the_connection_to_come_back(broker: RabbitMQBroker, queue: str) -> None:
    drop(broker)
    assert broker.depth(queue) is not None
    drop(broker)
    assert broker.get(queue) is None
    drop(broker)
    broker.consume(queue, prefetch=1).close()
    wait_until(lambda: broker.is_connected, "both connections are up")


def test_a_get_while_the_connection_is_being_closed_waits_for_the_next_one(broker: RabbitMQBroker, queue: str) -> None:
    broker.publish(topology.reply(queue), Message(b"x", "job-1"))
    first = broker.get(queue)
    assert first
    first.ack()
    broker.publish(topology.reply(queue), Message(b"x", "job-2"))
    wait_until(lambda: broker._getter._idle, "the channel is kept for the next get")
    gets, asked = [], Future[Any]()

    def go_back() -> None:
        broker._getter._idle[0].raw.basic_get = lambda *arguments: gets.append(arguments)
        broker._consuming.raw.close()
        broker._getter._get(queue, asked)

    broker._consuming.submit(go_back)

    with pytest.raises(BrokerUnavailable):
        asked.result(10)
    # A method on a closed channel is a connection error, 504 (AMQP 0-9-1, 1.2), and pika sends it all the same.
    assert not gets
    second = broker.get(queue)
    assert second
    assert second.message.message_id == "job-2"


def test_a_consumer_whose_queue_was_deleted_asks_for_it_now_and_then_and_finds_the_new_one(
    broker_url: str, model_name: str, caplog: pytest.LogCaptureFixture, connect: Connect
) -> None:
    # Given a consumer whose queue somebody deletes, and a worker that says all the time that it wants more
    broker = connect(broker_url)
    broker.declare([model_name])
    queue = topology.work_queue("prefill", model_name, "bulk")
    consumer = broker.consume(queue, prefetch=1)
    with pika.BlockingConnection(pika.URLParameters(broker_url)) as connection:
        connection.channel().queue_delete(queue)
    for _ in range(300):
        consumer.resume()
        assert consumer.receive(0.002) is None

    # When the queue is declared again
    broker.declare([model_name])
    broker.publish(topology.work("prefill", model_name, "bulk"), Message(b"after"))

    # Then it is served, and the broker was not asked three hundred times
    assert wait_until(lambda: consumer.receive(0.1), "the message comes").message.body == b"after"
    assert sum("subscribing again" in record.message for record in caplog.records) < 30
    with pika.BlockingConnection(pika.URLParameters(broker_url)) as connection:
        for spec in topology.queues([model_name]):
            if spec.exchange == topology.WORK:
                connection.channel().queue_delete(spec.name)
    broker.close()


def test_a_missing_exchange_takes_no_neighbour_along(broker: RabbitMQBroker, queue: str) -> None:
    sends = list(numbered(topology.reply(queue), 100))
    sends[50] = (Address("kvasir.nothing", queue), Message(b"", "lonely"))
    confirmed: list[str] = []
    with pytest.raises(NoQueue, match="lonely"):
        broker.publish_many(sends, lambda sent: confirmed.append(sent.message_id))
    assert set(confirmed) == set(read_ids(broker, queue))
    assert {f"job-{number}" for number in range(50)} <= set(confirmed)


@pytest.mark.parametrize(
    "bad", [Message(b"", "x" * 300), Message(b"", "\ud800"), Message(b"", headers={"n": 2**64})], ids=repr
)
def test_a_message_that_amqp_cannot_carry_is_invalid(broker: RabbitMQBroker, queue: str, bad: Message) -> None:
    with pytest.raises(InvalidMessage, match="AMQP"):
        broker.publish(topology.reply(queue), bad)
    broker.publish(topology.reply(queue), Message(b"", "good"))
    assert read_ids(broker, queue) == ["good"]


def test_a_stream_without_progress_ends_in_time(broker_url: str, connect: Connect) -> None:
    broker = connect(broker_url)
    broker.close()
    with pytest.raises(BrokerUnavailable, match="closed"):
        broker.publish_many(numbered(topology.reply("any"), 10), timeout_s=None)


def test_a_pika_that_has_changed_inside_is_used_as_it_is_and_that_is_said_once(
    broker_url: str, queue: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    change_pika(monkeypatch)
    with closing(RabbitMQBroker(broker_url, make_wire=FastWire)) as broker:
        assert broker.publish_many(numbered(topology.reply(queue), 500)) == 500
        drop(broker)
        assert set(read_ids(broker, queue)) == {f"job-{number}" for number in range(500)}
    (line,) = [record.message for record in caplog.records if "are not as expected" in record.message]
    assert line == f"the streams of pika {pika.__version__} are not as expected: it is used without a wire, slower"


class _RawProperties(pika.BasicProperties):
    """Properties as bytes that pika itself would never write."""

    def __init__(self, encoded: bytes) -> None:
        super().__init__()
        self._encoded = encoded

    def encode(self) -> list[bytes]:
        return [self._encoded]


def _properties_with_table(table: bytes) -> bytes:
    flags = pika.BasicProperties.FLAG_HEADERS | pika.BasicProperties.FLAG_MESSAGE_ID
    return struct.pack(">H", flags) + struct.pack(">I", len(table)) + table + b"\x05job-1"


def _nested_lists(depth: int) -> bytes:
    return b"".join(b"A" + struct.pack(">I", 5 * (depth - level - 1)) for level in range(depth))


@pytest.mark.parametrize(
    "table",
    [
        b"\x01aT" + struct.pack(">Q", 2**62),  # a date after the year 9999
        b"\x01a" + _nested_lists(2000),
    ],
    ids=["date", "nested"],
)
def test_headers_that_pika_cannot_read_cost_only_the_headers(
    broker_url: str, broker: RabbitMQBroker, queue: str, table: bytes
) -> None:
    publish_raw(broker_url, queue, _RawProperties(_properties_with_table(table)))
    broker.publish(topology.reply(queue), Message(b"", "job-2"))
    consumer = broker.consume(queue, prefetch=5)
    first, second = (wait_until(lambda: consumer.receive(0.1), "a delivery comes") for _ in range(2))
    assert first.message == Message(b"foreign", "job-1", persistent=False)
    assert second.message.message_id == "job-2"
    assert first.returns == second.returns == 0  # the connection survived


def test_foreign_properties_are_read_as_far_as_they_go(broker_url: str, broker: RabbitMQBroker, queue: str) -> None:
    headers: dict[str, Any] = {"text": "a", "n": 1, "list": [1], "table": {"a": 1}, "flag": True, "none": None}
    headers |= {"raw": b"\xff", "float": {"float": "not a number"}, "x-death": [{"queue": "q"}]}
    publish_raw(broker_url, queue, pika.BasicProperties(message_id=b"\xff\xfe", headers=headers, type="7"))
    consumer = broker.consume(queue, prefetch=1)
    delivery = wait_until(lambda: consumer.receive(0.1), "the delivery comes")
    assert delivery.message.headers == {"text": "a", "n": 1}
    assert isinstance(delivery.message.message_id, str)


def publish_raw(url: str, queue: str, properties: pika.BasicProperties) -> None:
    with closing(pika.BlockingConnection(pika.URLParameters(url))) as foreign:
        channel = foreign.channel()
        channel.confirm_delivery()
        channel.basic_publish(topology.REPLY, queue, b"foreign", properties, mandatory=True)


def test_a_queue_with_other_arguments_is_used_as_it_is_and_reported(
    broker_url: str, model_name: str, connect: Connect
) -> None:
    work = topology.work("prefill", model_name, "now")
    with closing(pika.BlockingConnection(pika.URLParameters(broker_url))) as person:
        person.channel().queue_declare(work.key, durable=True, arguments={"x-queue-type": "classic"})
        with closing(connect(broker_url)) as broker:
            (remark,) = broker.declare([model_name])
            assert remark.startswith(f"queue {work.key} already exists with different properties")
            broker.publish(work, Message(b"job"))
            assert broker.get(work.key) is not None
        for spec in topology.queues([model_name]):
            if model_name in spec.name:
                person.channel().queue_delete(spec.name)


def test_an_acked_delivery_cannot_close_the_channel_by_a_second_ack(broker: RabbitMQBroker, queue: str) -> None:
    broker.publish_many(numbered(topology.reply(queue), 2))
    consumer = broker.consume(queue, prefetch=2)
    first, second = (wait_until(lambda: consumer.receive(0.1), "a delivery comes") for _ in range(2))
    threads = [threading.Thread(target=first.ack) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert broker.depth(queue) is not None  # whatever the acks caused has happened
    assert not second.is_lost


def test_wrong_credentials_fail_at_once_and_the_password_is_told_to_nobody(broker_url: str, connect: Connect) -> None:
    url = urlsplit(broker_url)
    wrong = f"amqp://intruder:hunter2@{url.hostname}:{url.port}/"
    begin = time.monotonic()
    with pytest.raises(ConfigError, match="user name or password refused") as caught:
        connect(wrong, connect_timeout_s=60)
    assert time.monotonic() - begin < 30
    assert "hunter2" not in str(caught.value)


def test_a_missing_virtual_host_fails_at_once(broker_url: str, connect: Connect) -> None:
    url = urlsplit(broker_url)._replace(path="/nowhere").geturl()
    with pytest.raises(ConfigError, match=r"virtual host.*nowhere"):
        connect(url, connect_timeout_s=60)


def test_nobody_listening_is_reported_with_the_address_and_without_the_password(connect: Connect) -> None:
    port = free_port()
    with pytest.raises(BrokerUnavailable, match=rf"127\.0\.0\.1:{port}.*refused") as caught:
        connect(f"amqp://guest:hunter2@127.0.0.1:{port}/", connect_timeout_s=0.5)
    assert "hunter2" not in str(caught.value)


def test_one_that_accepts_and_says_nothing_gave_no_answer_in_time(
    caplog: pytest.LogCaptureFixture, connect: Connect
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        port = silent.getsockname()[1]
        with pytest.raises(BrokerUnavailable, match=rf"127\.0\.0\.1:{port}: no answer in time"):
            connect(f"amqp://guest:guest@127.0.0.1:{port}/?stack_timeout=0.3", connect_timeout_s=2)
    assert [record for record in caplog.records if record.name.startswith("infra") and record.exc_info] == []


def test_one_that_hangs_up_at_once_is_told_as_what_it_is(connect: Connect) -> None:
    """A proxy, or a port that Docker publishes, in front of a broker that is down."""
    with (
        TcpProxy(free_port()) as proxy,
        pytest.raises(BrokerUnavailable, match=rf"127\.0\.0\.1:{proxy.port}: it accepts the connection and hangs up"),
    ):
        connect(f"amqp://guest:guest@127.0.0.1:{proxy.port}/", connect_timeout_s=1)


@pytest.mark.parametrize(
    ("url", "what"),
    [
        *((url, "must look like amqp://user@host") for url in ("", "localhost", "http://host/", "amqp://h:port/")),
        ("amqp://user@host/", "no password for the broker's user 'user': set broker_password_file"),
        ("amqp://h/?x=secret", "has an option that can't be used: x$"),
        ("amqp://u:secret@h/?heartbeat=secret", "has an option that can't be used: heartbeat$"),
    ],
)
def test_an_unreadable_url_is_a_configuration_error(url: str, what: str, connect: Connect) -> None:
    with pytest.raises(ConfigError, match=what) as caught:
        connect(url)
    assert "secret" not in str(caught.value)


def test_amqps_asks_for_tls_and_checks_the_certificate() -> None:
    found = connection.parameters("amqps://user:secret@broker.example/course?heartbeat=7", "test")
    assert (found.port, found.virtual_host, found.heartbeat) == (5671, "course", 7)
    assert found.ssl_options.context.check_hostname
    assert found.blocked_connection_timeout == connection.BLOCKED_S


def test_every_exception_of_pika_has_an_error_of_ours() -> None:
    theirs = {value for value in vars(pika_errors).values() if isinstance(value, type) and issubclass(value, Exception)}
    assert theirs == set(errors.BY_CLASS)


def times_out(broker: RabbitMQBroker, to: Address) -> bool:
    try:
        broker.publish(to, Message(b"", "late"), timeout_s=1.0)
    except BrokerUnavailable as error:
        return "no confirm" in str(error)
    return False


@pytest.mark.system
@pytest.mark.system  # eight seconds
def test_a_connection_that_says_nothing_any_more_is_given_up_after_a_heartbeat_and_a_half(
    broker_url: str, queue: str, connect: Connect
) -> None:
    # Given a connection with a heartbeat of 4 s, through a network that forgets it without a word
    port = urlsplit(broker_url).port or 5672
    with TcpProxy(port) as proxy:
        url = broker_url.replace(f":{port}", f":{proxy.port}") + "?heartbeat=4"
        with closing(connect(url)) as broker:
            assert broker.depth(queue) is not None
            proxy.forget()
            # When nobody asks it anything, then it is given up long before pika would by its second look, 18 s
            wait_until(lambda: not broker.is_connected, "it is given up", timeout_s=12)
            wait_until(lambda: broker.is_connected, "it is up again")
            assert broker.depth(queue) is not None


@pytest.mark.system  # a broker of its own, twenty seconds
def test_under_an_alarm_publishing_times_out_while_acks_go_on(connect: Connect) -> None:
    with RabbitMQServer() as server, closing(connect(server.url)) as broker:
        broker.declare([])
        queue = broker.open_reply_queue("batch-1")
        broker.publish_many(numbered(topology.reply(queue), 2))
        consumer = broker.consume(queue, prefetch=1)
        server.control("set_vm_memory_high_watermark", "0.0001")
        # The broker blocks a connection only once it publishes, so the first message still goes through.
        wait_until(lambda: times_out(broker, topology.reply(queue)), "publishing is blocked")

        for number in range(2):
            delivery = wait_until(lambda: consumer.receive(0.1), "work goes on")
            assert delivery.message.message_id == f"job-{number}"
            assert delivery.ack()
        server.control("set_vm_memory_high_watermark", "0.4")
        broker.publish(topology.reply(queue), Message(b"", "after"))


@pytest.mark.system
def test_a_broker_under_an_alarm_can_be_left(connect: Connect) -> None:
    others = set(threading.enumerate())  # of brokers that other tests still have open
    with RabbitMQServer() as server:
        broker = connect(server.url)
        broker.declare([])
        queue = broker.open_reply_queue("batch-1")
        server.control("set_vm_memory_high_watermark", "0.0001")
        wait_until(lambda: times_out(broker, topology.reply(queue)), "publishing is blocked")
        broker.close()
        assert not any(thread.name.startswith("amqp") for thread in set(threading.enumerate()) - others)


def test_on_a_cluster_replies_are_in_quorum_queues_under_another_name(broker_url: str, connect: Connect) -> None:
    batch = f"batch-{uuid.uuid4().hex}"
    with closing(connect(broker_url, nodes=3)) as broker, closing(connect(broker_url)) as worker:
        broker.declare([])
        queue = broker.open_reply_queue(batch)
        try:
            # A worker that knows nothing of the cluster replies to the name in the job
            worker.publish(topology.reply(queue), Message(b"one", "one", batch))
            with pytest.raises(BrokerUnavailable, match="x-queue-type"):
                declare_classic(broker_url, queue)
            assert read_ids(broker, queue) == ["one"]

            # And what comes while there is no such queue is parked in a quorum queue
            broker.delete_queue(queue)
            worker.publish(topology.reply(queue), Message(b"two", "two", batch))
            parked = topology.RESULTS_PARKED_QUORUM
            wait_until(lambda: queue_depths(broker, []).get(parked, 0) > 0, "kvasir status shows it")
            replies = Replies(broker, batch)
            delivery_of = read_ids(broker, parked)
            replies.close()
            assert delivery_of == ["two"]
        finally:
            broker.delete_queue(queue)


def declare_classic(url: str, queue: str) -> None:
    """As somebody would who takes it for a classic queue. Raises BrokerUnavailable with what the broker says."""
    with pika.BlockingConnection(pika.URLParameters(url)) as raw:
        try:
            raw.channel().queue_declare(queue, durable=True, arguments={"x-queue-type": "classic"})
        except pika_errors.ChannelClosedByBroker as refused:
            raise BrokerUnavailable(str(refused)) from None
