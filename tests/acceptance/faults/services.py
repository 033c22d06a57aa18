"""A broker and a store of the harness's own, each behind a proxy, that rows may kill, fill and cut off."""

from contextlib import ExitStack, closing
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Self

import pika

from infra.broker import topology
from kvstore.redis.client import open_client, product
from tests.acceptance.faults.proxy import TcpProxy
from tests.support.name_server import NameServer, asking
from tests.support.network import GIGABIT, HERE, Link, Network
from tests.support.servers import HOST, LOOPBACK, Machine, RabbitMQCluster, RabbitMQServer, RedisCluster, RedisServer

# Heartbeats and time-outs of minutes would make rows of minutes: both are options that an operator has, too.
HEARTBEAT_S = 4
STORE_TIMEOUT_S = 2


class SeparableRedisCluster(RedisCluster):
    """Nodes that are reached through proxies and reach others from addresses of their own, so that they can be parted.

    Linux only: elsewhere a loopback interface has one address.
    """

    def __init__(self, replicas: int) -> None:
        super().__init__(replicas=replicas)
        self._ways = [(TcpProxy(port), TcpProxy(bus)) for port, bus in self.places]
        self.places = [(way.port, bus.port) for way, bus in self._ways]
        for number, (node, (port, bus)) in enumerate(zip(self.nodes, self.places, strict=True)):
            with (node.folder / "redis.conf").open("a") as config:
                config.write(f"bind-source-addr {_address(number)}\ncluster-announce-ip {HOST}\n")
                config.write(f"cluster-announce-port {port}\ncluster-announce-bus-port {bus}\n")

    @property
    def proxies(self) -> list[TcpProxy]:
        """One for each node, between it and its clients."""
        return [way for way, _ in self._ways]

    def separate(self, node: RedisServer) -> None:
        """Nothing passes between this node and anybody else; nobody is told."""
        number = self.nodes.index(node)
        for other, ways in enumerate(self._ways):
            for way in ways:
                way.silence(None if other == number else {_address(number)})

    def rejoin(self) -> None:
        """Everything passes again."""
        for ways in self._ways:
            for way in ways:
                way.heal()

    def __enter__(self) -> Self:
        for ways in self._ways:
            for way in ways:
                way.__enter__()
        return super().__enter__()

    def close(self) -> None:
        super().close()
        for ways in self._ways:
            for way in ways:
                way.__exit__()


def _address(number: int) -> str:
    return f"127.0.1.{number + 1}"


