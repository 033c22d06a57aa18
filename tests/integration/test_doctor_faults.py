"""`kvasir doctor` over a network that is broken on purpose: it names each fault's cause, and is done in ten seconds."""

import contextlib
import json
import os
import shutil
import socket
import ssl
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
import redis

from infra.broker import topology
from infra.broker.base import Message
from infra.broker.rabbitmq import RabbitMQBroker
from messages.urls import put_hosts
from tests.support import programs
from tests.support.certificates import make_certificates
from tests.support.name_server import NameServer, asking
from tests.support.network import GIGABIT, HERE, Link, Network, network, reason_against
from tests.support.processes import SIMULATED_MODEL, command, config_text, environment
from tests.support.servers import HOST, RabbitMQServer, RedisServer, free_port
from tests.support.waiting import wait_until

pytestmark = [
    pytest.mark.system,  # it needs root, and minutes
    pytest.mark.skipif(bool(reason_against()), reason=reason_against() or "it can run"),
]

WITHIN_S = 10.0
NAME = "services.kvasir.test"
NOBODY = "10.77.0.9"  # in the network, and nobody's: what is sent there vanishes


class Bench:
    """A broker and a store on another machine, and doctor on this one."""

    def __init__(self, net: Network, broker: RabbitMQServer, store: RedisServer, folder: Path) -> None:
        self.net, self.broker, self.store, self.folder = net, broker, store, folder
        self.address = net.address("services")

    def examine(self, broker: str = "", store: str = "", prefix: tuple[str, ...] = (), **variables: str) -> set[str]:
        """The causes that doctor names, in time; `prefix` comes before its command."""
        (self.folder / "kvasir.toml").write_text(config_text({"m": SIMULATED_MODEL}), "utf-8")
        urls = {"KVASIR_BROKER_URL": broker or self.broker.url, "KVASIR_STORE_URL": store or self.store.url}
        start = time.monotonic()
        done = subprocess.run(
            [*prefix, *command("doctor", "--json")],
            env=environment(self.folder) | urls | variables,
            cwd=self.folder,
            capture_output=True,
            text=True,
            timeout=60,
        )
        took_s = time.monotonic() - start
        assert took_s < WITHIN_S, (took_s, done.stdout)
        assert self.broker.password not in done.stdout + done.stderr
        return {finding["cause"] for finding in json.loads(done.stdout)} - {""}

    def named(self, url: str) -> str:
        """The URL with a name in place of the address."""
        return put_hosts(url, url.rpartition("@")[2].partition("/")[0].replace(self.address, NAME))


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    with ExitStack() as stack:
        net = stack.enter_context(network([HERE, "services"]))
        machine = net.machine("services")
        broker = stack.enter_context(RabbitMQServer(machine=machine))
        store = stack.enter_context(RedisServer(max_memory="256mb", machine=machine))
        with closing(RabbitMQBroker(broker.url)) as connection:
            connection.declare(["m"])
        yield Bench(net, broker, store, tmp_path_factory.mktemp("doctor"))


def dns_is_dead(bench: Bench) -> set[str]:
    prefix = asking([NOBODY], bench.folder)
    return bench.examine(bench.named(bench.broker.url), bench.named(bench.store.url), prefix)


def dns_is_slow(bench: Bench) -> set[str]:
    # A dead name server comes first: the resolver waits 5 s for it, each time.
    with NameServer(bench.address) as server:
        prefix = asking([NOBODY, server.address], bench.folder)
        return bench.examine(bench.named(bench.broker.url), bench.named(bench.store.url), prefix)


def host_is_down(bench: Bench) -> set[str]:
    # In a network of this machine's own, where nobody answers the question whose that address is.
    ip, namespace = programs.require("iproute2"), f"kvasir-{os.getpid()}-down"
    try:
        subprocess.run([ip, "netns", "add", namespace], check=True)
        subprocess.run(
            [ip, "link", "add", "kvasir1", "type", "veth", "peer", "kvasir2", "netns", namespace], check=True
        )
        subprocess.run([ip, "netns", "exec", namespace, ip, "link", "set", "kvasir2", "up"], check=True)
        subprocess.run([ip, "address", "add", "10.78.0.1/24", "dev", "kvasir1"], check=True)
        subprocess.run([ip, "link", "set", "kvasir1", "up"], check=True)
        return bench.examine(*(url.replace(bench.address, "10.78.0.2") for url in (bench.broker.url, bench.store.url)))
    finally:
        subprocess.run([ip, "netns", "delete", namespace], check=False)


def port_is_refused(bench: Bench) -> set[str]:
    return bench.examine(broker=bench.broker.url.replace(f":{bench.broker.port}/", ":1/"))


def firewall_drops(bench: Bench) -> set[str]:
    # A listener whose queue is full: the kernel drops what asks for a connection, as a firewall's rule for a port does.
    with ExitStack() as stack:
        listener = stack.enter_context(socket.socket())
        listener.bind((HOST, free_port()))
        listener.listen(0)
        for _ in range(4):
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(listener.getsockname())
        return bench.examine(broker=f"amqp://guest:guest@{HOST}:{listener.getsockname()[1]}/")


def mtu_hole(bench: Bench) -> set[str]:
    bench.net.set_link(Link(mtu=1000))
    return bench.examine()


def mtu_hole_on_the_way_back(bench: Bench) -> set[str]:
    bench.net.set_link(Link(mtu=1000), "services")
    return bench.examine()


