"""Converts PyTorch's `past_key_values` to canonical KV blocks and back.

A transformers cache keeps, per layer, K and V as (1, kv_heads, tokens, head_dim), K after RoPE in split halves: the
canonical layout with two axes swapped. A sliding-window layer keeps its last `window - 1` rows only, oldest first, and
counts apart how many it has seen. A recurrent layer keeps its convolution's last columns, of which the oldest is never
read again, as (1, channels, columns + 1), and its matrix as (1, heads, key size, value size).

From a CUDA device, copies go into pinned memory on a separate stream, in parallel with computing.
"""

from collections.abc import Iterator, Sequence
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from transformers import DynamicCache
from transformers.cache_utils import LinearAttentionLayer

from messages.errors import InvalidMessage, KVTransferFailed
from messages.kv import Array, Block, DType, KVCache, KVLayout, Record, RecurrentState, Window

TORCH_TYPES: dict[DType, torch.dtype] = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}


def layout_of(past: DynamicCache) -> KVLayout:
    """The layout of a cache that holds at least one token.

    Raises KVTransferFailed, which says why such a cache can't be transferred.
    """
    recurrent = {index: layer for index, layer in enumerate(past.layers) if type(layer) is LinearAttentionLayer}
    attending = {index: layer for index, layer in enumerate(past.layers) if index not in recurrent}
    shapes = {_shape(index, layer) for index, layer in attending.items()}
    states = {_state_shapes(index, layer) for index, layer in recurrent.items()}
    if len(shapes) != 1 or len(states) > 1:
        raise KVTransferFailed("the caches of the model's layers differ in size or type")
    windows = {layer.sliding_window for layer in attending.values() if layer.is_sliding}
    if len(windows) > 1:
        raise KVTransferFailed("the model's sliding windows differ in length")
    window_layers = tuple(index for index, layer in attending.items() if layer.is_sliding)
    if len(window_layers) == len(attending):
        raise KVTransferFailed(
            "every attention layer has a sliding window, so Kvasir would have no KV blocks to transfer"
        )
    kv_heads, head_dim, dtype = shapes.pop()
    columns, matrix = states.pop() if states else ((), ())
    try:
        plain = KVLayout(len(past.layers), kv_heads, head_dim, dtype, max(windows, default=0), window_layers)
        return replace(plain, recurrent_layers=tuple(recurrent), conv_shape=columns, matrix_shape=matrix)
    except InvalidMessage as error:
        raise KVTransferFailed(str(error)) from None


def restore(past: DynamicCache, cache: KVCache, layout: KVLayout, device: torch.device) -> None:
    """Fill the empty `past` from a canonical cache, cast once to this model's dtype.

    Raises KVTransferFailed if the cache has other shapes, or holds inf or nan.
    """
    cache.require_layout(layout)
    finite = [_set_state(past.layers[state.layer], state, layout, device) for state in cache.states]
    for index in sorted((*layout.full_layers, *layout.window_layers)):
        layer = past.layers[index]
        rows = _rows(cache, index, device).to(TORCH_TYPES[layout.dtype])
        finite.append(torch.isfinite(rows).all())
        keys, values = rows.transpose(1, 2).unsqueeze(1)  # both have the shape (1, kv_heads, tokens, head_dim)
        layer.update(keys, values)
        if layer.is_sliding:
            layer.cumulative_length = cache.num_tokens
    if not bool(torch.stack(finite).all()):
        raise KVTransferFailed(
            f"the KV cache holds inf or nan after the cast from {cache.layout.dtype} to {layout.dtype}"
        )


def fork_layers(past: DynamicCache) -> list[Any]:
    """The layers for another sequence that starts with this one.

    PyTorch appends keys and values by making new tensors, so several sequences may share the old ones. It overwrites
    recurrent states in place, so these are copied.
    """
    layers = [copy(layer) for layer in past.layers]
    for layer in layers:
        if type(layer) is LinearAttentionLayer:
            for name, value in vars(layer).items():
                if isinstance(value, dict):
                    setattr(
                        layer,
                        name,
                        {key: part.clone() if torch.is_tensor(part) else part for key, part in value.items()},
                    )
    return layers


@dataclass(frozen=True)
class Copies:
    """Blocks that are being copied to this machine's memory."""

    blocks: tuple[Block, ...]
    copy_event: torch.cuda.Event | None  # None if all blocks have been copied

    def wait_for_blocks(self) -> Iterator[Block]:
        """The blocks, after waiting for their copies."""
        if self.copy_event is not None:
            self.copy_event.synchronize()
        yield from self.blocks


