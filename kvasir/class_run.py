"""`kvasir grade` from settings to report: the code that several commands share."""

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from html import escape
from pathlib import Path
from typing import Any

from engines.proof import outside_in
from grading import planning
from grading.charts import runs
from grading.export.final import apply_decisions
from grading.export.late import late_of
from grading.grades import make_graded_class, make_grades, with_removed_submissions
from grading.hand_sample.draw import ever_sampled
from grading.inputs import changed_inputs, kept_inputs
from grading.jobs import Assignment
from grading.points import Grade
from grading.report.grades import (
    SUMMARY_COLUMNS,
    GradedClass,
    load_graded,
    one_line,
    save_graded,
    summary,
    summary_rows,
    write_grades_csv,
)
from grading.report.page import render_page
from grading.request import AskForm, AspectModel, GradeRequest, Selection
from grading.reviews import read_overrides
from grading.roster import kept_files
from grading.rubric.rubric import ASPECTS, Aspect, load_rubric
from grading.submissions.handed_in import ignored_files_sentence
from grading.submissions.reading import check_apart
from infra.config.next_command import next_command
from infra.config.settings import ModelSettings, Settings
from kvasir.connect import connect, is_cluster
from kvasir.options import BatchPlace, default_folder
from kvasir.plan.cluster import expectation
from kvasir.terminal import TerminalProgress, shortened
from messages.errors import BatchError, BrokerUnavailable, StoreUnavailable, UsageError
from messages.jobs import JobResult
from monitoring.events import Observer
from producers.batch.batch import Batch, Counts, exists, manifest_of, other_form, report_lock
from producers.batch.runner import Progress, Runner
from producers.storage.private import write_atomically
from producers.words import join_with_and, plural, shorten_names

_DEFAULT_CONTEXT = 32_768  # if the configuration sets no context; a worker refuses jobs that are too long for its model


@dataclass(frozen=True, slots=True)
class Outcome:
    """The outcome of a command, for display."""

    batch_id: str
    folder: Path
    counts: Counts
    grades: list[Grade]  # grades of the submissions in this run
    whole: list[Grade]  # grades of the whole class
    worked: bool  # False if the run called no engine, because all grades existed already
    alarms: tuple[str, ...] = ()  # warnings about the grades of the class as a whole
    note: str = ""  # why the grades are not up to date
    go_on: str = ""  # how to continue with the jobs that are still open

    @property
    def rows(self) -> list[dict[str, Any]]:
        """One row for each submission, as in `--json`."""
        return [
            {
                "submission": grade.submission,
                "state": grade.state,
                "points": grade.points,
                "max_points": grade.max_points,
                "criteria": {criterion.id: criterion.points for criterion in grade.criteria},
                "reason": grade.reason,
                "needs_review": grade.needs_review,
                "review_reasons": list(grade.review_reasons),
                "remarks": list(grade.remarks),
            }
            for grade in self.grades
        ]

    def to_csv(self, path: Path | str | None = None) -> str:
        """Return the text of grades.csv. It is also written to `path`, if one is given."""
        text = (self.folder / "grades.csv").read_text("utf-8")
        if path:
            write_atomically(Path(path), text)
        return text

    def __len__(self) -> int:
        return len(self.grades)

    def __repr__(self) -> str:
        return f"<{summary(self.grades)}, in {self.folder}>"

    def _repr_html_(self) -> str:
        """Return a table for notebooks. All names in it are escaped."""
        head = "".join(f"<th>{name}</th>" for name in SUMMARY_COLUMNS)
        cells = ["".join(f"<td>{escape(cell)}</td>" for cell in row) for row in summary_rows(self.grades)]
        body = "".join(f"<tr>{row}</tr>" for row in cells)
        paragraphs = "".join(f"<p>{escape(line)}</p>" for line in (*self.alarms, summary(self.grades)))
        return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{paragraphs}"


