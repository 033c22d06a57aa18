"""The gateway over RabbitMQ and Redis: real processes, real clients, workers and gateways that are killed."""

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pika
import pika.exceptions
import pytest

from gateway.server import own_name
from infra.broker import topology
from tests.support.processes import Cluster, ModelEntry, RunningProcess
from tests.support.servers import free_port
from tests.support.waiting import wait_until

pytestmark = pytest.mark.system  # processes, and kills of them

# An answer takes 2.4 s: long enough to kill somebody meanwhile.
PACED = ModelEntry("simulated", "sim:scale=1,prefill=100000,decode=25,answer=60,spread=1", context=8192)


@pytest.fixture
def cluster(tmp_path: Path, broker_url: str, store_url: str, model_name: str) -> Iterator[Cluster]:
    with Cluster(tmp_path, broker_url, store_url, {model_name: PACED}) as cluster:
        yield cluster


def serve(cluster: Cluster, port: int = 0, *options: str) -> tuple[RunningProcess, str]:
    running = cluster.start("serve", "--port", str(port), *options)
    wait_until(lambda: "answers at" in running.text() or not running.alive, "the gateway serves", timeout_s=60)
    found = re.search(r"answers at (\S+) ", running.text())
    assert found, running.text()
    return running, found[1]


def client(url: str) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0, timeout=60)


def text(chunks: Any) -> str:
    return "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)


def test_a_worker_killed_in_the_middle_of_a_stream_costs_no_character(cluster: Cluster) -> None:
    (model,) = cluster.models
    ask: Any = {"model": model, "messages": [{"role": "user", "content": "What is a queue? " * 90}], "seed": 4}
    gateway, url = serve(cluster)
    with client(url) as asked, pytest.raises(openai.InternalServerError) as refused:
        asked.chat.completions.create(**ask)
    assert refused.value.code == "no_worker"

    cluster.worker("prefill", model)
    first = cluster.worker("decode", model)
    with client(url) as asked:
        wait_until(lambda: served(asked, model), "the gateway sees the workers", timeout_s=20)
        whole = asked.chat.completions.create(**ask).choices[0].message.content
        stream = asked.chat.completions.create(**ask, stream=True)
        begun = "".join([text([next(stream)]) for _ in range(5)])
        second = cluster.worker("decode", model)
        first.kill()
        rest = text(stream)
    assert begun
    assert len(begun) < len(whole or "")
    assert begun + rest == whole
    second.terminate()
    assert gateway.terminate() == 0
    assert "Traceback" not in gateway.text()


def served(asked: openai.OpenAI, model: str) -> bool:
    try:
        asked.chat.completions.create(model=model, messages=[{"role": "user", "content": "x"}], max_tokens=1)
    except openai.InternalServerError:
        return False
    return True


def test_started_again_after_a_kill_it_takes_its_queue_up_and_away(cluster: Cluster) -> None:
    port = free_port()
    gateway, _ = serve(cluster, port)
    gateway.kill()
    queue = topology.reply_queue(own_name(port))
    with connected(cluster) as connection:
        assert connection.channel().queue_declare(queue, passive=True)
        again, _ = serve(cluster, port)
        assert again.terminate() == 0
        with pytest.raises(pika.exceptions.ChannelClosedByBroker):
            connection.channel().queue_declare(queue, passive=True)


def connected(cluster: Cluster) -> pika.BlockingConnection:
    return pika.BlockingConnection(pika.URLParameters(cluster.broker_url))
