"""Chooses tokens the way llama.cpp does: the top_k likeliest, of those top_p, then the temperature, then a draw."""

from typing import Any

import numpy as np
from numpy.typing import NDArray

from messages.jobs import Sampling

Scores = NDArray[np.floating[Any]]


class Sampler:
    """One answer's random choices. The same seed gives the same choices."""

    def __init__(self, sampling: Sampling) -> None:
        self._sampling = sampling
        self._random = np.random.default_rng(sampling.seed)

    def choose(self, scores: Scores) -> int:
        """A token id, given every token's logit; -inf rules one out."""
        if self._sampling.temperature == 0:
            return int(np.argmax(scores))
        ids = self._candidates(scores)
        chances = np.cumsum(_softmax(scores[ids] / self._sampling.temperature))
        place = np.searchsorted(chances, self._random.random() * chances[-1], side="right")
        return int(ids[min(place, len(ids) - 1)])

    def _candidates(self, scores: Scores) -> NDArray[np.intp]:
        """Ids that top_k and top_p leave, likeliest first; top_p counts before the temperature is applied."""
        order = np.argsort(-scores, kind="stable")
        order = order[: self._sampling.top_k or len(order)]
        order = order[scores[order] > -np.inf]
        if self._sampling.top_p < 1:
            # Keep the token that brings the cumulative probability up to top_p.
            preceding_mass = np.cumsum(_softmax(scores[order])) - _softmax(scores[order])
            order = order[: max(1, int(np.count_nonzero(preceding_mass < self._sampling.top_p)))]
        return order


def _softmax(scores: Scores) -> NDArray[np.float64]:
    exponentials = np.exp(np.asarray(scores, np.float64) - np.max(scores))
    return np.asarray(exponentials / exponentials.sum())
