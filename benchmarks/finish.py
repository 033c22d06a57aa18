"""Whether a finish time can be believed: of the intervals that say 9 times in 10, how many hold the truth. Simulated.

Each night two to four classes of 40 to 200 students are submitted one after the other to the machines of a row of
`benchmarks.fleet_contending`, whose true rates are some 3 % off those that were measured. A class's answers are some
10 % longer or shorter on average than the team's. Each worker that only decodes crashes in one night of five, and is
mostly back within five minutes; the simulation knows no crash of one that prefills. One class of each night is asked
about, half way between its first and its last answer, with what its owner can see: the answers so far, what waits and
what is decoded where, and the workers that are there.

    coverage            share of the intervals that hold the truth; 0.9 is right
    median_width        of the intervals, by the time that was really left
    longest_wait_ratio  of a class of 20 behind one of 500, and over all nights and classes: when a class was done, by
                        its share: when as many jobs of each class as it has, if there are so many, would be done at the
                        night's mean rate, as in equal turns
    longest_turn_ratio  the same, of when the last of its jobs was taken by a slot: the rest is the answer itself, which
                        stands still while its machine prefills others' prompts

What the figures do not show: the night is simulated as the estimate is (`kvasir.plan`), so they say nothing of how well
the simulation describes real machines, only of what is not known beforehand. How much classes differ, and how often
workers crash, is assumed. All classes are there from the beginning, and each has a turn of its own.
"""

import itertools
import math
import random
import statistics
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace

from benchmarks import finish_real, harness
from benchmarks.fleet import MIXES
from benchmarks.fleet_contending import TEAM, fleet_of
from kvasir.plan import workload
from kvasir.plan.finish import CLASS_SPREAD, RATE_SPREAD, Remainder
from kvasir.plan.fleet import Decoder, Fleet, PlannedJob
from kvasir.plan.simulate import Backlog, SimulatedRun, Stealing, simulate, with_rates

NIGHTS, QUICK_NIGHTS = 1000, 5
CLASSES = (2, 3, 4)
STUDENTS = (40, 200)
SMALL_LAST = (500, 20)  # in the order of submission
PROCESSES = 2
STUDENT_S = 4.5  # about what one takes the fleet: crashes are spread over the night by it
CRASHES, RETURNS = 0.2, 0.85  # of decode workers in a night, and of those that crash
AWAY_S = (60.0, 300.0)
RECENT = 60  # answers by which a worker's registration knows the mean
MEANS = {"code": workload.CODE_ANSWER_TOKENS, "feedback": workload.FEEDBACK_ANSWER_TOKENS}


@dataclass(frozen=True, slots=True)
class Night:
    """What was submitted, class by class, and the machines as they were measured and as they were."""

    classes: tuple[tuple[PlannedJob, ...], ...]
    measured: Fleet
    true: Fleet

    def run(self) -> SimulatedRun:
        """The classes take turns."""
        return simulate(self.true, list(itertools.chain(*self.classes)), Stealing())

    def run_in_one_queue(self) -> SimulatedRun:
        """In the order of submission."""
        jobs = [replace(job, prefix="") for job in itertools.chain(*self.classes)]
        return simulate(self.true, jobs, Stealing())


def class_of(job: PlannedJob) -> str:
    """Which class of its night it is of, as a number."""
    return job.name.partition("/")[0]


def draw_night(seed: int, sizes: Sequence[int] = ()) -> Night:
    """The same seed gives the same night; `sizes` of the classes, else they are drawn."""
    source = random.Random(seed)
    sizes = sizes or [round(math.exp(source.uniform(*map(math.log, STUDENTS)))) for _ in range(source.choice(CLASSES))]
    classes = []
    for number, size in enumerate(sizes):
        means = {model: round(mean * math.exp(source.gauss(0, CLASS_SPREAD))) for model, mean in MEANS.items()}
        drawn = workload.draw_class(size, "code", "feedback", source.getrandbits(32), *means.values())
        classes.append(tuple(replace(job, name=f"{number}/{job.name}", prefix=str(number)) for job in drawn))
    mix = replace(source.choice((*MIXES, TEAM)), joins=0, dies=0, only="")
    measured = fleet_of(mix if mix.slots else TEAM, both_roles=True)
    decoders = [part for decoder in measured.decoders for part in _lives(decoder, sum(sizes) * STUDENT_S, source)]
    measured = replace(measured, decoders=tuple(decoders))
    factors: dict[str, float] = {name: math.exp(source.gauss(0, RATE_SPREAD)) for name in measured.machines()}
    return Night(tuple(classes), measured, with_rates(measured, factors.__getitem__))


def _lives(decoder: Decoder, night_s: float, source: random.Random) -> list[Decoder]:
    """The worker, or what there is of it before and after a crash."""
    if decoder.machine.startswith("spark") or source.random() >= CRASHES:
        return [decoder]
    crash_s = source.uniform(0, night_s)
    back = [replace(decoder, joins_s=crash_s + source.uniform(*AWAY_S))] if source.random() < RETURNS else []
    return [replace(decoder, dies_s=crash_s), *back]


