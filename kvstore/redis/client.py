"""What the store and the cluster state share for Redis: how a client is opened, and how its errors are translated."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial, wraps
from typing import Any, Concatenate, ParamSpec, TypeVar
from urllib.parse import urlsplit

import redis
from redis import exceptions
from redis.backoff import ConstantBackoff
from redis.cluster import ClusterNode
from redis.retry import Retry

from kvstore.redis.links import GLANCE_S, Links, connection_class
from messages.errors import ConfigError, StoreUnavailable
from messages.urls import CLUSTER, STORE_SCHEMES, addresses

P = ParamSpec("P")
T = TypeVar("T")

Client = redis.Redis | redis.RedisCluster

CONNECT_TIMEOUT_S = 5.0
NODE_TIMEOUT_S = 1.0  # time limit for a node of a cluster
TIMEOUT_S = 15.0  # maximum wait without any progress; each request takes well under a second

_REFUSED_LOGIN = (
    exceptions.AuthenticationError,
    exceptions.AuthorizationError,
    exceptions.AuthenticationWrongNumberOfArgsError,
)


def open_client(url: str, timeout_s: float = TIMEOUT_S, links: Links | None = None) -> Client:
    """Return a client for `url`. Raises ConfigError if the URL can't be used.

    Nothing is sent yet, except to a cluster, which is asked for its map of slots; this may raise StoreUnavailable. If
    the caller passes this URL's `links`, and closes them later, a better address is looked for.
    """
    address = place(url)
    try:
        if is_cluster(url):
            return _open_cluster(url, address)
        return _open_single(url, timeout_s, links)
    except (ValueError, TypeError):  # the error's text can contain a part of the password
        raise ConfigError("the store URL can't be read; it must look like redis://:password@host:6379/0") from None


def _open_single(url: str, timeout_s: float, links: Links | None) -> redis.Redis:
    active_links = links or Links(url)
    connection_options: dict[str, Any] = (
        {"connection_class": connection_class(active_links)} if active_links.has_choice else {}
    )
    client = redis.Redis.from_url(
        active_links.urls[0],
        socket_timeout=active_links.timeout_s(timeout_s),
        socket_connect_timeout=GLANCE_S if active_links.has_choice else CONNECT_TIMEOUT_S,
        # RESP2 is used, because with RESP3 redis-py fails on an unusual answer to HELLO.
        protocol=2,
        # There is one retry, because the server of a pooled connection can have died. Every command that Kvasir uses
        # can safely be sent twice.
        retry=Retry(ConstantBackoff(0.1), 1),
        **connection_options,
    )
    if links and links.has_choice:
        links.on_change.append(partial(client.connection_pool.disconnect, inuse_connections=False))
    return client


def is_cluster(url: str) -> bool:
    """Whether a URL names nodes of a Redis Cluster."""
    return url.partition("://")[0].endswith(CLUSTER)


def node_urls(url: str) -> list[str]:
    """Return a plain URL for each node that a cluster's URL names."""
    scheme, _, rest = url.partition("://")
    return addresses(f"{scheme.removesuffix(CLUSTER)}://{rest}")


def _open_cluster(url: str, address: str) -> redis.RedisCluster:
    urls = node_urls(url)
    hosts = [urlsplit(node_url) for node_url in urls]
    node: Any = ClusterNode
    try:
        return redis.RedisCluster.from_url(
            urls[0],
            startup_nodes=[node(host.hostname or "localhost", host.port or 6379) for host in hosts],
            # With a limit this short, a frozen node is given up on even before the other nodes have replaced it.
            socket_timeout=NODE_TIMEOUT_S,
            socket_connect_timeout=GLANCE_S,
            protocol=2,
            # The map of slots is read again before the retry.
            retry=Retry(ConstantBackoff(0.1), 1),
            # If a node without a replica is lost, all slots of the other nodes are still served.
            require_full_coverage=False,
        )
    except (exceptions.RedisClusterException, exceptions.RedisError, OSError) as error:
        if "Cluster mode is not enabled" in str(error):
            raise ConfigError(f"the store at {address} is not a Redis Cluster: begin its URL with redis://") from None
        raise StoreUnavailable(sentence(error, address)) from error


