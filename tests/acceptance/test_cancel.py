"""`kvasir cancel` over a real broker: every job gets its result, what runs stops, what is queued is acked silently."""

import logging
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from infra.broker import topology
from infra.broker.rabbitmq import RabbitMQBroker
from tests.support.homework import assert_each_once, journal, tiny, tiny_class
from tests.support.processes import SIMULATED_MODEL, Cluster
from tests.support.waiting import wait_until

pytestmark = pytest.mark.system  # half a minute

log = logging.getLogger(__name__)

SLOW = replace(SIMULATED_MODEL, weights="sim:scale=1,prefill=1000000,decode=4,answer=800")  # minutes an answer


@pytest.fixture
def cluster(tmp_path: Path, broker_url: str, store_url: str, model_name: str) -> Iterator[Cluster]:
    with Cluster(tmp_path / "cluster", broker_url, store_url, {model_name: SLOW}) as cluster:
        yield cluster


def test_cancelling_stops_what_runs_and_leaves_a_result_for_every_job(cluster: Cluster, tmp_path: Path) -> None:
    # Given a batch whose owner has left, two of its twelve jobs being decoded
    out = tmp_path / "out"
    homework = tiny_class(tmp_path / "homework", size=6)
    workers = [cluster.launch(role, cluster.models[0]) for role in ("prefill", "decode")]
    for worker in workers:
        worker.wait_until_registered()
    decode = workers[1]
    assert cluster.run("submit", *tiny(homework, out)).code == 0
    wait_until(lambda: decode.registration.busy == 2, "both slots are busy", timeout_s=60)

    # When it is cancelled
    began = time.monotonic()
    cancelled = cluster.run("cancel", str(out))

    # Then every job has its result, and the decodes have stopped
    assert cancelled.code == 0, cancelled.stderr
    assert "12 jobs" in cancelled.stdout
    assert [row["state"] for row in journal(out)] == ["cancelled"] * 12
    assert_each_once(out)
    wait_until(lambda: decode.registration.busy == 0, "the slots are free", timeout_s=30)
    log.info("%.1f s from the command's start until the last decode had stopped", time.monotonic() - began)

    # And what was queued is gone, with no answer to anybody
    broker = RabbitMQBroker(cluster.broker_url, name="looking")
    try:
        queues = [*cluster.queues(), topology.reply_queue(journal(out)[0]["batch_id"])]
        wait_until(lambda: not any(_ready(broker, queue) for queue in queues), "nothing is queued", timeout_s=30)
    finally:
        broker.close()
    for worker in workers:
        assert not [event for event in worker.events() if event.get("event") in ("replied", "failed", "cancelled")]
    assert cluster.run("watch", str(out), "--json").json()["jobs"]["cancelled"] == 12
    assert_each_once(out)


def _ready(broker: RabbitMQBroker, queue: str) -> int:
    depth = broker.depth(queue)
    return depth.ready if depth else 0
