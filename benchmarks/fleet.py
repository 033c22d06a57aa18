"""How near the real pipeline comes to an ideal fleet: RabbitMQ, Redis, worker processes, simulated engines.

Two Sparks prefill, two Macs decode, each at home with one model, with the team's rates; 150 submissions with two
prompts each, lengths drawn from the workload table, output lengths known to nobody before decoding. Time is scaled in
each row so that a decode takes one second of wall time in the median, and two with 8 slots a Mac: so every row asks of
this one computer the same number of jobs a second. All seconds below are wall seconds, from the
first publish to the last answer in the producer's hands; starting the processes is not part of it.

    makespan_s              of the real run, with stealing
    ideal_s                 of a simulation of the same decisions on the same draw, in which nothing but the engines
                            takes time and a decision is made the moment something changes
    ratio_to_ideal          makespan_s / ideal_s
    bound_s                 a lower bound of any schedule's makespan, whatever it knows (`kvasir.plan.bound`)
    ratio_to_bound          makespan_s / bound_s
    bound_lp_s, ratio_to_lp     the same two: the bound is the linear programme, or the longest single way
    students_per_hour       on the clock that is not scaled
    ratio_without_stealing  of the same run with workers that serve their home model alone, to ideal_s
    steals                  jobs that were decoded by another model's worker

Rows: 4 and 8 slots a Mac; one model with all the work (300 written feedbacks); answers of which the longest is ten
times the shortest; a worker that dies at half time; one that joins at a quarter. In the last two rows one Mac runs two
workers of two slots, so that somebody is left at home without stealing too. The run without stealing goes on at the
same time.

`contending` are the same mixes, and the team's fleet, with Sparks that do both and engines that slow each other. They
are simulated (`benchmarks.fleet_contending`, which says how); worst_ratio_to_lp is theirs.

What the rows of real processes do not show: batching that slows each sequence (a simulated slot has its rate whoever
sits beside it), workers with both roles, KV caches of true size, loading models, and a network.
"""

import math
import statistics
import sys
import tempfile
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from benchmarks import harness
from benchmarks.fleet_cluster import Cast, Mac, Measured, run
from benchmarks.fleet_draw import DrawnPrompt, PromptKind, draw
from kvasir.plan.bound import lower_bound
from kvasir.plan.fleet import PlannedJob
from kvasir.plan.simulate import SimulatedRun, Stealing, simulate
from kvasir.plan.workload import CODE_ANSWER_TOKENS, FEEDBACK_ANSWER_TOKENS
from tests.support.services import Pair

SUBMISSIONS, QUICK_SUBMISSIONS = 150, 25
MEDIAN_DECODE_S, QUICK_MEDIAN_DECODE_S = 1.0, 0.5
USUAL_SLOTS = 4  # of each Mac

# Tokens a second of one sequence (examples/kvasir.toml says where from). Wherever a Mac was not measured with a model,
# its rate follows from the other one's by the ratio of the two machines' memory bandwidths, 819 to 546 GB/s.
PREFILL = {"code": 1750.0, "feedback": 1000.0}
MAC1 = {"feedback": 28.0, "code": 97.0}
MAC2 = {"code": 65.0, "feedback": 18.7}


@dataclass(frozen=True, slots=True)
class Mix:
    """A row: which work, and which workers. `dies`, `joins`: when, as a share of the ideal makespan."""

    name: str
    slots: int = USUAL_SLOTS
    only: str = ""  # the one role that has all the work
    spread: float = 3.0
    dies: float = 0.0
    joins: float = 0.0


MIXES = (
    Mix("both models"),
    Mix("both models", slots=8),
    Mix("one model has all the work", only="feedback"),
    Mix("service times vary tenfold", spread=10.0),
    Mix("a worker dies half way", dies=0.5),
    Mix("a worker joins late", joins=0.25),
)


@dataclass(frozen=True, slots=True)
class FleetRow:
    """One mix, drawn and simulated, and what became of it."""

    mix: Mix
    cast: Cast
    prompts: list[DrawnPrompt]
    real: Measured
    alone: Measured | None

    @property
    def ideal(self) -> SimulatedRun:
        """With late workers at the moment at which they were really there."""
        return simulate(self.cast.fleet(self.real.joined_s), self._jobs(), Stealing())

    def figures(self) -> dict[str, object]:
        """As the last line wants them."""
        ideal_s = self.ideal.makespan_s
        bound_s = lower_bound(self.cast.fleet(self.real.joined_s), self._jobs())
        hours = self.real.makespan_s / self.cast.scale / 3600
        return {
            "mix": self.mix.name,
            "slots": self.mix.slots,
            "makespan_s": self.real.makespan_s,
            "ideal_s": ideal_s,
            "ratio_to_ideal": self.real.makespan_s / ideal_s,
            "bound_s": bound_s,
            "ratio_to_bound": self.real.makespan_s / bound_s,
            "bound_lp_s": bound_s,
            "ratio_to_lp": self.real.makespan_s / bound_s,
            "students_per_hour": len({prompt.job.name.split(".")[0] for prompt in self.prompts}) / hours,
            "ratio_without_stealing": self.alone.makespan_s / ideal_s if self.alone else None,
            "steals": self.real.stolen,
            "ideal_steals": self.ideal.steals,
            "median_decode_s": statistics.median(result.decode.decode_s for _, result in self.real.results),
        }

    def _jobs(self) -> list[PlannedJob]:
        return [prompt.job for prompt in self.prompts]


