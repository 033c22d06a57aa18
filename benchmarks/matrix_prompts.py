"""Prompts for the tiny models: random ids, chosen so that llama.cpp is never undecided about the answer.

The demo model's are of held-out assignments, chosen likewise.

llama.cpp's flash attention rounds keys and values to float16, whatever the cache holds, and rounds otherwise for a
token that is evaluated alone than for one in a batch. On these models, where logits have a standard deviation of 4,
its own cold and warm runs differ by 0.002 in a logit as a rule, and its cold run differs from PyTorch's by 0.02 (the
worst seen is 0.07; the mean KL divergence is 3e-5). MLX and PyTorch differ by a thousandth of that. So a prompt is
taken if in llama.cpp's own cold run the best two candidates for each of the answer's tokens lie at least MARGIN apart,
five times those 0.02. Then rounding decides nothing, and all 64 tokens have to be equal.
"""

import random
from contextlib import closing
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from benchmarks import matrix_models
from engines.llamacpp.http import LlamaServer
from engines.llamacpp.start import start
from engines.registry import EngineOptions
from examples.model.assignments import make_class
from examples.model.tokens import framed
from examples.model.worlds import HELD_OUT

LENGTHS = {"three windows": 3 * matrix_models.WINDOW + 2, "long": 333, "foreign": 333}
BOUNDARY = 96  # where the longer prompt of a model with recurrent layers is resumed: a whole number of blocks
ANSWERED = ("three windows", "long")
ANSWER_TOKENS = 64
FENCE = "0123456789ab"
MARGIN = 0.1
TRIES = 100

Numbers = dict[str, int]  # which of a run's random prompts is taken for each of LENGTHS


def prompt(model: str, name: str, seed: int, number: int) -> tuple[int, ...]:
    """Random ids of text tokens; all children of a run draw the same. The demo model's are of its family."""
    if model == matrix_models.DEMO:
        return _class_prompt(f"{seed} {name} {number}")
    source = np.random.default_rng((seed, list(LENGTHS).index(name), number))
    return tuple(source.integers(0, matrix_models.num_plain_tokens(), LENGTHS[name]).tolist())


def _class_prompt(drawn_by: str) -> tuple[int, ...]:
    made = make_class(HELD_OUT, random.Random(drawn_by).getrandbits(48), size=1, criteria=(5, 6))
    before, own, _ = framed(*made.prompt("code", made.submissions[0], FENCE), "")
    ids: list[int] = _tokenizer().encode(before + own, add_special_tokens=False).ids
    return tuple(ids)


@cache
def _tokenizer() -> Tokenizer:
    return Tokenizer.from_file(str(matrix_models.DEMO_TOKENIZER))


def choose(model: str, weights: Path, seed: int) -> tuple[Numbers, float]:
    """The first prompts of sufficient margin, or else those of the widest; and the least margin among them."""
    with closing(start(EngineOptions(str(weights), matrix_models.context_of(model), slots=1, threads=1))) as backing:
        found = {name: _first_clear(backing.server, model, name, seed) for name in ANSWERED}
    numbers = {name: number for name, (number, _) in found.items()}
    return numbers | dict.fromkeys(LENGTHS.keys() - numbers, 0), min(margin for _, margin in found.values())


def _first_clear(server: LlamaServer, model: str, name: str, seed: int) -> tuple[int, float]:
    best = (0, 0.0)
    for number in range(TRIES):
        margin = _margin(server, prompt(model, name, seed, number))
        if margin > best[1]:
            best = (number, margin)
        if margin >= MARGIN:
            break
    return best


def _margin(server: LlamaServer, tokens: tuple[int, ...]) -> float:
    """The least distance of the best two logits in a cold greedy answer; 0 if it ends early."""
    body = {"prompt": list(tokens), "n_predict": ANSWER_TOKENS, "temperature": 0, "n_probs": 2, "cache_prompt": False}
    steps: list[dict[str, Any]] = server.post("/completion", body, None)["completion_probabilities"]
    if len(steps) < ANSWER_TOKENS:
        return 0.0
    pairs = [[each["logprob"] for each in step["top_logprobs"]] for step in steps]
    return min(float(best - second) for best, second in pairs)
