"""Tiny random models, each written twice with the same weights: for llama.cpp as GGUF, for MLX and PyTorch as folders.

And the demo model, which is trained, and lies in both forms in examples/model; and SmolLM2 and Gemma 3, real ones (see
`matrix_real`), downloaded where they are asked for.

All weights are float32. Greedy text is stable under rounding because only 30 tokens, the small letters and a few
signs, have a row of their own in the output matrix: half of an answer's tokens are ahead of the next best by a third
of the logits' standard deviation or more. What is said depends on the whole prompt and not on its last token alone,
because attention is made sharp (keys and queries meet with a deviation of about 2 before the softmax) and what it
writes is louder than the embeddings.

Experts are another place where rounding decides: which of two nearly equal ones is taken. So routers read a few
features that no layer writes to: which experts a token gets follows from its id alone, in every engine.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from benchmarks import matrix_hybrid
from tests.support import gemma3, smollm2, smollm2_folders

Array = NDArray[np.float32]
Weights = dict[str, Array]

DEMO = "kvasir-demo"
SMOLLM2, GEMMA3 = REAL = ("smollm2", "gemma3-270m")
_EXAMPLE = Path(__file__).parents[1] / "examples" / "model"
DEMO_TOKENIZER = _EXAMPLE / DEMO / "tokenizer.json"
HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FEED_FORWARD = 64, 4, 2, 16, 96
CONTEXT, DEMO_CONTEXT, REAL_CONTEXT = 1024, 2048, 4096
WINDOW = 16
EXPERTS, EXPERTS_USED = 4, 2
READ_BY_ROUTERS = 8  # the first features, which no layer writes to
ROPE_THETA, SLIDING_ROPE_THETA, RMS_EPSILON = 10_000.0, 2_000.0, 1e-6
V5_ROPE_THETA = 100_000.0  # who misses it where transformers 5 writes it takes 10,000
SPECIALS = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
PLAIN = (*sorted(pre_tokenizers.ByteLevel.alphabet()), "th")  # with the one merge that a GGUF file must have
MERGE = ("t", "h")
ANSWERED_WITH = frozenset("abcdefghijklmnopqrstuvwxyz.,?!Ġ")  # Ġ: a space
# Qwen2's split, by which llama.cpp knows the pre-tokenizer "qwen2".
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEMPLATE = (
    "{%- for message in messages %}{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + "
    "'<|im_end|>' + '\\n' }}{%- endfor %}{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)
_GGUF_NAMES = {
    "embed_tokens": "token_embd", "norm": "output_norm", "lm_head": "output", "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm",
    "self_attn.sinks": "attn_sinks", "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down", "mlp.gate": "ffn_gate_inp", "mlp.router": "ffn_gate_inp",
    "mlp.experts.gate_proj": "ffn_gate_exps", "mlp.experts.up_proj": "ffn_up_exps",
    "mlp.experts.down_proj": "ffn_down_exps", "self_attn.qkv_proj": "attn_qkv", "mlp.gate_up_proj": "ffn_up",
    "pre_feedforward_layernorm": "ffn_norm", "post_feedforward_layernorm": "post_ffw_norm",
    "mlp.shared_expert.gate_proj": "ffn_gate_shexp", "mlp.shared_expert.up_proj": "ffn_up_shexp",
    "mlp.shared_expert.down_proj": "ffn_down_shexp", "mlp.shared_expert_gate": "ffn_gate_inp_shexp",
}  # fmt: skip


ORIGINAL_CONTEXT = CONTEXT // 4
_LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
           "original_max_position_embeddings": ORIGINAL_CONTEXT}  # fmt: skip
_YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": ORIGINAL_CONTEXT}


@dataclass(frozen=True, slots=True)
class Kind:
    """A model family under its two names, and how many layers its tiny member has."""

    architecture: str  # in a GGUF file
    model_type: str  # in config.json
    layers: int
    scaling: dict[str, Any] = field(default_factory=dict)  # of its RoPE, in the words of transformers 5
    windowed: bool = False  # a qwen2 whose second layer attends to a window, for which llama.cpp has no word
    base: float = ROPE_THETA
    v5: bool = False  # its folder is as transformers 5 writes it: `rope_parameters` only, experts in fused tensors

    context: int = CONTEXT  # that it was trained for, as it says
    head_dim: int = HEAD_DIM
    window: int = WINDOW  # positions that a sliding layer attends to, where there is one
    name: str = ""  # where it is none of KINDS

    @property
    def hybrid(self) -> bool:
        """Whether most of its layers keep a recurrent state (see `matrix_hybrid`)."""
        return self.model_type in matrix_hybrid.TYPES

    @property
    def moe(self) -> bool:
        """Whether it has experts under the names of qwen's mixtures."""
        return self.model_type in ("qwen3_moe", "qwen3_next", "qwen3_5_moe_text")


