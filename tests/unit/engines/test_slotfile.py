"""Slot files: what goes in comes out bit for bit, and no bytes make the parser do anything but refuse."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from benchmarks.harness import peak_growth
from engines.llamacpp.slotfile import (
    SlotForm,
    SlotShape,
    build,
    parse,
    snapshot,
    to_blocks,
    to_halves,
    to_interleaved,
)
from messages.errors import KVTransferFailed
from messages.kv import (
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
)


def shape_of(layers: int, dtype: DType = "f16", interleaved: bool = False, window: int = 0) -> SlotShape:
    """Two KV heads of eight numbers; with a `window`, every second layer slides."""
    windowed = tuple(range(0, layers, 2)) if window else ()
    return SlotShape(KVLayout(layers, 2, 8, dtype, window, windowed), interleaved)


def random_cache(layout: KVLayout, num_tokens: int, seed: int = 0) -> KVCache:
    source = np.random.default_rng(seed)

    def values(*shape: int) -> Array:
        drawn = source.standard_normal((*shape, layout.kv_heads, layout.head_dim)).astype(np.float32)
        return cast(drawn, "f32", layout.dtype)

    layers = [(values(num_tokens), values(num_tokens)) for _ in layout.full_layers]
    rows = min(num_tokens, layout.window)
    window = Window(num_tokens, values(len(layout.window_layers), 2, rows)) if layout.window else None
    return KVCache(layout, tuple(cut_into_blocks(layout, layers)), window)


def same(first: list[Block] | tuple[Block, ...], second: list[Block] | tuple[Block, ...]) -> bool:
    return [(b.start, b.data.tobytes()) for b in first] == [(b.start, b.data.tobytes()) for b in second]


@settings(deadline=None)
@given(
    layers=st.sampled_from([2, 4]),
    num_tokens=st.integers(1, 70),
    streams=st.integers(1, 5),
    dtype=st.sampled_from(["f16", "bf16", "f32"]),
    interleaved=st.booleans(),
    window=st.sampled_from([0, 1, 16]),
)
def test_blocks_written_to_a_slot_file_are_read_back_bit_for_bit(
    layers: int, num_tokens: int, streams: int, dtype: DType, interleaved: bool, window: int
) -> None:
    # Given a cache of random numbers
    shape = shape_of(layers, dtype, interleaved, window)
    cache = random_cache(shape.layout, num_tokens)
    tokens = tuple(range(100, 100 + num_tokens))
    # When it goes through a slot file
    file = parse(build(tokens, cache, shape, streams))
    # Then nothing changed
    assert (file.tokens, file.streams) == (tokens, streams)
    assert same(tuple(to_blocks(file, shape)), cache.blocks)
    read = snapshot(file, shape)
    assert len(read) == (cache.window is not None)
    for record in read:
        assert isinstance(record, Window)
        assert cache.window is not None
        assert (record.position, record.data.tobytes()) == (num_tokens, cache.window.data.tobytes())


@settings(deadline=None)
@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_refused(data: bytes) -> None:
    with pytest.raises(KVTransferFailed):
        parse(data)


@settings(deadline=None)
@given(st.data())
def test_a_damaged_slot_file_is_refused_or_read_within_its_bounds(data: st.DataObject) -> None:
    # Given a sound file with a few bytes changed
    shape = shape_of(2)
    damaged = bytearray(build((1, 2, 3), random_cache(shape.layout, 3), shape, 2))
    for _ in range(data.draw(st.integers(1, 4))):
        damaged[data.draw(st.integers(0, len(damaged) - 1))] = data.draw(st.integers(0, 255))
    # Then it gives blocks of the right shape, or our error
    try:
        blocks = list(to_blocks(parse(bytes(damaged)), shape))
    except KVTransferFailed:
        return
    assert KVCache(shape.layout, tuple(blocks)).num_tokens == 3


def test_a_slot_file_cut_short_anywhere_is_refused() -> None:
    shape = shape_of(2)
    whole = build((1, 2, 3), random_cache(shape.layout, 3), shape, 2)
    for length in range(len(whole)):
        with pytest.raises(KVTransferFailed):
            parse(whole[:length])


def test_a_length_that_the_file_does_not_hold_is_refused_before_anything_is_allocated() -> None:
    shape = shape_of(2)
    whole = bytearray(build((1,), random_cache(shape.layout, 1), shape, 1))
    whole[8:12] = (0xFFFFFFFF).to_bytes(4, "little")
    with pytest.raises(KVTransferFailed, match=r"17,179,869,180 bytes wanted"):
        parse(bytes(whole))


def test_more_tokens_than_the_prompt_had_are_refused_before_a_list_is_made_of_them() -> None:
    shape = shape_of(2)
    data = build((1, 2, 3), random_cache(shape.layout, 3), shape, 1)
    assert parse(data, most_tokens=3).tokens == (1, 2, 3)
    with pytest.raises(KVTransferFailed, match="3 tokens, but the prompt has only 2"):
        parse(data, most_tokens=2)
    many = data[:8] + (4 + 30_000_000).to_bytes(4, "little") + np.array([-1, 1, 30_000_000], "<i4").tobytes()
    many += bytes(4 * 30_000_001)

    def refuse() -> None:
        with pytest.raises(KVTransferFailed):
            parse(many, most_tokens=3)

    assert (peak_growth(refuse) or 0) < 16 << 20


@pytest.mark.parametrize(
    ("at", "value", "complaint"),
    [
        (0, b"GGUF", "not a llama.cpp slot file"),
        (4, b"\x05\0\0\0", "version 5; this program reads only versions 2, 3, 4"),
        (12, b"\0\0\0\0", "token list"),
        (40, b"\0\0\0\0", "streams"),
    ],
)
def test_a_slot_file_of_another_form_is_refused_by_name(at: int, value: bytes, complaint: str) -> None:
    shape = shape_of(2)
    data = bytearray(build((1, 2, 3), random_cache(shape.layout, 3), shape, 1))
    data[at : at + 4] = value
    with pytest.raises(KVTransferFailed, match=complaint):
        parse(bytes(data))


def test_transposed_values_are_refused_with_what_to_do() -> None:
    # Given a file whose v_trans, after one stream's three cells, is 1
    shape = shape_of(2)
    data = bytearray(build((1, 2, 3), random_cache(shape.layout, 3), shape, 1))
    at = 12 + (3 + 4) * 4 + 4 + 4 + 3 * 12
    data[at] = 1
    with pytest.raises(KVTransferFailed, match="flash attention"):
        parse(bytes(data))


def test_rows_that_lie_out_of_order_are_put_in_order_of_position() -> None:
    # Given a file whose cells hold the positions 2, 0, 1
    shape = shape_of(2)
    cache = random_cache(shape.layout, 3)
    data = bytearray(build((7, 8, 9), cache, shape, 1))
    first_cell = 12 + (3 + 4) * 4 + 4 + 4
    for cell, position in enumerate((2, 0, 1)):
        data[first_cell + cell * 12] = position
    # When it is read
    (block,) = to_blocks(parse(bytes(data)), shape)
    # Then each row is at its position
    assert np.array_equal(block.data[:, :, [2, 0, 1]], cache.blocks[0].data)


def test_blocks_that_are_stored_already_are_left_out() -> None:
    shape = shape_of(2)
    cache = random_cache(shape.layout, 70)
    file = parse(build(range(70), cache, shape, 1))
    assert same(tuple(to_blocks(file, shape, first=32)), cache.blocks[1:])


def test_interleaved_pairs_become_halves_by_the_index_rule() -> None:
    # Old index j·d/2+i of a head with split halves is new index 2i+j with interleaved pairs.
    halves = np.arange(8)
    assert to_interleaved(halves).tolist() == [0, 4, 1, 5, 2, 6, 3, 7]
    assert to_halves(to_interleaved(halves)).tolist() == halves.tolist()


def test_a_cache_of_another_dtype_is_cast_once() -> None:
    # Given bf16 blocks for a server that keeps f16
    source, target = shape_of(2, "bf16"), shape_of(2, "f16")
    cache = random_cache(source.layout, 5)
    # When they go through a slot file of the server
    (block,) = to_blocks(parse(build(range(5), cache, target, 1)), target)
    # Then every number is the one that a cast gives
    assert np.array_equal(block.data, cast(cache.blocks[0].data, "bf16", "f16"))


def test_numbers_too_large_for_the_receivers_dtype_are_a_failed_kv_transfer() -> None:
    source, target = shape_of(2, "f32"), shape_of(2, "f16")
    data = np.full(source.layout.block_shape(1), 1e6, np.float32)
    with pytest.raises(KVTransferFailed, match="inf or nan"):
        build((1,), KVCache(source.layout, (Block(0, data),)), target, 1)


def test_a_cache_of_another_shape_is_refused() -> None:
    with pytest.raises(KVTransferFailed, match="layout"):
        build((1,), random_cache(shape_of(4).layout, 1), shape_of(2), 1)


def test_a_cache_that_covers_other_tokens_is_refused() -> None:
    shape = shape_of(2)
    with pytest.raises(KVTransferFailed, match="covers 3 tokens, but the prompt has 2"):
        build((1, 2), random_cache(shape.layout, 3), shape, 1)


# States of recurrent layers


def hybrid_shape(mrope: bool = True, key_heads: int = 2) -> SlotShape:
    """Four layers of which the last attends; four heads of values, two of keys."""
    layout = KVLayout(
        4, 2, 8, "f16", recurrent_layers=(0, 1, 2), conv_shape=(2 * 2 * 4 + 4 * 6, 3), matrix_shape=(4, 4, 6)
    )
    return SlotShape(layout, False, SlotForm(mrope, 4, 3), key_heads)


def hybrid_cache(layout: KVLayout, num_tokens: int, seed: int = 0) -> KVCache:
    source = np.random.default_rng(seed)
    kv = (source.standard_normal((2, num_tokens, 2, 8))).astype(np.float16)
    states = [
        RecurrentState(num_tokens, layer, source.standard_normal(layout.state_size).astype(np.float32))
        for layer in layout.state_layers
    ]
    return assemble_cache(layout, [*cut_into_blocks(layout, [(kv[0], kv[1])]), *states])


@pytest.mark.parametrize("version", [2, 3, 4])
@pytest.mark.parametrize("mrope", [True, False])
@pytest.mark.parametrize("key_heads", [2, 0])
@pytest.mark.parametrize("num_tokens", [1, 40])
def test_states_written_to_a_slot_file_are_read_back_bit_for_bit(
    version: int, mrope: bool, key_heads: int, num_tokens: int
) -> None:
    shape = replace(hybrid_shape(mrope, key_heads), version=version)
    cache = hybrid_cache(shape.layout, num_tokens)

    file = parse(build(tuple(range(num_tokens)), cache, shape, 3), shape.form)

    assert file.version == version
    assert same(tuple(to_blocks(file, shape)), cache.blocks)
    read = [one for one in snapshot(file, shape) if isinstance(one, RecurrentState)]
    assert [(one.layer, one.position) for one in read] == [(layer, num_tokens) for layer in (0, 1, 2)]
    assert all(one.data.tobytes() == given.data.tobytes() for one, given in zip(read, cache.states, strict=True))


def test_a_state_lies_transposed_and_its_heads_of_values_by_turns() -> None:
    shape = hybrid_shape()
    cache = hybrid_cache(shape.layout, 5)
    columns, matrix = shape.layout.state_parts(cache.states[0].data)

    (kept, turned), *_ = parse(build((1, 2, 3, 4, 5), cache, shape, 1), shape.form).states

    # Heads 0 and 1 belong to the first head of keys, 2 and 3 to the second
    assert np.array_equal(turned.reshape(4, 6, 4), matrix[[0, 2, 1, 3]].swapaxes(1, 2))
    assert np.array_equal(kept.reshape(-1, 3)[:16], columns[:16])
    assert np.array_equal(kept.reshape(-1, 3)[16:].reshape(4, 6, 3), columns[16:].reshape(4, 6, 3)[[0, 2, 1, 3]])


def test_cells_of_a_model_with_mrope_name_their_token() -> None:
    shape = hybrid_shape()

    data = build((7, 8), hybrid_cache(shape.layout, 2), shape, 1)

    cells = np.frombuffer(data, "<i4", 12, offset=4 * (3 + 3 + 2 + 1 + 2))
    assert cells.reshape(2, 6).tolist() == [[0, 1, 0, 0, 7, 0], [1, 1, 1, 1, 8, 0]]


def test_before_version_3_they_name_none() -> None:
    shape = replace(hybrid_shape(), version=2, packs_tokens=False)

    data = build((7, 8), hybrid_cache(shape.layout, 2), shape, 1)

    cells = np.frombuffer(data, "<i4", 10, offset=4 * (3 + 2 + 2))
    assert cells.reshape(2, 5).tolist() == [[0, 1, 0, 0, 0], [1, 1, 1, 1, 0]]


def test_a_file_with_checkpoints_is_refused_with_what_to_do() -> None:
    shape = hybrid_shape()
    data = build((1, 2, 3), hybrid_cache(shape.layout, 3), shape, 1)

    with pytest.raises(KVTransferFailed, match="--ctx-checkpoints 0"):
        parse(data + b"SCKP", shape.form)


def test_states_cut_short_or_of_another_form_are_refused() -> None:
    shape = hybrid_shape()
    data = build((1, 2, 3), hybrid_cache(shape.layout, 3), shape, 1)
    size = 3 * (2 * 12 + 4 * shape.layout.state_size)

    for length in range(len(data) - size - 20, len(data)):
        with pytest.raises(KVTransferFailed):
            parse(data[:length], shape.form)
    for at, word in ((0, 2), (4, 3), (8, 1), (12, 1), (16, 3), (20, 1), (24, 7)):
        damaged = bytearray(data)
        place = len(data) - size - 20 + at
        damaged[place : place + 4] = word.to_bytes(4, "little")
        with pytest.raises(KVTransferFailed):
            parse(bytes(damaged), shape.form)


@pytest.mark.parametrize("wrong", [np.nan, np.inf])
def test_a_state_that_is_not_finite_is_not_written(wrong: float) -> None:
    # llama.cpp clears a slot's state by multiplying it with 0, so it would stay in the slot for ever
    shape = hybrid_shape()
    cache = hybrid_cache(shape.layout, 3)
    cache.states[1].data[5] = wrong

    with pytest.raises(KVTransferFailed, match="layer 1 holds inf or nan"):
        build((1, 2, 3), cache, shape, 1)
