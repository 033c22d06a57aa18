"""Five staged incidents: each fires its alert, at most three commands name the host that is to blame, and it clears.

The alerts are those of a Prometheus with the shipped rules, a minute of theirs being a second here.
"""

import json
import shutil
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis

from infra.config.settings import load_settings
from kvasir.connect import connect
from messages.jobs import Sampling, user_prompt
from messages.urls import put_hosts
from tests.support.monitors import Prometheus, RedisExporter
from tests.support.network import HERE, Link, Network, network, reason_against
from tests.support.processes import ModelEntry, command, config_text, environment
from tests.support.servers import Process, RabbitMQServer, RedisServer
from tests.support.waiting import wait_until

pytestmark = [
    pytest.mark.system,  # it needs root, and minutes
    pytest.mark.skipif(bool(reason_against()), reason=reason_against() or "it can run"),
    pytest.mark.skipif(not shutil.which("unshare"), reason="hosts with names of their own need unshare"),
]

MODEL = "m:1b"
PAGES = {"decode": 9101, "prefill": 9102}  # each host has ports of its own
MISSING_OR_PAUSED = {"KvasirWorkerMissing", "KvasirWorkerPaused"}
SIMULATED = "sim:scale=1,decode=100,prefill=50000,answer=300,spread=1"
EXPECTED = f"""
[machines.{{0}}]
host = "{{0}}"
roles = [{{{{ role = "decode", model = "{MODEL}", engine = "simulated" }}}}]
"""


class Site:
    """A broker and a store on one machine, workers on two others, and whoever is on call here."""

    def __init__(
        self, net: Network, broker: RabbitMQServer, store: RedisServer, prometheus: Prometheus, folder: Path
    ) -> None:
        self.net, self.broker, self.store, self.prometheus, self.folder = net, broker, store, prometheus, folder
        self._pages: set[str] = set()
        self.urls = {"KVASIR_BROKER_URL": broker.url, "KVASIR_STORE_URL": store.url}
        self.config = folder / "kvasir.toml"
        self.config.write_text(
            config_text({MODEL: ModelEntry("simulated", SIMULATED, slots=2)})
            + "".join(EXPECTED.format(host) for host in ("mac1", "mac2"))
        )

    def on(self, host: str, *words: str) -> list[str]:
        """A command on a host that calls itself so."""
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$0"; exec "$@"', host, *command(*words)]
        return self.net.command(host, named)

    @contextmanager
    def worker(self, host: str, *words: str, role: str = "decode", **variables: str) -> Iterator[Process]:
        """A worker on a host, until the end of the block; it may not be up yet."""
        folder = self.folder / f"{host}-{role}-{time.monotonic_ns()}"
        folder.mkdir()
        address, port = self.net.address(host), PAGES[role]
        page = ("--metrics-host", address, "--metrics-port", str(port))
        self._pages.add(f"{address}:{port}")
        self.prometheus.watch([], sorted(self._pages))
        arguments = ["--config", str(self.config), f"{role}-worker", "--model", MODEL, *page, *words]
        env = environment(folder) | self.urls | variables
        process = Process(self.on(host, *arguments), env, folder, folder / "log")
        try:
            yield process
        finally:
            process.end(9, 10)

    def run(self, *words: str, host: str = HERE, **variables: str) -> str:
        """What a command says, on one line."""
        arguments = ["--config", str(self.config), *words]
        done = subprocess.run(
            command(*arguments) if host == HERE else self.on(host, *arguments),
            env=environment(self.folder) | self.urls | {"COLUMNS": "200"} | variables,
            cwd=self.folder, capture_output=True, text=True, timeout=60, check=False,
        )  # fmt: skip
        return " ".join(done.stdout.split())

    def state(self) -> dict[str, Any]:
        """What status knows."""
        state: dict[str, Any] = json.loads(self.run("status", "--json"))
        return state

    def error(self) -> tuple[str, str]:
        """The cause of what doctor calls an error, and its sentence."""
        errors = [
            each for each in json.loads(self.run("doctor", "--json")) if each["level"] == "error" and each["cause"]
        ]
        return errors[0]["cause"], errors[0]["what"]

    def wait_for_alert(self, names: set[str], host: str = "", within_s: float = 60) -> None:
        """Return once one of these alerts fires, for a host if one is given."""
        wait_until(lambda: self._firing(names, host), f"one of {sorted(names)} fires", within_s, 1)

    def wait_for_quiet(self, names: set[str], host: str = "", within_s: float = 90) -> None:
        """Return once none of them fires."""
        wait_until(lambda: not self._firing(names, host), f"none of {sorted(names)} fires", within_s, 1)

    def _firing(self, names: set[str], host: str) -> bool:
        firing = self.prometheus.firing()
        return any(not host or labels["host"] == host for name in names for labels in firing.get(name, ()))

    def wait_until_scraped(self, host: str) -> None:
        """Return once Prometheus knows the decode worker of this host."""
        known = f'count(kvasir_worker_info{{stage="decode", host="{host}"}})'
        wait_until(lambda: self.prometheus.value(known), f"{host} is scraped", 60, 1)

    def submit(self, count: int, tokens: int = 300) -> None:
        """Jobs with answers of so many tokens, which nobody waits for."""
        with connect(load_settings(config=self.config, environ=self.urls), name="test") as client:
            batch = f"b{time.monotonic_ns()}"
            client.broker.open_reply_queue(batch)
            client.submit(
                client.new_job(batch, f"i{number}", MODEL, user_prompt("", f"{number} " * 800), Sampling(tokens))
                for number in range(count)
            )

    def workers(self) -> list[str]:
        """The hosts of the decode workers that are registered."""
        return sorted(each["worker_id"].split(".")[0] for each in self.state()["workers"] if each["role"] == "decode")


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Site]:
    with ExitStack() as stack:
        net = stack.enter_context(network([HERE, "services", "mac1", "mac2"]))
        machine = net.machine("services")
        broker = stack.enter_context(RabbitMQServer(plugins=["rabbitmq_prometheus"], machine=machine))
        store = stack.enter_context(RedisServer(max_memory="256mb", machine=machine))
        exporter = stack.enter_context(RedisExporter(store.url))
        prometheus = Prometheus({"rabbitmq": [broker.metrics_url], "redis": [exporter.url]})
        site = Site(net, broker, store, stack.enter_context(prometheus), tmp_path)
        stack.enter_context(site.worker("mac1"))
        stack.enter_context(site.worker("mac1", role="prefill"))
        wait_until(lambda: "mac1" in site.workers(), "mac1 is up", 60, 1)
        yield site