KINDS = {
    "qwen3": Kind("qwen3", "qwen3", 2),
    "qwen3-moe": Kind("qwen3moe", "qwen3_moe", 2),
    "llama": Kind("llama", "llama", 2),
    "gpt-oss": Kind("gpt-oss", "gpt_oss", 4),  # every second layer, from the first, slides
    "llama-llama3": Kind("llama", "llama", 2, _LLAMA3),
    "llama-linear": Kind("llama", "llama", 2, {"rope_type": "linear", "factor": 4.0}),
    "llama-yarn": Kind("llama", "llama", 2, _YARN),
    "mistral": Kind("llama", "mistral", 2),
    "qwen2": Kind("qwen2", "qwen2", 2),
    "qwen2-window": Kind("qwen2", "qwen2", 2, windowed=True),
    "olmo2": Kind("olmo2", "olmo2", 2),
    "phi3": Kind("phi3", "phi3", 2),
    "gemma3": Kind("gemma3", "gemma3_text", 6),  # the last layer sees all, by another RoPE
    "llama-v5": Kind("llama", "llama", 2, base=V5_ROPE_THETA, v5=True),
    "qwen2-v5": Kind("qwen2", "qwen2", 2, base=V5_ROPE_THETA, v5=True),
    "qwen3-moe-v5": Kind("qwen3moe", "qwen3_moe", 2, base=V5_ROPE_THETA, v5=True),
    "gpt-oss-yarn": Kind("gpt-oss", "gpt_oss", 4, _YARN | {"truncate": True}),
    "gpt-oss-untruncated": Kind("gpt-oss", "gpt_oss", 4, _YARN | {"truncate": False}),
    "qwen3.5": Kind("qwen35", "qwen3_5", 4, context=8 * CONTEXT),
    "qwen3.5-moe": Kind("qwen35moe", "qwen3_5_moe_text", 4),
    "qwen3-next": Kind("qwen3next", "qwen3_next", 4),
}
# For figures: the KV cache of a token is no smaller than what a record's header takes next to it.
WIDE = Kind("qwen35", "qwen3_5", 8, context=8 * CONTEXT, head_dim=64, name="qwen3.5-wide")
# For vLLM: its attention on CPUs knows no narrower heads, and the windows reach over some of its pages, of 32 tokens.
WINDOWED = ("gemma3-wide", "gpt-oss-wide")
_OTHERS = {
    WIDE.name: WIDE,
    "gemma3-wide": Kind("gemma3", "gemma3_text", 6, head_dim=32, window=40),
    # vLLM wants each of a gpt-oss's YaRN numbers stated.
    "gpt-oss-wide": Kind(
        "gpt-oss",
        "gpt_oss",
        4,
        _YARN | {"truncate": True, "beta_fast": 32.0, "beta_slow": 1.0},
        head_dim=32,
        window=40,
    ),
}
HYBRID = tuple(name for name, kind in KINDS.items() if kind.hybrid)

# llama.cpp truncates YaRN's ramp whatever the folder says; MLX does not start with a window that it would ignore.
DIFFERENT = ("gpt-oss-untruncated", "qwen2-window")
NAMES = (*KINDS, DEMO)
_ARCHITECTURES = {"gemma3_text": "Gemma3ForCausalLM", "gpt_oss": "GptOssForCausalLM"}  # by which vLLM knows a model
_NORMS = {
    "olmo2": ("post_attention", "post_feedforward"),
    "gemma3_text": ("input", "post_attention", "pre_feedforward", "post_feedforward"),
}


