"""The gateway while its broker is killed: a stream under way loses no character, and the next request is answered."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest

from infra.broker import topology
from tests.support.processes import Cluster, ModelEntry, gateway_url
from tests.support.servers import RabbitMQServer

pytestmark = pytest.mark.system

PACED = ModelEntry("simulated", "sim:scale=1,prefill=100000,decode=10,answer=60,spread=1", context=8192)


@pytest.fixture
def broker() -> Iterator[RabbitMQServer]:
    """One of its own: it is killed."""
    with RabbitMQServer() as broker:
        yield broker


@pytest.mark.gate
def test_a_broker_killed_in_the_middle_of_a_stream_costs_no_character(
    tmp_path: Path, broker: RabbitMQServer, store_url: str, model_name: str
) -> None:
    with Cluster(tmp_path, broker.url, store_url, {model_name: PACED}) as cluster:
        cluster.worker("prefill", model_name)
        cluster.worker("decode", model_name)
        gateway = cluster.start("serve", "--port", "0")
        url = gateway_url(gateway)
        broker.wait_until_on_disk(topology.work_queue("prefill", model_name, "now"))
        ask: Any = {"model": model_name, "messages": [{"role": "user", "content": "What is a queue? " * 90}], "seed": 3}
        with openai.OpenAI(base_url=f"{url}/v1", api_key="x", max_retries=0, timeout=90) as client:
            whole = client.chat.completions.create(**ask).choices[0].message.content
            stream = client.chat.completions.create(**ask, stream=True)
            passed = "".join(next(stream).choices[0].delta.content or "" for _ in range(6))
            broker.kill()
            broker.start()
            passed += "".join(chunk.choices[0].delta.content or "" for chunk in stream)
            assert passed == whole
            assert client.chat.completions.create(**ask).choices[0].message.content == whole
        assert gateway.terminate() == 0
