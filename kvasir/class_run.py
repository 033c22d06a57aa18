"""`kvasir grade` from settings to report: what the commands share."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

from engines.proof import outside_in
from grading import grade
from grading.charts import runs
from grading.export.final import apply_decisions
from grading.export.late import late_of
from grading.grade import Assignment, GradeRequest, RoleModel
from grading.points import Grade
from grading.report.graded import GradedClass, load_graded, save_graded
from grading.report.grades import SUMMARY_COLUMNS, one_line, summary, summary_rows, write_grades_csv
from grading.report.page import render_page
from grading.rubric.rubric import ROLES, Role, load_rubric
from grading.same_class import is_same
from grading.submissions.reading import check_apart
from infra.config.next_command import next_command
from infra.config.settings import ModelSettings, Settings
from kvasir.connect import connect, is_cluster
from kvasir.options import ALL, BatchPlace, Chosen, ClassFiles, default_folder
from messages.errors import BatchError, BrokerUnavailable, StoreUnavailable, UsageError
from messages.jobs import JobResult
from monitoring.events import Observer
from producers.batch.batch import Batch, Counts, older_form
from producers.batch.runner import Progress, Runner
from producers.files.private import write_atomically

_DEFAULT_CONTEXT = 32_768  # where the configuration doesn't say; the worker refuses what its model can't hold


@dataclass(frozen=True, slots=True)
class Outcome:
    """What a command has to show."""

    batch_id: str
    folder: Path
    counts: Counts
    grades: list[Grade]  # of this run's submissions
    whole: list[Grade]  # of the class
    worked: bool  # False: everything had been graded before, no engine was called
    alarms: tuple[str, ...] = ()  # about the class as a whole
    note: str = ""  # why it is not as new as it could be
    go_on: str = ""  # what to do about jobs that are still open

    @property
    def rows(self) -> list[dict[str, Any]]:
        """One a submission, as `--json` has them."""
        return [_grade_json(made) for made in self.grades]

    def to_csv(self, path: Path | str | None = None) -> str:
        """The text of grades.csv; written to `path` too, if one is given."""
        text = (self.folder / "grades.csv").read_text("utf-8")
        if path:
            write_atomically(Path(path), text)
        return text

    def __len__(self) -> int:
        return len(self.grades)

    def __repr__(self) -> str:
        return f"<{summary(self.grades)}, in {self.folder}>"

    def _repr_html_(self) -> str:
        """A table for notebooks; everything in it is text, whatever a file is called."""
        head = "".join(f"<th>{name}</th>" for name in SUMMARY_COLUMNS)
        cells = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in summary_rows(self.grades)]
        body = "".join(f"<tr>{row}</tr>" for row in cells)
        said = "".join(f"<p>{escape(line)}</p>" for line in (*self.alarms, summary(self.grades)))
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{said}"


def request_from(settings: Settings, files: ClassFiles, chosen: Chosen = ALL) -> GradeRequest:
    """A request with the configured models of the roles that the rubric uses. Raises ConfigError, RubricError."""
    rubric = load_rubric(files.rubric)
    of_role = {"code": settings.code_model, "feedback": settings.feedback_model}
    models = {role: role_model(of_role[role]()) for role in ROLES if rubric.for_model(role)}
    return GradeRequest(
        files.folder,
        files.rubric,
        models,
        files.solution,
        files.template,
        chosen.only,
        chosen.limit,
        samples=chosen.samples,
        ask=chosen.ask,
    )


def request_again(settings: Settings, batch: Batch, running: bool = True) -> GradeRequest:
    """The request that a batch was made from. Raises BatchError if it never was, else as `request_kept`."""
    if not batch.request:
        raise BatchError(f"{batch.folder} holds no batch yet; start one with kvasir grade or kvasir submit")
    return request_kept(settings, batch.request, running)


def request_kept(settings: Settings, kept: Mapping[str, Any], running: bool = False) -> GradeRequest:
    """The request that a manifest keeps. Raises BatchError if it keeps none.

    Only what is `running` needs the models: they are then used as they are configured now, and ConfigError is raised
    where one is not.
    """
    if "folder" not in kept:
        raise BatchError(f"the folder holds no class, but prompts: use kvasir run {kept.get('prompts', '')} again")
    if missing := {"rubric", "solution", "template", "models", "only", "limit"} - kept.keys():
        raise BatchError(f"batch.json does not say the {min(missing)}: restore it, or grade with another --out")
    folder, rubric, solution, template = (Path(kept[key]) for key in ("folder", "rubric", "solution", "template"))
    return GradeRequest(
        folder,
        rubric,
        _models_again(settings, kept, running),
        solution if kept["solution"] else None,
        template if kept["template"] else None,
        tuple(kept["only"]),
        kept["limit"],
        samples=kept.get("samples", 1),
        ask="criteria" if kept.get("ask") == "criteria" else "together",
        from_manifest=True,
    )


def open_assignment(batch: Batch, request: GradeRequest) -> Assignment:
    """Read the class's work and write down what is to be done, unless nothing may be published; again: what is left."""
    assignment = read_class(batch, request)
    if request.from_manifest:
        assignment = grade.select_unfinished(batch, assignment, _kept(batch))
    if batch.may_publish:
        grade.plan(batch, assignment)
    return assignment