def write(folder: Path, name: str, seed: int) -> None:
    """Write the model into `folder`, one file or folder for each engine: see `weights_for`. The demo model is there;
    real ones go into the user's cache. Raises smollm2.CheckpointMissing."""
    if name in REAL:
        weights_for("transformers", folder, name)
    if name in (DEMO, *REAL):
        return
    kind = (KINDS | _OTHERS)[name]
    weights = dict(_weights(kind, seed))
    for tensor, value in weights.items():
        if "o_proj" in tensor or "down_proj" in tensor or "out_proj" in tensor:
            _leave_to_routers(tensor, value)
    if kind.model_type == "phi3":
        weights = _fused(weights)
    _write_gguf(weights_for("llamacpp", folder, name), kind, weights)
    if kind.model_type == "gemma3_text":  # whose norms multiply by one more than is stored, except in llama.cpp
        weights = {tensor: value - 1 if tensor.endswith("norm.weight") else value for tensor, value in weights.items()}
    if kind.v5 or kind.model_type == "qwen3_5_moe_text":
        weights = _joined_experts(weights)
    if kind.hybrid:
        weights = matrix_hybrid.as_folder(kind.model_type, weights)
    _write_folder(weights_for("mlx", folder, name), kind, weights)
    _write_folder(weights_for("transformers", folder, name), kind, _as_pytorch(weights))


def weights_for(engine: str, folder: Path, name: str) -> Path:
    """What an engine is to load. MLX has a folder of its own: it names a gpt-oss's experts otherwise."""
    if name == DEMO:
        dtype = {"llamacpp": ".gguf", "mlx": "?dtype=float32", "transformers": "?dtype=f32", "vllm": "?dtype=float32"}
        return _EXAMPLE / f"{DEMO}{dtype[engine]}"
    if name == SMOLLM2:
        return smollm2.weights() if engine == "llamacpp" else smollm2_folders.folder("f32")
    if name == GEMMA3:
        return gemma3.weights() if engine == "llamacpp" else gemma3.folder()
    return folder / (f"{name}.gguf" if engine == "llamacpp" else f"{name}-{'mlx' if engine == 'mlx' else 'pytorch'}")


def context_of(name: str) -> int:
    """The context to load a model with, in tokens."""
    return {DEMO: DEMO_CONTEXT, **dict.fromkeys(REAL, REAL_CONTEXT)}.get(name, CONTEXT)


def num_plain_tokens() -> int:
    """Ids below this one are text, the others control tokens."""
    return len(PLAIN)


class _Source:
    """Draws random matrices, whose inputs are their last axis."""

    def __init__(self, seed: int) -> None:
        self._random = np.random.default_rng(seed)

    def matrix(self, *shape: int, scale: float = 1.0) -> Array:
        weight: Array = (self._random.standard_normal(shape) * scale / np.sqrt(shape[-1])).astype(np.float32)
        return weight

    def router(self) -> Array:
        weight = self.matrix(EXPERTS, HIDDEN, scale=3)
        weight[:, READ_BY_ROUTERS:] = 0
        return weight

    def vector(self, size: int, mean: float = 0.0) -> Array:
        return (mean + 0.1 * self._random.standard_normal(size)).astype(np.float32)


def _weights(kind: Kind, seed: int) -> Iterator[tuple[str, Array]]:
    """All weights, by the names that MLX reads."""
    source = _Source(seed)
    vocabulary = len(PLAIN) + len(SPECIALS)
    loud = 4 / HIDDEN**0.5 if kind.model_type == "gemma3_text" else 4  # it multiplies embeddings by that root
    yield "model.embed_tokens.weight", source.matrix(vocabulary, HIDDEN, scale=loud)
    yield "model.norm.weight", source.vector(HIDDEN, 1)
    output = source.matrix(vocabulary, HIDDEN, scale=4)
    output[[number for number in range(vocabulary) if not _readable(number)]] = 0  # loses against any positive score
    yield "lm_head.weight", output
    for layer in range(kind.layers):
        prefix = f"model.layers.{layer}."
        for norm in _NORMS.get(kind.model_type, ("input", "post_attention")):
            yield f"{prefix}{norm}_layernorm.weight", source.vector(HIDDEN, 1)
        if kind.hybrid and not matrix_hybrid.attends(layer):
            yield from matrix_hybrid.delta(source.matrix, source.vector, HIDDEN, f"{prefix}linear_attn.")
        else:
            yield from _attention(source, kind, f"{prefix}self_attn.")
        yield from _feed_forward(source, kind, f"{prefix}mlp.")


def _leave_to_routers(name: str, value: Array) -> None:
    """Keep a projection that writes to the residual stream away from what routers read."""
    rows = value if name.endswith(".weight") else value[..., None]
    rows[..., :READ_BY_ROUTERS, :] = 0


def _readable(number: int) -> bool:
    return number < len(PLAIN) and PLAIN[number] in ANSWERED_WITH


