"""KV caches made of random bits, and where they would be stored."""

from collections.abc import Callable
from typing import Any

import numpy as np

from engines.registry import Engine
from kvstore.blocks import BlockRef, block_refs, snapshot_refs, window_ref
from messages.kv import Array, Block, DType, KVCache, KVLayout, Record, RecurrentState, Window, assemble_cache

FINGERPRINT = "tiny-qwen3-0123abcd"


def layout(dtype: DType = "f16", *, window: int = 0) -> KVLayout:
    """Four small layers; with a `window`, the odd ones slide."""
    return KVLayout(4, 2, 8, dtype, window, (1, 3) if window else ())


def tokens(count: int, seed: int = 0) -> list[int]:
    """Token ids that differ from one seed to another."""
    return np.random.default_rng(seed).integers(0, 150_000, count).tolist()


def refs_of(
    lay: KVLayout, count: int, shared_tokens: int = 0, fingerprint: str = FINGERPRINT, job: str = "job-1"
) -> list[BlockRef]:
    """The refs of a sequence of `count` tokens."""
    return block_refs(fingerprint, lay, tokens(count), count, shared_tokens, job)


def block(lay: KVLayout, ref: BlockRef) -> Block:
    """A block for `ref`, of random bits (nan and inf among them: a store has no opinion)."""
    return Block(ref.start, _random(lay.block_shape(ref.end - ref.start), lay, ref.start))


def records_of(lay: KVLayout, refs: list[BlockRef]) -> list[tuple[BlockRef, Block]]:
    """A block for each ref."""
    return [(ref, block(lay, ref)) for ref in refs]


def window(lay: KVLayout, last: BlockRef, rows: int | None = None) -> tuple[BlockRef, Window]:
    """The window record at the end of a block: as many rows as are needed, if `rows` doesn't say."""
    rows = min(last.end, lay.window - 1) if rows is None else rows
    shape = (len(lay.window_layers), 2, rows, lay.kv_heads, lay.head_dim)
    return window_ref(last), Window(last.end, _random(shape, lay, last.end))


def hybrid(dtype: DType = "f16") -> KVLayout:
    """Four small layers: two with a recurrent state only, one with attention beside it, one with attention only."""
    return KVLayout(
        4, 2, 8, dtype, recurrent_layers=(0, 1), both_layers=(2,), conv_shape=(24, 3), matrix_shape=(2, 4, 8)
    )


def states(lay: KVLayout, last: BlockRef) -> list[tuple[BlockRef, RecurrentState]]:
    """The states at the end of a block: random numbers, others in each layer."""
    states = []
    for ref in snapshot_refs(lay, last):
        assert ref.layer is not None
        numbers = np.random.default_rng((last.end, ref.layer)).standard_normal(lay.state_size)
        states.append((ref, RecurrentState(last.end, ref.layer, numbers.astype(np.float32))))
    return states


def prefilled(engine: Engine, tokens: tuple[int, ...], **how: Any) -> KVCache:
    """The cache of these tokens."""
    records: list[Record] = []
    engine.prefill(tokens, records.append, **how)
    assert engine.info.layout is not None
    return assemble_cache(engine.info.layout, records)


def same_bits(left: Array, right: Array) -> bool:
    """Equal in type, shape and every bit (nan included)."""
    return left.dtype == right.dtype and left.shape == right.shape and left.tobytes() == right.tobytes()


def raised_by(action: Callable[[], object], kind: type[BaseException]) -> str:
    """The text of the `kind` that `action` raises; "" if it raises nothing. Anything else goes through."""
    try:
        action()
    except kind as error:
        return str(error)
    return ""


def _random(shape: tuple[int, ...], lay: KVLayout, seed: int) -> Array:
    count = int(np.prod(shape)) * lay.numpy_type.itemsize
    bits = np.random.default_rng(seed).integers(0, 256, count, np.uint8)
    return bits.view(lay.numpy_type).reshape(shape)


def layer_of(cache: KVCache, index: int) -> tuple[Array, Array]:
    """K and V of one full-attention layer, each (tokens, kv_heads, head_dim)."""
    row = cache.layout.full_layers.index(index)
    keys, values = (np.concatenate([block.data[row, side] for block in cache.blocks]) for side in (0, 1))
    return keys, values
