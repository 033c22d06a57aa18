"""`kvasir grade` from settings to report: what the commands share."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from infra.settings import ModelSettings, Settings
from kvasir.connect import connect, is_cluster
from messages.errors import BatchError, BrokerUnavailable, StoreUnavailable
from messages.jobs import JobResult
from messages.lifecycle import Moment
from producers import grade
from producers.batch import Batch, Counts
from producers.files import write_atomically
from producers.grade import Assignment, GradeRequest, RoleModel
from producers.graded import GradedClass, save_graded
from producers.grading import Grade
from producers.report import write_grades_csv
from producers.report_page import render_page
from producers.rubric import ROLES, Role, Rubric, load_rubric
from producers.runner import Progress, Runner

Observer = Callable[[Moment], None]

_DEFAULT_CONTEXT = 32_768  # where the configuration doesn't say; the worker refuses what its model can't hold


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a command has to show."""

    batch_id: str
    folder: Path
    assignment: Assignment
    counts: Counts
    grades: list[Grade]
    worked: bool  # False: everything had been graded before, no engine was called
    alarms: tuple[str, ...] = ()  # about the class as a whole


def request_from(
    settings: Settings,
    folder: Path,
    rubric: Path,
    solution: Path | None = None,
    template: Path | None = None,
    only: Sequence[str] = (),
    limit: int = 0,
    samples: int = 1,
) -> GradeRequest:
    """A request with the configured models of the roles that the rubric uses. Raises ConfigError, RubricError."""
    models = _role_models(settings, load_rubric(rubric))
    return GradeRequest(folder, rubric, models, solution, template, tuple(only), limit, samples=samples)


def request_again(settings: Settings, batch: Batch) -> GradeRequest:
    """The request that a batch was made from. Raises BatchError if it never was."""
    if not batch.request:
        raise BatchError(f"{batch.folder} holds no batch yet; start one with kvasir grade or kvasir submit")
    return request_kept(settings, batch.request)


def request_kept(settings: Settings, kept: Mapping[str, Any]) -> GradeRequest:
    """The request that a manifest keeps, with the models as they are configured now. Raises ConfigError."""
    if "folder" not in kept:
        raise BatchError(f"the folder holds no class, but prompts: use kvasir run {kept.get('prompts', '')} again")
    folder, rubric, solution, template = (Path(kept[key]) for key in ("folder", "rubric", "solution", "template"))
    return GradeRequest(
        folder,
        rubric,
        _models_again(settings, kept["models"]),
        solution if kept["solution"] else None,
        template if kept["template"] else None,
        tuple(kept["only"]),
        kept["limit"],
        samples=kept.get("samples", 1),
    )


def open_assignment(batch: Batch, request: GradeRequest) -> Assignment:
    """Read the class's work and write down what is to be done."""
    assignment = grade.prepare(request, batch.batch_id, batch.secret)
    grade.plan(batch, assignment)
    return assignment


def run(
    settings: Settings,
    batch: Batch,
    assignment: Assignment,
    progress: Progress,
    observe: Observer,
    max_wait_s: float | None = None,
    deadline_s: float = 0.0,
) -> Outcome:
    """Grade what is not graded yet, and write the report. Calls no engine if nothing is open.

    Jobs published now expire in `deadline_s`, if that is given.
    """
    open_jobs = batch.open_jobs()
    if open_jobs:
        models = sorted({entry.model for entry in open_jobs})
        with connect(settings, models, observe, f"grade {batch.batch_id}") as client:
            Runner(batch, assignment.tasks, client, progress, deadline_s).run(max_wait_s)
    elif batch.entries and is_cluster(settings):
        _fetch_late(settings, batch, progress, observe)
    return report(batch, assignment, worked=bool(open_jobs), notice=settings.grading.notice)


def _fetch_late(settings: Settings, batch: Batch, progress: Progress, observe: Observer) -> None:
    """Take the results of jobs that were replayed after the batch was complete: parked, since nobody listened."""
    try:
        with connect(settings, (), observe, f"sweep {batch.batch_id}") as client:
            Runner(batch, (), client, progress).run(0)
    except (BrokerUnavailable, StoreUnavailable) as error:
        progress.say(f"the results of replayed jobs, if there are any, could not be fetched: {error}")


