"""A lower bound of the makespan: no order of the same jobs on the same workers ends sooner, whatever is known.

It is the largest of

- for each model's prefill: all of its tokens at the speed of all its workers, and the quickest decode after it;
- for decode: the quickest prefill before it, and all tokens at the speed of all slots;
- for each job by itself: its own prefill and decode on the fastest workers.

Slots have different speeds for different models, so "all tokens at the speed of all slots" needs prices: with any
price for a token of each model, the slots can't earn more than the best-paid model brings each of them. Every choice of
prices gives a bound (the dual of a linear programme); those that make two models equally well paid on some worker are
tried. With two models that is the exact optimum.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence

from kvasir.plan.fleet import Decoder, Fleet, PlannedJob, computed_tokens, models_of

Prices = Mapping[str, float]


def lower_bound(fleet: Fleet, jobs: Sequence[PlannedJob]) -> float:
    """Seconds from time 0 that no schedule can beat; inf if a model has no worker, 0 if there are no jobs."""
    if not jobs:
        return 0.0
    prefill = max(_prefill_bound(fleet, [job for job in jobs if job.model == model]) for model in models_of(jobs))
    longest = max(_prefill_s(fleet, job) + _decode_s(fleet, job) for job in jobs)
    return max(prefill, _decode_bound(fleet, jobs), longest)


def _prefill_bound(fleet: Fleet, jobs: Sequence[PlannedJob]) -> float:
    """Of one model's jobs."""
    speed = sum(worker.tokens_per_s for worker in fleet.prefillers if worker.model == jobs[0].model)
    tail = min(_decode_s(fleet, job) for job in jobs)
    return (computed_tokens(jobs) / speed if speed else math.inf) + tail


def _decode_bound(fleet: Fleet, jobs: Sequence[PlannedJob]) -> float:
    head = min(_prefill_s(fleet, job) for job in jobs)
    tokens: dict[str, float] = defaultdict(float)
    for job in jobs:
        tokens[job.model] += job.answer_tokens
    return max(_earliest(fleet.decoders, prices, tokens, head) for prices in _prices(fleet.decoders, list(tokens)))


def _prices(decoders: Sequence[Decoder], models: Sequence[str]) -> Iterable[Prices]:
    for model in models:
        yield {model: 1.0}
    for worker in decoders:
        yield {model: 1 / rate for model in models if (rate := worker.tokens_per_s.get(model, 0.0)) > 0}


def _earliest(decoders: Sequence[Decoder], prices: Prices, tokens: Mapping[str, float], head: float) -> float:
    """When the slots have earned what the answers are worth, if each does nothing but what pays it best."""
    worth = sum(prices.get(model, 0.0) * count for model, count in tokens.items())
    earning = [(worker, worker.slots * _best_pay(worker, prices)) for worker in decoders]
    moments = sorted({head, *(max(head, t) for worker in decoders for t in (worker.joins_s, worker.dies_s))})
    earnings = 0.0
    for now, next_moment in zip(moments, [*moments[1:], math.inf], strict=True):
        pay = sum(rate for worker, rate in earning if worker.joins_s <= now < worker.dies_s)
        if pay and earnings + pay * (next_moment - now) >= worth:
            return now + (worth - earnings) / pay
        earnings += pay * (next_moment - now) if pay else 0.0
    return math.inf


def _best_pay(worker: Decoder, prices: Prices) -> float:
    return max((prices.get(model, 0.0) * rate for model, rate in worker.tokens_per_s.items()), default=0.0)


def _prefill_s(fleet: Fleet, job: PlannedJob) -> float:
    """At least: another job may have left the prefix behind, but some job computed it, and before."""
    speed = max((worker.tokens_per_s for worker in fleet.prefillers if worker.model == job.model), default=0.0)
    return job.prompt_tokens / speed if speed else math.inf


def _decode_s(fleet: Fleet, job: PlannedJob) -> float:
    rate = max((worker.tokens_per_s.get(job.model, 0.0) for worker in fleet.decoders), default=0.0)
    return job.answer_tokens / rate if rate else math.inf
