"""The cluster in the form that the plan simulates: the fleet of kvasir.toml, or the workers and queues that run now."""

import itertools
import statistics
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import replace
from operator import itemgetter

from decode_worker.stealing.models import FIRST_LOAD_BYTES_PER_S
from decode_worker.stealing.queue_forecast import FIRST_ANSWER_TOKENS
from infra.broker.base import Broker
from infra.broker.topology import jobs_waiting, lane_queues
from infra.config.schema import Points, Rates
from infra.config.settings import MachineRole, MachineSettings, ModelSettings, Settings
from kvasir.plan.finish import Remainder
from kvasir.plan.fleet import Decoder, Fleet, PlannedJob, Prefiller, Rate, with_another
from kvasir.plan.simulate import Backlog
from kvasir.worker.stealables import SHARE_FOR_WEIGHTS
from messages.errors import BrokerUnavailable, ConfigError
from messages.workers import BOTH_ROLES, RateCurve, WorkerInfo
from producers.batch.batch import Batch
from producers.client import Client

# Seconds that a job takes at prefill and in a decode slot, in addition to the engine's work. A few milliseconds of
# them are needed to start and end the engine's run, and to pass the job between the stages (benchmarks.overhead).
PREFILL_OVERHEAD_S = 0.01
DECODE_OVERHEAD_S = 0.01
# Assumed length of a prompt without the part that the class shares, until a prompt has been measured.
FIRST_PROMPT_TOKENS = 4000
LIKELY = 0.9  # if the chance of meeting the deadline is below this, `expectation` says what would help
LAST_RESULTS = 200  # a batch's answer lengths are estimated from this many of its latest results


def expectation(settings: Settings, client: Client, batch: Batch, deadline: float = 0.0) -> str:
    """Return when the batch will be done, in words; "" if that is unknown.

    With a `deadline` in seconds since the epoch, the text adds the chance of making it, and what would help if that is
    small.
    """
    try:
        remainder = remainder_of(settings, client, batch)
    except BrokerUnavailable:
        return ""
    finish = remainder.finish()
    if not finish or not deadline:
        return finish.words() if finish else ""
    seconds = deadline - time.time()
    words = f"{finish.words()}; {finish.chance(seconds):.0%} chance to make the deadline"
    if finish.chance(seconds) >= LIKELY:
        return words
    machine = max(remainder.fleet.decoders, key=lambda decoder: decoder.full_rate(decoder.model)).machine
    larger_finish = replace(remainder, fleet=with_another(remainder.fleet, machine)).finish()
    chance = f" ({larger_finish.chance(seconds):.0%})" if larger_finish else ""
    helps = f"another machine like {machine}{chance}, shorter feedback"
    return f"{words}; what would help: {helps}{', --ask together' if batch.request.get('ask') == 'criteria' else ''}"


