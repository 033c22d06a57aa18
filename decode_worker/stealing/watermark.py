"""What a worker with both roles does next: which prompt to prefill, or which answer to start. Pure functions, as in
`policy`.

Prefill runs ahead of decode only up to a watermark, and not by the whole class, because prefilled jobs take space in
the store. Ready jobs up to the watermark are for the workers that only decode. A worker that could prefill the next
prompt itself takes none of them. Workers and the plan's simulation use these same functions;
`docs/explanation/stealing.md` explains the rules.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from decode_worker.stealing.policy import FASTER, Peer, Queue, leave_to_faster

# One prefilled job waits for this many slots that decode a model, and never fewer than MIN_AHEAD.
SLOTS_A_JOB_AHEAD = 6
MIN_AHEAD = 2


@dataclass(frozen=True, slots=True)
class ModelWork:
    """A model that the worker serves in both roles, from this worker's view. Times are in seconds, and counts are jobs.

    Attributes:
        queue: all waiting jobs of the model, including those that wait for prefill, and the model's other workers.
        ready: the waiting jobs that are prefilled.
        prompts: the jobs that wait for prefill.
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
        """Whether another worker is better suited to prefill this model."""
        return self.lead_elsewhere >= FASTER

    @property
    def ahead(self) -> int:
        """The watermark: how many prefilled jobs should wait.

        Short jobs free many slots between two looks, and each slot must then find a job ready. If another worker is
        better suited to prefill, the watermark is only the number of slots that are free now. It is 0 if even that does
        not pay: while this worker prefills, everything that it decodes stands still, which must cost less than the job
        that it gains.
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
        """Whether the ready jobs are reserved for the workers that only decode, because this worker should prefill
        prompts."""
        is_to_prefill = self.prompts > 0 and not self.is_better_elsewhere and self.lacks_ready_jobs
        return self.has_pure_decoders and is_to_prefill


def next_prompt(work: Sequence[ModelWork]) -> str | None:
    """The model whose prompt to prefill next: the one with the fewest ready jobs, and among equals the one with the
    most prompts. None: decode instead."""
    behind = [model for model in work if model.prompts and model.lacks_ready_jobs]
    return min(behind, key=lambda model: (model.ready, -model.prompts)).queue.model if behind else None


def next_answer(work: Sequence[ModelWork], decoding: Collection[str]) -> str | None:
    """The model whose ready job to take, or None to leave the slot free for now. `work` has the preferred model first.

    The worker decodes the model of whose decoding it does the largest share. It turns to another model only when no job
    of that model is left and it decodes nothing else, because two models in one engine slow each other down.
    """
    for model in sorted(work, key=lambda model: -model.share * (FASTER if model is work[0] else 1.0)):
        if not model.ready + model.prompts:
            continue
        if not model.ready or model.holds_ready_jobs or not {model.queue.model}.issuperset(decoding):
            return None
        if leave_to_faster(model.queue, model.own.service_s) is None:
            return model.queue.model
    return None
