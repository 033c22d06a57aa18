"""A second Redis and a second RabbitMQ, each behind an address of its own: what a machine's failure costs."""

import contextlib
import uuid
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.broker import topology
from infra.broker.base import Address, Message
from infra.broker.rabbitmq import RabbitMQBroker
from infra.broker.rabbitmq import connection as connections
from infra.config.settings import load_settings
from kvasir import connect
from kvasir.doctor.cluster import examine
from messages.jobs import PrefillJob, Sampling, user_prompt
from messages.urls import put_hosts
from producers.client import Client
from tests.acceptance.faults.proxy import TcpProxy
from tests.support.processes import SIMULATED_MODEL, Cluster
from tests.support.servers import HOST, RabbitMQServer, RedisServer
from tests.support.waiting import wait_until

pytestmark = pytest.mark.system  # kills brokers and stores of its own

PROMPT = "a student's work " * 120
GREEDY = Sampling(max_tokens=16, temperature=0)
JOBS = 60


def hosts(*ports: int) -> str:
    return ",".join(f"{HOST}:{port}" for port in ports)


@pytest.fixture
def redises() -> Iterator[tuple[RedisServer, RedisServer]]:
    with RedisServer() as first:
        second = RedisServer(options=[f"requirepass {first.password}"])
        second.password = first.password
        with second:
            yield first, second


def submit(client: Client, number: int) -> list[PrefillJob]:
    batch = f"reserve-{uuid.uuid4().hex[:8]}"
    jobs = [
        client.new_job(batch, f"{each}", client.models[0], user_prompt("", PROMPT), GREEDY) for each in range(number)
    ]
    client.submit(jobs)
    return jobs


def answered(client: Client, jobs: list[PrefillJob]) -> list[str]:
    """How the KV cache of each job came to its decoder. All must have an answer."""
    results = list(client.gather(jobs[0].batch_id, [job.job_id for job in jobs], timeout_s=60))
    assert sorted(result.job_id for result in results) == sorted(job.job_id for job in jobs)
    assert not [result.error for result in results if result.error]
    return [result.decode.kv_transfer for result in results if result.decode]


@pytest.mark.gate
def test_a_killed_redis_costs_its_kv_caches_and_no_job(
    tmp_path: Path, broker_url: str, redises: tuple[RedisServer, RedisServer], model_name: str
) -> None:
    first, second = redises
    url = put_hosts(first.url, hosts(first.port, second.port))
    with Cluster(tmp_path, broker_url, url, {model_name: SIMULATED_MODEL}) as cluster:
        workers = [cluster.worker("prefill", model_name), cluster.worker("decode", model_name)]
        with connect(load_settings(config=cluster.config, environ=cluster.environment)) as client:
            jobs = submit(client, JOBS)
            first.kill()
            answered(client, jobs)
            wait_until(lambda: all(worker.find_registration() for worker in workers), "both stand in the second", 30)
            assert set(answered(client, submit(client, 5))) == {"verified"}
            first.start()  # empty
            wait_until(lambda: cluster.cluster_state._links.current == 0, "the first is used again", 30)
            wait_until(lambda: all(worker.find_registration() for worker in workers), "both stand in the first", 30)
            assert set(answered(client, submit(client, 5))) == {"verified"}
        said = workers[0].text()
        assert f"the store is reached at {HOST}:{second.port}" in said
        assert first.password not in said


def test_workers_that_use_different_redises_prefill_twice_and_lose_no_job(
    tmp_path: Path, broker_url: str, redises: tuple[RedisServer, RedisServer], model_name: str
) -> None:
    first, second = redises
    near_url = put_hosts(first.url, hosts(first.port, second.port))
    with (
        TcpProxy(first.port) as link,
        Cluster(tmp_path / "a", broker_url, near_url, {model_name: SIMULATED_MODEL}) as near,
        Cluster(tmp_path / "b", broker_url, put_hosts(first.url, hosts(link.port, second.port)), near.config) as far,
    ):
        near.worker("prefill", model_name)
        decode = far.worker("decode", model_name)
        with connect(load_settings(config=near.config, environ=near.environment)) as client:
            assert set(answered(client, submit(client, 5))) == {"verified"}
            link.cut()  # the decoder's only: two processes, two stores
            wait_until(decode.find_registration, "the decoder stands in the second", 30)
            assert "none" in answered(client, submit(client, JOBS))
            link.heal()
            wait_until(lambda: far.cluster_state._links.current == 0, "the first is used again", 30)
            wait_until(decode.find_registration, "the decoder stands in the first", 30)
            wait_until(lambda: set(answered(client, submit(client, 3))) == {"verified"}, "KV caches arrive again", 30)


@pytest.fixture(scope="module")
def brokers() -> Iterator[tuple[RabbitMQServer, RabbitMQServer]]:
    with RabbitMQServer() as first:
        second = RabbitMQServer(settings={"default_pass": first.password})
        second.password = first.password
        with second:
            yield first, second


def places(broker: RabbitMQBroker) -> set[str]:
    return {broker._publishing.peer, broker._consuming.peer} if broker.is_connected else set()


def test_a_killed_broker_is_left_for_the_second_and_taken_again(
    brokers: tuple[RabbitMQServer, RabbitMQServer], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = brokers
    monkeypatch.setattr(connections, "RETURN_S", 0.5)
    url = put_hosts(first.url, hosts(first.port, second.port))
    with contextlib.closing(RabbitMQBroker(url)) as broker:
        broker.declare([])
        broker.open_private_queue(f"control.{uuid.uuid4().hex[:8]}", topology.CONTROL)  # as every worker has one
        queue = f"reserve-{uuid.uuid4().hex[:8]}"
        with contextlib.closing(RabbitMQBroker(second.url)) as other:
            other.declare([])
            other.open_reply_queue(queue)
        first.kill()
        wait_until(lambda: places(broker) == {f"{HOST}:{second.port}"}, "both connections lead to the second", 10)
        assert f"{HOST}:{second.port} is not the one used before" in caplog.text  # they are no cluster
        broker.publish(Address("", f"reply.{queue}"), Message(b"to the second"), timeout_s=5)
        first.start()
        wait_until(lambda: places(broker) == {f"{HOST}:{first.port}"}, "both lead to the first", 30)


def test_doctor_tells_a_second_service_from_a_second_link(
    brokers: tuple[RabbitMQServer, RabbitMQServer],
    redises: tuple[RedisServer, RedisServer],
    tmp_path: Path,
    model_name: str,
) -> None:
    urls = {
        "KVASIR_BROKER_URL": put_hosts(brokers[0].url, hosts(*(each.port for each in brokers))),
        "KVASIR_STORE_URL": put_hosts(redises[0].url, hosts(*(each.port for each in redises))),
    }
    (tmp_path / "kvasir.toml").write_text(
        f'[models."{model_name}"]\nengine = "simulated"\nweights.simulated = "sim:"\n'
    )
    found = list(examine(lambda: load_settings(environ=urls, cwd=tmp_path)))
    about = [(each.level, each.subject) for each in found if "addresses lead to" in each.what]
    assert about == [("error", "broker"), ("warn", "store")]
    assert brokers[0].password not in str(found)
    assert redises[0].password not in str(found)
