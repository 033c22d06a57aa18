"""Block keys: which record contains which tokens of which model.

A block's chain hash covers the fingerprint, the producer's sketch, and every token from the start of the sequence to
the block's end. So equal hashes mean equal KV. Blocks within the class-wide part are keyed by content and shared.
Blocks of a conversation are keyed by its tag and content, for its next turns. Later blocks carry the job id and have
one owner, who deletes them.

    kv:<fingerprint>:<chain hash>            shared; removed only by TTL or eviction
    kv:<fingerprint>:<tag>.<chain hash>      the same, but only for conversations with this tag
    kv:<fingerprint>:<job id>:<chain hash>   one job's own; deleted after its ack
    kvw:...                                  window records, keyed the same way
    kvw:...<chain hash>.<layer>              a recurrent layer's state, keyed the same way
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

import numpy as np

from messages.kv import KVLayout

_hash = partial(hashlib.blake2b, digest_size=16, key=b"kvasir.chain")


@dataclass(frozen=True, slots=True)
class BlockRef:
    """One stored block, window record or state: its key, and the token positions [start, end) that it covers."""

    key: str
    chain: str  # 32 hex digits
    start: int
    end: int
    is_shared: bool
    layer: int | None = None  # the layer of a recurrent state; None for all other records
    is_tagged: bool = False  # shared by all conversations with the same tag


def block_refs(
    fingerprint: str,
    layout: KVLayout,
    tokens: Sequence[int],
    num_tokens: int,
    shared_tokens: int,
    job_id: str,
    sketch: str = "",
    tag: str = "",
) -> list[BlockRef]:
    """Return references to the blocks of the first `num_tokens` of `tokens`, in order.

    Blocks that are wholly within the first `shared_tokens` are shared by all producers with this `sketch`. With a
    `tag`, all other whole blocks are stored under it.
    """
    ids = tuple(tokens[:num_tokens])
    return list(_block_refs(fingerprint, layout, ids, shared_tokens, job_id, sketch, tag))


@lru_cache(maxsize=16)  # called with the same arguments when a job's blocks are stored, fetched and deleted
def _block_refs(
    fingerprint: str, layout: KVLayout, tokens: tuple[int, ...], shared_tokens: int, job_id: str, sketch: str, tag: str
) -> list[BlockRef]:
    ids = np.asarray(tokens, "<u4")
    refs = []
    chain = _hash(f"{fingerprint}/{layout.block_tokens}/{layout.dtype}{sketch and '/'}{sketch}".encode()).digest()
    for start, end in layout.block_spans(len(tokens)):
        chain = _hash(chain + ids[start:end].tobytes()).digest()
        name = chain.hex()
        whole = end - start == layout.block_tokens
        is_class_wide = whole and end <= shared_tokens
        has_tag = whole and bool(tag) and not is_class_wide
        owner = "" if is_class_wide else f"{tag}." if has_tag else f"{job_id}:"
        refs.append(
            BlockRef(f"kv:{fingerprint}:{owner}{name}", name, start, end, is_class_wide or has_tag, is_tagged=has_tag)
        )
    return refs


def window_ref(last_block: BlockRef) -> BlockRef:
    """Return the reference to the window record at the end of a block."""
    return BlockRef(
        "kvw" + last_block.key.removeprefix("kv"),
        last_block.chain,
        last_block.end,
        last_block.end,
        last_block.is_shared,
    )


def snapshot_refs(layout: KVLayout, last_block: BlockRef) -> list[BlockRef]:
    """Return the snapshot at the end of a block: the window record, if the layout has one, then the states."""
    window = window_ref(last_block)
    states = [
        BlockRef(f"{window.key}.{layer}", f"{window.chain}.{layer}", window.start, window.end, window.is_shared, layer)
        for layer in layout.state_layers
    ]
    return [window, *states] if layout.window_layers else states


def is_shared(key: str) -> bool:
    """Whether a key is of a shared record. It has exactly two colons, since fingerprints and job ids contain none."""
    return key.startswith(("kv:", "kvw:")) and key.count(":") == 2


def shared_boundary(layout: KVLayout, shared_tokens: int) -> int:
    """Return the length of the class-wide part, rounded down to whole blocks."""
    return shared_tokens - shared_tokens % layout.block_tokens
