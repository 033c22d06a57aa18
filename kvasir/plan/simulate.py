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
import random
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from decode_worker.stealing import policy as stealing
from decode_worker.stealing.policy import Offer, Peer, Queue, Steal
from decode_worker.stealing.queue_forecast import expected_service_s
from kvasir.plan.fleet import Decoder, Fleet, PlannedJob, Prefiller

RUNS = 15  # odd, so that there is a middle
HAIR = 0.01  # no machine keeps its rate more exactly than that


@dataclass(frozen=True, slots=True)
class Timing:
    """What a worker did for a job: when it took it, and when it was done."""

    job: PlannedJob
    machine: str
    started_s: float
    ended_s: float
    is_stolen: bool = False


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """What was simulated."""

    makespan_s: float
    timings: tuple[Timing, ...]  # in the order of answers
    busy_s: Mapping[tuple[str, str], float]  # (stage, machine): seconds at work; of decode the mean of its slots
    prefills: tuple[Timing, ...] = ()  # in the order in which they began

    @property
    def steals(self) -> int:
        """Jobs answered by another model's worker."""
        return sum(timing.is_stolen for timing in self.timings)


class DecoderState:
    """A decode worker in the simulation: who it is, and what it does."""

    def __init__(self, worker: Decoder) -> None:
        self.worker = worker
        self.running_jobs: list[RunningJob] = []
        self.resident = {worker.model}
        self.busy_s = 0.0

    def is_present(self, now: float) -> bool:
        """Whether it has joined and lives."""
        return self.worker.joins_s <= now < self.worker.dies_s

    def free_slots(self, now: float) -> int:
        """Slots that do nothing."""
        return self.worker.slots - len(self.running_jobs) if self.is_present(now) else 0


@dataclass(eq=False)
class RunningJob:
    """A job in a slot."""

    job: PlannedJob
    prefilled_s: float
    started_s: float


class Policy:
    """What decides which queue a free slot takes from. This one serves its home model and nothing else."""

    def choose(self, state: SimulationState, decoder: DecoderState) -> str | None:
        """The model to take a waiting job of, or None to stay idle for now."""
        return decoder.worker.model if state.backlog(decoder.worker.model) else None

    def note_answer(self, state: SimulationState, decoder: DecoderState, running_job: RunningJob) -> None:
        """Learn from a job that has ended."""


class Stealing(Policy):
    """Home first, unless faster workers end the queue sooner; then whatever pays.

    Workers are taken to know their own and each other's rates, and learn how long answers are from those that they
    have seen: the mean so far, and before the first one the declared guess.
    """

    def __init__(self) -> None:
        self._answers: dict[str, int] = defaultdict(int)
        self._tokens: dict[str, int] = defaultdict(int)

    def choose(self, state: SimulationState, decoder: DecoderState) -> str | None:
        """See Policy."""
        home = decoder.worker.model
        if state.backlog(home):
            queue = self._queue(state, decoder, home)
            if stealing.leave_to_faster(queue, self._service_s(decoder, home)) is None:
                return home
        other_models = [model for model, rate in decoder.worker.tokens_per_s.items() if model != home and rate > 0]
        decision = stealing.decide([self._offer(state, decoder, model) for model in other_models])
        return decision.model if isinstance(decision, Steal) else None

    def note_answer(self, state: SimulationState, decoder: DecoderState, running_job: RunningJob) -> None:
        """See Policy."""
        self._answers[running_job.job.model] += 1
        self._tokens[running_job.job.model] += running_job.job.answer_tokens

    def _offer(self, state: SimulationState, decoder: DecoderState, model: str) -> Offer:
        load_s = 0.0 if model in decoder.resident else decoder.worker.load_s.get(model, 0.0)
        return Offer(self._queue(state, decoder, model), self._service_s(decoder, model), load_s=load_s)

    def _queue(self, state: SimulationState, asking: DecoderState, model: str) -> Queue:
        home = [
            decoder
            for decoder in state.decoders
            if decoder.worker.model == model and decoder is not asking and decoder.is_present(state.now)
        ]
        peers = [
            Peer(decoder.worker.slots, len(decoder.running_jobs), self._service_s(decoder, model)) for decoder in home
        ]
        return Queue(model, state.backlog(model), tuple(peers))

    def _service_s(self, decoder: DecoderState, model: str) -> float:
        mean = self._tokens[model] / self._answers[model] if self._answers[model] else 0.0
        return expected_service_s(mean, decoder.worker.tokens_per_s[model])


