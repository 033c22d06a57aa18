"""A short version of the table in docs/measurements/2026-11-27-faults.md: some of its rows, with a few hundred jobs."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.acceptance.faults.catalogue import find, plan_of
from tests.acceptance.faults.row import run_row
from tests.acceptance.faults.services import BrokerClusterServices, Services

pytestmark = pytest.mark.system  # minutes

JOBS, STORM_JOBS = 200, 60
SEED = 11


@pytest.fixture(scope="module")
def services() -> Iterator[Services]:
    with Services() as services:
        yield services


@pytest.fixture(scope="module")
def cluster() -> Iterator[BrokerClusterServices]:
    with BrokerClusterServices() as services:
        yield services


@pytest.mark.parametrize(
    "name",
    [
        "broker-forgets",
        "decode-killed",
        "prefill.passed",
        "decode.replied",
        "decode.answered",
        "hybrid-prefill-steps",
        "batched-prefill-steps",
        "owner-killed",
        "broker-killed",
        "broker-reset",
        "prefill-paused",
        "store-killed",
        "poison",
    ],
)
def test_no_job_is_lost_whatever_happens(services: Services, tmp_path: Path, name: str) -> None:
    fault = find(name)

    row = run_row(services, fault, plan_of(fault, JOBS, SEED), tmp_path / name)

    assert (row.lost, row.unexpected, row.journal_duplicates) == (0, 0, 0), row
    assert (row.attempted, row.confirmed) == (JOBS, JOBS), row
    assert (row.failed, row.dead_lettered) == (fault.failed, fault.dead_lettered), row
    # The rows of killed decode workers are counted from start lines in logs: without those nothing would ever be amiss
    if name.startswith("decode"):
        assert row.recovery_s is not None


@pytest.mark.parametrize("name", ["node-away", "node-separated", "nodes-rolled"])
def test_no_job_is_lost_with_a_node_of_three(cluster: BrokerClusterServices, tmp_path: Path, name: str) -> None:
    fault = find(name)

    row = run_row(cluster, fault, plan_of(fault, JOBS, SEED), tmp_path / name)

    assert (row.lost, row.unexpected, row.journal_duplicates, row.failed) == (0, 0, 0, 0), row
    assert (row.attempted, row.confirmed, row.lost_before_rerun) == (JOBS, JOBS, 0), row


@pytest.mark.parametrize("name", ["redis-killed-alone", "redis-separated", "redis-resharded"])
def test_no_job_is_lost_with_a_node_of_a_redis_cluster(tmp_path: Path, name: str) -> None:
    fault = find(name)

    with fault.services() as services:
        row = run_row(services, fault, plan_of(fault, JOBS, SEED), tmp_path / name)

    assert (row.lost, row.unexpected, row.journal_duplicates, row.failed) == (0, 0, 0, 0), row
    assert (row.attempted, row.confirmed, row.lost_before_rerun) == (JOBS, JOBS, 0), row


def test_no_job_is_lost_in_a_storm(services: Services, tmp_path: Path) -> None:
    fault = find("storm")

    row = run_row(services, fault, plan_of(fault, STORM_JOBS, SEED), tmp_path / "storm")

    assert (row.lost, row.unexpected, row.journal_duplicates) == (0, 0, 0), row
    assert row.attempted == row.succeeded + row.failed == STORM_JOBS, row
