"""A store and a cluster state to run the same test on: in memory, and in Redis."""

import dataclasses
import time
import uuid
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import pytest

from kvstore.base import ClusterState, KVStore
from kvstore.memory import MemoryClusterState, MemoryKVStore
from kvstore.redis.client import is_cluster, open_client
from kvstore.redis.cluster_state import RedisClusterState
from kvstore.redis.store import RedisKVStore

# redis-py: no sockets of our own.
KINDS = ("memory", "redis", "redis-py", "cluster", "cluster-redis-py")


class Room(ABC):
    """A KVStore and a ClusterState, with what a test needs to look behind them.

    `token` goes into every key that a test makes, by way of its fingerprint, job, worker and batch ids.
    """

    kv: KVStore
    cluster_state: ClusterState
    primaries = 1  # servers that fill and are emptied each by itself

    def __init__(self) -> None:
        self.token = uuid.uuid4().hex[:12]

    @abstractmethod
    def let_pass(self, seconds: float) -> None:
        """Everything of this test ages by `seconds`."""

    @abstractmethod
    def plant(self, key: str, value: bytes) -> None:
        """Put any bytes where a record is, or a registration would be, with a TTL."""

    @abstractmethod
    def raw(self, key: str) -> bytes:
        """The bytes under a key."""

    @abstractmethod
    def immortal(self) -> list[str]:
        """Keys without a TTL: there must never be one."""

    def close(self) -> None:
        """Leave nothing behind."""
        self.kv.close()
        self.cluster_state.close()


class MemoryRoom(Room):
    """In memory, with a clock that the test moves."""

    def __init__(self) -> None:
        super().__init__()
        self._elapsed = 0.0
        self.kv = self._kv = MemoryKVStore(clock=self._clock)
        self.cluster_state = self._cluster_state = MemoryClusterState(clock=self._clock)

    def let_pass(self, seconds: float) -> None:
        self._elapsed += seconds

    def plant(self, key: str, value: bytes) -> None:
        state, worker = self._cluster_state, key.removeprefix("card:{cards}:")
        if key.startswith("kv"):
            held = self._kv._held.get(key)
            assert held
            damaged = dataclasses.replace(held.record, data=np.frombuffer(value, np.uint8))
            self._kv._held.put(key, dataclasses.replace(held, record=damaged), 3600)
        else:
            values = state._values if worker == key else state._workers
            values.put(worker, value, 3600)

    def raw(self, key: str) -> bytes:
        held = self._kv._held.get(key)
        return held.record.data.tobytes() if held else b""

    def immortal(self) -> list[str]:
        return []  # Expiring has no entry without one

    def _clock(self) -> float:
        return time.monotonic() + self._elapsed


class RedisRoom(Room):
    """In the Redis of this run."""

    def __init__(self, url: str, bulk: bool) -> None:
        super().__init__()
        self._client: Any = open_client(url)
        self.kv = RedisKVStore(url, bulk=bulk)
        self.cluster_state = RedisClusterState(url)
        self.primaries = len(self._client.get_primaries()) if is_cluster(url) else 1

    def let_pass(self, seconds: float) -> None:
        for key in self._keys():
            self._client.pexpire(key, max(0, self._client.pttl(key) - round(seconds * 1000)))

    def plant(self, key: str, value: bytes) -> None:
        self._client.set(key, value, ex=3600)
        if key.startswith("card:"):
            self._client.zadd("cards", {key.removeprefix("card:{cards}:"): time.time() * 1000 + 3_600_000})
            self._client.expire("cards", 3600)

    def raw(self, key: str) -> bytes:
        return self._client.get(key) or b""

    def immortal(self) -> list[str]:
        return [key.decode() for key in self._client.scan_iter(count=1000) if self._client.pttl(key) == -1]

    def close(self) -> None:
        super().close()
        for key in self._keys():
            self._client.delete(key)
        self._client.close()

    def _keys(self) -> list[bytes]:
        return list(self._client.scan_iter(match=f"*{self.token}*", count=1000))


def open_room(kind: str, request: pytest.FixtureRequest) -> Room:
    """The room of one of KINDS."""
    if kind == "memory":
        return MemoryRoom()
    url = request.getfixturevalue("redis_cluster_url" if kind.startswith("cluster") else "store_url")
    return RedisRoom(url, bulk=not kind.endswith("redis-py"))
