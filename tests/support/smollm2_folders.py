"""SmolLM2's weights as Hugging Face folders, for the engines that read no GGUF file.

`python -m tests.support.smollm2_folders` makes them: the Q4_1 numbers as float32, which is exact, and those rounded to
bfloat16. So MLX and PyTorch compute with the numbers that llama.cpp multiplies by, apart from what it rounds on the
way: activations to 8 bits before each product with a Q4_1 matrix, K and V to float16.

Everything comes out of the GGUF file: the same file gives the same bytes. The folders lie beside it in the user's cache
(800 MB) under a name that holds a digest of this script, so a changed script makes new ones.
"""

import hashlib
import json
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

import click
import gguf
import numpy as np
from numpy.typing import NDArray
from safetensors import TensorSpec, serialize_file
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from engines.llamacpp.gguf_file import GGUFFile, read_gguf
from messages.kv import cast
from tests.support import smollm2

DType = Literal["f32", "bf16"]
DTYPES: tuple[DType, ...] = ("f32", "bf16")
_NAMES = {"f32": "float32", "bf16": "bfloat16"}
_CONTROL = int(gguf.TokenType.CONTROL)
_TOP = {"token_embd": "model.embed_tokens", "output_norm": "model.norm"}
_IN_LAYER = {
    "attn_norm": "input_layernorm", "attn_q": "self_attn.q_proj", "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj", "attn_output": "self_attn.o_proj", "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj",
}  # fmt: skip


def folder(dtype: DType) -> Path:
    """The folder with weights of this type, made if it is not there yet. Raises smollm2.ModelMissing."""
    source = smollm2.weights()
    script = hashlib.sha256(Path(__file__).read_bytes()).hexdigest()[:12]
    target = source.parent / f"smollm2-{dtype}-{script}"
    if not target.is_dir():
        with tempfile.TemporaryDirectory(dir=source.parent) as draft:
            draft_folder = Path(draft) / target.name
            write(draft_folder, source, dtype)
            try:
                draft_folder.rename(target)  # whole or not at all, also where two runs make it at once
            except OSError:
                if not target.is_dir():
                    raise
    return target


def write(target: Path, source: Path, dtype: DType) -> None:
    """Write a llama's GGUF file as a folder in the words of transformers 5."""
    target.mkdir(parents=True)
    file = read_gguf(source)
    _write_weights(target / "model.safetensors", source, file, dtype)
    _tokenizer(file).save(str(target / "tokenizer.json"))
    _write_json(target / "tokenizer_config.json", _tokenizer_config(file))
    _write_json(target / "config.json", _config(file, dtype))


def _write_weights(target: Path, source: Path, file: GGUFFile, dtype: DType) -> None:
    arrays = {name: np.ascontiguousarray(cast(value, "f32", dtype)) for name, value in _tensors(source, file)}
    specs = {
        name: TensorSpec(dtype=_NAMES[dtype], shape=array.shape, data_ptr=array.ctypes.data, data_len=array.nbytes)
        for name, array in arrays.items()
    }
    serialize_file(specs, target, metadata={"format": "pt"})


def _tensors(source: Path, file: GGUFFile) -> Iterator[tuple[str, NDArray[np.float32]]]:
    heads = {"attn_q": file.hyperparameter("attention.head_count")}
    heads["attn_k"] = file.hyperparameter("attention.head_count_kv")
    for tensor in gguf.GGUFReader(source).tensors:
        value = gguf.dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        stem = tensor.name.removesuffix(".weight")
        if stem in _TOP:
            yield f"{_TOP[stem]}.weight", value
            continue
        _, layer, part = stem.split(".")
        value = _halves(value, heads[part]) if part in heads else value
        yield f"model.layers.{layer}.{_IN_LAYER[part]}.weight", value


def _halves(value: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    """Rows of Q or K as transformers has them: llama.cpp's converter put the two of a rotated pair side by side."""
    rows, columns = value.shape
    return value.reshape(heads, rows // heads // 2, 2, columns).swapaxes(1, 2).reshape(rows, columns)


def _tokenizer(file: GGUFFile) -> Tokenizer:
    """By llama.cpp's pre-tokenizer "smollm": each digit by itself, then GPT-2's split."""
    texts, merges = file.metadata["tokenizer.ggml.tokens"], file.metadata["tokenizer.ggml.merges"]
    if file.metadata["tokenizer.ggml.pre"] != "smollm":
        raise ValueError(f"{file.path} has another pre-tokenizer than SmolLM2's")
    pairs = [(first, second) for first, second in (merge.split(" ") for merge in merges)]
    tokenizer = Tokenizer(models.BPE({text: number for number, text in enumerate(texts)}, pairs))
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    kinds = file.metadata["tokenizer.ggml.token_type"]
    control = [text for text, kind in zip(texts, kinds, strict=True) if kind == _CONTROL]
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in control])
    return tokenizer


def _tokenizer_config(file: GGUFFile) -> dict[str, Any]:
    texts = file.metadata["tokenizer.ggml.tokens"]
    token_names = {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}
    tokens = {
        f"{hf_name}_token": texts[file.metadata[f"tokenizer.ggml.{gguf_name}_token_id"]]
        for hf_name, gguf_name in token_names.items()
    }
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "chat_template": file.metadata["tokenizer.chat_template"],
        "clean_up_tokenization_spaces": False,
        **tokens,
    }


def _config(file: GGUFFile, dtype: DType) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "dtype": _NAMES[dtype],
        "vocab_size": len(file.metadata["tokenizer.ggml.tokens"]),
        "num_hidden_layers": file.hyperparameter("block_count"),
        "hidden_size": file.hyperparameter("embedding_length"),
        "intermediate_size": file.hyperparameter("feed_forward_length"),
        "num_attention_heads": file.hyperparameter("attention.head_count"),
        "num_key_value_heads": file.hyperparameter("attention.head_count_kv"),
        "head_dim": file.hyperparameter("rope.dimension_count"),
        "max_position_embeddings": file.hyperparameter("context_length"),
        "rms_norm_eps": round(file.hyperparameter("attention.layer_norm_rms_epsilon"), 12),  # 1e-5, kept as float32
        # In the words of transformers 5 only, which mlx-lm takes for a model with the default base of 10,000.
        "rope_parameters": {"rope_type": "default", "rope_theta": file.hyperparameter("rope.freq_base")},
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": True,
        "bos_token_id": file.metadata["tokenizer.ggml.bos_token_id"],
        "eos_token_id": file.metadata["tokenizer.ggml.eos_token_id"],
        "pad_token_id": file.metadata["tokenizer.ggml.padding_token_id"],
    }


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def main() -> int:
    """Make them; 1 with a sentence if the model can't be had."""
    try:
        for dtype in DTYPES:
            click.echo(folder(dtype))
    except smollm2.CheckpointMissing as error:
        click.echo(error, err=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
