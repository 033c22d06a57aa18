"""A record: a block, a window or a state as one atomic value. It is a msgpack document of two elements.

    [ {v, kind, fingerprint, chain, position, rows, layers, kv_heads, head_dim, dtype, bytes, xxh3, pad},  payload ]

`position` is a block's first token, or the token after a window's last row; `rows` counts tokens. A state is one row of
`head_dim` numbers, and its `chain` ends with a dot and its layer. `payload` (bin 32) is the array's memory,
C-contiguous and little-endian, and `xxh3` is its XXH3-64 hash. `pad` makes the payload begin at a multiple of 16 bytes,
so that the array made from it is aligned.

A reader knows the value of every header field: the ref, the fingerprint and the layout determine all but a window's
rows. So a record is valid exactly if its header is, byte for byte, the one that would be written for its payload. Any
other value raises KVTransferFailed.
"""

import math
from collections.abc import Callable, Mapping
from typing import Any, Literal

import msgpack
import numpy as np
import xxhash

from kvstore.blocks import BlockRef
from messages.errors import KVTransferFailed
from messages.kv import NUMPY_TYPES, STATE_TYPE, Array, Block, DType, KVLayout, Record, RecurrentState, Window

VERSION = 1
ALIGNMENT = 16
MAX_HEADER_BYTES = 1024  # headers that Kvasir writes have about 350 bytes
_ARRAY_OF_TWO = b"\x92"
_BIN_32 = b"\xc6"
_BIN_BYTES = 5  # one byte for the msgpack type, four for the length

Kind = Literal["block", "window", "state"]
Shape = tuple[int, int, int, int, int]

_STATE_DTYPE: DType = "f32"


def check_record(layout: KVLayout, ref: BlockRef, record: Record) -> tuple[Kind, DType, Shape]:
    """Return the record's kind, dtype and shape as stored. Raises ValueError if they don't match `layout` and `ref`."""
    kind: Kind
    dtype, layer = layout.dtype, None
    if isinstance(record, Block):
        kind, span, shape = "block", (record.start, record.end), layout.block_shape(record.num_tokens)
    elif isinstance(record, Window):
        kind, span = "window", (record.position, record.position)
        shape = layout.window_shape(record.data.shape[2])
    else:
        kind, span, dtype, layer = "state", (record.position, record.position), _STATE_DTYPE, record.layer
        shape = _state_shape(layout)
    data_shape = record.data.shape if kind != "state" else (1, 1, 1, 1, *record.data.shape)
    expected = ((ref.start, ref.end), ref.layer, shape, NUMPY_TYPES[dtype])
    if (span, layer, data_shape, record.data.dtype) != expected:
        raise ValueError(
            f"wrong record for {ref.key}: dtype {record.data.dtype}, shape {data_shape} ({kind}, positions {span}); "
            f"required: dtype {dtype}, shape {shape}"
        )
    return kind, dtype, shape


def encode(fingerprint: str, layout: KVLayout, ref: BlockRef, record: Record) -> tuple[bytes, memoryview]:
    """Return the value in two parts, to be written one after the other: the header, and a view of the record's array.

    Raises ValueError if the record doesn't match `ref` and `layout`.
    """
    kind, dtype, shape = check_record(layout, ref, record)
    payload = np.ascontiguousarray(record.data).reshape(-1).view(np.uint8).data
    return _pack(_header(kind, fingerprint, dtype, ref, shape, payload)), payload


def decode_block(value: bytes | memoryview, fingerprint: str, layout: KVLayout, ref: BlockRef) -> Block:
    """Return the block of `ref`, whose data is a read-only view of `value`.

    Raises KVTransferFailed that says what is wrong.
    """
    header, payload = _split(value, ref)
    shape = layout.block_shape(ref.end - ref.start)
    _check(header, _header("block", fingerprint, layout.dtype, ref, shape, payload), value, payload, ref)
    return Block(ref.start, _array(payload, layout, shape))


def decode_window(value: bytes | memoryview, fingerprint: str, layout: KVLayout, ref: BlockRef) -> Window:
    """Return the window record of `ref`, whose data is a read-only view of `value`. Raises KVTransferFailed."""
    header, payload = _split(value, ref)
    rows = header.get("rows")
    min_rows = min(ref.end, layout.window - 1)
    if type(rows) is not int or not min_rows <= rows <= ref.end:
        raise _failure(ref, f"has {_describe(rows)} rows, but must have between {min_rows} and {ref.end}")
    shape = layout.window_shape(rows)
    _check(header, _header("window", fingerprint, layout.dtype, ref, shape, payload), value, payload, ref)
    return Window(ref.end, _array(payload, layout, shape))


