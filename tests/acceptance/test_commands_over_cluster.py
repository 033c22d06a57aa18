"""The other commands over RabbitMQ and Redis: submit, watch, results, retry, cancel, status, ask."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from infra.broker import topology
from tests.support.homework import assert_each_once, journal, tiny, tiny_class
from tests.support.processes import SIMULATED_MODEL, Cluster
from tests.support.waiting import wait_until

pytestmark = pytest.mark.system  # processes for every test


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, broker_url: str, store_url: str) -> Iterator[Cluster]:
    """Two models; only the first is served."""
    folder = tmp_path_factory.mktemp("cluster")
    # The name of the folder is this run's own, and so are the names of the queues.
    models = {f"served-{folder.name}": SIMULATED_MODEL, f"unserved-{folder.name}": SIMULATED_MODEL}
    with Cluster(folder, broker_url, store_url, models) as made:
        workers = [made.launch(role, made.models[0]) for role in ("prefill", "decode")]
        for worker in workers:
            worker.wait_until_registered()
        yield made


@pytest.fixture(scope="module")
def homework(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three submissions, six jobs."""
    return tiny_class(tmp_path_factory.mktemp("homework"))


def _with_unserved(cluster: Cluster) -> list[str]:
    """Options that let half of a class's jobs wait for a worker."""
    return ["--feedback-model", cluster.models[1]]


def test_submit_leaves_at_once_watch_gathers_and_results_needs_nobody(
    cluster: Cluster, homework: Path, tmp_path: Path
) -> None:
    out = tmp_path / "out"

    submitted = cluster.run("submit", *tiny(homework, out))
    watched = cluster.run("watch", str(out), "--json")
    shown = cluster.run("results", str(out), "--json")

    assert submitted.code == watched.code == shown.code == 0, submitted.stderr + watched.stderr + shown.stderr
    assert submitted.stdout.startswith("6 jobs queued")
    assert watched.json()["jobs"] == {"total": 6, "succeeded": 6, "failed": 0, "cancelled": 0, "expired": 0}
    assert {made["state"] for made in watched.json()["submissions"]} == {"graded"}
    assert shown.json() == watched.json()
    assert_each_once(out)
    assert not cluster.has_queue(topology.reply_queue(watched.json()["batch"]))


def test_submitting_twice_queues_nothing_twice(cluster: Cluster, homework: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"

    first = cluster.run("submit", *tiny(homework, out, *_with_unserved(cluster)))
    second = cluster.run("submit", *tiny(homework, out, *_with_unserved(cluster)))
    cluster.run("cancel", str(out))

    assert (first.code, second.code) == (0, 0)
    assert first.stdout.startswith("6 jobs queued")
    assert second.stdout.startswith("0 jobs queued")


def test_cancelled_jobs_end_as_such_and_run_when_they_are_retried(
    cluster: Cluster, homework: Path, tmp_path: Path
) -> None:
    # Given a batch of which half waits for a worker that isn't there, and somebody watching it
    out = tmp_path / "out"
    assert cluster.run("submit", *tiny(homework, out, *_with_unserved(cluster))).code == 0
    watching = cluster.start("watch", str(out))
    wait_until(lambda: len(journal(out)) == 3, "the served half is done", timeout_s=60)

    # When it is cancelled
    cancelled = cluster.run("cancel", str(out))

    # Then the watcher ends with a result for each job
    assert cancelled.code == 0, cancelled.stderr
    assert watching.wait() == 1
    assert sorted(row["state"] for row in journal(out)) == ["cancelled"] * 3 + ["succeeded"] * 3
    assert_each_once(out)

    # And retried with a worker, the cancelled ones run
    for role in ("prefill", "decode"):
        cluster.worker(role, cluster.models[1])
    retried = cluster.run("retry", str(out), "--json")
    assert retried.code == 0, retried.stderr
    assert retried.json()["jobs"]["succeeded"] == 6
    assert sorted(row["run"] for row in journal(out)) == [1] * 6 + [2] * 3


def test_status_tells_who_works_on_what(cluster: Cluster) -> None:
    state = cluster.run("status", "--json").json()
    table = cluster.run("status")

    served = [worker for worker in state["workers"] if worker["model"] == cluster.models[0]]
    assert {worker["role"] for worker in served} == {"prefill", "decode"}
    assert all(worker["transfers_kv"] for worker in served)
    assert state["queues"][topology.work_queue("decode", cluster.models[0], "bulk")] == 0
    assert cluster.models[0] not in state["unserved"]
    assert table.code == 0
    assert cluster.models[0] in table.stdout


def test_an_answer_is_the_same_streamed_printed_and_as_json(cluster: Cluster) -> None:
    asking = ("ask", "What is a churn rate?", "--model", cluster.models[0], "--temperature", "0")

    streamed, printed, as_json = cluster.run(*asking, "--stream"), cluster.run(*asking), cluster.run(*asking, "--json")

    assert streamed.code == printed.code == as_json.code == 0, streamed.stderr + printed.stderr + as_json.stderr
    text = as_json.json()["text"]
    assert text
    assert printed.stdout == streamed.stdout == text + "\n"
    assert as_json.json()["decode"]["kv_transfer"] == "verified"
    assert not cluster.has_queue(topology.reply_queue(as_json.json()["batch_id"]))


def test_an_answer_streamed_from_a_worker_that_is_killed_begins_again_on_another(
    tmp_path: Path, broker_url: str, store_url: str, model_name: str
) -> None:
    # Given an answer that streams from the only decode worker
    slow = replace(SIMULATED_MODEL, weights="sim:scale=1,prefill=1000000,decode=20,answer=100")
    with Cluster(tmp_path / "cluster", broker_url, store_url, {model_name: slow}) as cluster:
        workers = [cluster.launch(role, model_name) for role in ("prefill", "decode")]
        for worker in workers:
            worker.wait_until_registered()
        asking = cluster.start("ask", "What is a churn rate?", "--model", model_name, "--stream")
        wait_until(lambda: len(asking.text()) > 20, "some of the answer is there", timeout_s=60)

        # When that is killed, and another one comes
        workers[1].kill()
        before = asking.text()
        cluster.worker("decode", model_name, "--weights", "sim:scale=0,answer=100")

        # Then the answer begins again there, and is whole
        assert asking.wait() == 0, asking.text()
        first, again = asking.text().split("\n[the answer began again on another worker]\n")
        assert first.startswith(before)
        assert again.startswith(before.strip())
        assert len(again) > len(first)
