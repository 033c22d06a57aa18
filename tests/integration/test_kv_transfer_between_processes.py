"""The property that all of this is for: prefill in one process, decode in another, and not one prompt token twice."""

import uuid
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis

from engines.registry import EngineOptions, open_engine
from infra.config.settings import load_settings
from kvasir import connect
from messages.jobs import JobResult, PrefillJob, Sampling, user_prompt
from producers.client import Client
from tests.support.homework import example_prompt
from tests.support.processes import DEMO, Cluster, Worker
from tests.support.waiting import wait_until

# llama.cpp rounds a token's attention otherwise when it is evaluated alone than in a batch (to the third digit, with
# an f16 cache). Of what it was trained for the demo model is surer than that, of other prompts it often is not.
GREEDY = Sampling(max_tokens=48, temperature=0)
PROMPT = example_prompt("code", "fairweatherada")


@dataclass(frozen=True, slots=True)
class Alone:
    """What one process makes of PROMPT, with nothing transferred."""

    text: str
    prompt_tokens: int
    evaluated_tokens: int


@pytest.fixture(scope="module")
def alone() -> Alone:
    engine = open_engine(DEMO.engine, EngineOptions(DEMO.weights, DEMO.context, slots=1, threads=DEMO.threads))
    try:
        tokens = engine.tokenize(user_prompt("", PROMPT), 0.0).ids
        answer = engine.decode(tokens, None, GREEDY)
    finally:
        engine.close()
    return Alone(answer.text, len(tokens), answer.evaluated_tokens)


@pytest.fixture
def cluster(tmp_path: Path, broker_url: str, store_url: str, model_name: str) -> Iterator[Cluster]:
    with Cluster(tmp_path, broker_url, store_url, {model_name: DEMO}) as made:
        yield made


@pytest.fixture
def client(cluster: Cluster) -> Iterator[Client]:
    with connect(load_settings(config=cluster.config, environ=cluster.environment), cluster.models) as made:
        yield made


def test_a_prompt_prefilled_elsewhere_costs_one_token_and_withheld_kv_costs_all_of_them(
    cluster: Cluster, client: Client, alone: Alone
) -> None:
    # Given the same prompt twice, prefilled by a process that is gone, and the second one's KV cache withheld
    transferred, withheld = _prefilled_twice(cluster, client)
    _delete_blocks(cluster, withheld.job_id)

    # When another process decodes both, one after the other, in the one slot it has
    decode = cluster.worker("decode", cluster.models[0], "--slots", "1")
    results = _results(client, transferred, withheld)

    # Then the engine's own counter tells them apart, and nothing else does
    warm, cold = results[transferred.job_id], results[withheld.job_id]
    assert alone.prompt_tokens >= 1000
    assert alone.evaluated_tokens == alone.prompt_tokens
    assert (warm.decode.kv_transfer, warm.decode.evaluated_tokens) == ("verified", 1)
    assert (cold.decode.kv_transfer, cold.decode.evaluated_tokens) == ("none", alone.prompt_tokens)
    assert "is not in the store" in cold.decode.why_none
    assert cold.text == alone.text
    assert warm.text == alone.text
    assert {warm.decode.worker_id, cold.decode.worker_id} == {decode.registration.worker_id}
    assert warm.prefill.worker_id != warm.decode.worker_id


def test_while_a_prefill_worker_lives_withheld_kv_is_computed_there_again(
    cluster: Cluster, client: Client, alone: Alone
) -> None:
    # Given a prefilled prompt whose KV cache is gone, and the prefill worker still there
    prefill = cluster.worker("prefill", cluster.models[0])
    job = _submit(client, "lost", prefill)
    _delete_blocks(cluster, job.job_id)

    # When it is decoded
    decode = cluster.worker("decode", cluster.models[0], "--slots", "1")
    result = _results(client, job)[job.job_id]

    # Then it went round once more, and the decoder still evaluated one token
    assert [event["job"] for event in decode.events("kv_gone")] == [job.job_id]
    assert (result.decode.kv_transfer, result.decode.evaluated_tokens) == ("verified", 1)
    assert result.text == alone.text
    assert result.attempts == 1


def _prefilled_twice(cluster: Cluster, client: Client) -> tuple[PrefillJob, PrefillJob]:
    prefill = cluster.worker("prefill", cluster.models[0])
    jobs = _submit(client, "transferred", prefill), _submit(client, "withheld", prefill)
    assert prefill.terminate() == 0
    assert not [registration for registration in client.workers() if registration.model in cluster.models]
    return jobs


def _submit(client: Client, batch_id: str, prefill: Worker) -> PrefillJob:
    """A job whose KV cache is stored and whose decode job is queued. All of the prompt is its own, none is shared."""
    job = client.new_job(
        f"{batch_id}-{uuid.uuid4().hex[:8]}", "item", client.models[0], user_prompt("", PROMPT), GREEDY
    )
    client.submit([job])
    wait_until(
        lambda: job.job_id in {event["job"] for event in prefill.events("passed_on")}, "the decode job is queued", 60
    )
    return job


def _results(client: Client, *jobs: PrefillJob) -> dict[str, JobResult]:
    results = [result for job in jobs for result in client.gather(job.batch_id, [job.job_id], timeout_s=60)]
    return {result.job_id: result for result in results}


def _delete_blocks(cluster: Cluster, job_id: str) -> None:
    with redis.Redis.from_url(cluster.store_url) as store:
        keys = list(store.scan_iter(match=f"kv:*:{job_id}:*", count=1000))
        assert len(keys) > 30  # blocks of 32 tokens
        store.delete(*keys)