def request_from(
    settings: Settings,
    folder: Path,
    rubric: Path,
    solution: Path | None = None,
    template: Path | None = None,
    *,
    names: tuple[str, ...] = (),
    limit: int = 0,
    samples: int = 1,
    ask: AskForm = "together",
    rosters: tuple[Path, ...] = (),
    examples: Path | None = None,
) -> GradeRequest:
    """Make a request from a command's options, which have the names of `grading_options`.

    It uses the configured models for the aspects in the rubric. Raises ConfigError, RubricError.
    """
    loaded_rubric = load_rubric(rubric)
    of_aspect = {"code": settings.code_model, "feedback": settings.feedback_model}
    models = {aspect: aspect_model(of_aspect[aspect]()) for aspect in ASPECTS if loaded_rubric.for_model(aspect)}
    return GradeRequest(
        folder,
        rubric,
        models,
        solution,
        template,
        Selection(names, limit),
        samples,
        ask,
        settings.grading.max_submission_tokens,
        rosters,
        examples=examples,
    )


def request_of_batch(settings: Settings, batch: Batch, will_run: bool = True) -> GradeRequest:
    """Return the request that a batch was made from.

    Raises BatchError if there is none, and as `request_from_manifest`.
    """
    if not batch.request:
        raise BatchError(f"{batch.folder} holds no batch yet; start one with kvasir grade or kvasir submit")
    request = request_from_manifest(settings, batch.request, will_run)
    return replace(request, rosters=kept_files(batch.folder), copies=kept_inputs(batch.folder, batch.request))


def request_from_manifest(
    settings: Settings, stored_request: Mapping[str, Any], will_run: bool = False
) -> GradeRequest:
    """Return the request in a manifest. Raises BatchError if it has none.

    The models are needed only with `will_run`. Then their current settings are used, and ConfigError is raised if one
    is not configured.
    """
    if "folder" not in stored_request:
        raise BatchError(
            f"the folder holds prompts instead of a class: run kvasir run {stored_request.get('prompts', '')} again"
        )
    if missing_keys := {"rubric", "solution", "template", "models", "only", "limit"} - stored_request.keys():
        raise BatchError(f"batch.json lacks the {min(missing_keys)}: restore the file, or grade with another --out")
    folder, rubric, solution, template = (
        Path(stored_request[key]) for key in ("folder", "rubric", "solution", "template")
    )
    return GradeRequest(
        folder,
        rubric,
        _models_of_request(settings, stored_request, will_run),
        solution if stored_request["solution"] else None,
        template if stored_request["template"] else None,
        Selection(tuple(stored_request["only"]), stored_request["limit"], from_manifest=True),
        stored_request.get("samples", 1),
        "criteria" if stored_request.get("ask") == "criteria" else "together",
        stored_request.get("max_submission_tokens"),
        examples=Path(stored_request["examples"]) if stored_request.get("examples") else None,
    )


def open_assignment(batch: Batch, request: GradeRequest) -> Assignment:
    """Read the class's work and plan its jobs, if the batch may publish any.

    An existing batch gets only unfinished work.
    """
    assignment = read_class(batch, request)
    if request.selection.from_manifest:
        assignment = planning.select_unfinished(batch, assignment, _load_saved_class(batch))
    if batch.may_plan:
        planning.plan(batch, assignment)
    return assignment


def read_class(batch: Batch, request: GradeRequest) -> Assignment:
    """Read the class's work, and find out what the batch still has to ask about it."""
    selection = request.selection
    if not (selection.is_whole or selection.from_manifest):
        request = replace(request, selection=replace(selection, other_names=planning.names_so_far(batch)))
    request = replace(request, rosters=kept_files(batch.folder, request.rosters))
    if request.examples:
        # A round of a regrade uses the examples of the regraded batch.
        home = batch.folder.parents[1] if batch.folder.parent.name == "rounds" else batch.folder
        stored_request = batch.request if home == batch.folder else manifest_of(home)["request"]
        kept = {kind: place for kind, place in kept_inputs(home, stored_request).items() if kind == "examples"}
        request = replace(request, copies={**kept, **request.copies}, sampled_names=ever_sampled(home))
    older = None if batch.may_plan else batch.prompt_form
    planned_entries = batch.entries if older or batch.may_publish else ()
    return planning.prepare(request, batch.batch_id, batch.secret, older, planned_entries, batch.succeeded_ids)


