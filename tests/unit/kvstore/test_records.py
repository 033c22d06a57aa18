"""A record says all that its reader must know, and whatever is not exactly right is refused with a reason."""

import dataclasses
from typing import Any

import msgpack
import numpy as np
import pytest
import xxhash
from hypothesis import example, given
from hypothesis import strategies as st

from kvstore.blocks import BlockRef, window_ref
from kvstore.records import ALIGNMENT, MAX_HEADER_BYTES, decode_block, decode_state, decode_window, encode
from messages.errors import KVTransferFailed
from messages.kv import Block, DType, KVLayout, RecurrentState, Window
from tests.support.kv_samples import FINGERPRINT, block, hybrid, layout, raised_by, refs_of, same_bits, states, window

LAYOUT = layout()
REF = refs_of(LAYOUT, 40)[1]  # a partial block: positions 32 to 39
BLOCK = block(LAYOUT, REF)
VALUE = b"".join(encode(FINGERPRINT, LAYOUT, REF, BLOCK))

SLIDING = layout("bf16", window=16)
WINDOW_REF, WINDOW = window(SLIDING, refs_of(SLIDING, 40)[-1])
WINDOW_VALUE = b"".join(encode(FINGERPRINT, SLIDING, WINDOW_REF, WINDOW))


HYBRID = hybrid("bf16")
STATES = states(HYBRID, refs_of(HYBRID, 40)[-1])
STATE_REF, STATE = STATES[1]
STATE_VALUE = b"".join(encode(FINGERPRINT, HYBRID, STATE_REF, STATE))


def _state_refusal(value: bytes) -> str:
    return raised_by(lambda: decode_state(value, FINGERPRINT, HYBRID, STATE_REF), KVTransferFailed)


def _refusal(value: bytes) -> str:
    return raised_by(lambda: decode_block(value, FINGERPRINT, LAYOUT, REF), KVTransferFailed)


def _window_refusal(value: bytes) -> str:
    return raised_by(lambda: decode_window(value, FINGERPRINT, SLIDING, WINDOW_REF), KVTransferFailed)


def _rewritten(value: bytes = VALUE, **changes: Any) -> bytes:
    """The same record with another header, and a payload marker that leaves the header to be judged."""
    header, payload = msgpack.unpackb(value)
    return b"\x92" + msgpack.packb(header | changes) + b"\xc6" + len(payload).to_bytes(4, "big") + payload


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32"])
def test_a_block_comes_back_bit_for_bit(dtype: DType) -> None:
    lay = layout(dtype)
    ref = refs_of(lay, 40)[1]

    got = decode_block(b"".join(encode(FINGERPRINT, lay, ref, block(lay, ref))), FINGERPRINT, lay, ref)

    assert got.start == 32
    assert same_bits(got.data, block(lay, ref).data)


@pytest.mark.parametrize(("position", "rows"), [(1, None), (15, None), (16, None), (40, None), (40, 20)])
def test_a_window_comes_back_bit_for_bit_with_more_rows_than_needed_too(position: int, rows: int | None) -> None:
    ref, record = window(SLIDING, refs_of(SLIDING, position)[-1], rows)

    got = decode_window(b"".join(encode(FINGERPRINT, SLIDING, ref, record)), FINGERPRINT, SLIDING, ref)

    assert got.position == position
    assert same_bits(got.data, record.data)


def test_a_model_of_sliding_layers_only_has_empty_blocks() -> None:
    lay = KVLayout(1, 2, 8, "f16", 16, (0,))
    ref = refs_of(lay, 5)[0]

    got = decode_block(b"".join(encode(FINGERPRINT, lay, ref, block(lay, ref))), FINGERPRINT, lay, ref)

    assert got.data.shape == (0, 2, 5, 2, 8)


def test_a_record_is_a_msgpack_document_that_names_its_contents() -> None:
    header, payload = msgpack.unpackb(VALUE)

    assert payload == BLOCK.data.tobytes()
    assert header.pop("pad").strip(b"\0") == b""
    assert header == {
        "v": 1,
        "kind": "block",
        "fingerprint": FINGERPRINT,
        "chain": REF.chain,
        "dtype": "f16",
        "layers": 4,
        "kv_heads": 2,
        "head_dim": 8,
        "position": 32,
        "rows": 8,
        "bytes": len(payload),
        "xxh3": xxhash.xxh3_64_intdigest(payload),
    }


def test_the_payload_is_not_copied_on_either_side() -> None:
    _, payload = encode(FINGERPRINT, LAYOUT, REF, BLOCK)
    value = np.frombuffer(VALUE, np.uint8)

    got = decode_block(memoryview(value), FINGERPRINT, LAYOUT, REF)

    assert np.shares_memory(np.frombuffer(payload, np.uint8), BLOCK.data)
    assert np.shares_memory(got.data, value)


