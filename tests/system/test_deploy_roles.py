"""RabbitMQ and Redis with the users that `kvasir deploy --services` writes: each role does its work and no more."""

import json
import os
import subprocess
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
import redis
import yaml
from redis.exceptions import AuthenticationError, NoPermissionError

from infra.broker import topology
from infra.broker.rabbitmq import RabbitMQBroker
from infra.deploy.permissions import PERMISSIONS, AccountRole
from kvstore.redis.cluster_state import RedisClusterState
from kvstore.redis.store import RedisKVStore
from messages.errors import ConfigError
from tests.support import programs
from tests.support.deployed import Deployed, RoleCluster, deployed_services
from tests.support.homework import journal, tiny, tiny_class
from tests.support.processes import ROOT, ModelEntry, RunningProcess, gateway_url
from tests.support.rights import is_refused
from tests.support.servers import HOST, RabbitMQServer, free_port, redis_answers
from tests.support.waiting import wait_until

pytestmark = pytest.mark.system  # half a minute

MODEL = "tiny-roles:1b"
# Every prompt is transferred through the store, and the class's prefix is shared.
SIMULATED = ModelEntry("simulated", "sim:scale=0", context=32768, short_prompt_tokens=0)


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployed]:
    with deployed_services(tmp_path_factory.mktemp("deployed")) as made:
        yield made


HELLO: dict[str, Any] = {"model": MODEL, "messages": [{"role": "user", "content": "hello"}]}


def url_of(gateway: RunningProcess) -> str:
    return f"{gateway_url(gateway)}/v1"


def chat(gateway: RunningProcess) -> str:
    """A stream of the gateway, whole."""
    return httpx.post(f"{url_of(gateway)}/chat/completions", json=HELLO | {"stream": True}, timeout=60).text


