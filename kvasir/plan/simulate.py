"""The pipeline as a discrete-event simulation: two stages, the policies of the real one, and no waiting for nothing.

A prefill worker takes its model's jobs in order, computes the class-wide part once and then each job's suffix. A decode
slot that is free takes the job that the policy names; the policy sees what a decode worker sees: how many jobs wait,
how long those took that are done, and who else is there. A slot fetches the KV cache while the job before it is still
running, so a transfer costs time only where the job had just arrived.

A worker that dies loses what it was doing; those jobs go to the front of their queue at once.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from kvasir.plan.fleet import Decoder, Fleet, PlannedJob, Prefiller


@dataclass(frozen=True, slots=True)
class Timing:
    """One job's way: when a slot took it, and when it was answered."""

    job: PlannedJob
    started_s: float
    ended_s: float
    machine: str
    stolen: bool


@dataclass(frozen=True, slots=True)
class Prefill:
    """What a prefill worker did for a job, from when to when."""

    job: PlannedJob
    machine: str
    started_s: float
    ended_s: float


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """What was simulated."""

    makespan_s: float
    timings: tuple[Timing, ...]  # in the order of answers
    busy_s: Mapping[tuple[str, str], float]  # (stage, machine): seconds at work; of decode the mean of its slots
    prefills: tuple[Prefill, ...] = ()  # in the order in which they began

    @property
    def steals(self) -> int:
        """Jobs answered by another model's worker."""
        return sum(timing.stolen for timing in self.timings)


class DecoderState:
    """A decode worker in the simulation: who it is, and what it does."""

    def __init__(self, worker: Decoder) -> None:
        self.worker = worker
        self.running: list[Running] = []
        self.resident = {worker.model}
        self.here = worker.joins_s <= 0
        self.busy_s = 0.0

    @property
    def free(self) -> int:
        """Slots that do nothing."""
        return self.worker.slots - len(self.running) if self.here else 0


@dataclass(eq=False)
class Running:
    """A job in a slot."""

    job: PlannedJob
    prefilled_s: float
    started_s: float
    ends_s: float
    lost: bool = False


class Policy:
    """What decides which queue a free slot takes from. This one serves its home model and nothing else."""

    def choose(self, state: SimulationState, decoder: DecoderState) -> str | None:
        """The model to take a waiting job of, or None to stay idle for now."""
        return decoder.worker.model if state.waiting(decoder.worker.model) else None

    def answered(self, state: SimulationState, decoder: DecoderState, done: Running) -> None:
        """Learn from a job that has ended."""


