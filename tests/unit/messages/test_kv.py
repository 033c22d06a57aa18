"""The canonical KV cache: cutting, joining and casting lose nothing and invent nothing."""

import dataclasses
import math

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from messages.errors import InvalidMessage, KVTransferFailed
from messages.kv import (
    MAX_BLOCK_BYTES,
    MAX_BLOCK_TOKENS,
    NUMPY_TYPES,
    Array,
    Block,
    DType,
    KVCache,
    KVLayout,
    RecurrentState,
    Window,
    assemble_cache,
    cast,
    cut_into_blocks,
    is_finite,
)
from tests.support.kv_samples import hybrid, layer_of, layout

dtypes: st.SearchStrategy[DType] = st.sampled_from(["f16", "bf16", "f32"])
small_layouts = st.builds(KVLayout, st.integers(1, 3), st.integers(1, 3), st.integers(1, 6), dtypes)
any_layouts = st.builds(KVLayout, st.integers(1, 1024), st.integers(1, 1024), st.integers(1, 4096), dtypes)


def _layers(lay: KVLayout, num_tokens: int) -> list[tuple[Array, Array]]:
    shape = (num_tokens, lay.kv_heads, lay.head_dim)
    values = np.arange(2 * len(lay.full_layers) * math.prod(shape)) % 2039
    arrays = values.astype(lay.numpy_type).reshape(-1, 2, *shape)
    return [(keys, values) for keys, values in arrays]


def test_each_layer_has_one_kind_and_those_that_attend_to_all_are_full() -> None:
    lay = KVLayout(6, 2, 64, "f16", window=8, window_layers=(1,), recurrent_layers=(0, 3), both_layers=(4,))

    assert lay.full_layers == (2, 4, 5)
    for twice in ({"window_layers": (0,)}, {"both_layers": (3,)}, {"recurrent_layers": (0, 0)}):
        with pytest.raises(InvalidMessage, match="only once"):
            dataclasses.replace(lay, **twice)  # type: ignore[arg-type]
    for outside in ({"recurrent_layers": (6,)}, {"both_layers": (-1,)}, {"v_head_dim": 5000}, {"v_head_dim": True}):
        with pytest.raises(InvalidMessage, match="must be a whole number"):
            dataclasses.replace(lay, **outside)  # type: ignore[arg-type]


def test_the_widths_of_k_and_v_may_differ_and_count_by_themselves() -> None:
    assert KVLayout(2, 3, 64, "f16").token_bytes == 2 * 3 * (64 + 64) * 2
    assert KVLayout(2, 3, 64, "f16", v_head_dim=64).token_bytes == 2 * 3 * (64 + 64) * 2
    assert KVLayout(2, 3, 64, "f16", v_head_dim=32).token_bytes == 2 * 3 * (64 + 32) * 2
    assert KVLayout(2, 1, 576, "f16", v_head_dim=0).token_bytes == 2 * 576 * 2


def test_what_can_not_be_transferred_yet_is_told_in_a_sentence() -> None:
    plain = KVLayout(4, 2, 64, "f16", window=8, window_layers=(1,))

    assert plain.why_unsupported == dataclasses.replace(plain, v_head_dim=64).why_unsupported == ""
    assert "recurrent state" in dataclasses.replace(plain, recurrent_layers=(0,)).why_unsupported
    assert "recurrent state" in dataclasses.replace(plain, both_layers=(0,)).why_unsupported
    assert "K is 64 wide and V 0" in dataclasses.replace(plain, v_head_dim=0).why_unsupported


@given(any_layouts)
def test_a_block_is_the_largest_power_of_two_of_tokens_that_fits(lay: KVLayout) -> None:
    tokens = lay.block_tokens

    assert tokens in (1, 2, 4, 8, 16, 32)
    assert tokens == 1 or tokens * lay.token_bytes <= MAX_BLOCK_BYTES
    assert tokens == MAX_BLOCK_TOKENS or 2 * tokens * lay.token_bytes > MAX_BLOCK_BYTES


@given(any_layouts, st.integers(0, 500))
def test_spans_cover_every_token_once_and_only_the_last_is_short(lay: KVLayout, num_tokens: int) -> None:
    spans = lay.block_spans(num_tokens)

    assert [p for start, end in spans for p in range(start, end)] == list(range(num_tokens))
    assert all(end - start == lay.block_tokens for start, end in spans[:-1])
    assert all(0 < end - start <= lay.block_tokens for start, end in spans)


