"""TLS and credentials, with a real broker and a real store."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.certificates import Certificates, make_certificates
from tests.support.processes import SIMULATED_MODEL, Cluster, RunningProcess
from tests.support.servers import HOST, RabbitMQServer, RedisServer, free_port

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
    assert "KVASIR_BROKER_CA_FILE: a CA file is set, but the broker's URL does not begin with amqps://" in plain.stderr
