"""Configurations of tiny models as transformers 4 and 5 write them, over every RoPE that a folder may state."""

from typing import Any

_SIZES = {
    "vocab_size": 1536,
    "hidden_size": 64,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "eos_token_id": 1535,
}
_OF = {
    "mistral": {"sliding_window": None},
    "qwen2_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "decoder_sparse_step": 1,
                  "shared_expert_intermediate_size": 32, "norm_topk_prob": False},
    "qwen3": {"head_dim": 16},
    "qwen3_moe": {"head_dim": 16, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32,
                  "decoder_sparse_step": 1, "norm_topk_prob": True, "mlp_only_layers": []},
    "gpt_oss": {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16,
                "layer_types": ["sliding_attention", "full_attention"]},
    "phi3": {"pad_token_id": 0, "sliding_window": None},
    "gemma3_text": {"head_dim": 16, "sliding_window": 16, "num_hidden_layers": 6, "query_pre_attn_scalar": 16},
}  # fmt: skip
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": 256}  # fmt: skip
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 256}
_LINEAR = {"rope_type": "linear", "factor": 4.0}
# name: model_type, base, scaling
CASES: dict[str, tuple[str, float, dict[str, Any]]] = {
    "llama": ("llama", 500_000.0, {}),
    "llama, llama3": ("llama", 500_000.0, _LLAMA3),
    "llama, linear": ("llama", 20_000.0, _LINEAR),
    "llama, yarn with a factor": ("llama", 20_000.0, _YARN | {"attention_factor": 1.3, "beta_fast": 16.0}),
    "mistral": ("mistral", 1_000_000.0, {}),
    "qwen2": ("qwen2", 10_000.0, {}),
    "qwen2, yarn": ("qwen2", 1_000_000.0, _YARN),
    "qwen2_moe": ("qwen2_moe", 10_000.0, {}),
    "qwen2_moe, yarn": ("qwen2_moe", 10_000.0, _YARN),
    "qwen3, yarn": ("qwen3", 1_000_000.0, _YARN),
    "qwen3_moe": ("qwen3_moe", 10_000_000.0, {}),
    "qwen3_moe, yarn": ("qwen3_moe", 10_000.0, _YARN),
    "gpt_oss, truncated yarn": ("gpt_oss", 150_000.0, _YARN | {"truncate": True}),
    "gpt_oss, yarn": ("gpt_oss", 150_000.0, _YARN | {"truncate": False}),
    "olmo2, yarn": ("olmo2", 500_000.0, _YARN),
    "phi3": ("phi3", 250_000.0, {}),
    "gemma3_text": ("gemma3_text", 1_000_000.0, {}),
    "gemma3_text, linear": ("gemma3_text", 1_000_000.0, _LINEAR),
}


def configuration(case: str, version: int) -> dict[str, Any]:
    """A config.json as transformers `version` (4 or 5) writes it."""
    kind = CASES[case][0]
    return rewritten({"model_type": kind, **_SIZES, **_OF.get(kind, {})}, case, version)


def rewritten(config: dict[str, Any], case: str, version: int) -> dict[str, Any]:
    """The same configuration with its RoPE in the words of one version."""
    kind, base, scaling = CASES[case]
    config = {key: value for key, value in config.items() if key != "rope_parameters"}
    if kind == "gemma3_text":
        return config | _gemma3(base, scaling, version)
    if version == 5:
        return config | {"rope_parameters": {"rope_type": "default", "rope_theta": base} | scaling}
    if kind == "qwen3_moe":
        config["num_experts"] = config.pop("num_local_experts", 4)
    return config | {"rope_theta": base, "rope_scaling": scaling or None}


def _gemma3(base: float, scaling: dict[str, Any], version: int) -> dict[str, Any]:
    kinds = ["sliding_attention"] * 2 + ["full_attention"]
    if version == 4:
        old = {"rope_theta": base, "rope_local_base_freq": 5_000.0, "rope_scaling": scaling or None}
        return old | {"sliding_window_pattern": 3, "layer_types": kinds * 2}
    full = {"rope_type": "default", "rope_theta": base} | scaling
    sliding = {"rope_type": "default", "rope_theta": 5_000.0}
    return {"rope_parameters": {"full_attention": full, "sliding_attention": sliding}, "layer_types": kinds * 2}
