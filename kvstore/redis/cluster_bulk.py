"""Transfers values to and from all nodes of a Redis Cluster at once, over one plain socket to each, with pipelining.

redis-py's map of slots says which node has a key. A key that has moved since the map was read, or that is being moved
(MOVED and ASK of redis.io/docs/latest/operate/oss_and_stack/reference/cluster-spec), goes through redis-py, which
follows the redirection and updates its map. If a `renew` meets such a key, all of it goes through redis-py.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress

import redis
from redis import exceptions

from kvstore.redis.bulk import Arena, Bulk, ConnectionPool, Node, NodePipelines, RedirectError
from kvstore.redis.client import NODE_TIMEOUT_S
from kvstore.redis.links import Links
from messages.urls import put_hosts

# RedisClusterException is not a subclass of RedisError. redis-py raises it, for example, if no node has the slot of a
# key.
_STORE_ERRORS = (exceptions.RedisError, exceptions.RedisClusterException, OSError)


class ClusterBulk(Bulk):
    """A `kvstore.redis.store.Transport` over plain sockets to every primary."""

    def __init__(self, client: redis.RedisCluster, url: str) -> None:
        """`url` is a plain URL of any node."""
        self._client = client
        self._url = url
        self._pools: dict[Node, ConnectionPool] = {}
        self._arena = Arena()

    def renew(self, keys: Sequence[str], ttl_s: int) -> list[bool]:
        """Renew the TTL of each key, and return for each whether it exists."""
        try:
            return super().renew(keys, ttl_s)
        except RedirectError:
            with self._client.pipeline() as pipeline:
                for key in keys:
                    pipeline.expire(key, ttl_s)
                return [bool(is_stored) for is_stored in pipeline.execute()]

    def close(self) -> None:
        """See Bulk."""
        for pool in self._pools.values():
            pool.close()

    def _node(self, key: str) -> Node:
        node = self._client.get_node_from_key(key)
        return node.host, node.port

    def _pool_of(self, node: Node) -> ConnectionPool:
        if node not in self._pools:
            host, port = node
            url = put_hosts(self._url, f"{f'[{host}]' if ':' in host else host}:{port}")
            self._pools[node] = ConnectionPool(Links(url), NODE_TIMEOUT_S)
        return self._pools[node]

    @contextmanager
    def _open_pipelines(self) -> Iterator[NodePipelines]:
        """See Bulk. After a failure the map of slots is requested again."""
        try:
            with super()._open_pipelines() as pipelines:
                yield pipelines
        except _STORE_ERRORS:
            with suppress(*_STORE_ERRORS):
                self._client.nodes_manager.initialize()
            raise
