"""Tries a service step by step, from its name to a confirm. The step at which it stops, and how, tell the cause."""

import errno
import os
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal
from urllib.parse import urlsplit

from redis.exceptions import ResponseError

from infra.broker import topology
from infra.broker.base import Message
from kvasir.doctor.findings import Finding, Level
from kvstore.redis.client import errors_mapped, is_cluster, node_urls, open_client, place
from messages.errors import BrokerUnavailable, ConfigError, KvasirError

# the steps that are printed
STEPS = ("resolve", "connect", "TLS", "log in", "8 KB", "1 MB", "confirm")
# This is longer than 5 s, because a resolver waits 5 s for a dead name server before it asks the next one.
WITHIN_S = 5.8
# Message sizes in bytes: those that fit a tunnel's packet, those that fit an Ethernet frame, and larger ones.
SIZES = {"500 B": 500, "1,000 B": 1_000, "1,300 B": 1_300, "1,400 B": 1_400, "8 KB": 8_192, "1 MB": 1_000_000}
# This is longer than 3 s, because within 3 s, TCP repeats a lost SYN twice, and the kernel gives up looking for the
# machine's hardware address.
_CONNECT_S = 3.5
# A live machine accepts or refuses a connection at one of these ports, unless a firewall drops everything.
_OTHER_PORTS = (22, 80, 1)
_OTHER_PORT_S = 0.6
# A broker that accepted the login and is then silent for this many seconds counts as stuck. The rest of WITHIN_S is
# needed to delete the test queue.
_SILENT_S = 3.0
_SLOW_NAME_S = 1.0
_FAR_S = 0.15  # a round trip of this length means a distant network; inside a building it takes a hundredth of this
_VALUE_BYTES, _KEY_TTL_S = 4_096, 60

# cause: (level, what was found, what to do)
CAUSES: dict[str, tuple[Level, str, str]] = {
    "": ("ok", "each step works", ""),
    "dns": (
        "error",
        "no name server answers: {host} can't be resolved",
        "resolvectl status (macOS: scutil --dns); until that is fixed, use an address in the URL",
    ),
    "unknown_name": ("error", "no name server knows {host}", "fix the name in the URL, or add it to /etc/hosts"),
    "dns_slow": (
        "error",
        "resolving {host} took {resolve_s:.1f} s, and each new connection waits that long",
        "a name server in the list is probably dead: resolvectl status (macOS: scutil --dns)",
    ),
    "host_down": (
        "error",
        "the network finds no machine at {host}: it is off, or in another network",
        "switch it on, or fix the address; ping {host}",
    ),
    "refused": (
        "error",
        "the machine is there, but nobody listens on port {port}",
        "start the {service} there, or fix the port; on that machine: ss -ltn (macOS: netstat -an)",
    ),
    "firewall": (
        "error",
        "the machine is there, and port {port} stays silent: a firewall drops what goes to it, or its queue is full",
        "open the port in that machine's firewall; see that the {service} is not stopped",
    ),
    "cut": (
        "error",
        "nothing at all comes back from {host}: one direction of the link is cut, or both, or all is dropped",
        "on that machine: tcpdump host THIS_MACHINE shows whether packets arrive; if so the way back is cut",
    ),
    "mtu": (
        "error",
        "small packets pass and large ones vanish: a link on the way has a smaller MTU than its ends",
        "ping -M do -s 1472 {host} (macOS: -D); lower the interface's MTU, or raise it everywhere on the way",
    ),
    "hangs": (
        "error",
        "it accepts the connection, but then says nothing: it hangs, or has no processor or memory left",
        "look at that machine: top, free; restart the {service} if it does not recover",
    ),
    "slow_link": (
        "error",
        "8 KB passed, but 1 MB did not in time: the link is slow, busy, or loses packets",
        "see what else uses the link; ip -s link (macOS: netstat -i) counts errors; iperf3 between both",
    ),
    "latency": (
        "warn",
        "each round trip takes {connect_ms:.0f} ms: a long way, a VPN, or a full queue on the link",
        "traceroute {host} says where; each job makes several round trips",
    ),
    "tls": (
        "error",
        "no secure connection: {problem}",
        "fix the URL's protocol (a final s is TLS) or the ca_file; are both right? ping -M do -s 1472 {host}",
    ),
    "login": ("error", "user or password is wrong", "fix user and password in the URL or its file (kvasir config)"),
    "undeclared": (
        "warn",
        "Kvasir has declared nothing there yet",
        "start a worker, or submit jobs: both declare what is needed",
    ),
    "rights": ("warn", "this user lacks a right: {problem}", "see: python -m infra.deploy.permissions"),
    "memory_alarm": (
        "error",
        "an alarm blocks publishers, because memory is low there: no job is taken, and no result can be sent",
        "on its machine: rabbitmq-diagnostics alarms; free memory, or raise vm_memory_high_watermark",
    ),
    "disk_alarm": (
        "error",
        "an alarm blocks publishers, because its disk is full: no job is taken, and no result can be sent",
        "on its machine: rabbitmq-diagnostics alarms; free disk space there: df -h",
    ),
    "store_full": (
        "error",
        "it is full (Redis reached its maxmemory): nothing more can be stored for now",
        "kvasir status says what is in it; redis-cli CONFIG SET maxmemory",
    ),
    "no_confirm": (
        "error",
        "it takes a message and does not confirm it: its disk is too slow, or it is overloaded",
        "on its machine: rabbitmq-diagnostics status, iostat -x 1",
    ),
    "lost": ("error", "{problem}", "see that it runs, and that its URL is right (kvasir config); its log says more"),
}


