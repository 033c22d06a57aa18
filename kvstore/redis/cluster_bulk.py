"""Transfers values to and from all nodes of a Redis Cluster at once, over one plain socket to each, with pipelining.

redis-py's map of slots says which node has a key. A key that has moved since the map was read, or that is being moved
(MOVED and ASK of redis.io/docs/latest/operate/oss_and_stack/reference/cluster-spec), goes through redis-py, which
follows the redirection and updates its map. If a `renew` meets such a key, all of it goes through redis-py.
"""

from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import redis
from redis import exceptions

from kvstore.redis.bulk import (
    Arena,
    Bulk,
    BulkConnection,
    Item,
    Pipeline,
    RedirectError,
    Values,
)
from kvstore.redis.client import NODE_TIMEOUT_S
from kvstore.redis.links import Links
from messages.urls import put_hosts

Node = tuple[str, int]  # host, port

# The second one is raised for a slot that no node serves. It is not a subclass of RedisError.
_STORE_ERRORS = (exceptions.RedisError, exceptions.RedisClusterException, OSError)


class ClusterBulk:
    """A `kvstore.redis.store.Transport` over plain sockets to every primary."""

    def __init__(self, client: redis.RedisCluster, url: str) -> None:
        """`url` is a plain URL of any node."""
        self._client: Any = client
        self._url = url
        self._bulks: dict[Node, Bulk] = {}
        self._arena = Arena()

    def put(self, items: Iterable[Item], ttl_s: int) -> int:
        """Set each key to the joined parts of its value, with a TTL. Returns the bytes stored."""
        total = 0
        with self._open_links() as links:
            for item in items:
                pipeline = links[self._node(item[0])]
                total += pipeline.send_set(item, ttl_s)
                while pipeline.is_full:
                    self._end_set(pipeline, ttl_s)
            for pipeline in links.values():
                while pipeline.pending_items:
                    self._end_set(pipeline, ttl_s)
        return total

    def _end_set(self, pipeline: Pipeline, ttl_s: int) -> None:
        key, prefix, payload = pipeline.pending_items[0]
        try:
            pipeline.end_set()
        except RedirectError:
            self._client.set(key, b"".join((prefix, payload)), ex=ttl_s)

    def get(self, keys: Sequence[str], ttl_s: int) -> Generator[bytes | memoryview | None]:
        """Yield the value of each key, in order, or None. TTLs are renewed."""
        values = Values(self._arena)
        with self._open_links() as links:
            for_keys = [links[self._node(key)] for key in keys]
            for key, link in zip(keys, for_keys, strict=True):
                link.keys.append(key)
            for link in links.values():
                link.ask(ttl_s)
            for index, (key, link) in enumerate(zip(keys, for_keys, strict=True)):
                value: bytes | memoryview | None
                try:
                    value = link.read_value(values, len(keys) - index)
                except RedirectError:
                    value = self._client.getex(key, ex=ttl_s)
                link.ask(ttl_s)
                yield value

    def renew(self, keys: Sequence[str], ttl_s: int) -> list[bool]:
        """Renew the TTL of each key, and return for each whether it exists."""
        is_stored: dict[str, bool] = {}
        try:
            with self._open_links() as links:
                for key in keys:
                    links[self._node(key)].keys.append(key)
                while any(link.keys for link in links.values()):
                    requests = [(link, link.ask_to_renew(ttl_s)) for link in links.values()]
                    for link, link_keys in requests:
                        is_stored.update(zip(link_keys, link.connection.read_flags(len(link_keys)), strict=True))
        except RedirectError:
            with self._client.pipeline() as pipeline:
                for key in keys:
                    pipeline.expire(key, ttl_s)
                is_stored = dict(zip(keys, map(bool, pipeline.execute()), strict=True))
        return [is_stored[key] for key in keys]

    def prepare(self) -> None:
        """See `Bulk`."""
        self._arena.fill()

    def close(self) -> None:
        """Close idle connections."""
        for bulk in self._bulks.values():
            bulk.close()

    def _node(self, key: str) -> Node:
        node = self._client.get_node_from_key(key)
        return node.host, node.port

    @contextmanager
    def _open_links(self) -> "Iterator[_Links]":
        """Provide links to nodes, which are opened when needed. After a failure the map of slots is read again."""
        try:
            with ExitStack() as stack:
                yield _Links(lambda node: stack.enter_context(self._bulk(node).connection()))
        except _STORE_ERRORS:
            with suppress(*_STORE_ERRORS):
                self._client.nodes_manager.initialize()
            raise

    def _bulk(self, node: Node) -> Bulk:
        if node not in self._bulks:
            host, port = node
            url = put_hosts(self._url, f"{f'[{host}]' if ':' in host else host}:{port}")
            self._bulks[node] = Bulk(Links(url), NODE_TIMEOUT_S)
        return self._bulks[node]


class _Links(dict[Node, Pipeline]):
    """Each node's connection during one call, opened when it is first needed."""

    def __init__(self, connect: Callable[[Node], BulkConnection]) -> None:
        super().__init__()
        self._connect = connect

    def __missing__(self, node: Node) -> Pipeline:
        self[node] = Pipeline(self._connect(node))
        return self[node]
