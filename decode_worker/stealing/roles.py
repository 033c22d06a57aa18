"""What a worker with both roles does next: prefill, decode, or both. Pure, as `policy` is: figures in, a decision out.

Prefill runs ahead of the decoders by a watermark, so that none of them waits and the store stays small; what is left
of the machine decodes. `docs/stealing.md` has the rules.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from decode_worker.stealing.policy import FASTER, Peer


@dataclass(frozen=True, slots=True)
class Backlog:
    """One model's work, as a worker with both roles sees it. Times are seconds, counts are jobs.

    Attributes:
        prompts: that wait for prefill.
        prefilling: prompts that are computed now, by anybody.
        ready: prefilled jobs that wait for a slot.
        own: the asking worker's slots.
        peers: all other workers that decode this model.
        free_decoders: slots that are free now at those of them that can't prefill.
        prefill_s: mean time of a prompt here.
        advantage: how much better this worker prefills than it decodes: prefilled tokens in the time of a decoded
            one, with all its slots busy; 0: not measured.
        best_advantage: the same of the best other worker that prefills this model now; infinite if it does nothing
            else.
        look_s: until this is decided again.
    """

    prompts: int
    prefilling: int
    ready: int
    own: Peer
    peers: tuple[Peer, ...]
    free_decoders: int
    prefill_s: float
    advantage: float = 0.0
    best_advantage: float = 0.0
    look_s: float = 0.0

    @property
    def free_slots(self) -> int:
        """Slots in which a job could begin now, anybody's."""
        return sum(max(0, peer.slots - peer.busy) for peer in (self.own, *self.peers))

    def starts_in(self, seconds: float) -> int:
        """Jobs for which slots become free in that time."""
        rate = sum(peer.slots / peer.service_s for peer in (self.own, *self.peers))
        return math.ceil(rate * seconds)


@dataclass(frozen=True, slots=True)
class NextWork:
    """Which queues to take from until the next look."""

    prefill: bool
    decode: bool


BOTH = NextWork(prefill=True, decode=True)


def choose(backlog: Backlog) -> NextWork:
    """Prefill while slots would otherwise run empty; decode, unless prompts wait and workers that can't prefill will.

    Where another worker is the better one to prefill, only what is missing now is prefilled here, and only if it pays:
    all that this worker decodes stands still meanwhile, which must cost less than the job that it wins.
    """
    ahead = backlog.ready + backlog.prefilling
    if backlog.advantage and backlog.best_advantage >= FASTER * backlog.advantage:
        pays = min(backlog.own.busy, backlog.own.slots) * backlog.prefill_s < backlog.own.service_s
        prefills = ahead < backlog.free_slots and pays
    else:
        prefills = ahead < backlog.free_slots + backlog.starts_in(backlog.prefill_s + backlog.look_s)
    leaves_all = prefills and backlog.prompts > 0 and 0 < backlog.ready <= backlog.free_decoders
    return NextWork(prefills, not leaves_all)
