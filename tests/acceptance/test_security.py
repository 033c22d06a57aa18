"""TLS, credentials and rights, with a real broker and a real store."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from pika.adapters.blocking_connection import BlockingChannel

from infra.broker import topology
from infra.broker.rabbitmq import RabbitMQBroker
from infra.deploy.permissions import PERMISSIONS, AccountRole, set_permissions
from messages.errors import ConfigError
from tests.support.certificates import Certificates, make_certificates
from tests.support.homework import journal, tiny, tiny_class
from tests.support.processes import SIMULATED_MODEL, Cluster, RunningProcess, gateway_url
from tests.support.rights import is_refused
from tests.support.servers import HOST, RabbitMQServer, RedisServer, free_port
from tests.support.waiting import wait_until

pytestmark = pytest.mark.system  # a minute

MODEL = "tiny-secure:1b"


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return make_certificates(tmp_path_factory.mktemp("certificates"))


class SecuredBroker(RabbitMQServer):
    """RabbitMQ that speaks TLS on a port of its own."""

    def __init__(self, certificates: Certificates) -> None:
        self.tls_port = free_port()
        settings = {
            "listeners.ssl.1": f"{HOST}:{self.tls_port}",
            "ssl_options.cacertfile": str(certificates.ca),
            "ssl_options.certfile": str(certificates.certificate),
            "ssl_options.keyfile": str(certificates.key),
            "ssl_options.verify": "verify_none",  # of clients: they log in with a password
        }
        super().__init__(settings=settings)


class SecuredStore(RedisServer):
    """Redis that speaks TLS on a port of its own."""

    def __init__(self, certificates: Certificates) -> None:
        self.tls_port = free_port()
        files = [f"tls-cert-file {certificates.certificate}", f"tls-key-file {certificates.key}"]
        super().__init__(options=[f"tls-port {self.tls_port}", *files, "tls-auth-clients no"])


class SecuredCluster(Cluster):
    """Its processes reach both services over TLS, with passwords from files."""

    def __init__(self, folder: Path, broker: SecuredBroker, store: SecuredStore, certificates: Certificates) -> None:
        super().__init__(folder, broker.url, store.url, {MODEL: SIMULATED_MODEL})
        self.passwords = (broker.password, store.password)
        for name, password in zip(("broker", "store"), self.passwords, strict=True):
            (folder / f"{name}.password").write_text(password + "\n")
        self.tls = {
            "KVASIR_BROKER_URL": f"amqps://{broker.user}@{HOST}:{broker.tls_port}/%2F",
            "KVASIR_STORE_URL": f"rediss://default@{HOST}:{store.tls_port}/0",
            "KVASIR_BROKER_PASSWORD_FILE": str(folder / "broker.password"),
            "KVASIR_STORE_PASSWORD_FILE": str(folder / "store.password"),
            "KVASIR_BROKER_CA_FILE": str(certificates.ca),
            "KVASIR_STORE_CA_FILE": str(certificates.ca),
        }

    @property
    def environment(self) -> dict[str, str]:
        return super().environment | self.tls


@pytest.fixture(scope="module")
def secured(tmp_path_factory: pytest.TempPathFactory, certificates: Certificates) -> Iterator[SecuredCluster]:
    folder = tmp_path_factory.mktemp("secured")
    with (
        SecuredBroker(certificates) as broker,
        SecuredStore(certificates) as store,
        SecuredCluster(folder / "cluster", broker, store, certificates) as cluster,
    ):
        yield cluster


@pytest.mark.gate
def test_workers_and_commands_work_over_tls_and_no_output_holds_a_password(secured: SecuredCluster) -> None:
    # Given workers that reach broker and store over TLS, and log all they can
    arguments = ("--log-level", "debug")
    workers: list[RunningProcess] = [
        secured.start(*arguments, f"{role}-worker", "--model", MODEL) for role in ("prefill", "decode")
    ]

    # When a prompt is asked, and everything that shows settings is run
    asked = secured.run("--log-level", "debug", "ask", "hello", "--model", MODEL, "--json")
    shown = [secured.run(*what) for what in (("config",), ("config", "--json"), ("status",), ("status", "--json"))]

    # Then it works, and nobody has printed or logged a password
    assert asked.code == 0, asked.stderr
    assert asked.json()["state"] == "succeeded"
    assert [done.code for done in shown] == [0] * 4
    assert "amqps://" in shown[0].stdout
    said = [asked.stdout, asked.stderr, *(done.stdout + done.stderr for done in shown), *(w.text() for w in workers)]
    assert all(said[2:])
    for password in secured.passwords:
        assert not [text for text in said if password in text]


@pytest.mark.parametrize(("service", "code"), [("BROKER", 2), ("STORE", 3)])
def test_a_certificate_of_somebody_else_is_refused_in_one_sentence(
    secured: SecuredCluster, certificates: Certificates, monkeypatch: pytest.MonkeyPatch, service: str, code: int
) -> None:
    monkeypatch.setitem(secured.tls, f"KVASIR_{service}_CA_FILE", str(certificates.other_ca))

    done = secured.run("status", timeout_s=60)

    assert done.code == code
    (sentence,) = done.stderr.splitlines()
    assert "certificate" in sentence
    assert f"set {service.lower()}_ca_file" in sentence


def test_a_ca_file_without_tls_and_one_that_is_missing_are_named(
    secured: SecuredCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(secured.tls, "KVASIR_STORE_CA_FILE", "/nowhere/ca.pem")
    missing = secured.run("status")
    monkeypatch.setitem(secured.tls, "KVASIR_BROKER_URL", f"amqp://kvasir@{HOST}:1/")
    plain = secured.run("status")

    assert (missing.code, plain.code) == (2, 2)
    assert "KVASIR_STORE_CA_FILE: can't read the CA file /nowhere/ca.pem" in missing.stderr
    assert "KVASIR_BROKER_CA_FILE: a CA file is set, but the broker's URL is not amqps://" in plain.stderr


# --- rights


class Limited:
    """A broker whose users have the rights of their roles, and no more."""

    def __init__(self, server: RabbitMQServer) -> None:
        self.server = server
        for role in PERMISSIONS:
            server.control("add_user", f"kvasir-{role}", f"secret-of-{role}")
            server.control(*set_permissions(role, f"kvasir-{role}"))

    def url(self, role: AccountRole) -> str:
        return f"amqp://kvasir-{role}:secret-of-{role}@{HOST}:{self.server.port}/%2F"

    def refuses(self, role: AccountRole, action: Callable[[BlockingChannel], object]) -> bool:
        """Whether the broker answers 403 to what this role's user tries."""
        return is_refused(self.url(role), action)


