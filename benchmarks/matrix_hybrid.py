"""Weights of tiny hybrid models for the matrix: three Gated DeltaNet layers to one of gated full attention.

Decay is slow (A_log, dt_bias): after 300 tokens a state still holds a few percent of what the first one wrote to it, so
that an answer shows a state that was lost, shifted or transposed. With the default initial values a model forgets
within some tokens, and nothing would be noticed.
"""

from collections.abc import Callable, Iterator
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float32]
Weights = dict[str, Array]
Matrix = Callable[..., Array]  # shape, and `scale`
Vector = Callable[..., Array]  # size, mean

TYPES = ("qwen3_5", "qwen3_5_moe_text", "qwen3_next")
KEY_HEADS, VALUE_HEADS, SIZE, KERNEL = 2, 4, 16, 4  # keys and values are of one size, as in all published models
EVERY = 4  # the last of so many layers attends to all positions
ROTATED = 0.5  # of each key
SECTIONS = [2, 1, 1, 0]  # of M-RoPE, in pairs
_KEYS, _VALUES = KEY_HEADS * SIZE, VALUE_HEADS * SIZE
_EACH = VALUE_HEADS // KEY_HEADS
_SHIFTED = ("layernorm.weight", "model.norm.weight", "q_norm.weight", "k_norm.weight")
_GGUF = {
    "in_proj_qkv.weight": "attn_qkv.weight", "in_proj_z.weight": "attn_gate.weight",
    "in_proj_b.weight": "ssm_beta.weight", "in_proj_a.weight": "ssm_alpha.weight", "A_log": "ssm_a",
    "dt_bias": "ssm_dt.bias", "conv1d.weight": "ssm_conv1d.weight", "norm.weight": "ssm_norm.weight",
    "out_proj.weight": "ssm_out.weight",
}  # fmt: skip


def attends(layer: int) -> bool:
    """Whether a layer attends to all positions; the others keep a state."""
    return layer % EVERY == EVERY - 1


def delta(matrix: Matrix, vector: Vector, hidden: int, prefix: str) -> Iterator[tuple[str, Array]]:
    """One Gated DeltaNet layer, heads of values next to each other that share one of keys."""
    yield f"{prefix}in_proj_qkv.weight", matrix(2 * _KEYS + _VALUES, hidden, scale=2)
    yield f"{prefix}in_proj_z.weight", matrix(_VALUES, hidden)
    yield f"{prefix}in_proj_b.weight", matrix(VALUE_HEADS, hidden)
    yield f"{prefix}in_proj_a.weight", matrix(VALUE_HEADS, hidden, scale=0.25)
    yield f"{prefix}A_log", vector(VALUE_HEADS)
    yield f"{prefix}dt_bias", vector(VALUE_HEADS, -4.6)
    yield f"{prefix}conv1d.weight", matrix(2 * _KEYS + _VALUES, 1, KERNEL, scale=2)
    yield f"{prefix}norm.weight", vector(SIZE, 1)
    yield f"{prefix}out_proj.weight", matrix(hidden, _VALUES, scale=2)


def shared_expert(matrix: Matrix, hidden: int, inner: int, prefix: str) -> Iterator[tuple[str, Array]]:
    """The expert that every token gets."""
    for name, rows, columns in (("gate", inner, hidden), ("up", inner, hidden), ("down", hidden, inner)):
        yield f"{prefix}shared_expert.{name}_proj.weight", matrix(rows, columns)
    yield f"{prefix}shared_expert_gate.weight", matrix(1, hidden)


