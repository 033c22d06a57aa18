"""The demo's class over RabbitMQ and Redis: one prefill worker and two decode workers, each a process of its own."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis

from infra.broker import topology
from tests.support.homework import Demo, assert_each_once, example, journal, outcomes, same_batch
from tests.support.processes import ROOT, Cluster, CompletedCommand, Worker
from tests.support.waiting import wait_until

pytestmark = pytest.mark.system  # a whole class, twice

MODEL = "kvasir-demo"


@dataclass(frozen=True, slots=True)
class Graded:
    """The class, graded by a cluster that is still up."""

    cluster: Cluster
    prefill: Worker
    decodes: tuple[Worker, Worker]
    out: Path
    done: CompletedCommand


@pytest.fixture(scope="module")
def graded(tmp_path_factory: pytest.TempPathFactory, broker_url: str, store_url: str, demo: Demo) -> Iterator[Graded]:
    """The demo's batch from the start (same id and secret, so the same jobs), by the demo's own configuration file."""
    folder = tmp_path_factory.mktemp("cluster")
    out = same_batch(demo.out, folder / "out")
    with Cluster(folder, broker_url, store_url, ROOT / "examples/demo.toml") as cluster:
        workers = [cluster.launch(role, MODEL) for role in ("prefill", "decode", "decode")]
        for worker in workers:
            worker.wait_until_registered()
        done = cluster.run("grade", *example(out), timeout_s=400)
        yield Graded(cluster, workers[0], (workers[1], workers[2]), out, done)


def test_a_cluster_gives_the_same_grades_as_one_process(graded: Graded, demo: Demo) -> None:
    assert graded.done.code == 1, graded.done.stderr  # one submission is corrupt
    assert outcomes(graded.out) == outcomes(demo.out)
    assert (graded.out / "grades.csv").read_text("utf-8") == (demo.out / "grades.csv").read_text("utf-8")
    assert_each_once(graded.out)


def test_every_prompt_was_prefilled_in_one_process_and_decoded_in_another(graded: Graded) -> None:
    answers = [row for row in journal(graded.out) if row["state"] == "succeeded"]
    decoders = {worker.registration.worker_id for worker in graded.decodes}

    assert len(answers) == 28
    assert {row["prefill"]["worker_id"] for row in answers} == {graded.prefill.registration.worker_id}
    assert {row["decode"]["worker_id"] for row in answers} == decoders
    assert {row["decode"]["kv_transfer"] for row in answers} == {"verified"}
    assert {row["decode"]["evaluated_tokens"] for row in answers} == {1}


def test_the_class_shares_its_prefix_so_later_prompts_compute_only_their_suffix(graded: Graded) -> None:
    answers = [row for row in journal(graded.out) if row["state"] == "succeeded"]

    resumed = [row for row in answers if row["prefill"]["restored_tokens"] > 1000]

    assert len(resumed) >= len(answers) - 2  # the first of each of the two roles


def test_run_again_the_cluster_has_nothing_to_do(graded: Graded) -> None:
    before = (graded.out / "results.jsonl").read_bytes()

    again = graded.cluster.run("grade", *example(graded.out))

    assert again.code == 1
    assert "already graded; no engine was called" in again.stdout
    assert (graded.out / "results.jsonl").read_bytes() == before


def test_a_finished_batch_leaves_no_reply_queue_and_no_key_that_lives_for_ever(graded: Graded) -> None:
    jobs = {row["job_id"] for row in journal(graded.out)}
    batch_id = journal(graded.out)[0]["batch_id"]

    with redis.Redis.from_url(graded.cluster.store_url, decode_responses=True) as client:
        # A job's own blocks carry its id, and go after its ack, which is after its result.
        wait_until(lambda: not jobs & _owners(client), "every job's own blocks are deleted")
        immortal = [key for key in client.scan_iter(count=1000) if client.pttl(key) == -1]

    assert immortal == []
    assert not graded.cluster.has_queue(topology.reply_queue(batch_id))


def test_workers_leave_on_sigterm_with_nothing_unacknowledged(graded: Graded) -> None:
    codes = [worker.terminate() for worker in (graded.prefill, *graded.decodes)]

    assert codes == [0, 0, 0]
    assert graded.cluster.left_over() == {}
    pids = {worker.pid for worker in (graded.prefill, *graded.decodes)}
    assert not [
        registration for registration in graded.cluster.cluster_state.registrations() if registration.pid in pids
    ]


def _owners(client: redis.Redis) -> set[str]:
    """Ids of the jobs that have blocks of their own in the store."""
    return {key.split(":")[2] for key in client.scan_iter(match="kv:*:*:*", count=1000)}