# Step -> the cause if the step got no answer at all.
_SILENCE = {
    "resolve": "dns",
    "connect": "cut",
    "TLS": "tls",  # Redis without TLS does not answer a TLS handshake
    "log in": "hangs",
    **dict.fromkeys(SIZES, "mtu"),
    "1 MB": "slow_link",
    "confirm": "no_confirm",
}
# Word -> cause. The words are searched for in this order, in the class name and the text of the error and of its
# `__cause__`. The first word that is found gives the cause.
_ERRORS = {
    f"[Errno {socket.EAI_AGAIN}]": "dns",
    "gaierror": "unknown_name",
    "ConnectionRefusedError": "refused",
    **dict.fromkeys(map(os.strerror, (errno.EHOSTUNREACH, errno.EHOSTDOWN, errno.ENETUNREACH)), "host_down"),
    "certificate": "tls",
    "SSL": "tls",
    "OutOfMemoryError": "store_full",
    "NoPermissionError": "rights",
    "AuthenticationError": "login",
    "password refused": "login",
    "virtual host": "rights",
    "ACCESS_REFUSED": "rights",
    "not allowed to create it": "rights",
    "NoQueue": "undeclared",
}


@dataclass(slots=True)
class ServiceCheck:
    """How far a service could be used."""

    service: Literal["broker", "store"]
    url: str = field(repr=False)  # with its password
    seconds: dict[str, float] = field(default_factory=dict)  # time of each completed step
    stopped_at: str = ""  # the step that was begun and not completed; "" at the end
    failure: Exception | None = None  # None if there was no answer
    broker: Any = None  # the connection, while it is open
    alarm: str = ""  # why the broker accepts no messages, in the broker's words
    is_there: bool = False  # whether the machine answers at another port
    server: str = ""  # the server's own name

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Run a step, and record its time if it completes."""
        self.stopped_at, start = name, time.monotonic()
        yield
        self.seconds[name], self.stopped_at = time.monotonic() - start, ""

    def run(self, ca_file: str) -> None:
        """Run all steps, up to the first that fails. Nothing is raised."""
        try:
            if urlsplit(self.url).scheme != "unix":
                self._reach()
            if self.service == "broker":
                self._try_broker(ca_file)
            else:
                self._try_store()
        except (KvasirError, OSError, UnicodeError) as problem:
            self.failure = problem

    def _reach(self) -> None:
        host, port = host_and_port(self.url)
        with self.step("resolve"):
            family, *_, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        try:
            with self.step("connect"):
                socket.create_connection((host, port), _CONNECT_S).close()
        except TimeoutError:
            self.is_there = any(_answers(family, str(address[0]), other_port) for other_port in _OTHER_PORTS)
            raise
        if urlsplit(self.url).scheme in ("amqps", "rediss"):
            with self.step("TLS"):  # this step only measures time; the login checks the certificate
                ssl.get_server_certificate((host, port), timeout=2 * WITHIN_S)

    def _try_broker(self, ca_file: str) -> None:
        # Imported here, so that pika is not needed without a broker.
        from infra.broker.rabbitmq import RabbitMQBroker

        with self.step("log in"):
            broker = RabbitMQBroker(self.url, "kvasir doctor", 2 * WITHIN_S, _SILENT_S, ca_file)
        self.broker = broker
        with closing(broker):
            self.server = str(broker.server.get("cluster_name", ""))
            name = f"doctor-{secrets.token_hex(8)}"
            queue = topology.reply_queue(name)
            try:
                # The broker is tried with only two message sizes, because each costs round trips and time is short. The
                # store is tried with all sizes.
                for step in ("8 KB", "1 MB"):
                    with self.step(step):
                        broker.open_reply_queue(name)
                        broker.publish(topology.reply(queue), Message(os.urandom(SIZES[step])), _SILENT_S)
                        broker.get(queue)  # the message is not acked, because it is deleted with its queue
                with self.step("confirm"):
                    broker.publish(topology.reply(queue), Message(b"doctor"), _SILENT_S)
            finally:
                # If this fails, there was no queue to delete, or nothing can be done about it.
                with suppress(BrokerUnavailable, ConfigError):
                    broker.delete_queue(queue)

    def _try_store(self) -> None:
        url = node_urls(self.url)[0]
        client: Any = open_client(url, timeout_s=2 * WITHIN_S)
        with closing(client), errors_mapped(place(url)):
            with self.step("log in"):
                client.ping()
            for step, size in SIZES.items():
                with self.step(step):
                    client.echo(os.urandom(size))
            with self.step("confirm"):
                with suppress(ResponseError):  # some logins are not allowed to ask for the server's name
                    nodes = client.execute_command("CLUSTER NODES") if is_cluster(self.url) else {}
                    self.server = min((node["node_id"] for node in nodes.values()), default="")
                    self.server = self.server or str(client.info("server")["run_id"])
                # In a cluster, another node may own this key, so only the measurement of the link tests writing.
                if not is_cluster(self.url):
                    key = f"doctor:{secrets.token_hex(8)}"
                    client.set(key, os.urandom(_VALUE_BYTES), ex=_KEY_TTL_S)
                    client.unlink(key)


def try_service(service: Literal["broker", "store"], url: str, ca_file: str = "") -> Finding:
    """Return what one address of a service did within WITHIN_S.

    Nothing is raised; a thread may stay behind, waiting.
    """
    check = ServiceCheck(service, url)
    thread = threading.Thread(target=check.run, args=(ca_file,), name=f"doctor {service}", daemon=True)
    thread.start()
    thread.join(WITHIN_S)
    alarm = check.broker.alarm if check.broker else ""
    # `check` is copied, because the thread may still change it.
    return diagnose(replace(check, seconds=dict(check.seconds), alarm=alarm))


def diagnose(check: ServiceCheck) -> Finding:
    """Return the finding, with its cause if the service stopped or was slow."""
    host, port = host_and_port(check.url)
    facts = {
        "host": host,
        "port": port,
        "service": check.service,
        "resolve_s": check.seconds.get("resolve", 0.0),
        "connect_ms": 1000 * check.seconds.get("connect", 0.0),
        "problem": check.failure or "no answer in time",
    }
    cause = _cause(check)
    level, sentence, todo = CAUSES[cause]
    return Finding(
        level,
        check.service,
        ": ".join(filter(None, (f"{host}:{port}" if port else host, check.stopped_at, sentence.format_map(facts)))),
        todo.format_map(facts),
        cause=cause,
        steps={name: round(seconds, 4) for name, seconds in check.seconds.items()},
        stopped_at=check.stopped_at,
        server=check.server,
    )


def _cause(check: ServiceCheck) -> str:
    """Return a key of CAUSES, or "" if nothing is wrong."""
    if check.alarm:
        return "disk_alarm" if "disk" in check.alarm else "memory_alarm"
    if check.seconds.get("resolve", 0.0) >= _SLOW_NAME_S:
        return "dns_slow"
    if not check.stopped_at:
        return "latency" if check.seconds.get("connect", 0.0) >= _FAR_S else ""
    if check.failure is None or _is_late(check.failure):
        return "firewall" if check.is_there else _SILENCE[check.stopped_at]
    error, cause = check.failure, check.failure.__cause__
    text = f"{type(error).__name__} {error} {type(cause).__name__} {cause}"
    return next((meaning for word, meaning in _ERRORS.items() if word in text), "lost")


def _is_late(error: Exception) -> bool:
    """Whether the error only means that a wait was too long."""
    return isinstance(error, TimeoutError) or any(word in str(error) for word in ("in time", "no confirm"))


def host_and_port(url: str) -> tuple[str, int]:
    """Return host and port, or a socket's path and 0."""
    parts = urlsplit(url)
    port = parts.port or {"amqp": 5672, "amqps": 5671}.get(parts.scheme, 6379)
    return (parts.path, 0) if parts.scheme == "unix" else (parts.hostname or "localhost", port)


def _answers(family: int, address: str, port: int) -> bool:
    """Whether a machine accepts or refuses a connection at this port."""
    with socket.socket(family, socket.SOCK_STREAM) as probe:
        probe.settimeout(_OTHER_PORT_S)
        return probe.connect_ex((address, port)) in (0, errno.ECONNREFUSED)
