"""What is simulated: jobs, and the workers that serve them. Times in seconds, rates in tokens a second."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class PlannedJob:
    """One prompt for one model. `answer_tokens` is the truth, which no decision may look at."""

    name: str
    model: str
    shared_tokens: int  # the class-wide part: computed once for each model
    own_tokens: int
    answer_tokens: int
    prefix: str = ""  # names the class-wide part, where one model has several

    @property
    def prompt_tokens(self) -> int:
        """All of the prompt."""
        return self.shared_tokens + self.own_tokens


def models_of(jobs: Iterable[PlannedJob]) -> list[str]:
    """Names, in order of appearance."""
    return list(dict.fromkeys(job.model for job in jobs))


def computed_tokens(jobs: Sequence[PlannedJob]) -> int:
    """Prompt tokens that prefill computes: each class-wide part once for each model."""
    shared_tokens = {(job.model, job.prefix): job.shared_tokens for job in jobs}
    return sum(job.own_tokens for job in jobs) + sum(shared_tokens.values())


@dataclass(frozen=True, slots=True)
class Prefiller:
    """A prefill worker: one model, one job at a time."""

    machine: str
    model: str
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Decoder:
    """A decode worker. `tokens_per_s`: of each slot, by model; its home model first, the others it may steal."""

    machine: str
    model: str
    slots: int
    tokens_per_s: Mapping[str, float]
    load_s: Mapping[str, float] = field(default_factory=dict)  # to load a stolen model; absent: no time
    joins_s: float = 0.0
    dies_s: float = math.inf


@dataclass(frozen=True, slots=True)
class Fleet:
    """Workers, and what the way between them costs."""

    prefillers: tuple[Prefiller, ...]
    decoders: tuple[Decoder, ...]
    kv_transfer_s: Mapping[str, float] = field(default_factory=dict)  # per prompt token, store to decoder, by model
    prefill_overhead_s: float = 0.0  # a job, on the prefill worker
    decode_overhead_s: float = 0.0  # a job, on its slot
    kv_state_s: Mapping[str, float] = field(default_factory=dict)  # per prompt: a hybrid model's recurrent state

    def kv_s(self, model: str, tokens: float, prompts: int = 1) -> float:
        """Seconds that the KV caches of so many tokens in all take from the store to a decoder."""
        return tokens * self.kv_transfer_s.get(model, 0.0) + prompts * self.kv_state_s.get(model, 0.0)

    def machines(self) -> list[str]:
        """Names, in order of appearance; a machine may be home to several workers."""
        names = [worker.machine for worker in self.prefillers] + [worker.machine for worker in self.decoders]
        return list(dict.fromkeys(names))
