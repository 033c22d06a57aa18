"""Makes the fleet to simulate from the machines in kvasir.toml."""

from collections.abc import Sequence
from dataclasses import replace

from decode_worker.stealing.models import FIRST_LOAD_BYTES_PER_S
from infra.config.schema import Points, Rates
from infra.config.settings import MachineRole, MachineSettings, ModelSettings, Settings
from kvasir.plan.fleet import Decoder, Fleet, Prefiller, Rate
from kvasir.worker.stealables import SHARE_FOR_WEIGHTS
from messages.errors import ConfigError
from messages.workers import RateCurve

# Seconds that each job takes besides the engine's work, at prefill and in a decode slot. The engine's start and end and
# the way between the stages take a few milliseconds (benchmarks.overhead).
PREFILL_OVERHEAD_S = 0.01
DECODE_OVERHEAD_S = 0.01


def fleet_of(settings: Settings, models: Sequence[str], steal: bool) -> Fleet:
    """Return the workers for these models on the configured machines.

    Raises ConfigError if a worker or a rate is missing.
    """
    if not settings.machines:
        raise ConfigError(
            "no machines are configured: add a table [machines.NAME] with roles and rates for each to "
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
                raise ConfigError(f"no machine has the role {stage} for {model}: add it to roles in [machines.NAME]")
    byte_s = _byte_s(settings)
    per_token = {name: settings.model(name).kv_bytes_per_token * byte_s for name in models}
    per_prompt = {name: settings.model(name).kv_state_bytes * byte_s for name in models}
    return Fleet(
        tuple(prefillers), tuple(decoders), per_token, PREFILL_OVERHEAD_S, DECODE_OVERHEAD_S, kv_state_s=per_prompt
    )


def _decoder(settings: Settings, machine: MachineSettings, role: MachineRole, models: Sequence[str]) -> Decoder:
    home = settings.model(role.model)
    guests = [
        name
        for name in models
        if machine.rates.get(name, Rates()).of("decode") and _fits_memory(machine, home, settings.model(name))
    ]
    usable_rates = {name: _rate(machine, replace(role, model=name)) for name in [role.model, *guests]}
    load_s = {name: settings.model(name).memory_gb * 1e9 / FIRST_LOAD_BYTES_PER_S for name in usable_rates}
    return Decoder(machine.name, role.model, role.slots or home.slots, usable_rates, load_s)


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
