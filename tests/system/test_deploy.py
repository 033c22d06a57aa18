"""`kvasir deploy` over real ssh: two OpenSSH servers on loopback ports are the machines, each with its own home."""

import os
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from infra.config.settings import load_settings
from infra.deploy.permissions import PERMISSIONS
from infra.deploy.units import Place, unit_file, units_of
from kvstore.redis.cluster_state import RedisClusterState
from tests.support import programs, sockets
from tests.support.processes import ROOT, CompletedCommand, environment, run
from tests.support.servers import RabbitMQServer, RedisServer, free_port
from tests.support.sshd import Sshd
from tests.support.waiting import wait_until

pytestmark = pytest.mark.system

EXAMPLES = Path(__file__).parents[2] / "examples"
EXAMPLE, DEMO_MODEL = EXAMPLES / "kvasir.toml", EXAMPLES / "model" / "kvasir-demo.gguf"
MODEL = "deployed:1b"
MACHINE = """
[machines.{name}]
host = "{name}"
platform = "linux"
supervisor = "plain"
metrics_port = {port}
roles = [{roles}]
"""
WEIGHTS = "sim:decode=200,prefill=20000,answer=400"
# Where every address of 127.0.0.0/8 is this machine's, the services' own can be told from the usual one of loopback.
URL_HOST = "127.0.0.2" if sys.platform.startswith("linux") else "127.0.0.1"
AMQP, REDIS, EPMD = 5672, 6379, 4369
# Rows of docs/how-to/deployment.md: | 5672 … | of what | where it listens |
LISTENS = re.compile(r"^\| (\d+)[^|]*\| [^|]*\| ([^|]*?) \|$", re.MULTILINE)


class Site:
    """Two machines, the broker and store that they share, and the folder from which they are deployed to."""

    def __init__(self, folder: Path, broker_url: str, store_url: str, stack: ExitStack) -> None:
        self.folder = folder
        self.ssh_config = folder / "ssh_config"
        self.variables = environment(folder) | {"KVASIR_BROKER_URL": broker_url, "KVASIR_STORE_URL": store_url}
        self.cluster_state = RedisClusterState(store_url)
        stack.callback(self.cluster_state.close)
        self.epmd = free_port()
        self.machines = []
        for name in ("one", "two"):
            home = folder / name
            home.mkdir()
            # An epmd of its own: one that runs already, of whatever Erlang, would be taken as it is.
            variables = {"ERL_EPMD_PORT": str(self.epmd)}
            self.machines.append(stack.enter_context(Sshd(name, home, self.ssh_config, variables)))
        self.config = folder / "kvasir.toml"
        self.config.write_text(self._config(broker_url, store_url), "utf-8")

    def _config(self, broker_url: str, store_url: str) -> str:
        prefill, decode = (
            f'{{ role = "{role}", model = "{MODEL}", engine = "simulated" }}' for role in ("prefill", "decode")
        )
        return (
            f'[services]\nbroker = "{broker_url}"\nstore = "{store_url}"\n'
            f'[models."{MODEL}"]\ncontext = 4096\nweights.simulated = "{WEIGHTS}"\n'
            + MACHINE.format(name="one", port=free_port(), roles=f"{prefill}, {decode}")
            + MACHINE.format(name="two", port=free_port(), roles=decode)
        )

    def deploy(self, *arguments: str, config: Path | None = None) -> CompletedCommand:
        options = ("--ssh-config", str(self.ssh_config))
        command = ("--config", str(config or self.config), "deploy", *arguments, *options)
        return run(*command, env=self.variables | {"PATH": os.environ["PATH"]}, cwd=self.folder, timeout_s=600)

    def kvasir(self, *arguments: str, config: Path | None = None) -> CompletedCommand:
        return run("--config", str(config or self.config), *arguments, env=self.variables, cwd=self.folder)

    def pids(self) -> set[int]:
        return {registration.pid for registration in self.cluster_state.registrations() if registration.model == MODEL}


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory, broker_url: str, store_url: str) -> Iterator[Site]:
    with ExitStack() as stack:
        made = Site(tmp_path_factory.mktemp("site"), broker_url, store_url, stack)
        stack.callback(made.deploy, "stop")
        yield made