@given(small_layouts, st.integers(1, 100))
def test_a_cut_cache_gives_its_layers_back(lay: KVLayout, num_tokens: int) -> None:
    layers = _layers(lay, num_tokens)

    cache = KVCache(lay, tuple(cut_into_blocks(lay, layers)))

    assert cache.num_tokens == num_tokens
    for index, (keys, values) in enumerate(layers):
        got_keys, got_values = layer_of(cache, index)
        np.testing.assert_array_equal(got_keys, keys)
        np.testing.assert_array_equal(got_values, values)


def test_layers_are_asked_for_by_their_number_in_the_model() -> None:
    lay = layout(window=16)  # layers 1 and 3 slide
    layers = _layers(lay, 40)
    state = Window(40, np.zeros((2, 2, 15, 2, 8), lay.numpy_type))

    cache = KVCache(lay, tuple(cut_into_blocks(lay, layers)), state)

    np.testing.assert_array_equal(layer_of(cache, 2)[0], layers[1][0])
    with pytest.raises(ValueError, match="not in"):
        layer_of(cache, 1)


@given(st.integers(1, 100), st.integers(0, 120))
def test_blocks_that_end_before_the_first_wanted_position_are_skipped(num_tokens: int, first: int) -> None:
    lay = layout()
    blocks = list(cut_into_blocks(lay, _layers(lay, num_tokens)))

    later = list(cut_into_blocks(lay, _layers(lay, num_tokens), first))

    assert [block.start for block in later] == [block.start for block in blocks if block.end > first]


def test_cut_blocks_do_not_follow_later_changes_of_the_source() -> None:
    lay = layout()
    layers = _layers(lay, 3)
    (block,) = cut_into_blocks(lay, layers)
    before = block.data.copy()

    layers[0][0][:] = 0

    np.testing.assert_array_equal(block.data, before)


def test_a_cache_with_a_gap_a_wrong_shape_or_dtype_is_refused() -> None:
    lay = layout()
    whole = np.zeros(lay.block_shape(32), lay.numpy_type)

    for blocks, reason in (
        ([Block(32, whole)], "a KV block must begin at position 0, not 32"),
        ([Block(0, whole), Block(31, whole)], "a KV block must begin at position 32, not 31"),
        ([Block(0, whole[:-1])], "a KV block has shape"),
        ([Block(0, whole.astype(np.float32))], "a KV block has dtype float32, not f16"),
    ):
        with pytest.raises(KVTransferFailed, match=reason):
            KVCache(lay, tuple(blocks))


def test_a_sliding_cache_needs_its_window_where_it_ends() -> None:
    lay = layout(window=16)
    block = Block(0, np.zeros(lay.block_shape(20), lay.numpy_type))
    rows = np.zeros((2, 2, 15, 2, 8), lay.numpy_type)

    assert KVCache(lay, (block,), Window(20, rows)).num_tokens == 20
    for state in (None, Window(19, rows)):
        with pytest.raises(KVTransferFailed, match="no window record at position 20"):
            KVCache(lay, (block,), state)


def test_a_window_of_another_shape_or_with_too_few_rows_is_refused() -> None:
    lay = layout(window=16)
    block = Block(0, np.zeros(lay.block_shape(20), lay.numpy_type))
    rows = np.zeros((2, 2, 15, 2, 8), lay.numpy_type)

    for data in (rows[:1], rows[..., :4], rows.astype(np.float32)):
        with pytest.raises(KVTransferFailed, match="the window record has the wrong dtype or shape"):
            KVCache(lay, (block,), Window(20, data))
    with pytest.raises(KVTransferFailed, match="the window record has 14 rows, but needs 15"):
        KVCache(lay, (block,), Window(20, rows[:, :, 1:]))
    # And a model without such layers has no record of them
    plain = layout()
    with pytest.raises(KVTransferFailed, match="the window record has the wrong dtype or shape"):
        KVCache(plain, (Block(0, np.zeros(plain.block_shape(20), plain.numpy_type)),), Window(20, rows))


