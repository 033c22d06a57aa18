"""What doctor says of a Redis Cluster: whole, with settings that cost, and with a lost primary."""

from kvasir.doctor.services import check_link, check_store_servers
from kvasir.doctor.steps import try_service
from messages.urls import addresses
from tests.support.servers import HOST, RedisCluster
from tests.support.waiting import wait_until


def _said(cluster: RedisCluster) -> dict[str, list[str]]:
    found = list(check_store_servers(cluster.url))
    return {level: [each.what for each in found if each.level == level] for level in ("ok", "warn", "error")}


def test_a_cluster_is_looked_over_node_by_node_and_as_a_whole() -> None:
    with RedisCluster(max_memory="64mb") as cluster:
        ports = [node.port for node in cluster.nodes]

        # Whole, and without replicas
        said = _said(cluster)
        assert "a cluster of " in said["ok"][0]
        assert "3 nodes, 3 of them primaries that answer" in said["ok"][0]
        assert sorted(what.partition(" ")[0] for what in said["ok"][1:]) == sorted(f"{HOST}:{port}:" for port in ports)
        [alone] = said["warn"]
        assert alone.startswith("without a replica: ")
        assert all(str(port) in alone for port in ports)
        assert said["error"] == []
        first = addresses(cluster.url)[0]
        assert "MB/s" in check_link(first, try_service("store", first)).what

        # With settings that cost more than they must
        for node in cluster.nodes:
            cluster.configure(node, "cluster-require-full-coverage", "yes")
            cluster.configure(node, "cluster-node-timeout", "15000")
        said = _said(cluster)
        assert any("if one primary fails, the whole cluster is down" in what for what in said["warn"])
        assert any("given up after 15 s" in what for what in said["warn"])

        # With a primary lost, before the other nodes know it and after that
        gone = f"{HOST}:{ports[0]} does not answer"
        cluster.nodes[0].kill()
        assert f"{gone} this machine" in _said(cluster)["warn"]
        for node in cluster.nodes[1:]:
            cluster.configure(node, "cluster-require-full-coverage", "no")
            cluster.configure(node, "cluster-node-timeout", "1000")
        wait_until(lambda: f"{gone} the other nodes" in _said(cluster)["warn"], "its loss is known", 20)
        assert any("of 16,384 slots are served by no node" in what for what in _said(cluster)["error"])
