"""When a batch will be done: what is left of it, simulated several times over, in words and with an interval.

The simulation is that of the plan (`kvasir.plan.simulate`), begun where the cluster is now. Each time the machines are
a few percent faster or slower than they were measured, and the answers that are still to come are drawn from those that
have come. What the draws differ by, and what no draw knows (workers that come and go), makes the interval.
"""

import math
import random
import statistics
from collections import Counter, defaultdict
from dataclasses import dataclass, replace

from desk.estimate import duration
from kvasir.plan import workload
from kvasir.plan.fleet import Fleet, PlannedJob
from kvasir.plan.simulate import Backlog, Stealing, simulate, with_rates

DRAWS = 6
RATE_SPREAD = 0.03  # spread of a machine's true rates around the measured ones: standard deviation of logarithms
YOUNG = 1.3  # answers that run are more often young than old: they stand still while their machine prefills
CLASS_SPREAD = 0.1  # spread of a class's mean answer around earlier classes
UNKNOWN_SPREAD = 0.07  # spread of the time by what no draw knows, fitted on nights 7000 to 7243 of `benchmarks.finish`
ENOUGH_ANSWERS = 8  # to draw from: with fewer, lengths are possible_backlog around a mean
MOST_PROMPTS = 400  # prompts that are simulated: thousands would take as many seconds
SHARE = 0.9  # share of the intervals that should hold the truth


@dataclass(frozen=True, slots=True)
class Finish:
    """When jobs will be done, in seconds from now; the interval holds the truth 9 times in 10 (`benchmarks.finish`)."""

    left_s: float
    spread: float  # standard deviation of the time's logarithm

    @property
    def interval_s(self) -> tuple[float, float]:
        """Where it begins and ends."""
        factor = math.exp(statistics.NormalDist(0, self.spread).inv_cdf((1 + SHARE) / 2))
        return self.left_s / factor, self.left_s * factor

    def chance(self, seconds: float) -> float:
        """That they are done within so many seconds, 0 to 1."""
        return statistics.NormalDist(math.log(self.left_s), self.spread).cdf(math.log(max(seconds, 1e-9)))

    def words(self) -> str:
        """`about 3 h 05 min left (90%: 2 h 51 min to 3 h 22 min)`."""
        low, high = map(duration, self.interval_s)
        return f"about {duration(self.left_s)} left ({SHARE:.0%}: {low} to {high})"


@dataclass(frozen=True, slots=True)
class Remainder:
    """What is left of a batch, or of all batches, and what is known of it.

    Attributes:
        backlog: everything that waits or is decoded now. `answer_tokens` are means, around which lengths are drawn
            where few answers are known; nobody knows how far a running answer is, so its tokens are those of all of it.
        lengths: tokens of the batch's answers so far, by model.
        names: of the batch's jobs; the rest of the backlog is others'.
    """

    fleet: Fleet
    backlog: Backlog
    lengths: dict[str, list[int]]
    names: set[str]

    def finish(self, seed: int = 0) -> Finish | None:
        """When the batch will be done; None if nothing of it is left, or a model of it has no worker with a rate."""
        source = random.Random(seed)
        ends_s = [self._end_s(random.Random(source.random())) for _ in range(DRAWS)]
        if not all(0 < end_s < math.inf for end_s in ends_s):
            return None
        logarithms = [math.log(end_s) for end_s in ends_s]
        spread = math.hypot(statistics.stdev(logarithms), UNKNOWN_SPREAD)
        return Finish(math.exp(statistics.fmean(logarithms)), spread)

    def _end_s(self, source: random.Random) -> float:
        """In one draw; inf if some job is never answered. Of a long queue two parts are simulated: the rest follows."""
        factors = {machine: math.exp(source.gauss(0, RATE_SPREAD)) for machine in self.fleet.machines()}
        fleet, possible_backlog = with_rates(self.fleet, factors.__getitem__), self._draw_backlog(source)
        prompt_count, ends_s = len(self.backlog.waiting_jobs), []
        for count in (prompt_count,) if prompt_count <= MOST_PROMPTS else (MOST_PROMPTS, MOST_PROMPTS // 2):
            chosen_jobs = _spread_out(possible_backlog.waiting_jobs, count)
            run = simulate(fleet, replace(possible_backlog, waiting_jobs=chosen_jobs), Stealing(self.lengths))
            answered_s = {timing.job.name: timing.ended_s for timing in run.timings}
            jobs = [*(job for _, job in possible_backlog.running_jobs), *possible_backlog.ready_jobs, *chosen_jobs]
            ends_s.append(
                max((answered_s.get(job.name, math.inf) for job in jobs if job.name in self.names), default=0.0)
            )
        return ends_s[0] + max(0, prompt_count - MOST_PROMPTS) * (ends_s[0] - ends_s[-1]) / (MOST_PROMPTS // 2)

    def _draw_backlog(self, source: random.Random) -> Backlog:
        """The same jobs, each with an answer that it might have.

        From a class's answers so far others are drawn as often, which says how well their mean is known, and as many
        more as run: of those that began together the short ones are done first, so without them the mean would be low.
        """
        class_factors: dict[tuple[str, bool], float] = defaultdict(lambda: math.exp(source.gauss(0, CLASS_SPREAD)))
        running_counts = Counter(job.model for _, job in self.backlog.running_jobs if job.name in self.names)
        pools = {
            model: source.choices(tokens, k=len(tokens)) + source.choices(tokens, tokens, k=running_counts[model])
            for model, tokens in self.lengths.items()
            if len(tokens) >= ENOUGH_ANSWERS
        }

        def draw(job: PlannedJob, is_running: bool = False) -> PlannedJob:
            pool = pools.get(job.model) if job.name in self.names else None
            if not pool:
                mean = round(job.answer_tokens * class_factors[job.model, job.name in self.names])
                pool = [workload.draw_around(mean, source) for _ in range(ENOUGH_ANSWERS if is_running else 1)]
            part = 1 - source.random() ** YOUNG if is_running else 1.0
            tokens = part * source.choices(pool, pool if is_running else None)[0]
            return replace(job, answer_tokens=max(1, round(tokens)))

        return Backlog(
            [draw(job) for job in _spread_out(self.backlog.waiting_jobs, MOST_PROMPTS)],
            [draw(job) for job in self.backlog.ready_jobs],
            [(number, draw(job, is_running=True)) for number, job in self.backlog.running_jobs],
        )


def _spread_out(jobs: list[PlannedJob], most: int) -> list[PlannedJob]:
    """So many of them at most, evenly, with the last one."""
    return jobs if len(jobs) <= most else [jobs[(place + 1) * len(jobs) // most - 1] for place in range(most)]