@contextmanager
def open_class(
    request: GradeRequest, target: BatchPlace, say: Callable[[str], None]
) -> Iterator[tuple[Batch, Assignment]]:
    """Yield the planned batch of this class.

    It is in the wanted folder, or else in the first default folder that is free or holds this class. If the wanted
    folder holds another class's batch, it is moved aside with `replace`; without it, BatchError is raised.
    """
    default = place_of(request, target)
    place, number = default, 1
    if request.excluded_paths:
        say(exclusion_sentence(request.excluded_paths))
    while True:
        with Batch(place) as batch:
            assignment = read_class(batch, _as_planned(batch, request))
            if planning.is_same(batch, assignment):
                if not batch.may_plan:
                    batch.check_may_publish()
                if sentence := ignored_files_sentence(item.submission for item in assignment.items):
                    say(sentence)
                if changes := _describe_changes(batch, assignment, target.yes):
                    say(f"Changed since the class was planned: {changes}. What that touches is graded again.")
                planning.plan(batch, assignment)
                questions = planning.questions(assignment)
                for question in dict.fromkeys(questions.values()):
                    names = [one_line(name) for name, own_question in questions.items() if own_question == question]
                    say(shortened(f"{one_line(question)}: ", names))
                yield batch, assignment
                return
            source = batch.request.get("folder") or batch.request.get("prompts")
            conflict = f"{place} holds another class's batch, of {source}"
        if target.replace:
            say(f"{place} is now {_move_aside(place)}")
        elif target.out:
            raise BatchError(
                f"{conflict}; name another folder with --out, or move the existing folder aside with --replace"
            )
        else:
            number += 1
            place = default.with_name(f"{default.name}-{number}")


def _describe_changes(batch: Batch, assignment: Assignment, may_replace: bool) -> str:
    """Return what has changed since the class was planned, such as `the rubric; handed in again: ada.py`.

    Raises BatchError if that would replace grades on which people have decided, unless it `may_replace` them.
    """
    inputs = join_with_and(changed_inputs(batch.request, assignment.input_data))
    if inputs and not may_replace and (overrides := read_overrides(batch.folder)):
        raise BatchError(
            f"the {inputs} changed since the class was planned, and people have decided on "
            f"{plural(len({override.item_id for override in overrides}), 'submission')}; nothing was graded. To grade "
            "the class again at once, add --yes: points that a person typed stay, but an approval lapses if the points "
            f"change. To compare the points first: {next_command('regrade', batch.folder)}"
        )
    works = one_line(shorten_names(_changed_works(batch, assignment)))
    return "; ".join([f"the {inputs}"] * bool(inputs) + [f"handed in again: {works}"] * bool(works))


def _as_planned(batch: Batch, request: GradeRequest) -> GradeRequest:
    """Use the limits of earlier releases if an earlier release planned the batch."""
    by_earlier_release = batch.request and "max_submission_tokens" not in batch.request
    return replace(request, max_submission_tokens=None) if by_earlier_release else request


def place_of(request: GradeRequest, target: BatchPlace) -> Path:
    """Return the folder of the batch. Raises SubmissionError if it is inside the submissions' folder."""
    place = target.out or default_folder(request.folder, load_rubric(request.rubric).title)
    check_apart(request.folder, place)
    return place


def with_answers(request: GradeRequest, place: Path) -> GradeRequest:
    """Add what a batch of the same work in `place`, if there is one, keeps about whose each submission is."""
    is_same = exists(place) and manifest_of(place)["request"].get("folder") == str(request.folder.resolve())
    return replace(request, rosters=kept_files(place, request.rosters)) if is_same else request


def exclusion_sentence(reasons: Mapping[str, str]) -> str:
    """Return `GradeRequest.excluded_paths` as a sentence."""
    return (
        f"No submission, so left out: {', '.join(f'{one_line(name)} ({reason})' for name, reason in reasons.items())}"
    )


def _move_aside(place: Path) -> Path:
    backup_path = place.with_name(f"{place.resolve().name}.before-{time.strftime('%Y%m%d-%H%M%S')}")
    try:
        return place.rename(backup_path)
    except OSError as error:
        raise BatchError(f"can't rename {place} to {backup_path}: {error.strerror}") from None


def look(settings: Settings, folder: Path) -> Outcome:
    """Return what the batch has so far. The report is written again if the class's work can still be read.

    Another process may be working on the batch. Raises UsageError if there is nothing to show.
    """
    with report_lock(folder), Batch(folder, is_owner=False) as batch:
        try:
            assignment = read_class(batch, request_of_batch(settings, batch, will_run=False))
        except UsageError as error:
            saved_class = _load_saved_class(batch)
            if saved_class is None:
                raise
            return _outcome(
                batch,
                saved_class,
                saved_class.grades,
                called_engines=True,
                note=f"the grades are those last written, because {error}",
            )
        return _report(batch, assignment, called_engines=True, notice=settings.grading.notice)