def test_what_is_read_is_read_only_even_from_memory_that_is_not() -> None:
    got = decode_block(memoryview(bytearray(VALUE)), FINGERPRINT, LAYOUT, REF)

    assert not got.data.flags.writeable


@given(st.text("abc.:-", min_size=1, max_size=128), st.integers(1, 32))
def test_the_payload_is_aligned_whatever_the_header_says(fingerprint: str, rows: int) -> None:
    ref = dataclasses.replace(REF, end=REF.start + rows)

    prefix, _ = encode(fingerprint, LAYOUT, ref, block(LAYOUT, ref))

    assert len(prefix) % ALIGNMENT == 0
    assert len(prefix) < MAX_HEADER_BYTES


def test_a_block_in_another_memory_order_is_stored_all_the_same() -> None:
    fortran = Block(REF.start, np.asfortranarray(BLOCK.data))

    assert b"".join(encode(FINGERPRINT, LAYOUT, REF, fortran)) == VALUE


@pytest.mark.parametrize(
    "record",
    [
        Block(0, BLOCK.data),
        Block(REF.start, BLOCK.data[:, :, :-1]),
        Block(REF.start, BLOCK.data[:-1]),
        Block(REF.start, BLOCK.data.view("<u2")),
        Window(REF.end, BLOCK.data),
    ],
)
def test_what_is_not_of_its_ref_and_layout_is_not_written(record: Block | Window) -> None:
    with pytest.raises(ValueError, match="record for kv:"):
        encode(FINGERPRINT, LAYOUT, REF, record)


