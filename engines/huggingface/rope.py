"""The RoPE that a config.json of transformers 4 or 5 states, computed by transformers' formulas. Pure functions.

transformers 4 has `rope_theta` and `rope_scaling` at the top level. transformers 5 has both in `rope_parameters`,
separately for each kind of layer if kinds differ (gemma3). Missing values get transformers' defaults.
"""

import math
from collections.abc import Mapping
from typing import Any

from engines.rope import Rope, plain, yarn
from messages.errors import KVTransferFailed

FULL, SLIDING = "full_attention", "sliding_attention"
_WITH_ORIGINAL = ("llama3", "yarn", "longrope")
# The defaults of GptOssConfig, for folders that state neither rope_parameters nor rope_scaling.
_GPT_OSS = {"rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
            "original_max_position_embeddings": 4096}  # fmt: skip
_THETA = {"gpt_oss": 150_000.0}
# Models with Gated DeltaNet layers. Their attention layers rotate only the first part of each key: a quarter, unless
# config.json states another share. Qwen3.5 rotates by three positions (M-RoPE), which are equal for text.
GATED_DELTA = ("qwen3_5", "qwen3_5_text", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_next")
_GEMMA3 = ("gemma3", "gemma3_text")
_GEMMA3_THETA = {FULL: ("rope_theta", 1_000_000.0), SLIDING: ("rope_local_base_freq", 10_000.0)}


def rope_parameters(config: Mapping[str, Any], kind: str = FULL) -> dict[str, Any]:
    """RoPE's numbers for one kind of layer under transformers 5's names, with its defaults filled in."""
    model = str(config.get("model_type", ""))
    nested = config.get("rope_parameters") or {}
    by_kind = any(isinstance(value, dict) for value in nested.values())
    scaling = config.get("rope_scaling") or {}
    # An older Gemma 3 folder has only `rope_scaling`, which applies only to the full-attention layers.
    if model in _GEMMA3:
        key, theta = _GEMMA3_THETA[kind]
        parameters = {**(nested.get(kind) or {}), **(scaling if kind == FULL else {})}
    else:
        key, theta = "rope_theta", _THETA.get(model, 10_000.0)
        parameters = dict(
            scaling or (nested.get(kind) if by_kind else nested) or (_GPT_OSS if model == "gpt_oss" else {})
        )
    parameters["rope_type"] = parameters.get("rope_type") or parameters.pop("type", None) or "default"
    if parameters.get("rope_theta") is None:
        parameters["rope_theta"] = theta if config.get(key) is None else config[key]
    if "partial_rotary_factor" in config:
        parameters.setdefault("partial_rotary_factor", config["partial_rotary_factor"])
    elif model in GATED_DELTA:
        parameters.setdefault("partial_rotary_factor", 0.25)
    if parameters["rope_type"] in _WITH_ORIGINAL:
        original = config.get("original_max_position_embeddings") or parameters.get("original_max_position_embeddings")
        parameters["original_max_position_embeddings"] = original or config.get("max_position_embeddings", 0)
    return parameters


def stated_rope(config: Mapping[str, Any], kind: str = FULL) -> Rope:
    """What transformers computes from a config.json. Raises KVTransferFailed for a RoPE whose formula is not known
    here.

    The formulas are those of transformers' modeling_rope_utils.py, of which a test runs the original.
    """
    parameters = rope_parameters(config, kind)
    try:
        part = float(parameters.get("partial_rotary_factor") or 1)
        if part != 1 and config.get("model_type") not in GATED_DELTA:
            raise KVTransferFailed("the model rotates only a part of each key, which is not supported")
        dimensions, base = int(head_dim(config) * part), float(parameters["rope_theta"])
        return _build_rope(parameters, plain(base, dimensions), base)
    except (KeyError, TypeError, ValueError, ZeroDivisionError) as error:
        raise KVTransferFailed(f"the RoPE in config.json can't be computed: {error!r}") from None


def head_dim(config: Mapping[str, Any]) -> int:
    """Numbers in a key of one head. Raises KeyError, TypeError, ValueError or ZeroDivisionError if not stated."""
    return int(config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"])


def _build_rope(parameters: dict[str, Any], frequencies: list[float], base: float) -> Rope:
    kind = parameters["rope_type"]
    if kind == "default":
        return Rope(tuple(frequencies), base=base)
    if kind == "linear":
        return Rope(tuple(f / float(parameters["factor"]) for f in frequencies), base=base)
    original = float(parameters.get("original_max_position_embeddings", 0))
    if kind == "llama3":
        return Rope(tuple(_llama3(f, parameters, original) for f in frequencies), base=base)
    if kind != "yarn":
        raise KVTransferFailed(
            f"RoPE of the type {str(kind)!r:.40} is not supported: it is unknown, or depends on the prompt's length"
        )
    rotations = (float(parameters.get("beta_fast") or 32), float(parameters.get("beta_slow") or 1))
    factor = float(parameters["factor"])
    yarn_frequencies = yarn(frequencies, factor, base, original, rotations, parameters.get("truncate", True))
    return Rope(tuple(yarn_frequencies), _attention_factor(parameters, factor), base)


def _llama3(frequency: float, parameters: dict[str, Any], original: float) -> float:
    """Fast pairs unchanged, slow ones slowed by `factor`, and a ramp in between (Llama 3.1's release)."""
    low, high = float(parameters["low_freq_factor"]), float(parameters["high_freq_factor"])
    turns = original * frequency / (2 * math.pi)  # how many times the pair turns within the original context
    part = min(1.0, max(0.0, (turns - low) / (high - low)))
    return (1 - part) * frequency / float(parameters["factor"]) + part * frequency


def _attention_factor(parameters: dict[str, Any], factor: float) -> float:
    attention_factor, mscale, mscale_all_dim = (
        parameters.get(key) for key in ("attention_factor", "mscale", "mscale_all_dim")
    )
    if attention_factor is not None:
        return float(attention_factor)
    if mscale and mscale_all_dim:
        return _mscale(factor, mscale) / _mscale(factor, mscale_all_dim)
    return _mscale(factor, 1)


def _mscale(factor: float, weight: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * float(weight) * math.log(factor) + 1.0
