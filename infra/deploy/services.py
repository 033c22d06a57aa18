"""The broker and the store as units of a machine: configuration, users, and how they are started.

RabbitMQ and Redis are installed by the machine's own package manager; this module configures them for Kvasir. Passwords
are in no argument and no variable: RabbitMQ reads salted hashes from its definitions, and Redis reads hashes from its
ACL file. Nothing here has side effects.
"""

import base64
import hashlib
import json
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any
from urllib.parse import urlsplit

from infra.config.settings import MachineSettings, Settings
from infra.deploy.accounts import Account
from infra.deploy.permissions import PERMISSIONS, STORE_RULES
from infra.deploy.remote import SECRET, RemoteFile
from infra.deploy.units import LOOPBACK, Place, Unit
from messages.errors import ConfigError
from messages.urls import CLUSTER, addresses

_GB = 1_000_000_000
# What to add to the AMQP port to get RabbitMQ's other ports: 15672, 15692 and 25672 if the AMQP port is 5672.
_PAGE, _METRICS, _ERLANG = 10_000, 10_020, 20_000
_NET_TICKTIME_S = 20  # a silent node is detected after 15 to 25 s
_PLUGINS = "[rabbitmq_management,rabbitmq_prometheus].\n"


def service_units(machine: MachineSettings, settings: Settings) -> list[Unit]:
    """Return the units of the machine's roles `broker` and `store`. Raises ConfigError if their URL is not set."""
    roles = {role.role for role in machine.roles}
    return [
        *([_broker_unit(settings)] if "broker" in roles else []),
        *([_store_unit(settings)] if "store" in roles else []),
    ]


def service_files(
    machine: MachineSettings, settings: Settings, place: Place, broker: Sequence[Account], store: Sequence[Account]
) -> Mapping[str, RemoteFile]:
    """Return the files of a machine's services, by path. Files with hashes are readable only by their owner.

    `broker` and `store` are the users of each service. There are no other users.
    """
    roles = {role.role: role for role in machine.roles}
    folder, files = f"{place.folder}/services", {}
    if "broker" in roles:
        hosts, port = _addresses(settings.services.broker, "broker", 5672)
        files[f"{folder}/rabbitmq.conf"] = RemoteFile(_rabbitmq_conf(hosts, port, place).encode())
        files[f"{folder}/enabled_plugins"] = RemoteFile(_PLUGINS.encode())
        files[f"{folder}/definitions.json"] = RemoteFile(definitions(broker).encode(), SECRET)
    if "store" in roles:
        hosts, port = _store_addresses(settings)
        limit = int(roles["store"].memory_gb * _GB)
        files[f"{folder}/redis.conf"] = RemoteFile(_redis_conf(hosts, port, limit, place).encode())
        files[f"{folder}/redis.acl"] = RemoteFile(store_users(store).encode(), SECRET)
    return files


def definitions(accounts: Sequence[Account]) -> str:
    """Return RabbitMQ's definitions: one vhost, these users and their rights, and no other users (no guest)."""
    users: list[dict[str, Any]] = [
        {
            "name": account.user,
            "password_hash": _rabbitmq_hash(account.password),
            "hashing_algorithm": "rabbit_password_hashing_sha256",
            "tags": [],
        }
        for account in accounts
    ]
    rights = [asdict(PERMISSIONS[account.role]) | {"user": account.user, "vhost": "/"} for account in accounts]
    return json.dumps({"vhosts": [{"name": "/"}], "users": users, "permissions": rights}, indent=2)


def store_users(accounts: Sequence[Account]) -> str:
    """Return Redis's ACL file: these users and their rights, and no other users (no default)."""
    lines = ["user default off resetpass -@all"]
    for account in accounts:
        digest = hashlib.sha256(account.password.encode()).hexdigest()
        lines.append(f"user {account.user} on #{digest} {STORE_RULES[account.role]}")
    return "\n".join(lines) + "\n"


