"""Workers taken out of the work for a while: `kvasir pause`, `resume`, `drain`, and hours."""

from collections.abc import Iterator
from datetime import datetime, timedelta
from pathlib import Path

import pytest

from tests.support.processes import Cluster, ModelEntry
from tests.support.waiting import wait_until

pytestmark = pytest.mark.system

MODEL = "paused:1b"
SLOW = ModelEntry("simulated", "sim:decode=40,prefill=20000,answer=200,scale=1", context=8192, slots=1)


@pytest.fixture
def cluster(tmp_path: Path, broker_url: str, store_url: str) -> Iterator[Cluster]:
    with Cluster(tmp_path, broker_url, store_url, {MODEL: SLOW}) as cluster:
        cluster.worker("prefill", cluster.models[0])
        yield cluster


def test_a_drained_worker_finishes_what_it_holds_and_takes_nothing_until_it_is_resumed(cluster: Cluster) -> None:
    # Given a decode worker at work, and another question waiting
    worker = cluster.worker("decode", cluster.models[0])
    first = cluster.start("ask", "The first question?", "--model", cluster.models[0])
    wait_until(lambda: worker.registration.busy, "it works", 60)
    # When it is drained
    drained = cluster.run("drain", worker.registration.worker_id)
    # Then what it held is answered
    assert drained.code == 0, drained.stderr
    assert first.wait() == 0
    assert (worker.registration.busy, worker.registration.off) == (0, "paused")
    # And the next question waits until it is resumed
    second = cluster.start("ask", "The second question?", "--model", cluster.models[0])
    decode = f"decode.{cluster.models[0]}.now"
    wait_until(lambda: _ready(cluster, decode) == 1, "the second question waits in the queue", 60)
    assert (worker.registration.busy, worker.registration.done) == (0, 1)
    assert cluster.run("resume", worker.registration.worker_id.split(".")[0]).code == 0
    assert second.wait() == 0


def test_a_worker_outside_its_hours_waits(cluster: Cluster) -> None:
    start, end = (datetime.now() + timedelta(hours=hours) for hours in (2, 4))
    worker = cluster.worker("decode", cluster.models[0], "--hours", f"{start:%H:%M}-{end:%H:%M}")
    cluster.start("ask", "Is anybody there?", "--model", cluster.models[0])
    wait_until(lambda: _ready(cluster, f"decode.{cluster.models[0]}.now") == 1, "the question waits", 60)
    assert (worker.registration.off, worker.registration.busy) == ("outside its hours", 0)


def test_nobody_of_that_name_is_one_sentence(cluster: Cluster) -> None:
    done = cluster.run("pause", "nobody")
    assert done.code == 2
    assert done.stderr.startswith("kvasir: there is no worker 'nobody'; live workers: ")


def _ready(cluster: Cluster, queue: str) -> int:
    state = cluster.run("status", "--json").json()
    return int(state["queues"].get(queue, 0))
