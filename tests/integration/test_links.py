"""`kvasir measure --links` over a network with a known round trip, rate and MTU, and what becomes of its record."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from messages.workers import Link as MeasuredLink
from tests.support.network import GIGABIT, HERE, Link, Network, network, reason_against
from tests.support.processes import SIMULATED_MODEL, Cluster
from tests.support.servers import RabbitMQServer, RedisServer

pytestmark = [
    pytest.mark.system,  # it needs root
    pytest.mark.skipif(bool(reason_against()), reason=reason_against() or "it can run"),
]


@pytest.fixture
def bench(tmp_path: Path) -> Iterator[tuple[Network, Cluster]]:
    with ExitStack() as stack:
        net = stack.enter_context(network([HERE, "services"]))
        broker = stack.enter_context(RabbitMQServer(machine=net.machine("services")))
        store = stack.enter_context(RedisServer(machine=net.machine("services")))
        cluster = Cluster(tmp_path, broker.url, store.url, {"m": SIMULATED_MODEL})
        stack.callback(cluster.close)
        yield net, cluster


def test_a_link_is_measured_registered_and_reckoned_and_a_hole_in_it_is_found(bench: tuple[Network, Cluster]) -> None:
    net, cluster = bench
    # Given a link of 20 ms that carries 1 Gb/s
    net.set_link(Link(delay_ms=10, rate_bits=GIGABIT))
    # When it is measured, and a worker starts
    done = cluster.run("measure", "--links")
    assert done.code == 0, done.stderr
    worker = cluster.worker("decode", "m")
    # Then the worker registers what it can do, and doctor reckons with it
    [link] = worker.registration.details.links
    assert 20 <= link.rtt_ms < 60
    assert 3 < link.mb_per_s < 140
    assert (link.peer, link.stalls_at) == (net.address("services"), 0)
    assert link.rmem_max == int(Path("/proc/sys/net/core/rmem_max").read_text())
    findings = json.loads(cluster.run("doctor", "--json").stdout)
    [said] = [finding["what"] for finding in findings if "link of" in finding["what"]]
    assert link.summary in said
    assert "a class of 100" in said
    # And where packets of more than 1,200 bytes vanish, it says which message was too large
    net.set_link(Link(mtu=1200))
    assert cluster.run("measure", "--links").code == 0
    assert _kept(cluster).stalls_at == 1300


def _kept(cluster: Cluster) -> MeasuredLink:
    folder = Path(cluster.environment["XDG_DATA_HOME"]) / "kvasir"
    [fields] = json.loads((folder / "links.json").read_text())["links"].values()
    return MeasuredLink(**fields)
