"""Private RabbitMQ and Redis processes: a folder, a loopback port and a password of their own.

    with RabbitMQServer() as broker:
        connect(broker.url)
        broker.kill()      # SIGKILL; the folder and the port stay
        broker.start()     # the same broker again, with what it had on disk

They run as the current user, whoever that is, and end with this process, however it ends.
"""

import itertools
import os
import random
import secrets
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import redis
from redis.crc import key_slot

from tests.support import programs
from tests.support.waiting import wait_until

HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Machine:
    """Where a server listens, and what starts a program there."""

    address: str
    prefix: tuple[str, ...] = ()  # before each command


LOOPBACK = Machine(HOST)
_LOOPBACK_ONLY = "-kernel inet_dist_use_interface {127,0,0,1}"
# Waits for a line (all is well) or for the end of its input (the process that started it is gone, even by SIGKILL or
# a crash in native code, where no atexit handler runs): then it ends the server and removes its folder. The count is
# for machines whose init leaves the dead unreaped, where they look alive for ever.
_WATCHDOG = """
read -r _ && exit
kill -9 "$2"
for _ in 1 2 3 4 5 6 7 8 9 10 11 12 13 14 15 16 17 18 19 20; do kill -0 "$2" || break; sleep 0.1; done
rm -rf "$1"
"""


# Several nodes share a laptop; detection of a silent node takes 0.75 to 1.25 times net_ticktime.
_SMALL_NODE = {
    "cluster_partition_handling": "pause_minority",
    "net_ticktime": "8",
    "vm_memory_high_watermark.absolute": "600MB",
    "raft.wal_max_size_bytes": "33554432",
    "cluster_formation.peer_discovery_backend": "rabbit_peer_discovery_classic_config",
}


_SLOTS = 16384
_SMALL_REDIS_NODE = (
    "cluster-enabled yes",
    "cluster-node-timeout 2000",
    "cluster-require-full-coverage no",
    "repl-diskless-sync-delay 0",
)


_TAKEN_PORTS: set[int] = set()  # ports that this process has been given


class ServerFailed(RuntimeError):
    """A server did not start, or did not end; the message has the last lines of its log."""


def free_port(below: int = 32000) -> int:
    """A loopback port nobody listens on, below the range that outgoing connections take theirs from.

    So a server that was killed finds it free again. None is given twice: several are asked for before one is bound.
    """
    for port in random.SystemRandom().sample(range(20000, below), 200):
        if port in _TAKEN_PORTS:
            continue
        with socket.socket() as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind((HOST, port))
            except OSError:
                continue
        _TAKEN_PORTS.add(port)
        return port
    raise ServerFailed(f"no free port between 20000 and {below} in 200 tries")


def amqp_answers(port: int, host: str = HOST) -> bool:
    """Whether AMQP is spoken on this port. RabbitMQ opens it last of all, after recovery."""
    try:
        with socket.create_connection((host, port), timeout=5) as connection:
            connection.sendall(b"AMQP\x00\x00\x09\x01")
            return connection.recv(1) == b"\x01"  # the first byte of Connection.Start
    except OSError:
        return False


def redis_answers(url: str) -> bool:
    """Whether the Redis at this URL lets us in and is ready."""
    client = redis.Redis.from_url(url, socket_timeout=1, socket_connect_timeout=1, retry=None)
    try:
        return bool(client.ping())
    except redis.RedisError:
        return False
    finally:
        client.close()


def plain_values(client: Any) -> Iterator[bytes]:
    """Every key with all that it holds, as it was written: DUMP compresses what is longer than 20 bytes (`rdb.c`)."""
    reads: dict[bytes, Callable[[bytes], Iterable[bytes]]] = {
        b"string": lambda key: [client.get(key)],
        b"hash": lambda key: itertools.chain.from_iterable(client.hgetall(key).items()),
        b"set": client.smembers,
        b"zset": lambda key: client.zrange(key, 0, -1),
        b"list": lambda key: client.lrange(key, 0, -1),
    }
    for key in list(client.scan_iter(count=1000)):
        if kind := reads.get(client.type(key)):  # it may have expired
            yield b" ".join([key, *(value or b"" for value in kind(key))])


