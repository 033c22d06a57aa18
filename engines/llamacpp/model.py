"""What a GGUF file says about the KV caches that llama.cpp computes from it: shape, order of rotated pairs, and
fingerprint."""

import hashlib
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from engines import cached
from engines.chat import sample_words, vocabulary_hash
from engines.llamacpp import slotfile
from engines.llamacpp.gguf_file import GGUFFile
from engines.llamacpp.slotfile import SlotFile, SlotForm, SlotShape
from engines.rope import Rope, plain, yarn
from messages.errors import InvalidMessage, KVTransferFailed
from messages.kv import KVLayout

FORMAT = "llamacpp/1"  # must change whenever Kvasir's layout of KV blocks changes, even for the same weights

# How llama.cpp rotates keys, by general.architecture. In _HALVES, a rotated pair has one number from each half of a
# key. In _INTERLEAVED, the two numbers are neighbours, because converters reorder the rows of Q and K.
_HALVES = {
    *("qwen2", "qwen2moe", "qwen3", "qwen3moe", "qwen3next", "qwen35", "qwen35moe"),
    *("gpt-oss", "olmo2", "phi3", "gemma3"),
}
_INTERLEAVED = {"llama"}
# Models with Gated DeltaNet layers. Those in _MROPE rotate keys by three positions (M-RoPE), which are equal for text.
# Their value heads are also in another order, which `SlotShape.key_heads` describes.
_MROPE = {"qwen35", "qwen35moe"}
_GATED_DELTA = _MROPE | {"qwen3next"}
_RECURRENT = ("ssm.conv_kernel", "shortconv.l_cache", "wkv.head_size")
# In these models, only every n-th layer attends to all positions. The others attend to a sliding window, unless the
# file says otherwise.
_WINDOW_PATTERNS = {"gpt-oss": 2, "gemma3": 6}
_GEMMA3_WINDOW_BASE = 10_000.0  # RoPE base of the windowed layers, if the file states none


@dataclass(frozen=True, slots=True)
class Heads:
    """Attention sizes from a GGUF's metadata."""

    layers: int
    kv_heads: int
    head_dim: int


# The ids of the ggml types F32, F16, Q8_0, Q8_1, Q8_K and BF16.
_ROUNDING = {0: "f32", 1: "f16", 8: "q8", 9: "q8", 15: "q8", 30: "bf16"}
_PADDING = re.compile(r"\[PAD\d+\]")
# llama.cpp's names (src/llama-vocab.cpp, llama_vocab::impl::load) for byte-level BPE and for SentencePiece.
_BYTE_LEVEL, _SENTENCE_PIECE = "gpt2", "llama"
_USER_DEFINED = 4  # the token_type of user-defined tokens


def rounding(gguf: GGUFFile) -> str:
    """The rounding of most layers' weights, as `EngineInfo.rounding` names it."""
    return _ROUNDING.get(gguf.kind, "q4")


def heads(gguf: GGUFFile) -> Heads:
    """The attention sizes. Raises KVTransferFailed if K and V, or the layers, differ in size."""
    layers, kv_heads = _layers(gguf), gguf.hyperparameter("attention.head_count_kv")
    queries = gguf.hyperparameter("attention.head_count")
    kv_heads = queries if kv_heads is None else kv_heads
    if isinstance(kv_heads, list) and len(set(kv_heads) - {0}) == 1:  # 0 marks a recurrent layer
        kv_heads = max(kv_heads)
    try:
        default_size = gguf.hyperparameter("embedding_length", 0) // queries
        key, value = (gguf.hyperparameter(f"attention.{name}_length", default_size) for name in ("key", "value"))
        sizes = Heads(int(layers), int(kv_heads), int(key))
    except (TypeError, ZeroDivisionError):
        raise KVTransferFailed(
            f"{gguf.path.name} states no attention sizes, or states different sizes for different layers"
        ) from None
    if key != value:
        raise KVTransferFailed(
            f"{gguf.path.name} has keys of {key} numbers but values of {value}, which is not supported"
        )
    return sizes


def require_known(gguf: GGUFFile) -> None:
    """Raises KVTransferFailed if it is unknown how llama.cpp keeps this architecture's keys."""
    if gguf.hyperparameter("attention.kv_lora_rank"):
        raise KVTransferFailed(
            f"a {gguf.architecture!r} model keeps its keys compressed (multi-head latent attention), which is not "
            "supported"
        )
    if gguf.architecture not in _GATED_DELTA and any(gguf.hyperparameter(name) for name in _RECURRENT):
        raise KVTransferFailed(f"Kvasir can't transfer the recurrent state of a {gguf.architecture!r} model")
    if gguf.architecture not in _HALVES | _INTERLEAVED:
        raise KVTransferFailed(f"Kvasir does not know how llama.cpp keeps the keys of a {gguf.architecture!r} model")
    if gguf.architecture == "olmo2" and gguf.hyperparameter("attention.sliding_window"):
        raise KVTransferFailed(
            "an 'olmo2' model with sliding windows (OLMo 3) uses two kinds of RoPE, which is not supported"
        )
    if gguf.long_rope:
        raise KVTransferFailed(
            f"the keys of {gguf.path.name} depend on the context that llama.cpp is started with (LongRoPE), so two "
            "workers could compute different keys"
        )


