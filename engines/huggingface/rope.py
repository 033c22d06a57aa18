"""The RoPE that a config.json states, as transformers 4 and 5 write it, by transformers' formulas. Pure.

transformers 4 has `rope_theta` and `rope_scaling` at the top, 5 has both in `rope_parameters`, by kind of layer where
kinds differ (gemma3). What neither states has transformers' default.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from engines.rope import Rope, plain, yarn, yarn_bound
from messages.errors import KVTransferFailed

FULL, SLIDING = "full_attention", "sliding_attention"
_WITH_ORIGINAL = ("llama3", "yarn", "longrope")
# Of GptOssConfig, where a folder states neither rope_parameters nor rope_scaling.
_GPT_OSS = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
            "original_max_position_embeddings": 4096}  # fmt: skip
_THETA = {"gpt_oss": 150_000.0}
# Those with Gated DeltaNet layers. The others rotate a part of each key, the first quarter if config.json doesn't say.
# Qwen3.5 turns its pairs by three positions (M-RoPE), which are one and the same in a text.
GATED_DELTA = ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next")
_GEMMA3 = ("gemma3", "gemma3_text")
_GEMMA3_THETA = {FULL: ("rope_theta", 1_000_000.0), SLIDING: ("rope_local_base_freq", 10_000.0)}


def rope_parameters(config: Mapping[str, Any], kind: str = FULL) -> dict[str, Any]:
    """RoPE's numbers for one kind of layer under transformers 5's names, with its defaults filled in."""
    model = str(config.get("model_type", ""))
    nested = config.get("rope_parameters") or {}
    by_kind = any(isinstance(value, dict) for value in nested.values())
    scaling = config.get("rope_scaling") or {}
    if model in _GEMMA3:  # an older folder's scaling is that of its full layers
        key, theta = _GEMMA3_THETA[kind]
        found = {**(nested.get(kind) or {}), **(scaling if kind == FULL else {})}
    else:
        key, theta = "rope_theta", _THETA.get(model, 10_000.0)
        found = dict(scaling or (nested.get(kind) if by_kind else nested) or (_GPT_OSS if model == "gpt_oss" else {}))
    found["rope_type"] = found.get("rope_type") or found.pop("type", None) or "default"
    if found.get("rope_theta") is None:
        found["rope_theta"] = theta if config.get(key) is None else config[key]
    if "partial_rotary_factor" in config:
        found.setdefault("partial_rotary_factor", config["partial_rotary_factor"])
    elif model in GATED_DELTA:
        found.setdefault("partial_rotary_factor", 0.25)
    if found["rope_type"] in _WITH_ORIGINAL:
        original = config.get("original_max_position_embeddings") or found.get("original_max_position_embeddings")
        found["original_max_position_embeddings"] = original or config.get("max_position_embeddings", 0)
    return found


def stated_rope(config: Mapping[str, Any], kind: str = FULL) -> Rope:
    """What transformers computes from a config.json. Raises KVTransferFailed for a RoPE whose formula is not known
    here.

    The formulas are those of transformers' modeling_rope_utils.py, of which a test runs the original.
    """
    found = rope_parameters(config, kind)
    try:
        part = float(found.get("partial_rotary_factor") or 1)
        if part != 1 and config.get("model_type") not in GATED_DELTA:
            raise KVTransferFailed("only part of each key is rotated")
        dimensions, base = int(head_dim(config) * part), float(found["rope_theta"])
        return _scaled(found, plain(base, dimensions), base, dimensions)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise KVTransferFailed(f"config.json states no RoPE that can be computed: {error!r}") from None


def head_dim(config: Mapping[str, Any]) -> int:
    """Numbers in a key of one head. Raises KeyError, TypeError, ValueError or ZeroDivisionError if not stated."""
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _scaled(found: dict[str, Any], frequencies: list[float], base: float, dimensions: int) -> Rope:
    kind = found["rope_type"]
    if kind == "default":
        return Rope(tuple(frequencies), base=base)
    if kind == "linear":
        return Rope(tuple(f / float(found["factor"]) for f in frequencies), base=base)
    original = float(found.get("original_max_position_embeddings", 0))
    if kind == "llama3":
        return Rope(tuple(_llama3(f, found, original) for f in frequencies), base=base)
    if kind != "yarn":
        raise KVTransferFailed(
            f"RoPE of the type {str(kind)!r:.40} depends on the prompt's length, or is not known here"
        )
    low, high = (
        yarn_bound(float(found.get(key) or default), dimensions, base, original)
        for key, default in (("beta_fast", 32), ("beta_slow", 1))
    )
    if found.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    factor = float(found["factor"])
    slowed = yarn(frequencies, factor, max(low, 0), min(high, dimensions - 1))
    return Rope(tuple(slowed), _attention_factor(found, factor), base)


def _llama3(frequency: float, found: dict[str, Any], original: float) -> float:
    """Fast pairs as they are, slow ones slowed by `factor`, a ramp between (Llama 3.1's release)."""
    low, high = float(found["low_freq_factor"]), float(found["high_freq_factor"])
    turns = original * frequency / (2 * math.pi)  # in the original context
    part = min(1.0, max(0.0, (turns - low) / (high - low)))
    return (1 - part) * frequency / float(found["factor"]) + part * frequency


def _attention_factor(found: dict[str, Any], factor: float) -> float:
    given, one, all_dims = (found.get(key) for key in ("attention_factor", "mscale", "mscale_all_dim"))
    if given is not None:
        return float(given)
    if one and all_dims:
        return _mscale(factor, one) / _mscale(factor, all_dims)
    return _mscale(factor, 1)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * float(weight) * math.log(factor) + 1.0
