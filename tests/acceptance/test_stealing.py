"""Stealing as an operator starts it: worker processes, and a model that only a thief serves."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes import SIMULATED_MODEL, Cluster
from tests.support.waiting import wait_until

pytestmark = pytest.mark.system  # four processes


@pytest.fixture
def cluster(tmp_path: Path, broker_url: str, store_url: str, model_name: str) -> Iterator[Cluster]:
    models = {model_name: SIMULATED_MODEL, f"other-{model_name}": SIMULATED_MODEL}
    with Cluster(tmp_path / "cluster", broker_url, store_url, models) as cluster:
        yield cluster


def test_a_model_whose_own_decode_workers_are_gone_is_served_by_one_that_may_steal_it(cluster: Cluster) -> None:
    home, other = cluster.models
    thief = cluster.worker("decode", home, "--steal", "all", "--memory", "1")
    cluster.worker("prefill", other)

    asked = cluster.run("ask", "How many points is this?", "--model", other)

    assert asked.code == 0, asked.stderr
    assert asked.stdout.strip()
    # The answer may be here before the line in the log, and the registration, which is renewed once a second
    wait_until(lambda: len(thief.events("stolen")) == 1, "its log tells of the theft")
    wait_until(lambda: thief.registration.resident == (home, other), "its registration names both models")


def test_a_model_that_is_not_configured_can_not_be_stolen(cluster: Cluster) -> None:
    done = cluster.run("decode-worker", "--model", cluster.models[0], "--steal", "no-such-model")
    assert done.code == 2
    assert "'no-such-model' is not configured" in done.stderr
