"""Make the demo model: `python -m examples.model.make [--out DIR] [--seed N]`.

A Qwen3 of about 1.1 million random weights with a tokenizer of its own, written twice: as a Hugging Face folder and
as a GGUF file. Weights are rounded to float16 once, so both files hold exactly the same numbers. The same seed gives
the same bytes. Needs NumPy, tokenizers, safetensors and gguf; no PyTorch.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from examples.model.corpus import WORDS, make_corpus

NAME = "kvasir-demo"
SEED = 20240229

VOCABULARY = 2560
LAYERS = 3
HIDDEN = 128
HEADS = 4
KV_HEADS = 2
HEAD_DIM = 32
FEED_FORWARD = 256
CONTEXT = 16_384
ROPE_THETA = 10_000.0
RMS_EPSILON = 1e-6
# Features that only attention writes to. Digits are chosen by these alone: else the text just before a number, the
# same in every answer, would choose it, and all answers would hold the same numbers.
READ_BY_DIGITS = slice(1, 17)

PAD, START, END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIALS = (PAD, START, END)
# Qwen2's split, by which llama.cpp knows the pre-tokenizer "qwen2".
SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CHAT_TEMPLATE = (
    "{%- for message in messages %}"
    "{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}"
    "{%- endfor %}"
    "{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}"
)

Weights = dict[str, NDArray[np.float16]]


@dataclass(frozen=True, slots=True)
class Spread:
    """Standard deviations and offsets of the random weights, chosen so that greedy text wanders.

    One feature of the residual stream is the same for every token and no layer writes to it; the output rows' weight
    on it is a constant per token. That favours whole words and closing quotes, and rules out broken UTF-8 and
    bare white space.
    """

    embedding: float = 5.0
    projection: float = 0.09
    write: float = 0.25  # the two projections that write to the residual stream
    sharpness: float = 4.0  # of attention: the weight of query and key norms, multiplied
    output: float = 0.2
    constant: float = 4.0


def train_tokenizer(seed: int) -> Tokenizer:
    """A byte-level BPE of VOCABULARY tokens, the three special ones last. No normalizer: bytes in, bytes out."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(SPLIT), "isolated")
    byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - len(SPECIALS),
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator(make_corpus(seed), trainer)
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIALS])
    if tokenizer.get_vocab_size() != VOCABULARY:
        raise RuntimeError(f"the corpus gave {tokenizer.get_vocab_size()} tokens, not {VOCABULARY}: add text")
    return tokenizer


def token_leanings(tokenizer: Tokenizer) -> NDArray[np.float32]:
    """For each token, how much the model leans to it whatever the text, in standard deviations of its logits."""
    leanings = np.zeros(VOCABULARY, np.float32)
    for token_id in range(VOCABULARY):
        text = tokenizer.decode([token_id], skip_special_tokens=False)
        if text in (PAD, START) or "\ufffd" in text or not text.strip() or not text.isprintable():
            leanings[token_id] = -8.0
        elif text.startswith(" ") and text[1:] in WORDS:
            leanings[token_id] = 2.5
        elif text.strip() == '"':
            leanings[token_id] = 3.5
    return leanings


def make_weights(seed: int, leanings: NDArray[np.float32], digits: list[int], spread: Spread | None = None) -> Weights:
    """Random weights under Hugging Face's names for a Qwen3 model, all float16. `digits`: token ids of 0 to 9."""
    spread = spread or Spread()
    random = np.random.Generator(np.random.PCG64(seed))

    def normal(rows: int, columns: int, deviation: float) -> NDArray[np.float32]:
        return random.standard_normal((rows, columns), np.float32) * np.float32(deviation)

    weights: dict[str, NDArray[np.float32]] = {}
    embedding = normal(VOCABULARY, HIDDEN, spread.embedding)
    embedding[:, 0] = spread.constant
    embedding[:, READ_BY_DIGITS] = 0.0
    weights["model.embed_tokens.weight"] = embedding
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        for name, rows in (("q", HEADS), ("k", KV_HEADS), ("v", KV_HEADS)):
            weights[f"{prefix}self_attn.{name}_proj.weight"] = normal(rows * HEAD_DIM, HIDDEN, spread.projection)
        for name in ("gate", "up"):
            weights[f"{prefix}mlp.{name}_proj.weight"] = normal(FEED_FORWARD, HIDDEN, spread.projection)
        for name, columns in (("self_attn.o_proj", HEADS * HEAD_DIM), ("mlp.down_proj", FEED_FORWARD)):
            weights[f"{prefix}{name}.weight"] = normal(HIDDEN, columns, spread.write)
            weights[f"{prefix}{name}.weight"][0] = 0.0
        weights[f"{prefix}mlp.down_proj.weight"][READ_BY_DIGITS] = 0.0
        for name, size in (("input_layernorm", HIDDEN), ("post_attention_layernorm", HIDDEN)):
            weights[f"{prefix}{name}.weight"] = np.ones(size, np.float32)
        weights[f"{prefix}self_attn.q_norm.weight"] = np.full(HEAD_DIM, spread.sharpness, np.float32)
        weights[f"{prefix}self_attn.k_norm.weight"] = np.ones(HEAD_DIM, np.float32)
    weights["model.norm.weight"] = np.ones(HIDDEN, np.float32)
    output = normal(VOCABULARY, HIDDEN, spread.output)
    output[digits, READ_BY_DIGITS.stop :] = 0.0
    # A logit's standard deviation is output * sqrt(HIDDEN); the constant feature is about 1 after the last norm.
    output[:, 0] = leanings * np.float32(spread.output * HIDDEN**0.5)
    weights["lm_head.weight"] = output
    return {name: value.astype(np.float16) for name, value in weights.items()}


