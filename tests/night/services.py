"""A night's services, behind proxies: a broker and a store, or three brokers and a Redis Cluster with a replica each.

Every node has the users that `kvasir deploy` writes for one broker and one store. Clusters need Linux, where each node
of the Redis Cluster has an address of its own.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from infra.config.settings import load_settings
from infra.deploy.accounts import SERVICES, accounts, passwords
from infra.deploy.services import definitions, store_users
from tests.acceptance.faults.proxy import TcpProxy
from tests.acceptance.faults.services import SeparableRedisCluster
from tests.support.deployed import Deployed, deployed_services
from tests.support.servers import HOST, RabbitMQCluster, RabbitMQServer, Server

BROKERS = 3
_PLUGINS = ("rabbitmq_prometheus",)


@dataclass(frozen=True, slots=True)
class Services:
    """One broker and one store, or the nodes of both clusters; `proxies` are in front of all of them."""

    deployed: Deployed
    brokers: Sequence[RabbitMQServer]
    stores: Sequence[Server]
    proxies: Sequence[TcpProxy]
    broker_cluster: RabbitMQCluster | None = None
    store_cluster: SeparableRedisCluster | None = None

    @property
    def broker(self) -> RabbitMQServer:
        """One that runs."""
        return next(node for node in self.brokers if node.alive)


@contextmanager
def one_of_each(folder: Path) -> Iterator[Services]:
    """One broker and one store."""
    with deployed_services(folder, _PLUGINS) as deployed, ExitStack() as stack:
        servers = (deployed.broker, deployed.store)
        proxies = [stack.enter_context(TcpProxy(server.port)) for server in servers]
        deployed.ways = {server.port: proxy.port for server, proxy in zip(servers, proxies, strict=True)}
        yield Services(deployed, [deployed.broker], [deployed.store], proxies)


@contextmanager
def clusters(folder: Path) -> Iterator[Services]:
    """Three brokers, and a Redis Cluster of six nodes."""
    users = folder / "definitions.json"
    # Prometheus looks each second: figures renewed every five would be old.
    keys = {"load_definitions": str(users), "collect_statistics_interval": "1000"}
    brokers = RabbitMQCluster(BROKERS, keys, _PLUGINS)
    stores = SeparableRedisCluster(replicas=1)
    config = folder / "kvasir.toml"
    hosts = ",".join(f"{HOST}:{node.port}" for node in brokers.nodes)
    config.write_text(
        f'[services]\nbroker = "amqp://teacher@{hosts}/%2F"\nbroker_nodes = {BROKERS}\n'
        f'store = "{stores.url.replace(f":{stores.nodes[0].password}@", "teacher@")}"\n'
        'broker_password_file = "broker"\nstore_password_file = "store"\n'
    )
    settings = load_settings(config=config, environ={})
    for service in SERVICES:
        for secret in passwords(settings, service).values():
            secret.make()
    users.write_text(definitions(accounts(settings, "broker")))
    _, *store_lines = store_users(accounts(settings, "store")).splitlines()  # all but the default user's
    for store in stores.nodes:
        with (store.folder / "redis.conf").open("a", encoding="utf-8") as file:
            file.writelines(f"{line}\n" for line in store_lines)
    operator = accounts(settings, "broker")[0]
    for broker in brokers.nodes:
        broker.user, broker.password = operator.user, operator.password
    with stores, brokers, ExitStack() as stack:
        proxies = [stack.enter_context(TcpProxy(node.port)) for node in brokers.nodes]
        deployed = Deployed(settings, brokers.nodes[0], stores.nodes[0])
        deployed.urls = {"broker": brokers.url, "store": stores.url}
        deployed.ways = {node.port: proxy.port for node, proxy in zip(brokers.nodes, proxies, strict=True)}
        yield Services(deployed, brokers.nodes, stores.nodes, [*proxies, *stores.proxies], brokers, stores)
