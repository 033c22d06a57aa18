"""A batch as the desk shows it. It is read while its owner works on it, and only new results are read each time."""

import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from desk.tail import LineTail
from grading.grades import make_grades
from grading.inputs import kept_inputs
from grading.jobs import Assignment, Cost, Item, cost_of
from grading.planning import assign, prepare
from grading.points import Grade
from grading.report.grades import GradedClass, load_graded
from grading.request import GradeRequest
from grading.roster import kept_files
from grading.rubric.rubric import Rubric
from messages import codec
from messages.errors import BatchError, KvasirError
from messages.jobs import STATES, JobResult
from producers.batch import batch as batches
from producers.batch.batch import BatchEntry, Counts
from producers.batch.forms import form_of
from producers.storage.journal import Standings

_NO_GRADE = Grade("", "waiting", None, 0, ())  # shown for a submission that has no grade yet
RequestOf = Callable[[Mapping[str, Any]], GradeRequest]


class BatchView:
    """Reads a batch and never writes. One instance serves all pages of a process, from any thread.

    `refresh` reads the class's work once. After that it reads only new results, and makes only the grades again that
    they affect.
    """

    def __init__(self, folder: Path, request_of: RequestOf) -> None:
        """`request_of` makes the request that a manifest keeps. It may raise KvasirError."""
        self.folder = folder
        self.problem = ""  # why there is nothing to show, in one sentence
        self.assignment: Assignment | None = None
        self.version = 0  # grows with each change that a page would show
        self._request_of = request_of
        self._lock = threading.RLock()
        self._stamp: tuple[tuple[int, int], ...] | None = None
        self._tail = LineTail(folder / "results.jsonl", make=codec.result_from_dict)
        # The grades that were stored in the folder when this view last planned the batch.
        self.stored_class: GradedClass | None = None
        self._plan_key: object = None
        self._entries: list[BatchEntry] = []
        self._runs: dict[str, int] = {}
        self._standings: Standings[JobResult] = Standings()
        self._items: dict[str, int] = {}  # by job
        self._grades: list[Grade] = []

    def refresh(self) -> "BatchView":
        """Bring the view up to date with the folder. Problems are recorded in `problem`. Returns itself."""
        with self._lock:
            try:
                self._catch_up()
                self.problem = ""
            except KvasirError as error:
                self.problem = str(error)
            except OSError as error:
                self.problem = f"{self.folder} can't be read: {error.strerror}"
        return self

    @property
    def grades(self) -> list[Grade]:
        """Return a grade for each submission that the batch knows, in order."""
        with self._lock:
            return list(self._grades)

    @property
    def rubric(self) -> Rubric | None:
        """The rubric with which the grades are made."""
        return self.assignment.rubric if self.assignment else None

    @property
    def results(self) -> list[JobResult]:
        """Return the result that counts for each job that has one."""
        with self._lock:
            return [result for entry in self._entries if (result := self.result(entry.job_id))]

    def models(self) -> dict[str, str]:
        """Return the model that each job asks."""
        with self._lock:
            return {entry.job_id: entry.model for entry in self._entries}

    def item(self, number: int) -> Item:
        """Return the submission of the grade with this index."""
        assert self.assignment
        return self.assignment.items[number]

    def result(self, job_id: str) -> JobResult | None:
        """As `Batch.result`."""
        return self._standings.line_of(job_id, self._runs.get(job_id, 1))

    def counts(self) -> Counts:
        """Jobs by state."""
        states = [result.state for result in self.results]
        return Counts(len(self._entries), *(states.count(state) for state in STATES))

    def cost(self, rubric: Rubric, names: Collection[str] = ()) -> Cost:
        """Return what grading these submissions (all if none is named) with this rubric would ask. Raises KvasirError.

        It uses the work as it was read; anything handed in since then is not included.
        """
        with self._lock:
            assert self.assignment
            class_assignment, manifest = self.assignment, batches.manifest_of(self.folder)
            succeeded_ids = {result.job_id for result in self.results if result.state == "succeeded"}
            assignment = assign(
                class_assignment.request,
                rubric,
                class_assignment.solution,
                class_assignment.template,
                [item.submission for item in class_assignment.items],
                manifest["batch_id"],
                manifest["secret"],
                self._entries,
                succeeded_ids,
            )
            items = tuple(item for item in assignment.items if not names or item.submission.name in names)
            criterion_ids = {criterion.id for criterion in class_assignment.rubric.criteria}
            return cost_of(replace(assignment, items=items), self._entries, succeeded_ids, criterion_ids)

    # --- catching up

    def _catch_up(self) -> None:
        changed_numbers = self._read_results()
        if self._read_manifest():
            self.version += 1
            items = self.assignment.items if self.assignment else ()
            changed_numbers = set(range(len(items)))
            self._grades = [_NO_GRADE] * len(items)
        self._grade_again(sorted(changed_numbers))

    def _read_manifest(self) -> bool:
        """Return whether the manifest has changed, so that every grade may have changed."""
        path = self.folder / "batch.json"
        if not path.exists():
            return False
        stamp = tuple((file.stat().st_mtime_ns, file.stat().st_ino) for file in (path, *kept_files(self.folder)))
        if stamp == self._stamp:
            return False
        manifest = batches.manifest_of(self.folder)
        self._stamp = stamp
        plan_key = (manifest["request"], manifest["jobs"], stamp[1:])
        if plan_key == self._plan_key and manifest["runs"] == self._runs:
            return False
        if manifest["request"] and plan_key != self._plan_key:
            self._plan(manifest)
        self._plan_key, self._entries, self._runs = plan_key, manifest["jobs"], manifest["runs"]
        return True

    def _plan(self, manifest: Mapping[str, Any]) -> None:
        request = self._request_of(manifest["request"])
        copies = kept_inputs(self.folder, manifest["request"])
        request = replace(request, rosters=kept_files(self.folder), copies=copies)
        jobs, runs = manifest["jobs"], manifest["runs"]
        lines = (self._standings.line_of(entry.job_id, runs.get(entry.job_id, 1)) for entry in jobs)
        succeeded_ids = {line.job_id for line in lines if line and line.state == "succeeded"}
        form = manifest["prompt_form"]
        older = form if form != form_of(manifest["request"]) else None
        self.assignment = prepare(request, manifest["batch_id"], manifest["secret"], older, jobs, succeeded_ids)
        with suppress(BatchError):
            self.stored_class = load_graded(self.folder)
        items = enumerate(self.assignment.items)
        self._items = {task.job.job_id: number for number, item in items for task in item.tasks}

    def _read_results(self) -> set[int]:
        """Read new results; returns the indices of the submissions to which they belong."""
        results, is_replaced = self._tail.read()
        if is_replaced:
            self._standings = Standings()
            self._stamp = self._plan_key = None
        self.version += bool(results or is_replaced)
        for result in results:
            self._standings.note(result.job_id, result)
        return {self._items[result.job_id] for result in results if result.job_id in self._items}

    def _grade_again(self, numbers: Sequence[int]) -> None:
        if not numbers or not self.assignment:
            return
        items = tuple(self.assignment.items[number] for number in numbers)
        planned_ids = {entry.job_id for entry in self._entries}
        grades = make_grades(replace(self.assignment, items=items), self.result, planned_ids, self.stored_class)
        for number, grade in zip(numbers, grades, strict=True):
            self._grades[number] = grade
