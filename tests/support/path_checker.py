"""Whether the steps that were seen of every job are such as the lifecycle's table allows."""

import threading
from collections.abc import Iterator
from dataclasses import dataclass, field

from messages.lifecycle import Event, Step
from tests.support.lifecycle import TABLE, Position

# After these a message is on its way, and its next holder may be observed before its publisher is.
_PUBLISHES = frozenset(
    {Step.SUBMITTED, Step.PASSED_ON, Step.RETRIED, Step.KV_GONE, Step.ISOLATED, Step.REDELIVERED}
    | {Step.REPLIED, Step.FAILED, Step.CANCELLED, Step.EXPIRED}
)
# Taken by somebody who does not hold the delivery: whoever holds it goes on until it hears of it.
_BRANCHES = frozenset({Step.REDELIVERED, Step.CANCELLED})

Copies = tuple[Position, ...]  # where the copies of one run are, sorted


@dataclass(slots=True)
class _Run:
    """What is known of one run: all arrangements of its copies that explain the steps seen so far."""

    arrangements: set[Copies] = field(default_factory=lambda: {(Position.NEW,)})
    positions_held: set[Position] = field(default_factory=lambda: {Position.NEW})
    early_steps: list[Step] = field(default_factory=list)


class PathChecker:
    """An observer that follows every run of every job through the lifecycle's table. Thread-safe.

    A run is one copy until REDELIVERED is seen: then a copy goes back to its queue from any position held so far,
    while the earlier one may live on, and each obeys the table by itself. CANCELLED branches too. A decode worker that
    finds the result stored answers with it again, so REPLIED may follow DECODE_QUEUE once the run was ANSWERED.
    Publisher and next holder are observed by different threads: a step may be seen before the publish that allows it.

    Args:
        unseen_copies: copies may also appear unannounced, as when a process is killed or a confirm is lost. Any
            position ever held then allows its steps again.
    """

    def __init__(self, unseen_copies: bool = False) -> None:
        self._unseen_copies = unseen_copies
        self._runs: dict[tuple[str, int], _Run] = {}
        self._lock = threading.Lock()

    def __call__(self, event: Event) -> None:
        """Note an event."""
        key = (event.job_id, int(event.facts.get("run", 1)))
        with self._lock:
            run = self._runs.setdefault(key, _Run())
            if not self._advance(run, event.step):
                run.early_steps.append(event.step)
            elif event.step in _PUBLISHES:
                self._catch_up(run)

    def illegal(self) -> list[str]:
        """Sentences about the steps that nothing explains, in order of first sight of their job."""
        with self._lock:
            return [
                f"job {job_id}, run {number}: {step.value!r} can't follow {_describe(run)}"
                for (job_id, number), run in self._runs.items()
                for step in run.early_steps
            ]

    def jobs_without_result(self) -> list[str]:
        """Ids of jobs with a run that has had no result yet."""
        ends = {Position.REPLIED, Position.JOURNALED}
        with self._lock:
            return [job_id for (job_id, _), run in self._runs.items() if not ends & run.positions_held]

    def jobs(self) -> list[str]:
        """Ids of all jobs seen."""
        with self._lock:
            return list(dict.fromkeys(job_id for job_id, _ in self._runs))

    def _catch_up(self, run: _Run) -> None:
        """Retry what was seen too early, in the order in which it was seen; again after each publish among it."""
        has_published = True
        while has_published:
            allowed_steps = [step for step in run.early_steps if self._advance(run, step)]
            for step in allowed_steps:
                run.early_steps.remove(step)
            has_published = not _PUBLISHES.isdisjoint(allowed_steps)

    def _advance(self, run: _Run, step: Step) -> bool:
        """Take the step if some arrangement of the copies allows it; False, and nothing changed, if none does."""
        if step is Step.JOURNALED and Position.JOURNALED in run.positions_held:
            return False  # the journal has one line for each run, whatever the copies do
        if self._unseen_copies:
            targets = {target for position in run.positions_held for target in _targets(run, position, step)}
            run.positions_held |= targets
            run.arrangements = {(position,) for position in run.positions_held}
            return bool(targets)
        arrangements = set(_arrangements(run, step))
        if arrangements:
            run.arrangements = arrangements
            run.positions_held |= {position for copies in arrangements for position in copies}
        return bool(arrangements)


def _arrangements(run: _Run, step: Step) -> Iterator[Copies]:
    """The arrangements that one step makes of those before it."""
    for copies in run.arrangements:
        sources = run.positions_held if step is Step.REDELIVERED else set(copies)
        for source in sources:
            rest = list(copies)
            if step not in _BRANCHES:
                rest.remove(source)
            for target in _targets(run, source, step):
                yield tuple(sorted([*rest, target]))


def _targets(run: _Run, position: Position, step: Step) -> Iterator[Position]:
    if step in TABLE[position]:
        yield TABLE[position][step]
    elif step is Step.REPLIED and position is Position.DECODE_QUEUE and Position.ANSWERED in run.positions_held:
        yield Position.REPLIED


def _describe(run: _Run) -> str:
    places = {place for copies in run.arrangements for place in copies}
    return " or ".join(repr(place.value) for place in sorted(places))
