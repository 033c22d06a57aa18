"""A demo model's two file forms, with the same numbers and the same tokenizer in both."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from examples.model.shape import Shape
from examples.model.tokens import CHAT_TEMPLATE, END, PAD, SPECIALS

NAME = "kvasir-demo"

Weights = dict[str, NDArray[np.float16]]  # by Hugging Face's names


def write_folder(folder: Path, shape: Shape, tokenizer: Tokenizer, weights: Weights) -> None:
    """The Hugging Face form: config.json, model.safetensors and the tokenizer's files."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # safetensors makes files that only their owner can read
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = {token: tokenizer.token_to_id(token) for token in SPECIALS}
    _write_json(folder / "config.json", _config(shape, ids))
    _write_json(folder / "generation_config.json", {"eos_token_id": ids[END], "pad_token_id": ids[PAD]})
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": shape.context,
            "eos_token": END,
            "pad_token": PAD,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def _config(shape: Shape, ids: dict[str, int]) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "dtype": "float16",
        "vocab_size": shape.vocabulary,
        "num_hidden_layers": shape.layers,
        "hidden_size": shape.hidden,
        "intermediate_size": shape.feed_forward,
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.kv_heads,
        "head_dim": shape.head_dim,
        "hidden_act": "silu",
        "max_position_embeddings": shape.context,
        "rope_theta": shape.rope_theta,
        "rms_norm_eps": shape.rms_epsilon,
        "attention_bias": False,
        "tie_word_embeddings": shape.tied,
        "use_sliding_window": False,
        "eos_token_id": ids[END],
        "pad_token_id": ids[PAD],
    }


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def write_gguf(path: Path, shape: Shape, tokenizer: Tokenizer, weights: Weights, about: str) -> None:
    """The llama.cpp form: the same weights and the same tokenizer in one file."""
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_name(NAME)
    writer.add_description(about)
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_vocab_size(shape.vocabulary)
    writer.add_context_length(shape.context)
    writer.add_block_count(shape.layers)
    writer.add_embedding_length(shape.hidden)
    writer.add_feed_forward_length(shape.feed_forward)
    writer.add_head_count(shape.heads)
    writer.add_head_count_kv(shape.kv_heads)
    writer.add_key_length(shape.head_dim)
    writer.add_value_length(shape.head_dim)
    writer.add_rope_freq_base(shape.rope_theta)
    writer.add_layer_norm_rms_eps(shape.rms_epsilon)
    _add_tokenizer(writer, tokenizer)
    for name, value in sorted(weights.items()):
        # llama.cpp wants the norms in float32; float16 to float32 changes no value.
        writer.add_tensor(gguf_name(name), value.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: Tokenizer) -> None:
    tokens = [tokenizer.id_to_token(token_id) for token_id in range(tokenizer.get_vocab_size())]
    merges = json.loads(tokenizer.to_str())["model"]["merges"]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types([gguf.TokenType.CONTROL if token in SPECIALS else gguf.TokenType.NORMAL for token in tokens])
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_eos_token_id(tokens.index(END))
    writer.add_pad_token_id(tokens.index(PAD))
    writer.add_bos_token_id(tokens.index(PAD))
    writer.add_add_bos_token(False)
    writer.add_chat_template(CHAT_TEMPLATE)


_GGUF_NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def gguf_name(name: str) -> str:
    """`model.layers.2.self_attn.q_proj.weight` is `blk.2.attn_q.weight` in a GGUF file."""
    stem = name.removesuffix(".weight")
    if stem.startswith("model.layers."):
        layer, part = stem.removeprefix("model.layers.").split(".", 1)
        return f"blk.{layer}.{_GGUF_NAMES[part]}.weight"
    return f"{_GGUF_NAMES[stem]}.weight"