def prepare(mix: Mix, submissions: int, decode_s: float, seed: int) -> tuple[Cast, list[DrawnPrompt]]:
    """Who takes part, and the class, on a clock on which the median decode takes `decode_s` with `USUAL_SLOTS`."""
    answers = {"code": CODE_ANSWER_TOKENS, "feedback": FEEDBACK_ANSWER_TOKENS}
    kinds = {role: PromptKind(role, answer, mix.spread) for role, answer in answers.items()}
    # With one prompt of each submission it takes twice as many of them for as many jobs.
    prompts = [
        prompt
        for prompt in draw(submissions * (2 if mix.only else 1), kinds["code"], kinds["feedback"], seed)
        if mix.only in ("", prompt.job.model)
    ]
    jobs = [prompt.job for prompt in prompts]
    simulated = simulate(Cast(kinds, PREFILL, _macs(Mix("", mix.slots)), 1.0).fleet(), jobs, Stealing())
    decode_s *= mix.slots / USUAL_SLOTS
    scale = decode_s / statistics.median(timing.ended_s - timing.started_s for timing in simulated.timings)
    macs = tuple(_at(mac, simulated.makespan_s * scale) for mac in _macs(mix))
    return Cast(kinds, PREFILL, macs, scale), prompts


def _macs(mix: Mix) -> tuple[Mac, ...]:
    """`dies_s` and `joins_s` are shares of the makespan here; `_at` makes seconds of them."""
    if mix.dies or mix.joins:
        fate = {"dies_s": mix.dies} if mix.dies else {"joins_s": mix.joins}
        half = mix.slots // 2
        return (
            Mac("mac1", "feedback", mix.slots, MAC1),
            Mac("mac2", "code", half, MAC2),
            Mac("mac2b", "code", half, MAC2, **fate),
        )
    return (Mac("mac1", "feedback", mix.slots, MAC1), Mac("mac2", "code", mix.slots, MAC2))


def _at(mac: Mac, makespan_s: float) -> Mac:
    dies_s = mac.dies_s * makespan_s if mac.dies_s < math.inf else math.inf
    return replace(mac, dies_s=dies_s, joins_s=mac.joins_s * makespan_s)


def measure(pair: Pair, mix: Mix, submissions: int, decode_s: float, seed: int, alone: bool = True) -> FleetRow:
    """One row: the run with stealing and, at the same time, the one without."""
    cast, prompts = prepare(mix, submissions, decode_s, seed)
    with tempfile.TemporaryDirectory() as name, ThreadPoolExecutor(2) as both:
        real = both.submit(run, pair, Path(name, "steal"), cast, prompts, True)
        plain = both.submit(run, pair, Path(name, "alone"), cast, prompts, False) if alone else None
        return FleetRow(mix, cast, prompts, real.result(), plain.result() if plain else None)


def main() -> int:
    """Measure every row, explain, and end with the line of JSON."""
    options = harness.options(__doc__)
    print(harness.machine())
    quick = options.quick
    submissions, decode_s = (QUICK_SUBMISSIONS, QUICK_MEDIAN_DECODE_S) if quick else (SUBMISSIONS, MEDIAN_DECODE_S)
    rows = []
    with harness.pair() as pair:
        for mix in MIXES[:1] if quick else MIXES:
            rows.append(measure(pair, mix, submissions, decode_s, options.seed).figures())
            _print(rows[-1])
    worst = max(float(str(row["ratio_to_ideal"])) for row in rows)
    from benchmarks import fleet_contending  # which takes the mixes from here

    sizes = (fleet_contending.STUDENTS,) if quick else (fleet_contending.STUDENTS, fleet_contending.LARGE)
    contending = list(fleet_contending.rows(options.seed, sizes))
    for row in contending:
        print(fleet_contending.LINE.format(**row), flush=True)
    harness.finish(
        rows=rows,
        worst_ratio_to_ideal=worst,
        contending=contending,
        worst_ratio_to_lp=fleet_contending.worst(contending, fleet_contending.STUDENTS),
        submissions=submissions,
        seed=options.seed,
    )
    return 0


def _print(row: Mapping[str, object]) -> None:
    print(
        f"{row['mix']}, {row['slots']} slots: {row['makespan_s']:.1f} s, ideal {row['ideal_s']:.1f} s"
        f" ({row['ratio_to_ideal']:.3f}), bound {row['bound_s']:.1f} s ({row['ratio_to_bound']:.3f}),"
        f" {row['steals']} steals ({row['ideal_steals']} ideally);"
        f" without stealing {row['ratio_without_stealing']:.3f} of the ideal",
        flush=True,
    )


if __name__ == "__main__":
    sys.exit(main())