def run_class(
    settings: Settings,
    batch: Batch,
    assignment: Assignment,
    progress: TerminalProgress,
    observe: Observer,
    max_wait_s: float | None = None,
    deadline_s: float = 0.0,
) -> Outcome:
    """Grade what is not graded yet, and write the report. No engine is called if nothing is open.

    Jobs published now expire after `deadline_s` seconds, if it is given.
    """
    has_open_jobs = bool(batch.open_jobs)
    if has_open_jobs and (batch.may_publish or is_cluster(settings)):
        models = sorted({entry.model for entry in batch.open_jobs.values()})
        with connect(settings, models, observe, f"grade {batch.batch_id}") as client:
            deadline = deadline_s and time.time() + deadline_s
            progress.expect(lambda: expectation(settings, client, batch, deadline))
            Runner(batch, assignment.jobs, client, progress, deadline_s).run(max_wait_s)
    elif batch.entries and is_cluster(settings):
        _fetch_late(settings, batch, progress, observe)
    return report(batch, assignment, called_engines=has_open_jobs, notice=settings.grading.notice)


def _fetch_late(settings: Settings, batch: Batch, progress: Progress, observe: Observer) -> None:
    """Take the results of jobs that were replayed after the batch was complete.

    Nobody listened, so they were parked.
    """
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
    """Publish the open jobs without waiting; returns their number.

    It needs a cluster, because local jobs end with the process.
    """
    with connect(settings, (), observe, f"submit {batch.batch_id}") as client:
        client.broker.open_reply_queue(batch.batch_id)
        count = Runner(batch, assignment.jobs, client, progress, deadline_s).submit()
        words = expectation(settings, client, batch, deadline_s and time.time() + deadline_s)
        progress.say(words or "how long it takes will be known once the workers have measured their speed")
        return count


def report(batch: Batch, assignment: Assignment, called_engines: bool, notice: str = "") -> Outcome:
    """Write grades.csv, grades.json and report.html from the current journal."""
    with report_lock(batch.folder):
        return _report(batch, assignment, called_engines, notice)


def _report(batch: Batch, assignment: Assignment, called_engines: bool, notice: str) -> Outcome:
    saved_class = _load_saved_class(batch)
    graded_now = make_grades(assignment, batch.result, {entry.job_id for entry in batch.entries}, saved_class)
    grades = with_removed_submissions(assignment, graded_now, saved_class)
    results = [result for entry in batch.entries if (result := batch.result(entry.job_id))]
    write_grades_csv(batch.folder / "grades.csv", grades, assignment.rubric)
    graded_class = make_graded_class(batch.batch_id, assignment, grades, saved_class)
    save_graded(batch.folder, graded_class)
    ignored_files = ignored_files_sentence(item.submission for item in assignment.items)
    note = _difference(batch, assignment)
    page = render_page(
        grades,
        assignment.rubric,
        [*_about(graded_class, note), *([("Files", ignored_files)] if ignored_files else []), *facts(results)],
        notice,
        runs.pictures(results),
        _late(batch.folder, graded_class),
        graded_class.alarms,
    )
    write_atomically(batch.folder / "report.html", page)
    run_grades = [
        grade
        for grade in grades
        if assignment.request.selection.from_manifest or grade.item_id in assignment.selected_ids
    ]
    return _outcome(batch, graded_class, run_grades, called_engines, note)


def _changed_works(batch: Batch, assignment: Assignment) -> list[str]:
    """Return the submissions whose files have changed since the class was planned."""
    return [
        name
        for name, digest in assignment.work_digests.items()
        if batch.request.get("submissions", {}).get(name, digest) != digest
    ]


def _difference(batch: Batch, assignment: Assignment) -> str:
    """Describe files that have changed since the class was planned."""
    works = _changed_works(batch, assignment)
    files = join_with_and([file.name for file in assignment.changed_files])
    sentences = {
        f"Changed since the class was planned: {files}. These grades go by the batch's own copy. To grade by what "
        f"is there now: {next_command('regrade', batch.folder)}": files,
        f"Handed in again since the class was planned: {one_line(shorten_names(works))}. What is graded stays "
        "until kvasir grade is run again.": works,
    }
    return "\n".join(sentence for sentence, names in sentences.items() if names)


