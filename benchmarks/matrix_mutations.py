"""Ways to spoil a KV cache that an adapter between two engines might have, each of which has to be noticed."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np

from benchmarks import matrix_hybrid
from benchmarks.matrix_models import ROPE_THETA
from engines.llamacpp.slotfile import to_interleaved
from messages.kv import Array, KVCache, RecurrentState

FOREIGN = "one foreign block"
PERMUTED = "heads permuted"
OFF_BY_ONE = "positions off by one"
SHIFTED = "convolution shifted by one"


def spoiled(cache: KVCache, foreign: KVCache) -> dict[str, KVCache]:
    """The cache, wrong in each way; `foreign` is another prompt's, at least as long."""
    found = {name: _everywhere(cache, change) for name, change in _CHANGES.items()}
    if cache.layout.kv_heads == 1:  # there is nothing to permute
        del found[PERMUTED]
    rotated = matrix_hybrid.ROTATED if cache.states else 1.0
    found[OFF_BY_ONE] = _everywhere(cache, partial(_rotate_on, rotated=rotated))
    found |= {name: _states(cache, change) for name, change in _STATE_CHANGES.items() if cache.states}
    middle = len(cache.blocks) // 2
    blocks = (*cache.blocks[:middle], foreign.blocks[middle], *cache.blocks[middle + 1 :])
    shifted = {SHIFTED: replace(cache, states=_moved(cache))} if cache.states else {}
    return found | shifted | {FOREIGN: replace(cache, blocks=blocks)}


def _everywhere(cache: KVCache, change: Callable[[Array], Array]) -> KVCache:
    """Change all rows, (layers, 2, tokens, kv_heads, head_dim), those of sliding windows too."""
    blocks = tuple(replace(block, data=_like(block.data, change)) for block in cache.blocks)
    window = cache.window and replace(cache.window, data=_like(cache.window.data, change))
    return replace(cache, blocks=blocks, window=window)


def _states(cache: KVCache, change: Callable[[Array], Array]) -> KVCache:
    """Change the matrix of each recurrent layer, (heads, key size, value size)."""
    states = []
    for state in cache.states:
        columns, matrix = cache.layout.state_parts(state.data)
        states.append(replace(state, data=np.concatenate([columns.reshape(-1), _like(matrix, change).reshape(-1)])))
    return replace(cache, states=tuple(states))


def _moved(cache: KVCache) -> tuple[RecurrentState, ...]:
    """Convolutions that look back at columns of one position earlier; the oldest is seen twice."""
    states = []
    for state in cache.states:
        columns, matrix = cache.layout.state_parts(state.data)
        earlier = np.concatenate([columns[:, :1], columns[:, :-1]], axis=1)
        states.append(replace(state, data=np.concatenate([earlier.reshape(-1), matrix.reshape(-1)])))
    return tuple(states)


def _like(data: Array, change: Callable[[Array], Array]) -> Array:
    return np.ascontiguousarray(change(data.astype(np.float32))).astype(data.dtype)


def _swap(data: Array) -> Array:
    return data[:, ::-1]


def _permute_heads(data: Array) -> Array:
    return np.roll(data, 1, axis=3)


def _pair_neighbours(data: Array) -> Array:
    """Keys as if their rotated pairs were neighbours, for a reader who takes them for halves."""
    return np.stack([to_interleaved(data[:, 0]), data[:, 1]], axis=1)


def _rotate_on(data: Array, rotated: float) -> Array:
    """Keys rotated as those of the next position, in the part of them that is rotated at all."""
    size = int(data.shape[-1] * rotated)
    keys, half = data[:, 0, ..., :size], size // 2
    angle = ROPE_THETA ** (-np.arange(half, dtype=np.float32) / half)
    first, second = keys[..., :half], keys[..., half:]
    turned = [first * np.cos(angle) - second * np.sin(angle), second * np.cos(angle) + first * np.sin(angle)]
    return np.stack([np.concatenate([*turned, data[:, 0, ..., size:]], axis=-1), data[:, 1]], axis=1)


_CHANGES = {
    "K and V swapped": _swap,
    PERMUTED: _permute_heads,
    "wrong RoPE pairing": _pair_neighbours,
}
_STATE_CHANGES: dict[str, Callable[[Array], Array]] = {
    "state zeroed": np.zeros_like,
    "state transposed": lambda matrix: matrix.swapaxes(1, 2),
    "heads of the state permuted": lambda matrix: np.roll(matrix, 1, axis=0),
}
MUTATIONS = (*_CHANGES, OFF_BY_ONE, FOREIGN)
STATE_MUTATIONS = (*_STATE_CHANGES, SHIFTED)
