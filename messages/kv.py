"""The canonical KV cache: engine-neutral arrays and their shapes. No I/O.

For each layer, K and V have the shape (tokens, kv_heads, head_dim). K is stored after RoPE, with the rotated pairs
split in halves (x[i], x[i + head_dim/2]), as PyTorch and MLX keep it. bfloat16 has no NumPy type and travels as its
16-bit pattern. A recurrent layer's state is always float32: first the columns that its convolution looks back at, of
shape (channels, columns), oldest first; then its matrix, of shape (heads, key size, value size).
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from messages import checks
from messages.errors import InvalidMessage, KVTransferFailed

DType = Literal["f16", "bf16", "f32"]
NUMPY_TYPES: dict[str, np.dtype[Any]] = {
    "f16": np.dtype("<f2"),
    "bf16": np.dtype("<u2"),  # bit pattern
    "f32": np.dtype("<f4"),
}

# Keyed by dtype: an unsigned type of the same width, a bitmask of all bits except the sign, and a bitmask of the
# exponent.
_BITS: dict[DType, tuple[np.dtype[Any], int, int]] = {
    "f16": (np.dtype("<u2"), 0x7FFF, 0x7C00),
    "bf16": (np.dtype("<u2"), 0x7FFF, 0x7F80),
    "f32": (np.dtype("<u4"), 0x7FFFFFFF, 0x7F800000),
}

MAX_BLOCK_TOKENS = 32
# Redis transfers values of 1 to 4 MiB fastest, if a pipeline has many of them. Larger values make GETs slower.
MAX_BLOCK_BYTES = 4 << 20

Array = NDArray[Any]
STATE_TYPE: np.dtype[Any] = NUMPY_TYPES["f32"]


@dataclass(frozen=True)
class KVLayout:
    """The shape of a model's KV cache, and the kind of each layer, by its index.

    A `full` layer attends to every position, a `window` layer to the last `window` positions. A `recurrent` layer
    attends to none and keeps a recurrent state instead. A `both` layer attends to every position and also keeps a
    state. Layers that are not listed are full.
    """

    num_layers: int
    kv_heads: int
    head_dim: int  # of K
    dtype: DType
    window: int = 0
    window_layers: tuple[int, ...] = ()
    v_head_dim: int | None = None  # V's head size; None means the same as K's, and 0 means that only K is kept
    recurrent_layers: tuple[int, ...] = ()
    both_layers: tuple[int, ...] = ()
    conv_shape: tuple[int, ...] = ()  # (channels, columns) of a state's convolution part; empty if not known
    matrix_shape: tuple[int, ...] = ()  # (heads, key size, value size) of a state's matrix; empty if there is none

    def __post_init__(self) -> None:
        checks.whole("num_layers", self.num_layers, 1, 1024)
        checks.whole("kv_heads", self.kv_heads, 1, 1024)
        checks.whole("head_dim", self.head_dim, 1, 4096)
        checks.one_of("dtype", self.dtype, NUMPY_TYPES)
        checks.whole("window", self.window, 0, 1 << 24)
        if self.v_head_dim is not None:
            checks.whole("v_head_dim", self.v_head_dim, 0, 4096)
        listed_layers = (*self.window_layers, *self.recurrent_layers, *self.both_layers)
        for layer in listed_layers:
            checks.whole("window_layers, recurrent_layers and both_layers", layer, 0, self.num_layers - 1)
        if len(set(listed_layers)) != len(listed_layers):
            raise InvalidMessage(
                "a layer may appear in only one of window_layers, recurrent_layers and both_layers, and only once"
            )
        if bool(self.window_layers) != bool(self.window):
            raise InvalidMessage("window_layers and window must be given together")
        for name, shape, sizes in (("conv_shape", self.conv_shape, 2), ("matrix_shape", self.matrix_shape, 3)):
            if shape and (len(shape) != sizes or not self.state_layers):
                raise InvalidMessage(
                    f"{name} must hold {sizes} numbers, and is allowed only for a model with recurrent layers"
                )
            for size in shape:
                checks.whole(name, size, 1, 1 << 20)

    @cached_property
    def full_layers(self) -> tuple[int, ...]:
        """Indices of the layers that attend to every position, in order."""
        partial_layers = {*self.window_layers, *self.recurrent_layers}
        return tuple(i for i in range(self.num_layers) if i not in partial_layers)

    @cached_property
    def state_layers(self) -> tuple[int, ...]:
        """Indices of the layers with a recurrent state, in order."""
        return tuple(sorted((*self.recurrent_layers, *self.both_layers)))

    @property
    def snapshots(self) -> bool:
        """Whether some layers keep only the end of a sequence. Such a cache can't be cut, and can only be resumed where
        it was stored."""
        return bool(self.window_layers or self.state_layers)

    @cached_property
    def state_size(self) -> int:
        """How many numbers one layer's state has."""
        return sum(math.prod(shape) for shape in (self.conv_shape, self.matrix_shape) if shape)

    @property
    def state_bytes(self) -> int:
        """Bytes of the states of all recurrent layers at one position."""
        return len(self.state_layers) * self.state_size * STATE_TYPE.itemsize

    def state_parts(self, data: Array) -> tuple[Array, Array]:
        """A state's numbers as views of its two parts: the convolution's columns and the matrix."""
        columns = math.prod(self.conv_shape)
        return data[:columns].reshape(self.conv_shape), data[columns:].reshape(self.matrix_shape or (0,))

    @property
    def why_unsupported(self) -> str:
        """Why this version can't transfer a cache with this layout, as a sentence; "": it can."""
        if self.state_layers and not self.conv_shape:
            return "the size of the model's recurrent states is unknown"
        if self.state_size * STATE_TYPE.itemsize > MAX_BLOCK_BYTES:
            return f"one layer's recurrent state takes more than {MAX_BLOCK_BYTES >> 20} MiB, and can't be stored"
        if self.v_head_dim not in (None, self.head_dim):
            return f"K is {self.head_dim} wide and V {self.v_head_dim}; unequal widths can't be transferred yet"
        return ""

    @property
    def numpy_type(self) -> np.dtype[Any]:
        """The NumPy type that carries `dtype`."""
        return NUMPY_TYPES[self.dtype]

    @cached_property
    def token_bytes(self) -> int:
        """Bytes of K and V for one token in all full-attention layers."""
        widths = self.head_dim + (self.head_dim if self.v_head_dim is None else self.v_head_dim)
        return len(self.full_layers) * self.kv_heads * widths * self.numpy_type.itemsize

    @cached_property
    def block_tokens(self) -> int:
        """The largest power of two, at most 32, whose block payload is at most 4 MiB."""
        fitting = MAX_BLOCK_BYTES // max(1, self.token_bytes)
        return int(min(MAX_BLOCK_TOKENS, 2 ** int(math.log2(max(1, fitting)))))

    def block_shape(self, num_tokens: int) -> tuple[int, int, int, int, int]:
        """(full layers, K and V, tokens, kv_heads, head_dim)."""
        return (len(self.full_layers), 2, num_tokens, self.kv_heads, self.head_dim)

    def window_shape(self, rows: int) -> tuple[int, int, int, int, int]:
        """(window layers, K and V, rows, kv_heads, head_dim)."""
        return (len(self.window_layers), 2, rows, self.kv_heads, self.head_dim)

    def block_spans(self, num_tokens: int) -> list[tuple[int, int]]:
        """[start, end) of each block of a cache of `num_tokens`; only the last may be shorter than block_tokens."""
        step = self.block_tokens
        return [(start, min(start + step, num_tokens)) for start in range(0, num_tokens, step)]


