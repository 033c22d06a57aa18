"""What a GGUF file tells about the KV caches that llama.cpp computes from it: shape, order of pairs, family name."""

from __future__ import annotations

import hashlib
import json
import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines import slotfile
from engines.gguf_file import GGUFFile
from engines.slotfile import SlotFile, SlotShape
from engines.vocabulary import vocabulary_hash
from messages.errors import HandOverFailed, InvalidMessage
from messages.kv import KVLayout

FORMAT = "llamacpp/1"  # changes when the same weights would give blocks that are laid out differently
# How llama.cpp rotates K, by general.architecture. Converters of the llama family reorder the rows of Q and K so that
# rotated pairs are neighbours; the others keep split halves.
_HALVES = {"qwen2", "qwen2moe", "qwen3", "qwen3moe", "gpt-oss"}
_INTERLEAVED = {"llama"}
# Every second layer, from the first, attends to a window only.
_ALTERNATING = {"gpt-oss"}


@dataclass(frozen=True, slots=True)
class Heads:
    """Attention sizes from a GGUF's metadata."""

    layers: int
    kv_heads: int
    head_dim: int


_PADDING = re.compile(r"\[PAD\d+\]")


def heads(gguf: GGUFFile) -> Heads:
    """Raises HandOverFailed if K and V, or the layers, differ in size."""
    layers, kv_heads = gguf.hyperparameter("block_count"), gguf.hyperparameter("attention.head_count_kv")
    queries = gguf.hyperparameter("attention.head_count")
    kv_heads = queries if kv_heads is None else kv_heads
    if isinstance(kv_heads, list) and len(set(kv_heads)) == 1:
        kv_heads = kv_heads[0]
    try:
        implied = gguf.hyperparameter("embedding_length", 0) // queries
        key, value = (gguf.hyperparameter(f"attention.{name}_length", implied) for name in ("key", "value"))
        sizes = Heads(int(layers), int(kv_heads), int(key))
    except (TypeError, ZeroDivisionError):
        raise HandOverFailed(f"{gguf.path.name} states no attention sizes that are the same in all layers") from None
    if key != value:
        raise HandOverFailed(f"{gguf.path.name} has keys of {key} and values of {value} numbers")
    return sizes


def slot_shape(gguf: GGUFFile, probe: SlotFile) -> SlotShape:
    """How this model's slot files are to be read, checked against one that the server wrote.

    Raises HandOverFailed with the reason why this model's KV cache can't be handed over.
    """
    architecture, sizes = gguf.architecture, heads(gguf)
    if architecture not in _HALVES | _INTERLEAVED:
        raise HandOverFailed(f"how llama.cpp keeps the keys of a {architecture!r} model is not known here")
    interleaved = architecture in _INTERLEAVED
    if interleaved and gguf.hyperparameter("rope.dimension_count", sizes.head_dim) != sizes.head_dim:
        raise HandOverFailed("only part of each key is rotated")
    window = gguf.hyperparameter("attention.sliding_window", 0) if architecture in _ALTERNATING else 0
    windowed = tuple(range(0, sizes.layers, 2)) if window else ()
    try:
        layout = KVLayout(sizes.layers, sizes.kv_heads, sizes.head_dim, probe.caches[0][0].dtype, window, windowed)
    except InvalidMessage as error:
        raise HandOverFailed(str(error)) from None
    shape = SlotShape(layout, interleaved)
    # Reading the probe checks that its caches, rows and types are what the metadata says.
    slotfile.to_blocks(probe, shape)
    slotfile.to_window(probe, shape)
    return shape


def tokenizer_hash(gguf: GGUFFile) -> str:
    """Names the vocabulary as a Hugging Face folder of the same model does; the chat template is no part of it."""
    tokens = [str(token) for token in gguf.metadata.get("tokenizer.ggml.tokens", [])]
    merges = [str(merge) for merge in gguf.metadata.get("tokenizer.ggml.merges", [])]
    while tokens and _PADDING.fullmatch(tokens[-1]):
        tokens.pop()
    return vocabulary_hash(tokens, merges)


def _tokenizer_digest(gguf: GGUFFile) -> str:
    """Everything that the file says of its tokenizer, settings included."""
    return _digest({key: value for key, value in gguf.metadata.items() if key.startswith("tokenizer.ggml.")})


def fingerprint(gguf: GGUFFile, layout: KVLayout) -> str:
    """Names the KV family: architecture and its numbers (RoPE among them), tokenizer, weights, format, block length."""
    prefix = gguf.architecture + "."
    return _digest(
        {
            "format": FORMAT,
            "architecture": {k: v for k, v in gguf.metadata.items() if k.startswith(prefix)},
            "tokenizer": _tokenizer_digest(gguf),
            "weights": weights_digest(gguf),
            "block_tokens": layout.block_tokens,
        }
    )


def weights_digest(gguf: GGUFFile) -> str:
    """SHA-256 of the tensor data, all of it. Kept in the user's cache folder for the file's path, size and time,
    because a 30 GB file takes a minute to read."""
    stat = gguf.path.stat()
    identity = f"{gguf.path.resolve()}\0{stat.st_size}\0{stat.st_mtime_ns}\0{gguf.data_start}"
    note = _cache_folder() / hashlib.sha256(identity.encode()).hexdigest()
    try:
        known = note.read_text()
        if len(known) == 64:
            return known
    except OSError:
        pass
    digest = gguf.tensor_digest()
    try:
        note.parent.mkdir(parents=True, exist_ok=True)
        draft = note.with_name(f"{note.name}.{os.getpid()}")
        draft.write_text(digest)
        draft.replace(note)
    except OSError:
        pass  # read again next time
    return digest


def _cache_folder() -> Path:
    base = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(base) / "kvasir" / "weights"


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str, ensure_ascii=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