def config(model_type: str, base: float) -> dict[str, Any]:
    """What config.json says beside the usual: RoPE as transformers 5 writes it, but for a qwen3_next."""
    sizes: dict[str, Any] = {
        "linear_num_key_heads": KEY_HEADS,
        "linear_num_value_heads": VALUE_HEADS,
        "linear_key_head_dim": SIZE,
        "linear_value_head_dim": SIZE,
        "linear_conv_kernel_dim": KERNEL,
        "full_attention_interval": EVERY,
    }
    if model_type == "qwen3_next":
        return sizes | {"partial_rotary_factor": ROTATED, "rope_theta": base}
    rope = {"rope_type": "default", "rope_theta": base, "partial_rotary_factor": ROTATED}
    return sizes | {"rope_parameters": rope | {"mrope_section": SECTIONS[:3], "mrope_interleaved": True}}


def as_folder(model_type: str, weights: Weights) -> Weights:
    """As published: norms multiply by one more than is stored, and a qwen3_next's projections lie by head of keys."""
    found = {name: value - 1 if name.endswith(_SHIFTED) else value for name, value in weights.items()}
    if model_type == "qwen3_5":  # that of a model which also sees
        return {name.replace("model.", "model.language_model."): value for name, value in found.items()}
    if model_type != "qwen3_next":
        return found
    for name in [name for name in found if name.endswith("in_proj_qkv.weight")]:
        prefix = name.removesuffix("in_proj_qkv.weight")
        parts = np.split(found.pop(name), [_KEYS, 2 * _KEYS])
        parts.append(found.pop(f"{prefix}in_proj_z.weight"))
        found[f"{prefix}in_proj_qkvz.weight"] = _by_key_head(parts)
        found[f"{prefix}in_proj_ba.weight"] = _by_key_head([found.pop(f"{prefix}in_proj_{n}.weight") for n in "ba"])
    return found


def as_gguf(architecture: str, weights: Weights) -> Weights:
    """With those of Gated DeltaNet layers under llama.cpp's names, and as its converter leaves them."""
    found: Weights = {}
    for name, value in weights.items():
        stem, _, what = name.partition(".linear_attn.")
        if not what:
            found[name] = value
            continue
        value = -np.exp(value) if what == "A_log" else value.reshape(-1, KERNEL) if what == "conv1d.weight" else value
        if architecture != "qwen3next":
            value = _tiled(what, value)
        found[f"blk.{stem.rpartition('.')[2]}.{_GGUF[what]}"] = value
    if architecture == "qwen3next":
        for name in [name for name in found if name.endswith("ssm_beta.weight")]:
            pair = [found.pop(name), found.pop(name.replace("beta", "alpha"))]
            found[name.replace("beta", "ba")] = _by_key_head(pair)
    return found


def add_sizes(writer: gguf.GGUFWriter, architecture: str, head_dim: int) -> None:
    """What a GGUF says beside the usual."""
    writer.add_ssm_conv_kernel(KERNEL)
    writer.add_ssm_state_size(SIZE)
    writer.add_ssm_group_count(KEY_HEADS)
    writer.add_ssm_time_step_rank(VALUE_HEADS)
    writer.add_ssm_inner_size(_VALUES)
    writer.add_full_attention_interval(EVERY)
    writer.add_rope_dimension_count(int(head_dim * ROTATED))
    if architecture != "qwen3next":
        writer.add_rope_dimension_sections(SECTIONS)


def _by_key_head(parts: list[Array]) -> Array:
    """Rows of several projections, those of each head of keys next to each other."""
    hidden = parts[0].shape[1]
    joined = np.concatenate([part.reshape(KEY_HEADS, -1, hidden) for part in parts], axis=1)
    return np.ascontiguousarray(joined.reshape(-1, hidden))


def _tiled(what: str, value: Array) -> Array:
    """Heads of values in the order of a qwen35's GGUF: the first of each head of keys, then the second."""
    if what == "norm.weight":
        return value
    if what == "out_proj.weight":
        return np.ascontiguousarray(_tiled("", value.T).T)
    first = 2 * _KEYS if what in ("in_proj_qkv.weight", "conv1d.weight") else 0
    heads = value[first:].reshape(KEY_HEADS, _EACH, -1, *value.shape[1:]).swapaxes(0, 1)
    return np.concatenate([value[:first], heads.reshape(value[first:].shape)])