def told(what: Callable[[], str], words: str, within_s: float) -> str:
    """What a command says, once it says that."""
    return wait_until(lambda: (text := what()) and words in text and text, f"it is told of: {words}", within_s, 1)


@pytest.mark.parametrize("jobs", [60, 0])
def test_a_link_that_loses_large_packets(site: Site, jobs: int) -> None:
    with site.worker("mac2"):
        wait_until(lambda: site.workers() == ["mac1", "mac2"], "both are up", 60, 1)
        site.wait_until_scraped("mac2")
        site.submit(jobs)
        page = f"{site.net.address('mac2')}:{PAGES['decode']}"
        busy = f'kvasir_slots_busy{{instance="{page}"}}'
        wait_until(lambda: bool(site.prometheus.value(busy)) == bool(jobs), "mac2 works, or is idle", 30, 0.5)
        site.net.set_link(Link(mtu=1000), "mac2", "services")
        site.wait_for_alert(MISSING_OR_PAUSED, "mac2", 180)
        # 1: status names the host
        text = told(lambda: site.run("status"), "mac2", 5)
        wait_until(lambda: any("mac2" in sentence for sentence in _remarks(site.state())), "status names mac2", 90, 1)
        # 2: doctor on that host names the cause
        assert "small packets pass and large ones vanish" in site.run("doctor", host="mac2"), text
        # And when the link is fixed the worker is back by itself
        site.net.set_link(Link(), "mac2", "services")
        wait_until(lambda: not _remarks(site.state()), "all is well again", 120, 1)
        site.wait_for_quiet(MISSING_OR_PAUSED, "mac2")


