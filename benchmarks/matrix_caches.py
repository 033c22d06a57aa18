"""KV caches as the matrix moves them: out of one engine, through the store as records, and held against another's."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engines.family import family_fingerprint
from engines.registry import Engine
from kvstore.blocks import BlockRef, block_refs, snapshot_refs
from kvstore.redis.store import RedisKVStore
from messages.kv import Array, KVCache, KVLayout, Record, assemble_cache, cast


@dataclass(frozen=True, slots=True)
class CachePlace:
    """Where one engine's KV caches of one model's prompts lie in the store. `family`: the engines that may read it."""

    run: str
    model: str
    engine: str
    family: tuple[str, ...]
    layout: KVLayout

    @property
    def fingerprint(self) -> str:
        """What `same_weights` in a user's configuration would make of it."""
        return family_fingerprint(f"{self.run}-{self.model}", self.family, self.layout)

    def put(self, store: RedisKVStore, name: str, tokens: Sequence[int], cache: KVCache) -> None:
        """Store the cache of a prompt."""
        refs = self._refs(name, tokens)
        refs += snapshot_refs(self.layout, refs[-1])
        store.put(self.fingerprint, self.layout, zip(refs, cache.records, strict=True))

    def get(self, store: RedisKVStore, name: str, tokens: Sequence[int]) -> KVCache:
        """Fetch it. Raises KVTransferFailed."""
        return store.get_cache(self.fingerprint, self.layout, self._refs(name, tokens))

    def _refs(self, name: str, tokens: Sequence[int]) -> list[BlockRef]:
        """The blocks of all tokens but the last."""
        job_id = f"{self.run}-{self.engine}-{name.replace(' ', '-')}"
        return block_refs(self.fingerprint, self.layout, tokens, len(tokens) - 1, 0, job_id)


def prefilled(engine: Engine, tokens: Sequence[int]) -> KVCache:
    """The engine's own cache of all tokens but the last. Raises KVTransferFailed if it gives none out."""
    records: list[Record] = []
    engine.prefill(tokens[:-1], records.append)
    assert engine.info.layout is not None
    return assemble_cache(engine.info.layout, records)


def difference(one: KVCache, other: KVCache) -> float:
    """The largest between two numbers at the same place; of window records, in the rows that both have."""
    found = [_apart(a.data, b.data, one, other) for a, b in zip(one.blocks, other.blocks, strict=True)]
    if one.window and other.window:
        rows = min(one.window.data.shape[2], other.window.data.shape[2])
        found.append(_apart(one.window.data[:, :, -rows:], other.window.data[:, :, -rows:], one, other))
    found += [float(np.abs(a.data - b.data).max()) for a, b in zip(one.states, other.states, strict=True)]
    return max(found)


def _apart(a: Array, b: Array, one: KVCache, other: KVCache) -> float:
    apart = cast(a, one.layout.dtype, "f32") - cast(b, other.layout.dtype, "f32")
    return float(np.abs(apart).max())