class Process:
    """A child process that this one outlives, or takes along."""

    def __init__(self, command: Sequence[str], environment: Mapping[str, str], folder: Path, log: Path) -> None:
        with log.open("ab") as output:
            self._child = subprocess.Popen(
                command,
                env=environment,
                cwd=folder,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,  # Ctrl-C in the terminal is ours to handle
            )
        self._watchdog = subprocess.Popen(
            ["/bin/sh", "-c", _WATCHDOG, "sh", str(folder), str(self.pid)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )

    @property
    def pid(self) -> int:
        """The process's id."""
        return self._child.pid

    @property
    def alive(self) -> bool:
        """Whether it still runs."""
        return self._child.poll() is None

    @property
    def exit_code(self) -> int | None:
        """As subprocess gives it (-9: killed), or None while it runs."""
        return self._child.poll()

    def end(self, number: signal.Signals, timeout_s: float) -> None:
        """Send a signal and wait; after `timeout_s` kill. On return the process is gone."""
        if self.alive:
            self._child.send_signal(number)
            try:
                self._child.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self._child.kill()
                self._child.wait()
        if self._watchdog.poll() is None:
            self._watchdog.communicate(b"all is well\n")


class Server(ABC):
    """One server program on a fixed port. Start, stop and kill it as often as wanted; close it once."""

    start_timeout_s = 90.0

    def __init__(self, name: str, port: int | None = None, machine: Machine = LOOPBACK) -> None:
        """Nothing runs yet; `port` None takes a free one and keeps it through restarts."""
        self.name = name
        self.machine = machine
        self.port = port or free_port()
        self.password = secrets.token_hex(8)
        self.folder = Path(tempfile.mkdtemp(prefix=f"kvasir-{name}-"))
        self.log = self.folder / "server.log"
        self._process: Process | None = None

    @property
    @abstractmethod
    def url(self) -> str:
        """Where clients connect, password included."""

    @abstractmethod
    def _command(self) -> list[str]:
        """What to run."""

    @abstractmethod
    def _answers(self) -> bool:
        """Whether it serves clients now."""

    def _environment(self) -> dict[str, str]:
        return dict(os.environ)

    @property
    def pid(self) -> int:
        """The server's process id; raises ServerFailed if it isn't running."""
        if self._process is None or not self._process.alive:
            raise ServerFailed(f"{self.name} is not running")
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process is not None and self._process.alive

    def start(self) -> None:
        """Start it and wait until it serves clients. Raises ServerFailed, ProgramMissing."""
        if self.alive:
            raise ServerFailed(f"{self.name} runs already, as process {self.pid}")
        command = [*self.machine.prefix, *self._command()]
        self._process = Process(command, self._environment(), self.folder, self.log)
        deadline = time.monotonic() + self.start_timeout_s
        while not self._answers():
            if not self.alive or time.monotonic() > deadline:
                problem = "did not answer in time" if self.alive else "ended while starting"
                self.kill()
                raise ServerFailed(f"{self.name} {problem}. The end of its log:\n{self._tail()}")
            time.sleep(0.05)

    def stop(self, timeout_s: float = 30.0) -> None:
        """End it in good order; what it had on disk stays. Idempotent."""
        if self._process is not None:
            self._process.end(signal.SIGTERM, timeout_s)

    def kill(self) -> None:
        """End it with SIGKILL, as a power cut would; what it had on disk stays. Idempotent."""
        if self._process is not None:
            self._process.end(signal.SIGKILL, 10.0)

    def restart(self) -> None:
        """Stop in good order, start again on the same port."""
        self.stop()
        self.start()

    def close(self) -> None:
        """Kill it and remove its folder. Idempotent."""
        self.kill()
        shutil.rmtree(self.folder, ignore_errors=True)

    def __enter__(self) -> Self:
        try:
            self.start()
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def _tail(self) -> str:
        lines = self.log.read_text(errors="replace").splitlines() if self.log.exists() else []
        return "\n".join(lines[-25:])


class RedisServer(Server):
    """Redis without persistence: what is killed is empty when it starts again."""

    def __init__(
        self,
        port: int | None = None,
        max_memory: str = "0",
        options: Sequence[str] = (),
        password: str = "",
        machine: Machine = LOOPBACK,
    ) -> None:
        """`max_memory` as Redis writes it ("64mb"; "0": no limit); `options` are more lines of its configuration."""
        super().__init__("redis", port, machine)
        self.password = password or self.password
        lines = [
            f"port {self.port}",
            f"bind {machine.address}",
            f"requirepass {self.password}",
            'save ""',
            "appendonly no",
            f"maxmemory {max_memory}",
            "maxmemory-policy noeviction",
            *options,
        ]
        (self.folder / "redis.conf").write_text("\n".join(lines) + "\n")

    @property
    def url(self) -> str:
        """As redis-py takes it."""
        return f"redis://:{self.password}@{self.machine.address}:{self.port}/0"

    def _command(self) -> list[str]:
        return [programs.require("redis"), "redis.conf"]

    def _answers(self) -> bool:
        return redis_answers(self.url)


class RedisCluster:
    """Three primaries, or more, on loopback, each with `replicas` replicas: `nodes`, the primaries first.

    A node keeps its slots over a kill, and nothing of what it held.

    with RedisCluster() as cluster:
        connect(cluster.url)         # all addresses
        cluster.nodes[0].kill()
    """

    def __init__(self, primaries: int = 3, replicas: int = 0, max_memory: str = "0") -> None:
        """Nothing runs yet. `max_memory`: of each node."""
        password = secrets.token_hex(8)
        lines = [*_SMALL_REDIS_NODE, f"masterauth {password}"]
        self._buses = [free_port() for _ in range(primaries * (1 + replicas))]
        self.nodes = [
            RedisServer(max_memory=max_memory, options=[f"cluster-port {bus}", *lines], password=password)
            for bus in self._buses
        ]
        self.places = [
            (node.port, bus) for node, bus in zip(self.nodes, self._buses, strict=True)
        ]  # as others see them
        self._primaries = primaries

    @property
    def url(self) -> str:
        """Every address."""
        hosts = ",".join(f"{HOST}:{port}" for port, _ in self.places)
        return f"redis+cluster://:{self.nodes[0].password}@{hosts}"

    def primaries(self) -> list[RedisServer]:
        """The nodes that have slots now, as the first one that answers says."""
        first_alive = next(node for node in self.nodes if node.alive and redis_answers(node.url))
        ports = {int(slots[2][1]) for slots in self.ask(first_alive, "SLOTS")}
        return [node for node, (port, _) in zip(self.nodes, self.places, strict=True) if port in ports]

    def slots(self, node: RedisServer) -> list[int]:
        """The slots that a primary has, those with keys first."""
        with closing(redis.Redis.from_url(node.url)) as client:
            slots_with_keys = {key_slot(key) for key in client.scan_iter(count=1000)}
        place, _ = self.places[self.nodes.index(node)]
        own_slots = [
            slot
            for first, last, (_, port, *_), *_ in self.ask(node, "SLOTS")
            if port == place
            for slot in range(first, last + 1)
        ]
        return sorted(own_slots, key=lambda slot: slot not in slots_with_keys)

    def serves(self, node: RedisServer, key: str) -> bool:
        """Whether a primary has a key's slot."""
        return key_slot(key.encode()) in self.slots(node)

    def ask(self, node: RedisServer, *words: str | int) -> Any:
        """What a node answers to CLUSTER and these words."""
        with closing(redis.Redis.from_url(node.url)) as client:
            client.set_response_callback("CLUSTER SLOTS", lambda reply, **_: reply)
            return client.execute_command(f"CLUSTER {words[0]}", *words[1:])

    def flags(self, node: RedisServer) -> list[str]:
        """What a node thinks of each node: master or slave, and whether it fails."""
        return [peer["flags"] for peer in self.ask(node, "NODES").values()]

    def configure(self, node: RedisServer, name: str, value: str | int) -> None:
        """Change a setting of a running node."""
        with closing(redis.Redis.from_url(node.url)) as client:
            client.config_set(name, value)

    def begin_move(self, slot: int, source: RedisServer, target: RedisServer) -> None:
        """A slot is on its way from now on: each key is where it was, or, once it was moved, at the target."""
        self.ask(target, "SETSLOT", slot, "IMPORTING", self.ask(source, "MYID"))
        self.ask(source, "SETSLOT", slot, "MIGRATING", self.ask(target, "MYID"))

    def move_keys(self, slot: int, source: RedisServer, target: RedisServer, count: int = 1 << 30) -> None:
        """Move so many keys of a slot that is on its way."""
        keys = self.ask(source, "GETKEYSINSLOT", slot, count)
        with closing(redis.Redis.from_url(source.url)) as client:
            for key in keys:
                client.execute_command("MIGRATE", HOST, target.port, key, 0, 5000, "AUTH", target.password)

    def end_move(self, slot: int, target: RedisServer) -> None:
        """All of the slot's keys were moved: it is the target's."""
        name = self.ask(target, "MYID")
        for node in (target, *(node for node in self.primaries() if node is not target)):
            self.ask(node, "SETSLOT", slot, "NODE", name)

    def wait_until_whole(self, timeout_s: float = 60.0) -> None:
        """Return when every node answers and says that all slots are served, by nodes that answer."""

        def whole() -> bool:
            return all(redis_answers(node.url) and self._sees_all(node) for node in self.nodes)

        wait_until(whole, "every node of the Redis Cluster sees all others", timeout_s)

    def _sees_all(self, node: RedisServer) -> bool:
        with closing(redis.Redis.from_url(node.url)) as client:
            info = client.execute_command("CLUSTER INFO")
            is_synchronous = client.info("replication").get("master_link_status", "up") == "up"
        flags = self.flags(node)
        is_serving = info["cluster_state"] == "ok" and info["cluster_slots_ok"] == str(_SLOTS)
        replicas = sum("slave" in flag for flag in flags)
        return (
            is_serving
            and is_synchronous
            and replicas == len(self.nodes) - self._primaries
            and "fail" not in "".join(flags)
        )

    def __enter__(self) -> Self:
        try:
            with ThreadPoolExecutor() as pool:
                list(pool.map(RedisServer.start, self.nodes))
            self._join()
        except BaseException:
            self.close()
            raise
        return self

    def _join(self) -> None:
        with ExitStack() as stack:
            clients = [stack.enter_context(closing(redis.Redis.from_url(node.url))) for node in self.nodes]
            share = _SLOTS // self._primaries
            for number, (client, place) in enumerate(zip(clients, self.places, strict=True)):
                clients[0].execute_command("CLUSTER MEET", HOST, *place)
                if number < self._primaries:
                    last = _SLOTS if number == self._primaries - 1 else (number + 1) * share
                    client.execute_command("CLUSTER ADDSLOTSRANGE", number * share, last - 1)
            names = [client.execute_command("CLUSTER MYID").decode() for client in clients]
            node_counts = [lambda client=client: len(client.execute_command("CLUSTER NODES")) for client in clients]
            wait_until(lambda: all(count() == len(names) for count in node_counts), "every node knows all others", 30)
            for number, client in enumerate(clients[self._primaries :]):
                client.execute_command("CLUSTER REPLICATE", names[number % self._primaries])
        self.wait_until_whole()

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill every node and remove its folder."""
        for node in self.nodes:
            node.close()


class RabbitMQServer(Server):
    """A single RabbitMQ node, with an epmd (Erlang's port registry) of its own; all of it on loopback only."""

    def __init__(
        self,
        port: int | None = None,
        plugins: Sequence[str] = (),
        settings: Mapping[str, str] | None = None,
        first: "RabbitMQServer | None" = None,
        machine: Machine = LOOPBACK,
    ) -> None:
        """`plugins`: to enable, e.g. rabbitmq_prometheus; `settings`: more keys of rabbitmq.conf.

        With `first` it is one more node of that one's cluster, which has the epmd, the cookie and the password.
        """
        # The management API's port, ten thousand above, must be none of those that outgoing connections take.
        wanted_port = free_port(below=22_000) if "rabbitmq_management" in plugins and not port else port
        super().__init__("rabbitmq", wanted_port, machine)
        self.user = "kvasir"
        self.metrics_port = free_port() if "rabbitmq_prometheus" in plugins else 0
        self.node = f"kvasir-{secrets.token_hex(4)}@localhost"
        self._epmd: Process | None = None
        self._epmd_port = first._epmd_port if first else free_port()
        self._cookie = first._cookie if first else secrets.token_hex(10)
        self._has_epmd = first is None
        if first:
            self.password = first.password
        self._write_cookie()
        self._dist_port = free_port()
        self._write_configuration(plugins, settings or {})

    @property
    def url(self) -> str:
        """As pika's URLParameters takes it; the vhost is `/`."""
        return f"amqp://{self.user}:{self.password}@{self.machine.address}:{self.port}/%2F"

    @property
    def metrics_url(self) -> str:
        """Where the rabbitmq_prometheus plugin listens."""
        if not self.metrics_port:
            raise ServerFailed("rabbitmq_prometheus is not enabled: RabbitMQServer(plugins=['rabbitmq_prometheus'])")
        return f"http://{self.machine.address}:{self.metrics_port}"

    def start(self) -> None:
        """Start it and wait until it serves clients: about 5 s. Raises ServerFailed, ProgramMissing."""
        programs.require("rabbitmq")
        if self._epmd is None and self._has_epmd:
            self._start_epmd()
        super().start()

    def empty(self) -> None:
        """Forget all it had on disk, as a new machine of the same name would have. It must not run."""
        shutil.rmtree(self.folder / "data")

    def control(self, *arguments: str, timeout_s: float = 180.0, program: str = "rabbitmqctl") -> str:
        """What `rabbitmqctl` prints when given these arguments. Raises ServerFailed if it fails."""
        program_path = Path(programs.require("rabbitmq")).with_name(program)
        command = [*self.machine.prefix, str(program_path), "-n", self.node, "-q", *arguments]
        completed_process = subprocess.run(
            command,
            env=self._environment(),
            cwd=self.folder,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        if completed_process.returncode:
            raise ServerFailed(
                f"{program} {' '.join(arguments)}: {completed_process.stderr or completed_process.stdout}"
            )
        return completed_process.stdout

    def wait_until_on_disk(self, *queues: str) -> None:
        """Wait until quorum queues just declared would survive `kill`: about 3 s.

        Measured on 3.10.8: the register of queue members (names.dets) is written 3 s late. A queue killed before that
        comes back without its members: every use of it times out after 60 s, and its messages can't be reached.
        """
        queue_names = [name.encode() for name in queues]
        wait_until(lambda: all(name in self._register() for name in queue_names), f"{queues} are on disk", timeout_s=15)

    def _register(self) -> bytes:
        return b"".join(path.read_bytes() for path in self.folder.glob("data/*/quorum/*/names.dets"))

    def close(self) -> None:
        """Kill it and its epmd, remove its folder. Idempotent."""
        self.kill()
        if self._epmd is not None:
            self._epmd.end(signal.SIGTERM, 5.0)
        super().close()

    def _write_configuration(self, plugins: Sequence[str], settings: Mapping[str, str]) -> None:
        lines = {
            "listeners.tcp.1": f"{self.machine.address}:{self.port}",
            "default_user": self.user,
            "default_pass": self.password,
            # Half full disks are normal on laptops and in CI, and a disk alarm blocks every publisher.
            "disk_free_limit.absolute": "50MB",
        }
        if "rabbitmq_management" in plugins:
            lines |= {"management.tcp.ip": HOST, "management.tcp.port": str(self.port + 10_000)}
        if self.metrics_port:
            lines |= {"prometheus.tcp.ip": self.machine.address, "prometheus.tcp.port": str(self.metrics_port)}
        text = "".join(f"{key} = {value}\n" for key, value in {**lines, **settings}.items())
        (self.folder / "rabbitmq.conf").write_text(text)
        (self.folder / "enabled_plugins").write_text(f"[{','.join(plugins)}].\n")
        (self.folder / "environment.conf").touch()  # in place of the system's rabbitmq-env.conf
        (self.folder / "conf.d").mkdir()

    def _write_cookie(self) -> None:
        path = self.folder / ".erlang.cookie"
        path.write_text(self._cookie)
        path.chmod(0o400)

    def _start_epmd(self) -> None:
        epmd = programs.find("epmd")
        if epmd is None:
            raise ServerFailed("epmd, a part of Erlang that RabbitMQ needs, is in no folder of PATH")
        command = [*self.machine.prefix, epmd, "-port", str(self._epmd_port), "-address", HOST]
        self._epmd = Process(command, dict(os.environ), self.folder, self.folder / "epmd.log")

    def _command(self) -> list[str]:
        return [programs.require("rabbitmq")]

    def _environment(self) -> dict[str, str]:
        folder = str(self.folder)
        variables = {k: v for k, v in os.environ.items() if not k.startswith(("RABBITMQ_", "ERL_", "NOTIFY_SOCKET"))}
        return variables | {
            "HOME": folder,  # the Erlang cookie
            "PATH": programs.search_path(),
            "ERL_AFLAGS": _LOOPBACK_ONLY,
            "ERL_EPMD_ADDRESS": HOST,
            "ERL_EPMD_PORT": str(self._epmd_port),
            "ERL_CRASH_DUMP_SECONDS": "0",
            "RABBITMQ_NODENAME": self.node,
            "RABBITMQ_NODE_IP_ADDRESS": self.machine.address,
            "RABBITMQ_NODE_PORT": str(self.port),
            "RABBITMQ_DIST_PORT": str(self._dist_port),
            "RABBITMQ_BASE": folder,
            "RABBITMQ_MNESIA_BASE": f"{folder}/data",
            "RABBITMQ_LOG_BASE": f"{folder}/log",
            "RABBITMQ_LOGS": "-",
            "RABBITMQ_PID_FILE": f"{folder}/pid",
            "RABBITMQ_GENERATED_CONFIG_DIR": f"{folder}/generated",
            "RABBITMQ_PLUGINS_EXPAND_DIR": f"{folder}/plugins",
            "RABBITMQ_ENABLED_PLUGINS_FILE": f"{folder}/enabled_plugins",
            "RABBITMQ_CONF_ENV_FILE": f"{folder}/environment.conf",
            "RABBITMQ_CONFIG_FILE": f"{folder}/rabbitmq.conf",
            "RABBITMQ_CONFIG_FILES": f"{folder}/conf.d",
            "RABBITMQ_ADVANCED_CONFIG_FILE": f"{folder}/advanced.config",
            # Together these make the start script become the server, so that our child's pid is the broker's.
            "RABBITMQ_ALLOW_INPUT": "1",
            "RABBITMQ_SERVER_START_ARGS": "-noinput",
        }

    def _answers(self) -> bool:
        return amqp_answers(self.port, self.machine.address)


class RabbitMQCluster:
    """Three nodes, or more, of one RabbitMQ cluster on loopback, each with a folder and a port of its own.

    with RabbitMQCluster() as cluster:
        connect(cluster.url)         # all addresses
        cluster.nodes[0].kill()
    """

    def __init__(self, nodes: int = 3, settings: Mapping[str, str] | None = None, plugins: Sequence[str] = ()) -> None:
        """Nothing runs yet. `settings`: more keys of every node's rabbitmq.conf; `plugins` of every node."""
        keys = {**_SMALL_NODE, "cluster_name": f"kvasir-{secrets.token_hex(4)}", **(settings or {})}
        first = RabbitMQServer(plugins=plugins, settings=keys)
        keys |= {"cluster_formation.classic_config.nodes.1": first.node}
        later_nodes = (RabbitMQServer(plugins=plugins, settings=keys, first=first) for _ in range(nodes - 1))
        self.nodes = [first, *later_nodes]

    @property
    def url(self) -> str:
        """Every address, the first node's first."""
        hosts = ",".join(f"{HOST}:{node.port}" for node in self.nodes)
        return self.nodes[0].url.replace(f"{HOST}:{self.nodes[0].port}", hosts)

    def replace(self, node: RabbitMQServer) -> None:
        """What a person does for a node that lost its disk: forget it, let it join, and give it its share again."""
        peer = next(node_alive for node_alive in self.nodes if node_alive is not node and node_alive.alive)
        peer.control("forget_cluster_node", node.node)
        node.empty()
        node.start()  # it finds the others, as its configuration names the first
        peer.control("grow", node.node, "all", program="rabbitmq-queues")

    def restart(self, node: RabbitMQServer) -> None:
        """Restart a node with a majority left everywhere: wait, in the order of docs/how-to/clusters.md."""
        self.wait_for_quorum_plus_one(node)
        node.restart()

    def wait_for_quorum_plus_one(self, node: RabbitMQServer, timeout_s: float = 120.0) -> None:
        """Return when no quorum queue would lose its majority with this node. Raises ServerFailed after a while."""
        seconds = str(int(timeout_s))
        check = ("await_online_quorum_plus_one", "-t", seconds)
        node.control(*check, timeout_s=timeout_s + 30, program="rabbitmq-upgrade")

    def separate(self, node: RabbitMQServer) -> None:
        """Cut a node's links to all others, as a network does: neither side lets the other in, clients reach both.

        In one step, from the node itself: cut one after the other, the links would for a while be a partition that is
        not the same for all, from which RabbitMQ may come back in two halves that only a restart joins. Each side
        expects another cookie: with the same one they would let each other in again within milliseconds.
        """
        node.control(
            "eval",
            f"Others = {self._other_nodes(node)},"
            "[erpc:call(Other, erlang, set_cookie, [node(), 'theirs']) || Other <- Others],"
            "[erlang:set_cookie(Other, 'ours') || Other <- Others],"
            "[erlang:disconnect_node(Other) || Other <- Others].",
        )

    def is_separate(self, node: RabbitMQServer) -> bool:
        """Whether no link of the node leads to another one."""
        reachable_nodes = node.control(
            "eval", f"[Other || Other <- {self._other_nodes(node)}, net_adm:ping(Other) =:= pong]."
        )
        return reachable_nodes.strip() == "[]"

    def rejoin(self, node: RabbitMQServer) -> None:
        """Let it in again; the node comes last, and lets all others in at once."""
        for peer in self.nodes:
            if peer is not node:
                peer.control("eval", f"erlang:set_cookie('{node.node}', erlang:get_cookie()).")
        node.control("eval", f"[erlang:set_cookie(Other, erlang:get_cookie()) || Other <- {self._other_nodes(node)}].")

    def _other_nodes(self, node: RabbitMQServer) -> str:
        """An Erlang list of the other nodes."""
        return "[" + ", ".join(f"'{peer.node}'" for peer in self.nodes if peer is not node) + "]"

    def wait_until_whole(self, timeout_s: float = 60.0) -> None:
        """Return when every node answers and sees all others: one that was frozen is out for a while."""

        def whole() -> bool:
            if not all(amqp_answers(node.port) for node in self.nodes):
                return False
            node_counts = (node.control("eval", "length(rabbit_nodes:all_running()).").strip() for node in self.nodes)
            return all(number == str(len(self.nodes)) for number in node_counts)

        wait_until(whole, "every node sees all others", timeout_s, poll_s=0.5)

    def __enter__(self) -> Self:
        try:
            first, *later_nodes = self.nodes
            first.start()
            with ThreadPoolExecutor() as pool:
                list(pool.map(RabbitMQServer.start, later_nodes))
        except BaseException:
            self.close()
            raise
        return self

    def __exit__(self, *_exception: object) -> None:
        self.close()

    def close(self) -> None:
        """Kill every node and remove its folder; the first one's epmd goes last."""
        for node in reversed(self.nodes):
            node.close()
