"""Compares which first token of the answer two runs of the same prompt expect.

It compares raw log-probabilities, before grammar and sampling. An answer under a schema begins with `{` whatever the KV
cache holds, but the likelihoods of all other tokens still depend on every key and value.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

TOP = 64  # how many of the likeliest tokens an engine reports
_NUM_LIKELIEST = 16  # how many of the likeliest tokens are compared; the order of less likely ones depends on rounding


def top_logprobs(scores: NDArray[np.floating[Any]]) -> dict[int, float]:
    """The `TOP` likeliest ids with their natural log-probabilities, likeliest first. `scores`: every token's logit."""
    scores = scores.astype(np.float64)
    highest = np.max(scores)
    total = highest + np.log(np.exp(scores - highest).sum())
    ids = np.argsort(-scores, kind="stable")[:TOP]
    return {int(id): float(scores[id] - total) for id in ids}


def logprob_gap(reference: Mapping[int, float], candidate: Mapping[int, float]) -> float:
    """Mean absolute difference in nats over the likeliest tokens of `reference`.

    A token that `candidate` does not list counts as being as likely as the least likely token that it lists.
    """
    likeliest = sorted(reference, key=lambda id: -reference[id])[:_NUM_LIKELIEST]
    lowest = min(candidate.values(), default=0.0)
    gaps = [
        abs(reference[id] - candidate[id]) if id in candidate else max(0.0, reference[id] - lowest) for id in likeliest
    ]
    return sum(gaps) / len(gaps) if gaps else 0.0