def test_two_machines_are_installed_used_upgraded_under_load_and_stopped(site: Site) -> None:
    # When both are installed from a wheelhouse
    done = site.deploy("install")
    # Then their workers are ready, doctor finds no error, and a job goes through
    assert done.code == 0, done.stderr
    assert "hands its KV cache over" in done.stdout
    first = site.pids()
    assert len(first) == 3
    assert site.kvasir("ask", "Are you there?", "--model", MODEL).code == 0

    # When they are upgraded while a batch runs
    prompts = site.folder / "questions"
    asking = [_ask(site, number, prompts) for number in range(8)]
    done = site.deploy("upgrade")
    # Then every worker is a new process, and every question has its answer
    assert done.code == 0, done.stderr
    assert [process.wait(120) for process in asking] == [0] * len(asking)
    wait_until(lambda: len(site.pids() - first) == 3, "the new workers have registrations", 30)

    # When they are stopped, then status says so and no registration is left
    assert _states(site.deploy("status")) == ["ready"] * 3
    assert site.deploy("stop").code == 0
    assert _states(site.deploy("status")) == ["not ready"] * 3
    wait_until(lambda: not site.pids(), "no worker's registration is left", 30)
    assert site.deploy("start", "--machine", "two").code == 0
    assert _states(site.deploy("status")) == ["not ready", "not ready", "ready"]


def test_one_model_file_is_put_on_both_machines_and_the_cache_is_then_the_decoders_own(site: Site) -> None:
    # Given weights beside the configuration here, and no machine that has them
    model = "one-file:1b"
    (site.folder / "models").mkdir()
    shutil.copy(DEMO_MODEL, site.folder / "models")
    config = site.folder / "one-file.toml"
    prefill, decode = (
        f'{{ role = "{role}", model = "{model}", engine = "llamacpp" }}' for role in ("prefill", "decode")
    )
    config.write_text(
        site.config.read_text("utf-8").partition("[models")[0]
        + f'[models."{model}"]\ncontext = 2048\nweights.llamacpp = "models/{DEMO_MODEL.name}"\n'
        + MACHINE.format(name="one", port=free_port(), roles=prefill)
        + MACHINE.format(name="two", port=free_port(), roles=decode),
        "utf-8",
    )
    # When they are deployed with them
    deployed = site.deploy("--with-weights", config=config)
    try:
        # Then the same bytes lie on both, and what the two engines compute is equal to the last bit
        assert deployed.code == 0, deployed.stderr
        copies = [machine.home / "kvasir" / "models" / DEMO_MODEL.name for machine in site.machines]
        assert [copy.read_bytes() == DEMO_MODEL.read_bytes() for copy in copies] == [True, True]
        sketches = [each.sketch for each in site.cluster_state.registrations() if each.model == model]
        assert len(sketches) == 2
        assert len({*sketches}) == 1
        assert sketches[0]
        long = "Is the next number prime? 7919. " * 40  # a short one is computed sooner than fetched
        asked = site.kvasir("ask", long, "--model", model, "--json", config=config)
        assert asked.json()["decode"]["kv_transfer"] == "verified", asked.json()["decode"]
        # And the next time nothing is copied
        inodes = [copy.stat().st_ino for copy in copies]
        assert site.deploy("--with-weights", config=config).code == 0
        assert [copy.stat().st_ino for copy in copies] == inodes
    finally:
        site.deploy("stop", config=config)


