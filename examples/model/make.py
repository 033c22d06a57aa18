"""Make the demo model: `python -m examples.model.make [--out DIR] [--seed N]`.

A Qwen3 of about 1.1 million random weights with a tokenizer of its own, written twice: as a Hugging Face folder and
as a GGUF file. Weights are rounded to float16 once, so both files hold exactly the same numbers. The same seed gives
the same bytes. Needs NumPy, tokenizers, safetensors and gguf; no PyTorch.
"""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray
from tokenizers import Tokenizer

from examples.model.corpus import WORDS, make_corpus
from examples.model.formats import NAME, Weights, write_folder, write_gguf
from examples.model.shape import Shape
from examples.model.tokens import PAD, START, learn_bpe

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

SHAPE = Shape(
    VOCABULARY, LAYERS, HIDDEN, HEADS, KV_HEADS, HEAD_DIM, FEED_FORWARD, CONTEXT, ROPE_THETA, RMS_EPSILON, tied=False
)


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
    return learn_bpe(make_corpus(seed), VOCABULARY)


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


def make(out: Path, seed: int = SEED) -> tuple[Path, Path]:
    """Write both forms of the model into `out`; returns the folder and the GGUF file."""
    tokenizer = train_tokenizer(seed)
    digits = [tokenizer.token_to_id(digit) for digit in "0123456789"]
    weights = make_weights(seed, token_leanings(tokenizer), digits)
    folder, file = out / NAME, out / f"{NAME}.gguf"
    write_folder(folder, SHAPE, tokenizer, weights)
    write_gguf(file, SHAPE, tokenizer, weights, "Random weights, to try Kvasir with")
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