class SimulationState:
    """What can be seen at a moment, and the machinery that moves it."""

    def __init__(self, fleet: Fleet, policy: Policy) -> None:
        self.now = 0.0
        self.fleet = fleet
        self.decoders = [DecoderState(worker) for worker in fleet.decoders]
        self._policy = policy
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()
        self._prefill_queues: dict[str, deque[PlannedJob]] = defaultdict(deque)  # for prefill
        self._decode_queues: dict[str, deque[tuple[PlannedJob, float]]] = defaultdict(deque)  # for decode
        self._idle = list(fleet.prefillers)
        self._shared_at: dict[tuple[str, str], float] = {}
        self._busy: dict[tuple[str, str], float] = defaultdict(float)
        self._timings: list[Timing] = []
        self._prefills: list[Timing] = []

    def backlog(self, model: str) -> int:
        """Prefilled jobs of a model that no slot has taken."""
        return len(self._decode_queues[model])

    def simulate(self, jobs: Sequence[PlannedJob]) -> SimulatedRun:
        """To the last answer."""
        for job in jobs:
            self._schedule(0.0, self._prefill_queues[job.model].append, job)
        for decoder in self.decoders:
            self._schedule(decoder.worker.joins_s, lambda: None)  # a moment at which slots are filled
            if decoder.worker.dies_s < math.inf:
                self._schedule(decoder.worker.dies_s, self._die, decoder)
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

    def _schedule(self, moment_s: float, action: Callable[..., None], *arguments: object) -> None:
        heapq.heappush(self._events, (moment_s, next(self._number), lambda: action(*arguments)))

    def _start_prefills(self) -> None:
        for worker in list(self._idle):
            queue = self._prefill_queues[worker.model]
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
        self._prefills.append(Timing(job, worker.machine, self.now, end))
        self._schedule(end, self._finish_prefill, worker, job)

    def _finish_prefill(self, worker: Prefiller, job: PlannedJob) -> None:
        self._idle.append(worker)
        self._decode_queues[job.model].append((job, self.now))

    def _fill_slots(self) -> None:
        """Workers ask in turn, each for one job at a time, until nobody takes any."""
        asking = [decoder for decoder in self.decoders if decoder.free_slots(self.now)]
        while asking:
            asking = [decoder for decoder in asking if decoder.free_slots(self.now) and self._start_answer(decoder)]

    def _start_answer(self, decoder: DecoderState) -> bool:
        model = self._policy.choose(self, decoder)
        if model is None or not self.backlog(model):
            return False
        job, prefilled_s = self._decode_queues[model].popleft()
        running_job = RunningJob(job, prefilled_s, self.now)
        end = self.now + self._decode_s(decoder, job, prefilled_s)
        decoder.resident.add(model)
        decoder.running_jobs.append(running_job)
        self._schedule(end, self._finish_answer, decoder, running_job)
        return True

    def _decode_s(self, decoder: DecoderState, job: PlannedJob, prefilled_s: float) -> float:
        load_s = 0.0 if job.model in decoder.resident else decoder.worker.load_s.get(job.model, 0.0)
        transfer_s = self.fleet.kv_s(job.model, job.prompt_tokens)
        exposed_s = max(0.0, transfer_s - (self.now - prefilled_s))
        answer_s = job.answer_tokens / decoder.worker.tokens_per_s[job.model]
        return max(load_s, exposed_s) + self.fleet.decode_overhead_s + answer_s

    def _finish_answer(self, decoder: DecoderState, running_job: RunningJob) -> None:
        if running_job not in decoder.running_jobs:  # lost with its worker
            return
        decoder.running_jobs.remove(running_job)
        decoder.busy_s += self.now - running_job.started_s
        job, is_stolen = running_job.job, running_job.job.model != decoder.worker.model
        self._timings.append(Timing(job, decoder.worker.machine, running_job.started_s, self.now, is_stolen))
        self._policy.note_answer(self, decoder, running_job)

    def _die(self, decoder: DecoderState) -> None:
        for running_job in reversed(decoder.running_jobs):
            decoder.busy_s += self.now - running_job.started_s
            self._decode_queues[running_job.job.model].appendleft((running_job.job, running_job.prefilled_s))
        decoder.running_jobs.clear()

    def _all_busy(self) -> dict[tuple[str, str], float]:
        for decoder in self.decoders:
            self._busy["decode", decoder.worker.machine] += decoder.busy_s / decoder.worker.slots
        return dict(self._busy)


def simulate(fleet: Fleet, jobs: Sequence[PlannedJob], policy: Policy | None = None) -> SimulatedRun:
    """Run the jobs through the fleet; those of a model without workers are never answered."""
    return SimulationState(fleet, policy or Policy()).simulate(jobs)


def typical(fleet: Fleet, jobs: Sequence[PlannedJob], policy: Callable[[], Policy] = Policy) -> SimulatedRun:
    """Of RUNS simulations in which each rate is up to HAIR off, the one of median makespan. Always the same one.

    Who takes which job hangs on milliseconds, and with it which long job comes last: change the last digit of a rate,
    and the makespan jumps by several percent. A single simulation is one throw of these dice, and so is the real night.
    """
    source = random.Random(0)
    runs = [simulate(_off_by_a_hair(fleet, source), jobs, policy()) for _ in range(RUNS)]
    return sorted(runs, key=lambda run: run.makespan_s)[RUNS // 2]


def _off_by_a_hair(fleet: Fleet, source: random.Random) -> Fleet:
    def off(rate: float) -> float:
        return rate * source.uniform(1 - HAIR, 1 + HAIR)

    prefillers = [replace(prefiller, tokens_per_s=off(prefiller.tokens_per_s)) for prefiller in fleet.prefillers]
    decoders = [
        replace(decoder, tokens_per_s={model: off(rate) for model, rate in decoder.tokens_per_s.items()})
        for decoder in fleet.decoders
    ]
    return replace(fleet, prefillers=tuple(prefillers), decoders=tuple(decoders))
