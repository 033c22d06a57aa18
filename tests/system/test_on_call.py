"""What whoever is on call is told of real processes: who is missing, where a job is, and who took over from whom."""

import json
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from infra.config.settings import load_settings
from kvasir.connect import connect
from messages.jobs import JobResult, PrefillJob, Sampling, user_prompt
from producers.client import Client
from tests.support.processes import Cluster, ModelEntry
from tests.support.waiting import wait_until

pytestmark = pytest.mark.system

SLOW = ModelEntry("simulated", "sim:scale=1,decode=10,prefill=20000,answer=300,spread=1", context=32768)


@pytest.fixture
def cluster(tmp_path: Path, broker_url: str, store_url: str, model_name: str) -> Iterator[Cluster]:
    with Cluster(tmp_path, broker_url, store_url, {model_name: SLOW}) as cluster:
        yield cluster


@pytest.fixture
def client(cluster: Cluster) -> Iterator[Client]:
    urls = {"KVASIR_BROKER_URL": cluster.broker_url, "KVASIR_STORE_URL": cluster.store_url}
    with connect(load_settings(config=cluster.config, environ=urls), name="test") as client:
        yield client


def submitted(client: Client, count: int, tokens: int, first: int = 0) -> list[PrefillJob]:
    made = [
        client.new_job(
            "on-call", f"i{number}", client.models[0], user_prompt("", f"question {number}"), Sampling(tokens)
        )
        for number in range(first, first + count)
    ]
    client.broker.open_reply_queue("on-call")
    client.submit(made)
    return made


def status(cluster: Cluster) -> dict[str, Any]:
    done = cluster.run("status", "--json")
    assert done.code == 0, done.stderr
    state: dict[str, Any] = json.loads(done.stdout)
    # The store is shared with tests that lose workers of other models
    return state | {"missing": [sentence for sentence in state["missing"] if cluster.models[0] in sentence]}


def results(client: Client, asked: list[PrefillJob], within_s: float) -> list[JobResult]:
    return list(client.gather("on-call", [job.job_id for job in asked], timeout_s=within_s))


def test_a_killed_worker_is_named_with_its_jobs_and_the_job_says_where_it_waits(
    cluster: Cluster, client: Client
) -> None:
    cluster.worker("prefill", cluster.models[0])
    decode = cluster.worker("decode", cluster.models[0], "--slots", "2")
    asked = submitted(client, 2, tokens=300)
    wait_until(lambda: len(decode.registration.jobs) == 2, "both are decoded", 30)
    told = cluster.run("job", asked[0].job_id)
    assert f"{decode.registration.worker_id} has it now, for decode." in told.stdout

    decode.kill()
    wait_until(lambda: status(cluster)["missing"], "it is missed", 20)

    (sentence,) = status(cluster)["missing"]
    assert f"its decode worker of {cluster.models[0]}, held 2 jobs." in sentence
    assert " gone for " in sentence
    for command in (("status",), ("top", "--once"), ("job", asked[0].job_id)):
        told = cluster.run(*command)
        assert "held 2 jobs." in " ".join(told.stdout.split()), told.stdout
    told = cluster.run("job", asked[0].job_id)
    assert "Nobody has it now; if it has died" in told.stdout
    assert f"Nobody serves {cluster.models[0]}" in told.stdout
    # Another one is started there, and has the jobs
    cluster.worker("decode", cluster.models[0], "--slots", "2")
    assert status(cluster)["missing"] == []
    assert {result.state for result in results(client, asked, 90)} == {"succeeded"}
    told = cluster.run("job", asked[0].job_id)
    assert "It succeeded: prefilled by" in told.stdout


def test_a_machine_that_the_configuration_expects_is_missed_before_it_ever_came(cluster: Cluster) -> None:
    role = f'{{ role = "decode", model = "{cluster.models[0]}", engine = "simulated" }}'
    with cluster.config.open("a") as file:
        file.write(f'\n[machines.absent]\nhost = "10.99.0.1"\nroles = [{role}]\n')
    assert status(cluster)["missing"] == [
        f"absent has no decode worker of {cluster.models[0]}, which kvasir.toml expects there."
    ]


def test_a_worker_whose_userland_hangs_is_out_within_two_minutes(cluster: Cluster, client: Client) -> None:
    # Given a worker that holds jobs, and another one
    cluster.worker("prefill", cluster.models[0])
    frozen = cluster.worker("decode", cluster.models[0], "--slots", "2")
    asked = submitted(client, 2, tokens=150)
    wait_until(lambda: len(frozen.registration.jobs) == 2, "both are decoded", 30)
    cluster.worker("decode", cluster.models[0], "--slots", "2")
    time.sleep(2)  # so that it registers once more: else the other one might have come in its place
    # When it stops, while its kernel goes on answering the broker's
    start = time.monotonic()
    frozen.send(signal.SIGSTOP)
    try:
        # Then the other one has its jobs, and status says so
        assert {result.state for result in results(client, asked, 120)} == {"succeeded"}
        assert time.monotonic() - start < 120
        assert any("held 2 jobs" in sentence for sentence in status(cluster)["missing"])
    finally:
        frozen.send(signal.SIGCONT)


def test_a_worker_whose_machine_is_full_leaves_the_prompts_to_another(cluster: Cluster, client: Client) -> None:
    # Given a worker that must leave more memory free than its machine has, and alone works all the same
    small = cluster.config.read_text()
    cluster.config.write_text(small.replace("slots = 2", "slots = 2\nfree_memory_gb = 900000.0"))
    full = cluster.worker("prefill", cluster.models[0])
    cluster.worker("decode", cluster.models[0], "--slots", "4")
    (result,) = results(client, submitted(client, 1, tokens=5), 60)
    assert result.prefill.worker_id == full.registration.worker_id
    # When another one is there, without the setting
    cluster.config.write_text(small)
    other = cluster.worker("prefill", cluster.models[0])
    done = results(client, submitted(client, 12, tokens=5, first=1), 90)
    # Then that one has them, none is lost or counted as tried again, and status says why
    assert {(result.state, result.attempts) for result in done} == {("succeeded", 1)}
    assert {result.prefill.worker_id for result in done} == {other.registration.worker_id}
    told = " ".join(cluster.run("status").stdout.split())
    assert f"{full.registration.worker_id} paused itself: a KV cache of" in told
    # And when it is alone again, it goes on
    other.kill()
    (result,) = results(client, submitted(client, 1, tokens=5, first=13), 90)
    assert (result.state, result.prefill.worker_id) == ("succeeded", full.registration.worker_id)
