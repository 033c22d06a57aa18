"""What a worker with both roles does next: which prompt to prefill, or which answer to begin. Pure, as `policy` is.

Prefill runs ahead of decode by a watermark, and not by the class: jobs that are ready lie in the store. What is ready
up to the watermark is for the workers that only decode: a worker that could prefill the next one itself takes none.
Workers and the plan's simulation follow these same functions; `docs/explanation/stealing.md` has the rules.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from decode_worker.stealing.policy import FASTER, Peer, Queue, leave_to_faster

# For so many slots that decode a model one prefilled job waits; and never fewer than MIN_AHEAD.
SLOTS_A_JOB_AHEAD = 6
MIN_AHEAD = 2


@dataclass(frozen=True, slots=True)
class ModelWork:
    """A model that the worker serves in both roles, as it sees it. Times are seconds, counts are jobs.

    Attributes:
        queue: all of its jobs that wait, for prefill too, and the other workers at home there.
        ready: those of them that are prefilled.
        prompts: those that wait for prefill.
        own: this worker's slots.
        has_pure_decoders: whether any of the other workers only decodes.
        prefilling: prompts that are computed now, by anybody, as far as the worker counts them.
        share: this worker's part of what all of them together decode of it in a second, 0 to 1.
        prefill_s: mean time of a prompt here.
        lead_elsewhere: prefilled tokens in the time of a decoded one, at the best other worker that prefills it, as a
            multiple of this worker's; infinite if that one decodes nothing, 0 if there is none or it is not measured.
        look_s: until the worker looks again; 0: it sees everything at once.
    """

    queue: Queue
    ready: int
    prompts: int
    own: Peer
    has_pure_decoders: bool
    prefilling: int = 0
    share: float = 1.0
    prefill_s: float = 0.0
    lead_elsewhere: float = 0.0
    look_s: float = 0.0

    @property
    def is_better_elsewhere(self) -> bool:
        """Whether another worker is the one to prefill."""
        return self.lead_elsewhere >= FASTER

    @property
    def ahead(self) -> int:
        """The watermark: how many prefilled jobs are to wait.

        Between two looks short jobs free many slots: those must find theirs ready. Where another worker is the better
        one to prefill it is the slots that are free now, and none if that doesn't pay: all that this worker decodes
        stands still meanwhile, which must cost less than the job that it wins.
        """
        workers = (self.own, *self.queue.peers)
        if self.is_better_elsewhere:
            pays = min(self.own.busy, self.own.slots) * self.prefill_s < self.own.service_s
            return sum(max(0, worker.slots - worker.busy) for worker in workers) if pays else 0
        freed = self.look_s * sum(worker.slots / worker.service_s for worker in workers)
        return max(MIN_AHEAD, math.ceil(sum(worker.slots for worker in workers) / SLOTS_A_JOB_AHEAD + freed))

    @property
    def lacks_ready_jobs(self) -> bool:
        """Whether prefill is behind the watermark."""
        return self.ready + self.prefilling < self.ahead

    @property
    def holds_ready_jobs(self) -> bool:
        """Whether the ready jobs are for the workers that only decode, because this one is to prefill prompts."""
        is_to_prefill = self.prompts > 0 and not self.is_better_elsewhere and self.lacks_ready_jobs
        return self.has_pure_decoders and is_to_prefill


def next_prompt(work: Sequence[ModelWork]) -> str | None:
    """The model to prefill a prompt of, or None: decode. The one with the fewest ready jobs, then the most prompts."""
    behind = [model for model in work if model.prompts and model.lacks_ready_jobs]
    return min(behind, key=lambda model: (model.ready, -model.prompts)).queue.model if behind else None


def next_answer(work: Sequence[ModelWork], decoding: Collection[str]) -> str | None:
    """The model to take a ready job of, or None: leave the slot free for now. `work`: the preferred model first.

    The worker decodes that of which it does the largest share of all that is decoded, and turns to another only when
    nothing of it is left, and when it decodes nothing else: two models in one engine take turns, and slow each other.
    """
    for model in sorted(work, key=lambda model: -model.share * (FASTER if model is work[0] else 1.0)):
        if not model.ready + model.prompts:
            continue
        if not model.ready or model.holds_ready_jobs or not {model.queue.model}.issuperset(decoding):
            return None
        if leave_to_faster(model.queue, model.own.service_s) is None:
            return model.queue.model
    return None