class SimulationState:
    """What can be seen at a moment, and the machinery that moves it."""

    def __init__(self, fleet: Fleet, policy: Policy) -> None:
        self.now = 0.0
        self.fleet = fleet
        self.decoders = [DecoderState(worker) for worker in fleet.decoders]
        self._policy = policy
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()
        self._queued: dict[str, deque[PlannedJob]] = defaultdict(deque)  # for prefill
        self._ready: dict[str, deque[tuple[PlannedJob, float]]] = defaultdict(deque)  # for decode
        self._idle = list(fleet.prefillers)
        self._shared_at: dict[tuple[str, str], float] = {}
        self._busy: dict[tuple[str, str], float] = defaultdict(float)
        self._timings: list[Timing] = []
        self._prefills: list[Prefill] = []

    def waiting(self, model: str) -> int:
        """Prefilled jobs of a model that no slot has taken."""
        return len(self._ready[model])

    def run(self, jobs: Sequence[PlannedJob]) -> SimulatedRun:
        """To the last answer."""
        for job in jobs:
            self._at(0.0, self._queued[job.model].append, job)
        for decoder in self.decoders:
            self._at(decoder.worker.joins_s, self._join, decoder)
            if decoder.worker.dies_s < math.inf:
                self._at(decoder.worker.dies_s, self._die, decoder)
        while self._events:
            self.now = self._events[0][0]
            while self._events and self._events[0][0] <= self.now:
                heapq.heappop(self._events)[2]()
            self._start_prefills()
            self._fill_slots()
        return SimulatedRun(
            max((t.ended_s for t in self._timings), default=0.0),
            tuple(self._timings),
            self._all_busy(),
            tuple(self._prefills),
        )

    def _at(self, when: float, what: Callable[..., None], *arguments: object) -> None:
        heapq.heappush(self._events, (when, next(self._number), lambda: what(*arguments)))

    def _start_prefills(self) -> None:
        for worker in list(self._idle):
            queue = self._queued[worker.model]
            if queue:
                self._idle.remove(worker)
                self._prefill(worker, queue.popleft())

    def _prefill(self, worker: Prefiller, job: PlannedJob) -> None:
        """The class-wide part once; a second worker waits until the first one has it."""
        own_s = job.own_tokens / worker.tokens_per_s + self.fleet.prefill_overhead_s
        prefix = (job.model, job.prefix)
        shared_at = self._shared_at.setdefault(prefix, self.now + job.shared_tokens / worker.tokens_per_s)
        end = max(self.now, shared_at) + own_s
        self._busy["prefill", worker.machine] += end - self.now
        self._prefills.append(Prefill(job, worker.machine, self.now, end))
        self._at(end, self._prefilled, worker, job)

    def _prefilled(self, worker: Prefiller, job: PlannedJob) -> None:
        self._idle.append(worker)
        self._ready[job.model].append((job, self.now))

    def _fill_slots(self) -> None:
        """Workers ask in turn, each for one job at a time, until nobody takes any."""
        asking = [decoder for decoder in self.decoders if decoder.free]
        while asking:
            asking = [decoder for decoder in asking if decoder.free and self._take(decoder)]

    def _take(self, decoder: DecoderState) -> bool:
        model = self._policy.choose(self, decoder)
        if model is None or not self.waiting(model):
            return False
        job, prefilled_s = self._ready[model].popleft()
        running = Running(job, prefilled_s, self.now, self.now + self._decode_s(decoder, job, prefilled_s))
        decoder.resident.add(model)
        decoder.running.append(running)
        self._at(running.ends_s, self._answered, decoder, running)
        return True

    def _decode_s(self, decoder: DecoderState, job: PlannedJob, prefilled_s: float) -> float:
        load_s = 0.0 if job.model in decoder.resident else decoder.worker.load_s.get(job.model, 0.0)
        transfer_s = self.fleet.kv_s(job.model, job.prompt_tokens)
        exposed_s = max(0.0, transfer_s - (self.now - prefilled_s))
        answer_s = job.answer_tokens / decoder.worker.tokens_per_s[job.model]
        return max(load_s, exposed_s) + self.fleet.decode_overhead_s + answer_s

    def _answered(self, decoder: DecoderState, running: Running) -> None:
        if running.lost:
            return
        decoder.running.remove(running)
        decoder.busy_s += self.now - running.started_s
        job, stolen = running.job, running.job.model != decoder.worker.model
        self._timings.append(Timing(job, running.started_s, self.now, decoder.worker.machine, stolen))
        self._policy.answered(self, decoder, running)

    def _join(self, decoder: DecoderState) -> None:
        decoder.here = self.now < decoder.worker.dies_s

    def _die(self, decoder: DecoderState) -> None:
        decoder.here = False
        for running in reversed(decoder.running):
            running.lost = True
            decoder.busy_s += self.now - running.started_s
            self._ready[running.job.model].appendleft((running.job, running.prefilled_s))
        decoder.running.clear()

    def _all_busy(self) -> dict[tuple[str, str], float]:
        for decoder in self.decoders:
            self._busy["decode", decoder.worker.machine] += decoder.busy_s / decoder.worker.slots
        return dict(self._busy)


def simulate(fleet: Fleet, jobs: Sequence[PlannedJob], policy: Policy | None = None) -> SimulatedRun:
    """Run the jobs through the fleet; those of a model without workers are never answered."""
    return SimulationState(fleet, policy or Policy()).run(jobs)
