"""A transformers cache and canonical blocks hold the same numbers, whatever the shapes."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import DynamicCache

from engines.transformers.kv import TORCH_TYPES, Exporter, as_numpy, layout_of, restore
from messages.errors import KVTransferFailed
from messages.kv import KVCache, KVLayout, Window, assemble_cache, cast
from tests.support.kv_samples import layer_of

pytestmark = pytest.mark.torch

CPU = torch.device("cpu")
DTYPES = ("f16", "bf16", "f32")


def config_of(layout: KVLayout) -> Any:
    """A model configuration whose caches have this layout."""
    kinds = ["sliding_attention" if i in layout.window_layers else "full_attention" for i in range(layout.num_layers)]
    return transformers.Qwen2Config(
        num_hidden_layers=layout.num_layers,
        num_attention_heads=layout.kv_heads * 2,
        num_key_value_heads=layout.kv_heads,
        use_sliding_window=bool(layout.window),
        sliding_window=layout.window or None,
        layer_types=kinds,
    )


def new_cache(layout: KVLayout) -> DynamicCache:
    return DynamicCache(config=config_of(layout))


def feed(past: DynamicCache, layout: KVLayout, keys_and_values: torch.Tensor) -> None:
    """Append rows as a model does. `keys_and_values`: (layers, 2, kv_heads, tokens, head_dim)."""
    for index in range(layout.num_layers):
        past.update(keys_and_values[index, 0][None], keys_and_values[index, 1][None], index)


def random_rows(layout: KVLayout, num_tokens: int, seed: int) -> torch.Tensor:
    source = torch.Generator().manual_seed(seed)
    shape = (layout.num_layers, 2, layout.kv_heads, num_tokens, layout.head_dim)
    return torch.randn(shape, generator=source).to(TORCH_TYPES[layout.dtype])


def export(past: DynamicCache, layout: KVLayout) -> KVCache:
    exporter = Exporter(layout, CPU)
    blocks = exporter.blocks(past, layout.block_spans(past.get_seq_length()))
    return assemble_cache(layout, [*blocks.wait_for_blocks(), *exporter.snapshot(past)])


def restored(cache: KVCache, layout: KVLayout) -> DynamicCache:
    past = new_cache(layout)
    restore(past, cache, layout, CPU)
    return past


@st.composite
def layouts(draw: st.DrawFn) -> KVLayout:
    layers = draw(st.integers(1, 4))
    windowed = draw(st.sets(st.integers(0, layers - 1), max_size=layers - 1))
    return KVLayout(
        num_layers=layers,
        kv_heads=draw(st.integers(1, 3)),
        head_dim=draw(st.sampled_from((2, 8, 6))),
        dtype=draw(st.sampled_from(DTYPES)),
        window=draw(st.integers(2, 40)) if windowed else 0,
        window_layers=tuple(sorted(windowed)),
    )


each_layout = given(
    layout=layouts(), steps=st.lists(st.integers(1, 50), min_size=1, max_size=3), seed=st.integers(0, 99)
)
few = settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.too_slow])


@few
@each_layout
def test_blocks_hold_what_the_model_was_fed(layout: KVLayout, steps: list[int], seed: int) -> None:
    # Given a cache that grew in several steps
    rows = random_rows(layout, sum(steps), seed)
    past = new_cache(layout)
    for part in rows.split(steps, dim=3):
        feed(past, layout, part)
    # When it is exported
    cache = export(past, layout)
    # Then layer by layer, token by token, the rows are there, and a window's last ones
    assert (layout_of(past), cache.num_tokens) == (layout, sum(steps))
    expected = as_numpy(rows.transpose(2, 3).contiguous())
    for index in layout.full_layers:
        np.testing.assert_array_equal(np.stack(layer_of(cache, index)), expected[index])
    for row, index in enumerate(layout.window_layers):
        assert cache.window is not None
        kept = min(layout.window - 1, sum(steps))
        assert cache.window.position == sum(steps)
        np.testing.assert_array_equal(cache.window.data[row], expected[index, :, -kept:])


@few
@each_layout
def test_a_restored_cache_is_and_goes_on_as_the_one_that_was_exported(
    layout: KVLayout, steps: list[int], seed: int
) -> None:
    # Given a cache and its copy through canonical blocks
    rows = random_rows(layout, sum(steps) + 3, seed)
    past = new_cache(layout)
    feed(past, layout, rows[..., : sum(steps), :])
    copy = restored(export(past, layout), layout)
    # When both are fed on
    for cache in (past, copy):
        feed(cache, layout, rows[..., sum(steps) :, :])
    # Then they agree in rows, in length, and in what they tell the attention mask
    assert past.get_seq_length() == copy.get_seq_length() == sum(steps) + 3
    for index, (one, other) in enumerate(zip(past.layers, copy.layers, strict=True)):
        assert torch.equal(one.keys, other.keys)
        assert torch.equal(one.values, other.values)
        assert past.get_mask_sizes(1, index) == copy.get_mask_sizes(1, index)


@few
@given(layout=layouts(), num_tokens=st.integers(1, 60), target=st.sampled_from(DTYPES), seed=st.integers(0, 99))
def test_a_cache_of_another_dtype_is_cast_once(layout: KVLayout, num_tokens: int, target: Any, seed: int) -> None:
    past = new_cache(layout)
    feed(past, layout, random_rows(layout, num_tokens, seed))
    cache = export(past, layout)

    ours = export(restored(cache, replace(layout, dtype=target)), replace(layout, dtype=target))

    for index in layout.full_layers:
        for theirs, cast_here in zip(layer_of(cache, index), layer_of(ours, index), strict=True):
            np.testing.assert_array_equal(cast(theirs, layout.dtype, target), cast_here)


@few
@each_layout
def test_blocks_exported_in_chunks_are_those_exported_at_once(layout: KVLayout, steps: list[int], seed: int) -> None:
    rows = random_rows(layout, sum(steps), seed)
    past, exporter = new_cache(layout), Exporter(layout, CPU)
    spans = layout.block_spans(sum(steps))
    chunked = []
    for part in rows.split(steps, dim=3):
        feed(past, layout, part)
        ready = [span for span in spans[len(chunked) :] if span[1] <= past.get_seq_length()]
        chunked += exporter.blocks(past, ready).wait_for_blocks()

    whole = list(exporter.blocks(past, spans).wait_for_blocks())

    assert [block.start for block in chunked] == [block.start for block in whole]
    for one, other in zip(chunked, whole, strict=True):
        np.testing.assert_array_equal(one.data, other.data)


LAYOUT = KVLayout(num_layers=2, kv_heads=2, head_dim=4, dtype="f32", window=8, window_layers=(0,))


@pytest.fixture
def cache() -> KVCache:
    past = new_cache(LAYOUT)
    feed(past, LAYOUT, random_rows(LAYOUT, 40, seed=1))
    return export(past, LAYOUT)


def test_an_exported_block_stays_as_it_is_while_the_model_goes_on(cache: KVCache) -> None:
    past = restored(cache, LAYOUT)
    blocks = list(Exporter(LAYOUT, CPU).blocks(past, LAYOUT.block_spans(40)).wait_for_blocks())
    before = [block.data.copy() for block in blocks]

    feed(past, LAYOUT, random_rows(LAYOUT, 5, seed=2))
    for layer in past.layers:
        layer.keys.zero_()

    for block, expected in zip(blocks, before, strict=True):
        np.testing.assert_array_equal(block.data, expected)


@pytest.mark.parametrize("change", [{"kv_heads": 1}, {"head_dim": 8}, {"num_layers": 3}, {"window": 9}])
def test_a_cache_of_other_shapes_is_refused(cache: KVCache, change: dict[str, int]) -> None:
    with pytest.raises(KVTransferFailed, match="layout"):
        restored(cache, replace(LAYOUT, **change))  # type: ignore[arg-type]


@pytest.mark.parametrize("spoilt", [np.nan, np.inf])
def test_a_cache_with_a_value_that_is_no_number_is_refused(cache: KVCache, spoilt: float) -> None:
    cache.blocks[1].data[0, 1, 2, 1, 3] = spoilt
    with pytest.raises(KVTransferFailed, match="inf or nan"):
        restored(cache, LAYOUT)


def test_a_value_too_large_for_the_models_dtype_is_refused(cache: KVCache) -> None:
    cache.blocks[0].data[0, 0, 0, 0, 0] = 1e6
    with pytest.raises(KVTransferFailed, match="inf or nan after the cast"):
        restored(cache, replace(LAYOUT, dtype="f16"))


def test_more_rows_of_a_window_than_are_needed_are_welcome(cache: KVCache) -> None:
    assert cache.window is not None
    data = cache.window.data
    long = np.concatenate([data[:, :, :3], data], axis=2)

    from_long = export(restored(replace(cache, window=Window(40, long)), LAYOUT), LAYOUT)
    assert from_long.window is not None
    np.testing.assert_array_equal(from_long.window.data, data)


def test_read_only_blocks_are_taken(cache: KVCache) -> None:
    for block in cache.blocks:
        block.data.flags.writeable = False
    np.testing.assert_array_equal(export(restored(cache, LAYOUT), LAYOUT).blocks[0].data, cache.blocks[0].data)


def test_layers_of_different_sizes_have_no_layout() -> None:
    past = DynamicCache()
    past.update(torch.zeros(1, 2, 5, 8), torch.zeros(1, 2, 5, 8), 0)
    past.update(torch.zeros(1, 1, 5, 8), torch.zeros(1, 1, 5, 8), 1)
    with pytest.raises(KVTransferFailed, match="differ in size"):
        layout_of(past)


def test_keys_and_values_of_different_sizes_have_no_layout() -> None:
    past = DynamicCache()
    past.update(torch.zeros(1, 2, 5, 8), torch.zeros(1, 2, 5, 4), 0)
    with pytest.raises(KVTransferFailed, match="the same shape"):
        layout_of(past)
