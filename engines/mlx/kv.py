"""Canonical KV caches to mlx-lm's cache objects and back: reshapes and casts, nothing else.

mlx-lm keeps K and V of a layer as (1, kv_heads, tokens, head_dim), after RoPE in halves. The attributes are read and
set directly, because the objects' own `state` differs between releases, and buffers are cut to what is in use: they
are allocated in steps of 256 tokens. A sliding-window layer is a RotatingKVCache: a ring of at most `max_size` rows,
of which `_idx` is the next to be written, and `offset` the true length of the sequence. A Gated DeltaNet layer is an
ArraysCache of its convolution's columns, (1, columns, channels), and its matrix, (1, heads, value size, key size).
"""

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm.models.cache import ArraysCache
from mlx_lm.models.cache import KVCache as PlainCache
from mlx_lm.models.cache import RotatingKVCache as RingCache

from messages.errors import KVTransferFailed
from messages.kv import Array, Block, DType, KVCache, KVLayout, Record, RecurrentState, Window

_TYPES: dict[DType, mx.Dtype] = {"f16": mx.float16, "bf16": mx.bfloat16, "f32": mx.float32}

# One layer's keys, values and offset, and the index of the next row in its ring buffer. For a recurrent layer, these
# are columns, matrix, 0 and 0.
CacheState = tuple[mx.array, mx.array, int, int]
Rows = mx.array  # of the shape (layers, 2, tokens, kv_heads, head_dim)


def observed_layout(caches: Sequence[Any]) -> KVLayout:
    """The layout of a model's own caches, once it has seen some tokens. Raises KVTransferFailed for another kind."""
    for cache in caches:
        is_supported = type(cache) in (PlainCache, RingCache, ArraysCache)
        if not is_supported or (type(cache) is RingCache and cache.keep):
            raise KVTransferFailed(f"MLX keeps a layer as {type(cache).__name__}, which Kvasir can't transfer")
    attending = [cache for cache in caches if type(cache) is not ArraysCache]
    forms = {(cache.keys.shape[1], cache.keys.shape[3], cache.keys.dtype) for cache in attending}
    forms |= {(cache.values.shape[1], cache.values.shape[3], cache.values.dtype) for cache in attending}
    windows = {cache.max_size for cache in caches if type(cache) is RingCache}
    states = {_state_shapes(cache) for cache in caches if type(cache) is ArraysCache}
    if len(forms) != 1 or len(windows) > 1 or len(states) > 1:
        raise KVTransferFailed("the model's layers have keys, values, windows or states of different sizes")
    if all(type(cache) is RingCache for cache in attending):
        raise KVTransferFailed(
            "every attention layer has a sliding window, so Kvasir would have no KV blocks to transfer"
        )
    kv_heads, head_dim, dtype = forms.pop()
    names = [name for name, mlx_type in _TYPES.items() if mlx_type == dtype]
    if not names:
        raise KVTransferFailed(f"MLX keeps keys and values as {dtype}, which Kvasir can't transfer")
    window_layers = tuple(index for index, cache in enumerate(caches) if type(cache) is RingCache)
    plain = KVLayout(len(caches), kv_heads, head_dim, names[0], windows.pop() if windows else 0, window_layers)
    for columns, matrix in states:
        recurrent = tuple(index for index, cache in enumerate(caches) if type(cache) is ArraysCache)
        return replace(plain, recurrent_layers=recurrent, conv_shape=columns, matrix_shape=matrix)
    return plain


def fill(caches: Sequence[Any], layout: KVLayout, cache: KVCache) -> None:
    """Put `cache` into a model's new, empty `caches`, cast to the model's dtype.

    Raises KVTransferFailed if it is of another layout, or a value is inf or nan.
    """
    cache.require_layout(layout)
    if not cache.blocks:
        return
    source, target = cache.layout.dtype, _TYPES[layout.dtype]
    whole = mx.concatenate([_to_mlx(block.data, source) for block in cache.blocks], axis=2).astype(target)
    pairs = [_set(caches[index], whole[row], cache.num_tokens) for row, index in enumerate(layout.full_layers)]
    if cache.window is not None:
        ring = _ring_rows(_to_mlx(cache.window.data, source).astype(target), layout, cache.num_tokens)
        pairs += [_set(caches[index], ring[row], cache.num_tokens) for row, index in enumerate(layout.window_layers)]
    for state in cache.states:
        columns, matrix = (mx.array(part) for part in layout.state_parts(state.data))
        # These are copies, because a transposed view would keep the whole record in memory.
        pair = mx.contiguous(columns.T[None].astype(target)), mx.contiguous(matrix.swapaxes(1, 2)[None])
        caches[state.layer].cache = list(pair)
        pairs.append(pair)
    finite = mx.stack([mx.isfinite(part).all() for pair in pairs for part in pair]).all()
    mx.eval(finite, pairs)
    if not finite.item():
        raise KVTransferFailed(f"the KV cache holds inf or nan after the cast from {source} to {layout.dtype}")


def rows(caches: Sequence[Any], layout: KVLayout, start: int, end: int) -> Rows:
    """Positions [start, end) of the full-attention layers, in canonical order of axes; not evaluated yet."""
    layers = [caches[index] for index in layout.full_layers]
    parts = [mx.stack([c.keys[0, :, start:end], c.values[0, :, start:end]]) for c in layers]
    return _to_numpy_type(mx.contiguous(mx.stack(parts).swapaxes(2, 3)), layout.dtype)


