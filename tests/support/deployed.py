"""RabbitMQ and Redis with the users that `kvasir deploy --services` writes, and processes that log in as these.

with deployed_services(folder) as deployed, RoleCluster(folder / "cluster", deployed, models) as cluster:
    cluster.role = "prefill"
    cluster.worker("prefill", model)      # as kvasir-prefill, at both services
"""

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import redis
from pika.adapters.blocking_connection import BlockingChannel

from infra.config.settings import Settings, load_settings
from infra.config.urls import put_option, put_password, put_user
from infra.deploy.accounts import SERVICES, Service, accounts, passwords
from infra.deploy.permissions import AccountRole
from infra.deploy.services import definitions, service_files
from infra.deploy.units import Place
from kvstore.redis.client import open_client
from tests.support import programs
from tests.support.processes import Cluster, ModelEntry
from tests.support.rights import is_refused
from tests.support.servers import HOST, RabbitMQServer, Server, free_port, redis_answers


class DeployedStore(Server):
    """Redis as deploy configures it, and one user more, who may read what it has refused."""

    def __init__(self, settings: Settings, port: int) -> None:
        super().__init__("redis", port)
        self._operator = accounts(settings, "store")[0]
        place = Place(str(self.folder), "k", str(self.folder))
        written = service_files(settings.machines["one"], settings, place, [], accounts(settings, "store"))
        for path, file in written.items():
            Path(path).parent.mkdir(exist_ok=True)
            Path(path).write_bytes(file.content)
        with (self.folder / "services" / "redis.acl").open("a", encoding="utf-8") as users:
            users.write(f"user auditor on >{self.password} -@all +acl|log +client\n")

    @property
    def auditor_url(self) -> str:
        return f"redis://auditor:{self.password}@{HOST}:{self.port}/0"

    @property
    def url(self) -> str:
        return f"redis://{self._operator.user}:{self._operator.password}@{HOST}:{self.port}/0"

    def _command(self) -> list[str]:
        return [programs.require("redis"), "services/redis.conf"]

    def _answers(self) -> bool:
        return redis_answers(self.url)


class DeployedBroker(RabbitMQServer):
    """RabbitMQ with the definitions that deploy writes."""

    def __init__(self, settings: Settings, port: int, folder: Path, plugins: Sequence[str] = ()) -> None:
        file = folder / "definitions.json"
        everybody = accounts(settings, "broker")
        file.write_text(definitions(everybody))
        # Prometheus looks each second where it looks at all: figures renewed every five would be old.
        statistics = {"collect_statistics_interval": "1000"} if plugins else {}
        super().__init__(port, plugins=plugins, settings={"load_definitions": str(file), **statistics})
        self.user, self.password = everybody[0].user, everybody[0].password


class Deployed:
    """Both services, and the URL of each role's user at each."""

    def __init__(self, settings: Settings, broker: RabbitMQServer, store: Server) -> None:
        self._settings = settings
        self.broker, self.store = broker, store  # of clusters the first node
        self.urls: dict[Service, str] = {"broker": broker.url, "store": store.url}  # with every right
        self.ways: dict[int, int] = {}  # by a server's port that of a proxy, where there is one
        self.options: dict[Service, dict[str, str]] = {"broker": {}, "store": {}}  # of every process's URL

    def plain_url(self, service: Service) -> str:
        """As the operator writes it in kvasir.toml, with the proxies' ports."""
        url: str = getattr(self._settings.services, service)
        return re.sub(r":(\d+)", lambda port: f":{self.ways.get(int(port[1]), port[1])}", url)

    def url(self, service: Service, role: AccountRole) -> str:
        """As a process of this role connects."""
        (account,) = (account for account in accounts(self._settings, service) if account.role == role)
        url = put_password(put_user(self.plain_url(service), account.user), account.password)
        for name, value in self.options[service].items():
            url = put_option(url, name, value)
        return url

    def redis(self, role: AccountRole) -> Any:
        return open_client(self.url("store", role))

    def refused_by_redis(self) -> list[Any]:
        """What Redis has refused since this was last asked, scripts' commands included."""
        assert isinstance(self.store, DeployedStore)
        auditor: Any = redis.Redis.from_url(self.store.auditor_url)
        entries = auditor.acl_log()
        auditor.acl_log_reset()
        return [(entry["username"], entry["reason"], entry["object"]) for entry in entries]

    def broker_refuses(self, role: AccountRole, action: Callable[[BlockingChannel], object]) -> bool:
        """Whether RabbitMQ answers 403 to what this role's user tries."""
        return is_refused(self.url("broker", role), action)


@contextmanager
def deployed_services(folder: Path, plugins: Sequence[str] = ()) -> Iterator[Deployed]:
    """Both services, with the passwords and the users' files in `folder`; `plugins`: of RabbitMQ."""
    broker, store = free_port(), free_port()
    config = folder / "kvasir.toml"
    config.write_text(
        f'[services]\nbroker = "amqp://teacher@{HOST}:{broker}/%2F"\nstore = "redis://teacher@{HOST}:{store}/0"\n'
        'broker_password_file = "broker"\nstore_password_file = "store"\n'
        '[machines.one]\nroles = [{ role = "store", memory_gb = 1 }]\n'
    )
    settings = load_settings(config=config, environ={})
    for service in SERVICES:
        for secret in passwords(settings, service).values():
            secret.make()
    with DeployedBroker(settings, broker, folder, plugins) as rabbitmq, DeployedStore(settings, store) as server:
        yield Deployed(settings, rabbitmq, server)


class RoleCluster(Cluster):
    """Each process logs in as its role's user, at both services."""

    def __init__(self, folder: Path, deployed: Deployed, models: Mapping[str, ModelEntry]) -> None:
        super().__init__(folder, deployed.urls["broker"], deployed.urls["store"], models)
        self.deployed = deployed
        self.role: AccountRole = "operator"
        self.variables: dict[str, str] = {}  # of the next process, besides

    @property
    def environment(self) -> dict[str, str]:
        urls = {f"KVASIR_{name.upper()}_URL": self.deployed.url(name, self.role) for name in SERVICES}
        return super().environment | urls | self.variables
