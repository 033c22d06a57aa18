"""Values to and from all nodes of a Redis Cluster at once: one plain socket to each, pipelined.

Where a key lies is known from redis-py's map of slots. A key that has moved since then, or is being moved (MOVED and
ASK of redis.io/docs/latest/operate/oss_and_stack/reference/cluster-spec), goes through redis-py, which follows it and
learns from it; so does all of a `renew` that met one.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

import redis
from redis import exceptions

from kvstore.redis.bulk import (
    GETS_AHEAD,
    RENEWALS_AHEAD,
    SETS_AHEAD,
    Arena,
    Bulk,
    BulkConnection,
    Item,
    RedirectError,
    Values,
    command,
)
from kvstore.redis.client import NODE_TIMEOUT_S
from kvstore.redis.links import Links

Node = tuple[str, int]  # host, port

# The second of a slot that the map gives to nobody; it is no RedisError.
_STORE_ERRORS = (exceptions.RedisError, exceptions.RedisClusterException, OSError)


class ClusterBulk:
    """A `kvstore.redis.store.Transport` over plain sockets to every primary."""

    def __init__(self, client: redis.RedisCluster, url: str) -> None:
        """`url`: plain, of any node."""
        self._client: Any = client
        self._url = url
        self._bulks: dict[Node, Bulk] = {}
        self._arena = Arena()

    def put(self, items: Iterable[Item], ttl_s: int) -> int:
        """Set each key to the two parts of its value joined, with a TTL; returns the bytes stored."""
        total = 0
        with self._open_links() as links:
            for item in items:
                link = links[self._node(item[0])]
                link.connection.send_set(*item, ttl_s)
                link.pending_items.append(item)
                total += len(item[1]) + len(item[2])
                if len(link.pending_items) > SETS_AHEAD:
                    self._end_put(link, ttl_s)
            for link in links.values():
                while link.pending_items:
                    self._end_put(link, ttl_s)
        return total

    def _end_put(self, link: _Link, ttl_s: int) -> None:
        key, prefix, payload = link.pending_items.popleft()
        try:
            link.connection.read_ok()
        except RedirectError:
            self._client.set(key, b"".join((prefix, payload)), ex=ttl_s)

    def get(self, keys: Sequence[str], ttl_s: int) -> Generator[bytes | memoryview | None]:
        """The value of each key, in order, or None; TTLs are renewed."""
        values = Values(self._arena)
        with self._open_links() as links:
            for_keys = [links[self._node(key)] for key in keys]
            for key, link in zip(keys, for_keys, strict=True):
                link.keys.append(key)
            for link in links.values():
                for _ in range(GETS_AHEAD):
                    link.ask_next(ttl_s)
            for index, (key, link) in enumerate(zip(keys, for_keys, strict=True)):
                value: bytes | memoryview | None
                try:
                    value = link.connection.read_value(values, len(keys) - index)
                except RedirectError:
                    value = self._client.getex(key, ex=ttl_s)
                link.ask_next(ttl_s)
                yield value

    def renew(self, keys: Sequence[str], ttl_s: int) -> list[bool]:
        """Give each key its TTL anew; whether it was there."""
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
        """See Bulk."""
        self._arena.fill()

    def close(self) -> None:
        """Close idle connections."""
        for bulk in self._bulks.values():
            bulk.close()

    def _node(self, key: str) -> Node:
        node = self._client.get_node_from_key(key)
        return node.host, node.port

    @contextmanager
    def _open_links(self) -> Iterator[_Links]:
        """Links to nodes, opened as they are asked for. After a failure the map of slots is asked for again."""
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
            scheme, _, rest = self._url.partition("://")
            userinfo, at, _ = urlsplit(f"//{rest}").netloc.rpartition("@")
            url = f"{scheme}://{userinfo}{at}{f'[{host}]' if ':' in host else host}:{port}"
            self._bulks[node] = Bulk(Links(url), NODE_TIMEOUT_S)
        return self._bulks[node]


@dataclass(slots=True)
class _Link:
    """A node's connection during one call, and what is to come over it."""

    connection: BulkConnection
    keys: deque[str] = field(default_factory=deque)  # not yet asked for
    pending_items: deque[Item] = field(default_factory=deque)

    def ask_next(self, ttl_s: int) -> None:
        """Ask for the value of one more key, if there is one."""
        if self.keys:
            self.connection.send(command("GETEX", self.keys.popleft(), "EX", str(ttl_s)))

    def ask_to_renew(self, ttl_s: int) -> list[str]:
        """Send for some of the keys that are left; returns which."""
        keys = [self.keys.popleft() for _ in range(min(len(self.keys), RENEWALS_AHEAD))]
        self.connection.send(*(command("EXPIRE", key, str(ttl_s)) for key in keys))
        return keys


class _Links(dict[Node, _Link]):
    """Links that are opened as they are asked for."""

    def __init__(self, connect: Callable[[Node], BulkConnection]) -> None:
        super().__init__()
        self._connect = connect

    def __missing__(self, node: Node) -> _Link:
        self[node] = _Link(self._connect(node))
        return self[node]
