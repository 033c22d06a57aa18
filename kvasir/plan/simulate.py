"""Simulates the pipeline by discrete events: two stages, with the policies of the real one.

A prefill worker takes its model's jobs, and computes the shared part once and then each job's suffix. In both stages
classes take turns, as batches do in the cluster (`infra.turns`). A free decode slot takes a job of the model that the
policy chooses. The policy sees what a decode worker sees: how many jobs wait, how long earlier jobs took, and which
other workers exist. A slot fetches the next KV cache while its current job is still running, so a transfer costs time
only if the job had just arrived.

A machine has one capacity. While it computes a prompt, it decodes nothing. Otherwise its sequences continue, each at
the rate that their number allows (`Decoder.paces`). A machine whose workers have both stages chooses between them by
the watermark (`decode_worker.stealing.watermark`).

A worker that dies loses what it was doing. Its jobs go to the front of their class at once, and that class is next.
"""

import heapq
import itertools
import math
import random
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Generic, TypeVar

from decode_worker.stealing import policy as stealing
from decode_worker.stealing import watermark
from decode_worker.stealing.policy import Offer, Peer, Queue
from decode_worker.stealing.queue_forecast import expected_service_s
from decode_worker.stealing.watermark import ModelWork
from kvasir.plan.fleet import Decoder, Fleet, PlannedJob, Prefiller, Rate
from messages.workers import RateCurve

T = TypeVar("T")

RUNS = 15  # an odd number, so that there is a median
# With more than LONG_CLASS jobs, there are fewer runs, because chance matters less and a run takes longer.
LONG_CLASS_RUNS = 5
LONG_CLASS = 600
HAIR = 0.01  # each run changes each machine's rate by up to this share, because real rates vary as much


@dataclass(frozen=True, slots=True)
class Backlog:
    """The jobs in the order in which they are taken, and how far each of them is when the simulation begins."""

    waiting_jobs: list[PlannedJob]
    # Jobs that are prefilled and wait for a decode slot.
    ready_jobs: list[PlannedJob]
    # (the decoder's index in the fleet, job). The job's answer tokens are those that remain to be decoded.
    running_jobs: list[tuple[int, PlannedJob]]


@dataclass(frozen=True, slots=True)
class Timing:
    """When a worker took a job, and when it finished it."""

    job: PlannedJob
    machine: str
    started_s: float
    ended_s: float
    is_stolen: bool = False


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """What was simulated."""

    makespan_s: float
    timings: tuple[Timing, ...]  # timings of the answers, in the order in which they ended
    busy_s: Mapping[tuple[str, str], float]  # (stage, machine) -> seconds at work; for decode the mean over its slots
    prefills: tuple[Timing, ...] = ()  # timings of the prefills, in the order in which they began

    @property
    def steals(self) -> int:
        """The number of jobs answered by another model's worker."""
        return sum(timing.is_stolen for timing in self.timings)


class DecoderState:
    """A decode worker in the simulation, and what it is doing."""

    def __init__(self, worker: Decoder) -> None:
        self.worker = worker
        # the rates are computed once, because they are needed very often
        self.full_rates = {model: worker.full_rate(model) for model in worker.tokens_per_s}
        self.is_curved = worker.is_curved
        self.running_jobs: list[RunningJob] = []
        self.resident = {worker.model}
        self.busy_s = 0.0
        self.has_both_roles = False
        # models that it serves without stealing; with both roles, these are all of its models
        self.home_models = {worker.model}

    def has_free_slot(self) -> bool:
        """Whether another job can begin."""
        return len(self.running_jobs) < self.worker.slots


@dataclass(eq=False)
class RunningJob:
    """A job in a slot. Its decode begins at `decodes_s`, when its model and its KV cache are there."""

    job: PlannedJob
    prefilled_s: float
    prefilled_by: str
    started_s: float
    decodes_s: float
    remaining_tokens: float


