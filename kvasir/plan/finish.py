"""When a batch will be done: what is left of it, simulated several times over, in words and with an interval.

The simulation is that of the plan (`kvasir.plan.simulate`), begun where the cluster is now. Each time the machines are
a few percent faster or slower than they were measured, and the answers that are still to come are drawn from those that
have come. What the draws differ by, and what no draw knows (workers that come and go), makes the interval.
"""

import math
import random
import statistics
from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace

from desk.estimate import duration
from kvasir.plan import workload
from kvasir.plan.fleet import Fleet, PlannedJob
from kvasir.plan.simulate import Backlog, Stealing, simulate, with_rates

DRAWS = 6
RATE_SPREAD = 0.03  # of a machine's true rates around those measured, as a standard deviation of logarithms
YOUNG = 1.3  # answers that run are more often young than old: they stand still while their machine prefills
CLASS_SPREAD = 0.1  # of a class's mean answer around that of the classes before it
UNKNOWN_SPREAD = 0.07  # of the time itself, by what no draw knows
WIDER = 1.2  # a spread that is measured on so few draws is often too small
ENOUGH_ANSWERS = 8  # to draw from: with fewer, lengths are drawn around a mean
MOST_PROMPTS = 400  # that are simulated: a night's queue of thousands would take as many seconds
_SHARE = 0.9  # of the intervals are to hold the truth


@dataclass(frozen=True, slots=True)
class Finish:
    """When jobs will be done, in seconds from now; the interval holds the truth 9 times in 10 (`benchmarks.finish`)."""

    left_s: float
    spread: float  # standard deviation of the time's logarithm

    @property
    def low_s(self) -> float:
        """Where the interval begins."""
        return self._quantile((1 - _SHARE) / 2)

    @property
    def high_s(self) -> float:
        """Where it ends."""
        return self._quantile((1 + _SHARE) / 2)

    def chance(self, within_s: float) -> float:
        """That they are done within so many seconds, 0 to 1."""
        return self._logarithm().cdf(math.log(within_s)) if within_s > 0 else 0.0

    def words(self) -> str:
        """`about 3 h 05 min left (90%: 2 h 51 min to 3 h 22 min)`."""
        low, high = duration(self.low_s), duration(self.high_s)
        return f"about {duration(self.left_s)} left" + (f" ({_SHARE:.0%}: {low} to {high})" if low != high else "")

    def _quantile(self, share: float) -> float:
        return math.exp(self._logarithm().inv_cdf(share))

    def _logarithm(self) -> statistics.NormalDist:
        return statistics.NormalDist(math.log(self.left_s), self.spread)


def finish_of(
    fleet: Fleet, backlog: Backlog, lengths: Mapping[str, Sequence[int]], names: Collection[str], seed: int = 0
) -> Finish | None:
    """When the jobs of these names will be done; None if none of them is left, or nobody serves their models.

    Args:
        backlog: everything that waits or is decoded now. `answer_tokens` are means, around which lengths are drawn
            where few answers are known; nobody knows how far a running answer is, so its tokens are those of all of it.
        lengths: tokens of these jobs' answers so far, by model.
    """
    source = random.Random(seed)
    moments = [_end_s(fleet, backlog, lengths, names, source.random()) for _ in range(DRAWS)]
    if not all(0 < moment < math.inf for moment in moments):
        return None
    logarithms = [math.log(moment) for moment in moments]
    return Finish(
        math.exp(statistics.fmean(logarithms)), math.hypot(WIDER * statistics.stdev(logarithms), UNKNOWN_SPREAD)
    )


def _end_s(
    fleet: Fleet, backlog: Backlog, lengths: Mapping[str, Sequence[int]], names: Collection[str], seed: float
) -> float:
    """In one draw; inf if some job is never answered. Of a long queue two parts are simulated, and the rest follows."""
    ends_s = []
    for count in (MOST_PROMPTS, MOST_PROMPTS // 2) if len(backlog.waiting) > MOST_PROMPTS else (len(backlog.waiting),):
        step = len(backlog.waiting) / max(1, count)
        part = replace(backlog, waiting=[backlog.waiting[int((place + 1) * step) - 1] for place in range(count)])
        drawn = _drawn(part, lengths, names, random.Random(seed))
        factors = {
            machine: math.exp(random.Random(f"{seed}{machine}").gauss(0, RATE_SPREAD)) for machine in fleet.machines()
        }
        run = simulate(with_rates(fleet, factors.__getitem__), drawn, Stealing(lengths))
        ended_s = {timing.job.name: timing.ended_s for timing in run.timings}
        ends_s.append(max((ended_s.get(job.name, math.inf) for job in drawn.jobs if job.name in names), default=0.0))
    rest = len(backlog.waiting) - MOST_PROMPTS
    return ends_s[0] + rest * max(0.0, ends_s[0] - ends_s[-1]) / (MOST_PROMPTS // 2) if rest > 0 else ends_s[0]


def _drawn(
    backlog: Backlog, lengths: Mapping[str, Sequence[int]], names: Collection[str], source: random.Random
) -> Backlog:
    """The same jobs, each with an answer that it might have."""
    others: dict[tuple[str, bool], float] = defaultdict(lambda: math.exp(source.gauss(0, CLASS_SPREAD)))
    running = Counter(job.model for _, job in backlog.running if job.name in names)
    pools = {
        model: _resampled(tokens, running[model], source)
        for model, tokens in lengths.items()
        if len(tokens) >= ENOUGH_ANSWERS
    }

    def draw(job: PlannedJob, is_running: bool = False) -> PlannedJob:
        pool = pools.get(job.model) if job.name in names else None
        if not pool:
            mean = round(job.answer_tokens * others[job.model, job.name in names])
            pool = [workload.draw_around(mean, source) for _ in range(ENOUGH_ANSWERS)]
        tokens = source.choice(pool)
        if is_running:
            tokens = source.choices(pool, pool)[0] * (1 - source.random() ** YOUNG)
        return replace(job, answer_tokens=max(1, round(tokens)))

    return Backlog(
        [draw(job) for job in backlog.waiting],
        [draw(job) for job in backlog.ready],
        [(number, draw(job, is_running=True)) for number, job in backlog.running],
    )


def _resampled(tokens: Sequence[int], running: int, source: random.Random) -> list[int]:
    """As if other answers had come first, which says how well their mean is known; with so many that are not done yet.

    Without those, the answers so far would be too short: of those that began together the short ones are done first.
    """
    return source.choices(tokens, k=len(tokens)) + source.choices(tokens, tokens, k=running)