def _outcome(
    batch: Batch, graded_class: GradedClass, run_grades: Iterable[Grade], called_engines: bool, note: str = ""
) -> Outcome:
    go_on = (
        f"go on with: {next_command('watch', batch.folder)}"
        if batch.may_publish
        else other_form(batch.folder, batch.prompt_form)
    )
    return Outcome(
        batch.batch_id,
        batch.folder,
        batch.counts(),
        list(run_grades),
        list(graded_class.grades),
        called_engines,
        graded_class.alarms,
        note,
        go_on,
    )


def _load_saved_class(batch: Batch) -> GradedClass | None:
    """Return the saved grades, or None if there are none that can be read."""
    with suppress(BatchError):
        return load_graded(batch.folder)
    return None


def _late(folder: Path, graded_class: GradedClass) -> dict[str, str]:
    """Return the deductions for lateness in words, by submission.

    Like the whole report, they apply to the models' points.
    """
    late = late_of(folder, graded_class.late)
    finals = [apply_decisions(grade, {}, include_unreviewed=True, late=late) for grade in graded_class.grades]
    return {final.submission: final.penalty.words for final in finals if final.penalty}


def _about(graded_class: GradedClass, note: str) -> list[tuple[str, str]]:
    """Return what was used for grading."""
    versions = ", ".join(f"{name} {digest}" for name, digest in graded_class.versions.items())
    return [*([("Changed", note)] if note else []), ("Versions", versions)]


def facts(results: Sequence[JobResult]) -> list[tuple[str, str]]:
    """Return facts about the run for a reader of the report."""
    successes = [result for result in results if result.state == "succeeded"]
    if not successes:
        return []
    prompt = sum(result.decode.prompt_tokens for result in successes)
    # In a job with several questions, `decode` describes only the most expensive answer, so the counts of all answers
    # are added up.
    evaluated_tokens = sum(
        sum(answer.evaluated_tokens for answer in result.answers) or result.decode.evaluated_tokens
        for result in successes
    )
    computed_tokens = sum(result.prefill.computed_tokens for result in successes)
    transfer_count = sum(result.decode.kv_transfer != "none" for result in successes)
    models = ", ".join(sorted({result.model for result in successes}))
    hosts = sorted({outside_in(result.decode.why_none) for result in successes} - {""})
    return [
        *(("Outside", f"prompts went to {host}, outside private networks") for host in hosts),
        ("Models", models),
        ("Answers", f"{len(successes)}, of which {transfer_count} from a transferred KV cache"),
        ("Prompt tokens", f"{prompt:,}; computed by prefill {computed_tokens:,}, by decode {evaluated_tokens:,}"),
        ("Answer tokens", f"{sum(result.decode.completion_tokens for result in successes):,}"),
    ]


def as_json(outcome: Outcome) -> dict[str, Any]:
    """Return the outcome as plain data for `--json`."""
    counts = outcome.counts
    return {
        "batch": outcome.batch_id,
        "folder": str(outcome.folder),
        "jobs": {name: getattr(counts, name) for name in ("total", "succeeded", "failed", "cancelled", "expired")},
        "alarms": list(outcome.alarms),
        "submissions": outcome.rows,
    }


def _models_of_request(
    settings: Settings, stored_request: Mapping[str, Any], will_run: bool
) -> dict[Aspect, AspectModel]:
    names, planned_for = stored_request["models"], stored_request.get("settings", {})
    if will_run:
        return {aspect: aspect_model(settings.model(names[aspect])) for aspect in ASPECTS if aspect in names}
    configured_models = {name: aspect_model(model) for name, model in settings.models.items()}
    models = {
        aspect: configured_models.get(names[aspect], AspectModel(names[aspect], _DEFAULT_CONTEXT))
        for aspect in ASPECTS
        if aspect in names
    }
    try:
        return models | {aspect: AspectModel(**planned_for[aspect]) for aspect in models if aspect in planned_for}
    except (TypeError, ValueError) as error:
        raise BatchError(f"the batch's settings can't be read: {error}") from None


def aspect_model(model: ModelSettings) -> AspectModel:
    """Return a configured model in the form that planning uses."""
    return AspectModel(model.name, model.context or _DEFAULT_CONTEXT, model.temperature, model.top_p)
