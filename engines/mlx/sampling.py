"""Chooses tokens on MLX's device: top_k, then top_p, then temperature, as llama.cpp does."""

from collections.abc import Callable

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from messages.jobs import Sampling

Sampler = Callable[[mx.array], mx.array]
_SMALLEST_MASS = 1e-9  # above 0, so that top_p = 0 still leaves the likeliest token


def greedy(scores: mx.array) -> mx.array:
    """The likeliest token of each row. All sequences share this one object, because a batch that shares its sampler is
    sampled in one call."""
    return mx.argmax(scores, axis=-1)


def sampler_for(sampling: Sampling) -> Sampler:
    """A sampler of (1, vocabulary) log-probabilities. It draws from its own random sequence, which starts at the
    seed."""
    if sampling.temperature == 0 or sampling.top_k == 1:
        return greedy
    key: mx.array | None = None  # created in the thread that uses it, because MLX arrays belong to one thread

    def draw(scores: mx.array) -> mx.array:
        nonlocal key
        key, now = mx.random.split(mx.random.key(sampling.seed) if key is None else key)
        scores = _nucleus(_top(scores.astype(mx.float32), sampling.top_k), sampling.top_p)
        return mx.random.categorical(scores / sampling.temperature, key=now)

    return draw


class Observer:
    """A greedy sampler that keeps its inputs: one row of log-probabilities for each token, float32."""

    def __init__(self) -> None:
        self.scores: list[NDArray[np.float32]] = []

    def __call__(self, scores: mx.array) -> mx.array:
        """The likeliest token; called in the model's thread."""
        self.scores.append(np.asarray(scores.astype(mx.float32))[0])
        return greedy(scores)


def _top(scores: mx.array, count: int) -> mx.array:
    """Rule out all except the `count` likeliest; 0: keep all."""
    if not 0 < count < scores.shape[-1]:
        return scores
    threshold = mx.topk(scores, count, axis=-1).min(axis=-1, keepdims=True)
    return mx.where(scores < threshold, -mx.inf, scores)


def _nucleus(scores: mx.array, mass: float) -> mx.array:
    """Keep the likeliest tokens that together have at least `mass`, and rule out the others."""
    if mass >= 1:
        return scores
    chances = mx.softmax(scores, axis=-1)
    descending = -mx.sort(-chances, axis=-1)
    preceding_mass = mx.cumsum(descending, axis=-1) - descending
    threshold = mx.where(preceding_mass < max(mass, _SMALLEST_MASS), descending, mx.inf).min(axis=-1, keepdims=True)
    return mx.where(chances < threshold, -mx.inf, scores)