def slot_form(gguf: GGUFFile) -> SlotForm:
    """How this model's slot files are built."""
    if gguf.architecture not in _GATED_DELTA:
        return SlotForm()
    layers = _layers(gguf)
    return SlotForm(gguf.architecture in _MROPE, layers, len(_recurrent_layers(gguf, layers)))


def slot_shape(gguf: GGUFFile, probe: SlotFile) -> SlotShape:
    """How this model's slot files are to be read, checked against one that the server wrote.

    Raises KVTransferFailed with the reason why this model's KV cache can't be transferred.
    """
    require_known(gguf)
    architecture, sizes = gguf.architecture, heads(gguf)
    interleaved = architecture in _INTERLEAVED
    if interleaved and gguf.hyperparameter("rope.dimension_count", sizes.head_dim) != sizes.head_dim:
        raise KVTransferFailed("the model rotates only a part of each key, which is not supported")
    window = gguf.hyperparameter("attention.sliding_window", 0) if architecture in _WINDOW_PATTERNS else 0
    window_layers = _window_layers(gguf, sizes.layers) if window else ()
    try:
        layout = KVLayout(sizes.layers, sizes.kv_heads, sizes.head_dim, probe.caches[0][0].dtype, window, window_layers)
        key_heads = 0
        if architecture in _GATED_DELTA:
            key_heads, layout = _gated_delta(gguf, layout)
    except (InvalidMessage, TypeError, ZeroDivisionError) as error:
        raise KVTransferFailed(str(error)) from None
    key_heads = key_heads if architecture in _MROPE else 0
    shape = SlotShape(layout, interleaved, slot_form(gguf), key_heads, probe.version, probe.packs_tokens)
    # The results are not used, because these calls only check that the probe's caches, rows and types match the
    # metadata.
    slotfile.to_blocks(probe, shape)
    slotfile.snapshot(probe, shape)
    return shape


def _layers(gguf: GGUFFile) -> Any:
    """The layers that compute the answer. A model may have more, which guess further tokens (MTP)."""
    layers = gguf.hyperparameter("block_count")
    return layers - gguf.hyperparameter("nextn_predict_layers", 0) if isinstance(layers, int) else layers


def _recurrent_layers(gguf: GGUFFile, layers: int) -> tuple[int, ...]:
    interval = gguf.hyperparameter("full_attention_interval", 4)
    return tuple(index for index in range(layers) if (index + 1) % interval)


