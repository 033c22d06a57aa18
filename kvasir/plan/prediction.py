"""The numbers that the simulation gives for a class on a cluster."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, replace

from infra.config.settings import Settings
from kvasir.plan.bound import lower_bound
from kvasir.plan.fleet import Fleet, PlannedJob, computed_tokens, models_of, with_another
from kvasir.plan.simulate import SimulatedRun, typical
from messages.errors import ConfigError


@dataclass(frozen=True, slots=True)
class BusyShare:
    """The share of the makespan in which a machine's stage was busy. For decode it is the mean of its slots."""

    machine: str
    stage: str
    share: float


@dataclass(frozen=True, slots=True)
class WhatIf:
    """The same class with one more machine of this kind."""

    machine: str
    stages: str
    makespan_s: float
    saves_s: float


@dataclass(frozen=True, slots=True)
class LoneRequest:
    """A single request on an idle cluster whose store has the shared part. Lengths are the class's medians."""

    model: str
    prefill_s: float
    kv_transfer_s: float
    decode_s: float

    @property
    def latency_s(self) -> float:
        """The time from the prompt to the last token."""
        return self.prefill_s + self.kv_transfer_s + self.decode_s


@dataclass(frozen=True, slots=True)
class Prediction:
    """The prediction. A field is None if the configuration lacks what it depends on."""

    submissions: int
    jobs: int
    prompt_tokens: int
    computed_tokens: int  # prompt tokens to compute; each model's shared parts count once
    answer_tokens: int
    makespan_s: float
    without_stealing_s: float
    bound_s: float | None  # None if SciPy is missing
    steals: int
    limit: str
    busy: tuple[BusyShare, ...]
    link_share: float | None  # share of the makespan during which the slowest link carries KV
    lone: tuple[LoneRequest, ...]
    what_if: tuple[WhatIf, ...]
    energy_kwh: float | None
    electricity: float | None
    hardware: float | None

    @property
    def students_per_hour(self) -> float:
        """Submissions an hour."""
        return self.submissions * 3600 / self.makespan_s

    @property
    def machine_shares(self) -> dict[str, float]:
        """The share of the makespan in which each machine is busy: of both stages together, at most 1."""
        return {
            busy.machine: min(1.0, sum(stage.share for stage in self.busy if stage.machine == busy.machine))
            for busy in self.busy
        }

    @property
    def utilisation(self) -> float:
        """The mean of the machines' busy shares."""
        return statistics.fmean(self.machine_shares.values())

    @property
    def one_by_one_s(self) -> float:
        """The time for the class if each request waits for the one before, with both models in turn."""
        return sum(lone.latency_s for lone in self.lone) * self.jobs / len(self.lone)

    @property
    def cost(self) -> float | None:
        """The cost of electricity, plus the machines' share if their prices are known."""
        if self.electricity is None:
            return self.hardware
        return self.electricity + (self.hardware or 0.0)


def predict(settings: Settings, fleet: Fleet, jobs: Sequence[PlannedJob], submissions: int) -> Prediction:
    """Simulate the class. `jobs` must not be empty."""
    run = typical(fleet, jobs)
    makespan_s = run.makespan_s
    energy_kwh = _energy_kwh(settings, fleet, makespan_s)
    price = settings.costs.price_per_kwh
    return Prediction(
        submissions=submissions,
        jobs=len(jobs),
        prompt_tokens=sum(job.prompt_tokens for job in jobs),
        computed_tokens=computed_tokens(jobs),
        answer_tokens=sum(job.answer_tokens for job in jobs),
        makespan_s=makespan_s,
        without_stealing_s=typical(_at_home(fleet), jobs).makespan_s,
        bound_s=_bound_s(fleet, jobs),
        steals=run.steals,
        limit=_limit(fleet, run, jobs),
        busy=_busy_shares(fleet, run),
        link_share=_link_s(fleet, jobs) / makespan_s if any(fleet.kv_transfer_s.values()) else None,
        lone=tuple(
            _lone_request_latency(fleet, [job for job in jobs if job.model == model]) for model in models_of(jobs)
        ),
        what_if=tuple(_what_if(fleet, jobs, name, makespan_s) for name in fleet.machines()),
        energy_kwh=energy_kwh,
        electricity=energy_kwh * price if energy_kwh is not None and price else None,
        hardware=_hardware(settings, fleet, makespan_s),
    )


