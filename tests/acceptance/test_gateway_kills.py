"""A batch of the gateway outlives its process, wherever that dies. 1,000 lines: `benchmarks.gateway_kills`."""

from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.acceptance.gateway_kills import PLACES, QUICK, kill_at
from tests.support.processes import Cluster


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory, broker_url: str, store_url: str) -> Iterator[Cluster]:
    with Cluster(tmp_path_factory.mktemp("kills"), broker_url, store_url, {"gateway-kills": QUICK}) as cluster:
        cluster.worker("prefill", "gateway-kills")
        cluster.worker("decode", "gateway-kills")
        yield cluster


@pytest.mark.system
@pytest.mark.parametrize("place", PLACES)
def test_no_line_is_lost_or_answered_twice_wherever_the_gateway_dies(
    cluster: Cluster, place: str, tmp_path: Path
) -> None:
    row = asdict(kill_at(cluster, tmp_path / "state", place, 30, 1))
    assert row.pop("kills") >= 1
    assert row == {
        **{"place": place, "lines": 30},
        **dict.fromkeys(("lost", "duplicates", "wrong_counts", "batches", "changed_ids"), 0),
    }
