"""`kvasir worker`: both roles in a process of its own, over a real RabbitMQ and Redis."""

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from infra.config.settings import load_settings
from kvasir import connect
from messages.jobs import JobResult, PrefillJob, Sampling, user_prompt
from messages.workers import BOTH_ROLES
from producers.client import Client
from tests.support.homework import example_prompt
from tests.support.pipeline import WatchedEngine
from tests.support.processes import DEMO, Cluster, ModelEntry
from tests.support.waiting import wait_until

# An answer of 16 tokens takes 0.16 s, and every prompt has its KV cache transferred.
WEIGHTS = "sim:scale=1,prefill=20000,decode=100,answer=8"
SIMULATED = ModelEntry("simulated", WEIGHTS, context=4096, slots=4)


@contextmanager
def cluster_of(folder: Path, pair: tuple[str, str], model: str, entry: ModelEntry) -> Iterator[tuple[Cluster, Client]]:
    with (
        Cluster(folder, *pair, {model: entry}) as cluster,
        connect(load_settings(config=cluster.config, environ=cluster.environment), cluster.models) as client,
    ):
        yield cluster, client


def jobs_of(client: Client, prompts: list[str], sampling: Sampling) -> list[PrefillJob]:
    batch_id = f"both-{uuid.uuid4().hex[:8]}"
    [model] = client.models
    shared = "The rubric that all of the class share. " * 8
    return [
        client.new_job(batch_id, f"item-{number}", model, user_prompt(shared, prompt), sampling)
        for number, prompt in enumerate(prompts)
    ]


def results_of(client: Client, jobs: list[PrefillJob]) -> dict[str, JobResult]:
    results = client.gather(jobs[0].batch_id, [job.job_id for job in jobs], timeout_s=90)
    return {result.job_id: result for result in results}


def test_it_works_alone_and_beside_others_and_loses_nothing_when_it_is_killed(
    tmp_path: Path, broker_url: str, store_url: str, model_name: str
) -> None:
    with cluster_of(tmp_path, (broker_url, store_url), model_name, SIMULATED) as (cluster, client):
        # Given a worker with both roles, alone
        both = cluster.worker("both", model_name)
        jobs = jobs_of(client, [f"def f{number}(): return {number}\n" * 20 for number in range(120)], Sampling(8))
        client.submit(jobs[:40])
        wait_until(
            lambda: {one.role for one in client.workers() if one.model == model_name} == {"prefill", "decode"},
            "both roles are registered",
        )
        registrations = [one for one in client.workers() if one.model == model_name]
        assert {(one.process, one.details.roles) for one in registrations} == {(registrations[0].process, BOTH_ROLES)}
        # And its kvasir status, which names both
        rows = [row for row in cluster.run("status", "--json").json()["workers"] if row["model"] == model_name]
        assert sorted(row["role"] for row in rows) == ["decode", "prefill"]
        # When workers with one role join, and it is killed at work
        cluster.worker("prefill", model_name)
        cluster.worker("decode", model_name)
        client.submit(jobs[40:])
        wait_until(lambda: len(both.events("replied")) >= 10, "it has done some", 60)
        both.kill()
        # Then every job has its answer, and is verified
        results = results_of(client, jobs)
        engine = WatchedEngine(WEIGHTS.replace("scale=1", "scale=0"))
        for job in jobs:
            text = engine.decode(engine.tokenize(job.prompt, 0.0).ids, None, job.sampling).text
            assert (results[job.job_id].state, results[job.job_id].text) == ("succeeded", text)
        # And another, told to drain, leaves nothing behind
        again = cluster.worker("both", model_name)
        process = again.registration.process
        assert cluster.run("drain", process, "--timeout", "30").code == 0
        assert {one.off for one in client.workers() if one.process == process} == {"paused"}
        assert again.terminate() == 0
        assert not [one for one in client.workers() if one.process == process]


def test_a_real_model_says_what_it_says_over_two_workers(
    tmp_path: Path, broker_url: str, store_url: str, model_name: str
) -> None:
    prompts = [example_prompt("code", "fairweatherada")]
    greedy = Sampling(max_tokens=32, temperature=0)
    texts = []
    for name, roles in (("one", ("both",)), ("two", ("prefill", "decode"))):
        model = f"{model_name}.{name}"
        with cluster_of(tmp_path / name, (broker_url, store_url), model, DEMO) as (cluster, client):
            for role in roles:
                cluster.worker(role, model)  # type: ignore[arg-type]
            jobs = jobs_of(client, prompts, greedy)
            client.submit(jobs)
            results = results_of(client, jobs)
            assert {(one.state, one.decode.kv_transfer) for one in results.values()} == {("succeeded", "verified")}
            assert {one.decode.evaluated_tokens for one in results.values()} == {1}
            texts.append([results[job.job_id].text for job in jobs])
    assert texts[0] == texts[1]