def decode_state(value: bytes | memoryview, fingerprint: str, layout: KVLayout, ref: BlockRef) -> RecurrentState:
    """Return the state of `ref`, whose data is a read-only view of `value`. Raises KVTransferFailed."""
    header, payload = _split(value, ref)
    expected = _header("state", fingerprint, _STATE_DTYPE, ref, _state_shape(layout), payload)
    _check(header, expected, value, payload, ref)
    assert ref.layer is not None  # see snapshot_refs
    return RecurrentState(ref.end, ref.layer, np.ndarray((layout.state_size,), STATE_TYPE, buffer=payload))


# The function that reads each kind of record.
DECODERS: Mapping[type, Callable[..., Any]] = {
    Block: decode_block,
    Window: decode_window,
    RecurrentState: decode_state,
}


def _state_shape(layout: KVLayout) -> Shape:
    return (1, 1, 1, 1, layout.state_size)


def _array(payload: memoryview, layout: KVLayout, shape: Shape) -> Array:
    return np.ndarray(shape, layout.numpy_type, buffer=payload)


def _header(
    kind: Kind, fingerprint: str, dtype: DType, ref: BlockRef, shape: Shape, payload: memoryview
) -> dict[str, Any]:
    # Only the first field that differs is reported. So each field comes before the fields that depend on it.
    return {
        "v": VERSION,
        "kind": kind,
        "fingerprint": fingerprint,
        "chain": ref.chain,
        "dtype": dtype,
        "layers": shape[0],
        "kv_heads": shape[3],
        "head_dim": shape[4],
        "position": ref.start,
        "rows": shape[2],
        "bytes": math.prod(shape) * NUMPY_TYPES[dtype].itemsize,
        "xxh3": xxhash.xxh3_64_intdigest(payload),
    }


def _pack(header: dict[str, Any]) -> bytes:
    """Return all bytes before the payload."""
    bare = len(_ARRAY_OF_TWO) + len(msgpack.packb(header | {"pad": b""})) + _BIN_BYTES
    header_bytes = msgpack.packb(header | {"pad": bytes(-bare % ALIGNMENT)})
    return b"".join((_ARRAY_OF_TWO, header_bytes, _BIN_32, header["bytes"].to_bytes(4, "big")))


def _split(value: bytes | memoryview, ref: BlockRef) -> tuple[dict[str, Any], memoryview]:
    view = memoryview(value).toreadonly()
    if view[:1] != _ARRAY_OF_TWO:
        raise _failure(ref, "is not a KV record")
    unpacker = msgpack.Unpacker(max_buffer_size=MAX_HEADER_BYTES)
    try:
        unpacker.feed(view[1:MAX_HEADER_BYTES])
        header = unpacker.unpack()
    except Exception as error:  # noqa: BLE001  msgpack raises its own errors, ValueError, and UnicodeDecodeError
        raise _failure(ref, f"has no readable header ({type(error).__name__})") from None
    if not isinstance(header, dict):
        raise _failure(ref, "has no header")
    start = len(_ARRAY_OF_TWO) + unpacker.tell() + _BIN_BYTES
    payload = view[start:]
    if view[start - _BIN_BYTES : start - 4] != _BIN_32 or int.from_bytes(view[start - 4 : start]) != len(payload):
        raise _failure(ref, "is not as long as its header says")
    return header, payload


def _check(
    header: dict[str, Any], expected: dict[str, Any], value: bytes | memoryview, payload: memoryview, ref: BlockRef
) -> None:
    # Bytes are compared instead of values, because True, 1 and 1.0 are equal in Python, and msgpack has several
    # encodings for the same number.
    if len(payload) == expected["bytes"] and memoryview(value)[: len(value) - len(payload)] == _pack(expected):
        return
    for name, expected_field in expected.items():
        stored_field = header.get(name)
        if type(stored_field) is not type(expected_field) or stored_field != expected_field:
            raise _failure(ref, f"has {name} {_describe(stored_field)}, not {_describe(expected_field)}")
    raise _failure(ref, "has a header that Kvasir does not write")


def _describe(value: object) -> str:
    # Nested values are not shown, because any client can have written the record.
    return f"{value!r:.80}" if isinstance(value, str | int | None) else f"of type {type(value).__name__}"


def _failure(ref: BlockRef, reason: str) -> KVTransferFailed:
    return KVTransferFailed(f"stored KV record at position {ref.start} ({ref.key}) {reason}")
