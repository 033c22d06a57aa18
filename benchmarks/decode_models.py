"""The two models that `benchmarks.decode` decodes with."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
from tokenizers import Tokenizer

from examples.model.formats import NAME, Weights, write_folder, write_gguf
from examples.model.shape import Shape
from examples.model.tokens import SPECIALS

TOKENIZER = Path(__file__).parents[1] / "examples" / "model" / NAME / "tokenizer.json"
# Layers, hidden size, heads, KV heads, size of a head, feed-forward size.
SMALL = (3, 128, 4, 2, 32, 256)
MEDIUM = (6, 384, 6, 2, 64, 1024)


@dataclass(frozen=True, slots=True)
class Model:
    """The same weights in both forms, and how many tokens an answer has, by the engines that decode it."""

    name: str
    gguf: Path
    folder: Path
    answer_tokens: dict[str, int]


@contextmanager
def models(seed: int, quick: bool) -> Iterator[list[Model]]:
    """One of about a million random weights and, unless in a hurry, one of 12 million; both are gone afterwards.

    The demo model won't do: it says the end of its answer when it has answered. MLX is slow on CPUs: its steps of the
    small model take 30 ms there already.
    """
    with TemporaryDirectory() as name:
        small = _made(Path(name), "1M", SMALL, seed, {"llamacpp": 256, "mlx": 32 if quick else 128, "vllm": 256})
        yield [small] if quick else [small, _made(Path(name), "12M", MEDIUM, seed, {"llamacpp": 256, "vllm": 256})]


def _made(folder: Path, name: str, sizes: tuple[int, ...], seed: int, answer_tokens: dict[str, int]) -> Model:
    tokenizer = Tokenizer.from_file(str(TOKENIZER))
    vocabulary = tokenizer.get_vocab_size()
    shape = Shape(vocabulary, *sizes, context=4096, rope_theta=10_000.0, rms_epsilon=1e-6, tied=False)
    weights = _random_weights(shape, _never_said(tokenizer), seed)
    made = Model(name, folder / f"{name}.gguf", folder / name, answer_tokens)
    write_folder(made.folder, shape, tokenizer, weights)
    write_gguf(made.gguf, shape, tokenizer, weights, "Random weights")
    return made


def _never_said(tokenizer: Tokenizer) -> list[int]:
    """Special tokens, so that all answers are of full length, and parts of characters, whose ids no stream tells."""
    texts = [tokenizer.decode([number], skip_special_tokens=False) for number in range(tokenizer.get_vocab_size())]
    return [number for number, text in enumerate(texts) if text in SPECIALS or "\ufffd" in text]


def _random_weights(shape: Shape, never: list[int], seed: int) -> Weights:
    """By Hugging Face's names; the tokens of `never` are never said."""
    random = np.random.default_rng(seed)

    def matrix(rows: int, columns: int) -> np.ndarray:
        return random.standard_normal((rows, columns), np.float32) / np.float32(columns**0.5)

    weights = {"model.embed_tokens.weight": random.standard_normal((shape.vocabulary, shape.hidden), np.float32)}
    queries, keys = shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim
    for layer in range(shape.layers):
        prefix = f"model.layers.{layer}."
        for name, rows in (("q_proj", queries), ("k_proj", keys), ("v_proj", keys)):
            weights[f"{prefix}self_attn.{name}.weight"] = matrix(rows, shape.hidden)
        for name in ("gate_proj", "up_proj"):
            weights[f"{prefix}mlp.{name}.weight"] = matrix(shape.feed_forward, shape.hidden)
        for name, columns in (("self_attn.o_proj", queries), ("mlp.down_proj", shape.feed_forward)):
            weights[f"{prefix}{name}.weight"] = matrix(shape.hidden, columns)
        norms = {"input_layernorm": shape.hidden, "post_attention_layernorm": shape.hidden}
        norms |= {"self_attn.q_norm": shape.head_dim, "self_attn.k_norm": shape.head_dim}
        for name, size in norms.items():
            weights[f"{prefix}{name}.weight"] = np.ones(size, np.float32)
    weights["model.norm.weight"] = np.ones(shape.hidden, np.float32)
    output = matrix(shape.vocabulary, shape.hidden)
    output[never] = 0  # loses against any positive score
    weights["lm_head.weight"] = output
    return {name: value.astype(np.float16) for name, value in weights.items()}
