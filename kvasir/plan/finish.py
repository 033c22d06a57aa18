"""Predicts when a batch will be done: simulates what is left of it several times, and gives an interval.

The simulation is that of the plan (`kvasir.plan.simulate`), but begins with the cluster's current state. In each draw
the machines are a few percent faster or slower than measured, and the remaining answers are drawn from those so far.
The interval comes from the spread of the draws, and from what no draw knows (workers that come and go).
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
# Standard deviation of log(true rate / measured rate) of a machine.
RATE_SPREAD = 0.03
# A value above 1 means that more of the running answers have just begun than are nearly done. The reason is that
# answers stand still while their machine prefills.
YOUNG = 1.3
CLASS_SPREAD = 0.1  # spread of a class's mean answer length around the mean of earlier classes
UNKNOWN_SPREAD = 0.07  # what unknowns add to the time's spread; fitted on 244 nights simulated by `benchmarks.finish`
ENOUGH_ANSWERS = 8  # with fewer answers than this, lengths are drawn around a mean
MOST_PROMPTS = 400  # at most this many prompts are simulated, because thousands would take thousands of seconds
SHARE = 0.9  # this share of the predicted intervals should contain the true time


@dataclass(frozen=True, slots=True)
class Finish:
    """When jobs will be done, in seconds from now.

    The interval contains the true time 9 times in 10 (`benchmarks.finish`).
    """

    left_s: float
    spread: float  # standard deviation of the logarithm of the time

    @property
    def interval_s(self) -> tuple[float, float]:
        """The beginning and the end of the interval."""
        factor = math.exp(statistics.NormalDist(0, self.spread).inv_cdf((1 + SHARE) / 2))
        return self.left_s / factor, self.left_s * factor

    def chance(self, seconds: float) -> float:
        """Return the probability that the jobs are done within this many seconds."""
        return statistics.NormalDist(math.log(self.left_s), self.spread).cdf(math.log(max(seconds, 1e-9)))

    def words(self) -> str:
        """Describe the prediction: `about 3 h 05 min left (90%: 2 h 51 min to 3 h 22 min)`."""
        low, high = map(duration, self.interval_s)
        return f"about {duration(self.left_s)} left ({SHARE:.0%}: {low} to {high})"


@dataclass(frozen=True, slots=True)
class Remainder:
    """What is left of a batch, or of all batches, and what is known about it.

    Attributes:
        backlog: all jobs that wait or are decoded now. Their `answer_tokens` are means, used if few answers are known.
            Nobody knows how far a running answer is, so its tokens are those of the whole answer.
        lengths: tokens of the batch's answers so far, by model.
        names: names of the batch's jobs; the rest of the backlog belongs to others.
    """

    fleet: Fleet
    backlog: Backlog
    lengths: dict[str, list[int]]
    names: set[str]

    def finish(self, seed: int = 0) -> Finish | None:
        """Predict when the batch will be done.

        Returns None if nothing is left, or if a model has no worker with a known rate.
        """
        source = random.Random(seed)
        ends_s = [self._end_s(random.Random(source.random())) for _ in range(DRAWS)]
        if not all(0 < end_s < math.inf for end_s in ends_s):
            return None
        logarithms = [math.log(end_s) for end_s in ends_s]
        spread = math.hypot(statistics.stdev(logarithms), UNKNOWN_SPREAD)
        return Finish(math.exp(statistics.fmean(logarithms)), spread)

    def _end_s(self, source: random.Random) -> float:
        """Return the end in one draw; inf if some job is never answered.

        Of a long queue only two lengths are simulated. The time for the rest follows from their difference.
        """
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
        """Return the same jobs, each with a random answer length.

        Answers are drawn from the class's answers so far: as many as there are, which reflects how well their mean is
        known, and one more for each running job. Of jobs that began together the short ones end first, so without these
        extra draws the mean would be too low.
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
    """Choose at most `most` of the jobs, spread evenly; the last job is always included."""
    return jobs if len(jobs) <= most else [jobs[(place + 1) * len(jobs) // most - 1] for place in range(most)]
