"""Converts llama.cpp slot files to canonical KV blocks and back. Pure: bytes in, bytes out.

The file that `llama-server` writes for `/slots/N?action=save`, versions 2 to 4 (all integers little-endian):

"qsgg"  u32 version
u32 n   n × i32: tokens…, or packed, as servers do since August 2026: -1, 1, token count, tokens…, 0
per cache (one; if some layers have a sliding window a second, with its last rows only):
    u32 streams
    per stream: u32 cells, and if there are any:
        per cell: i32 position, u32 sequences, sequences × i32; with M-RoPE between these the
            position twice and, since 3, the token
        u32 v_trans   u32 layers   since 4: u32 rotation of K, u32 of V (0: none)
        per layer: i32 ggml type, u64 row bytes, cells × row      (K of all layers, then V of all)
if some layers are recurrent: u32 cells (1), i32 last position, u32 0, u32 s_trans (0), u32 layers (all of them);
    per recurrent layer: i32 ggml type, u64 bytes, the convolution's columns, (channels, columns)
    per recurrent layer: i32 ggml type, u64 bytes, the matrix, (heads, value size, key size)

A row is kv_heads × head_dim values of one token as long as v_trans is 0, that is with flash attention on. The layout
changes between llama.cpp releases without notice, so whatever differs from the above is refused, not guessed at. A
server reads no version but its own: `build` writes as the server was seen to write.
"""

import math
import struct
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from messages.errors import KVTransferFailed
from messages.kv import (
    NUMPY_TYPES,
    Array,
    Block,
    DType,
    KVCache,
    KVLayout,
    Record,
    RecurrentState,
    Window,
    cast,
    cut_into_blocks,
    is_finite,
)

MAGIC = b"qsgg"
_VERSIONS = (2, 3, 4)
_CELL_TOKENS, _ROTATIONS = 3, 4  # from these file versions on, cells contain tokens, and files contain rotations
MAX_STREAMS = 1024
MAX_LAYERS = 1024
_GGML_TYPES: dict[int, DType] = {0: "f32", 1: "f16", 30: "bf16"}
_GGML_IDS = {name: number for number, name in _GGML_TYPES.items()}


@dataclass(frozen=True, slots=True)
class SlotLayer:
    """One layer's K and V, each (cells, row bytes) of uint8, as views of the file's bytes."""

    dtype: DType
    keys: Array
    values: Array


@dataclass(frozen=True, slots=True)
class SlotForm:
    """What a reader must know about the model, because the file doesn't say it."""

    mrope: bool = False  # whether the model uses M-RoPE, which adds words to each cell
    layers: int = 0  # total number of layers if some are recurrent, otherwise 0
    recurrent: int = 0


@dataclass(frozen=True, slots=True)
class SlotFile:
    """A parsed slot file: each cache's layers. The first cache holds all positions, a second one the last few.

    `states`: of each recurrent layer the convolution's columns and the matrix, in llama.cpp's order, float32.
    """

    version: int
    packs_tokens: bool
    tokens: tuple[int, ...]
    streams: int
    caches: tuple[tuple[SlotLayer, ...], ...]
    states: tuple[tuple[Array, Array], ...] = ()


@dataclass(frozen=True, slots=True)
class SlotShape:
    """How a model's KV cache is laid out in its slot files: full-attention layers first, then window layers.

    `interleaved`: the two numbers of each rotated pair in K are neighbours (llama-family GGUFs), not in two halves.
    `key_heads`: how many key heads there are, if the value heads are in qwen35's order: one for each key head, then the
    next one for each, and so on. 0: the value heads of one key head are neighbours.
    """

    layout: KVLayout
    interleaved: bool
    form: SlotForm = SlotForm()
    key_heads: int = 0
    version: int = _VERSIONS[-1]  # version of the files that the server writes and reads
    packs_tokens: bool = True

    @property
    def caches(self) -> tuple[int, ...]:
        """How many layers each cache of the file has."""
        sizes = (len(self.layout.full_layers), len(self.layout.window_layers))
        return sizes if sizes[1] else sizes[:1]