def place(url: str) -> str:
    """Return where a store is, for people: hosts and ports or a socket's path, never the password.

    Raises ConfigError.
    """
    try:
        places = [urlsplit(address_url) for address_url in addresses(url)]
        parts = places[0]
        hosts = [f"{parsed_url.hostname or 'localhost'}:{parsed_url.port or 6379}" for parsed_url in places]
    except ValueError:  # the error's text can contain a part of the password
        raise ConfigError(
            "the store URL can't be read: escape '/', '#', '?' and '@' in the password (%2F, %23, %3F, %40)"
        ) from None
    if parts.scheme not in STORE_SCHEMES:
        raise ConfigError(
            f"the store URL begins with {parts.scheme!r}, but must begin with redis://, rediss://, redis+cluster://, "
            "rediss+cluster://, unix:// or memory://"
        )
    if is_cluster(url):
        return ", ".join(hosts)
    return parts.path if parts.scheme == "unix" else " or ".join(hosts)


def product(server: Mapping[str, Any]) -> str:
    """Return name and version from a reply to INFO. Besides its own version, Valkey also states a Redis version."""
    if valkey := server.get("valkey_version"):
        return f"Valkey {valkey}"
    return f"Redis {server['redis_version']}" if "redis_version" in server else "not a Redis server"


def is_node(server: Mapping[str, Any]) -> bool:
    """Whether the server that gave this reply to INFO is a node of a cluster."""
    return "cluster" in (server.get("redis_mode"), server.get("server_mode"))  # the field's names in Redis and Valkey


@contextmanager
def errors_mapped(address: str) -> Iterator[None]:
    """Turn every failure of Redis or of the network to it into StoreUnavailable, with `address` in its text."""
    try:
        yield
    # RedisClusterException is not a subclass of RedisError.
    except (exceptions.RedisError, exceptions.RedisClusterException, OSError) as error:
        raise StoreUnavailable(sentence(error, address)) from error


def with_errors_mapped(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[Any, P], T]:
    """Wrap a method in `errors_mapped`. Its object has the address in `_place`."""

    @wraps(method)
    def call(self: Any, /, *args: P.args, **kwargs: P.kwargs) -> T:
        with errors_mapped(self._place):
            return method(self, *args, **kwargs)

    return call


def sentence(error: Exception, address: str) -> str:
    """Return a sentence that says what happened, and what to do about it."""
    if isinstance(error, exceptions.RedisClusterException):
        if isinstance(error.__cause__, Exception):  # it says why no node returned the map of slots
            return sentence(error.__cause__, address)
        # The error's own text is left out, because it can contain the command.
        return f"no node of the store at {address} serves a slot that is needed"
    if str(error).startswith("CLUSTERDOWN"):
        return f"the store at {address} lacks a primary, and no replica has taken over"
    if isinstance(error, exceptions.OutOfMemoryError):
        return f"the store at {address} is full (Redis reached its maxmemory): nothing more can be stored for now"
    if isinstance(error, _REFUSED_LOGIN):
        return f"the store at {address} refused the login: check user and password in the store URL"
    if "CERTIFICATE_VERIFY_FAILED" in str(error):
        reason = str(error).partition("certificate verify failed:")[2].partition("(_ssl")[0].strip(" .")
        return (
            f"the certificate of the store at {address} is not trusted ({reason}): "
            "set store_ca_file to the file of the CA that signed it"
        )
    if isinstance(error, exceptions.TimeoutError | TimeoutError | BlockingIOError):
        return f"the store at {address} did not answer in time"
    if isinstance(error, exceptions.BusyLoadingError):
        return f"the store at {address} is still loading its data"
    if isinstance(error, exceptions.ResponseError):
        return f"the store at {address} refused a command: {error}"
    return f"the store at {address} can't be reached: {error}"
