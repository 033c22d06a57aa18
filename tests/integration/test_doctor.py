"""`kvasir doctor` over a real broker and a real store, with workers that run."""

import os
import signal
import time
from contextlib import closing
from pathlib import Path

import pytest
import redis

from infra.broker.rabbitmq import RabbitMQBroker
from kvasir.doctor.members import check_members
from kvasir.doctor.services import check_link
from kvasir.doctor.steps import try_service
from tests.support.processes import ROOT, SIMULATED_MODEL, Cluster, CompletedCommand, config_text, environment, run
from tests.support.servers import HOST, RabbitMQCluster, RabbitMQServer, RedisServer, free_port
from tests.support.waiting import wait_until


def found(done: CompletedCommand, code: int) -> dict[tuple[str, str], list[str]]:
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
        Cluster(tmp_path, broker_url, store.url, {model_name: SIMULATED_MODEL}) as cluster,
    ):
        # When nobody serves the model yet, that is an error
        assert "no prefill and no decode worker" in found(cluster.run("doctor", "--json"), 1)["error", model_name][0]
        for role in ("prefill", "decode"):
            cluster.worker(role, model_name)
        # Then, with both, all is well
        well = found(cluster.run("doctor", "--json"), 0)
        assert "hands its KV cache over" in well["ok", model_name][0]
        assert any("all 12 work queues" in what for what in well["ok", "broker"])
        assert any("noeviction, no persistence" in what for what in well["ok", "store"])
        # And broker, link, clocks and disk have been looked at, with nothing left behind
        assert any(what.startswith("RabbitMQ ") and "with confirms" in what for what in well["ok", "broker"])
        assert sum("each step works" in what for level in ("broker", "store") for what in well["ok", level]) == 2
        assert any(
            "link of this machine to" in what for level in ("ok", "warn") for what in well.get((level, "links"), [])
        )
        assert len(well["ok", "clocks"]) == 2
        assert any("for journals" in what for level in ("ok", "warn") for what in well.get((level, "disk"), []))
        with redis.Redis.from_url(store.url) as client:
            assert list(client.scan_iter("doctor:*")) == []
            # And with a worker of message version 1 it is said who must be upgraded, and by what
            assert well["ok", "versions"] == ["2 workers registered, all of message version 2"]
            card = ROOT / "tests/forms/message_version_1/card-every-field.msgpack"
            client.set("card:{cards}:host.2.b", card.read_bytes(), 60_000)
            client.zadd("cards", {"host.2.b": (time.time() + 60) * 1000})
        [finding] = [each for each in cluster.run("doctor", "--json").json() if each["subject"] == "versions"]
        assert (finding["level"], "host.2.b" in finding["what"]) == ("error", True)
        assert "kvasir" in finding["todo"]
        assert "deploy upgrade" in finding["todo"]


@pytest.mark.system  # it waits for services that are away
def test_a_password_that_others_may_read_is_a_warning(tmp_path: Path) -> None:
    config, password = tmp_path / "kvasir.toml", tmp_path / "pw"
    urls = f'broker = "amqp://u@{HOST}:{free_port()}/"\nstore = "redis://{HOST}:{free_port()}"\n'
    config.write_text(f'[services]\n{urls}broker_password_file = "pw"\n', "utf-8")
    password.write_text("hunter2")
    for mode, warned in ((0o640, True), (0o600, False)):
        password.chmod(mode)
        said = run("--config", str(config), "doctor", "--json", env=environment(tmp_path), cwd=tmp_path).stdout
        assert (f"other users may read the password in {password}" in said) == warned
        assert "hunter2" not in said


@pytest.mark.system
def test_a_store_that_evicts_and_a_broker_that_is_away_are_errors(tmp_path: Path, model_name: str) -> None:
    # Given a Redis for caching, and a broker's URL where nobody listens
    config = tmp_path / "kvasir.toml"
    config.write_text(config_text({model_name: SIMULATED_MODEL}), "utf-8")
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


def test_a_full_store_and_a_user_with_few_rights_are_told_apart() -> None:
    few = "user reader on >secret ~* &* +@read +@connection"
    with RedisServer(max_memory="8mb", options=["maxmemory-policy noeviction", few]) as store:
        full = check_link(store.url, try_service("store", store.url))
        assert (full.level, full.cause) == ("error", "store_full")
        with redis.Redis.from_url(store.url) as client:
            assert list(client.scan_iter("doctor:*")) == []
        reader = f"redis://reader:secret@{HOST}:{store.port}/0"
        found = check_link(reader, try_service("store", store.url))
    assert (found.level, found.cause) == ("warn", "rights")
    assert "'set'" in found.what