@pytest.fixture(scope="module")
def limited() -> Iterator[Limited]:
    with RabbitMQServer() as server:
        yield Limited(server)


class LimitedCluster(Cluster):
    """Each process logs in as its role's user."""

    def __init__(self, folder: Path, limited: Limited, store_url: str) -> None:
        super().__init__(folder, limited.server.url, store_url, {MODEL: SIMULATED_MODEL})
        self._limited = limited
        self.role: AccountRole = "operator"

    @property
    def environment(self) -> dict[str, str]:
        return super().environment | {"KVASIR_BROKER_URL": self._limited.url(self.role)}


def test_every_role_does_its_work_with_its_rights_alone(limited: Limited, store_url: str, tmp_path: Path) -> None:
    homework = tiny_class(tmp_path / "homework")
    with LimitedCluster(tmp_path / "cluster", limited, store_url) as cluster:
        # Given a broker without queues: nobody but the operator may make them
        cluster.role = "producer"
        refused = cluster.run("status")
        assert refused.code == 2
        assert "run kvasir status once as the operator" in refused.stderr
        cluster.role = "operator"
        assert cluster.run("status").code == 0

        # When each process runs as its role's user
        cluster.role = "prefill"
        prefill = cluster.worker("prefill", MODEL)
        cluster.role = "decode"
        decode = cluster.worker("decode", MODEL)
        cluster.role = "producer"
        graded = cluster.run("grade", *tiny(homework, tmp_path / "out"))
        streamed = cluster.run("ask", "hello", "--model", MODEL, "--stream")
        gateway = cluster.start("serve", "--port", "0")
        served = chat(gateway)
        ran = batch(gateway)
        cluster.role = "monitor"
        looked = cluster.run("status", "--json")

        # Then all of it works, and none was refused anything
        assert graded.code == 0, graded.stderr
        assert [row["state"] for row in journal(tmp_path / "out")] == ["succeeded"] * 6
        assert streamed.code == 0, streamed.stderr
        assert served.endswith("data: [DONE]\n\n")
        assert ran["request_counts"] == {"total": 1, "completed": 1, "failed": 0}
        assert gateway.terminate() == 0
        assert looked.code == 0, looked.stderr
        assert looked.json()["queues"]
        for said in (prefill.text(), decode.text(), graded.stderr, streamed.stderr, looked.stderr, gateway.text()):
            assert "ACCESS_REFUSED" not in said


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


def test_what_a_role_must_not_do_is_refused(limited: Limited) -> None:
    broker = RabbitMQBroker(limited.url("operator"))
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
    for role, queues in reads.items():
        for queue in queues:
            assert limited.refuses(role, lambda channel, queue=queue: channel.basic_get(queue)), (role, "reads", queue)
        for queue in (prefill, decode, topology.DEAD_LETTERS):
            assert limited.refuses(role, lambda channel, queue=queue: channel.queue_delete(queue)), (role, queue)

    writes: dict[AccountRole, tuple[str, ...]] = {
        "producer": (topology.DEAD, topology.STREAM, "kvasir.retry.1s", ""),
        "prefill": (topology.STREAM, topology.REPLY_ALTERNATE, ""),
        "decode": (topology.REPLY_ALTERNATE, ""),
        "monitor": (topology.WORK, topology.REPLY, topology.CONTROL, topology.DEAD, ""),
    }
    for role, exchanges in writes.items():
        for exchange in exchanges:
            assert limited.refuses(role, lambda channel, to=exchange: channel.basic_publish(to, "x", b"")), (
                role,
                exchange,
            )


def test_a_user_who_may_not_create_queues_is_told_who_may(limited: Limited) -> None:
    broker = RabbitMQBroker(limited.url("producer"))
    try:
        with pytest.raises(ConfigError, match=r"another:1b.* does not exist.*as the operator"):
            broker.declare(["another:1b"])
    finally:
        broker.close()