def test_a_host_without_a_name_server(site: Site) -> None:
    resolver = site.folder / "resolv.conf"
    resolver.write_text("nameserver 10.77.0.9\n")
    named = {name: put_hosts(url, "services.kvasir.test:" + url.rpartition(":")[2].partition("/")[0])
             for name, url in site.urls.items()}  # fmt: skip
    # Given a worker that ends in good order, as at a restart of its host
    with site.worker("mac2") as before:
        wait_until(lambda: site.workers() == ["mac1", "mac2"], "both are up", 60, 1)
        site.wait_until_scraped("mac2")
        before.end(signal.SIGTERM, 30)
    original = site.on
    site.on = lambda host, *words: _without_names(original(host, *words), resolver) if host == "mac2" else original(host, *words)  # type: ignore[method-assign]  # fmt: skip  # noqa: E501
    with site.worker("mac2", **named):
        site.wait_for_alert({"KvasirWorkerMissing"}, "mac2")
        # 1: status names the host that should be there
        assert "mac2 has no decode worker of m:1b, which kvasir.toml expects there." in site.run("status")
        # 2: doctor on that host names the cause
        assert "no name server answers" in site.run("doctor", host="mac2", **named)
    site.on = original  # type: ignore[method-assign]
    with site.worker("mac2"):
        site.wait_until_scraped("mac2")
        site.wait_for_quiet({"KvasirWorkerMissing"}, "mac2", within_s=30)


def test_a_store_that_is_full(site: Site) -> None:
    with closing(redis.Redis.from_url(site.store.url)) as client:
        client.config_set("maxmemory", "1mb")
        client.config_set("maxmemory", "100kb")
        site.wait_for_alert({"KvasirStorePressure"})
        # 1: status says how full it is; 2: doctor that it is the store, and where it is
        assert "Store: " in site.run("status")
        cause, text = site.error()
        assert (cause, f"{site.net.address('services')}:{site.store.port}" in text) == ("store_full", True)
        client.config_set("maxmemory", "256mb")
    site.wait_for_quiet({"KvasirStorePressure"})


def test_a_worker_that_grinds(site: Site) -> None:
    site.submit(900, tokens=30)
    answers = "sum(kvasir_tpot_seconds_count)"
    wait_until(lambda: (site.prometheus.value(answers) or 0) > 200, "a token's usual time is known", 120, 1)
    slower = SIMULATED.replace("decode=100", "decode=12")
    with site.worker("mac2", "--slots", "6", "--engine", "simulated", "--weights", slower):
        site.wait_for_alert({"KvasirDecodeSlower"}, within_s=120)
        # 1: status has each worker's rate
        rates = wait_until(lambda: _rates(site.state()), "both have answered", 120, 1)
    assert rates["mac2"] < rates["mac1"] / 3
    # Without it the rest is done as quickly as ever
    site.wait_for_quiet({"KvasirDecodeSlower"})


def test_a_broker_behind_its_alarm(site: Site) -> None:
    site.submit(12)
    site.broker.control("set_vm_memory_high_watermark", "0.0001")
    try:
        site.wait_for_alert({"KvasirWorkerPaused"}, "mac1", 90)  # of every host at once
        # 1: status says what they wait for
        text = told(lambda: site.run("status"), "paused itself", 90)
        assert "the broker is connected, and has not confirmed its results" in text
        # 2: doctor names the broker, and why
        cause, text = site.error()
        assert (cause, f"{site.net.address('services')}:{site.broker.port}" in text) == ("memory_alarm", True)
    finally:
        site.broker.control("set_vm_memory_high_watermark", "0.6")
    wait_until(lambda: not any(each["paused_because"] for each in site.state()["workers"]), "they go on", 60, 1)
    site.wait_for_quiet({"KvasirWorkerPaused"})


def _without_names(words: list[str], resolver: Path) -> list[str]:
    return ["unshare", "--mount", "sh", "-c", f'mount --bind {resolver} /etc/resolv.conf && exec "$@"', "sh", *words]


def _remarks(state: dict[str, Any]) -> list[str]:
    return [
        *(sentence for sentence in state["missing"] if "mac2" in sentence),
        *(each["worker_id"] for each in state["workers"] if each["paused_because"]),
    ]


def _rates(state: dict[str, Any]) -> dict[str, float]:
    rates = {
        each["worker_id"].split(".")[0]: each["tokens_per_s"]
        for each in state["workers"]
        if each["role"] == "decode" and each["tokens_per_s"]
    }
    return rates if len(rates) == 2 else {}
