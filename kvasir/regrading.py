"""Grades a batch again with its current rubric, beside the existing grades.

The result is compared, and adopted or left.
"""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from desk.decisions import account
from desk.differences import Difference, differences
from desk.rounds import is_same_plan, keep_grades, make_round, next_round, record_change, rounds
from grading import planning, rulings
from grading.export.final import lapsing_approvals
from grading.jobs import cost_of
from grading.report.grades import load_graded
from grading.reviews import read_overrides
from infra.config.next_command import next_command
from infra.config.settings import Settings
from kvasir import class_run
from kvasir.class_run import Outcome
from kvasir.terminal import TerminalProgress
from messages.errors import BatchError
from monitoring.events import Observer
from producers.batch.batch import Batch
from producers.words import join_with_and, plural


class Regrade:
    """A batch and its current rubric: `cost` says what changed, `run` asks, and `adopt` replaces the grades.

    Until `adopt` is called, nothing in the batch is changed.
    """

    def __init__(self, settings: Settings, folder: Path, criteria: Sequence[str], rubric: Path | None) -> None:
        """Read the batch and its class.

        Args:
            criteria: the criteria that were changed, so that nothing else is asked about; (): whatever has changed.
            rubric: another file; None: the batch's rubric in its current state.

        Raises BatchError if there are no grades yet, or if `criteria` are not those that changed; else as `read_class`.
        """
        self._settings, self.folder = settings, folder
        self.tried: Outcome | None = None  # the round's
        self._saved_class = load_graded(folder)
        with Batch(folder) as batch:
            batch.check_may_publish()
            if batch.open_jobs:
                open_jobs = plural(len(batch.open_jobs), "job", "has", "have")
                go_on = next_command("watch", folder)
                raise BatchError(f"{open_jobs} no result yet; finish the grading first: {go_on}")
            request = class_run.request_of_batch(settings, batch)
            self._request = replace(request, rubric=rubric.resolve() if rubric else request.rubric, copies={})
            self._assignment = class_run.read_class(batch, self._request)
            graded_criteria = {criterion.id for grade in self._saved_class.grades for criterion in grade.criteria}
            self.place = self._round_to_go_on()  # the round's folder; None if a new round is needed
            self.cost = cost_of(
                self._assignment, batch.entries, batch.succeeded_ids, graded_criteria, _answered_jobs(self.place)
            )
        self._check_named(criteria)

    @property
    def may_affect(self) -> dict[str, dict[str, tuple[str, ...]]]:
        """For each changed criterion with rulings: people whose evidence shares words with them, and these words."""
        changed_criteria = [
            criterion
            for criterion in self._assignment.rubric.criteria
            if criterion.id in self.cost.asked and criterion.rulings
        ]
        evidence = {
            criterion.id: {
                grade.display_name: criterion_grade.evidence
                for grade in self._saved_class.grades
                for criterion_grade in grade.criteria
                if criterion_grade.id == criterion.id
            }
            for criterion in changed_criteria
        }
        return {
            criterion.id: rulings.may_affect(criterion.rulings, evidence[criterion.id])
            for criterion in changed_criteria
        }

    @property
    def needed(self) -> bool:
        """Whether there is anything to do."""
        return bool(self.cost.jobs or self.cost.answered or self.cost.removed)

    def run(self, progress: TerminalProgress, observe: Observer, max_wait_s: float | None = None) -> Outcome:
        """Ask what is new, in a separate round. An interrupted round is continued, and its failed jobs run again."""
        last = self._round_to_go_on()
        self.place = place = last or next_round(self.folder)
        if not last:
            make_round(self.folder, place)
        with Batch(place) as batch:
            assignment = class_run.read_class(batch, self._request)
            planning.plan(batch, assignment)
            if last:
                job_ids = {job.job_id for job in assignment.jobs}
                batch.run_again(job for job in job_ids if batch.states[job] not in (None, "succeeded"))
            self.tried = class_run.run_class(self._settings, batch, assignment, progress, observe, max_wait_s)
        return self.tried

    @property
    def differences(self) -> list[Difference]:
        """The differences between the existing grades and those of `run`, one row for each submission."""
        new_grades = self.tried.whole if self.tried else ()
        return differences({grade.submission: grade for grade in self._saved_class.grades}, new_grades)

    @property
    def failed(self) -> int:
        """The number of jobs of `run` without an answer. Adopting the round would take away the points for them."""
        counts = self.tried.counts if self.tried else None
        return counts.finished_jobs - counts.succeeded - counts.unreadable if counts else 0

    @property
    def lapsing(self) -> list[str]:
        """The approvals that would not cover the points of `run`, in lines; empty if there are none."""
        return lapsing_approvals(self.folder, self._saved_class.grades, self.tried.whole if self.tried else ())

    @property
    def decided(self) -> int:
        """The number of points that a person has typed and that are asked about again. They stay."""
        decisions = {
            (override.item_id, override.criterion_id)
            for override in read_overrides(self.folder)
            if override.points is not None
        }
        return sum(criterion in self.cost.asked for _, criterion in decisions)

    def adopt(self) -> Outcome:
        """Replace the batch's grades by those of `run`.

        The old grades are kept as a version, and who did it when is recorded.
        """
        if not (self.place and self.tried) or self.tried.counts.open:
            raise BatchError(f"the regrade of {self.folder} is not finished: finish the regrade first")
        keep_grades(self.folder, self._saved_class)
        with Batch(self.place) as round_batch:
            results = [result for entry in round_batch.entries if (result := round_batch.result(entry.job_id))]
        record_change(self.folder, self.place, account())
        with Batch(self.folder) as batch:
            batch.journal.record(results)
            assignment = class_run.read_class(batch, self._request)
            planning.plan(batch, assignment)
            return class_run.report(batch, assignment, called_engines=True, notice=self._settings.grading.notice)

    def _round_to_go_on(self) -> Path | None:
        last = rounds(self.folder)[-1:]
        return last[0] if last and is_same_plan(last[0], self._assignment) else None

    def _check_named(self, criteria: Sequence[str]) -> None:
        if not criteria:
            return
        if self._request.ask != "criteria":
            raise BatchError(
                "this batch asks for all criteria in one answer, so Kvasir can't ask about a single criterion: "
                "regrade without --criterion, or grade the class with --ask criteria"
            )
        ids = [criterion.id for criterion in self._assignment.rubric.criteria]
        changed_ids = {*self.cost.asked, *self.cost.removed}
        for name in criteria:
            if name not in ids and name not in changed_ids:
                raise BatchError(f"the rubric has no criterion {name!r:.60}; it has {join_with_and(ids)}")
            if name not in changed_ids:
                raise BatchError(f"{name} has not changed since it was graded; edit {self._request.rubric} first")
        if unnamed_ids := [name for name in (*self.cost.asked, *self.cost.removed) if name not in criteria]:
            raise BatchError(
                f"other criteria have changed too: {join_with_and(unnamed_ids)}; name these criteria too, or leave out "
                "--criterion to ask about all criteria that have changed"
            )


def _answered_jobs(place: Path | None) -> set[str]:
    """Return the ids of the jobs that this round has answered."""
    if place is None:
        return set()
    with Batch(place) as round_batch:
        return round_batch.succeeded_ids
