"""The services that tests run on: they start, answer, survive what they should, and leave nothing behind."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pika
import pytest
import redis

from tests.support import containers
from tests.support.servers import RabbitMQServer, RedisServer, ServerFailed
from tests.support.waiting import wait_until

pytestmark = pytest.mark.system  # starts and kills brokers for minutes

ROOT = Path(__file__).resolve().parents[2]

HOLDER = """
import signal
from tests.support.servers import RedisServer
with RedisServer() as server:
    print(server.port, server.folder, flush=True)
    signal.pause()
"""


@pytest.fixture(scope="module")
def broker() -> Iterator[RabbitMQServer]:
    with RabbitMQServer(plugins=["rabbitmq_prometheus"]) as server:
        yield server


def _address_of_this_machine() -> str:
    """Where packets to elsewhere leave from, or another loopback address; connecting UDP sends nothing."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return "127.0.0.2"
        return str(probe.getsockname()[0])


def _answers_on(host: str, port: int) -> bool:
    with socket.socket() as connection:
        connection.settimeout(2)
        return connection.connect_ex((host, port)) == 0


def _gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    return False


def _ping(store_url: str) -> bool:
    with redis.Redis.from_url(store_url) as client:
        return bool(client.ping())


def _publish(broker_url: str, queue: str, body: bytes) -> None:
    with pika.BlockingConnection(pika.URLParameters(broker_url)) as connection:
        channel = connection.channel()
        channel.confirm_delivery()
        channel.queue_declare(queue, durable=True, arguments={"x-queue-type": "quorum"})
        channel.basic_publish("", queue, body, pika.BasicProperties(delivery_mode=2))


def _take(broker_url: str, queue: str) -> bytes | None:
    with pika.BlockingConnection(pika.URLParameters(broker_url)) as connection:
        _method, _properties, body = connection.channel().basic_get(queue, auto_ack=True)
        return body


def test_a_redis_server_answers_until_it_is_closed() -> None:
    with RedisServer(max_memory="8mb") as server:
        pid = server.pid
        assert _ping(server.url)
        with redis.Redis.from_url(server.url) as client:
            assert client.config_get("maxmemory*")["maxmemory-policy"] == "noeviction"
            assert client.config_get("save") == {"save": ""}
    assert _gone(pid)
    assert not server.folder.exists()


def test_a_redis_server_starts_again_empty_on_the_same_port() -> None:
    with RedisServer() as server:
        with redis.Redis.from_url(server.url) as client:
            client.set("key", "value")
        first = server.pid
        server.kill()
        assert _gone(first)
        server.start()
        with redis.Redis.from_url(server.url) as client:
            assert client.get("key") is None


def test_a_confirmed_message_survives_the_kill_of_its_broker(broker: RabbitMQServer) -> None:
    _publish(broker.url, "kept", b"a job")
    broker.wait_until_on_disk("kept")
    first = broker.pid

    broker.kill()
    assert _gone(first)
    broker.start()

    assert wait_until(lambda: _take(broker.url, "kept"), "the message is handed out") == b"a job"


def test_a_broker_stops_in_good_order_and_comes_back(broker: RabbitMQServer) -> None:
    _publish(broker.url, "kept-too", b"a job")
    broker.restart()
    assert wait_until(lambda: _take(broker.url, "kept-too"), "the message is handed out") == b"a job"


def test_a_broker_takes_control_commands(broker: RabbitMQServer) -> None:
    assert "kvasir" in broker.control("list_users")
    with pytest.raises(ServerFailed, match="no_such_command"):
        broker.control("no_such_command")


def test_a_broker_tells_the_depth_of_each_queue(broker: RabbitMQServer) -> None:
    _publish(broker.url, "deep", b"a job")
    families = {"family": ["queue_coarse_metrics", "queue_consumer_count"]}
    wait_until(
        lambda: 'queue="deep"' in httpx.get(f"{broker.metrics_url}/metrics/detailed", params=families).text,
        "the queue is among the metrics",
    )


def test_services_listen_on_loopback_only(broker: RabbitMQServer) -> None:
    with RedisServer() as store:
        ports = {broker.port, broker.metrics_port, store.port}
        assert all(_answers_on("127.0.0.1", port) for port in ports)
        assert not any(_answers_on(_address_of_this_machine(), port) for port in ports)


@pytest.mark.parametrize("how", [signal.SIGTERM, signal.SIGKILL])
def test_services_end_with_the_process_that_started_them(how: signal.Signals) -> None:
    holder = subprocess.Popen([sys.executable, "-c", HOLDER], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    with holder:
        assert holder.stdout is not None
        port, folder = holder.stdout.readline().split()
        assert _answers_on("127.0.0.1", int(port))
        holder.send_signal(how)
    wait_until(lambda: not _answers_on("127.0.0.1", int(port)), "the server has ended")
    wait_until(lambda: not Path(folder).exists(), "its folder is removed")


def test_the_shared_pair_answers(broker_url: str, store_url: str) -> None:
    _publish(broker_url, "shared", b"a job")
    assert wait_until(lambda: _take(broker_url, "shared"), "the message is handed out") == b"a job"
    assert _ping(store_url)


def test_a_docker_engine_that_does_not_answer_is_passed_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.socket(socket.AF_UNIX) as silent:
        silent.bind(str(tmp_path / "engine"))
        silent.listen()
        monkeypatch.setenv("DOCKER_HOST", f"unix://{tmp_path}/engine")
        assert not containers.available("an-image-of-no-other-test")


def test_a_server_that_cannot_start_says_what_its_log_says() -> None:
    server = RedisServer(options=["no-such-directive yes"])
    with pytest.raises(ServerFailed, match="no-such-directive"), server:
        pass
    assert not server.folder.exists()
