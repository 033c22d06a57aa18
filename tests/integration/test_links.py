"""`kvasir measure --links`: what it finds on real services and over a network with a known round trip, rate and MTU."""

import json
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest
import redis

from kvasir.measure import FILE_NAME
from messages.workers import Link as MeasuredLink
from tests.support.network import GIGABIT, HERE, Link, Network, network, reason_against
from tests.support.processes import SIMULATED_MODEL, Cluster
from tests.support.servers import HOST, RabbitMQServer, RedisServer, free_port


def test_links_are_measured_and_kept_and_nothing_is_left_in_the_store(tmp_path: Path, broker_url: str) -> None:
    with RedisServer() as store, Cluster(tmp_path, broker_url, store.url, {"m": SIMULATED_MODEL}) as cluster:
        done = cluster.run("measure", "--links")
        assert done.code == 0, done.stderr
        with redis.Redis.from_url(store.url) as client:
            assert client.dbsize() == 0
    link = _kept(cluster)
    assert (link.peer, link.stalls_at) == (HOST, 0)
    assert min(link.mb_per_s, link.put_mb_per_s, link.parallel_mb_per_s) > 10
    assert f"{HOST}: round trip {link.rtt_ms:g} ms, put " in done.stdout


def test_what_stands_in_the_way_of_a_service_is_said_and_nothing_is_kept(tmp_path: Path, broker_url: str) -> None:
    cluster = Cluster(tmp_path, broker_url, f"redis://{HOST}:{free_port()}/0", {"m": SIMULATED_MODEL})
    done = cluster.run("measure", "--links")
    assert done.code == 2
    assert "nobody listens" in done.stderr
    assert not _file(cluster).exists()


@pytest.mark.system  # it needs root
@pytest.mark.skipif(bool(reason_against()), reason=reason_against() or "it can run")
class TestOverANetwork:
    @pytest.fixture
    def bench(self, tmp_path: Path) -> Iterator[tuple[Network, Cluster]]:
        with ExitStack() as stack:
            net = stack.enter_context(network([HERE, "services"]))
            broker = stack.enter_context(RabbitMQServer(machine=net.machine("services")))
            store = stack.enter_context(RedisServer(machine=net.machine("services")))
            cluster = Cluster(tmp_path, broker.url, store.url, {"m": SIMULATED_MODEL})
            stack.callback(cluster.close)
            yield net, cluster

    def test_a_link_is_measured_registered_and_reckoned_and_a_hole_in_it_is_found(
        self, bench: tuple[Network, Cluster]
    ) -> None:
        net, cluster = bench
        # Given a link of 20 ms that carries 1 Gb/s
        net.set_link(Link(delay_ms=10, rate_bits=GIGABIT))
        # When it is measured, and a worker starts
        done = cluster.run("measure", "--links")
        assert done.code == 0, done.stderr
        worker = cluster.worker("decode", "m")
        # Then the worker registers what it can do, and doctor reckons with it
        [link] = worker.registration.details.links
        assert link == _kept(cluster)
        assert 20 <= link.rtt_ms < 60
        assert 3 < link.mb_per_s < 140
        assert (link.peer, link.stalls_at) == (net.address("services"), 0)
        assert link.rmem_max == int(Path("/proc/sys/net/core/rmem_max").read_text())
        findings = json.loads(cluster.run("doctor", "--json").stdout)
        [said] = [each for each in findings if f"link of {worker.registration.host} to {link.peer}" in each["what"]]
        assert said["subject"] == "links"
        assert f"get {link.parallel_mb_per_s:,.0f} on 4 connections" in said["what"]
        assert "a class of 100" in said["what"]
        # And where packets of more than 1,200 bytes vanish, it says which message was too large
        net.set_link(Link(mtu=1200))
        assert cluster.run("measure", "--links").code == 0
        assert _kept(cluster).stalls_at == 1300


def _file(cluster: Cluster) -> Path:
    return Path(cluster.environment["XDG_DATA_HOME"]) / "kvasir" / FILE_NAME


def _kept(cluster: Cluster) -> MeasuredLink:
    [fields] = json.loads(_file(cluster).read_text("utf-8"))["links"].values()
    return MeasuredLink(**fields)
