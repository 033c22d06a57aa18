"""Writes Hugging Face folders with the weights of tiny_gguf's models, so that two engines can be held to each other."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers

from tests.support.tiny_gguf import TinyModel

_QWEN2_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_CLASSES = {"qwen2": "Qwen2ForCausalLM", "qwen3": "Qwen3ForCausalLM", "gpt-oss": "GptOssForCausalLM"}
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_IN_LAYER = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm", "ffn_norm": "post_attention_layernorm", "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj", "post_attention_norm": "post_attention_layernorm",
    "ffn_gate_inp": "mlp.router", "attn_sinks": "self_attn.sinks", "ffn_gate_exps": "mlp.experts.gate_proj",
    "ffn_up_exps": "mlp.experts.up_proj", "ffn_down_exps": "mlp.experts.down_proj",
}  # fmt: skip


def write_hf(folder: Path, source: Path, model: TinyModel) -> Path:
    """Write the GGUF file of a qwen2, qwen3 or gpt-oss as a folder; a gpt-oss's experts get MLX's names."""
    folder.mkdir(parents=True, exist_ok=True)
    reader = gguf.GGUFReader(source)
    texts = [bytes(reader.fields["tokenizer.ggml.tokens"].parts[i]).decode() for i in _items(reader, "tokens")]
    merges = [bytes(reader.fields["tokenizer.ggml.merges"].parts[i]).decode() for i in _items(reader, "merges")]
    _write_tokenizer(folder, texts, merges, model.chat_template)
    _write_json(folder / "config.json", _config(model, len(texts)))
    save_file(dict(_tensors(reader)), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _items(reader: gguf.GGUFReader, name: str) -> list[int]:
    return list(reader.fields[f"tokenizer.ggml.{name}"].data)


def _tensors(reader: gguf.GGUFReader) -> Iterator[tuple[str, NDArray[np.float32]]]:
    for tensor in reader.tensors:
        name, _, kind = tensor.name.rpartition(".")
        parts = name.split(".")
        target = f"model.layers.{parts[1]}.{_IN_LAYER[parts[2]]}" if parts[0] == "blk" else _TOP[name]
        suffix = "" if target.endswith("sinks") else f".{kind}"
        yield target + suffix, np.array(tensor.data)


def _config(model: TinyModel, vocabulary: int) -> dict[str, Any]:
    config: dict[str, Any] = {
        "architectures": [_CLASSES[model.architecture]],
        "model_type": model.architecture.replace("-", "_"),
        "dtype": "float32",
        "vocab_size": vocabulary,
        "num_hidden_layers": model.layers,
        "hidden_size": model.embedding,
        "intermediate_size": model.feed_forward,
        "num_attention_heads": model.heads,
        "num_key_value_heads": model.kv_heads,
        "head_dim": model.head_dim,
        "max_position_embeddings": model.context,
        "rope_theta": 10000.0,
        "rms_norm_eps": 1e-6,
        "tie_word_embeddings": False,
    }
    if model.architecture == "gpt-oss":
        kinds = ["sliding_attention", "full_attention"] * model.layers
        config |= {"sliding_window": model.window, "layer_types": kinds[: model.layers]}
        config |= {"num_local_experts": model.experts, "num_experts_per_tok": 2, "swiglu_limit": 7.0}
        # Plain RoPE: transformers takes a gpt-oss that says nothing for one stretched by YaRN.
        config["rope_scaling"] = {"rope_type": "default"}
    return config


def _write_tokenizer(folder: Path, texts: list[str], merges: list[str], chat_template: str) -> None:
    control = [text for text in texts if text.startswith("<|")]
    vocabulary = {text: number for number, text in enumerate(texts) if text not in control}
    tokenizer = Tokenizer(models.BPE(vocabulary, [(pair.split(" ")[0], pair.split(" ")[1]) for pair in merges]))
    split = pre_tokenizers.Split(Regex(_QWEN2_SPLIT), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in control])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "chat_template": chat_template}
    _write_json(folder / "tokenizer_config.json", {"tokenizer_class": "PreTrainedTokenizerFast", **settings})


def _write_json(path: Path, value: dict[str, Any]) -> None:
    path.write_text(json.dumps(value, indent=2), encoding="utf-8")
