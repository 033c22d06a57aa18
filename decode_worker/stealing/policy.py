"""Decides who decodes the next job: the rule of stealing, and the rule of the tail. All functions are pure.

Times are in seconds, and counts are of jobs. Nothing here reads a clock, a queue or the store, so a simulation can call
the same functions that a worker calls. `docs/explanation/stealing.md` derives the rules.

Both rules use one calculation, the *plan*: if `ready` equal jobs are given one by one to whichever slot of some workers
finishes the next one first, when does the last of them start, and when does it end? For equal jobs no other order ends
sooner. Jobs are not equal, but their means are all that is known before decoding.
"""

import heapq
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

# A steal must save more time than it costs, by at least MARGIN_S plus MARGIN_OF_COST times the cost. The margin is
# needed because both times are estimates.
MARGIN_S = 0.1
MARGIN_OF_COST = 0.5
# A worker leaves jobs only to workers that are at least this many times as fast. Otherwise two similar workers would
# each leave the same job to the other, and neither would take it.
FASTER = 1.2
# Assumed waiting time of a job whose model has no worker.
NOBODY_S = 3600.0

# The forecast plans the last jobs of a queue one by one, at most this many for each slot. It assumes that all earlier
# jobs are done at the combined rate of the workers.
_EXACT_JOBS_A_SLOT = 8

Reason = Literal["", "nothing waits", "short wait", "sooner at home"]


@dataclass(frozen=True, slots=True)
class Peer:
    """Another worker that serves a queue.

    Attributes:
        slots: the number of jobs that it decodes at once.
        busy: slots in use; more than `slots` counts as `slots`.
        service_s: mean time that a job of this queue takes in one of its slots, including the KV transfer; above 0.
    """

    slots: int
    busy: int
    service_s: float

    def is_faster(self, decode_s: float) -> bool:
        """Whether a worker that takes `decode_s` for such a job might leave some to this one."""
        return self.service_s * FASTER <= decode_s


@dataclass(frozen=True, slots=True)
class Queue:
    """A model's decode queue.

    Attributes:
        ready: jobs that wait, without those held by workers, as the broker counts them. A zero may be wrong.
        peers: the workers whose home model this is, without the asking worker.
    """

    model: str
    ready: int
    peers: tuple[Peer, ...]


@dataclass(frozen=True, slots=True)
class Offer:
    """A queue, and what one of its jobs would cost the asking worker.

    Attributes:
        decode_s: mean time that a job takes in one of the asking worker's slots, once its KV cache is there; above 0.
        fetch_s: time until a job's KV cache is there.
        load_s: time until the model is loaded; 0 if it is in memory.
    """

    queue: Queue
    decode_s: float
    fetch_s: float = 0.0
    load_s: float = 0.0

    @property
    def cost_s(self) -> float:
        """Seconds before the first token."""
        return self.fetch_s + self.load_s


@dataclass(frozen=True, slots=True)
class Verdict:
    """With no reason: take one job of `model`, or load the model first and then ask again. With a reason: take nothing.

    Attributes:
        model: "" if no job waits anywhere.
        wait_s: expected wait of the last job in its queue.
        cost_s: KV transfer and model load.
        end_here_s, end_there_s: from now until the job would end here, and until the queue would end without help.
        saving_s: how much sooner the queue ends. Savings of successive steals add up.
        reason: why a steal from this queue does not pay.
    """

    model: str = ""
    wait_s: float = 0.0
    cost_s: float = 0.0
    end_here_s: float = 0.0
    end_there_s: float = 0.0
    saving_s: float = 0.0
    reason: Reason = ""

    @property
    def summary(self) -> str:
        """A sentence with the figures."""
        return (
            f"{self.model}: it would wait {self.wait_s:.1f} s, stealing costs {self.cost_s:.1f} s; "
            f"done here in {self.end_here_s:.1f} s, there in {self.end_there_s:.1f} s"
        )


@dataclass(frozen=True, slots=True)
class DrainTimes:
    """When the last of some jobs starts, and when it ends, in seconds from now; infinite without workers."""

    start_s: float
    end_s: float


def plan(ready: int, peers: Iterable[Peer]) -> DrainTimes:
    """Return when the last of `ready` equal jobs starts and ends if each goes to the slot that ends it soonest.

    A busy slot frees as if its worker's running jobs had begun at evenly spread times: the j-th of k after `service_s *
    j / (k + 1)`.
    """
    slots = [slot for peer in peers for slot in _slots(peer)]
    if ready <= 0:
        return DrainTimes(0.0, 0.0)
    if not slots:
        return DrainTimes(math.inf, math.inf)
    exact = min(ready, _EXACT_JOBS_A_SLOT * len(slots))
    drained_s = (ready - exact) / sum(1 / service_s for _, service_s in slots)
    ends = [(free_s + service_s, service_s) for free_s, service_s in slots]
    heapq.heapify(ends)
    for _ in range(exact):
        end_s, service_s = ends[0]
        heapq.heapreplace(ends, (end_s + service_s, service_s))
    return DrainTimes(drained_s + end_s - service_s, drained_s + end_s)


def decide(offers: Sequence[Offer]) -> Verdict:
    """Return which other model's job a worker with a free slot and empty home queues takes, if any.

    Queues are tried in the order of their last job's wait, the longest first, and the first steal that pays is taken.
    It pays if the wait there exceeds transfer, load and a margin, and if the job ends here before the queue would end
    without help. If none pays, the verdict is that of the queue with the longest wait.
    """
    verdicts = [_judge(offer) for offer in offers if offer.queue.ready > 0]
    verdicts.sort(key=lambda verdict: verdict.wait_s, reverse=True)
    steals = [verdict for verdict in verdicts if not verdict.reason]
    return next(iter(steals or verdicts), Verdict(reason="nothing waits"))


def leave_to_faster(queue: Queue, decode_s: float, fetch_s: float = 0.0) -> float | None:
    """Return the seconds until faster workers end a queue whose next job is left to them; None: take the job.

    `queue.ready` counts that job. It is left if the faster workers will have ended everything that waits, including
    this job, before it would end here: taking it could then only make the queue end later.
    """
    faster = [peer for peer in queue.peers if peer.is_faster(decode_s)]
    end_there_s = plan(max(1, queue.ready), faster).end_s
    return end_there_s if end_there_s < decode_s + fetch_s else None


def _judge(offer: Offer) -> Verdict:
    queue = offer.queue
    drain = plan(queue.ready, queue.peers)
    here_s = offer.cost_s + offer.decode_s
    verdict = Verdict(queue.model, drain.start_s, offer.cost_s, here_s, drain.end_s)
    if drain.start_s <= offer.cost_s + MARGIN_S + MARGIN_OF_COST * offer.cost_s:
        return replace(verdict, reason="short wait")
    if drain.end_s <= here_s:
        return replace(verdict, reason="sooner at home")
    return replace(verdict, saving_s=_saving_s(queue, drain, here_s))


def _saving_s(queue: Queue, drain: DrainTimes, here_s: float) -> float:
    if math.isinf(drain.end_s):
        return NOBODY_S
    return drain.end_s - max(here_s, plan(queue.ready - 1, queue.peers).end_s)


def _slots(peer: Peer) -> list[tuple[float, float]]:
    """Return (seconds until it is free, service time) of each slot."""
    busy = min(peer.busy, peer.slots)
    free = [(0.0, peer.service_s)] * (peer.slots - busy)
    return free + [(peer.service_s * number / (busy + 1), peer.service_s) for number in range(1, busy + 1)]