def seen(night: Night, run: SimulatedRun, number: int, moment_s: float) -> Remainder:
    """What the owner of a class sees then."""
    taken = {timing.job.name: timing for timing in run.timings}
    prefilled_s = {timing.job.name: timing.ended_s for timing in run.prefills}
    own = {job.name for job in night.classes[number]}
    done = [timing.job for timing in run.timings if timing.ended_s <= moment_s]
    lengths = {model: [job.answer_tokens for job in done if job.model == model and job.name in own] for model in MEANS}
    recent = {
        model: [job.answer_tokens for job in done if job.model == model][-RECENT:] or [MEANS[model]] for model in MEANS
    }
    present = [decoder for decoder in night.measured.decoders if decoder.joins_s <= moment_s < decoder.dies_s]
    fleet = replace(night.measured, decoders=tuple(replace(each, joins_s=0.0, dies_s=math.inf) for each in present))
    waiting, ready, running = [], [], []
    busy: dict[int, int] = defaultdict(int)
    for job in itertools.chain(*night.classes):
        timing = taken[job.name]
        known = replace(job, answer_tokens=round(statistics.fmean(recent[job.model])))
        if timing.ended_s <= moment_s:
            continue
        places = [place for place, each in enumerate(present) if each.machine == timing.machine]
        if timing.started_s <= moment_s and places:
            place = min(places, key=lambda place: busy[place] / present[place].slots)
            busy[place] += 1
            running.append((place, known))
        else:
            (ready if prefilled_s[job.name] <= moment_s else waiting).append(known)
    return Remainder(fleet, Backlog(waiting, ready, running), lengths, own)


def measure(seed: int) -> Mapping[str, float]:
    """One night: whether the interval held, its width by what was left, and the longest wait by equal turns."""
    night = draw_night(seed)
    run = night.run()
    ends = _ends(run)
    number = random.Random(seed).randrange(len(night.classes))
    first_s = min(timing.ended_s for timing in run.timings if class_of(timing.job) == str(number))
    moment_s = (first_s + ends[str(number)]) / 2
    left_s = ends[str(number)] - moment_s
    found = seen(night, run, number, moment_s).finish(seed)
    if found is None:
        raise RuntimeError(f"night {seed} has no estimate, though all of its jobs ended")
    low_s, high_s = found.interval_s
    return {
        "holds": float(low_s <= left_s <= high_s),
        "width": (high_s - low_s) / left_s,
        "error": found.left_s / left_s,
        "wait_ratio": wait_ratio(night, run, _ends(run)),
        "turn_ratio": wait_ratio(night, run, _last_turns(run)),
    }


def wait_ratio(night: Night, run: SimulatedRun, moments_s: Mapping[str, float]) -> float:
    """The longest wait of a class, until its moment, by its share."""
    sizes = {class_of(jobs[0]): len(jobs) for jobs in night.classes}
    job_s = run.makespan_s / sum(sizes.values())
    shares_s = {name: job_s * sum(min(size, other) for other in sizes.values()) for name, size in sizes.items()}
    return max(moment_s / shares_s[name] for name, moment_s in moments_s.items())


def _ends(run: SimulatedRun) -> dict[str, float]:
    """When each class was done."""
    return {
        class_of(timing.job): timing.ended_s for timing in run.timings
    }  # in the order of answers: the last one stays


def _last_turns(run: SimulatedRun) -> dict[str, float]:
    """When the last job of each class was taken by a slot."""
    in_order = sorted(run.timings, key=lambda timing: timing.started_s)
    return {class_of(timing.job): timing.started_s for timing in in_order}


def summary(found: Sequence[Mapping[str, float]]) -> dict[str, float]:
    """The figures of the last line."""
    return {
        "coverage": statistics.fmean(night["holds"] for night in found),
        "median_width": statistics.median(night["width"] for night in found),
        "longest_wait_ratio": max(night["wait_ratio"] for night in found),
        "longest_turn_ratio": max(night["turn_ratio"] for night in found),
    }


def main() -> int:
    """Simulate every night, explain, and end with the line of JSON."""
    arguments = harness.parser(__doc__)
    arguments.add_argument(
        "--real", action="store_true", help="twenty nights on real processes: benchmarks.finish_real"
    )
    options = arguments.parse_args()
    if options.real:
        finish_real.spend_nights(options.quick, options.seed)
        return 0
    nights = QUICK_NIGHTS if options.quick else NIGHTS
    found = []
    with ProcessPoolExecutor(PROCESSES) as pool:
        for night in pool.map(measure, range(options.seed * NIGHTS, options.seed * NIGHTS + nights), chunksize=5):
            found.append(night)
            if len(found) % 50 == 0:
                print(f"{len(found)} nights: {summary(found)}", flush=True)
    errors = [math.log(night["error"]) for night in found]
    print(
        f"estimate by truth: median {math.exp(statistics.median(errors)):.3f}, spread {statistics.pstdev(errors):.3f}"
    )
    small_last = draw_night(options.seed, SMALL_LAST)
    small_run, one_queue_run = small_last.run(), small_last.run_in_one_queue()
    wait, turn = (wait_ratio(small_last, small_run, moments(small_run)) for moments in (_ends, _last_turns))
    wait_in_one_queue = wait_ratio(small_last, one_queue_run, _ends(one_queue_run))
    print(
        f"a class of {SMALL_LAST[1]} behind one of {SMALL_LAST[0]} is done after {wait:.1f} times its share, its last "
        f"job is taken after {turn:.1f} times; in one queue it is done after {wait_in_one_queue:.1f} times"
    )
    figures = summary(found)
    figures["longest_wait_ratio"] = max(figures["longest_wait_ratio"], wait)
    figures["longest_turn_ratio"] = max(figures["longest_turn_ratio"], turn)
    harness.finish(nights=nights, **figures, seed=options.seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