def one_way_cut(bench: Bench) -> set[str]:
    with bench.net.cut(Link(), HERE, "services"):
        return bench.examine()


def cut_on_the_way_back(bench: Bench) -> set[str]:
    with bench.net.cut(Link(), "services", HERE):
        return bench.examine()


def tls_is_wrong(bench: Bench) -> set[str]:
    made = make_certificates(bench.folder / "tls")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(made.certificate, made.key)
    with socket.create_server((HOST, 0)) as server:

        def serve() -> None:
            with contextlib.suppress(OSError):
                while True:
                    connection = server.accept()[0]
                    with contextlib.suppress(OSError), context.wrap_socket(connection, server_side=True) as secure:
                        secure.recv(100)

        threading.Thread(target=serve, daemon=True).start()
        url = f"amqps://guest:guest@{HOST}:{server.getsockname()[1]}/"
        try:
            return bench.examine(broker=url, KVASIR_BROKER_CA_FILE=str(made.other_ca))
        finally:
            server.shutdown(socket.SHUT_RDWR)


def password_is_wrong(bench: Bench) -> set[str]:
    return bench.examine(*(s.url.replace(s.password, "other") for s in (bench.broker, bench.store)))


def rights_are_missing(bench: Bench) -> set[str]:
    with contextlib.suppress(Exception):
        bench.broker.control("delete_user", "few")
    bench.broker.control("add_user", "few", "secret")
    bench.broker.control("set_permissions", "few", "^$", "^$", "^$")
    with closing(redis.Redis.from_url(bench.store.url)) as client:
        client.acl_setuser("few", enabled=True, passwords=["+secret"], categories=["+@connection"], commands=["+info"])
    broker, store = (f"few:secret@{bench.address}:{server.port}" for server in (bench.broker, bench.store))
    return bench.examine(f"amqp://{broker}/", f"redis://{store}/0")


def disk_is_full(bench: Bench) -> set[str]:
    bench.broker.control("set_disk_free_limit", str(10**15))
    try:
        return bench.examine()
    finally:
        bench.broker.control("set_disk_free_limit", str(10**6))


def memory_alarm(bench: Bench) -> set[str]:
    bench.broker.control("set_vm_memory_high_watermark", "0.0001")
    try:
        return bench.examine()
    finally:
        bench.broker.control("set_vm_memory_high_watermark", "0.6")


def store_is_full(bench: Bench) -> set[str]:
    with closing(redis.Redis.from_url(bench.store.url)) as client:
        client.config_set("maxmemory", "1mb")
        client.config_set("maxmemory", "100kb")
        try:
            return bench.examine()
        finally:
            client.config_set("maxmemory", "256mb")


def clock_is_off(bench: Bench) -> set[str]:
    return bench.examine(prefix=(programs.require("faketime"), "-f", "+90s"))


FAULTS: Mapping[Callable[[Bench], set[str]], str] = {
    dns_is_dead: "dns",
    dns_is_slow: "dns_slow",
    host_is_down: "host_down",
    port_is_refused: "refused",
    firewall_drops: "firewall",
    mtu_hole: "mtu",
    mtu_hole_on_the_way_back: "mtu",
    one_way_cut: "cut",
    cut_on_the_way_back: "cut",
    tls_is_wrong: "tls",
    password_is_wrong: "login",
    rights_are_missing: "rights",
    disk_is_full: "disk_alarm",
    memory_alarm: "memory_alarm",
    store_is_full: "store_full",
    clock_is_off: "clock",
}


@pytest.mark.parametrize(("inject", "cause"), FAULTS.items(), ids=[inject.__name__ for inject in FAULTS])
def test_the_cause_of_a_fault_is_named_and_no_other(
    bench: Bench, inject: Callable[[Bench], set[str]], cause: str
) -> None:
    if inject in (dns_is_dead, dns_is_slow) and not shutil.which("unshare"):
        pytest.skip("a name server of the test's own needs unshare, of util-linux")
    try:
        assert inject(bench) == {cause}
    finally:
        bench.net.set_link(Link())


def test_twenty_looks_at_healthy_services_under_load_name_no_cause(bench: Bench) -> None:
    # Given a network like a building's, and a broker and a store that others use as hard as they can
    bench.net.set_link(Link(delay_ms=2, rate_bits=GIGABIT))
    is_over = threading.Event()
    counts = {"broker": 0, "store": 0}

    def use_broker() -> None:
        with closing(RabbitMQBroker(bench.broker.url)) as broker:
            queue = broker.open_reply_queue("load")
            while not is_over.is_set():
                broker.publish(topology.reply(queue), Message(os.urandom(500_000)))
                broker.get(queue).ack()
                counts["broker"] += 1
            broker.delete_queue(queue)

    def use_store() -> None:
        with closing(redis.Redis.from_url(bench.store.url)) as client:
            while not is_over.is_set():
                client.set("load", os.urandom(1_000_000), ex=60)
                client.get("load")
                counts["store"] += 1

    threads = [threading.Thread(target=use) for use in (use_broker, use_store)]
    for thread in threads:
        thread.start()
    try:
        wait_until(lambda: min(counts.values()) > 0, "both are in use")
        # When doctor looks twenty times, then it names nothing
        assert [bench.examine() for _ in range(20)] == [set()] * 20
    finally:
        is_over.set()
        for thread in threads:
            thread.join(30)
        bench.net.set_link(Link())
    assert min(counts.values()) >= 20