def parse(data: bytes | memoryview, form: SlotForm = SlotForm(), most_tokens: int = 1 << 31) -> SlotFile:
    """The file's tokens, rows and states. Raises KVTransferFailed for anything but a known version's file of one
    sequence.

    Rows and states stay in `data`. What takes memory besides is bounded by `most_tokens`, whatever the file's size.
    """
    reader = _SlotFileReader(memoryview(data))
    packs_tokens, tokens = _parse_tokens(reader, most_tokens)
    streams, layers = _parse_cache(reader, len(tokens), form)
    if len(layers[0].keys) != len(tokens):
        raise KVTransferFailed(
            f"slot file: it needs a cell for each of {len(tokens):,} tokens, but has {len(layers[0].keys):,} cells"
        )
    caches = [layers]
    if form.recurrent:
        states = _parse_states(reader, len(tokens), form)
        if reader.bytes_left:
            raise KVTransferFailed(
                "slot file: data follows the recurrent states; start llama-server with --ctx-checkpoints 0"
            )
        return SlotFile(reader.version, packs_tokens, tokens, streams, (layers,), states)
    if reader.bytes_left:
        second, layers = _parse_cache(reader, len(tokens), form)
        if second != streams:
            raise KVTransferFailed(f"slot file: its caches have different numbers of streams, {streams} and {second}")
        caches.append(layers)
    if reader.bytes_left:
        raise KVTransferFailed(f"slot file: {reader.bytes_left:,} bytes follow the last KV cache")
    return SlotFile(reader.version, packs_tokens, tokens, streams, tuple(caches))


def to_blocks(file: SlotFile, shape: SlotShape, first: int = 0) -> Iterable[Block]:
    """Canonical blocks of a slot file, copied one by one, without those that end at or before `first`.

    Raises KVTransferFailed, at once, if the file is not of this shape.
    """
    _check_caches(file, shape)
    return cut_into_blocks(shape.layout, [_arrays(layer, shape) for layer in file.caches[0]], first)