def remainder_of(settings: Settings, client: Client, batch: Batch | None = None) -> Remainder:
    """Return what is left of the batch; without a batch, everything that waits or is being decoded.

    Raises BrokerUnavailable.
    """
    job_ids = [job_id for job_id, state in batch.states.items() if state == "succeeded"] if batch else []
    results = [result for job_id in job_ids[-LAST_RESULTS:] if batch and (result := batch.result(job_id))]
    counts = Counter(entry.model for entry in batch.open_jobs.values()) if batch else None
    fleet, registrations = fleet_of_workers(settings, client.workers())
    remainder = Remainder(fleet, Backlog([], [], []), {}, set())
    for model in settings.models if counts is None else counts:
        lengths = [result.decode.completion_tokens for result in results if result.model == model]
        prompts = [result.prefill.computed_tokens for result in results if result.model == model]
        measured_lengths = [tokens for worker in registrations if (tokens := worker.figures_for(model)[1])]
        mean = statistics.fmean(lengths or measured_lengths or [FIRST_ANSWER_TOKENS])
        job = PlannedJob("", model, 0, round(statistics.fmean(prompts or [FIRST_PROMPT_TOKENS])), round(mean))
        prompt_count, ready_count = (jobs_waiting(client.broker, stage, model) for stage in BOTH_ROLES)
        busy_counts = [worker.busy if worker.model == model else 0 for worker in registrations]
        total = sum(busy_counts) + ready_count + prompt_count
        batch_jobs = [
            replace(job, name=f"{model} {number}") for number in range(total if counts is None else counts[model])
        ]
        # If batches take turns, each has its own queue, and their jobs alternate. If they share a queue, it serves one
        # batch after the other. In that case, while this batch has no answers, the other batches' jobs are assumed to
        # be ahead of its own; once it has answers, they are assumed to be behind. Jobs far behind are left out, because
        # they can't delay the batch.
        foreign_count = min(total, 10 * len(batch_jobs) if lengths else total) - len(batch_jobs)
        others = max(0, _turns_taken(client.broker, model) - 1)
        foreign_jobs = [
            replace(job, name=f"other {model} {number}", prefix=f"other {number % others}" if others else "")
            for number in range(foreign_count)
        ]
        first_place = 0 if others else len(batch_jobs) if lengths else -foreign_count
        places = [*range(len(batch_jobs)), *(first_place + number // (others or 1) for number in range(foreign_count))]
        queued_jobs = sorted(zip(places, [*batch_jobs, *foreign_jobs], strict=True), key=itemgetter(0))
        line = (job for _, job in queued_jobs)
        remainder.lengths[model] = lengths
        remainder.names.update(job.name for job in batch_jobs)
        for number, count in enumerate(busy_counts):
            remainder.backlog.running_jobs.extend((number, job) for job in itertools.islice(line, count))
        remainder.backlog.ready_jobs.extend(itertools.islice(line, ready_count))
        remainder.backlog.waiting_jobs.extend(line)
    return remainder


def _turns_taken(broker: Broker, model: str) -> int:
    """Return how many batches are waiting, as far as each has a turn."""
    return max(sum(broker.ready(name) > 0 for name in lane_queues(stage, model, "bulk")) for stage in BOTH_ROLES)


def fleet_of_workers(settings: Settings, workers: Iterable[WorkerInfo]) -> tuple[Fleet, list[WorkerInfo]]:
    """Return the workers that take jobs and have a known rate, and the registrations of its decoders in the same order.

    A process with only one role is assumed to have its machine to itself.
    """
    rated_workers = [(worker, rates) for worker in workers if not worker.off and (rates := _rates(settings, worker))]
    prefillers = [
        Prefiller(_machine(worker), worker.model, rates[worker.model])
        for worker, rates in rated_workers
        if worker.role == "prefill"
    ]
    decode_workers = [(worker, rates) for worker, rates in rated_workers if worker.role == "decode" and worker.slots]
    # As in the policy, a worker that has not decoded a model yet is assumed to be as fast as the model's own workers.
    home_rates = {worker.model: rates[worker.model] for worker, rates in decode_workers}
    decoders = [
        Decoder(
            _machine(worker),
            worker.model,
            worker.slots,
            rates | {name: home_rates[name] for name in worker.details.steals if name in home_rates.keys() - rates},
            {name: _load_s(settings.model(name)) for name in settings.models if name not in worker.resident},
        )
        for worker, rates in decode_workers
    ]
    overheads = PREFILL_OVERHEAD_S, DECODE_OVERHEAD_S
    return Fleet(tuple(prefillers), tuple(decoders), {}, *overheads), [worker for worker, _ in decode_workers]


def _machine(worker: WorkerInfo) -> str:
    return worker.host if set(worker.details.roles) == set(BOTH_ROLES) else worker.worker_id


def _rates(settings: Settings, worker: WorkerInfo) -> dict[str, Rate]:
    """Return the rates by model: measured curves first, then measured rates, then those of the configuration.

    The result is {} if the rate of the worker's own model is unknown.
    """
    is_prefill = worker.role == "prefill"
    rates: dict[str, Rate] = {}
    for machine in settings.machines.values():
        if machine.is_called(worker.host) and worker.model in machine.rates:
            rates[worker.model] = as_rate(worker.model, machine.rates[worker.model].of(worker.role))
    resident = () if is_prefill else worker.resident
    figures = {worker.model: worker.tokens_per_s} | {model: worker.figures_for(model)[0] for model in resident}
    curves = worker.details.prefill_curves if is_prefill else worker.details.decode_curves
    rates |= {model: rate for model, rate in figures.items() if rate}
    rates |= {curve.model: curve for curve in curves if curve.model in (worker.model, *resident)}
    return {model: rate for model, rate in rates.items() if rate} if rates.get(worker.model) else {}


def fleet_of(settings: Settings, models: Sequence[str], steal: bool) -> Fleet:
    """Return the workers for these models on the configured machines.

    Raises ConfigError if a worker or a rate is missing.
    """
    if not settings.machines:
        raise ConfigError(
            "no machines are configured: for each machine, add a table [machines.NAME] with roles and rates to "
            "kvasir.toml (see examples/kvasir.toml)"
        )
    pairs = [
        (machine, replace(role, role=stage))
        for machine in settings.machines.values()
        for role in machine.roles
        for stage in role.stages
    ]
    prefillers = [
        Prefiller(machine.name, role.model, _rate(machine, role))
        for machine, role in pairs
        if role.role == "prefill" and role.model in models
    ]
    decoders = [
        _decoder(settings, machine, role, models if steal else [role.model])
        for machine, role in pairs
        if role.role == "decode" and role.model in models
    ]
    for stage, served_models in (("prefill", {p.model for p in prefillers}), ("decode", {d.model for d in decoders})):
        for model in models:
            if model not in served_models:
                raise ConfigError(
                    f"no machine has the role {stage} for {model}: add the role to a machine in [machines.NAME]"
                )
    byte_s = _byte_s(settings)
    per_token = {name: settings.model(name).kv_bytes_per_token * byte_s for name in models}
    return Fleet(
        tuple(prefillers),
        tuple(decoders),
        per_token,
        PREFILL_OVERHEAD_S,
        DECODE_OVERHEAD_S,
        kv_state_s={name: settings.model(name).kv_state_bytes * byte_s for name in models},
    )


def _decoder(settings: Settings, machine: MachineSettings, role: MachineRole, models: Sequence[str]) -> Decoder:
    home = settings.model(role.model)
    guests = [
        name
        for name in models
        if machine.rates.get(name, Rates()).of("decode") and _fits_memory(machine, home, settings.model(name))
    ]
    usable_rates = {name: _rate(machine, replace(role, model=name)) for name in [role.model, *guests]}
    load_s = {name: _load_s(settings.model(name)) for name in usable_rates}
    return Decoder(machine.name, role.model, role.slots or home.slots, usable_rates, load_s)


def _load_s(model: ModelSettings) -> float:
    """Return how long it takes to load a model."""
    return model.memory_gb * 1e9 / FIRST_LOAD_BYTES_PER_S


def _rate(machine: MachineSettings, role: MachineRole) -> Rate:
    """Return a rate from kvasir.toml. Raises ConfigError if it is missing."""
    if not (rate := machine.rates.get(role.model, Rates()).of(role.role)):
        raise ConfigError(
            f"the {role.role} rate of {role.model} on {machine.name} is not known: set "
            f'rates."{role.model}".{role.role} (tokens a second) in [machines.{machine.name}]'
        )
    return as_rate(role.model, rate)


def as_rate(model: str, rate: Points | float) -> Rate:
    """Convert a rate of kvasir.toml to the simulation's form."""
    return RateCurve(model, *zip(*rate, strict=True)) if isinstance(rate, tuple) else rate


def _fits_memory(machine: MachineSettings, home: ModelSettings, guest: ModelSettings) -> bool:
    """Whether a machine could hold both models. A model of unknown size is assumed to fit."""
    if not machine.memory_gb:
        return True
    store = sum(role.memory_gb for role in machine.roles)
    return home.memory_gb + guest.memory_gb <= SHARE_FOR_WEIGHTS * (machine.memory_gb - store)


def _byte_s(settings: Settings) -> float:
    """Return the seconds per byte from the store to a decoder over the slowest link, or 0 if unknown."""
    links = [
        machine.link_gbps
        for machine in settings.machines.values()
        if machine.link_gbps and any(role.role == "decode" for role in machine.roles)
    ]
    return 8 / (min(links) * 1e9) if links else 0.0