def to_blocks(rows: Rows, layout: KVLayout, start: int) -> list[Block]:
    """Evaluated rows from position `start`, a multiple of `layout.block_tokens`, as blocks with memory of their own."""
    data = np.asarray(rows).view(layout.numpy_type)
    return [Block(start + a, np.array(data[:, :, a:b], order="C")) for a, b in layout.block_spans(data.shape[2])]


def snapshot(caches: Sequence[Any], layout: KVLayout, position: int) -> list[Record]:
    """After `position` tokens: the sliding-window layers' last rows, at most `layout.window` of them, in temporal
    order; then the states of the recurrent layers.
    """
    records: list[Record] = []
    if layout.window_layers:
        rings = [caches[index] for index in layout.window_layers]
        parts = [mx.stack([_in_order(ring, ring.keys, layout), _in_order(ring, ring.values, layout)]) for ring in rings]
        data = _to_numpy_type(mx.contiguous(mx.stack(parts).swapaxes(2, 3)), layout.dtype)
        records.append(Window(position, np.array(np.asarray(data).view(layout.numpy_type), order="C")))
    for index in layout.state_layers:
        columns, matrix = caches[index].cache
        state_parts = (columns[0].T, matrix[0].swapaxes(1, 2))
        numbers = mx.concatenate([part.astype(mx.float32).reshape(-1) for part in state_parts])
        records.append(RecurrentState(position, index, np.array(numbers)))
    return records


def arrays(caches: Sequence[Any]) -> list[mx.array]:
    """The arrays that make up a model's caches, to evaluate them."""
    return [array for cache in caches for array in _state(cache)]


def states(caches: Sequence[Any]) -> list[CacheState]:
    """The contents of filled caches, to be put into others."""
    return [
        (mx.array(cache.cache[0]), mx.array(cache.cache[1]), 0, 0)
        if type(cache) is ArraysCache
        else (mx.array(cache.keys), mx.array(cache.values), cache.offset, getattr(cache, "_idx", 0))
        for cache in caches
    ]


def set_states(caches: Sequence[Any], cache_states: Sequence[CacheState]) -> None:
    """Put into new, empty caches what others held. Nothing is copied: later writes make new arrays."""
    for cache, (keys, values, offset, index) in zip(caches, cache_states, strict=True):
        if type(cache) is ArraysCache:
            cache.cache = [mx.array(keys), mx.array(values)]
            continue
        cache.keys, cache.values, cache.offset = mx.array(keys), mx.array(values), offset
        if type(cache) is RingCache:
            cache._idx = index


def _state_shapes(cache: Any) -> tuple[tuple[int, ...], tuple[int, ...]]:
    parts = cache.cache
    if len(parts) != 2 or any(part is None for part in parts) or (parts[0].ndim, parts[1].ndim) != (3, 4):
        raise KVTransferFailed("MLX keeps a recurrent state in an unknown form")
    num_columns, channels = parts[0].shape[1:]
    heads, value_size, key_size = parts[1].shape[1:]
    return (channels, num_columns), (heads, key_size, value_size)


def _state(cache: Any) -> list[mx.array]:
    if hasattr(cache, "caches"):
        return arrays(cache.caches)
    stored_arrays = (cache.keys, cache.values) if hasattr(cache, "keys") else cache.cache
    return [array for array in stored_arrays if array is not None]


def _set(cache: Any, pair: mx.array, num_tokens: int) -> tuple[mx.array, mx.array]:
    """Set one layer's cache from (2, rows, kv_heads, head_dim)."""
    cache.keys, cache.values = (mx.contiguous(part.swapaxes(0, 1)[None]) for part in (pair[0], pair[1]))
    cache.offset = num_tokens
    if type(cache) is RingCache:
        cache._idx = cache.keys.shape[2]
    return cache.keys, cache.values


def _ring_rows(data: mx.array, layout: KVLayout, num_tokens: int) -> mx.array:
    """As many rows as a ring has after `num_tokens`.

    A record may hold one row less than the window. The ring's oldest row is overwritten before anything looks at it,
    so zeros do in its place.
    """
    ring_size, num_rows = min(layout.window, num_tokens), data.shape[2]
    if num_rows < ring_size:
        return mx.pad(data, [(0, 0), (0, 0), (ring_size - num_rows, 0), (0, 0), (0, 0)])
    return data[:, :, num_rows - ring_size :]


def _in_order(ring: Any, buffer: mx.array, layout: KVLayout) -> mx.array:
    """(kv_heads, rows, head_dim), oldest row first."""
    size, next_row = buffer.shape[2], ring._idx
    filled_rows = buffer if size >= ring.max_size or next_row == size else buffer[:, :, :next_row]
    sorted_rows = (
        filled_rows
        if next_row >= filled_rows.shape[2]
        else mx.concatenate([filled_rows[:, :, next_row:], filled_rows[:, :, :next_row]], axis=2)
    )
    keep = min(layout.window, ring.offset)
    return sorted_rows[0, :, sorted_rows.shape[2] - keep :]


def _to_mlx(data: Array, dtype: DType) -> mx.array:
    array = mx.array(np.ascontiguousarray(data))
    return array.view(mx.bfloat16) if dtype == "bf16" else array


def _to_numpy_type(data: mx.array, dtype: DType) -> mx.array:
    """In a type that NumPy knows: bfloat16 as its bit pattern."""
    return data.view(mx.uint16) if dtype == "bf16" else data