def test_services_and_workers_are_set_up_with_passwords_that_nobody_has_to_think_of(site: Site) -> None:
    # Given the password file of an earlier deployment, with one user for everybody, and none for the store
    programs.require("rabbitmq"), programs.require("redis")
    broker, store = (free_port() % 20_000 + 20_000 for _ in range(2))
    there, mine = site.machines[0].home / "kvasir" / "secrets", site.folder / f"new-{broker}"
    mine.mkdir()
    there.mkdir(parents=True, exist_ok=True)
    (mine / "broker").write_text("of-last-year\n"), (there / "broker").write_text("of-last-year\n")
    config = site.folder / "services.toml"
    workers = [f'{{ role = "{role}", model = "{MODEL}", engine = "simulated" }}' for role in ("prefill", "decode")]
    gateway = f'{{ role = "gateway", port = {free_port()} }}'
    config.write_text(
        f'[services]\nbroker = "amqp://teacher@{URL_HOST}:{broker}/"\nstore = "redis://teacher@{URL_HOST}:{store}/0"\n'
        f'broker_password_file = "{mine.name}/broker"\nstore_password_file = "{mine.name}/store"\n'
        f'[models."{MODEL}"]\ncontext = 4096\nshort_prompt_tokens = 0\nweights.simulated = "{WEIGHTS}"\n'
        + MACHINE.format(
            name="one",
            port=free_port(),
            roles=", ".join(['{ role = "broker" }, { role = "store", memory_gb = 1 }', *workers, gateway]),
        )
    )
    variables = environment(site.folder) | {"PATH": os.environ["PATH"]}

    def deploy(*arguments: str) -> CompletedCommand:
        command = ("--config", str(config), "deploy", *arguments, "--ssh-config", str(site.ssh_config))
        return run(*command, env=variables, cwd=site.folder, timeout_s=600)

    def kvasir(*arguments: str, role: str = "") -> CompletedCommand:
        return run("--config", str(config), *arguments, env=variables | _as(role, broker, store, mine), cwd=site.folder)

    try:
        # When services and workers are deployed
        done = deploy("install", "--services")
        assert done.code == 0, done.stderr
        assert "declare the exchanges, and the queues of each model, as the operator" in done.stderr
        _assert_listens_as_documented(site.machines[0].home, broker, store, site.epmd)
        done = deploy("install")

        # Then doctor finds no error, what was there is kept, and each password is its owner's alone
        assert done.code == 0, done.stderr + done.stdout
        assert "hands its KV cache over" in done.stdout
        assert (mine / "broker").read_text() == "of-last-year\n"
        assert {file.stat().st_mode & 0o777 for file in mine.iterdir() if file.name != "broker"} == {0o600}
        assert len({file.read_text() for file in mine.iterdir()}) == 2 * len(PERMISSIONS)
        # And the machine has its roles' passwords, not the operator's
        roles = {f"{name}.{role}" for name in ("broker", "store") for role in ("prefill", "decode", "producer")}
        assert {file.name for file in there.iterdir()} == roles
        assert {file.stat().st_mode & 0o777 for file in there.iterdir()} == {0o600}
        # And a job goes from a producer through both workers, while a monitor looks on
        asked = kvasir("ask", "Are you there?", "--model", MODEL, "--json", role="producer")
        assert asked.code == 0, asked.stderr
        assert asked.json()["state"] == "succeeded"
        assert kvasir("status", role="monitor").code == 0
        assert kvasir("dead", "list", role="monitor").code == 2
        # And through the gateway, once somebody has a key
        port = int(gateway.split()[-2])
        assert _chat(port, "nobody").status_code == 401
        state = site.machines[0].home / "kvasir" / f"gateway-{port}"
        made = kvasir("keys", "add", "ada", "--state", str(state))
        key = re.findall(r"kv-\S{43}", made.stdout)[0]
        wait_until(lambda: _chat(port, key).status_code == 200, "the gateway knows the key")
        assert _chat(port, key).json()["choices"][0]["message"]["content"]
        # And no password is in a log or a unit's file
        passwords = [file.read_text().strip() for file in mine.iterdir()]
        said = [file.read_text("utf-8") for name in ("log", "env") for file in (there.parent / name).rglob("*.*")]
        assert said
        assert not [text for text in said if any(password in text for password in passwords)]
        # And whoever has another password does not get in
        (mine / "broker").write_text("something else")
        refused = kvasir("status")
        assert (refused.code, "user name or password refused" in refused.stderr) == (2, True)
    finally:
        stopped = [deploy("stop"), deploy("stop", "--services")]
        for pid in sockets.processes_of(site.machines[0].home / "kvasir" / "services"):
            os.kill(pid, signal.SIGTERM)  # epmd outlives its last node
    assert [done.code for done in stopped] == [0, 0], [done.stderr for done in stopped]


