"""A cluster as it is now, as the plan simulates one: its workers, what waits there, and when that will be done."""

import itertools
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from decode_worker.stealing.queue_forecast import FIRST_ANSWER_TOKENS
from infra.broker.topology import jobs_waiting
from infra.config.settings import MachineSettings, Settings
from kvasir.plan.cluster import DECODE_OVERHEAD_S, PREFILL_OVERHEAD_S, rates_of
from kvasir.plan.finish import Finish, finish_of
from kvasir.plan.fleet import Decoder, Fleet, PlannedJob, Prefiller, Rate, with_another
from kvasir.plan.simulate import Backlog
from messages.errors import BrokerUnavailable
from messages.workers import BOTH_ROLES, RateCurve, WorkerInfo
from producers.batch.batch import Batch
from producers.client import Client

FIRST_PROMPT_TOKENS = 4000  # of a prompt, beside what its class shares, until one was measured
LIKELY = 0.9  # to make a deadline: below it is said what would help
SHORTER = 0.75
LAST_RESULTS = 200  # of a batch, that say how long its answers are


@dataclass(frozen=True, slots=True)
class Outlook:
    """What is known of a batch, or of all batches, while it runs: the arguments of `finish_of`."""

    fleet: Fleet
    backlog: Backlog
    lengths: Mapping[str, Sequence[int]]
    names: frozenset[str]

    def finish(self) -> Finish | None:
        """When it will be done."""
        return finish_of(self.fleet, self.backlog, self.lengths, self.names)

    def with_another_machine(self) -> tuple[str, "Outlook"]:
        """The machine that decodes the most, and what another one like it would make of it."""
        rates: dict[str, float] = defaultdict(float)
        for decoder in self.fleet.decoders:
            rates[decoder.machine] += decoder.full_rate(decoder.model)
        name = max(rates, key=rates.__getitem__)
        return name, replace(self, fleet=with_another(self.fleet, name))

    def with_shorter_answers(self) -> "Outlook":
        """The same with answers of SHORTER times the length."""

        def shorter(job: PlannedJob) -> PlannedJob:
            return replace(job, answer_tokens=round(SHORTER * job.answer_tokens))

        waiting, ready = (list(map(shorter, jobs)) for jobs in (self.backlog.waiting, self.backlog.ready))
        lengths = {model: [round(SHORTER * tokens) for tokens in found] for model, found in self.lengths.items()}
        return replace(self, backlog=Backlog(waiting, ready, self.backlog.running), lengths=lengths)


def expectation(settings: Settings, client: Client, batch: Batch, deadline: float = 0.0) -> str:
    """When the batch will be done, in words; "" while nobody can say.

    With a `deadline`, in seconds since the epoch, the chance to make it too, and if that is small what would help.
    """
    outlook = outlook_of(settings, client, batch)
    finish = outlook.finish() if outlook else None
    if not outlook or not finish or not deadline:
        return finish.words() if finish else ""
    within_s = deadline - time.time()
    words = f"{finish.words()}; {finish.chance(within_s):.0%} chance to make the deadline"
    if finish.chance(within_s) >= LIKELY:
        return words
    machine, larger = outlook.with_another_machine()
    helpers = {
        f"another machine like {machine}": larger,
        f"answers {1 - SHORTER:.0%} shorter": outlook.with_shorter_answers(),
    }
    chances = [
        f"{name} ({better.chance(within_s):.0%})" for name, other in helpers.items() if (better := other.finish())
    ]
    chances += ["--ask together"] if batch.request.get("ask") == "criteria" else []
    return f"{words}; what would help: {', '.join(chances)}"


