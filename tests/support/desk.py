"""A graded class made on the spot: a batch folder with the journal lines that are wanted, and no model."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from grading import planning
from grading.grades import make_graded_class, make_grades
from grading.jobs import Assignment, Task
from grading.report.grades import GradedClass, save_graded
from grading.request import AspectModel, GradeRequest
from messages.jobs import DecodeReport, JobResult, PrefillReport
from producers.batch.batch import Batch
from tests.support.homework import tiny_class


def request_for(folder: Path) -> GradeRequest:
    """The class in `folder` (see `tiny_class`), graded by two made-up models."""
    models = {"code": AspectModel("coder", 32_768), "feedback": AspectModel("writer", 32_768)}
    return GradeRequest(folder / "submissions", folder / "rubric.yaml", models)  # type: ignore[arg-type]


def request_of(manifest_request: Mapping[str, Any]) -> GradeRequest:
    """The request of a manifest that was made from `request_for`."""
    return replace(request_for(Path(manifest_request["folder"]).parent), rubric=Path(manifest_request["rubric"]))


def plan_tiny_class(folder: Path, size: int = 3) -> tuple[Path, Assignment]:
    """(batch folder, what is to be done): a class of `size`, nothing of it graded."""
    return folder / "out", plan(folder / "out", request_for(tiny_class(folder, size)))


def plan(out: Path, request: GradeRequest) -> Assignment:
    """Plan this request in a batch folder, as the command does first."""
    with Batch(out) as batch:
        assignment = planning.prepare(request, batch.batch_id, batch.secret)
        planning.plan(batch, assignment)
    return assignment


def answer(
    out: Path,
    assignment: Assignment,
    numbers: Sequence[int],
    points: int = 2,
    evidence: str = "sum(values)",
    feedback: str = "Fine.",
) -> None:
    """Journal answers for these submissions, each criterion with `points` and this quote."""
    tasks = [task for number in numbers for task in assignment.items[number].tasks]
    with Batch(out) as batch:
        batch.journal.record(_result(batch.batch_id, assignment, task, points, evidence, feedback) for task in tasks)


def write_grades(out: Path, assignment: Assignment) -> GradedClass:
    """Write the grades that follow from the journal, as a grading does at its end."""
    with Batch(out) as batch:
        graded_class = make_graded_class(batch.batch_id, assignment, make_grades(assignment, batch.result))
    save_graded(out, graded_class)
    return graded_class


def _result(batch_id: str, assignment: Assignment, task: Task, points: int, evidence: str, feedback: str) -> JobResult:
    grade_fields = {"evidence": evidence, "points": points, "feedback": feedback}
    text: dict[str, Any] = {criterion.id: grade_fields for criterion in assignment.rubric.for_model(task.aspect)}
    if task.aspect == "feedback":
        text["summary"] = "Good work."
    return JobResult(
        task.job.job_id,
        1,
        batch_id,
        task.job.item_id,
        task.job.model,
        "succeeded",
        json.dumps(text),
        "stop",
        prefill=PrefillReport(prefill_s=2.0, computed_tokens=1000),
        decode=DecodeReport(kv_transfer="verified", completion_tokens=100, decode_s=4.0),
    )
