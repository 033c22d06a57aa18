"""MLX's caches: what goes in comes out bit for bit, and what MLX appends comes out where it belongs."""

from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mlx_lm.models.cache import KVCache as PlainCache
from mlx_lm.models.cache import RotatingKVCache as RingCache

from engines.mlx import kv as mlx_kv
from messages.errors import KVTransferFailed
from messages.kv import Array, Block, DType, KVCache, KVLayout, Window, assemble_cache, cast, cut_into_blocks

DTYPES = st.sampled_from(["f16", "bf16", "f32"])
WINDOWS = st.sampled_from([0, 2, 5, 16])


def layout_of(kv_heads: int = 2, dtype: DType = "f32", window: int = 0, layers: int = 3) -> KVLayout:
    """Heads of four numbers; with a `window`, every second layer slides, and the last one doesn't."""
    return KVLayout(layers, kv_heads, 4, dtype, window, tuple(range(0, layers - 1, 2)) if window else ())


def empty_caches(layout: KVLayout) -> list[Any]:
    return [RingCache(layout.window) if i in layout.window_layers else PlainCache() for i in range(layout.num_layers)]


def numbers(seed: int, *shape: int) -> Array:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def cache_of(layout: KVLayout, history: Array, rows: int | None = None) -> KVCache:
    """The canonical cache of `history`: float32 of (layers, 2, tokens, kv_heads, head_dim)."""
    data, tokens = cast(history, "f32", layout.dtype), history.shape[2]
    blocks = tuple(cut_into_blocks(layout, [(data[i, 0], data[i, 1]) for i in layout.full_layers]))
    kept = min(tokens, layout.window if rows is None else rows)
    windowed = np.ascontiguousarray(data[list(layout.window_layers), :, tokens - kept :])
    return KVCache(layout, blocks, Window(tokens, windowed) if layout.window else None)


def append(caches: list[Any], layout: KVLayout, rows: Array) -> None:
    """Give each layer's cache new rows, as a model does: (layers, 2, tokens, kv_heads, head_dim)."""
    for cache, (keys, values) in zip(caches, cast(rows, "f32", layout.dtype), strict=True):
        cache.update_and_fetch(as_mlx(keys, layout), as_mlx(values, layout))


def as_mlx(rows: Array, layout: KVLayout) -> mx.array:
    array = mx.array(np.ascontiguousarray(rows.swapaxes(0, 1)[None]))
    return array.view(mx.bfloat16) if layout.dtype == "bf16" else array


def read_back(caches: list[Any], layout: KVLayout) -> KVCache:
    tokens = caches[layout.full_layers[0]].offset
    blocks = mlx_kv.to_blocks(mlx_kv.rows(caches, layout, 0, tokens), layout, 0)
    return assemble_cache(layout, [*blocks, *mlx_kv.snapshot(caches, layout, tokens)])


def bits(cache: KVCache) -> list[tuple[int, bytes]]:
    records: list[tuple[int, bytes]] = [(block.start, block.data.tobytes()) for block in cache.blocks]
    return records + ([(cache.window.position, cache.window.data.tobytes())] if cache.window else [])


@settings(deadline=None, max_examples=60)
@given(kv_heads=st.integers(1, 4), dtype=DTYPES, window=WINDOWS, tokens=st.integers(1, 70))
def test_a_cache_put_into_mlx_is_read_back_bit_for_bit(kv_heads: int, dtype: DType, window: int, tokens: int) -> None:
    # Given a cache of plain attention, of grouped heads, or of sliding windows
    layout = layout_of(kv_heads, dtype, window)
    cache = cache_of(layout, numbers(tokens, 3, 2, tokens, kv_heads, 4))
    caches = empty_caches(layout)
    # When it goes into MLX's caches
    mlx_kv.fill(caches, layout, cache)
    # Then nothing changed, and MLX knows how long the sequence is
    assert bits(read_back(caches, layout)) == bits(cache)
    assert {layer.offset for layer in caches} == {tokens}
    assert mlx_kv.observed_layout(caches) == layout


@pytest.mark.public_report("ml-explore/mlx-lm 1914")
@settings(deadline=None, max_examples=60)
@given(dtype=DTYPES, window=WINDOWS, steps=st.lists(st.sampled_from([1, 1, 1, 2, 7, 30]), min_size=1, max_size=24))
def test_what_mlx_appends_in_any_steps_comes_out_in_order(dtype: DType, window: int, steps: list[int]) -> None:
    # Given a history that MLX got in chunks and single tokens, its rings turning
    layout = layout_of(dtype=dtype, window=window)
    history = numbers(7, 3, 2, sum(steps), 2, 4)
    caches = empty_caches(layout)
    for end, step in zip(np.cumsum(steps), steps, strict=True):
        append(caches, layout, history[:, :, end - step : end])
    # Then the canonical cache is that of the history, its window's oldest row first
    assert bits(read_back(caches, layout)) == bits(cache_of(layout, history))


