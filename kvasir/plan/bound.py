"""A lower bound of the makespan: no schedule of the same jobs on the same machines ends sooner.

This holds even for a schedule that knows all lengths in advance. The bound is the larger of

- a linear programme: each machine divides its time between what its workers can do (prefill a model, or decode a model
  in all slots), each at its best rate, until all tokens of each kind are done. A second spent on one kind of work is
  not available for another.
- the longest single job: its prefill and decode, each on the fastest worker.

Workers that join or die divide time into intervals. In each interval the machines divide their time again.
"""

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from kvasir.plan.fleet import Fleet, PlannedJob, computed_tokens, models_of
from messages.errors import ConfigError

Kind = tuple[str, str]  # a kind of work: (stage, model)


@dataclass(frozen=True, slots=True)
class Activity:
    """Work that a machine can do in one interval, at a rate in tokens per second.

    `part` is the share of the machine that it takes. If slots keep their rates regardless of others, workers share a
    machine.
    """

    interval: int
    machine: str
    kind: Kind
    rate: float
    part: float = 1.0


def lower_bound(fleet: Fleet, jobs: Sequence[PlannedJob]) -> float:
    """Return the time in seconds from 0 that no schedule can beat.

    It is inf if a model has no worker, and 0 if there are no jobs. Raises ConfigError if SciPy is not installed.
    """
    if not jobs:
        return 0.0
    longest_s = max(_prefill_s(fleet, job) + _decode_s(fleet, job) for job in jobs)
    return max(longest_s, linear_bound(fleet, jobs)) if longest_s < math.inf else math.inf


def linear_bound(fleet: Fleet, jobs: Sequence[PlannedJob]) -> float:
    """Return the linear programme's part of `lower_bound`."""
    work: dict[Kind, float] = {}
    for model in models_of(jobs):
        of_model = [job for job in jobs if job.model == model]
        work["prefill", model] = computed_tokens(of_model)
        work["decode", model] = sum(job.answer_tokens for job in of_model)
    fates = {moment for worker in fleet.decoders for moment in (worker.joins_s, worker.dies_s)}
    starts = [0.0, *sorted(moment for moment in fates if 0 < moment < math.inf)]
    for count, end_s in enumerate([*starts[1:], math.inf], 1):
        last_s = _last_interval_s(starts[:count], list(_activities(fleet, starts[:count])), work)
        if starts[count - 1] + last_s <= end_s:
            return starts[count - 1] + last_s
    return math.inf


def _activities(fleet: Fleet, starts: Sequence[float]) -> Iterator[Activity]:
    for interval, start_s in enumerate(starts):
        yield from (
            Activity(interval, prefiller.machine, ("prefill", prefiller.model), prefiller.best_rate)
            for prefiller in fleet.prefillers
        )
        present = [decoder for decoder in fleet.decoders if decoder.joins_s <= start_s < decoder.dies_s]
        workers = Counter(decoder.machine for decoder in present)
        for decoder in present:
            part = 1.0 if decoder.is_curved else 1 / workers[decoder.machine]
            yield from (
                Activity(interval, decoder.machine, ("decode", model), decoder.full_rate(model), part)
                for model in decoder.tokens_per_s
            )


def _last_interval_s(starts: Sequence[float], activities: Sequence[Activity], work: Mapping[Kind, float]) -> float:
    """Return how long the last interval must be to finish all work, or inf. The other intervals have fixed lengths.

    The variables are the seconds of each activity and the length of the last interval, which is minimised.
    """
    try:
        from scipy.optimize import linprog
    except ImportError:
        raise ConfigError(
            "the lower bound needs SciPy, which is missing: pip install 'kvasir-inference[plan]'"
        ) from None
    lengths_s = [after - before for before, after in itertools.pairwise(starts)]
    limits: dict[tuple[int, str], list[float]] = defaultdict(lambda: [0.0] * (len(activities) + 1))
    totals: dict[Kind, list[float]] = {kind: [0.0] * (len(activities) + 1) for kind, tokens in work.items() if tokens}
    for place, activity in enumerate(activities):
        limits[activity.interval, activity.machine][place] = activity.part
        if activity.kind in totals:
            totals[activity.kind][place] = activity.rate
    for (interval, _), row in limits.items():
        row[-1] = -1.0 if interval == len(lengths_s) else 0.0
    at_most = [lengths_s[interval] if interval < len(lengths_s) else 0.0 for interval, _ in limits]
    solution = linprog(
        [0.0] * len(activities) + [1.0],
        A_ub=list(limits.values()),
        b_ub=at_most,
        A_eq=list(totals.values()),
        b_eq=[work[kind] for kind in totals],
    )
    return float(solution.fun) if solution.success else math.inf


def _prefill_s(fleet: Fleet, job: PlannedJob) -> float:
    """Return the least time until the job is prefilled.

    If its prefix was reused, another job had to compute it before.
    """
    rates = [worker.rate(job.prompt_tokens) for worker in fleet.prefillers if worker.model == job.model]
    return job.prompt_tokens / max(rates) if rates else math.inf


def _decode_s(fleet: Fleet, job: PlannedJob) -> float:
    """Return the time in a slot of the fastest worker, if that worker decodes nothing else."""
    rates = [worker.paces({job.model: 1})[job.model] for worker in fleet.decoders if job.model in worker.tokens_per_s]
    return job.answer_tokens / max(rates) if rates else math.inf