def _attention(source: _Source, kind: Kind, prefix: str) -> Iterator[tuple[str, Array]]:
    query, key_value = HEADS * kind.head_dim, KV_HEADS * kind.head_dim
    gated = 1 + kind.hybrid  # by head: its query, then the gate of what it gives
    for name, rows, scale in (("q", query * gated, 2), ("k", key_value, 1), ("v", key_value, 1)):
        yield f"{prefix}{name}_proj.weight", source.matrix(rows, HIDDEN, scale=scale)
    yield f"{prefix}o_proj.weight", source.matrix(HIDDEN, query, scale=8 if kind.hybrid else 2)  # a gate halves it
    if kind.model_type.startswith(("qwen3", "gemma3")):
        yield f"{prefix}q_norm.weight", source.vector(kind.head_dim, 3 if kind.hybrid else 2)
        yield f"{prefix}k_norm.weight", source.vector(kind.head_dim, 1)
    if kind.model_type == "olmo2":  # over all heads at once
        yield f"{prefix}q_norm.weight", source.vector(query, 2)
        yield f"{prefix}k_norm.weight", source.vector(key_value, 1)
    if kind.model_type == "qwen2":
        for name, rows in (("q", query), ("k", key_value), ("v", key_value)):
            yield f"{prefix}{name}_proj.bias", source.vector(rows)
    if kind.model_type == "gpt_oss":
        for name, rows in (("q", query), ("k", key_value), ("v", key_value), ("o", HIDDEN)):
            yield f"{prefix}{name}_proj.bias", source.vector(rows)
        yield f"{prefix}sinks", source.vector(HEADS)


def _feed_forward(source: _Source, kind: Kind, prefix: str) -> Iterator[tuple[str, Array]]:
    shapes = (("gate", FEED_FORWARD, HIDDEN), ("up", FEED_FORWARD, HIDDEN), ("down", HIDDEN, FEED_FORWARD))
    if kind.model_type == "gpt_oss":
        yield f"{prefix}router.weight", source.router()
        # Without a bias, rounding that scales all of a router's scores changes no choice.
        yield f"{prefix}router.bias", np.zeros(EXPERTS, np.float32)
        for name, rows, columns in shapes:
            yield f"{prefix}experts.{name}_proj.weight", source.matrix(EXPERTS, rows, columns)
            yield f"{prefix}experts.{name}_proj.bias", source.vector(EXPERTS * rows).reshape(EXPERTS, rows)
        return
    experts = [""]
    if kind.moe and kind.hybrid:
        yield from matrix_hybrid.shared_expert(source.matrix, HIDDEN, FEED_FORWARD, prefix)
    if kind.moe:
        yield f"{prefix}gate.weight", source.router()
        experts = [f"experts.{number}." for number in range(EXPERTS)]
    for expert in experts:
        for name, rows, columns in shapes:
            yield f"{prefix}{expert}{name}_proj.weight", source.matrix(rows, columns)


def _fused(weights: Weights) -> Weights:
    """With Q, K and V in one matrix, and gate and up in another, as a phi3 has them everywhere."""
    found: Weights = {}
    for name, value in weights.items():
        for part, whole in (("q", "qkv"), ("k", "qkv"), ("v", "qkv"), ("gate", "gate_up"), ("up", "gate_up")):
            if name.endswith(f".{part}_proj.weight"):
                name = name.replace(f".{part}_proj", f".{whole}_proj")
        found[name] = np.concatenate([found[name], value]) if name in found else value
    return found


def _joined_experts(weights: Weights) -> Weights:
    """With a layer's experts in two tensors, gate above up, as transformers 5 keeps a qwen3_moe's."""
    found = {name: value for name, value in weights.items() if ".experts." not in name}
    for name in [name for name in weights if ".experts.0.gate_proj." in name]:
        stem = name.partition("0.gate_proj.")[0]
        gate, up, down = (
            np.stack([weights[f"{stem}{number}.{what}_proj.weight"] for number in range(EXPERTS)])
            for what in ("gate", "up", "down")
        )
        found |= {f"{stem}gate_up_proj": np.concatenate([gate, up], axis=1), f"{stem}down_proj": down}
    return found