class MachineState:
    """A machine at one moment: it either computes a prompt, or decodes its workers' sequences."""

    def __init__(self, decoders: Sequence[DecoderState]) -> None:
        self.decoders = decoders
        self.is_prefilling = False
        self.forecast_s = math.inf  # latest forecast of when the machine's next sequence ends or begins
        self._seen_s = 0.0
        self._paces: list[tuple[RunningJob, float]] = []  # since the last event; its sequences, with tokens per second

    def advance(self, now: float) -> None:
        """Decode up to now. Must be called before anything changes."""
        elapsed_s = now - self._seen_s
        if not self.is_prefilling:
            for running_job, pace in self._paces:
                running_job.remaining_tokens -= pace * elapsed_s
            for decoder in self.decoders:
                decoder.busy_s += elapsed_s * len(decoder.running_jobs)
        self._seen_s = now

    def next_change_s(self, now: float) -> float:
        """Return when the next sequence ends or begins, if nothing else happens. Must be called after every change."""
        if self.is_prefilling:
            return math.inf
        self._paces = self._paces_at(now)
        begins = [job.decodes_s for decoder in self.decoders for job in decoder.running_jobs if job.decodes_s > now]
        ends = [now + max(0.0, running_job.remaining_tokens) / pace for running_job, pace in self._paces]
        return min([*begins, *ends], default=math.inf)

    def _paces_at(self, now: float) -> list[tuple[RunningJob, float]]:
        """Return the sequences that are being decoded, each with its tokens per second.

        Workers with curves take turns.
        """
        active = [
            (decoder, [running_job for running_job in decoder.running_jobs if running_job.decodes_s <= now])
            for decoder in self.decoders
        ]
        turns = sum(bool(running_jobs) for _, running_jobs in active)
        paces = []
        for decoder, running_jobs in active:
            by_model = decoder.worker.paces(Counter(running_job.job.model for running_job in running_jobs))
            part = 1 / turns if decoder.is_curved and turns else 1.0
            paces += [(running_job, by_model[running_job.job.model] * part) for running_job in running_jobs]
        return paces


class TurnQueue(Generic[T]):
    """The jobs that wait for one stage of a model, by class. The class whose turn it is comes first."""

    def __init__(self) -> None:
        self._classes: dict[str, deque[T]] = {}

    def __len__(self) -> int:
        return sum(map(len, self._classes.values()))

    def next(self) -> T:
        """What `take` would."""
        return next(iter(self._classes.values()))[0]

    def take(self) -> T:
        """Return and remove the next job of the class whose turn it is."""
        name = next(iter(self._classes))
        line = self._classes.pop(name)
        entry = line.popleft()
        if line:
            self._classes[name] = line
        return entry

    def append(self, name: str, entry: T) -> None:
        """Add a job at the end of its class."""
        self._classes.setdefault(name, deque()).append(entry)

    def put_back(self, name: str, entry: T) -> None:
        """To the front."""
        line = self._classes.pop(name, deque())
        line.appendleft(entry)
        self._classes = {name: line, **self._classes}


