"""What a worker with both roles does next: which prompt to prefill, or which answer to begin. Pure, as `policy` is.

Prefill runs ahead of decode by a watermark, and not by the class: jobs that are ready lie in the store. What is ready
up to the watermark is for the workers that only decode: a worker that could prefill the next one itself takes none.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from decode_worker.stealing.policy import FASTER, Queue, leave_to_faster

# For so many slots that decode a model one prefilled job waits; and never fewer than MIN_AHEAD.
SLOTS_A_JOB_AHEAD = 6
MIN_AHEAD = 2


@dataclass(frozen=True, slots=True)
class ModelWork:
    """A model that the worker serves in both roles.

    Attributes:
        queue: all of its jobs that wait, for prefill too, and the other workers at home there.
        ready: those of them that are prefilled.
        prompts: those that wait for prefill.
        slots: of all workers that decode it, this one's included.
        decode_s: mean time that one of its jobs takes in one of this worker's slots; above 0.
        share: this worker's part of what all of them together decode of it in a second, 0 to 1.
    """

    queue: Queue
    ready: int
    prompts: int
    slots: int
    decode_s: float
    share: float

    @property
    def ahead(self) -> int:
        """The watermark: how many prefilled jobs are to wait."""
        return max(MIN_AHEAD, math.ceil(self.slots / SLOTS_A_JOB_AHEAD))

    @property
    def lacks_ready_jobs(self) -> bool:
        """Whether prefill is behind the watermark and has something to do about it."""
        return self.prompts > 0 and self.ready < self.ahead


def next_prompt(work: Sequence[ModelWork]) -> str | None:
    """The model to prefill a prompt of, or None: decode. The one with the fewest ready jobs, then the most prompts."""
    behind = [model for model in work if model.lacks_ready_jobs]
    return min(behind, key=lambda model: (model.ready, -model.prompts)).queue.model if behind else None


def next_answer(work: Sequence[ModelWork], decoding: Collection[str]) -> str | None:
    """The model to take a ready job of, or None: leave the slot free for now. `work`: the preferred model first.

    The worker decodes that of which it does the largest share of all that is decoded, and turns to another only when
    nothing of it is left, and when it decodes nothing else: two models in one engine take turns, and slow each other.
    """
    for model in sorted(work, key=lambda model: -model.share * (FASTER if model is work[0] else 1.0)):
        if not model.ready + model.prompts:
            continue
        if not model.ready or model.lacks_ready_jobs or not {model.queue.model}.issuperset(decoding):
            return None
        if leave_to_faster(model.queue, model.decode_s) is None:
            return model.queue.model
    return None