def test_what_a_window_looks_back_at_is_its_last_rows() -> None:
    lay = layout(window=16)
    rows = np.arange(2 * 2 * 18 * 2 * 8).reshape(2, 2, 18, 2, 8).astype(lay.numpy_type)

    def cache_of(tokens: int) -> KVCache:
        block = Block(0, np.zeros(lay.block_shape(tokens), lay.numpy_type))
        return KVCache(lay, (block,), Window(tokens, rows))

    np.testing.assert_array_equal(cache_of(20).window_rows, rows[:, :, 3:])
    np.testing.assert_array_equal(cache_of(4).window_rows, rows[:, :, 14:])


def test_a_hybrid_cache_needs_the_state_of_each_recurrent_layer_where_it_ends() -> None:
    lay = hybrid("bf16")
    block = Block(0, np.zeros(lay.block_shape(20), lay.numpy_type))
    whole = tuple(RecurrentState(20, layer, np.zeros(lay.state_size, np.float32)) for layer in (0, 1, 2))

    assert KVCache(lay, (block,), states=whole).num_tokens == 20
    assert assemble_cache(lay, [block, *whole]).records == [block, *whole]
    elsewhere = dataclasses.replace(whole[1], position=19)
    for states in ((), whole[:2], whole[::-1], (*whole, whole[0]), (whole[0], elsewhere, whole[2])):
        with pytest.raises(KVTransferFailed, match="each recurrent layer must have exactly one state, at position 20"):
            KVCache(lay, (block,), states=states)
    for data in (whole[1].data[:-1], whole[1].data.astype("<f2")):
        with pytest.raises(KVTransferFailed, match="a recurrent state must have"):
            KVCache(lay, (block,), states=(whole[0], RecurrentState(20, 1, data), whole[2]))


def test_a_cache_fits_models_of_its_layout_whatever_their_dtype() -> None:
    lay = layout()
    cache = KVCache(lay, (Block(0, np.zeros(lay.block_shape(20), lay.numpy_type)),))

    cache.require_layout(dataclasses.replace(lay, dtype="f32"))
    with pytest.raises(KVTransferFailed, match="has the layout"):
        cache.require_layout(dataclasses.replace(lay, num_layers=lay.num_layers + 1))


def test_a_cache_leaves_a_prompt_s_last_token_unless_none_has_to_be_left() -> None:
    lay = layout()
    cache = KVCache(lay, (Block(0, np.zeros(lay.block_shape(20), lay.numpy_type)),))

    cache.require_part_of(21)
    cache.require_part_of(20, min_evaluated=0)
    with pytest.raises(KVTransferFailed, match="covers 20 of the prompt's 20 tokens: none is left"):
        cache.require_part_of(20)
    with pytest.raises(KVTransferFailed, match=r"covers 20 of the prompt's 19 tokens$"):
        cache.require_part_of(19, min_evaluated=0)


def test_a_state_is_its_convolution_and_then_its_matrix() -> None:
    lay = hybrid()
    columns, matrix = lay.state_parts(np.arange(lay.state_size, dtype=np.float32))

    assert (columns.shape, matrix.shape) == ((24, 3), (2, 4, 8))
    assert (columns[0, 1], matrix[0, 0, 0]) == (1, 72)
    assert lay.state_bytes == 3 * lay.state_size * 4 == 3 * 136 * 4
    alone = dataclasses.replace(lay, matrix_shape=())
    assert alone.state_parts(np.zeros(alone.state_size, np.float32))[1].size == 0
    assert "more than 4 MiB" in dataclasses.replace(lay, matrix_shape=(32, 256, 256)).why_unsupported


@pytest.mark.parametrize(
    "fields",
    [
        {"conv_shape": (8, 3)},
        {"recurrent_layers": (0,), "conv_shape": (8,)},
        {"recurrent_layers": (0,), "conv_shape": (8, 0)},
        {"recurrent_layers": (0,), "conv_shape": (8, 3), "matrix_shape": (8, 3)},
        {"num_layers": 0},
        {"kv_heads": 0},
        {"head_dim": 0},
        {"dtype": "f8"},
        {"window": 16},
        {"window_layers": (0,)},
        {"window": 16, "window_layers": (2,)},
        {"window": 16, "window_layers": (0, 0)},
    ],
)
def test_layouts_that_mean_nothing_are_refused(fields: dict[str, object]) -> None:
    with pytest.raises(InvalidMessage):
        KVLayout(**({"num_layers": 2, "kv_heads": 1, "head_dim": 8, "dtype": "f16"} | fields))