class Stealing:
    """Decides which queue a free slot takes a job from.

    It takes jobs of its home model, unless faster workers would finish them sooner. Otherwise it steals where that
    saves time. Workers know their own and each other's rates. They learn the length of answers from those they have
    seen: the mean so far, and before the first answer an assumed length.
    """

    def __init__(self, lengths: Mapping[str, Sequence[int]] = MappingProxyType({})) -> None:
        """`lengths` are the lengths in tokens of answers seen before, by model."""
        self._answers = defaultdict(int, {model: len(tokens) for model, tokens in lengths.items()})
        self._tokens = defaultdict(int, {model: sum(tokens) for model, tokens in lengths.items()})

    def choose(self, state: "SimulationState", decoder: DecoderState) -> str | None:
        """Return the model from which to take a waiting job, or None to stay idle for now."""
        decoding = {running_job.job.model for running_job in decoder.running_jobs}
        if decoder.has_both_roles:
            return watermark.next_answer(self._work(state, decoder), decoding)
        home = decoder.worker.model
        if state.backlog(home):
            queue = self._queue(state, decoder, home)
            if stealing.leave_to_faster(queue, self._service_s(decoder, home)) is None:
                return home
        rates = decoder.worker.tokens_per_s
        models = [
            model
            for model in rates
            if model != home and (not isinstance(rates[model], RateCurve) or decoding <= {model})
        ]
        decision = stealing.decide([self._offer(state, decoder, model) for model in models])
        return None if decision.reason else decision.model

    def choose_prompt(self, state: "SimulationState", machine: MachineState, models: Sequence[str]) -> str | None:
        """Return the model of which to prefill a waiting prompt, or None to decode.

        A model that this machine does not decode is always prefilled without waiting.
        """
        work = self._work(state, machine.decoders[0]) if machine.decoders else []
        prompt = watermark.next_prompt([model for model in work if model.queue.model in models])
        decoded = {model.queue.model for model in work}
        only_prefilled = [model for model in models if model not in decoded and state.prompts(model)]
        return prompt or max(only_prefilled, key=state.prompts, default=None)

    def note_answer(self, state: "SimulationState", decoder: DecoderState, running_job: RunningJob) -> None:
        """Learn from a job that has ended."""
        self._answers[running_job.job.model] += 1
        self._tokens[running_job.job.model] += running_job.job.answer_tokens

    def _work(self, state: "SimulationState", decoder: DecoderState) -> list[ModelWork]:
        return [self._model_work(state, decoder, model) for model in decoder.full_rates]

    def _model_work(self, state: "SimulationState", decoder: DecoderState, model: str) -> ModelWork:
        workers = [each for each in state.present if model in each.full_rates]
        rate = decoder.full_rates[model]
        return ModelWork(
            queue=self._queue(state, decoder, model),
            ready=state.backlog(model),
            prompts=state.prompts(model),
            own=Peer(decoder.worker.slots, len(decoder.running_jobs), self._service_s(decoder, model)),
            has_pure_decoders=any(not each.has_both_roles and model in each.home_models for each in workers),
            share=rate / (sum(each.full_rates[model] for each in workers) or rate),
            prefill_s=state.prompt_s(decoder.worker.machine, model),
            lead_elsewhere=state.lead_elsewhere(decoder.worker.machine, model),
        )

    def _offer(self, state: "SimulationState", decoder: DecoderState, model: str) -> Offer:
        return Offer(
            self._queue(state, decoder, model),
            self._service_s(decoder, model),
            load_s=0.0 if model in decoder.resident else decoder.worker.load_s.get(model, 0.0),
        )

    def _queue(self, state: "SimulationState", asking: DecoderState, model: str) -> Queue:
        """Return a queue as the worker `asking` sees it. If prefill stops at a watermark, waiting prompts count too."""
        home = [decoder for decoder in state.present if model in decoder.home_models]
        peers = [
            Peer(decoder.worker.slots, len(decoder.running_jobs), self._service_s(decoder, model))
            for decoder in home
            if decoder is not asking
        ]
        ready = state.backlog(model)
        prompts = state.prompts(model) if ready and any(decoder.has_both_roles for decoder in home) else 0
        return Queue(model, ready + prompts, tuple(peers))

    def _service_s(self, decoder: DecoderState, model: str) -> float:
        mean = self._tokens[model] / self._answers[model] if self._answers[model] else 0.0
        return expected_service_s(mean, decoder.full_rates[model] / decoder.worker.slots)


