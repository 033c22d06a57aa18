"""Whether a finish time can be believed, in nights of three minutes on real services: `benchmarks.finish --real`.

RabbitMQ, Redis and worker processes with simulated engines, as in `benchmarks.fleet`: times are scaled, so that the
median decode takes two wall seconds. Each night is one class of 40 to 120 students on the machines of a row of
`benchmarks.fleet`; in some rows a worker dies half way, or joins late. Nobody tells the workers their rates: each
measures its own, and publishes it. After every twentieth of the answers the class's owner asks what `kvasir submit`,
`status` and the desk show: from the answers so far, from what waits, and from what the workers say.

    coverage      share of the nights whose interval held the end; of each night the one that was asked about nearest
                  to the middle between its first answer and its last
    coverage_all  share of all intervals; those of one night depend on each other
    median_width  of the intervals in the middle, by the time that was really left
    median_error  of their estimates, by the time that was really left, less 1

What the figures do not show: engines that slow down with each sequence, prefill and decode on one machine, other
classes in between, longer nights. Twenty nights can tell 0.9 from 0.6, and not from 0.85. The processes share two
cores; what that costs is in the figures.
"""

import random
import statistics
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks import fleet, harness
from benchmarks.fleet_cluster import run
from infra.config.settings import Settings
from kvasir.plan.cluster import remainder_of
from messages.jobs import JobResult, PrefillJob
from producers.client import Client
from tests.support.services import Pair

NIGHTS, QUICK_NIGHTS = 20, 1
STUDENTS = (40, 120)
QUICK_STUDENTS = 12
DECODE_S, QUICK_DECODE_S = 2.0, 1.0
ASKS = 20


@dataclass(slots=True)
class Asked:
    """One interval: when it was asked for, and what was said to be left then, in seconds."""

    at_s: float
    left_s: float
    low_s: float
    high_s: float

    def holds(self, end_s: float) -> bool:
        """Whether the end came within it."""
        return self.low_s <= end_s - self.at_s <= self.high_s


@dataclass(slots=True)
class Owner:
    """The owner of one class, who asks now and then."""

    students: int
    asked: list[Asked] = field(default_factory=list)
    started: float = 0.0

    def watch(
        self,
        settings: Settings,
        client: Client,
        jobs: Sequence[PrefillJob],
        results: Sequence[tuple[float, JobResult]],
    ) -> None:
        """Ask after each twentieth of the answers."""
        arrived_s = results[-1][0]
        self.started = self.started or time.monotonic() - arrived_s
        if len(results) % max(1, len(jobs) // ASKS) or len(results) == len(jobs):
            return
        at_s = time.monotonic() - self.started
        found = remainder_of(settings, client, _batch(jobs, [result for _, result in results])).finish(len(self.asked))
        if found:
            self.asked.append(Asked(at_s, found.left_s, *found.interval_s))


def _batch(jobs: Sequence[PrefillJob], results: Sequence[JobResult]) -> Any:
    """What an estimate reads of a batch."""
    by_id = {result.job_id: result for result in results}
    open_jobs = {job.job_id: job for job in jobs if job.job_id not in by_id}
    states = {result.job_id: result.state for result in results}
    return SimpleNamespace(states=states, open_jobs=open_jobs, result=by_id.get)


def measure(pair: Pair, seed: int, students: Sequence[int], decode_s: float) -> dict[str, Any]:
    """One night."""
    source = random.Random(seed)
    mix = source.choice(fleet.MIXES)
    owner = Owner(source.randint(*students))
    cast, prompts = fleet.prepare(mix, owner.students, decode_s, seed)
    with tempfile.TemporaryDirectory() as folder:
        real = run(pair, Path(folder), cast, prompts, steal=True, watch=owner.watch)
    first_s, end_s = real.results[0][0], real.makespan_s
    middle_s = (first_s + end_s) / 2
    if not owner.asked:
        raise RuntimeError(f"night {seed}: no estimate was given")
    middle = min(owner.asked, key=lambda asked: abs(asked.at_s - middle_s))
    left_s = end_s - middle.at_s
    return {
        "mix": mix.name,
        "students": owner.students,
        "makespan_s": end_s,
        "holds": middle.holds(end_s),
        "all": [asked.holds(end_s) for asked in owner.asked],
        "width": (middle.high_s - middle.low_s) / left_s,
        "error": middle.left_s / left_s - 1,
    }


def spend_nights(quick: bool, seed: int) -> None:
    """All of them, and the line of JSON."""
    print(harness.machine())
    rows = []
    students = (QUICK_STUDENTS, QUICK_STUDENTS) if quick else STUDENTS
    with harness.pair() as pair:
        for number in range(QUICK_NIGHTS if quick else NIGHTS):
            row = measure(pair, 100 * seed + number, students, QUICK_DECODE_S if quick else DECODE_S)
            rows.append(row)
            shown = {name: round(value, 3) if isinstance(value, float) else value for name, value in row.items()}
            print(shown | {"all": f"{sum(row['all'])} of {len(row['all'])}"}, flush=True)
    every = [holds for row in rows for holds in row["all"]]
    harness.finish(
        nights=len(rows),
        coverage=statistics.fmean(row["holds"] for row in rows),
        coverage_all=statistics.fmean(every),
        median_width=statistics.median(row["width"] for row in rows),
        median_error=statistics.median(row["error"] for row in rows),
        seed=seed,
    )