def batch(gateway: RunningProcess) -> dict[str, Any]:
    """A batch of one line, when it is over."""
    with httpx.Client(base_url=url_of(gateway), timeout=60) as http:
        line = json.dumps({"custom_id": "a", "body": HELLO})
        file = http.post("/files", data={"purpose": "batch"}, files={"file": ("p.jsonl", line)}).json()
        body = {"input_file_id": file["id"], "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        made = http.post("/batches", json=body).json()
        look = partial(http.get, f"/batches/{made['id']}")
        wait_until(lambda: look().json()["status"] == "completed", "the batch is over", timeout_s=60)
        over: dict[str, Any] = look().json()
        return over


def test_a_class_goes_through_workers_that_have_their_roles_rights_alone(deployed: Deployed, tmp_path: Path) -> None:
    homework = tiny_class(tmp_path / "homework")
    with RoleCluster(tmp_path / "cluster", deployed, {MODEL: SIMULATED}) as cluster:
        # Given a broker without queues: nobody but the operator may make them
        cluster.role = "producer"
        refused = cluster.run("status")
        assert refused.code == 2
        assert "run kvasir status once as the operator" in refused.stderr
        cluster.role = "operator"
        assert cluster.run("status").code == 0
        deployed.refused_by_redis()

        # When each process runs as its role's user
        cluster.role = "prefill"
        prefill = cluster.worker("prefill", MODEL)
        cluster.role = "decode"
        decode = cluster.worker("decode", MODEL)
        cluster.role = "worker"
        both = cluster.worker("both", MODEL)
        cluster.role = "producer"
        graded = cluster.run("grade", *tiny(homework, tmp_path / "out"))
        streamed = cluster.run("ask", "hello", "--model", MODEL, "--stream")
        gateway = cluster.start("serve", "--port", "0")
        served, ran = chat(gateway), batch(gateway)
        refused = cluster.run("forget", str(tmp_path / "out"), "--yes")
        cluster.role = "monitor"
        looked = cluster.run("status", "--json")

        # Then all of it works, through the store, and neither service refused anything
        for done in (graded, streamed, looked):
            assert done.code == 0, done.stderr
        assert refused.code == 2
        assert "nothing was deleted, because only the operator is allowed to forget a batch" in refused.stderr
        assert [row["state"] for row in journal(tmp_path / "out")] == ["succeeded"] * 6
        assert served.endswith("data: [DONE]\n\n")
        assert ran["request_counts"] == {"total": 1, "completed": 1, "failed": 0}
        assert gateway.terminate() == 0
        assert looked.json()["queues"]
        assert list(deployed.redis("operator").scan_iter("kv:*")), "nothing of the class's prefix was stored"
        for said in (
            prefill.text(),
            decode.text(),
            both.text(),
            graded.stderr,
            streamed.stderr,
            looked.stderr,
            gateway.text(),
        ):
            assert "ACCESS_REFUSED" not in said
            assert "refused a command" not in said
        # Workers go on without their registration, or a claim, and say so once: Redis's own log misses nothing
        assert [worker.terminate() for worker in (prefill, decode, both)] == [0, 0, 0]
        assert deployed.refused_by_redis() == []


def test_what_happens_rarely_is_allowed_too(deployed: Deployed) -> None:
    deployed.refused_by_redis()
    cluster_states = {role: RedisClusterState(deployed.url("store", role)) for role in PERMISSIONS}
    store = RedisKVStore(deployed.url("store", "prefill"))
    deployed.redis("operator").set("kv:print:chain", b"1234567890", ex=60)

    prefill, decode, producer = cluster_states["prefill"], cluster_states["decode"], cluster_states["producer"]
    assert prefill.claim("prefix-abc", 1, "w", 60)
    assert prefill.reserve("w", 10, 100, 60)
    prefill.release("prefix-abc", 1, "w")
    assert decode.claim("job", 1, "w", 60)
    decode.release("job", 1, "w")
    changed = [
        cluster_state.count_crashes("decode", "job", 1, change)
        for cluster_state in (prefill, decode)
        for change in (1, -1)
    ]
    assert changed == [1, 0] * 2
    producer.cancel("batch")
    decode.note_answer("job", 1, 3, b"yes")
    assert decode.noted_answers("job", 1) == {3: b"yes"}
    decode.forget_answers("job", 1)
    assert decode.noted_answers("job", 1) == {}
    decode.finish("w", [("job", 1, b"body")])

    assert decode.take_up("w", [("job", 1)], 60) == [(b"body", False)]
    for cluster_state, name in ((prefill, "5e7c"), (decode, "40ff"), (prefill, "5e7c")):
        cluster_state.put_sketch(name, b"numbers")
    for cluster_state in cluster_states.values():
        assert [cluster_state.get_sketch(name) for name in ("5e7c", "40ff", "none")] == [b"numbers", b"numbers", None]
    assert [cluster_state.is_cancelled("batch") for cluster_state in cluster_states.values()] == [True] * len(
        cluster_states
    )
    assert [cluster_state.reserved_bytes() for cluster_state in cluster_states.values()] == [10] * len(cluster_states)
    assert [cluster_state.registrations() for cluster_state in cluster_states.values()] == [[]] * len(cluster_states)
    prefill.unreserve("w")
    assert store.free_shared(10) >= 10
    assert store.usage().max_bytes == 1_000_000_000
    assert deployed.redis("monitor").config_get("maxmemory") == {"maxmemory": "1000000000"}
    assert deployed.refused_by_redis() == []


FORBIDDEN: list[tuple[AccountRole, tuple[object, ...]]] = [
    ("producer", ("GETEX", "kv:a:b", "EX", 1)),
    ("producer", ("GET", "result:{job:1}")),
    ("producer", ("UNLINK", "kv:a:b")),
    ("producer", ("DEL", "card:{cards}:w")),
    ("prefill", ("GET", "result:{job:1}")),
    ("prefill", ("SET", "result:{job:1}", "A+")),
    ("prefill", ("SET", "claim:{job:1}", "w")),
    ("prefill", ("HGETALL", "answers:job:1")),
    ("producer", ("HSET", "answers:job:1", 0, "A+")),
    ("prefill", ("SET", "cancelled:batch", "1")),
    ("decode", ("SET", "kv:a:b", "forged")),
    ("decode", ("SET", "cancelled:batch", "1")),
    ("decode", ("HSET", "reservations", "w", "1 1")),
    ("decode", ("SCAN", 0)),
    ("monitor", ("SET", "cancelled:batch", "1")),
    ("monitor", ("SET", "sketch:5e7c", "forged")),
    ("producer", ("PEXPIRE", "sketch:5e7c", 1)),
    ("decode", ("DEL", "sketch:5e7c")),
    ("monitor", ("HSET", "reservations", "w", "1 1")),
    ("monitor", ("GETEX", "kv:a:b", "EX", 1)),
    *(
        (role, words)
        for role in PERMISSIONS
        for words in (("FLUSHALL",), ("KEYS", "*"), ("CONFIG", "SET", "save", "1 1"))
    ),
    *((role, ("EVAL", "return 1", 0)) for role in PERMISSIONS if role != "operator"),
]


@pytest.mark.parametrize(("role", "words"), FORBIDDEN, ids=str)
def test_redis_refuses_what_is_not_a_roles(deployed: Deployed, role: AccountRole, words: tuple[object, ...]) -> None:
    with pytest.raises(NoPermissionError):
        deployed.redis(role).execute_command(*words)


def test_a_script_has_the_rights_of_who_calls_it(deployed: Deployed) -> None:
    client = deployed.redis("monitor")
    script = client.register_script("return redis.call('HSET', KEYS[1], 'w', '1 1')")
    deployed.refused_by_redis()
    with pytest.raises(redis.ResponseError):
        script(["reservations"])
    assert [(user, what) for user, _, what in deployed.refused_by_redis()] == [("kvasir-monitor", "hset")]


def test_nobody_gets_in_without_a_user(deployed: Deployed) -> None:
    url = deployed.url("store", "operator").replace("teacher:", ":")
    with pytest.raises(AuthenticationError):
        redis.Redis.from_url(url).ping()


def test_rabbitmq_refuses_what_is_not_a_roles(deployed: Deployed) -> None:
    broker = RabbitMQBroker(deployed.broker.url)
    broker.declare([MODEL])
    reply = broker.open_reply_queue("hw1")
    broker.close()
    prefill, decode = (topology.work_queue(stage, MODEL, "bulk") for stage in ("prefill", "decode"))

    reads: dict[AccountRole, tuple[str, ...]] = {
        "producer": (prefill, decode, topology.DEAD_LETTERS, topology.DEATHS),
        "prefill": (decode, reply, topology.DEAD_LETTERS, topology.RESULTS_PARKED),
        "decode": (reply, topology.DEAD_LETTERS, topology.RESULTS_PARKED),
        "monitor": (prefill, decode, reply, topology.DEAD_LETTERS, topology.DEATHS, topology.RESULTS_PARKED),
    }
    refuses = deployed.broker_refuses
    for role, queues in reads.items():
        for queue in queues:
            assert refuses(role, lambda channel, queue=queue: channel.basic_get(queue)), (role, "reads", queue)
            assert refuses(role, lambda channel, queue=queue: channel.queue_purge(queue)), (role, "purges", queue)
        for queue in (prefill, decode, topology.DEAD_LETTERS):
            assert refuses(role, lambda channel, queue=queue: channel.queue_delete(queue)), (role, "deletes", queue)
        assert refuses(role, lambda channel: channel.queue_declare("another", durable=True)), role

    writes: dict[AccountRole, tuple[str, ...]] = {
        "producer": (topology.DEAD, topology.STREAM, "kvasir.retry.1s", ""),
        "prefill": (topology.STREAM, topology.REPLY_ALTERNATE, ""),
        "decode": (topology.REPLY_ALTERNATE, ""),
        "monitor": (topology.WORK, topology.REPLY, topology.CONTROL, topology.DEAD, ""),
    }
    for role, exchanges in writes.items():
        for exchange in exchanges:
            assert refuses(role, lambda channel, to=exchange: channel.basic_publish(to, "x", b"")), (role, exchange)


def test_a_user_who_may_not_create_queues_is_told_who_may(deployed: Deployed) -> None:
    broker = RabbitMQBroker(deployed.url("broker", "producer"))
    try:
        with pytest.raises(ConfigError, match=r"another:1b.* does not exist.*as the operator"):
            broker.declare(["another:1b"])
    finally:
        broker.close()


def test_the_services_of_compose_know_the_roles(tmp_path: Path) -> None:
    """As their containers start them, the image's own entrypoint aside."""
    roles = [role for role in PERMISSIONS if role != "worker"]  # no container has both
    variables = {f"{role.upper()}_PASSWORD": f"{role}-word" for role in roles} | {"OPERATOR": "ada"}
    run = partial(subprocess.run, env=os.environ | variables, check=True, text=True, cwd=tmp_path)
    folder = ROOT / "infra/deploy/compose"
    filled = [run(["awk", "-f", folder / "with-passwords.awk", folder / name], stdout=subprocess.PIPE).stdout
              for name in ("definitions.json", "users.acl")]  # fmt: skip
    (tmp_path / "definitions.json").write_text(filled[0])
    with RabbitMQServer(settings={"load_definitions": str(tmp_path / "definitions.json")}) as broker:
        for role in roles:
            user = "ada" if role == "operator" else f"kvasir-{role}"
            url = f"amqp://{user}:{role}-word@{HOST}:{broker.port}/%2F"
            assert is_refused(url, lambda channel: channel.exchange_declare("mine")) == (role != "operator")

    command = yaml.safe_load((ROOT / "docker-compose.yml").read_text())["services"]["redis"]["command"][-1]
    script = command.replace("$$", "$").replace("/etc/kvasir", str(folder))
    port = free_port()
    start = f"exec {programs.require('redis')} --bind {HOST} --port {port} --dir {tmp_path} -"
    script = script.replace("exec docker-entrypoint.sh redis-server -", start)
    environment = os.environ | variables | {"REDIS_MAXMEMORY": "100mb"}
    with subprocess.Popen(["sh", "-c", script], env=environment, stdout=subprocess.DEVNULL) as process:
        try:
            url = f"redis://kvasir-monitor:monitor-word@{HOST}:{port}/0"
            wait_until(lambda: redis_answers(url), "Redis answers", 20)
            with redis.Redis.from_url(url) as monitor:
                assert monitor.config_get("maxmemory") == {"maxmemory": str(100 << 20)}
                with pytest.raises(NoPermissionError):
                    monitor.set("kv:x", b"")
            with redis.Redis(HOST, port) as nobody, pytest.raises(AuthenticationError):
                nobody.ping()
        finally:
            process.terminate()