def submit(
    settings: Settings,
    batch: Batch,
    assignment: Assignment,
    progress: Progress,
    observe: Observer,
    deadline_s: float = 0.0,
) -> int:
    """Publish what is open and don't wait; returns how many jobs. Raises BatchError without a cluster."""
    if not is_cluster(settings):
        raise BatchError("submitting and leaving needs a broker that stays: set KVASIR_BROKER_URL and KVASIR_STORE_URL")
    with connect(settings, (), observe, f"submit {batch.batch_id}") as client:
        client.broker.open_reply_queue(batch.batch_id)
        return Runner(batch, assignment.tasks, client, progress, deadline_s).submit()


def report(batch: Batch, assignment: Assignment, worked: bool, notice: str = "") -> Outcome:
    """Write grades.csv, grades.json and report.html from the journal as it is now."""
    made = grade.grades(assignment, batch.result)
    results = [result for entry in batch.entries if (result := batch.result(entry.job_id))]
    write_grades_csv(batch.folder / "grades.csv", made, assignment.rubric)
    graded = grade.graded_class(batch.batch_id, assignment, made)
    save_graded(batch.folder, graded)
    page = render_page(made, assignment.rubric, [*_about(graded), *facts(results)], notice)
    write_atomically(batch.folder / "report.html", page)
    return Outcome(batch.batch_id, batch.folder, assignment, batch.counts(), made, worked, graded.alarms)


def _about(graded: GradedClass) -> list[tuple[str, str]]:
    """What was used, and what the class as a whole says of it."""
    used = ", ".join(f"{name} {digest}" for name, digest in graded.versions.items())
    return [*(("Look at the class", alarm) for alarm in graded.alarms), ("Versions", used)]


def facts(results: Sequence[JobResult]) -> list[tuple[str, str]]:
    """What a reader may want to know of the run."""
    done = [result for result in results if result.state == "succeeded"]
    if not done:
        return []
    prompt = sum(result.decode.prompt_tokens for result in done)
    evaluated = sum(result.decode.evaluated_tokens for result in done)
    computed = sum(result.prefill.computed_tokens for result in done)
    handed_over = sum(result.decode.hand_over == "kv" for result in done)
    models = ", ".join(sorted({result.model for result in done}))
    return [
        ("Models", models),
        ("Answers", f"{len(done)}, of which {handed_over} from a handed-over KV cache"),
        ("Prompt tokens", f"{prompt:,}; computed by prefill {computed:,}, by decode {evaluated:,}"),
        ("Answer tokens", f"{sum(result.decode.completion_tokens for result in done):,}"),
    ]


def as_json(outcome: Outcome) -> dict[str, Any]:
    """The outcome for `--json`."""
    counts = outcome.counts
    return {
        "batch": outcome.batch_id,
        "folder": str(outcome.folder),
        "jobs": {name: getattr(counts, name) for name in ("total", "succeeded", "failed", "cancelled", "expired")},
        "alarms": list(outcome.alarms),
        "submissions": [_grade_json(made) for made in outcome.grades],
    }


def _grade_json(made: Grade) -> dict[str, Any]:
    return {
        "submission": made.submission,
        "state": made.state,
        "points": made.points,
        "max_points": made.max_points,
        "criteria": {criterion.id: criterion.points for criterion in made.criteria},
        "flags": list(made.flags),
        "reason": made.reason,
        "needs_review": made.needs_review,
    }


def _role_models(settings: Settings, rubric: Rubric) -> dict[Role, RoleModel]:
    choose: dict[Role, Callable[[], ModelSettings]] = {
        "code": settings.code_model,
        "feedback": settings.feedback_model,
    }
    return {role: role_model(pick()) for role, pick in choose.items() if rubric.for_model(role)}


def _models_again(settings: Settings, names: Mapping[str, str]) -> dict[Role, RoleModel]:
    return {role: role_model(settings.model(names[role])) for role in ROLES if role in names}


def role_model(model: ModelSettings) -> RoleModel:
    """A configured model as grading plans with it."""
    return RoleModel(model.name, model.context or _DEFAULT_CONTEXT, model.temperature, model.top_p)