def _as_pytorch(weights: Weights) -> Weights:
    """The same under PyTorch's names: a gpt-oss has gate and up of all experts in one tensor, columns in turn."""
    found = {name: value for name, value in weights.items() if ".experts.gate_proj." not in name}
    for name in [name for name in found if ".experts.up_proj." in name]:
        pair = np.stack([weights[name.replace("up_proj", "gate_proj")], found.pop(name)], axis=2)
        joined = pair.reshape(pair.shape[0], -1, *pair.shape[3:])
        stem = name.partition("up_proj.")[0]
        found |= _transposed(stem + "gate_up_proj", name, joined)
    for name in [name for name in found if ".experts.down_proj." in name]:
        found |= _transposed(name.rpartition(".")[0], name, found.pop(name))
    return found


def _transposed(target: str, name: str, value: Array) -> Weights:
    if name.endswith(".bias"):
        return {f"{target}_bias": value}
    return {target: np.ascontiguousarray(value.swapaxes(1, 2))}


def _write_folder(folder: Path, kind: Kind, weights: Weights) -> None:
    folder.mkdir()
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    _tokenizer().save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": SPECIALS[2], "chat_template": TEMPLATE}
    _write_json(folder / "tokenizer_config.json", settings)
    _write_json(folder / "config.json", _config(kind))


def _tokenizer() -> Tokenizer:
    tokenizer = Tokenizer(models.BPE({text: number for number, text in enumerate(PLAIN)}, [MERGE]))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(SPLIT), "isolated"), byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    return tokenizer


def _config(kind: Kind) -> dict[str, Any]:
    config: dict[str, Any] = {
        "model_type": kind.model_type,
        "dtype": "float32",
        "vocab_size": len(PLAIN) + len(SPECIALS),
        "num_hidden_layers": kind.layers,
        "hidden_size": HIDDEN,
        "intermediate_size": FEED_FORWARD,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": kind.head_dim,
        "max_position_embeddings": kind.context,
        "rope_theta": kind.base,
        "rms_norm_eps": RMS_EPSILON,
        "tie_word_embeddings": False,
        "bos_token_id": len(PLAIN),
        "eos_token_id": len(PLAIN) + 2,
        "pad_token_id": len(PLAIN),
    }
    if kind.model_type in _ARCHITECTURES:
        config["architectures"] = [_ARCHITECTURES[kind.model_type]]
    if kind.moe:
        config |= {"num_experts": EXPERTS, "num_experts_per_tok": EXPERTS_USED, "moe_intermediate_size": FEED_FORWARD}
        config |= {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}
    if kind.hybrid:
        config.pop("rope_theta")
        config |= matrix_hybrid.config(kind.model_type, kind.base) | {"shared_expert_intermediate_size": FEED_FORWARD}
        whole = {"model_type": kind.model_type, "text_config": config | {"model_type": "qwen3_5_text"}}
        return whole if kind.model_type == "qwen3_5" else config
    if kind.model_type == "gpt_oss":
        kinds = ["sliding_attention", "full_attention"] * kind.layers
        config |= {"sliding_window": kind.window, "layer_types": kinds[: kind.layers], "swiglu_limit": 7.0}
        config |= {"num_local_experts": EXPERTS, "num_experts_per_tok": EXPERTS_USED}
    if kind.model_type == "mistral":
        config["sliding_window"] = None  # what says nothing has one of 4,096
    if kind.windowed:
        config |= {"sliding_window": kind.window, "use_sliding_window": True, "max_window_layers": 1}
        config["layer_types"] = ["full_attention", "sliding_attention"]
    if kind.model_type == "gemma3_text":
        kinds = ["sliding_attention"] * 5 + ["full_attention"]
        config |= {"sliding_window": kind.window, "layer_types": kinds, "query_pre_attn_scalar": kind.head_dim}
        bases = {"full_attention": config.pop("rope_theta"), "sliding_attention": SLIDING_ROPE_THETA}
        config["rope_parameters"] = {name: {"rope_type": "default", "rope_theta": base} for name, base in bases.items()}
    elif kind.scaling or kind.v5 or kind.model_type == "gpt_oss":
        # Also where it is plain: transformers takes a gpt-oss that says nothing for one stretched by YaRN.
        config["rope_parameters"] = {"rope_type": "default", "rope_theta": config.pop("rope_theta")} | kind.scaling
    return config


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def _write_gguf(path: Path, kind: Kind, weights: Weights) -> None:
    writer = gguf.GGUFWriter(path, kind.architecture)
    _add_sizes(writer, kind)
    _add_vocabulary(writer)
    for name, value in _as_gguf(kind, weights).items():
        writer.add_tensor(name, value)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_sizes(writer: gguf.GGUFWriter, kind: Kind) -> None:
    writer.add_context_length(kind.context)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(kind.layers)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(kind.head_dim)
    writer.add_value_length(kind.head_dim)
    writer.add_layer_norm_rms_eps(RMS_EPSILON)
    writer.add_rope_freq_base(kind.base)
    if kind.hybrid:
        matrix_hybrid.add_sizes(writer, kind.architecture, kind.head_dim)
    else:
        writer.add_rope_dimension_count(kind.head_dim)
    if kind.moe and kind.hybrid:
        writer.add_expert_shared_feed_forward_length(FEED_FORWARD)
    if kind.moe or kind.architecture == "gpt-oss":
        writer.add_expert_count(EXPERTS)
        writer.add_expert_used_count(EXPERTS_USED)
        writer.add_expert_feed_forward_length(FEED_FORWARD)
    if kind.architecture in ("gpt-oss", "gemma3"):
        writer.add_sliding_window(kind.window)
    if kind.architecture == "gemma3":
        writer.add_rope_freq_base_swa(SLIDING_ROPE_THETA)
    if kind.scaling.get("rope_type") in ("linear", "yarn"):
        writer.add_rope_scaling_type(gguf.RopeScalingType(kind.scaling["rope_type"]))
        writer.add_rope_scaling_factor(kind.scaling["factor"])
    if kind.scaling.get("rope_type") == "yarn":
        writer.add_rope_scaling_orig_ctx_len(ORIGINAL_CONTEXT)


