"""Writes GGUF files of tiny random models whose greedy answers are far from ties, so that rounding changes none."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import gguf
import numpy as np
from numpy.typing import NDArray

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
_CONTROL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
_WORDS = (
    " the| in| program| read| line| print| report| input|Criterion|user|assistant| out| of| its| and| def| return|ing"
)


@dataclass(frozen=True)
class TinyModel:
    """Sizes and looks of a model; equal seeds give equal weights, whatever the architecture."""

    architecture: str = "qwen3"
    seed: int = 0
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    embedding: int = 64
    feed_forward: int = 128
    context: int = 8192
    chat_template: str = CHATML


def write_gguf(path: Path, model: TinyModel = TinyModel()) -> Path:
    """Write the model to `path`. A "llama" has the rows of its Q and K reordered, as converters do."""
    writer = gguf.GGUFWriter(path, model.architecture)
    _add_sizes(writer, model)
    vocabulary = _add_tokenizer(writer, model.chat_template)
    _add_tensors(writer, model, vocabulary)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def control_ids() -> tuple[int, ...]:
    """Ids of the control tokens."""
    first = len(_alphabet()) + len(_merges())
    return tuple(range(first, first + len(_CONTROL)))


def _add_sizes(writer: gguf.GGUFWriter, model: TinyModel) -> None:
    writer.add_context_length(model.context)
    writer.add_embedding_length(model.embedding)
    writer.add_block_count(model.layers)
    writer.add_feed_forward_length(model.feed_forward)
    writer.add_head_count(model.heads)
    writer.add_head_count_kv(model.kv_heads)
    writer.add_key_length(model.head_dim)
    writer.add_value_length(model.head_dim)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_rope_dimension_count(model.head_dim)


def _add_tokenizer(writer: gguf.GGUFWriter, chat_template: str) -> int:
    alphabet, merges = _alphabet(), _merges()
    plain = list(alphabet.values()) + ["".join(pair) for pair in merges]
    control = list(_CONTROL)
    first = len(plain)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(plain + control)
    writer.add_token_types([gguf.TokenType.NORMAL] * first + [gguf.TokenType.CONTROL] * len(control))
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(first)
    writer.add_eos_token_id(first + 2)
    writer.add_pad_token_id(first)
    writer.add_add_bos_token(False)
    writer.add_chat_template(chat_template)
    return first + len(control)


def _alphabet() -> dict[int, str]:
    """The printable character that stands for each byte in byte-level BPE."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(others)}


def _merges() -> list[tuple[str, str]]:
    """Merges that build each of a few words from its left end."""
    alphabet = _alphabet()
    merges: dict[tuple[str, str], None] = {}
    for word in _WORDS.split("|"):
        letters = [alphabet[byte] for byte in word.encode()]
        for end in range(1, len(letters)):
            merges["".join(letters[:end]), letters[end]] = None
    return list(merges)


def _add_tensors(writer: gguf.GGUFWriter, model: TinyModel, vocabulary: int) -> None:
    source = np.random.default_rng(model.seed)

    def matrix(name: str, rows: int, columns: int, scale: float = 1.0, heads: int = 0) -> None:
        values = (source.standard_normal((rows, columns)) * scale / np.sqrt(columns)).astype(np.float16)
        writer.add_tensor(f"{name}.weight", _pairs_as_neighbours(values, heads) if heads else values)

    def ones(name: str, size: int) -> None:
        writer.add_tensor(f"{name}.weight", np.ones(size, np.float32))

    size, query = model.embedding, model.heads * model.head_dim
    key_value = model.kv_heads * model.head_dim
    reorder = model.architecture == "llama"
    matrix("token_embd", vocabulary, size, scale=8)
    ones("output_norm", size)
    matrix("output", vocabulary, size, scale=4)
    for layer in range(model.layers):
        block = f"blk.{layer}."
        ones(block + "attn_norm", size)
        matrix(block + "attn_q", query, size, heads=model.heads * reorder)
        matrix(block + "attn_k", key_value, size, heads=model.kv_heads * reorder)
        matrix(block + "attn_v", key_value, size)
        matrix(block + "attn_output", size, query)
        ones(block + "ffn_norm", size)
        matrix(block + "ffn_gate", model.feed_forward, size)
        matrix(block + "ffn_up", model.feed_forward, size)
        matrix(block + "ffn_down", size, model.feed_forward)
        if model.architecture == "qwen3":
            ones(block + "attn_q_norm", model.head_dim)
            ones(block + "attn_k_norm", model.head_dim)
        if model.architecture == "qwen2":
            for name, width in (("attn_q", query), ("attn_k", key_value), ("attn_v", key_value)):
                writer.add_tensor(f"{block}{name}.bias", np.zeros(width, np.float32))


def _pairs_as_neighbours(weights: NDArray[np.float16], heads: int) -> NDArray[np.float16]:
    halves = weights.reshape(heads, 2, -1, weights.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weights.shape)
