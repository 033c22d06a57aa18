"""The jobs and workers of a simulation. Times are in seconds, rates in tokens per second."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache

from messages.workers import RateCurve

Rate = RateCurve | float


@dataclass(frozen=True, slots=True)
class PlannedJob:
    """One prompt for one model. `answer_tokens` is the true length, which no scheduling decision may use."""

    name: str
    model: str
    shared_tokens: int  # tokens that all prompts of the class share; a model computes them once
    own_tokens: int
    answer_tokens: int
    prefix: str = ""  # name of the shared part, if a model has several shared parts

    @property
    def prompt_tokens(self) -> int:
        """The number of tokens of the whole prompt."""
        return self.shared_tokens + self.own_tokens


def models_of(jobs: Iterable[PlannedJob]) -> list[str]:
    """Return the names of the models, in order of appearance."""
    return list(dict.fromkeys(job.model for job in jobs))


def computed_tokens(jobs: Sequence[PlannedJob]) -> int:
    """Return how many prompt tokens prefill computes. Each shared part counts once for each model."""
    shared_tokens = {(job.model, job.prefix): job.shared_tokens for job in jobs}
    return sum(job.own_tokens for job in jobs) + sum(shared_tokens.values())


@dataclass(frozen=True, slots=True)
class Prefiller:
    """A prefill worker of one model. `tokens_per_s` is the machine's rate, by the prompt's length.

    Workers on one machine share it: the machine computes one prompt at a time, and decodes nothing meanwhile.
    """

    machine: str
    model: str
    tokens_per_s: Rate

    def rate(self, prompt_tokens: float) -> float:
        """Return tokens per second for a prompt of this length."""
        rate = self.tokens_per_s
        return rate.rate(prompt_tokens) if isinstance(rate, RateCurve) else rate

    @property
    def best_rate(self) -> float:
        """The rate for the prompt length that is computed fastest."""
        return max(self.tokens_per_s.tokens_per_s) if isinstance(self.tokens_per_s, RateCurve) else self.tokens_per_s


@dataclass(frozen=True, slots=True)
class Decoder:
    """A decode worker. `tokens_per_s` has its home model first, then the models that it may steal.

    If the rate is a number, it is that of each slot while all slots are busy, whatever the other slots do. If it is a
    curve, it is the rate of all sequences together, by their number; sequences of several models take turns, a token
    each.
    """

    machine: str
    model: str
    slots: int
    tokens_per_s: Mapping[str, Rate]
    load_s: Mapping[str, float] = field(default_factory=dict)  # model -> seconds to load it for stealing; 0 if missing
    joins_s: float = 0.0
    dies_s: float = math.inf

    @property
    def is_curved(self) -> bool:
        """Whether its sequences are known to slow each other down."""
        return any(isinstance(rate, RateCurve) for rate in self.tokens_per_s.values())

    def full_rate(self, model: str) -> float:
        """Return the highest rate for a model, all sequences together; 0 if the worker does not decode it."""
        rate = self.tokens_per_s.get(model, 0.0)
        return _best_total(rate, self.slots) if isinstance(rate, RateCurve) else rate * self.slots

    def paces(self, sequences: Mapping[str, int]) -> dict[str, float]:
        """Return the tokens per second of each sequence, by model, if this many of each model are decoded at once."""
        rates = {model: self.tokens_per_s[model] for model, count in sequences.items() if count}
        steps_s = {
            model: sequences[model] / rate.rate(sequences[model]) if isinstance(rate, RateCurve) else 1 / rate
            for model, rate in rates.items()
        }
        round_s = sum(steps_s.values())
        return {model: 1 / (round_s if self.is_curved else step_s) for model, step_s in steps_s.items()}


@lru_cache(maxsize=256)
def _best_total(curve: RateCurve, slots: int) -> float:
    return max(curve.rate(count) for count in range(1, slots + 1))


@dataclass(frozen=True, slots=True)
class Fleet:
    """All workers, and the cost of the way between them."""

    prefillers: tuple[Prefiller, ...]
    decoders: tuple[Decoder, ...]
    # model -> seconds to move one prompt token's KV from store to decoder
    kv_transfer_s: Mapping[str, float] = field(default_factory=dict)
    # time per job on the prefill worker, besides the engine's work
    prefill_overhead_s: float = 0.0
    # time per job in its decode slot, besides the engine's work
    decode_overhead_s: float = 0.0
    # model -> seconds to fetch a prompt's recurrent state, for hybrid models
    kv_state_s: Mapping[str, float] = field(default_factory=dict)

    def kv_s(self, model: str, tokens: float, prompts: int = 1) -> float:
        """Return the seconds that KV caches with this many tokens in total take from the store to a decoder."""
        return tokens * self.kv_transfer_s.get(model, 0.0) + prompts * self.kv_state_s.get(model, 0.0)

    def machines(self) -> list[str]:
        """Return the names of the machines, in order of appearance. A machine may run several workers."""
        names = [worker.machine for worker in self.prefillers] + [worker.machine for worker in self.decoders]
        return list(dict.fromkeys(names))


def with_another(fleet: Fleet, machine: str) -> Fleet:
    """Return the fleet with one more machine like this one, with the same workers."""
    prefillers = tuple(
        replace(worker, machine=f"{machine} 2") for worker in fleet.prefillers if worker.machine == machine
    )
    decoders = tuple(replace(worker, machine=f"{machine} 2") for worker in fleet.decoders if worker.machine == machine)
    return replace(fleet, prefillers=fleet.prefillers + prefillers, decoders=fleet.decoders + decoders)
