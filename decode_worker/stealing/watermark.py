"""Decides what a worker with both roles does next: which prompt to prefill, or which answer to begin.

Prefill runs ahead of decode by a watermark instead of the whole class, since jobs that are ready take up the store.
Ready jobs up to the watermark are for the workers that only decode: a worker that could prefill the next prompt itself
takes none of them. Workers and the simulation of `kvasir plan` use the same functions, which are pure.
`docs/explanation/stealing.md` has the rules.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from decode_worker.stealing.policy import FASTER, Peer, Queue, leave_to_faster

# One prefilled job should wait for every SLOTS_A_JOB_AHEAD slots, but at least MIN_AHEAD jobs in total.
SLOTS_A_JOB_AHEAD = 6
MIN_AHEAD = 2


@dataclass(frozen=True, slots=True)
class ModelWork:
    """A model that the worker serves in both roles, as the worker sees it. Times are in seconds, counts are of jobs.

    Attributes:
        queue: all jobs that wait, including those for prefill, and the other workers of this home model.
        ready: waiting jobs that are prefilled.
        prompts: waiting jobs that need prefill.
        own: this worker's slots.
        has_pure_decoders: whether any of the other workers only decodes.
        prefilling: prompts that any worker computes now, as far as this worker counts them.
        share: this worker's part of what all workers together decode of it in a second, 0 to 1.
        prefill_s: mean time of a prompt here.
        lead_elsewhere: the best other prefill worker's ratio of prefill speed to decode speed, divided by this
            worker's ratio. It is infinite if that worker decodes nothing, and 0 if there is none or it is not measured.
        look_s: time until the worker's next check; 0: it always sees the current state.
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
        """Whether another worker should prefill instead."""
        return self.lead_elsewhere >= FASTER

    @property
    def ahead(self) -> int:
        """The watermark: how many prefilled jobs should wait.

        Short jobs free many slots between two checks, and those slots must find jobs ready. If another worker is better
        at prefill, only the slots that are free now count. They count only if that pays: all that this worker decodes
        stops during a prefill, which must cost less than the job that it gains.
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
        """Whether the ready jobs are left to the workers that only decode, because this one should prefill prompts."""
        is_to_prefill = self.prompts > 0 and not self.is_better_elsewhere and self.lacks_ready_jobs
        return self.has_pure_decoders and is_to_prefill


def next_prompt(work: Sequence[ModelWork]) -> str | None:
    """Return the model to prefill a prompt of, or None to decode.

    The model with the fewest ready jobs comes first, then the one with the most prompts.
    """
    behind = [model for model in work if model.prompts and model.lacks_ready_jobs]
    return min(behind, key=lambda model: (model.ready, -model.prompts)).queue.model if behind else None


def next_answer(work: Sequence[ModelWork], decoding: Collection[str]) -> str | None:
    """Return the model to take a ready job of, or None to leave the slot free for now.

    `work`: the preferred model first. The worker decodes the model of which it does the largest share of all decoding.
    It turns to another model only when no job of that one is left and it decodes nothing else, because two models in
    one engine slow each other down.
    """
    for model in sorted(work, key=lambda model: -model.share * (FASTER if model is work[0] else 1.0)):
        if not model.ready + model.prompts:
            continue
        if not model.ready or model.holds_ready_jobs or not {model.queue.model}.issuperset(decoding):
            return None
        if leave_to_faster(model.queue, model.own.service_s) is None:
            return model.queue.model
    return None
