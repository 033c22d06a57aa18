"""Draws tokens as Kvasir's other engines do: top_k, then top_p, then the temperature, from a sequence of the job's own.

vLLM applies the temperature first, so the same numbers would mean something else there; and its CPU build (0.32) dies
of a job that has a seed and whose prompt is computed in several steps. So vLLM is asked for the likeliest token, and
here only the one that was drawn is left. Which one depends on seed and position alone, not on who else is decoded.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from vllm.v1.sample.logits_processor import AdapterLogitsProcessor

from .events import NAME

Draw = Callable[[list[int], torch.Tensor], torch.Tensor]


class KvasirSampler(AdapterLogitsProcessor):  # type: ignore[misc]
    """See the module. Runs after a schema's mask."""

    def is_argmax_invariant(self) -> bool:
        """It decides which token is the likeliest."""
        return False

    def new_req_logits_processor(self, params: Any) -> Draw | None:
        """None for a job that takes the likeliest."""
        settings = _sampling_of(params)
        return _draw(**settings) if settings else None

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        """Refuse what can't be drawn from before it reaches the engine, which an error would end. Raises ValueError."""
        settings = _sampling_of(sampling_params)
        if settings is None:
            return
        try:
            types = {"temperature": float, "top_p": float, "top_k": int, "seed": int}
            numbers = {name: kind(settings[name]) for name, kind in types.items()}
            fits = len(settings) == len(types) and numbers["temperature"] > 0 and numbers["seed"] >= 0
        except (KeyError, TypeError, ValueError, OverflowError):
            fits = False
        if not fits:
            raise ValueError("Kvasir's sampling must have temperature (above 0), top_p, top_k and seed (0 or more)")


def _sampling_of(params: Any) -> Any:
    """The sampling of a request; None if vLLM samples it."""
    transfer = (params.extra_args or {}).get("kv_transfer_params")
    transfer_params = transfer.get(NAME) if isinstance(transfer, dict) else None
    return transfer_params.get("sampling") if isinstance(transfer_params, dict) else None


def _draw(temperature: float, top_p: float, top_k: int, seed: int) -> Draw:
    def draw(previous_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
        ids, scores = _candidates(logits.float(), top_k, top_p)
        noise = np.random.default_rng((seed, len(previous_ids))).gumbel(size=len(ids))
        token = ids[int(np.argmax(scores / temperature + noise))]
        result = torch.full_like(logits, -torch.inf)
        result[token] = 0
        return result

    return draw


def _candidates(scores: torch.Tensor, top_k: int, top_p: float) -> tuple[NDArray[Any], NDArray[Any]]:
    """Ids that may be drawn, likeliest first, and their scores."""
    count = top_k if 0 < top_k < len(scores) else len(scores)
    top_scores, ids = torch.topk(scores, count)
    preceding_mass = top_scores.softmax(-1).cumsum(-1).roll(1)
    preceding_mass[0] = 0
    is_allowed = torch.isfinite(top_scores) & (preceding_mass < max(top_p, torch.finfo(torch.float32).tiny))
    if top_p >= 1:
        is_allowed = torch.isfinite(top_scores)
    return ids[is_allowed].cpu().numpy(), top_scores[is_allowed].double().cpu().numpy()
