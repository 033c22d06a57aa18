"""The pipeline as a discrete-event simulation: two stages, the policies of the real one, and no waiting for nothing.

A prefill worker takes its model's jobs in order, `now` before `bulk`, computes the class-wide part once and then each
job's own part. A decode slot that is free takes the job that the policy names; the policy sees what a decode worker
sees: how many jobs wait, how long those took that are done, and who else is there. A slot fetches the KV cache while
the job before it is still running, so a transfer costs time only where the job had just arrived.

A worker that dies loses what it was doing; those jobs go to the front of their queue at once.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from kvasir.plan.fleet import Decoder, Fleet, Job, Prefiller
from messages.jobs import Lane


@dataclass(frozen=True, slots=True)
class Timing:
    """One job's way: when it was handed in, when its KV cache was stored, when a slot took it, when it was answered."""

    job: Job
    prefilled_s: float
    started_s: float
    ended_s: float
    machine: str
    stolen: bool

    @property
    def latency_s(self) -> float:
        """From submission to answer, queues included."""
        return self.ended_s - self.job.submitted_s


@dataclass(frozen=True, slots=True)
class Run:
    """What was simulated."""

    makespan_s: float
    timings: tuple[Timing, ...]  # in the order of answers
    busy_s: Mapping[tuple[str, str], float]  # (stage, machine): seconds at work; of decode the mean of its slots

    @property
    def steals(self) -> int:
        """Jobs answered by another model's worker."""
        return sum(timing.stolen for timing in self.timings)


class Seat:
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

    job: Job
    prefilled_s: float
    started_s: float
    ends_s: float
    lost: bool = False


@dataclass(slots=True)
class Experience:
    """What the workers have learned of a model: each answered job's seconds in a slot."""

    seconds: list[float] = field(default_factory=list)


class Policy:
    """What decides which queue a free slot takes from. This one serves its home model and nothing else."""

    def choose(self, state: State, seat: Seat) -> str | None:
        """The model to take a waiting job of, or None to stay idle for now."""
        return seat.worker.model if state.waiting(seat.worker.model) else None

    def answered(self, state: State, seat: Seat, done: Running) -> None:
        """Learn from a job that has ended."""


class State:
    """What can be seen at a moment, and the machinery that moves it."""

    def __init__(self, fleet: Fleet, policy: Policy) -> None:
        self.now = 0.0
        self.fleet = fleet
        self.seats = [Seat(worker) for worker in fleet.decoders]
        self._policy = policy
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()
        self._queued: dict[tuple[str, Lane], deque[Job]] = defaultdict(deque)  # for prefill
        self._ready: dict[tuple[str, Lane], deque[tuple[Job, float]]] = defaultdict(deque)  # for decode
        self._idle = list(fleet.prefillers)
        self._shared_at: dict[tuple[str, str], float] = {}
        self._busy: dict[tuple[str, str], float] = defaultdict(float)
        self._timings: list[Timing] = []

    def waiting(self, model: str) -> int:
        """Prefilled jobs of a model that no slot has taken."""
        return len(self._ready[model, "now"]) + len(self._ready[model, "bulk"])

    def run(self, jobs: Sequence[Job]) -> Run:
        """To the last answer."""
        for job in jobs:
            self._at(job.submitted_s, self._queued[job.model, job.lane].append, job)
        for seat in self.seats:
            self._at(seat.worker.joins_s, self._join, seat)
            if seat.worker.dies_s < math.inf:
                self._at(seat.worker.dies_s, self._die, seat)
        while self._events:
            self.now = self._events[0][0]
            while self._events and self._events[0][0] <= self.now:
                heapq.heappop(self._events)[2]()
            self._start_prefills()
            self._fill_slots()
        return Run(max((t.ended_s for t in self._timings), default=0.0), tuple(self._timings), self._all_busy())

    def _at(self, when: float, what: Callable[..., None], *arguments: object) -> None:
        heapq.heappush(self._events, (when, next(self._number), lambda: what(*arguments)))

    def _start_prefills(self) -> None:
        for worker in list(self._idle):
            lanes: tuple[Lane, ...] = ("now", "bulk")
            queue = next((self._queued[worker.model, lane] for lane in lanes if self._queued[worker.model, lane]), None)
            if queue:
                self._idle.remove(worker)
                self._prefill(worker, queue.popleft())

    def _prefill(self, worker: Prefiller, job: Job) -> None:
        """The class-wide part once; a second worker waits until the first one has it."""
        own_s = job.own_tokens / worker.tokens_per_s + self.fleet.prefill_overhead_s
        prefix = (job.model, job.prefix)
        shared_at = self._shared_at.setdefault(prefix, self.now + job.shared_tokens / worker.tokens_per_s)
        end = max(self.now, shared_at) + own_s
        self._busy["prefill", worker.machine] += end - self.now
        self._at(end, self._prefilled, worker, job)

    def _prefilled(self, worker: Prefiller, job: Job) -> None:
        self._idle.append(worker)
        self._ready[job.model, job.lane].append((job, self.now))

    def _fill_slots(self) -> None:
        """Workers ask in turn, each for one job at a time, until nobody takes any."""
        asking = [seat for seat in self.seats if seat.free]
        while asking:
            asking = [seat for seat in asking if seat.free and self._take(seat)]

    def _take(self, seat: Seat) -> bool:
        model = self._policy.choose(self, seat)
        if model is None or not self.waiting(model):
            return False
        job, prefilled_s = (self._ready[model, "now"] or self._ready[model, "bulk"]).popleft()
        running = Running(job, prefilled_s, self.now, self.now + self._decode_s(seat, job, prefilled_s))
        seat.resident.add(model)
        seat.running.append(running)
        self._at(running.ends_s, self._answered, seat, running)
        return True

    def _decode_s(self, seat: Seat, job: Job, prefilled_s: float) -> float:
        load_s = 0.0 if job.model in seat.resident else seat.worker.load_s.get(job.model, 0.0)
        transfer_s = job.prompt_tokens * self.fleet.hand_over_s.get(job.model, 0.0)
        exposed_s = max(0.0, transfer_s - (self.now - prefilled_s))
        answer_s = job.answer_tokens / seat.worker.tokens_per_s[job.model]
        return max(load_s, exposed_s) + self.fleet.decode_overhead_s + answer_s

    def _answered(self, seat: Seat, running: Running) -> None:
        if running.lost:
            return
        seat.running.remove(running)
        seat.busy_s += self.now - running.started_s
        job, stolen = running.job, running.job.model != seat.worker.model
        self._timings.append(Timing(job, running.prefilled_s, running.started_s, self.now, seat.worker.machine, stolen))
        self._policy.answered(self, seat, running)

    def _join(self, seat: Seat) -> None:
        seat.here = self.now < seat.worker.dies_s

    def _die(self, seat: Seat) -> None:
        seat.here = False
        for running in reversed(seat.running):
            running.lost = True
            seat.busy_s += self.now - running.started_s
            self._ready[running.job.model, running.job.lane].appendleft((running.job, running.prefilled_s))
        seat.running.clear()

    def _all_busy(self) -> dict[tuple[str, str], float]:
        for seat in self.seats:
            self._busy["decode", seat.worker.machine] += seat.busy_s / seat.worker.slots
        return dict(self._busy)


def simulate(fleet: Fleet, jobs: Sequence[Job], policy: Policy | None = None) -> Run:
    """Run the jobs through the fleet; those of a model without workers are never answered."""
    return State(fleet, policy or Policy()).run(jobs)
