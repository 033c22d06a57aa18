"""Writes GGUF files of tiny random models whose greedy answers are far from ties, so that rounding changes none."""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
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
    window: int = 16  # of a "gpt-oss", in every second layer
    experts: int = 4  # of a "gpt-oss"
    rope: tuple[str, float, int] = ("", 1.0, 0)  # scaling: its type, factor, original context
    rope_factors: tuple[float, ...] = ()  # by which each pair of a "llama" is slowed
    says: tuple[int, ...] = ()  # if given, each of these ids is followed by the next one, whatever came before them
    more_control: tuple[str, ...] = ()  # control tokens after the three of `control_ids`


def write_gguf(path: Path, model: TinyModel = TinyModel()) -> Path:
    """Write the model to `path`. A "llama" has the rows of its Q and K reordered, as converters do."""
    writer = gguf.GGUFWriter(path, model.architecture)
    _add_sizes(writer, model)
    vocabulary = _add_tokenizer(writer, model)
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


def token_texts() -> list[bytes]:
    """The bytes that each id spells."""
    byte_of = {character: byte for byte, character in _alphabet().items()}
    plain = list(_alphabet().values()) + ["".join(pair) for pair in _merges()]
    return [bytes(byte_of[letter] for letter in text) for text in plain] + [text.encode() for text in _CONTROL]


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
    scaling, factor, original = model.rope
    if scaling:
        writer.add_rope_scaling_type(gguf.RopeScalingType(scaling))
        writer.add_rope_scaling_factor(factor)
        writer.add_rope_scaling_orig_ctx_len(original)
    if model.architecture == "gpt-oss":
        writer.add_sliding_window(model.window)
        writer.add_expert_count(model.experts)
        writer.add_expert_used_count(2)
        writer.add_expert_feed_forward_length(model.feed_forward)


def _add_tokenizer(writer: gguf.GGUFWriter, model: TinyModel) -> int:
    alphabet, merges = _alphabet(), _merges()
    plain = list(alphabet.values()) + ["".join(pair) for pair in merges]
    control = [*_CONTROL, *model.more_control]
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
    writer.add_chat_template(model.chat_template)
    return first + len(control)


