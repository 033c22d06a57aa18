"""Translates the settings and tensor names of a model folder to those that mlx-lm knows. Pure.

mlx-lm 0.32 follows transformers 4, but a folder can come from transformers 5. Nothing is written into the folder. A
sliding window that mlx-lm ignores is refused.
"""

from collections.abc import Iterator
from typing import Any

from engines.huggingface.rope import FULL, GATED_DELTA, SLIDING, rope_parameters
from engines.huggingface.weights import HFFolder
from messages.errors import ConfigError

# In mlx-lm, all layers of these models attend to every position, whatever config.json says.
_NO_WINDOW = {"mistral", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"}
# mlx-lm computes these models without RoPE scaling, and refuses a qwen2_moe model whose config.json states a scaling
# other than linear. So the scaling is hidden from mlx-lm, and `engines.mlx.rope` adds it.
NO_SCALING = {"qwen2_moe", "qwen3_moe"}
_EXPERTS = ".mlp.experts."


def config_changes(config: dict[str, Any]) -> dict[str, Any]:
    """The additions and changes that mlx-lm needs in a config.json."""
    changes: dict[str, Any] = {}
    text = config.get("text_config")
    if isinstance(text, dict) and (inner := config_changes(text)):
        changes["text_config"] = {**text, **inner}
    if config.get("rope_parameters"):
        changes |= _rope(config)
    if config.get("model_type") in GATED_DELTA:
        changes |= _gated_delta(config)
    if config.get("model_type") in NO_SCALING:
        changes["rope_scaling"] = None
    if "num_local_experts" in config and config.get("model_type") == "qwen3_moe":
        changes.setdefault("num_experts", config["num_local_experts"])
    return changes


def require_no_ignored_window(folder: HFFolder, context: int) -> None:
    """Raises ConfigError if config.json states a sliding window that MLX ignores and `context` tokens don't fit in.

    `context` 0: as much as the model was trained for.
    """
    window = _window(folder.config)
    longest = context or int(folder.config.get("max_position_embeddings") or 0)
    if folder.model_type in _NO_WINDOW and 0 < window < longest:
        raise ConfigError(
            f"MLX ignores the sliding window of {window:,} positions that {folder.path / 'config.json'} states for a "
            f"{folder.model_type} model, so its answers would be wrong: use the transformers engine, or a context "
            f"of at most {window:,} tokens"
        )


def rename_tensors(model_type: str, weights: dict[str, Any]) -> dict[str, Any]:
    """Tensors under the names that mlx-lm knows: transformers 5 may keep all experts of a layer as one tensor."""
    split = _split_gpt_oss if model_type == "gpt_oss" else _split_qwen
    return {name: part for whole, tensor in weights.items() for name, part in split(whole, tensor)}


def _gated_delta(config: dict[str, Any]) -> dict[str, Any]:
    """The changes for a Qwen3.5 or a Qwen3-Next: RoPE's numbers in both places, and which layers attend."""
    changes: dict[str, Any] = {"model_type": str(config["model_type"]).removesuffix("_text")}
    if isinstance(config.get("text_config"), dict):
        return changes  # the layers are listed in the inner text_config
    parameters = rope_parameters(config)
    changes |= {"rope_parameters": parameters, "partial_rotary_factor": parameters["partial_rotary_factor"]}
    kinds = config.get("layer_types") or []
    if FULL in kinds:
        changes["full_attention_interval"] = kinds.index(FULL) + 1
    return changes


def _rope(config: dict[str, Any]) -> dict[str, Any]:
    parameters = rope_parameters(config)
    changes = {"rope_theta": parameters["rope_theta"]}
    if parameters["rope_type"] != "default":
        changes["rope_scaling"] = parameters | {"type": parameters["rope_type"]}
    kinds = config.get("layer_types") or []
    if str(config.get("model_type")).startswith("gemma3"):
        changes["rope_local_base_freq"] = rope_parameters(config, SLIDING)["rope_theta"]
        changes["sliding_window_pattern"] = kinds.index(FULL) + 1 if FULL in kinds else len(kinds) + 1
    return changes


def _window(config: dict[str, Any]) -> int:
    """The sliding window that transformers gives to at least one layer; 0: none."""
    kind, kinds, window = config.get("model_type"), config.get("layer_types"), int(config.get("sliding_window") or 0)
    if kind in ("mistral", "phi3") or not window:
        return window
    if not config.get("use_sliding_window", False):
        return 0
    if kinds is not None:
        return window if SLIDING in kinds else 0
    if kind in ("qwen2", "qwen3") and int(config.get("max_window_layers", 28)) >= int(config["num_hidden_layers"]):
        return 0
    return window


def _split_qwen(name: str, tensor: Any) -> Iterator[tuple[str, Any]]:
    """gate_up_proj: (experts, 2 x inner, hidden), gate first."""
    layer, _, tensor_name = name.partition(_EXPERTS)
    if tensor_name == "gate_up_proj":
        half = tensor.shape[1] // 2
        yield f"{layer}.mlp.switch_mlp.gate_proj.weight", tensor[:, :half]
        yield f"{layer}.mlp.switch_mlp.up_proj.weight", tensor[:, half:]
    elif tensor_name == "down_proj":
        yield f"{layer}.mlp.switch_mlp.down_proj.weight", tensor
    else:
        yield name, tensor


def _split_gpt_oss(name: str, tensor: Any) -> Iterator[tuple[str, Any]]:
    """gate_up_proj: (experts, hidden, 2 x inner), gate and up taking turns; its bias without the middle axis."""
    layer, _, tensor_name = name.partition(_EXPERTS)
    matrix, kind = tensor_name.removesuffix("_bias"), "bias" if tensor_name.endswith("_bias") else "weight"
    if matrix not in ("gate_up_proj", "down_proj"):
        yield name, tensor
        return
    rows = tensor if kind == "bias" else tensor.swapaxes(1, 2)
    if matrix == "down_proj":
        yield f"{layer}{_EXPERTS}down_proj.{kind}", rows
    else:
        yield f"{layer}{_EXPERTS}gate_proj.{kind}", rows[:, ::2]
        yield f"{layer}{_EXPERTS}up_proj.{kind}", rows[:, 1::2]