def read_class(batch: Batch, request: GradeRequest) -> Assignment:
    """The class's work, and what is to be asked about it beside what the batch has answers to."""
    if (request.only_names or request.limit) and not request.from_manifest:
        request = replace(request, untouched_names=grade.untouched_names(batch))
    succeeded = {job_id for job_id, state in batch.states.items() if state == "succeeded"}
    older = None if batch.may_publish else batch.prompt_form
    return grade.prepare(request, batch.batch_id, batch.secret, older, batch.entries, succeeded)


@contextmanager
def open_class(
    request: GradeRequest, wanted: BatchPlace, say: Callable[[str], None]
) -> Iterator[tuple[Batch, Assignment]]:
    """The batch of this class, planned: where it is wanted, else in its first default folder that is free or its own.

    Another class's batch in the folder that is wanted raises BatchError, unless it is to be moved aside.
    """
    default = place_of(request, wanted)
    place, number = default, 1
    if request.excluded_paths:
        say(left_out(request.excluded_paths))
    while True:
        with Batch(place) as batch:
            assignment = read_class(batch, request)
            if is_same(batch, assignment):
                batch.check_may_publish()
                grade.plan(batch, assignment)
                yield batch, assignment
                return
            kept = batch.request
            whose = f"{place} holds another class's batch, of {kept.get('folder') or kept.get('prompts')}"
        if wanted.replace:
            say(f"{place} is now {_moved_aside(place)}")
        elif wanted.out:
            raise BatchError(f"{whose}; name another folder with --out, or move that one aside with --replace")
        else:
            number += 1
            place = default.with_name(f"{default.name}-{number}")


def place_of(request: GradeRequest, wanted: BatchPlace) -> Path:
    """Where the batch is to be: where it is wanted, else the default. Raises SubmissionError: not among the work."""
    place = wanted.out or default_folder(request.folder, load_rubric(request.rubric).title)
    check_apart(request.folder, place)
    return place


def left_out(given: Mapping[str, str]) -> str:
    """`GradeRequest.given` as a sentence."""
    return f"No submission, so left out: {', '.join(f'{one_line(name)} ({what})' for name, what in given.items())}"


def _moved_aside(place: Path) -> Path:
    aside = place.with_name(f"{place.resolve().name}.before-{time.strftime('%Y%m%d-%H%M%S')}")
    try:
        return place.rename(aside)
    except OSError as error:
        raise BatchError(f"can't rename {place} to {aside}: {error.strerror}") from None


def look(settings: Settings, batch: Batch) -> Outcome:
    """What the batch has so far, with the report written anew where that can be: the class's work must be there.

    Raises UsageError where there is nothing to show.
    """
    try:
        request = request_again(settings, batch, running=False)
        assignment = read_class(batch, request)
    except UsageError as error:
        kept = _kept(batch)
        if kept is None:
            raise
        note = f"the grades are those last written, because {error}"
        return _outcome(batch, kept, kept.grades, worked=True, note=note)
    return report(batch, assignment, worked=True, notice=settings.grading.notice)


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
    worked = bool(batch.open_jobs)
    if worked and (batch.may_publish or is_cluster(settings)):
        models = sorted({entry.model for entry in batch.open_jobs.values()})
        with connect(settings, models, observe, f"grade {batch.batch_id}") as client:
            Runner(batch, assignment.tasks, client, progress, deadline_s).run(max_wait_s)
    elif batch.entries and is_cluster(settings):
        _fetch_late(settings, batch, progress, observe)
    return report(batch, assignment, worked=worked, notice=settings.grading.notice)


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
    """Publish what is open and don't wait; returns how many jobs. On a cluster only: nothing else would stay."""
    with connect(settings, (), observe, f"submit {batch.batch_id}") as client:
        client.broker.open_reply_queue(batch.batch_id)
        return Runner(batch, assignment.tasks, client, progress, deadline_s).submit()