def _assert_listens_as_documented(home: Path, broker: int, store: int, epmd: int) -> None:
    """By the kernel's own table, of all processes that the services started."""
    if not sys.platform.startswith("linux"):
        return
    found = sockets.listening(sockets.processes_of(home / "kvasir" / "services"))
    allowed = {"127.0.0.1", "::1", URL_HOST}
    assert sorted(one for one in found if one[0] not in allowed) == []
    # And each port is in the page's table, with its addresses; the usual ones stand there for those of this test
    ports = {AMQP: broker, REDIS: store, EPMD: epmd}
    documented = {
        ports.get(int(port), int(port) - AMQP + broker): "URL's host" in where
        for port, where in LISTENS.findall((ROOT / "docs/how-to/deployment.md").read_text("utf-8"))
    }
    assert {port: (URL_HOST, port) in found for _host, port in found} == documented


def test_the_tests_own_services_listen_on_loopback_alone() -> None:
    if not sys.platform.startswith("linux"):
        pytest.skip("only Linux tells who listens where, in /proc")
    with RabbitMQServer(plugins=["rabbitmq_prometheus"]) as broker, RedisServer() as store:
        found = sockets.listening(sockets.processes_of(broker.folder) | {store.pid})
    assert {broker.port, broker.metrics_port, store.port} <= {port for _host, port in found}
    assert [one for one in found if one[0] not in ("127.0.0.1", "::1")] == []


def _chat(port: int, key: str) -> httpx.Response:
    body = {"model": MODEL, "messages": [{"role": "user", "content": "Are you there?"}]}
    url = f"http://127.0.0.1:{port}/v1/chat/completions"
    return httpx.post(url, json=body, headers={"Authorization": f"Bearer {key}"}, timeout=60)


def _as(role: str, broker: int, store: int, passwords: Path) -> dict[str, str]:
    """Variables that log a command in as a role's user; none for the operator."""
    if not role:
        return {}
    return {
        "KVASIR_BROKER_URL": f"amqp://kvasir-{role}@127.0.0.1:{broker}/",
        "KVASIR_BROKER_PASSWORD_FILE": str(passwords / f"broker.{role}"),
        "KVASIR_STORE_URL": f"redis://kvasir-{role}@127.0.0.1:{store}/0",
        "KVASIR_STORE_PASSWORD_FILE": str(passwords / f"store.{role}"),
    }


def _ask(site: Site, number: int, folder: Path) -> subprocess.Popen[bytes]:
    folder.mkdir(exist_ok=True)
    command = [sys.executable, "-m", "kvasir", "--config", str(site.config), "ask", f"Question {number}"]
    with (folder / str(number)).open("wb") as log:
        return subprocess.Popen([*command, "--model", MODEL], env=site.variables, stdout=log, stderr=log)


def _states(done: CompletedCommand) -> list[str]:
    assert done.code == 0, done.stderr
    return [line.split(" ", 1)[1] for line in done.stdout.splitlines()]


def test_an_unreachable_machine_is_one_sentence(site: Site) -> None:
    with site.ssh_config.open("a", encoding="utf-8") as config:
        config.write(f"Host away\n  HostName 127.0.0.1\n  Port {free_port()}\n")
    site.config.write_text(site.config.read_text("utf-8").replace('host = "two"', 'host = "away"'), "utf-8")
    done = site.deploy("status", "--machine", "two")
    site.config.write_text(site.config.read_text("utf-8").replace('host = "away"', 'host = "two"'), "utf-8")
    assert done.code == 2
    assert done.stderr.splitlines()[-1].startswith("kvasir: two: ")


def test_systemd_accepts_the_units_of_the_example(tmp_path: Path) -> None:
    verify = programs.require("systemd")
    for machine in load_settings(config=EXAMPLE, environ={}).machines.values():
        for unit in units_of(machine):
            path, text = unit_file("systemd", unit, Place("/home/kvasir", "root", str(tmp_path)))
            # systemd-analyze looks for what it would start
            command = tmp_path / "current" / "bin" / "kvasir"
            command.parent.mkdir(parents=True, exist_ok=True)
            command.touch(mode=0o755)
            file = tmp_path / Path(path).name
            file.write_text(text, "utf-8")
            done = subprocess.run([verify, "verify", str(file)], capture_output=True, text=True)
            assert (done.returncode, done.stderr) == (0, "")
