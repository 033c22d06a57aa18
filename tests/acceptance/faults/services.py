"""A broker and a store of the harness's own, each behind a proxy, that rows may kill, fill and cut off."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Self

import pika
import redis

from infra.broker import topology
from tests.acceptance.faults.proxy import TcpProxy
from tests.support.servers import HOST, RabbitMQCluster, RabbitMQServer, RedisServer

# Heartbeats and time-outs of minutes would make rows of minutes: both are options that an operator has, too.
HEARTBEAT_S = 4
STORE_TIMEOUT_S = 2


class Services:
    """Started once, used by row after row."""

    nodes = 1  # of the broker

    def __init__(self) -> None:
        self.broker = RabbitMQServer()
        self.store = RedisServer()
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        try:
            self._stack.enter_context(self.broker)
            self._stack.enter_context(self.store)
            self.to_broker = self._stack.enter_context(TcpProxy(self.broker.port))
            self.to_store = self._stack.enter_context(TcpProxy(self.store.port))
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_exception: object) -> None:
        self._stack.close()

    @property
    def broker_url(self) -> str:
        """Through the proxy, with heartbeats that suit rows of seconds."""
        url = self.broker.url.replace(f"{HOST}:{self.broker.port}", f"{HOST}:{self.to_broker.port}")
        return f"{url}?heartbeat={HEARTBEAT_S}"

    @property
    def store_url(self) -> str:
        """Through the proxy, with time-outs that suit rows of seconds."""
        url = self.store.url.replace(f"{HOST}:{self.store.port}", f"{HOST}:{self.to_store.port}")
        return f"{url}?socket_timeout={STORE_TIMEOUT_S}&socket_connect_timeout={STORE_TIMEOUT_S}"

    def mend(self) -> None:
        """Whatever the last row did to them, they serve."""
        self.to_broker.heal()
        self.to_store.heal()
        if not self.broker.alive:
            self.broker.start()
        if not self.store.alive:
            self.store.start()
        client = self.redis()
        client.flushall()
        client.close()

    def redis(self) -> redis.Redis:
        """A client past the proxy."""
        return redis.Redis.from_url(self.store.url)

    def connect(self) -> pika.BlockingConnection:
        """A connection past the proxy."""
        return pika.BlockingConnection(pika.URLParameters(self.broker.url))

    def version(self) -> str:
        """The broker's and the store's."""
        store = self.redis()
        with self.connect() as connection:
            told = connection._impl.server_properties["version"]
        text = told.decode() if isinstance(told, bytes) else told
        try:
            return f"RabbitMQ {text}, Redis {store.info('server')['redis_version']}"
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


class ClusterServices(Services):
    """The same over three brokers in a cluster, which processes reach by its addresses and not through a proxy."""

    nodes = 3

    def __init__(self) -> None:
        super().__init__()
        self.broker.close()
        self.cluster = RabbitMQCluster(self.nodes)
        self.broker = self.cluster.nodes[0]

    def __enter__(self) -> Self:
        try:
            self._stack.enter_context(self.cluster)
            self._stack.enter_context(self.store)
            self.to_broker = self._stack.enter_context(TcpProxy(self.broker.port))
            self.to_store = self._stack.enter_context(TcpProxy(self.store.port))
        except BaseException:
            self._stack.close()
            raise
        return self

    @property
    def broker_url(self) -> str:
        """All addresses, with heartbeats that suit rows of seconds."""
        return f"{self.cluster.url}?heartbeat={HEARTBEAT_S}"

    def mend(self) -> None:
        """Every node runs, too."""
        for node in self.cluster.nodes:
            if not node.alive:
                node.start()
        self.cluster.wait_until_whole()
        super().mend()

    def connect(self) -> pika.BlockingConnection:
        """A connection to the first node that answers."""
        found = [pika.URLParameters(node.url) for node in self.cluster.nodes if node.alive]
        for parameters in found:
            parameters.socket_timeout = parameters.stack_timeout = STORE_TIMEOUT_S
        return pika.BlockingConnection(found)


def queues_of(model: str) -> list[str]:
    """Where a job of this model may wait."""
    work = [spec.name for spec in topology.queues([model]) if spec.exchange == topology.WORK]
    return work + retry_levels()


def retry_levels() -> list[str]:
    """The queues of the retry levels."""
    return [topology.retry_level(seconds) for seconds in topology.RETRY_LEVELS_S]