@given(st.integers(0, 8 * len(VALUE) - 1))
def test_any_flipped_bit_is_noticed(bit: int) -> None:
    damaged = bytearray(VALUE)
    damaged[bit // 8] ^= 1 << bit % 8

    assert _refusal(bytes(damaged))


def test_no_flipped_bit_of_a_header_is_missed() -> None:
    for start, value, refusal in ((0, VALUE, _refusal), (0, WINDOW_VALUE, _window_refusal)):
        for bit in range(start, 8 * MAX_HEADER_BYTES // 2):
            damaged = bytearray(value)
            damaged[bit // 8] ^= 1 << bit % 8
            assert refusal(bytes(damaged)), f"bit {bit}"


def test_no_truncation_is_missed() -> None:
    assert all(_refusal(VALUE[:length]) for length in range(len(VALUE)))
    assert all(_window_refusal(WINDOW_VALUE[:length]) for length in range(len(WINDOW_VALUE)))


@given(st.binary(min_size=1, max_size=100))
def test_bytes_after_the_end_are_noticed(more: bytes) -> None:
    assert _refusal(VALUE + more)


@given(st.binary(max_size=2000))
@example(b"\x92" + b"\x91" * 1500)  # deep nesting
@example(b"\x92\xdf\xff\xff\xff\xff")  # a map of four billion entries
@example(b"\x92\xdd\xff\xff\xff\xff")
@example(b"\x92\xc6\xff\xff\xff\xff")
@example(b"\x92\xd7\xff" + b"\xff" * 8 + b"\xc6\0\0\0\0")  # a timestamp out of range
@example(b"\x92\x81\xa1\xff\x01\xc6\0\0\0\0")  # a key that is not UTF-8
def test_arbitrary_bytes_are_refused(value: bytes) -> None:
    assert _refusal(value)
    assert _refusal(b"\x92" + value)
    assert _window_refusal(b"\x92" + value)


_hostile = st.one_of(
    st.none(),
    st.booleans(),
    st.integers(-(2**63), 2**64 - 1),
    st.floats(),
    st.text(max_size=40),
    st.binary(max_size=40),
    st.lists(st.booleans(), max_size=3),
    st.dictionaries(st.text(max_size=3), st.none(), max_size=3),
)


@given(st.dictionaries(st.sampled_from([*msgpack.unpackb(VALUE)[0], "more"]), _hostile, min_size=1, max_size=3))
@example({"rows": True})
@example({"v": 1.0})
def test_hostile_headers_are_refused(changes: dict[str, Any]) -> None:
    value, other = _rewritten(**changes), _rewritten(WINDOW_VALUE, **changes)

    assert value == VALUE or _refusal(value)
    assert other == WINDOW_VALUE or _window_refusal(other)


@pytest.mark.parametrize(
    ("value", "reason"),
    [
        (_rewritten(v=2), "v 2, not 1"),
        (_rewritten(kind="window"), "kind 'window', not 'block'"),
        (_rewritten(fingerprint="llama"), "fingerprint 'llama', not 'tiny-qwen3-0123abcd'"),
        (_rewritten(chain="0" * 32), "chain '0000"),
        (_rewritten(rows=1 << 40), "rows 1099511627776, not 8"),
        (_rewritten(xxh3=1), "xxh3 1, not"),
        (_rewritten(kv_heads=None), "kv_heads None, not 2"),
        (_rewritten(kv_heads=[[2]]), "kv_heads of type list, not 2"),
        (_rewritten(layers=True), "layers True, not 4"),
        (_rewritten(rows=8.0), "rows of type float, not 8"),
        (_rewritten(more=1), "a header that Kvasir does not write"),
        (_rewritten(pad=b"x"), "a header that Kvasir does not write"),
        (VALUE[:-1], "is not as long as its header"),
        (VALUE + b"\0", "not as long as its header says"),
        (b"", "not a KV record"),
        (b"\x92\x01\xc6\0\0\0\0", "has no header"),
        (msgpack.packb(msgpack.unpackb(VALUE)), "is not as long as its header"),  # bin 16 where bin 32 belongs
        (VALUE[:-1] + bytes([VALUE[-1] ^ 1]), "xxh3"),
    ],
)
def test_the_reason_names_what_is_wrong_and_where(value: bytes, reason: str) -> None:
    refusal = _refusal(value)

    assert reason in refusal
    assert REF.key in refusal
    assert "position 32" in refusal


@pytest.mark.parametrize("rows", [14, 41])
def test_a_window_has_the_rows_that_its_position_needs(rows: int) -> None:
    ref, record = window(SLIDING, refs_of(SLIDING, 40)[-1], rows)

    refusal = _window_refusal(b"".join(encode(FINGERPRINT, SLIDING, ref, record)))

    assert f"has {rows} rows, but must have between 15 and 40" in refusal


def test_a_window_that_claims_more_than_any_value_can_hold_is_refused() -> None:
    huge = KVLayout(64, 64, 4096, "f32", 16, tuple(range(64)))
    ref = dataclasses.replace(WINDOW_REF, start=1_000_000, end=1_000_000)

    with pytest.raises(KVTransferFailed):
        decode_window(_rewritten(WINDOW_VALUE, rows=1_000_000), FINGERPRINT, huge, ref)


def test_the_states_of_all_recurrent_layers_come_back_bit_for_bit() -> None:
    for ref, record in STATES:
        got = decode_state(b"".join(encode(FINGERPRINT, HYBRID, ref, record)), FINGERPRINT, HYBRID, ref)

        assert (got.position, got.layer) == (40, ref.layer)
        assert same_bits(got.data, record.data)
    assert [ref.layer for ref, _ in STATES] == [0, 1, 2]


def test_a_state_is_a_record_of_one_row_whose_chain_names_its_layer() -> None:
    header, payload = msgpack.unpackb(STATE_VALUE)

    assert payload == STATE.data.tobytes()
    assert header.pop("pad").strip(b"\0") == b""
    assert header == {
        "v": 1,
        "kind": "state",
        "fingerprint": FINGERPRINT,
        "chain": f"{refs_of(HYBRID, 40)[-1].chain}.1",
        "dtype": "f32",
        "layers": 1,
        "kv_heads": 1,
        "head_dim": 24 * 3 + 2 * 4 * 8,
        "position": 40,
        "rows": 1,
        "bytes": 4 * 136,
        "xxh3": xxhash.xxh3_64_intdigest(payload),
    }


def test_no_flipped_bit_and_no_truncation_of_a_state_is_missed() -> None:
    for bit in range(8 * len(STATE_VALUE)):
        damaged = bytearray(STATE_VALUE)
        damaged[bit // 8] ^= 1 << bit % 8
        assert _state_refusal(bytes(damaged)), f"bit {bit}"
    assert all(_state_refusal(STATE_VALUE[:length]) for length in range(len(STATE_VALUE)))


def test_a_state_of_another_layer_or_position_is_refused() -> None:
    other_layer = b"".join(encode(FINGERPRINT, HYBRID, *STATES[2]))
    other_place = b"".join(encode(FINGERPRINT, HYBRID, *states(HYBRID, refs_of(HYBRID, 39)[-1])[1]))

    assert ".2', not" in _state_refusal(other_layer)
    assert "chain" in _state_refusal(other_place)


def test_a_state_of_another_size_or_layer_than_its_ref_is_not_written() -> None:
    for record in (
        RecurrentState(40, 1, STATE.data[:-1]),
        RecurrentState(40, 0, STATE.data),
        RecurrentState(39, 1, STATE.data),
        RecurrentState(40, 1, STATE.data.astype(np.float64)),
    ):
        with pytest.raises(ValueError, match="record for kvw:"):
            encode(FINGERPRINT, HYBRID, STATE_REF, record)


def test_a_block_is_not_taken_for_a_window() -> None:
    lay = layout(window=16)
    ref: BlockRef = refs_of(lay, 40)[1]
    value = b"".join(encode(FINGERPRINT, lay, ref, block(lay, ref)))

    with pytest.raises(KVTransferFailed):
        decode_window(value, FINGERPRINT, lay, window_ref(ref))