@pytest.mark.system
def test_a_job_goes_through_every_live_pair_and_leaves_nothing(
    broker_url: str, store_url: str, tmp_path: Path, model_name: str
) -> None:
    # Given a prefill worker and two decode workers
    with Cluster(tmp_path, broker_url, store_url, {model_name: SIMULATED_MODEL}) as cluster:
        workers = [cluster.worker(role, model_name) for role in ("prefill", "decode", "decode")]
        prefill, *decodes = (worker.registration for worker in workers)
        with redis.Redis.from_url(store_url) as client:
            before = set(client.scan_iter("result:*"))
        # When all pairs are tried
        done = cluster.run("doctor", "--try", "--json")
        # Then each was met, or is named; and all that ran transferred
        assert done.code == 0, done.stdout + done.stderr
        trials, findings = done.json()["trials"], done.json()["findings"]
        met = {(trial["prefill"], trial["decode"]) for trial in trials}
        assert met
        assert len(met) + len(findings) == 2
        assert met <= {(prefill.worker_id, decode.worker_id) for decode in decodes}
        assert {(trial["level"], trial["kv_transfer"], trial["evaluated_tokens"]) for trial in trials} == {
            ("ok", "verified", 1)
        }
        assert all(trial["put_bytes_per_s"] > 0 and trial["get_bytes_per_s"] > 0 for trial in trials)
        # And no job, no result and no record is left
        with redis.Redis.from_url(store_url) as client:
            # Those of other tests may have gone meanwhile.
            assert set(client.scan_iter("result:*")) <= before
        for worker in workers:
            worker.terminate()
        assert cluster.left_over() == {}


@pytest.mark.system
def test_a_trial_that_nobody_takes_ends_with_one(
    broker_url: str, store_url: str, tmp_path: Path, model_name: str
) -> None:
    with Cluster(tmp_path, broker_url, store_url, {model_name: SIMULATED_MODEL}) as cluster:
        cluster.worker("prefill", model_name)
        done = cluster.run("doctor", "--try", model_name, "--json")
        assert done.code == 1
        [finding] = done.json()["findings"]
        assert finding["what"] == "no decode worker takes jobs"


def test_queues_with_too_few_members_are_named() -> None:
    with RabbitMQServer(plugins=["rabbitmq_management"]) as server, closing(RabbitMQBroker(server.url)) as broker:
        broker.declare([])
        # Queues come into the API one after another.
        missing = "fewer than 3 members: dead-letters, deaths"
        wait_until(lambda: missing in next(check_members(server.url, nodes=3)).what, "the API knows all queues")
        [few] = check_members(server.url, nodes=3)
        [well] = check_members(server.url, nodes=1)
        [unknown] = check_members(server.url.replace(server.password, "wrong"), nodes=3)
    assert few.level == "warn"
    assert missing in few.what
    assert "rabbitmq-queues grow" in few.todo
    assert well.level == "ok"
    assert "have enough members" in well.what
    assert "can't be read" in unknown.what
    assert "wrong" not in unknown.what + unknown.todo


@pytest.mark.system
def test_a_broker_that_was_frozen_and_stays_apart_is_named_by_either_side() -> None:
    def warned(*nodes: RabbitMQServer) -> str:
        url = cluster.url if len(nodes) > 1 else nodes[0].url
        return " ".join(finding.what for finding in check_members(url, nodes=3) if "apart" in finding.what)

    with RabbitMQCluster(plugins=["rabbitmq_management"]) as cluster:
        *others, frozen = cluster.nodes
        with closing(RabbitMQBroker(cluster.url, nodes=3)) as broker:
            broker.declare([])
        assert not warned(*cluster.nodes)
        # Given a node that was frozen until the others had given it up, and goes on: about every other one stays apart
        running = "length(rabbit_nodes:all_running())."

        def stays_apart() -> bool:
            cluster.wait_until_whole()
            os.kill(frozen.pid, signal.SIGSTOP)
            wait_until(lambda: others[0].control("eval", running).strip() == "2", "the others go on", 60, 0.5)
            os.kill(frozen.pid, signal.SIGCONT)
            time.sleep(15)  # it would have joined again by now
            return frozen.control("eval", running).strip() == "1"

        assert any(stays_apart() for _ in range(8))
        # When doctor looks, from the others or from that node alone, then it is named
        wait_until(lambda: frozen.node in warned(*cluster.nodes), "it is named", 60, 0.5)
        assert not any(other.node in warned(*cluster.nodes) for other in others)
        wait_until(lambda: frozen.node in warned(frozen), "it names itself", 60, 0.5)
        # And once it was restarted, it is one of three again
        frozen.kill()
        frozen.start()
        cluster.wait_until_whole()
        wait_until(lambda: not warned(*cluster.nodes), "all is well", 60, 0.5)