@dataclass(frozen=True, slots=True)
class Block:
    """K and V of consecutive tokens, for all full-attention layers.

    `data` has the shape `layout.block_shape(num_tokens)`: (full layers, 2, tokens, kv_heads, head_dim), C-contiguous,
    K at index 0 and V at index 1 of the second axis. Treat it as read-only: it may be shared.
    """

    start: int
    data: Array

    @property
    def num_tokens(self) -> int:
        """Tokens in this block."""
        return int(self.data.shape[2])

    @property
    def end(self) -> int:
        """Position after the last token."""
        return self.start + self.num_tokens


@dataclass(frozen=True, slots=True)
class Window:
    """The state of the sliding-window layers at one position: at least the last `window - 1` rows before it.

    `data` has the shape `layout.window_shape(rows)`: (window layers, 2, rows, kv_heads, head_dim), oldest row first;
    the rows end at `position` (exclusive), so row r is position - rows + r.
    """

    position: int
    data: Array


@dataclass(frozen=True, slots=True)
class RecurrentState:
    """The recurrent state of one layer after the first `position` tokens.

    `data` is float32 of the shape (layout.state_size,): see `KVLayout.state_parts`.
    """

    position: int
    layer: int
    data: Array


Record = Block | Window | RecurrentState


@dataclass(frozen=True)
class KVCache:
    """Keys and values of the first `num_tokens` tokens of a sequence, as blocks in order from position 0.

    It also holds what the other layers keep at its end: the window record, and a state for each recurrent layer, in
    order.
    """

    layout: KVLayout
    blocks: tuple[Block, ...]
    window: Window | None = None
    states: tuple[RecurrentState, ...] = ()

    def __post_init__(self) -> None:
        position = 0
        for block in self.blocks:
            if block.start != position:
                raise KVTransferFailed(f"a KV block must begin at position {position}, not {block.start}")
            if block.data.shape != self.layout.block_shape(block.num_tokens):
                raise KVTransferFailed(
                    f"a KV block has shape {block.data.shape}, not {self.layout.block_shape(block.num_tokens)}"
                )
            if block.data.dtype != self.layout.numpy_type:
                raise KVTransferFailed(f"a KV block has dtype {block.data.dtype}, not {self.layout.dtype}")
            position = block.end
        self._check_window(position)
        if [(state.layer, state.position) for state in self.states] != [
            (n, position) for n in self.layout.state_layers
        ]:
            raise KVTransferFailed(f"each recurrent layer must have exactly one state, at position {position}")
        if any(
            state.data.shape != (self.layout.state_size,) or state.data.dtype != STATE_TYPE for state in self.states
        ):
            raise KVTransferFailed(f"a recurrent state must have {self.layout.state_size:,} float32 values")

    def _check_window(self, position: int) -> None:
        layout, window = self.layout, self.window
        if layout.window_layers and (window is None or window.position != position):
            raise KVTransferFailed(f"there is no window record at position {position}")
        if window is None:
            return
        data, rows, min_rows = window.data, window.data.shape[2], min(layout.window - 1, position)
        if data.shape != layout.window_shape(rows) or data.dtype != layout.numpy_type:
            raise KVTransferFailed(f"the window record has the wrong dtype or shape: {data.dtype}, {data.shape}")
        if rows < min_rows:
            raise KVTransferFailed(f"the window record has {rows} rows, but needs {min_rows}")

    @property
    def num_tokens(self) -> int:
        """Tokens covered."""
        return self.blocks[-1].end if self.blocks else 0

    @property
    def records(self) -> list[Record]:
        """All records of the cache, blocks first."""
        return [*self.blocks, *([self.window] if self.window else []), *self.states]

    @property
    def window_rows(self) -> Array:
        """The rows that the sliding-window layers look back at, at most `window - 1`, as a view of the shape that
        `Window` describes."""
        if self.window is None:
            return np.empty(self.layout.window_shape(0), self.layout.numpy_type)
        rows, min_rows = self.window.data.shape[2], min(self.layout.window - 1, self.num_tokens)
        return self.window.data[:, :, rows - min_rows :]

    def require_layout(self, model_layout: KVLayout) -> None:
        """Raises KVTransferFailed unless a model with this layout can load the cache, cast to its dtype."""
        if replace(self.layout, dtype=model_layout.dtype) != model_layout:
            raise KVTransferFailed(
                f"the KV cache has the layout {self.layout}, but the model has the layout {model_layout}"
            )

    def require_part_of(self, tokens: int, min_evaluated: int = 1) -> None:
        """Raises KVTransferFailed unless the cache leaves at least `min_evaluated` of a prompt's `tokens` to be
        evaluated."""
        if self.num_tokens > tokens - min_evaluated:
            none = ": none is left to evaluate" if min_evaluated else ""
            raise KVTransferFailed(
                f"the KV cache is too long: it covers {self.num_tokens:,} of the prompt's {tokens:,} tokens{none}"
            )