class Exporter:
    """Copies a model's caches out as canonical blocks."""

    def __init__(self, layout: KVLayout, device: torch.device) -> None:
        self._layout = layout
        self._side = torch.cuda.Stream(device) if device.type == "cuda" else None

    def blocks(self, past: DynamicCache, spans: Sequence[tuple[int, int]]) -> Copies:
        """The blocks of neighbouring `spans` [start, end), as canonical arrays of their own memory.

        The values are gathered at once, so `past` may continue to grow.
        """
        if not spans:
            return Copies((), None)
        begin, end = spans[0][0], spans[-1][1]
        all_rows = torch.stack([_layer_rows(past.layers[i], begin, end) for i in self._layout.full_layers])
        if self._side is None:
            return Copies(tuple(self._block(all_rows, span, begin) for span in spans), None)
        self._side.wait_stream(torch.cuda.current_stream(all_rows.device))
        with torch.cuda.stream(self._side):
            blocks = tuple(self._block(all_rows, span, begin) for span in spans)
            all_rows.record_stream(self._side)
            return Copies(blocks, self._side.record_event())

    def snapshot(self, past: DynamicCache) -> list[Record]:
        """Now: the state of the sliding-window layers, then those of the recurrent layers. Waits for them."""
        records: list[Record] = []
        if self._layout.window_layers:
            layers = [past.layers[index] for index in self._layout.window_layers]
            rows = torch.stack([_layer_rows(layer, 0, layer.keys.shape[-2]) for layer in layers])
            records.append(Window(past.get_seq_length(), as_numpy(rows.cpu().contiguous())))
        for index in self._layout.state_layers:
            layer = past.layers[index]
            parts = (layer.conv_states[0][0, :, 1:], layer.recurrent_states[0][0])
            numbers = torch.cat([part.float().reshape(-1) for part in parts])
            records.append(RecurrentState(past.get_seq_length(), index, as_numpy(numbers.cpu())))
        return records

    @staticmethod
    def _block(all_rows: torch.Tensor, span: tuple[int, int], begin: int) -> Block:
        rows = all_rows[:, :, span[0] - begin : span[1] - begin]
        # PyTorch keeps released pinned memory and reuses it, so pinning takes time only for the first blocks.
        host = torch.empty(rows.shape, dtype=rows.dtype, pin_memory=rows.is_cuda)
        host.copy_(rows, non_blocking=True)
        return Block(span[0], as_numpy(host))


def as_numpy(tensor: torch.Tensor) -> Array:
    """A view of a tensor in this machine's memory; bfloat16 appears as its bit pattern."""
    array: Array = (tensor.view(torch.uint16) if tensor.dtype is torch.bfloat16 else tensor).numpy()
    return array


def _shape(index: int, layer: Any) -> tuple[int, int, DType]:
    if not isinstance(layer.keys, torch.Tensor) or layer.keys.ndim != 4 or layer.keys.shape != layer.values.shape:
        raise KVTransferFailed(
            f"layer {index} ({type(layer).__name__}) must keep keys and values of the same shape, but does not"
        )
    names = [name for name, kind in TORCH_TYPES.items() if layer.keys.dtype is kind is layer.values.dtype]
    if not names:
        raise KVTransferFailed(
            f"layer {index} keeps its keys as {layer.keys.dtype}; only f32, f16 and bf16 are supported"
        )
    return int(layer.keys.shape[1]), int(layer.keys.shape[3]), names[0]


def _state_shapes(index: int, layer: LinearAttentionLayer) -> tuple[tuple[int, ...], tuple[int, ...]]:
    columns, matrix = layer.conv_states[0], layer.recurrent_states[0]
    if len(layer.conv_states) != 1 or columns is None or matrix is None or (columns.ndim, matrix.ndim) != (3, 4):
        raise KVTransferFailed(f"layer {index} keeps a recurrent state in an unknown form")
    channels, num_columns = columns.shape[1:]
    return (int(channels), int(num_columns) - 1), tuple(map(int, matrix.shape[1:]))


def _set_state(
    layer: LinearAttentionLayer, state: RecurrentState, layout: KVLayout, device: torch.device
) -> torch.Tensor:
    """Load a state into a new layer. Returns whether it is finite."""
    columns, matrix = (torch.from_numpy(np.array(part)).to(device) for part in layout.state_parts(state.data))
    columns = torch.nn.functional.pad(columns, (1, 0)).to(TORCH_TYPES[layout.dtype])
    layer.update_conv_state(columns.unsqueeze(0))
    layer.update_recurrent_state(matrix.unsqueeze(0))
    return torch.stack([torch.isfinite(columns).all(), torch.isfinite(matrix).all()]).all()


def _layer_rows(layer: Any, begin: int, end: int) -> torch.Tensor:
    """K and V of some positions, (2, tokens, kv_heads, head_dim)."""
    return torch.stack((layer.keys[0, :, begin:end], layer.values[0, :, begin:end])).transpose(1, 2)


def _rows(cache: KVCache, index: int, device: torch.device) -> torch.Tensor:
    """K and V of one layer as they were stored, (2, tokens, kv_heads, head_dim), on the device."""
    layout = cache.layout
    if index in layout.window_layers:
        parts = [cache.window_rows[layout.window_layers.index(index)]]
    else:
        row = layout.full_layers.index(index)
        parts = [block.data[row] for block in cache.blocks]
    shape = (2, sum(part.shape[1] for part in parts), layout.kv_heads, layout.head_dim)
    host = torch.empty(shape, dtype=TORCH_TYPES[layout.dtype], pin_memory=device.type == "cuda")
    np.concatenate(parts, axis=1, out=as_numpy(host))
    return host.to(device, non_blocking=True)