def _alphabet() -> dict[int, str]:
    """The printable character that stands for each byte in byte-level BPE."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    unprintable_bytes = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + n) for n, byte in enumerate(unprintable_bytes)}


def _merges() -> list[tuple[str, str]]:
    """Merges that build each of a few words from its left end."""
    alphabet = _alphabet()
    merges: dict[tuple[str, str], None] = {}
    for word in _WORDS.split("|"):
        letters = [alphabet[byte] for byte in word.encode()]
        for end in range(1, len(letters)):
            merges["".join(letters[:end]), letters[end]] = None
    return list(merges)


class _Tensors:
    """Draws and adds tensors, in an order that gives architectures with the same tensors the same numbers."""

    def __init__(self, writer: gguf.GGUFWriter, seed: int) -> None:
        self._writer = writer
        self._source = np.random.default_rng(seed)

    def random(self, name: str, *shape: int, scale: float = 1.0, heads: int = 0, zero: Sequence[int] = ()) -> None:
        """A weight whose inputs are its last axis; `heads` of a Q or K to be reordered; rows `zero` are cleared."""
        values = (self._source.standard_normal(shape) * scale / np.sqrt(shape[-1])).astype(np.float32)
        values[list(zero)] = 0
        self._writer.add_tensor(f"{name}.weight", _pairs_as_neighbours(values, heads) if heads else values)

    def chain(self, ids: Sequence[int], vocabulary: int, size: int, scale: float = 4.0) -> None:
        """Embeddings and outputs by which each of `ids` is followed by the next one, if no layer says otherwise."""
        embeddings = (self._source.standard_normal((vocabulary, size)) * scale / np.sqrt(size)).astype(np.float32)
        outputs = (self._source.standard_normal((vocabulary, size)) / np.sqrt(size)).astype(np.float32)
        for token, following in pairwise(ids):
            outputs[following] = embeddings[token] * 8
        self._writer.add_tensor("token_embd.weight", embeddings)
        self._writer.add_tensor("output.weight", outputs)

    def add_ones(self, name: str, size: int) -> None:
        self._writer.add_tensor(f"{name}.weight", np.ones(size, np.float32))

    def zeros(self, name: str, *shape: int) -> None:
        self._writer.add_tensor(name, np.zeros(shape, np.float32))


def _add_tensors(writer: gguf.GGUFWriter, model: TinyModel, vocabulary: int) -> None:
    tensors = _Tensors(writer, model.seed)
    tensors.add_ones("output_norm", model.embedding)
    if model.says:
        tensors.chain(model.says, vocabulary, model.embedding, scale=64)  # louder than the layers
    else:
        tensors.random("token_embd", vocabulary, model.embedding, scale=4)
        # Bytes that are no ASCII letter lose against every positive score, so answers are readable text.
        unreadable = [i for i, text in enumerate(token_texts()) if not all(0x20 <= byte < 0x7F for byte in text)]
        tensors.random("output", vocabulary, model.embedding, scale=4, zero=unreadable)
    if model.rope_factors:
        writer.add_tensor("rope_freqs.weight", np.array(model.rope_factors, np.float32))
    for layer in range(model.layers):
        _add_attention(tensors, model, f"blk.{layer}.")
        if model.architecture == "gpt-oss":
            _add_experts(tensors, model, f"blk.{layer}.")
        else:
            _add_feed_forward(tensors, model, f"blk.{layer}.")


def _add_attention(tensors: _Tensors, model: TinyModel, block: str) -> None:
    size, query, key_value = model.embedding, model.heads * model.head_dim, model.kv_heads * model.head_dim
    reorder = model.architecture == "llama"
    tensors.add_ones(block + "attn_norm", size)
    # Sharp and loud attention, so that an answer depends on the whole prompt and not on its last token alone.
    tensors.random(block + "attn_q", query, size, scale=2, heads=model.heads * reorder)
    tensors.random(block + "attn_k", key_value, size, heads=model.kv_heads * reorder)
    tensors.random(block + "attn_v", key_value, size)
    tensors.random(block + "attn_output", size, query, scale=2)
    if model.architecture == "qwen3":
        tensors.add_ones(block + "attn_q_norm", model.head_dim)
        tensors.add_ones(block + "attn_k_norm", model.head_dim)
    if model.architecture in ("qwen2", "gpt-oss"):
        for name, width in (("attn_q", query), ("attn_k", key_value), ("attn_v", key_value)):
            tensors.zeros(f"{block}{name}.bias", width)
    if model.architecture == "gpt-oss":
        tensors.zeros(block + "attn_output.bias", size)
        tensors.zeros(block + "attn_sinks.weight", model.heads)


def _add_feed_forward(tensors: _Tensors, model: TinyModel, block: str) -> None:
    tensors.add_ones(block + "ffn_norm", model.embedding)
    tensors.random(block + "ffn_gate", model.feed_forward, model.embedding)
    tensors.random(block + "ffn_up", model.feed_forward, model.embedding)
    tensors.random(block + "ffn_down", model.embedding, model.feed_forward)


def _add_experts(tensors: _Tensors, model: TinyModel, block: str) -> None:
    size, inner, experts = model.embedding, model.feed_forward, model.experts
    tensors.add_ones(block + "post_attention_norm", size)
    tensors.random(block + "ffn_gate_inp", experts, size)
    tensors.zeros(block + "ffn_gate_inp.bias", experts)
    for name, rows, columns in (("gate", inner, size), ("up", inner, size), ("down", size, inner)):
        tensors.random(f"{block}ffn_{name}_exps", experts, rows, columns)
        tensors.zeros(f"{block}ffn_{name}_exps.bias", experts, rows)


def _pairs_as_neighbours(weights: NDArray[np.float32], heads: int) -> NDArray[np.float32]:
    halves = weights.reshape(heads, 2, -1, weights.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(weights.shape)