class SimulationState:
    """The state of the simulation at a moment, and the events that change it."""

    def __init__(self, fleet: Fleet, policy: Stealing) -> None:
        self.now = 0.0
        self.fleet = fleet
        self.decoders = [DecoderState(worker) for worker in fleet.decoders]
        self.present: list[DecoderState] = []  # those that have joined and are still alive
        self.machines = {
            name: MachineState([decoder for decoder in self.decoders if decoder.worker.machine == name])
            for name in fleet.machines()
        }
        self._prefillers = {(prefiller.machine, prefiller.model): prefiller for prefiller in fleet.prefillers}
        # (machine, model) -> tokens that the machine prefills in the time of one decoded token
        self._advantages: dict[tuple[str, str], float] = {}
        for (name, model), prefiller in self._prefillers.items():
            decoders = self.machines[name].decoders
            for decoder in decoders:
                decoder.has_both_roles = True
                decoder.home_models.update(decoder.full_rates)
            rate = max((decoder.full_rates.get(model, 0.0) for decoder in decoders), default=0.0)
            self._advantages[name, model] = prefiller.best_rate / rate if rate else math.inf
        self._policy = policy
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = itertools.count()
        self._prefill_queues: dict[str, TurnQueue[PlannedJob]] = defaultdict(TurnQueue)
        self._decode_queues: dict[str, TurnQueue[tuple[PlannedJob, float, str]]] = defaultdict(TurnQueue)
        self._shared_at: dict[tuple[str, str], float] = {}
        self._busy: dict[tuple[str, str], float] = defaultdict(float)
        self._timings: list[Timing] = []
        self._prefills: list[Timing] = []

    def backlog(self, model: str) -> int:
        """Return the number of prefilled jobs of a model that are not in a slot."""
        return len(self._decode_queues[model])

    def prompts(self, model: str) -> int:
        """Return the number of jobs of a model that wait for prefill."""
        return len(self._prefill_queues[model])

    def prompt_s(self, machine: str, model: str) -> float:
        """Return the time the machine would need for the model's next prompt; 0 if there is none, or if it can't."""
        prefiller, queue = self._prefillers.get((machine, model)), self._prefill_queues[model]
        return (tokens := queue.next().prompt_tokens) / prefiller.rate(tokens) if prefiller and queue else 0.0

    def lead_elsewhere(self, machine: str, model: str) -> float:
        """See ModelWork."""
        return max(
            (value for key, value in self._advantages.items() if key[1] == model and key[0] != machine), default=0.0
        ) / self._advantages.get((machine, model), math.inf)

    def simulate(self, backlog: Backlog) -> SimulatedRun:
        """Run until the last answer."""
        self._begin(backlog)
        for decoder in self.decoders:
            # No action is needed, because free slots are filled after every event.
            self._schedule(decoder.worker.joins_s, lambda: None)
            if decoder.worker.dies_s < math.inf:
                self._schedule(decoder.worker.dies_s, self._die, decoder)
        while self._events:
            self.now = self._events[0][0]
            self.present = [
                decoder for decoder in self.decoders if decoder.worker.joins_s <= self.now < decoder.worker.dies_s
            ]
            for machine in self.machines.values():
                machine.advance(self.now)
            while self._events and self._events[0][0] <= self.now:
                heapq.heappop(self._events)[2]()
            self._start_prefills()
            self._fill_slots()
            for machine in self.machines.values():
                change_s = machine.next_change_s(self.now)
                if change_s != machine.forecast_s and change_s < math.inf:
                    self._schedule(change_s, self._finish_answers, machine)
                machine.forecast_s = change_s
        return SimulatedRun(
            max((t.ended_s for t in self._timings), default=0.0),
            tuple(self._timings),
            self._all_busy(),
            tuple(self._prefills),
        )

    def _begin(self, backlog: Backlog) -> None:
        for job in backlog.waiting_jobs:
            self._schedule(0.0, self._prefill_queues[job.model].append, job.prefix, job)
        for job in backlog.ready_jobs:
            self._decode_queues[job.model].append(job.prefix, (job, 0.0, ""))
        for number, job in backlog.running_jobs:
            decoder = self.decoders[number]
            decoder.resident.add(job.model)
            decoder.running_jobs.append(RunningJob(job, 0.0, "", 0.0, 0.0, job.answer_tokens))

    def _schedule(self, moment_s: float, action: Callable[..., None], *arguments: object) -> None:
        heapq.heappush(self._events, (moment_s, next(self._number), lambda: action(*arguments)))

    def _start_prefills(self) -> None:
        for name, machine in self.machines.items():
            workers = {worker.model: worker for worker in self.fleet.prefillers if worker.machine == name}
            if (
                not machine.is_prefilling
                and any(map(self.prompts, workers))
                and (model := self._policy.choose_prompt(self, machine, list(workers)))
            ):
                machine.is_prefilling = True
                self._prefill(machine, workers[model], self._prefill_queues[model].take())

    def _prefill(self, machine: MachineState, worker: Prefiller, job: PlannedJob) -> None:
        """Prefill a job. The shared part is computed once; a second worker waits until the first has it."""
        rate = worker.rate(job.prompt_tokens)
        own_s = job.own_tokens / rate + self.fleet.prefill_overhead_s
        prefix = (job.model, job.prefix)
        shared_at = self._shared_at.setdefault(prefix, self.now + job.shared_tokens / rate)
        end = max(self.now, shared_at) + own_s
        self._busy["prefill", worker.machine] += end - self.now
        self._prefills.append(Timing(job, worker.machine, self.now, end))
        self._schedule(end, self._finish_prefill, machine, worker, job)

    def _finish_prefill(self, machine: MachineState, worker: Prefiller, job: PlannedJob) -> None:
        machine.is_prefilling = False
        self._decode_queues[job.model].append(job.prefix, (job, self.now, worker.machine))

    def _fill_slots(self) -> None:
        """Let workers take one job each in turn, until none takes any."""
        asking = [decoder for decoder in self.present if decoder.has_free_slot()]
        while asking:
            asking = [decoder for decoder in asking if decoder.has_free_slot() and self._start_answer(decoder)]

    def _start_answer(self, decoder: DecoderState) -> bool:
        if (
            not any(map(self.backlog, decoder.full_rates))  # first, because a policy takes long to answer
            or (model := self._policy.choose(self, decoder)) is None
            or not self.backlog(model)
        ):
            return False
        job, prefilled_s, machine = self._decode_queues[model].take()
        decodes_s = self.now + self._setup_s(decoder, job, prefilled_s, machine)
        decoder.resident.add(model)
        decoder.running_jobs.append(RunningJob(job, prefilled_s, machine, self.now, decodes_s, job.answer_tokens))
        return True

    def _setup_s(self, decoder: DecoderState, job: PlannedJob, prefilled_s: float, machine: str) -> float:
        load_s = 0.0 if job.model in decoder.resident else decoder.worker.load_s.get(job.model, 0.0)
        transfer_s = self.fleet.kv_s(job.model, job.prompt_tokens) if machine != decoder.worker.machine else 0.0
        exposed_s = max(0.0, transfer_s - (self.now - prefilled_s))
        return max(load_s, exposed_s) + self.fleet.decode_overhead_s

    def _finish_answers(self, machine: MachineState) -> None:
        for decoder in machine.decoders:
            for running_job in [
                running_job for running_job in decoder.running_jobs if running_job.remaining_tokens <= 1e-4
            ]:
                decoder.running_jobs.remove(running_job)
                job, is_stolen = running_job.job, running_job.job.model != decoder.worker.model
                self._timings.append(Timing(job, decoder.worker.machine, running_job.started_s, self.now, is_stolen))
                self._policy.note_answer(self, decoder, running_job)

    def _die(self, decoder: DecoderState) -> None:
        for running_job in reversed(decoder.running_jobs):
            job = running_job.job
            entry = job, running_job.prefilled_s, running_job.prefilled_by
            self._decode_queues[job.model].put_back(job.prefix, entry)
        decoder.running_jobs.clear()

    def _all_busy(self) -> dict[tuple[str, str], float]:
        for decoder in self.decoders:
            self._busy["decode", decoder.worker.machine] += decoder.busy_s / decoder.worker.slots
        return dict(self._busy)


