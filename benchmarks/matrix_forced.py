"""What an engine finds likeliest at each position of a text that it is made to say: teacher forcing.

Two runs that are compared by their texts part for good at the first token where they differ. Made to say the same text
they can be compared at all of its positions; and what the receiver's own run says of that first token tells whether
rounding alone explains it: how far its choice lay ahead of the other run's (`lead`).

No protocol of `engines.base` gives logits, so this reaches into the engines. llama.cpp evaluates the forced tokens one
by one, as it decodes; vLLM is asked again at each. MLX and PyTorch take them at once: in float32 that moves a logit by
a hundred-thousandth.
"""

from collections.abc import Callable, Collection, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engines.registry import Engine
from messages.kv import KVCache

CANDIDATES = 20  # of each position

Likeliest = list[tuple[int, float]]  # id and logarithm of its probability, the likeliest first
# Prompt, the cache of all of it but the last token (None: computed here), what is then said. One more position than is
# said: the first is the prompt's end.
Forced = Callable[[Sequence[int], KVCache | None, Sequence[int]], list[Likeliest]]


def forced(engine: Engine, weights: str) -> Forced:
    """For an engine of the matrix that has loaded `weights`; MLX loads them once more."""
    if engine.info.engine == "llamacpp":
        return _llamacpp(engine)
    if engine.info.engine == "vllm":
        return _vllm(engine)
    return _transformers(engine) if engine.info.engine == "transformers" else _mlx(engine, weights)


def choices(steps: Sequence[Likeliest]) -> tuple[int, ...]:
    """The likeliest id at each position."""
    return tuple(step[0][0] for step in steps)


def agreement(one: Sequence[Likeliest], other: Sequence[Likeliest]) -> float:
    """The share of positions at which two runs find the same token likeliest."""
    same = [a == b for a, b in zip(choices(one), choices(other), strict=True)]
    return sum(same) / len(same)


def shifts(one: Sequence[Likeliest], other: Sequence[Likeliest]) -> list[float]:
    """By how much the other run moves the lead of this one's likeliest token over its second, at each position.

    An answer that parts from a greedy one did so where such a lead was no larger than its shift.
    """
    found = []
    for step, moved in zip(one, other, strict=True):
        first, second = ({number} for number, _ in step[:2])
        found.append(abs(lead(step, first, second) - lead(moved, first, second)))
    return found


def lead(step: Likeliest, one: Collection[int], other: Collection[int]) -> float:
    """How far the best logit among `one` lies ahead of the best among `other`, at one position.

    Whoever is none of the candidates counts as the last of them: the lead is at least that.
    """
    last = step[-1][1]
    first, second = (max((each for number, each in step if number in ids), default=last) for ids in (one, other))
    return first - second


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """The first position at which two answers differ; None: they are equal. One that ends earlier differs there."""
    shorter = min(len(one), len(other))
    different = [index for index in range(shorter) if one[index] != other[index]]
    return different[0] if different else None if len(one) == len(other) else shorter


def _vllm(engine: Engine) -> Forced:
    def run(tokens: Sequence[int], cache: KVCache | None, said: Sequence[int]) -> list[Likeliest]:
        steps = ([*tokens, *said[:count]] for count in range(len(said) + 1))
        return [list(engine.top_logprobs(step, cache).items())[:CANDIDATES] for step in steps]

    return run


def _llamacpp(engine: Any) -> Forced:
    def run(tokens: Sequence[int], cache: KVCache | None, said: Sequence[int]) -> list[Likeliest]:
        state = engine._slot_file(tokens[:-1], cache, engine._require_kv_transfer()) if cache else None
        with engine._decode_slots.acquire(None) as slot:
            engine._prepare(slot, state, None)
            return [_next(engine, slot, [*tokens, *said[:count]]) for count in range(len(said) + 1)]

    return run


def _next(engine: Any, slot: int, tokens: list[int]) -> Likeliest:
    body = {"prompt": tokens, "id_slot": slot, "cache_prompt": True, "n_predict": 1, "ignore_eos": False}
    body |= {"temperature": 0, "n_probs": CANDIDATES, "samplers": ["top_k"], "top_k": 1}
    (step,) = engine._server.post("/completion", body)["completion_probabilities"]
    return [(int(each["id"]), float(each["logprob"])) for each in step["top_logprobs"]]


def _transformers(engine: Any) -> Forced:
    import torch

    def run(tokens: Sequence[int], cache: KVCache | None, said: Sequence[int]) -> list[Likeliest]:
        model = engine._model
        sequence = engine._begin(model, cache)
        for chunk in engine._split_chunks(tokens[sequence.length : -1]):
            model.compute(sequence, chunk, _go_on)
        with model._feeding(sequence, [tokens[-1], *said], _go_on) as arguments, torch.inference_mode():
            logits = model._model(**arguments).logits[0].float().cpu().numpy()
        return _likeliest(logits)

    return run


def _mlx(engine: Engine, weights: str) -> Forced:
    """With a model of its own: the engine's belongs to the engine's thread."""
    import mlx.core as mx
    from mlx_lm.models.cache import make_prompt_cache

    from engines.huggingface.weights import open_folder
    from engines.mlx import kv as mlx_kv
    from engines.mlx.loop import CHUNK_TOKENS
    from engines.mlx.model import load

    loaded = load(open_folder(weights), engine.info.context)

    def run(tokens: Sequence[int], cache: KVCache | None, said: Sequence[int]) -> list[Likeliest]:
        caches = make_prompt_cache(loaded.model)
        done = 0
        if cache is not None and loaded.layout is not None:
            mlx_kv.fill(caches, loaded.layout, cache)
            done = cache.num_tokens
        for start in range(done, len(tokens) - 1, CHUNK_TOKENS):
            loaded.model(mx.array([tokens[start : min(start + CHUNK_TOKENS, len(tokens) - 1)]]), cache=caches)
            mx.eval(mlx_kv.arrays(caches))
        logits = loaded.model(mx.array([[tokens[-1], *said]]), cache=caches)[0]
        return _likeliest(np.array(logits.astype(mx.float32)))

    return run


def _likeliest(logits: NDArray[np.float32]) -> list[Likeliest]:
    """Of (positions, vocabulary)."""
    best = np.argsort(-logits, axis=-1, kind="stable")[:, :CANDIDATES]
    norm = np.logaddexp.reduce(logits.astype(np.float64), axis=-1)
    return [
        [(int(number), float(row[number] - whole)) for number in ids]
        for row, whole, ids in zip(logits, norm, best, strict=True)
    ]


def _go_on() -> None:
    pass