def _at_home(fleet: Fleet) -> Fleet:
    """Return the same workers, each with only its home model."""
    decoders = [
        replace(decoder, tokens_per_s={decoder.model: decoder.tokens_per_s[decoder.model]})
        for decoder in fleet.decoders
    ]
    return replace(fleet, decoders=tuple(decoders))


def _bound_s(fleet: Fleet, jobs: Sequence[PlannedJob]) -> float | None:
    try:
        return lower_bound(fleet, jobs)
    except ConfigError:
        return None


def _busy_shares(fleet: Fleet, run: SimulatedRun) -> tuple[BusyShare, ...]:
    """Return the busy shares.

    For several decode workers of a machine it is their mean; it decodes nothing while it prefills.
    """
    busy_shares = []
    for (stage, machine), seconds in sorted(run.busy_s.items(), key=lambda item: item[0][::-1]):
        count = sum(worker.machine == machine for worker in fleet.decoders) if stage == "decode" else 1
        busy_shares.append(BusyShare(machine, stage, seconds / count / run.makespan_s))
    return tuple(busy_shares)


def _limit(fleet: Fleet, run: SimulatedRun, jobs: Sequence[PlannedJob]) -> str:
    """Return in a few words what is busy for the largest share of the time: a stage, or the link."""
    busy = _busy_shares(fleet, run)
    busiest = max(busy, key=lambda entry: entry.share)
    link_share = _link_s(fleet, jobs) / run.makespan_s
    if link_share > busiest.share:
        return f"the link to the decoders: at work {link_share:.0%} of the time"
    alike = [entry.machine for entry in busy if entry.stage == busiest.stage and entry.share > 0.9 * busiest.share]
    return f"{busiest.stage} on {' and '.join(alike)}: at work {busiest.share:.0%} of the time"


def _link_s(fleet: Fleet, jobs: Sequence[PlannedJob]) -> float:
    """Return the seconds for all KV caches over one link. Decoders keep the shared part, so each gets it only once."""
    own_s = sum(fleet.kv_s(job.model, job.own_tokens) for job in jobs)
    shared_s = {job.model: fleet.kv_s(job.model, job.shared_tokens, prompts=0) for job in jobs}
    return own_s + len(fleet.decoders) * sum(shared_s.values())


def _lone_request_latency(fleet: Fleet, jobs: Sequence[PlannedJob]) -> LoneRequest:
    model = jobs[0].model
    own_tokens = statistics.median(job.own_tokens for job in jobs)
    answer = statistics.median(job.answer_tokens for job in jobs)
    home = [worker for worker in fleet.decoders if worker.model == model]
    return LoneRequest(
        model,
        own_tokens / max(worker.rate(own_tokens) for worker in fleet.prefillers if worker.model == model),
        fleet.kv_s(model, own_tokens),
        answer / max(worker.paces({model: 1})[model] for worker in home),
    )


def _what_if(fleet: Fleet, jobs: Sequence[PlannedJob], machine: str, makespan_s: float) -> WhatIf:
    larger_fleet = with_another(fleet, machine)
    prefillers, decoders = (
        [worker for worker in workers if worker.machine == machine] for workers in (fleet.prefillers, fleet.decoders)
    )
    after_s = typical(larger_fleet, jobs).makespan_s
    stages = [f"prefill of {prefiller.model}" for prefiller in prefillers] + [
        f"decode, {decoder.model} at home" for decoder in decoders
    ]
    return WhatIf(machine, ", ".join(stages), after_s, makespan_s - after_s)


def _energy_kwh(settings: Settings, fleet: Fleet, seconds: float) -> float | None:
    """Return the energy if every machine draws its full power all the time, which is an upper bound.

    Returns None if the watts of a machine are unknown.
    """
    watts = [settings.machines[name].watts for name in fleet.machines()]
    return sum(watts) * seconds / 3.6e6 if all(watts) else None


def _hardware(settings: Settings, fleet: Fleet, seconds: float) -> float | None:
    """Return the machines' prices, spread over the hours of their use; None if some price is unknown."""
    prices = [settings.machines[name].price for name in fleet.machines()]
    hours = settings.costs.years * 52 * settings.costs.hours_per_week
    return sum(prices) / hours * seconds / 3600 if all(prices) else None