def simulate(fleet: Fleet, jobs: Sequence[PlannedJob] | Backlog, policy: Stealing | None = None) -> SimulatedRun:
    """Simulate the jobs on the fleet. Jobs of a model without workers are never answered."""
    backlog = jobs if isinstance(jobs, Backlog) else Backlog(list(jobs), [], [])
    return SimulationState(fleet, policy or Stealing()).simulate(backlog)


def typical(fleet: Fleet, jobs: Sequence[PlannedJob]) -> SimulatedRun:
    """Return the run with the median makespan of several, in which each rate is off by up to HAIR. Always the same run.

    Which worker takes which job depends on milliseconds, and so does which long job comes last. Changing the last digit
    of a rate can change the makespan by several percent. A single simulation is therefore as random as a real run.
    """
    source = random.Random(0)
    count = RUNS if len(jobs) <= LONG_CLASS else LONG_CLASS_RUNS
    fleets = [with_rates(fleet, lambda _machine: source.uniform(1 - HAIR, 1 + HAIR)) for _ in range(count)]
    runs = [simulate(rated_fleet, jobs) for rated_fleet in fleets]
    return sorted(runs, key=lambda run: run.makespan_s)[count // 2]


def with_rates(fleet: Fleet, factor_of: Callable[[str], float]) -> Fleet:
    """Return the fleet with each rate multiplied by a factor for its machine. `factor_of` is called for each rate."""

    def off(rate: Rate, machine: str) -> Rate:
        factor = factor_of(machine)
        if isinstance(rate, RateCurve):
            return replace(rate, tokens_per_s=tuple(value * factor for value in rate.tokens_per_s))
        return rate * factor

    prefillers = [
        replace(prefiller, tokens_per_s=off(prefiller.tokens_per_s, prefiller.machine))
        for prefiller in fleet.prefillers
    ]
    decoders = [
        replace(
            decoder, tokens_per_s={model: off(rate, decoder.machine) for model, rate in decoder.tokens_per_s.items()}
        )
        for decoder in fleet.decoders
    ]
    return replace(fleet, prefillers=tuple(prefillers), decoders=tuple(decoders))