def report(batch: Batch, assignment: Assignment, worked: bool, notice: str = "") -> Outcome:
    """Write grades.csv, grades.json and report.html from the journal as it is now."""
    kept = _kept(batch)
    graded_now = grade.grades(assignment, batch.result, {entry.job_id for entry in batch.entries}, kept)
    made = grade.with_removed_submissions(assignment, graded_now, kept)
    results = [result for entry in batch.entries if (result := batch.result(entry.job_id))]
    write_grades_csv(batch.folder / "grades.csv", made, assignment.rubric)
    graded = grade.graded_class(batch.batch_id, assignment, made, kept)
    save_graded(batch.folder, graded)
    page = render_page(
        made,
        assignment.rubric,
        [*_about(graded), *facts(results)],
        notice,
        runs.pictures(results),
        _late(batch.folder, graded),
    )
    write_atomically(batch.folder / "report.html", page)
    mine = [one for one in made if assignment.request.from_manifest or one.item_id in (assignment.selected_ids or ())]
    return _outcome(batch, graded, mine, worked)


def _outcome(batch: Batch, graded: GradedClass, mine: Iterable[Grade], worked: bool, note: str = "") -> Outcome:
    go_on = f"go on with: {next_command('watch', batch.folder)}" if batch.may_publish else older_form(batch.folder)
    return Outcome(
        batch.batch_id,
        batch.folder,
        batch.counts(),
        list(mine),
        list(graded.grades),
        worked,
        graded.alarms,
        note,
        go_on,
    )


def _kept(batch: Batch) -> GradedClass | None:
    """The grades last written, if there are any that can be read."""
    with suppress(BatchError):
        return load_graded(batch.folder)
    return None


def _late(folder: Path, graded: GradedClass) -> dict[str, str]:
    """What is taken off for lateness, in words, by submission: of the models' points, as all of the report."""
    late = late_of(folder, graded.late)
    finals = [apply_decisions(grade, {}, include_unreviewed=True, late=late) for grade in graded.grades]
    return {final.submission: final.penalty.words for final in finals if final.penalty}


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
    # Of a job with questions the report has the one that cost the most, and each answer its own.
    evaluated = sum(
        sum(answer.evaluated_tokens for answer in result.answers) or result.decode.evaluated_tokens for result in done
    )
    computed = sum(result.prefill.computed_tokens for result in done)
    transferred = sum(result.decode.kv_transfer != "none" for result in done)
    models = ", ".join(sorted({result.model for result in done}))
    hosts = sorted({outside_in(result.decode.why_none) for result in done} - {""})
    return [
        *(("Outside", f"prompts went to {host}, outside private networks") for host in hosts),
        ("Models", models),
        ("Answers", f"{len(done)}, of which {transferred} from a transferred KV cache"),
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
        "submissions": outcome.rows,
    }


def _grade_json(made: Grade) -> dict[str, Any]:
    return {
        "submission": made.submission,
        "state": made.state,
        "points": made.points,
        "max_points": made.max_points,
        "criteria": {criterion.id: criterion.points for criterion in made.criteria},
        "reason": made.reason,
        "needs_review": made.needs_review,
        "review_reasons": list(made.review_reasons),
        "remarks": list(made.remarks),
    }


def _models_again(settings: Settings, kept: Mapping[str, Any], running: bool) -> dict[Role, RoleModel]:
    names, planned_for = kept["models"], kept.get("settings", {})
    if running:
        return {role: role_model(settings.model(names[role])) for role in ROLES if role in names}
    known = {name: role_model(model) for name, model in settings.models.items()}
    again = {role: known.get(names[role], RoleModel(names[role], _DEFAULT_CONTEXT)) for role in ROLES if role in names}
    try:
        return again | {role: RoleModel(**planned_for[role]) for role in again if role in planned_for}
    except (TypeError, ValueError) as error:
        raise BatchError(f"the batch's settings can't be read: {error}") from None


def role_model(model: ModelSettings) -> RoleModel:
    """A configured model as grading plans with it."""
    return RoleModel(model.name, model.context or _DEFAULT_CONTEXT, model.temperature, model.top_p)
