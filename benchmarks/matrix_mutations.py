"""Ways to spoil a KV cache that an adapter between two engines might have, each of which has to be noticed."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from benchmarks.matrix_models import ROPE_THETA
from engines.llamacpp.slotfile import to_interleaved
from messages.kv import Array, KVCache

FOREIGN = "one foreign block"


def spoiled(cache: KVCache, foreign: KVCache) -> dict[str, KVCache]:
    """The cache, wrong in each way; `foreign` is another prompt's, at least as long."""
    found = {name: _everywhere(cache, change) for name, change in _CHANGES.items()}
    middle = len(cache.blocks) // 2
    blocks = (*cache.blocks[:middle], foreign.blocks[middle], *cache.blocks[middle + 1 :])
    return found | {FOREIGN: replace(cache, blocks=blocks)}


def _everywhere(cache: KVCache, change: Callable[[Array], Array]) -> KVCache:
    """Change all rows, (layers, 2, tokens, kv_heads, head_dim), those of sliding windows too."""
    blocks = tuple(replace(block, data=_like(block.data, change)) for block in cache.blocks)
    window = cache.window and replace(cache.window, data=_like(cache.window.data, change))
    return replace(cache, blocks=blocks, window=window)


def _like(data: Array, change: Callable[[Array], Array]) -> Array:
    return np.ascontiguousarray(change(data.astype(np.float32))).astype(data.dtype)


def _swap(data: Array) -> Array:
    return data[:, ::-1]


def _permute_heads(data: Array) -> Array:
    return np.roll(data, 1, axis=3)


def _pair_neighbours(data: Array) -> Array:
    """Keys as if their rotated pairs were neighbours, for a reader who takes them for halves."""
    return np.stack([to_interleaved(data[:, 0]), data[:, 1]], axis=1)


def _rotate_on(data: Array) -> Array:
    """Keys rotated as those of the next position."""
    keys, half = data[:, 0], data.shape[-1] // 2
    angle = ROPE_THETA ** (-np.arange(half, dtype=np.float32) / half)
    first, second = keys[..., :half], keys[..., half:]
    turned = [first * np.cos(angle) - second * np.sin(angle), second * np.cos(angle) + first * np.sin(angle)]
    return np.stack([np.concatenate(turned, axis=-1), data[:, 1]], axis=1)


_CHANGES = {
    "K and V swapped": _swap,
    "heads permuted": _permute_heads,
    "wrong RoPE pairing": _pair_neighbours,
    "positions off by one": _rotate_on,
}
MUTATIONS = (*_CHANGES, FOREIGN)