def write_folder(folder: Path, tokenizer: Tokenizer, weights: Weights) -> None:
    """The Hugging Face form: config.json, model.safetensors and the tokenizer's files."""
    folder.mkdir(parents=True, exist_ok=True)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "model.safetensors").chmod(0o644)  # safetensors makes files that only their owner can read
    tokenizer.save(str(folder / "tokenizer.json"))
    ids = {token: tokenizer.token_to_id(token) for token in SPECIALS}
    _write_json(folder / "config.json", _config(ids))
    _write_json(folder / "generation_config.json", {"eos_token_id": ids[END], "pad_token_id": ids[PAD]})
    _write_json(
        folder / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "model_max_length": CONTEXT,
            "eos_token": END,
            "pad_token": PAD,
            "clean_up_tokenization_spaces": False,
            "chat_template": CHAT_TEMPLATE,
        },
    )


def _config(ids: dict[str, int]) -> dict[str, Any]:
    return {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "dtype": "float16",
        "vocab_size": VOCABULARY,
        "num_hidden_layers": LAYERS,
        "hidden_size": HIDDEN,
        "intermediate_size": FEED_FORWARD,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "hidden_act": "silu",
        "max_position_embeddings": CONTEXT,
        "rope_theta": ROPE_THETA,
        "rms_norm_eps": RMS_EPSILON,
        "attention_bias": False,
        "tie_word_embeddings": False,
        "use_sliding_window": False,
        "eos_token_id": ids[END],
        "pad_token_id": ids[PAD],
    }


def _write_json(path: Path, value: object) -> None:
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def write_gguf(path: Path, tokenizer: Tokenizer, weights: Weights) -> None:
    """The llama.cpp form: the same weights and the same tokenizer in one file."""
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_name(NAME)
    writer.add_description("Random weights, to try Kvasir with")
    writer.add_file_type(gguf.LlamaFileType.ALL_F32)
    writer.add_vocab_size(VOCABULARY)
    writer.add_context_length(CONTEXT)
    writer.add_block_count(LAYERS)
    writer.add_embedding_length(HIDDEN)
    writer.add_feed_forward_length(FEED_FORWARD)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_key_length(HEAD_DIM)
    writer.add_value_length(HEAD_DIM)
    writer.add_rope_freq_base(ROPE_THETA)
    writer.add_layer_norm_rms_eps(RMS_EPSILON)
    _add_tokenizer(writer, tokenizer)
    for name, value in weights.items():
        # llama.cpp wants the norms in float32; float16 to float32 changes no value.
        writer.add_tensor(gguf_name(name), value.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _add_tokenizer(writer: gguf.GGUFWriter, tokenizer: Tokenizer) -> None:
    tokens = [tokenizer.id_to_token(token_id) for token_id in range(VOCABULARY)]
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


def make(out: Path, seed: int = SEED) -> tuple[Path, Path]:
    """Write both forms of the model into `out`; returns the folder and the GGUF file."""
    tokenizer = train_tokenizer(seed)
    digits = [tokenizer.token_to_id(digit) for digit in "0123456789"]
    weights = make_weights(seed, token_leanings(tokenizer), digits)
    folder, file = out / NAME, out / f"{NAME}.gguf"
    write_folder(folder, tokenizer, weights)
    write_gguf(file, tokenizer, weights)
    return folder, file


def main() -> None:
    parser = argparse.ArgumentParser(description="Make the demo model: a tiny Qwen3 with random weights.")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent, help="folder to write to")
    parser.add_argument("--seed", type=int, default=SEED, help="other seeds give other weights")
    arguments = parser.parse_args()
    for path in make(arguments.out, arguments.seed):
        files = [path] if path.is_file() else sorted(path.iterdir())
        print(f"{path}: {sum(file.stat().st_size for file in files):,} bytes")


if __name__ == "__main__":
    main()
