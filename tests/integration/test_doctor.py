"""`kvasir doctor` over a real broker and a real store, with workers that run."""

from pathlib import Path

from tests.support.processes import SIMULATED, Cluster, Done, config_text, environment, run
from tests.support.servers import HOST, RedisServer, free_port


def found(done: Done, code: int) -> dict[tuple[str, str], list[str]]:
    """What doctor says, by level and subject."""
    assert done.code == code, done.stderr + done.stdout
    result: dict[tuple[str, str], list[str]] = {}
    for finding in done.json():
        result.setdefault((finding["level"], finding["subject"]), []).append(finding["what"])
    return result


def test_a_cluster_that_fits_together_is_well(broker_url: str, tmp_path: Path, model_name: str) -> None:
    # Given workers of both kinds, over a store as it should be
    with (
        RedisServer(max_memory="512mb") as store,
        Cluster(tmp_path, broker_url, store.url, {model_name: SIMULATED}) as cluster,
    ):
        # When nobody serves the model yet, that is an error
        assert "no prefill and no decode worker" in found(cluster.run("doctor", "--json"), 1)["error", model_name][0]
        for role in ("prefill", "decode"):
            cluster.worker(role, model_name)
        # Then, with both, all is well
        well = found(cluster.run("doctor", "--json"), 0)
        assert "hands its KV cache over" in well["ok", model_name][0]
        assert any("all 6 work queues" in what for what in well["ok", "broker"])
        assert any("noeviction, no persistence" in what for what in well["ok", "store"])


def test_a_store_that_evicts_and_a_broker_that_is_away_are_errors(tmp_path: Path, model_name: str) -> None:
    # Given a Redis for caching, and a broker's URL where nobody listens
    config = tmp_path / "kvasir.toml"
    config.write_text(config_text({model_name: SIMULATED}), "utf-8")
    broker = f"amqp://guest:guest@{HOST}:{free_port()}/"
    with RedisServer(options=["maxmemory-policy allkeys-lru", "save 3600 1"]) as store:
        # When doctor looks
        services = {"KVASIR_BROKER_URL": broker, "KVASIR_STORE_URL": store.url}
        said = found(run("doctor", "--json", env=environment(tmp_path) | services, cwd=tmp_path), 1)
    # Then it says all of it, and goes on after the first
    assert ("error", "broker") in said
    assert any("allkeys-lru" in what for what in said["error", "store"])
    assert any("writes KV caches to disk" in what for what in said["warn", "store"])
    assert any("maxmemory is not set" in what for what in said["warn", "store"])