def outlook_of(settings: Settings, client: Client, batch: Batch | None = None) -> Outlook | None:
    """Of the batch, or without one of all that waits or is decoded now; None if that is nothing, or can't be seen."""
    results, own = [], None
    if batch:
        ids = itertools.islice(reversed([job for job, state in batch.states.items() if state]), LAST_RESULTS)
        results = [result for job in ids if (result := batch.result(job)) and result.state == "succeeded"]
        own = Counter(entry.model for entry in batch.open_jobs.values())
    fleet, registrations = fleet_of_workers(settings, client.workers())
    waiting: list[PlannedJob] = []
    ready: list[PlannedJob] = []
    running: list[tuple[int, PlannedJob]] = []
    lengths: dict[str, list[int]] = {}
    for model in settings.models if own is None else own:
        of_model = [result for result in results if result.model == model]
        lengths[model] = [result.decode.completion_tokens for result in of_model]
        figures = [tokens for worker in registrations if (tokens := worker.figures_for(model)[1])]
        mean = statistics.fmean(lengths[model] or figures or [FIRST_ANSWER_TOKENS])
        prompts = [result.prefill.computed_tokens for result in of_model] or [FIRST_PROMPT_TOKENS]
        job = PlannedJob("", model, 0, round(statistics.fmean(prompts)), round(mean))
        slots = [
            number for number, worker in enumerate(registrations) if worker.model == model for _ in range(worker.busy)
        ]
        try:
            prompts_waiting, answers_waiting = (jobs_waiting(client.broker, stage, model) for stage in BOTH_ROLES)
        except BrokerUnavailable:
            return None
        total = len(slots) + prompts_waiting + answers_waiting
        count = total if own is None else own[model]
        jobs = [replace(job, name=f"own {model} {number}") for number in range(count)]
        others = [replace(job, name=f"other {model} {number}") for number in range(total - count)]
        # First in, first out: until a batch has answers others' jobs are in front of its own, and then behind them.
        line = [*jobs, *others] if of_model else [*others, *jobs]
        running += zip(slots, line, strict=False)
        ready += line[len(slots) : len(slots) + answers_waiting]
        waiting += line[len(slots) + answers_waiting :]
    backlog = Backlog(waiting, ready, running)
    names = frozenset(job.name for job in backlog.jobs if job.name.startswith("own"))
    return Outlook(fleet, backlog, lengths, names) if names else None


def fleet_of_workers(settings: Settings, workers: Iterable[WorkerInfo]) -> tuple[Fleet, list[WorkerInfo]]:
    """The workers that take jobs, with what they have measured, else what the configuration says of their machines.

    And the registrations of its decoders. Without any rate a worker is left out. A process with one role is taken to
    have its machine for itself.
    """
    prefillers, decoders, registrations = [], [], []
    for worker in workers:
        if worker.off:
            continue
        machine = worker.host if set(worker.details.roles) == set(BOTH_ROLES) else worker.worker_id
        configured = _configured(settings, worker.host, worker.model, worker.role)
        if worker.role == "prefill":
            curves = [curve for curve in worker.details.prefill_curves if curve.model == worker.model]
            if rate := next(iter(curves), None) or worker.tokens_per_s or configured:
                prefillers.append(Prefiller(machine, worker.model, rate))
            continue
        found: dict[str, Rate] = {model: rate for model in worker.resident if (rate := worker.figures_for(model)[0])}
        found |= {curve.model: curve for curve in worker.details.decode_curves if curve.model in worker.resident}
        if configured:
            found.setdefault(worker.model, configured)
        if worker.model in found and worker.slots:
            decoders.append(Decoder(machine, worker.model, worker.slots, found))
            registrations.append(worker)
    fleet = Fleet(
        tuple(prefillers), tuple(decoders), prefill_overhead_s=PREFILL_OVERHEAD_S, decode_overhead_s=DECODE_OVERHEAD_S
    )
    return fleet, registrations


def _configured(settings: Settings, host: str, model: str, stage: str) -> Rate:
    """The rate of the configured machine that this host is, by name or by address; 0 where none is known."""
    short = host.split(".")[0]
    machines = [each for each in settings.machines.values() if short in (each.name, each.host.split(".")[0])]
    rates = rates_of(machines[0] if machines else MachineSettings(name=short, host=short), model)
    curve, rate = getattr(rates, f"{stage}_curve"), getattr(rates, stage)
    return RateCurve(model, *zip(*curve, strict=True)) if curve else rate