finite_f32 = st.floats(width=32, allow_nan=False, allow_infinity=False)


def _nearest_bf16(value: float) -> int:
    """The pattern of the bfloat16 nearest to a float32, ties to even, found by measuring distances exactly."""
    low = int(np.float32(value).view(np.uint32)) >> 16  # towards zero
    down, up = (float(np.uint32(pattern << 16).view(np.float32)) for pattern in (low, low + 1))
    if math.isinf(up):  # where the next pattern would be, if the exponent had one more bit
        up = math.copysign(2.0**128, down)
    below, above = abs(value - down), abs(up - value)
    return low if below < above or (below == above and low % 2 == 0) else low + 1


@given(st.lists(finite_f32, min_size=1, max_size=20))
@example([0.0, -0.0])
@example([1.00390625, 1.01171875])  # halfway: down to even, up to even
@example([1e-45, -1e-45])  # subnormal
@example([3.3895313892515355e38])  # the largest that bf16 has
def test_f32_becomes_the_nearest_bf16(values: list[float]) -> None:
    data = np.array(values, np.float32)
    wanted = [_nearest_bf16(float(value)) for value in data]

    if all(pattern & 0x7F80 != 0x7F80 for pattern in wanted):
        assert cast(data, "f32", "bf16").tolist() == wanted
    else:
        with pytest.raises(KVTransferFailed, match="inf or nan after the cast"):
            cast(data, "f32", "bf16")


@given(hnp.arrays(np.uint16, st.integers(1, 50)).map(lambda bits: np.where(bits & 0x7F80 == 0x7F80, 0, bits)))
def test_bf16_to_f32_and_back_changes_no_bit(bits: Array) -> None:
    bits = bits.astype(np.uint16)

    wide = cast(bits, "bf16", "f32")

    assert wide.dtype == np.float32
    assert [math.copysign(1, x) < 0 for x in wide] == [bool(x & 0x8000) for x in bits]
    np.testing.assert_array_equal(cast(wide, "f32", "bf16"), bits)


@given(hnp.arrays(np.float16, st.integers(1, 50), elements=st.floats(width=16, allow_nan=False, allow_infinity=False)))
def test_f16_to_f32_and_back_changes_nothing(data: Array) -> None:
    np.testing.assert_array_equal(cast(cast(data, "f16", "f32"), "f32", "f16"), data)


@given(dtypes)
def test_a_cast_to_the_same_dtype_copies_nothing(dtype: DType) -> None:
    data = np.ones(4, NUMPY_TYPES[dtype])

    assert np.shares_memory(cast(data, dtype, dtype), data)


@pytest.mark.parametrize(
    ("value", "source", "target"),
    [
        (65520.0, "f32", "f16"),  # rounds to 65536, past f16's largest, 65504
        (-1e38, "f32", "f16"),
        (3.4e38, "f32", "bf16"),  # rounds past bf16's largest
        (math.nan, "f32", "bf16"),
        (math.nan, "f32", "f16"),
        (math.inf, "f32", "f32"),
        (math.inf, "f16", "bf16"),
        (math.nan, "f16", "f16"),
    ],
)
def test_a_cast_that_would_leave_inf_or_nan_fails_the_kv_transfer(value: float, source: DType, target: DType) -> None:
    data = np.array([1.0, value], NUMPY_TYPES[source])

    with pytest.raises(KVTransferFailed, match="inf or nan"):
        cast(data, source, target)


@pytest.mark.parametrize("pattern", [0x7F80, 0xFF80, 0x7FC0, 0x7F81, 0xFFFF])
@pytest.mark.parametrize("target", ["f16", "bf16", "f32"])
def test_bf16_patterns_of_inf_and_nan_fail_the_kv_transfer(pattern: int, target: DType) -> None:
    data = np.array([0, pattern], np.uint16)

    assert not is_finite(data, "bf16")
    with pytest.raises(KVTransferFailed, match="inf or nan"):
        cast(data, "bf16", target)