def _add_vocabulary(writer: gguf.GGUFWriter) -> None:
    types = [gguf.TokenType.NORMAL] * len(PLAIN) + [gguf.TokenType.CONTROL] * len(SPECIALS)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list([*PLAIN, *SPECIALS])
    writer.add_token_types(types)
    writer.add_token_merges([" ".join(MERGE)])
    writer.add_bos_token_id(len(PLAIN))
    writer.add_eos_token_id(len(PLAIN) + 2)
    writer.add_pad_token_id(len(PLAIN))
    writer.add_add_bos_token(False)
    writer.add_chat_template(TEMPLATE)


def _as_gguf(kind: Kind, weights: Weights) -> Weights:
    """The same under llama.cpp's names: experts in one tensor, a llama's rotated pairs side by side."""
    found: Weights = {}
    experts: dict[str, list[Array]] = {}
    for name, value in (matrix_hybrid.as_gguf(kind.architecture, weights) if kind.hybrid else weights).items():
        stem, _, what = name.partition(".experts.")
        number, _, rest = what.partition(".")
        if number.isdigit():
            experts.setdefault(f"{stem}.experts.{rest}", []).append(value)
        else:
            found[_gguf_name(kind, name)] = _rotated_as_neighbours(kind, name, value)
    if kind.scaling.get("rope_type") == "llama3":
        found["rope_freqs.weight"] = _slowed(kind.scaling)
    return found | {_gguf_name(kind, name): np.stack(values) for name, values in experts.items()}


def _slowed(scaling: dict[str, Any]) -> Array:
    """By what llama.cpp is to divide each pair's frequency, as its converter writes it for a Llama 3.1."""
    turns = ORIGINAL_CONTEXT / (2 * np.pi) * ROPE_THETA ** (-np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    part = np.clip((turns - low) / (high - low), 0, 1)
    slowed: Array = (1 / ((1 - part) / scaling["factor"] + part)).astype(np.float32)
    return slowed


def _gguf_name(kind: Kind, name: str) -> str:
    if name.startswith("blk."):  # already
        return name
    stem, _, suffix = name.rpartition(".") if name.endswith((".weight", ".bias")) else (name, "", "weight")
    parts = stem.removeprefix("model.").split(".", 2)
    if parts[0] != "layers":
        return f"{_GGUF_NAMES[parts[-1]]}.{suffix}"
    own_norm = kind.hybrid or kind.architecture in ("gpt-oss", "olmo2", "gemma3")
    after_attention = "post_attention_norm" if own_norm else "ffn_norm"
    own = {"post_attention_layernorm": after_attention}
    return f"blk.{parts[1]}.{(own | _GGUF_NAMES)[parts[2]]}.{suffix}"


def _rotated_as_neighbours(kind: Kind, name: str, value: Array) -> Array:
    """A llama's Q and K with their rows in the order that llama.cpp's converter gives them."""
    if kind.architecture != "llama" or not name.endswith(("q_proj.weight", "k_proj.weight")):
        return value
    halves = value.reshape(-1, 2, HEAD_DIM // 2, value.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(value.shape)