def _gated_delta(gguf: GGUFFile, attention: KVLayout) -> tuple[int, KVLayout]:
    """The number of key heads in a recurrent layer, and the layout with such layers."""
    names = ("group_count", "time_step_rank", "state_size", "inner_size", "conv_kernel")
    keys, values, key_size, inner, kernel = (int(gguf.hyperparameter(f"ssm.{name}")) for name in names)
    return keys, replace(
        attention,
        recurrent_layers=_recurrent_layers(gguf, attention.num_layers),
        conv_shape=(2 * keys * key_size + inner, kernel - 1),
        matrix_shape=(values, key_size, inner // values),
    )


def _window_layers(gguf: GGUFFile, layers: int) -> tuple[int, ...]:
    pattern = gguf.hyperparameter("attention.sliding_window_pattern", _WINDOW_PATTERNS[gguf.architecture])
    if isinstance(pattern, list):
        return tuple(index for index, has_window in enumerate(pattern[:layers]) if has_window)
    return tuple(index for index in range(layers) if index % pattern < pattern - 1)


def effective_ropes(gguf: GGUFFile) -> tuple[Rope, ...]:
    """The RoPE that llama.cpp computes for full-attention layers, and then for window layers if theirs differs.

    Raises KVTransferFailed if a RoPE's formula is not known here.
    """
    full = effective_rope(gguf)
    if gguf.architecture != "gemma3" or not gguf.hyperparameter("attention.sliding_window"):
        return (full,)
    base = float(gguf.hyperparameter("rope.freq_base_swa", _GEMMA3_WINDOW_BASE))
    return full, Rope(tuple(plain(base, 2 * len(full.frequencies))), base=base)


def effective_rope(gguf: GGUFFile) -> Rope:
    """What llama.cpp computes for full-attention layers from the metadata, whatever the model was trained with.

    The formulas are those of llama.cpp's llama-context.cpp (llama_context::llama_context: scaling type, attention
    factor) and ggml's ops.cpp (rope_yarn, ggml_rope_yarn_corr_dims): YaRN's ramp is always truncated.
    Raises KVTransferFailed for a RoPE whose formula is not known here.
    """
    dimensions = int(gguf.hyperparameter("rope.dimension_count", heads(gguf).head_dim))
    base = float(gguf.hyperparameter("rope.freq_base", 10_000.0))
    scaling = str(gguf.hyperparameter("rope.scaling.type", "linear"))
    factor = float(gguf.hyperparameter("rope.scaling.factor", 0) or gguf.hyperparameter("rope.scale_linear", 0) or 1)
    attention = float(gguf.hyperparameter("rope.scaling.attn_factor", 1.0))
    if scaling not in ("none", "linear", "yarn") or gguf.hyperparameter("rope.scaling.yarn_log_multiplier"):
        raise KVTransferFailed(f"Kvasir does not know how llama.cpp computes RoPE scaling of the type {scaling!r:.40}")
    frequencies = plain(base, dimensions)
    # llama is the only known architecture that uses the RoPE factors in the file.
    if gguf.architecture == "llama" and len(gguf.rope_factors) == len(frequencies):
        frequencies = [f / slower for f, slower in zip(frequencies, gguf.rope_factors, strict=True)]
    if scaling == "linear":
        return Rope(tuple(f / factor for f in frequencies), attention, base)
    if scaling == "none":
        return Rope(tuple(frequencies), attention, base)
    trained_context = gguf.hyperparameter("context_length", 0)
    original = float(gguf.hyperparameter("rope.scaling.original_context_length", 0) or trained_context)
    fast = float(gguf.hyperparameter("rope.scaling.yarn_beta_fast", 32.0))
    slow = float(gguf.hyperparameter("rope.scaling.yarn_beta_slow", 1.0))
    yarn_frequencies = yarn(frequencies, factor, base, original, (fast, slow))
    return Rope(tuple(yarn_frequencies), attention * (1 + 0.1 * math.log(max(factor, 1.0))), base)


def vocabulary(gguf: GGUFFile) -> list[str]:
    """The text of each id, the same as in a Hugging Face folder of the same model, without padding tokens."""
    tokens = [str(token) for token in gguf.metadata.get("tokenizer.ggml.tokens", [])]
    while tokens and _PADDING.fullmatch(tokens[-1]):
        tokens.pop()
    if gguf.metadata.get("tokenizer.ggml.model") == _SENTENCE_PIECE:
        # In user-defined tokens, llama.cpp's converter replaces "▁" with the space that it stands for
        # (convert_hf_to_gguf.py, _create_vocab_sentencepiece).
        for number in _user_defined(gguf, len(tokens)):
            tokens[number] = tokens[number].replace(" ", "\u2581")
    return tokens


def marks(gguf: GGUFFile) -> list[str]:
    """Texts that llama.cpp turns into one token wherever they appear, whether control tokens are recognised or not."""
    tokens = gguf.metadata.get("tokenizer.ggml.tokens", [])
    return [str(tokens[number]) for number in _user_defined(gguf, len(tokens)) if str(tokens[number]).strip()]


def _user_defined(gguf: GGUFFile, count: int) -> list[int]:
    kinds = gguf.metadata.get("tokenizer.ggml.token_type", [])
    return [number for number, kind in enumerate(kinds[:count]) if kind == _USER_DEFINED]


def tokenizer_hash(gguf: GGUFFile, encode: Callable[[str], Sequence[int]]) -> str:
    """A hash that names the tokenizer, the same as for a Hugging Face folder of the same model. It does not include the
    chat template.

    `encode`: the ids of a bare text.
    """
    if gguf.metadata.get("tokenizer.ggml.model") == _BYTE_LEVEL:
        return vocabulary_hash(vocabulary(gguf), map(str, gguf.metadata.get("tokenizer.ggml.merges", [])))
    return vocabulary_hash(vocabulary(gguf), sample_words(encode))


def fingerprint(gguf: GGUFFile, layout: KVLayout) -> str:
    """Names the KV family: architecture and its numbers (RoPE among them), tokenizer, weights, format, block length."""
    prefix = gguf.architecture + "."
    return _digest(
        {
            "format": FORMAT,
            "architecture": {k: v for k, v in gguf.metadata.items() if k.startswith(prefix)},
            "tokenizer": _digest({k: v for k, v in gguf.metadata.items() if k.startswith("tokenizer.ggml.")}),
            "weights": weights_digest(gguf),
            "block_tokens": layout.block_tokens,
        }
    )


def weights_digest(gguf: GGUFFile) -> str:
    """SHA-256 of all tensor data. It is cached in the user's cache folder by the file's path, size and time, because a
    30 GB file takes a minute to read."""
    identity = f"{gguf.path.resolve()}\0{cached.file_identity(gguf.path.stat())}\0{gguf.data_start}"
    return cached.weights_digest(identity, gguf.tensor_digest)


def _digest(value: Any) -> str:
    text = json.dumps(value, sort_keys=True, default=str, ensure_ascii=True)
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
