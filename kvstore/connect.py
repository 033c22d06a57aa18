"""Opens a store and a cluster state from a URL."""

from dataclasses import dataclass
from typing import Any

from kvstore.base import ClusterState, KVStore
from kvstore.memory import MemoryClusterState, MemoryKVStore
from kvstore.redis.client import errors_mapped, is_cluster, is_node, open_client, place, product
from kvstore.redis.cluster_state import RedisClusterState
from kvstore.redis.store import RedisKVStore
from messages.errors import ConfigError

MEMORY = "memory:"
OLDEST_REDIS = 7  # the first version whose Lua scripts can have flags


@dataclass(frozen=True, slots=True)
class Stores:
    """Everything that a worker keeps outside the broker."""

    kv: KVStore
    cluster_state: ClusterState

    def close(self) -> None:
        """Close both. Idempotent."""
        self.kv.close()
        self.cluster_state.close()


def connect(url: str) -> Stores:
    """Open the store and the cluster state at a URL.

    It is `memory://` (new, for this process only), a Redis (redis://, rediss://, unix://), or a Redis Cluster
    (redis+cluster://, rediss+cluster://).

    Raises:
        ConfigError: the URL can't be used, the server is too old, or it is a cluster's node and the URL doesn't say so.
        StoreUnavailable: the server can't be reached, or it refuses the login.
    """
    if url.startswith(MEMORY):
        return Stores(MemoryKVStore(), MemoryClusterState())
    _check_server(url)
    return Stores(RedisKVStore(url), RedisClusterState(url))


def _check_server(url: str) -> None:
    address = place(url)
    client = open_client(url)
    try:
        with errors_mapped(address):
            server: Any = client.info("server")
    except TypeError:  # redis-py passes a URL's unknown options on to code that rejects them
        raise ConfigError(f"the store URL for {address} has an option that redis-py does not know: remove it") from None
    finally:
        client.close()
    major = str(server.get("redis_version", "")).partition(".")[0]
    if not major.isdigit() or int(major) < OLDEST_REDIS:
        raise ConfigError(f"the store at {address} is {product(server)}; Redis {OLDEST_REDIS} or newer is needed")
    if is_node(server) and not is_cluster(url):
        raise ConfigError(
            f"the store at {address} is a node of a Redis Cluster: "
            "begin its URL with redis+cluster:// (or rediss+cluster://)"
        )