def assemble_cache(layout: KVLayout, records: Sequence[Record]) -> KVCache:
    """The KV cache that a prefill's records form together. Raises KVTransferFailed if they don't form one."""
    blocks = tuple([record for record in records if isinstance(record, Block)])
    windows = [record for record in records if isinstance(record, Window)]
    states = tuple([record for record in records if isinstance(record, RecurrentState)])
    return KVCache(layout, blocks, windows[-1] if windows else None, states)


def cut_into_blocks(layout: KVLayout, layers: Sequence[tuple[Array, Array]], first: int = 0) -> Iterable[Block]:
    """Blocks of a cache given as (K, V) of each full-attention layer, each (tokens, kv_heads, head_dim).

    `first` skips the blocks that end at or before that position, so a caller that resumed need not copy them.
    """
    for start, end in layout.block_spans(layers[0][0].shape[0]):
        if end <= first:
            continue
        data = np.empty(layout.block_shape(end - start), layout.numpy_type)
        for row, (keys, values) in enumerate(layers):
            data[row, 0] = keys[start:end]
            data[row, 1] = values[start:end]
        yield Block(start, data)


def cast(data: Array, source: DType, target: DType) -> Array:
    """`data` in another dtype. This is the only cast in a KV transfer. Raises KVTransferFailed if the result is not
    finite."""
    floats = data if source != "bf16" else (data.astype(np.uint32) << 16).view(np.float32)
    if target == "bf16":
        result = data if source == "bf16" else _to_bf16(floats)
    else:
        with np.errstate(over="ignore"):
            result = floats.astype(NUMPY_TYPES[target], copy=False)
    if not is_finite(result, target):
        raise KVTransferFailed(f"the KV cache holds inf or nan after the cast from {source} to {target}")
    return result


def is_finite(data: Array, dtype: DType) -> bool:
    """Whether no value is inf or nan, whose exponent bits are all set. Takes 30 ms for 200 MiB."""
    bits, unsigned, exponent = _BITS[dtype]
    return int((data.view(bits) & unsigned).max(initial=0)) < exponent


def _to_bf16(data: Array) -> Array:
    """Round to nearest even, as hardware does; nan stays nan."""
    bits = np.ascontiguousarray(data, np.float32).view(np.uint32)
    bf16_bits = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return np.where(np.isnan(data), 0x7FC0, bf16_bits).astype(np.uint16)
