"""KV caches as the matrix moves them: out of one engine, through the store as records, and held against another's."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from engines.family import family_fingerprint
from engines.registry import Engine
from kvstore.blocks import BlockRef, block_refs, window_ref
from kvstore.redis.store import RedisKVStore
from messages.kv import Array, Block, KVCache, KVLayout, Window, cast


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
        records: list[Block | Window] = [*cache.blocks, *([cache.window] if cache.window else [])]
        store.put(self.fingerprint, self.layout, zip(self._refs(name, tokens), records, strict=True))

    def get(self, store: RedisKVStore, name: str, tokens: Sequence[int]) -> KVCache:
        """Fetch it. Raises KVTransferFailed."""
        refs = self._refs(name, tokens)
        if not self.layout.window_layers:
            return KVCache(self.layout, tuple(store.get(self.fingerprint, self.layout, refs)))
        window = store.get_window(self.fingerprint, self.layout, refs[-1])
        return KVCache(self.layout, tuple(store.get(self.fingerprint, self.layout, refs[:-1])), window)

    def _refs(self, name: str, tokens: Sequence[int]) -> list[BlockRef]:
        """The blocks of all tokens but the last, and the window record if there is one."""
        job_id = f"{self.run}-{self.engine}-{name.replace(' ', '-')}"
        refs = block_refs(self.fingerprint, self.layout, tokens, len(tokens) - 1, 0, job_id)
        return [*refs, window_ref(refs[-1])] if self.layout.window_layers else refs


def prefilled(engine: Engine, tokens: Sequence[int]) -> KVCache:
    """The engine's own cache of all tokens but the last. Raises KVTransferFailed if it gives none out."""
    records: list[Block | Window] = []
    engine.prefill(tokens[:-1], records.append)
    assert engine.info.layout is not None
    blocks = tuple(record for record in records if isinstance(record, Block))
    windows = [record for record in records if isinstance(record, Window)]
    return KVCache(engine.info.layout, blocks, windows[-1] if windows else None)


def difference(one: KVCache, other: KVCache) -> float:
    """The largest between two numbers at the same place; of window records, in the rows that both have."""
    found = [_apart(a.data, b.data, one, other) for a, b in zip(one.blocks, other.blocks, strict=True)]
    if one.window and other.window:
        rows = min(one.window.data.shape[2], other.window.data.shape[2])
        found.append(_apart(one.window.data[:, :, -rows:], other.window.data[:, :, -rows:], one, other))
    return max(found)


def _apart(a: Array, b: Array, one: KVCache, other: KVCache) -> float:
    apart = cast(a, one.layout.dtype, "f32") - cast(b, other.layout.dtype, "f32")
    return float(np.abs(apart).max())