class Services:
    """Started once, used by row after row. Nodes of clusters are reached by their addresses and not through a proxy."""

    nodes = 1  # of the broker
    replicas: int | None = None  # of each of three primaries of a Redis Cluster; None: one Redis
    host = HOST  # by which programs know the proxies
    prefix: tuple[str, ...] = ()  # comes before each program's command

    def __init__(self, machine: Machine = LOOPBACK) -> None:
        """`machine`: of the broker and the store where there is one of each."""
        self.cluster = RabbitMQCluster(self.nodes) if self.nodes > 1 else None
        self.redis_cluster = None if self.replicas is None else SeparableRedisCluster(self.replicas)
        self.broker = self.cluster.nodes[0] if self.cluster else RabbitMQServer(machine=machine)
        self.store = self.redis_cluster.nodes[0] if self.redis_cluster else RedisServer(machine=machine)
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        try:
            self._stack.enter_context(self.cluster or self.broker)
            self._stack.enter_context(self.redis_cluster or self.store)
            self.to_broker = self._stack.enter_context(TcpProxy(self.broker.port, self.broker.machine.address))
            self.to_store = self._stack.enter_context(TcpProxy(self.store.port, self.store.machine.address))
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_exception: object) -> None:
        self._stack.close()

    @property
    def broker_url(self) -> str:
        """Through the proxy, with heartbeats that suit rows of seconds."""
        address = f"{self.broker.machine.address}:{self.broker.port}"
        through = self.broker.url.replace(address, f"{self.host}:{self.to_broker.port}")
        return f"{self.cluster.url if self.cluster else through}?heartbeat={HEARTBEAT_S}"

    @property
    def store_url(self) -> str:
        """Through the proxy, with time-outs that suit rows of seconds."""
        if self.redis_cluster:
            return self.redis_cluster.url
        address = f"{self.store.machine.address}:{self.store.port}"
        url = self.store.url.replace(address, f"{self.host}:{self.to_store.port}")
        return f"{url}?socket_timeout={STORE_TIMEOUT_S}&socket_connect_timeout={STORE_TIMEOUT_S}"

    @property
    def direct_store_url(self) -> str:
        """Past the proxy."""
        return self.redis_cluster.url if self.redis_cluster else self.store.url

    def fix(self) -> None:
        """Whatever the last row did to them, they serve."""
        self.to_broker.heal()
        self.to_store.heal()
        brokers = self.cluster.nodes if self.cluster else [self.broker]
        stores = self.redis_cluster.nodes if self.redis_cluster else [self.store]
        for server in (*brokers, *stores):
            if not server.alive:
                server.start()
        for cluster in filter(None, (self.cluster, self.redis_cluster)):
            cluster.wait_until_whole()
        with closing(self.redis()) as client:
            client.flushall()

    def redis(self) -> Any:
        """A client past the proxy."""
        return open_client(self.direct_store_url)

    def connect(self) -> pika.BlockingConnection:
        """A connection past the proxy, to the first node that answers."""
        nodes = [node for node in self.cluster.nodes if node.alive] if self.cluster else [self.broker]
        found = [pika.URLParameters(node.url) for node in nodes]
        if self.cluster:
            for parameters in found:
                parameters.socket_timeout = parameters.stack_timeout = STORE_TIMEOUT_S
        return pika.BlockingConnection(found)

    def version(self) -> str:
        """The broker's and the store's, and how many nodes each has."""
        store = self.redis()
        with self.connect() as connection:
            told = connection._impl.server_properties["version"]
        text = told.decode() if isinstance(told, bytes) else told
        try:
            redis = product(store.info("server"))
            nodes = len(self.redis_cluster.nodes) if self.redis_cluster else 1
            return f"RabbitMQ {text}, nodes: {self.nodes}; {redis}, nodes: {nodes}"
        finally:
            store.close()

    def ready(self, queues: list[str]) -> int:
        """Messages ready in these queues; what doesn't exist has none."""
        total = 0
        with self.connect() as connection:
            for queue in queues:
                channel = connection.channel()
                try:
                    total += channel.queue_declare(queue, passive=True).method.message_count
                except pika.exceptions.ChannelClosedByBroker:
                    continue
        return total

    def take_all(self, queue: str) -> list[str]:
        """Empty a queue; the batch of each message that lay there."""
        batches = []
        with self.connect() as connection:
            channel = connection.channel()
            while (got := channel.basic_get(queue, auto_ack=True))[0]:
                batches.append(got[1].correlation_id or "")
        return batches


class BrokerClusterServices(Services):
    """Three brokers in a cluster, and one Redis."""

    nodes = 3


class RedisClusterServices(Services):
    """One broker, and three primaries with a replica each."""

    replicas = 1


class BareRedisClusterServices(Services):
    """One broker, and three primaries without replicas."""

    replicas = 0


class BothClustersServices(Services):
    """Three brokers, and three primaries with a replica each."""

    nodes, replicas = 3, 1


class NetworkServices(Services):
    """One broker and one Redis, on another machine: 20 ms of round trip, 1 Gb/s, a packet in a thousand lost."""

    link = Link(delay_ms=10, rate_bits=GIGABIT, loss=0.001)

    def __init__(self) -> None:
        self.network = Network([HERE, "services"])
        super().__init__(self.network.machine("services"))
        self._stack.callback(self.network.close)
        self.network.set_link(self.link)

    def fix(self) -> None:
        self.network.set_link(self.link)
        super().fix()


class NamedServices(Services):
    """One broker and one Redis, which programs know by a name that a name server of the harness's own resolves."""

    host = "services.kvasir.test"

    def __init__(self) -> None:
        super().__init__()
        self.name_server = self._stack.enter_context(NameServer(HOST))
        folder = self._stack.enter_context(TemporaryDirectory(prefix="kvasir-names-"))
        self.prefix = asking([self.name_server.address], Path(folder))

    def fix(self) -> None:
        self.name_server.delay_s, self.name_server.is_silent = 0.0, False
        super().fix()


def queues_of(model: str) -> list[str]:
    """Where a job of this model may wait."""
    work = [spec.name for spec in topology.queues([model]) if spec.exchange == topology.WORK]
    return work + retry_levels()


def retry_levels() -> list[str]:
    """The queues of the retry levels."""
    return [topology.retry_level(seconds) for seconds in topology.RETRY_LEVELS_S]
