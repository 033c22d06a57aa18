"""The KV store in Redis. Each record is one value under one key, always with a TTL."""

from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import closing
from itertools import accumulate, islice
from math import inf
from typing import Any

import redis
from redis import exceptions

from kvstore.base import TTL_S, KVStore, R, StoreUsage
from kvstore.blocks import BlockRef, is_shared
from kvstore.records import DECODERS, encode
from kvstore.redis.bulk import Bulk, Item, bulk_target
from kvstore.redis.client import TIMEOUT_S, Client, node_urls, open_client, place, with_errors_mapped
from kvstore.redis.cluster_bulk import ClusterBulk
from kvstore.redis.links import Links
from messages.errors import KVTransferFailed
from messages.kv import KVLayout, Record

PIPELINE_BYTES = 16 << 20  # redis-py keeps two copies of a pipeline's bytes in memory
GETS_AT_ONCE = 8
DELETES_AT_ONCE = 256


class RedisKVStore(KVStore):
    """Stores blocks as Redis strings. Payloads go over our own socket where possible, otherwise through redis-py."""

    def __init__(self, url: str, timeout_s: float = TIMEOUT_S, bulk: bool = True) -> None:
        """Open the store. A cluster is asked for its map of slots, which may raise StoreUnavailable."""
        self._place = place(url)
        first_url = node_urls(url)[0]
        self._links = Links(url)
        self._client = open_client(url, timeout_s, self._links)
        # All transports raise the exceptions that redis-py raises, or OSError.
        self.transport: Bulk | ClusterBulk | Pipelines
        if not bulk or not bulk_target(first_url):
            self.transport = Pipelines(self._client)
        elif isinstance(self._client, redis.RedisCluster):
            self.transport = ClusterBulk(self._client, first_url)
        else:
            self.transport = Bulk(self._links, timeout_s)

    @with_errors_mapped
    def find_missing(self, refs: Sequence[BlockRef]) -> list[BlockRef]:
        """See KVStore."""
        flags = self.transport.renew([ref.key for ref in refs], TTL_S)
        return [ref for ref, is_stored in zip(refs, flags, strict=True) if not is_stored]

    @with_errors_mapped
    def put(self, fingerprint: str, layout: KVLayout, records: Iterable[tuple[BlockRef, Record]]) -> int:
        """See KVStore."""
        items = ((ref.key, *encode(fingerprint, layout, ref, record)) for ref, record in records)
        return self.transport.put(items, TTL_S)

    @with_errors_mapped
    def read(self, kind: type[R], fingerprint: str, layout: KVLayout, refs: Sequence[BlockRef]) -> list[R]:
        """See KVStore."""
        with closing(self.transport.get([ref.key for ref in refs], TTL_S)) as values:
            return [
                DECODERS[kind](_present(value, ref), fingerprint, layout, ref)
                for ref, value in zip(refs, values, strict=True)
            ]

    def prepare(self) -> None:
        """See KVStore."""
        self.transport.prepare()

    @with_errors_mapped
    def delete(self, refs: Sequence[BlockRef]) -> None:
        """See KVStore."""
        if refs:
            self._unlink([ref.key for ref in refs])

    @with_errors_mapped
    def free_shared(self, size_bytes: int) -> int:
        """See `KVStore`. The remaining TTL shows how recently a record was used, since every use renews it.

        On a cluster, each primary frees an equal share, because each can fill up separately.
        """
        primaries = self._primaries()
        return sum(self._free_shared(target_options, -(-size_bytes // len(primaries))) for target_options in primaries)

    def _free_shared(self, primary_selector: Mapping[str, Any], size_bytes: int) -> int:
        freed_bytes = 0
        keys = self._least_recent_shared(primary_selector)
        for start in range(0, len(keys), DELETES_AT_ONCE):
            if freed_bytes >= size_bytes:
                break
            freed_bytes += self._unlink_until(keys[start : start + DELETES_AT_ONCE], size_bytes - freed_bytes)
        return freed_bytes

    def _least_recent_shared(self, target_options: Mapping[str, Any]) -> list[bytes]:
        shared_keys: dict[bytes, None] = {}
        for pattern in ("kv:*", "kvw:*"):
            keys = self._client.scan_iter(pattern, 1000, **target_options)
            shared_keys.update((key, None) for key in keys if is_shared(key.decode()))
        with self._client.pipeline(transaction=False) as pipeline:
            for key in shared_keys:
                pipeline.pttl(key)
            return [key for _, key in sorted(zip(pipeline.execute(), shared_keys, strict=True))]

    def _unlink_until(self, keys: Sequence[bytes], size_bytes: int) -> int:
        with self._client.pipeline(transaction=False) as pipeline:
            for key in keys:
                pipeline.strlen(key)
            sizes = pipeline.execute()
        sums = list(accumulate(sizes))
        count = next((number for number, total in enumerate(sums, 1) if total >= size_bytes), len(keys))
        self._unlink(keys[:count])
        return int(sums[count - 1])

    def _unlink(self, keys: Sequence[str | bytes]) -> None:
        """Delete keys. Their memory is freed outside of the server's main thread."""
        client: Any = self._client
        if isinstance(client, redis.Redis):
            client.unlink(*keys)
            return
        # redis-py would split one command with many keys into one command per slot, and wait for each answer before it
        # sends the next command.
        with client.pipeline(transaction=False) as pipeline:
            for key in keys:
                pipeline.unlink(key)
            pipeline.execute()

    @with_errors_mapped
    def usage(self) -> StoreUsage:
        """See `KVStore`. For a cluster, it is the usage of the fullest primary times the number of primaries.

        Records are spread evenly over slots, and the primary that fills up first is the first to refuse records.
        """
        memory_infos: list[Any] = [
            self._client.info("memory", **target_options) for target_options in self._primaries()
        ]
        usages = [StoreUsage(int(memory["used_memory"]), int(memory["maxmemory"])) for memory in memory_infos]
        fullest = max(usages, key=lambda usage: usage.used_bytes / (usage.max_bytes or inf))
        return StoreUsage(len(usages) * fullest.used_bytes, len(usages) * fullest.max_bytes)

    def _primaries(self) -> list[dict[str, Any]]:
        """Return the options that make redis-py ask each primary, one after the other."""
        client: Any = self._client
        return [{}] if isinstance(client, redis.Redis) else [{"target_nodes": node} for node in client.get_primaries()]

    def close(self) -> None:
        """See KVStore."""
        self._links.close()
        self.transport.close()
        self._client.close()


def _present(value: bytes | memoryview | None, ref: BlockRef) -> bytes | memoryview:
    if value is None:
        raise KVTransferFailed(f"the KV record at position {ref.start} ({ref.key}) is not in the store")
    return value


class Pipelines:
    """Transfers values through redis-py. It works with every URL that redis-py accepts, including TLS."""

    def __init__(self, client: Client) -> None:
        self._client = client

    def put(self, items: Iterable[Item], ttl_s: int) -> int:
        """See `Bulk`."""
        total = pending_bytes = 0
        with self._client.pipeline(transaction=False) as pipeline:
            for key, prefix, payload in items:
                pipeline.set(key, b"".join((prefix, payload)), ex=ttl_s)
                pending_bytes += len(prefix) + len(payload)
                if pending_bytes >= PIPELINE_BYTES:
                    _execute(pipeline)
                    total, pending_bytes = total + pending_bytes, 0
            _execute(pipeline)
        return total + pending_bytes

    def get(self, keys: Sequence[str], ttl_s: int) -> Generator[bytes | memoryview | None]:
        """See `Bulk`."""
        rest = iter(keys)
        while batch := list(islice(rest, GETS_AT_ONCE)):
            with self._client.pipeline(transaction=False) as pipeline:
                for key in batch:
                    pipeline.getex(key, ex=ttl_s)
                yield from _execute(pipeline)

    def renew(self, keys: Sequence[str], ttl_s: int) -> list[bool]:
        """See `Bulk`."""
        with self._client.pipeline(transaction=False) as pipeline:
            for key in keys:
                pipeline.expire(key, ttl_s)
            return [bool(reply) for reply in _execute(pipeline)]

    def prepare(self) -> None:
        """Do nothing, because redis-py allocates each value's memory."""

    def close(self) -> None:
        """Do nothing, because the client belongs to the store."""


def _execute(pipeline: Any) -> list[Any]:
    # With raise_on_error, redis-py would put the whole command, including the payload, into the error's text.
    try:
        replies: list[Any] = pipeline.execute(raise_on_error=False)
    except exceptions.SlotNotCoveredError:
        # redis-py renews the map of slots when a single command meets this error, but not for a pipeline.
        pipeline.nodes_manager.initialize()
        raise
    for reply in replies:
        if isinstance(reply, Exception):
            raise reply
    return replies