@settings(deadline=None, max_examples=60)
@given(
    window=st.sampled_from([2, 5, 16]),
    tokens=st.integers(1, 40),
    spare=st.sampled_from([-1, 0, 3]),
    steps=st.lists(st.sampled_from([1, 1, 2, 9]), min_size=1, max_size=6),
)
def test_mlx_goes_on_from_any_sufficient_window_as_if_it_had_computed_it(
    window: int, tokens: int, spare: int, steps: list[int]
) -> None:
    # Given a window record of one row less than the window, of just as many, or of more
    layout = layout_of(window=window)
    history = numbers(tokens, 3, 2, tokens + sum(steps), 2, 4)
    handed, own = empty_caches(layout), empty_caches(layout)
    mlx_kv.fill(handed, layout, cache_of(layout, history[:, :, :tokens], rows=window + spare))
    append(own, layout, history[:, :, :tokens])
    # When MLX goes on from it
    at = tokens
    for step in steps:
        append(handed, layout, history[:, :, at : at + step])
        append(own, layout, history[:, :, at : at + step])
        at += step
    # Then its caches hold what they would hold
    assert bits(read_back(handed, layout)) == bits(read_back(own, layout))


@given(source=DTYPES, target=DTYPES)
@settings(deadline=None)
def test_a_cast_on_the_way_in_is_the_canonical_one(source: DType, target: DType) -> None:
    # Given a cache in another dtype than the model's
    history = numbers(1, 3, 2, 40, 2, 4)
    given_cache = cache_of(layout_of(dtype=source, window=5), history)
    layout = layout_of(dtype=target, window=5)
    caches = empty_caches(layout)
    # When it goes in
    mlx_kv.fill(caches, layout, given_cache)
    # Then its numbers are those that messages.kv.cast gives
    read = read_back(caches, layout)
    expected = np.concatenate([cast(block.data, source, target) for block in given_cache.blocks], axis=2)
    assert np.concatenate([block.data for block in read.blocks], axis=2).tobytes() == expected.tobytes()
    assert given_cache.window is not None
    assert read.window is not None
    assert read.window.data.tobytes() == cast(given_cache.window.data, source, target).tobytes()


@pytest.mark.parametrize("wrong", [np.inf, np.nan, 1e6], ids=["inf", "nan", "too large for float16"])
def test_numbers_that_are_not_finite_in_the_models_dtype_are_refused(wrong: float) -> None:
    history = numbers(2, 3, 2, 9, 2, 4)
    history[1, 0, 4, 1, 2] = wrong
    data = np.ascontiguousarray(history)
    cache = KVCache(layout_of(), (Block(0, data),))
    with pytest.raises(KVTransferFailed, match="inf or nan"):
        mlx_kv.fill(empty_caches(layout_of()), layout_of(dtype="f16"), cache)


@pytest.mark.parametrize(
    "other",
    [layout_of(kv_heads=4), layout_of(layers=4), KVLayout(3, 2, 8, "f32"), layout_of(window=5)],
    ids=["heads", "layers", "head size", "window"],
)
def test_a_cache_of_another_layout_is_refused(other: KVLayout) -> None:
    cache = cache_of(other, numbers(3, other.num_layers, 2, 9, other.kv_heads, other.head_dim))
    with pytest.raises(KVTransferFailed, match="layout"):
        mlx_kv.fill(empty_caches(layout_of()), layout_of(), cache)


def test_read_only_blocks_can_be_put_in_and_blocks_read_back_own_their_memory() -> None:
    # Given blocks that lie in received bytes
    layout = layout_of()
    cache = cache_of(layout, numbers(5, 3, 2, 40, 2, 4))
    received = tuple(Block(b.start, np.frombuffer(b.data.tobytes(), "<f4").reshape(b.data.shape)) for b in cache.blocks)
    caches = empty_caches(layout)
    mlx_kv.fill(caches, layout, KVCache(layout, received))
    # When they are read back, and MLX then overwrites its own
    read = read_back(caches, layout)
    append(caches, layout, numbers(6, 3, 2, 300, 2, 4))
    mx.eval(mlx_kv.arrays(caches))
    # Then they have not changed
    assert bits(read) == bits(cache)
    assert all(block.data.flags.c_contiguous for block in read.blocks)


def test_layers_that_mlx_keeps_in_another_form_are_refused() -> None:
    quantized = PlainCache()
    quantized.update_and_fetch(mx.zeros((1, 2, 3, 64)), mx.zeros((1, 2, 3, 64)))
    with pytest.raises(KVTransferFailed, match="QuantizedKVCache"):
        mlx_kv.observed_layout([quantized.to_quantized()])