def snapshot(file: SlotFile, shape: SlotShape) -> list[Record]:
    """The snapshot at the end of the file's tokens: the window record, then the recurrent layers' states."""
    _check_caches(file, shape)
    layout, position = shape.layout, len(file.tokens)
    records: list[Record] = []
    if layout.window_layers:
        records.append(Window(position, np.stack([np.stack(_arrays(layer, shape)) for layer in file.caches[1]])))
    expected = (math.prod(layout.conv_shape), math.prod(layout.matrix_shape))
    for layer, (columns, matrix) in zip(layout.state_layers, file.states, strict=True):
        if (columns.size, matrix.size) != expected:
            raise KVTransferFailed(
                f"slot file: the columns and the matrix of a recurrent state must have {expected} numbers, not "
                f"({columns.size:,}, {matrix.size:,})"
            )
        heads, key_size, value_size = layout.matrix_shape
        columns, matrix = columns.reshape(layout.conv_shape), matrix.reshape(heads, value_size, key_size)
        if shape.key_heads:
            groups = (heads // shape.key_heads, shape.key_heads)
            columns, matrix = _regroup_heads(columns, matrix, layout, groups)
        numbers = np.concatenate([columns.reshape(-1), matrix.swapaxes(1, 2).reshape(-1)])
        records.append(RecurrentState(position, layer, numbers))
    return records


def build(tokens: Sequence[int], cache: KVCache, shape: SlotShape, streams: int) -> bytes:
    """A slot file of `cache`, which covers exactly `tokens`, for a server whose caches have `streams` streams.

    If the number of streams is wrong, the server still answers 200, and computes the prompt again. A cache of another
    dtype is cast once. Raises KVTransferFailed.
    """
    layout, count = shape.layout, len(tokens)
    cache.require_layout(layout)
    if cache.num_tokens != count or not tokens:
        raise KVTransferFailed(f"the KV cache covers {cache.num_tokens:,} tokens, but the prompt has {count:,}")
    words = np.asarray([-1, 1, count, *tokens, 0] if shape.packs_tokens else tokens, "<i4")
    head = struct.pack("<4sII", MAGIC, shape.version, len(words))
    parts: list[bytes | memoryview] = [head, words.tobytes()]
    full = (  # K of the full-attention layers, then V
        [np.concatenate([block.data[row, side] for block in cache.blocks]) for row in range(len(layout.full_layers))]
        for side in (0, 1)
    )
    parts += _cache_parts(full, count, cache.layout.dtype, shape, streams, tokens)
    if cache.window is not None:
        data = cache.window.data
        window_sides = (list(data[:, side]) for side in (0, 1))
        parts += _cache_parts(window_sides, data.shape[2], cache.layout.dtype, shape, streams, tokens)
    if cache.states:
        parts += _state_parts(cache.states, shape)
    return b"".join(parts)


def to_halves(keys: Array) -> Array:
    """K with interleaved pairs, (…, head_dim), as split halves: old index 2i+j becomes j·d/2+i."""
    pairs = keys.reshape(*keys.shape[:-1], -1, 2)
    return np.ascontiguousarray(np.swapaxes(pairs, -1, -2)).reshape(keys.shape)


def to_interleaved(keys: Array) -> Array:
    """The inverse of `to_halves`: new index 2i+j holds old j·d/2+i."""
    halves = keys.reshape(*keys.shape[:-1], 2, -1)
    return np.ascontiguousarray(np.swapaxes(halves, -1, -2)).reshape(keys.shape)


class _SlotFileReader:
    """Takes bytes off the front, beginning with magic and version. Every length is checked against the remaining bytes
    before it is used."""

    def __init__(self, data: memoryview) -> None:
        self._data = data
        self._position = 0
        if bytes(self.read_bytes(4, "magic")) != MAGIC:
            raise KVTransferFailed("the file is not a llama.cpp slot file")
        self.version = self.u32("version")
        if self.version not in _VERSIONS:
            known = ", ".join(map(str, _VERSIONS))
            raise KVTransferFailed(
                f"the llama.cpp slot file has version {self.version}; this program reads only versions {known}"
            )

    @property
    def bytes_left(self) -> int:
        return len(self._data) - self._position

    def read_bytes(self, size: int, field: str) -> memoryview:
        if size > self.bytes_left:
            raise KVTransferFailed(
                f"slot file ends inside its {field}: {size:,} bytes wanted, {self.bytes_left:,} left"
            )
        self._position += size
        return self._data[self._position - size : self._position]

    def u32(self, field: str) -> int:
        return int.from_bytes(self.read_bytes(4, field), "little")

    def u64(self, field: str) -> int:
        return int.from_bytes(self.read_bytes(8, field), "little")

    def words(self, count: int, field: str) -> Array:
        return np.frombuffer(self.read_bytes(count * 4, field), "<i4")


def _parse_tokens(reader: _SlotFileReader, most_tokens: int) -> tuple[bool, tuple[int, ...]]:
    """Whether they are packed, and the tokens."""
    tokens = words = reader.words(reader.u32("token list"), "token list")
    packs_tokens = reader.version > _VERSIONS[0] or words[:1].tolist() == [-1]
    if packs_tokens:
        if len(words) < 4 or tuple(words[:3]) != (-1, 1, len(words) - 4) or words[-1] != 0:
            raise KVTransferFailed("slot file: its token list has an unknown form")
        tokens = words[3:-1]
    if len(tokens) > most_tokens:
        raise KVTransferFailed(f"slot file: it holds {len(tokens):,} tokens, but the prompt has only {most_tokens:,}")
    if (tokens < 0).any():
        raise KVTransferFailed("slot file: some of its token ids are negative, so they don't stand for text")
    return packs_tokens, tuple(tokens.tolist())


def _parse_cache(reader: _SlotFileReader, num_tokens: int, form: SlotForm) -> tuple[int, tuple[SlotLayer, ...]]:
    """One cache: its number of streams, and the layers of the only stream with cells."""
    streams = reader.u32("streams")
    if not 1 <= streams <= MAX_STREAMS:
        raise KVTransferFailed(f"slot file: a cache can't have {streams:,} streams")
    layers: tuple[SlotLayer, ...] = ()
    for _ in range(streams):
        cells = reader.u32("cells")
        if not cells:
            continue
        if layers or cells > num_tokens:
            raise KVTransferFailed(
                f"slot file: it holds several sequences, or more cells ({cells:,}) than tokens ({num_tokens:,})"
            )
        layers = _parse_stream(reader, cells, num_tokens, form)
    if not layers:
        raise KVTransferFailed("slot file: it has no cells")
    return streams, layers


def _parse_states(reader: _SlotFileReader, num_tokens: int, form: SlotForm) -> tuple[tuple[Array, Array], ...]:
    header = tuple(reader.words(5, "state").tolist())
    if header != (1, num_tokens - 1, 0, 0, form.layers):
        raise KVTransferFailed(f"slot file: its recurrent state has an unknown form ({header})")
    columns = [_parse_state(reader) for _ in range(form.recurrent)]
    return tuple(zip(columns, [_parse_state(reader) for _ in range(form.recurrent)], strict=True))


def _parse_state(reader: _SlotFileReader) -> Array:
    kind, size = reader.u32("state type"), reader.u64("state size")
    if _GGML_TYPES.get(kind) != "f32" or size % 4:
        raise KVTransferFailed(f"slot file: a state has ggml type {kind} and {size:,} bytes; only f32 can be read")
    return np.frombuffer(reader.read_bytes(size, "state"), "<f4")


def _parse_stream(reader: _SlotFileReader, cells: int, num_tokens: int, form: SlotForm) -> tuple[SlotLayer, ...]:
    words = _cell_words(reader.version, form)
    meta = reader.words(cells * words, "cells").reshape(cells, words)
    if (meta[:, 1] != 1).any():
        raise KVTransferFailed("slot file: each cell must belong to exactly one sequence")
    order = np.argsort(meta[:, 0], kind="stable")
    if not np.array_equal(meta[order, 0], np.arange(num_tokens - cells, num_tokens)):
        raise KVTransferFailed("slot file: the positions of the cells have a gap, or do not end at the last token")
    v_trans, count = reader.u32("v_trans"), reader.u32("layers")
    rotations = reader.u64("rotations") if reader.version >= _ROTATIONS else 0
    if v_trans:
        raise KVTransferFailed("slot file: V is transposed; start llama-server with flash attention on (-fa on)")
    if rotations or not 1 <= count <= MAX_LAYERS:
        raise KVTransferFailed(f"slot file: {count:,} layers with rotations {rotations:#x} can't be read")
    # If the cells are in order, as they nearly always are, the rows stay views of the file.
    cell_order = slice(None) if (order[1:] > order[:-1]).all() else order
    keys = [_parse_rows(reader, cells) for _ in range(count)]
    values = [_parse_rows(reader, cells) for _ in range(count)]
    for (key_type, _), (value_type, _) in zip(keys, values, strict=True):
        if key_type != value_type:
            raise KVTransferFailed(f"slot file: K has type {key_type}, but V has {value_type}; both must be the same")
    return tuple(SlotLayer(kind, k[cell_order], v[cell_order]) for (kind, k), (_, v) in zip(keys, values, strict=True))


def _cell_words(version: int, form: SlotForm) -> int:
    """How many words each cell takes before its rows."""
    if not form.mrope:
        return 3
    return 6 if version >= _CELL_TOKENS else 5


def _parse_rows(reader: _SlotFileReader, cells: int) -> tuple[DType, Array]:
    kind, row_bytes = reader.u32("row type"), reader.u64("row size")
    if kind not in _GGML_TYPES:
        raise KVTransferFailed(f"slot file: its rows have ggml type {kind}; only f32, f16 and bf16 are transferred")
    if not row_bytes or row_bytes % NUMPY_TYPES[_GGML_TYPES[kind]].itemsize:
        raise KVTransferFailed(f"slot file: a row can't have {row_bytes:,} bytes")
    rows = np.frombuffer(reader.read_bytes(cells * row_bytes, "rows"), np.uint8)
    return _GGML_TYPES[kind], rows.reshape(cells, row_bytes)


def _check_caches(file: SlotFile, shape: SlotShape) -> None:
    layer_counts = tuple(map(len, file.caches))
    if layer_counts != shape.caches or len(file.states) != len(shape.layout.state_layers):
        raise KVTransferFailed(f"slot file: its caches have {layer_counts} layers, but the model has {shape.caches}")


def _arrays(layer: SlotLayer, shape: SlotShape) -> tuple[Array, Array]:
    keys, values = _typed_rows(layer, layer.keys, shape.layout), _typed_rows(layer, layer.values, shape.layout)
    return (to_halves(keys) if shape.interleaved else keys), values


def _typed_rows(layer: SlotLayer, rows: Array, layout: KVLayout) -> Array:
    expected = _row_bytes(layout)
    if layer.dtype != layout.dtype or rows.shape[1] != expected:
        raise KVTransferFailed(
            f"slot file: its rows have {rows.shape[1]:,} bytes of {layer.dtype}; the model's rows have "
            f"{expected:,} bytes of {layout.dtype}"
        )
    return rows.view(layout.numpy_type).reshape(len(rows), layout.kv_heads, layout.head_dim)


def _row_bytes(layout: KVLayout) -> int:
    return layout.kv_heads * layout.head_dim * layout.numpy_type.itemsize


def _cache_parts(
    sides: Iterable[Sequence[Array]], cells: int, dtype: DType, shape: SlotShape, streams: int, tokens: Sequence[int]
) -> Iterator[bytes | memoryview]:
    """The parts of one cache in the file. `sides`: K of its layers, then V. Its cells are the last positions of
    `tokens`."""
    layout = shape.layout
    meta = np.zeros((cells, _cell_words(shape.version, shape.form)), "<i4")
    meta[:, 0] = np.arange(len(tokens) - cells, len(tokens))
    meta[:, 1] = 1
    if shape.form.mrope:
        meta[:, 2] = meta[:, 3] = meta[:, 0]
        if shape.version >= _CELL_TOKENS:
            meta[:, 4] = tokens[len(tokens) - cells :]
    row = struct.pack("<iQ", _GGML_IDS[layout.dtype], _row_bytes(layout))
    yield struct.pack("<II", streams, cells) + meta.tobytes()
    for side_index, side in enumerate(sides):
        if side_index == 0:
            yield struct.pack("<II", 0, len(side)) + bytes(8 if shape.version >= _ROTATIONS else 0)
        for rows in side:
            yield row
            in_dtype = rows if dtype == layout.dtype else cast(rows, dtype, layout.dtype)
            in_order = to_interleaved(in_dtype) if side_index == 0 and shape.interleaved else in_dtype
            yield np.ascontiguousarray(in_order).data.cast("B")
    yield bytes(4) * (streams - 1)


def _state_parts(states: Sequence[RecurrentState], shape: SlotShape) -> Iterator[bytes]:
    layout, state_bytes = shape.layout, []
    for state in states:
        # llama.cpp clears a state by multiplying it by 0. This doesn't remove inf and nan, so the slot's next sequence
        # would be computed from them.
        if not is_finite(state.data, "f32"):
            raise KVTransferFailed(f"the recurrent state of layer {state.layer} holds inf or nan")
        columns, matrix = layout.state_parts(state.data)
        matrix = matrix.swapaxes(1, 2)
        if shape.key_heads:
            heads = layout.matrix_shape[0]
            columns, matrix = _regroup_heads(columns, matrix, layout, (shape.key_heads, heads // shape.key_heads))
        state_bytes.append((columns.tobytes(), matrix.tobytes()))
    yield struct.pack("<IiIII", 1, states[0].position - 1, 0, 0, layout.num_layers)
    for side in (0, 1):
        yield from (struct.pack("<iQ", _GGML_IDS["f32"], len(parts[side])) + parts[side] for parts in state_bytes)


def _regroup_heads(columns: Array, matrix: Array, layout: KVLayout, groups: tuple[int, int]) -> tuple[Array, Array]:
    """A state with its value heads, which are in the order that `groups` gives, in the other order."""
    heads, _, value_size = layout.matrix_shape
    first = len(columns) - heads * value_size  # the channels of queries and keys come before those of values
    values = columns[first:].reshape(*groups, value_size, -1).swapaxes(0, 1).reshape(-1, columns.shape[1])
    new_matrix = matrix.reshape(*groups, *matrix.shape[1:]).swapaxes(0, 1).reshape(matrix.shape)
    return np.concatenate([columns[:first], values]), new_matrix