def _broker_unit(settings: Settings) -> Unit:
    (host, *_), port = _addresses(settings.services.broker, "broker", 5672)
    folder = "{folder}/services"
    variables = {
        "HOME": folder,  # Erlang keeps its cookie file in this folder
        "RABBITMQ_NODENAME": f"kvasir-{port}@localhost",
        "RABBITMQ_DIST_PORT": str(_offset_port(port, _ERLANG)),
        # Erlang's own listeners don't check users, and run any code for a client that has the cookie. If there is only
        # one node, no other machine needs these listeners.
        "RABBITMQ_SERVER_ADDITIONAL_ERL_ARGS": "-kernel inet_dist_use_interface {127,0,0,1}",
        "ERL_EPMD_ADDRESS": LOOPBACK,
        "RABBITMQ_CONFIG_FILE": f"{folder}/rabbitmq.conf",
        "RABBITMQ_ENABLED_PLUGINS_FILE": f"{folder}/enabled_plugins",
        "RABBITMQ_MNESIA_BASE": f"{folder}/rabbitmq",
        "RABBITMQ_LOG_BASE": "{folder}/log",
    }
    # The wrapper script in Debian's PATH refuses to run as an ordinary user, so the program itself is started.
    start = "[ -x /usr/lib/rabbitmq/bin/rabbitmq-server ] && exec /usr/lib/rabbitmq/bin/rabbitmq-server"
    words = ("/bin/sh", "-c", f"{start}; exec rabbitmq-server")
    return Unit("kvasir-broker", "RabbitMQ", words, port, host, tuple(variables.items()))


def _store_unit(settings: Settings) -> Unit:
    (host, *_), port = _store_addresses(settings)
    words = ("/usr/bin/env", "redis-server", "{folder}/services/redis.conf")
    return Unit("kvasir-store", "Redis", words, port, host)


def _offset_port(port: int, offset: int) -> int:
    return port + offset if port + offset < 1 << 16 else port - offset


def _addresses(url: str, name: str, default: int) -> tuple[list[str], int]:
    """Return the service's hosts, and the single port that it listens on at all of them."""
    places = [urlsplit(address) for address in addresses(url)]
    hosts = [place.hostname for place in places if place.hostname]
    if not hosts:
        raise ConfigError(f"services.{name} names no host, but a machine has the role {name!r}: set a URL with a host")
    ports = {place.port or default for place in places}
    if len(ports) > 1:
        raise ConfigError(
            f"services.{name} names several ports, but the role {name!r} runs one service: set a single port"
        )
    return hosts, ports.pop()


def _store_addresses(settings: Settings) -> tuple[list[str], int]:
    if f"{CLUSTER}://" in settings.services.store:
        raise ConfigError(
            "services.store names a Redis Cluster, but deploy sets up only one Redis: remove the role 'store' from the "
            "machines, and see 'A Redis Cluster' in docs/how-to/clusters.md"
        )
    return _addresses(settings.services.store, "store", 6379)


def _rabbitmq_conf(hosts: Sequence[str], port: int, place: Place) -> str:
    listeners = dict.fromkeys([*hosts, LOOPBACK])
    lines = [f"listeners.tcp.{number} = {address}:{port}" for number, address in enumerate(listeners, 1)]
    return "\n".join(
        [
            *lines,
            "loopback_users = none",
            # The next two lines matter only in a cluster. With them, a node that loses contact with most other nodes
            # notices the loss soon, and stops.
            "cluster_partition_handling = pause_minority",
            f"net_ticktime = {_NET_TICKTIME_S}",
            f"load_definitions = {place.folder}/services/definitions.json",
            f"management.tcp.ip = {LOOPBACK}",
            f"management.tcp.port = {_offset_port(port, _PAGE)}",
            f"prometheus.tcp.ip = {LOOPBACK}",
            f"prometheus.tcp.port = {_offset_port(port, _METRICS)}",
            "",
        ]
    )


def _rabbitmq_hash(password: str) -> str:
    """Return the salted SHA-256 that rabbitmq.com/passwords describes: base64 of the salt (4 bytes) and the digest."""
    salt = secrets.token_bytes(4)
    return base64.b64encode(salt + hashlib.sha256(salt + password.encode()).digest()).decode()


def _redis_conf(hosts: Sequence[str], port: int, limit: int, place: Place) -> str:
    # Redis writes nothing to disk, because it is only a cache. RabbitMQ keeps the jobs.
    #
    # The policy is noeviction, because Kvasir decides which keys are evicted.
    return "\n".join(
        [
            f"bind {' '.join(dict.fromkeys([*hosts, LOOPBACK]))}",
            f"port {port}",
            f"aclfile {place.folder}/services/redis.acl",
            *([f"maxmemory {limit}"] if limit else []),
            "maxmemory-policy noeviction",
            'save ""',
            "appendonly no",
            f"dir {place.folder}/services",
            "",
        ]
    )
