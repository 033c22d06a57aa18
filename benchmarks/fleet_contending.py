"""How near workers with both roles come to what no schedule can beat, where a machine's engines contend. Simulated.

The plan's event-driven simulation (`kvasir.plan.simulate`) makes the decisions of the workers' own rules
(`decode_worker.stealing`) on machines of one capacity: sequences slow each other by a curve, models take turns, and
while a prompt is prefilled nothing is decoded. The Sparks' curves are llama.cpp's own table for the GB10. The Macs' are
made from the single rates of examples/kvasir.toml, taken to hold with four sequences, and a batch gain of 4.3 from 1 to
16 sequences as was published for an M4 Max: between, a power of the number. "The team's fleet" is that of
examples/kvasir.toml itself: there the Macs' slots keep their rates.

    makespan_s          as the plan has it: the median of simulations in which each rate is up to 1 % off
    bound_lp_s          the larger of the linear programme over each machine's time and the longest single way
    ratio_to_lp         makespan_s / bound_lp_s
    students_per_hour   of the makespan
    ratio_single_roles  the makespan of the same machines with Sparks that only prefill and Macs that only decode, to
                        makespan_s

    worst_ratio_to_lp         of the rows with 150 students
    worst_ratio_to_lp_large   of the rows with 600

What the figures do not show: processes, a broker, a store, and how well the curves describe real machines.
"""

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from unittest import mock

from benchmarks import harness
from benchmarks.fleet import MAC1, MAC2, MIXES, Mix
from kvasir.plan import workload
from kvasir.plan.bound import lower_bound
from kvasir.plan.cluster import DECODE_OVERHEAD_S, PREFILL_OVERHEAD_S
from kvasir.plan.fleet import Decoder, Fleet, PlannedJob, Prefiller, Rate
from kvasir.plan.simulate import Stealing, simulate, typical
from messages.workers import RateCurve

STUDENTS, LARGE = 150, 600
SPARK_SLOTS = 16
SPARK_PREFILL = {"code": 2890.0, "feedback": 1750.0}
SEQUENCES = (1.0, 4.0, 8.0, 16.0, 32.0)
SPARK_DECODE = {"code": (43.0, 73.0, 96.0, 122.0, 143.0), "feedback": (51.0, 80.0, 115.0, 150.0, 197.0)}
MAC_SLOTS = 4  # with which the Macs' single rates hold
MAC_GAIN = math.log(4.3) / math.log(16)
TEAM = Mix("the team's fleet")
LINE = (
    "{mix}, {slots} slots, {students} students: {makespan_s:.0f} s, bound {bound_lp_s:.0f} s ({ratio_to_lp:.3f}), "
    "{students_per_hour:.0f} students an hour; with single roles {ratio_single_roles:.2f} times as long"
)


def class_of(mix: Mix, students: int, seed: int) -> list[PlannedJob]:
    """The jobs of one row. With one prompt of each submission it takes twice as many of them for as many jobs."""
    with mock.patch.object(workload, "ANSWER_SPREAD", mix.spread):
        jobs = workload.draw_class(students * (2 if mix.only else 1), "code", "feedback", seed)
    return [job for job in jobs if mix.only in ("", job.model)]


def fleet_of(mix: Mix, both_roles: bool, fate_s: float = math.inf) -> Fleet:
    """The machines of one row; `fate_s`: when the worker joins or dies that the mix speaks of."""
    prefillers = [Prefiller("spark1", "code", SPARK_PREFILL["code"])]
    prefillers.append(Prefiller("spark2", "feedback", SPARK_PREFILL["feedback"]))
    decoders = _macs(mix, fate_s)
    if both_roles:
        prefillers.append(Prefiller("spark1", "feedback", SPARK_PREFILL["feedback"]))
        prefillers.append(Prefiller("spark2", "code", SPARK_PREFILL["code"]))
        curves: dict[str, Rate] = {model: RateCurve(model, SEQUENCES, rates) for model, rates in SPARK_DECODE.items()}
        decoders += [Decoder(machine, "feedback", SPARK_SLOTS, curves) for machine in ("spark1", "spark2")]
    return Fleet(
        tuple(prefillers),
        tuple(decoders),
        prefill_overhead_s=PREFILL_OVERHEAD_S,
        decode_overhead_s=DECODE_OVERHEAD_S,
    )


def _macs(mix: Mix, fate_s: float) -> list[Decoder]:
    mac1, mac2 = (_rates(mix, rates) for rates in (MAC1, MAC2))
    first = Decoder("mac1", "feedback", mix.slots, mac1)
    if not (mix.dies or mix.joins):
        return [first, Decoder("mac2", "code", mix.slots, mac2)]
    half = Decoder("mac2", "code", mix.slots // 2, mac2)
    # Two workers of one machine, which take turns on it
    other = replace(half, **({"dies_s": fate_s} if mix.dies else {"joins_s": fate_s}))
    return [first, half, other]


def _rates(mix: Mix, rates: Mapping[str, float]) -> Mapping[str, Rate]:
    if mix is TEAM:
        return rates
    return {
        model: RateCurve(model, SEQUENCES, tuple(MAC_SLOTS * rate * (n / MAC_SLOTS) ** MAC_GAIN for n in SEQUENCES))
        for model, rate in rates.items()
    }


def measure(mix: Mix, students: int, seed: int) -> dict[str, object]:
    """One row."""
    jobs = class_of(mix, students, seed)
    whole_s = simulate(fleet_of(replace(mix, dies=0, joins=0), True), jobs, Stealing()).makespan_s
    fate_s = whole_s * (mix.dies or mix.joins)

    def makespan_s(fleet: Fleet) -> float:
        return typical(fleet, jobs).makespan_s

    fleet = fleet_of(mix, True, fate_s)
    seconds, bound_s = makespan_s(fleet), lower_bound(fleet, jobs)
    return {
        "mix": mix.name,
        "slots": mix.slots,
        "students": students,
        "makespan_s": seconds,
        "bound_lp_s": bound_s,
        "ratio_to_lp": seconds / bound_s,
        "students_per_hour": len(jobs) / 2 * 3600 / seconds,
        "ratio_single_roles": makespan_s(fleet_of(mix, False, fate_s)) / seconds,
    }


def rows(seed: int, sizes: Sequence[int] = (STUDENTS, LARGE)) -> Iterator[dict[str, object]]:
    """All mixes, and the team's fleet, in every size."""
    for students in sizes:
        for mix in (*MIXES, TEAM):
            yield measure(mix, students, seed)


def worst(found: Sequence[Mapping[str, object]], students: int) -> float | None:
    """The largest ratio to the bound of the rows of a size; None: there are none."""
    ratios = [float(str(row["ratio_to_lp"])) for row in found if row["students"] == students]
    return max(ratios, default=None)


def main() -> int:
    """Simulate every row, explain, and end with the line of JSON."""
    options = harness.options(__doc__)
    found = []
    for row in rows(options.seed, (STUDENTS,) if options.quick else (STUDENTS, LARGE)):
        found.append(row)
        print(LINE.format(**row), flush=True)
    harness.finish(
        rows=found,
        worst_ratio_to_lp=worst(found, STUDENTS),
        worst_ratio_to_lp_large=worst(found, LARGE),
        seed=options.seed,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
