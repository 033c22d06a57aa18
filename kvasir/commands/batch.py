"""`grade`, `submit`, `watch`, `results`, `retry`, `cancel`, `migrate`: a batch from start to end."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import click

from grading.export import final_grades
from grading.grades import open_questions
from grading.report.grades import SUMMARY_COLUMNS, one_line, outcome_of, summary, summary_rows
from grading.request import WHOLE_CLASS, GradeRequest, Selection
from grading.reviews import read_overrides
from infra.config.next_command import next_command
from infra.config.settings import Settings
from kvasir import class_run, dry_run
from kvasir.connect import connect, require_cluster
from kvasir.deadline import deadline_option
from kvasir.options import (
    BatchPlace,
    Globals,
    Models,
    grading_options,
    group_options,
    json_option,
    only_option,
    path,
    quiet_option,
    wait_option,
)
from kvasir.terminal import TerminalProgress, print_groups, print_table, say, say_json, stderr
from messages.errors import BatchError
from producers.batch import batch as batches
from producers.batch.batch import Batch
from producers.batch.openai_body import Defaults
from producers.batch.prompt_lines import check_file, read_lines
from producers.batch.runner import cancelled_results
from producers.words import plural

_WAITS = ", or use kvasir grade, which waits"


@click.command()
@grading_options
@deadline_option
@click.option("--dry-run", "dry", is_flag=True, help="Show what would be done; call no model.")
@json_option
@quiet_option
@wait_option
@group_options(models=Models, place=BatchPlace)
@click.pass_obj
def grade(
    global_options: Globals,
    /,
    models: Models,
    place: BatchPlace,
    deadline_s: float,
    dry: bool,
    as_json: bool,
    quiet: bool,
    max_wait: float | None,
    **request_options: Any,
) -> int:
    """Grade every submission in FOLDER (a folder, a zip, or one file) and write a report.

    Run it again to go on where it stopped: what is graded is not graded twice.
    """
    settings = global_options.settings(models)
    request = class_run.request_from(settings, **request_options)
    if dry:
        folder = class_run.place_of(request, place)  # also checks the place, as in a real run
        return dry_run.show_dry_run(settings, class_run.with_answers(request, folder), as_json)
    with (
        TerminalProgress(quiet) as progress,
        class_run.open_class(request, place, progress.say) as (batch, assignment),
    ):
        outcome = class_run.run_class(
            settings, batch, assignment, progress, global_options.observer(), max_wait, deadline_s
        )
    return show_outcome(outcome, as_json)


@click.command()
@grading_options
@deadline_option
@quiet_option
@group_options(models=Models, place=BatchPlace)
@click.pass_obj
def submit(
    global_options: Globals,
    /,
    models: Models,
    place: BatchPlace,
    deadline_s: float,
    quiet: bool,
    **request_options: Any,
) -> int:
    """Queue the submissions in FOLDER on the cluster and leave; `kvasir watch` gathers the results."""
    settings = global_options.settings(models)
    request = class_run.request_from(settings, **request_options)
    require_cluster(settings, "submit", _WAITS)
    with (
        TerminalProgress(quiet) as progress,
        class_run.open_class(request, place, progress.say) as (batch, assignment),
    ):
        job_count = class_run.submit(settings, batch, assignment, progress, global_options.observer(), deadline_s)
    say(
        f"{plural(job_count, 'job')} queued as {batch.batch_id}; gather them with: "
        f"{next_command('watch', batch.folder)}"
    )
    return 0


@click.command()
@click.argument("batch", type=path)
@json_option
@quiet_option
@wait_option
@click.pass_obj
def watch(global_options: Globals, batch: Path, as_json: bool, quiet: bool, max_wait: float | None) -> int:
    """Wait for the results of the batch in folder BATCH, and write its report."""
    settings = global_options.settings()
    with _existing(batch) as owned_batch, TerminalProgress(quiet) as progress:
        assignment = class_run.open_assignment(owned_batch, class_run.request_of_batch(settings, owned_batch))
        outcome = class_run.run_class(settings, owned_batch, assignment, progress, global_options.observer(), max_wait)
    return show_outcome(outcome, as_json)


@click.command()
@click.argument("batch", type=path)
@json_option
@click.pass_obj
def results(global_options: Globals, batch: Path, as_json: bool) -> int:
    """Show what the batch in folder BATCH has so far, and write its report again. Connects to nothing."""
    settings = global_options.settings()
    batches.check_exists(batch)
    return show_outcome(class_run.look(settings, batch), as_json)


@click.command()
@click.argument("batch", type=path)
@only_option("Run only these submissions again, even if they succeeded.")
@json_option
@quiet_option
@wait_option
@click.pass_obj
def retry(
    global_options: Globals, batch: Path, names: tuple[str, ...], as_json: bool, quiet: bool, max_wait: float | None
) -> int:
    """Run the failed, cancelled and expired jobs of the batch in folder BATCH once more."""
    settings = global_options.settings()
    with _existing(batch) as owned_batch, TerminalProgress(quiet) as progress:
        owned_batch.check_may_publish()
        request = class_run.request_of_batch(settings, owned_batch)
        assignment = class_run.open_assignment(owned_batch, request)
        runnable_ids = {task.job.job_id for task in assignment.tasks if task.may_run}
        retried_ids = owned_batch.jobs_to_retry(_names_in_batch(owned_batch, request, names), runnable_ids)
        owned_batch.run_again(retried_ids)
        progress.say(f"{plural(len(retried_ids), 'job')} run again")
        outcome = class_run.run_class(settings, owned_batch, assignment, progress, global_options.observer(), max_wait)
    return show_outcome(outcome, as_json)


@click.command()
@click.argument("batch", type=path)
@click.pass_obj
def cancel(global_options: Globals, batch: Path) -> int:
    """Stop the batch in folder BATCH; every job without a result gets the result `cancelled`."""
    settings = global_options.settings()
    batches.check_exists(batch)
    require_cluster(settings, "cancel", "; without them nothing runs but kvasir grade itself, which ends at Ctrl-C")
    batch_id = batches.batch_id(batch)
    with connect(settings, (), global_options.observer(), "cancel") as client:
        client.cancel(batch_id)
    if batches.is_owned(batch):
        say(f"{batch_id} is cancelled; the kvasir process that owns it writes the results")
        return 0
    with Batch(batch) as owned_batch:
        new_results = owned_batch.journal.record(cancelled_results(owned_batch))
    say(f"{batch_id} is cancelled: {plural(len(new_results), 'job')}")
    return 0


def _existing(folder: Path) -> Batch:
    batches.check_exists(folder)
    return Batch(folder)


def _names_in_batch(batch: Batch, request: GradeRequest, selectors: tuple[str, ...]) -> set[str]:
    """Return the names of the wanted submissions, by the rules of `grade --only`.

    Raises UsageError for unknown ones.
    """
    names = set(request.selected_names(Selection(selectors))) if selectors else set()
    strangers = names - {entry.name for entry in batch.entries}
    if strangers:
        raise BatchError(f"the batch in {batch.folder} has no submission {', '.join(sorted(strangers))}")
    return names


def show_outcome(
    outcome: class_run.Outcome, as_json: bool, extra_fields: Mapping[str, Any] = MappingProxyType({})
) -> int:
    """Print the outcome, or JSON that includes `extra_fields`, and return the exit code."""
    counts = outcome.counts
    if as_json:
        say_json({**class_run.as_json(outcome), **extra_fields})
    else:
        rows = zip(outcome.grades, summary_rows(outcome.grades), strict=True)
        counted_rows = [
            [*row[:3], *(str(len(what) or "") for what in (grade.doubts, grade.remarks))] for grade, row in rows
        ]
        print_table(SUMMARY_COLUMNS, counted_rows, right=SUMMARY_COLUMNS[2:])
        print_groups(
            (
                "asked about" if text != grade.reason else outcome_of(grade).replace("unreadable", "can't be read"),
                one_line(grade.display_name),
                one_line(text),
            )
            for grade in outcome.grades
            for text in (grade.reason, *open_questions(grade))
            if text
        )
        for alarm in outcome.alarms:
            say(f"Look at the class: {alarm}")
        if not outcome.worked:
            say("Everything is already graded; no engine was called.")
        say(("" if outcome.grades == outcome.whole else "The class: ") + summary(outcome.whole))
        if read_overrides(outcome.folder):
            finals = final_grades(outcome.folder)[1]
            lapsed_count = sum(bool(final.lapsed) for final in finals)
            lapsed = f" {plural(lapsed_count, 'approval', 'has', 'have')} lapsed: see Review." if lapsed_count else ""
            say(
                f"{sum(final.is_reviewed for final in finals):,} reviewed: their final points are in the desk and in "
                f"kvasir export.{lapsed}"
            )
        say(f"Report (reasons, remarks): {outcome.folder / 'report.html'}   Grades: {outcome.folder / 'grades.csv'}")
    if outcome.note:
        say(outcome.note, stderr)
    if counts.open:
        open_jobs = plural(counts.open, "job", "is", "are")
        say(f"{open_jobs} still open; {outcome.go_on}", stderr)
    blank = any(grade.state in ("failed", "incomplete", "waiting") or open_questions(grade) for grade in outcome.grades)
    return 1 if blank or counts.finished_jobs != counts.succeeded else 0


@click.command()
@click.argument("batch", type=path)
@click.pass_obj
def migrate(global_options: Globals, batch: Path) -> int:
    """Have the batch in folder BATCH, planned by an earlier version and never sent, planned again from its input.

    Says what has changed in the input since. Sends nothing: the command that it ends with does.
    """
    batches.check_exists(batch)
    with Batch(batch) as owned_batch:
        if owned_batch.may_publish:
            say(f"{batch} is of this version's form already.")
            return 0
        # A batch with answers can't be planned again, because the prompts of these answers can't be rebuilt.
        if not owned_batch.may_plan:
            owned_batch.check_may_publish()
        planned_names = {entry.name for entry in owned_batch.entries}
        names = _names_now(global_options.settings(), owned_batch)
        say(f"{plural(len(owned_batch.entries), 'job')} planned in an older form, none of them sent: dropped.")
        _say_names("In the input and not in the plan", names - planned_names)
        _say_names("In the plan and not in the input", planned_names - names)
        owned_batch.drop_plan()
        say(f"Plan and send it with the options that it had: {owned_batch.go_on_command}")
    return 0


def _names_now(settings: Settings, batch: Batch) -> set[str]:
    """Return the current lines or submissions of its input, by the names of its jobs. Raises UsageError, BatchError."""
    if prompts := batch.request.get("prompts"):
        check_file(Path(prompts), prompts)
        lines = read_lines(Path(prompts), batch.batch_id, batch.secret, lambda _name: Defaults("any", 1, 0.0, 1.0))
        return {line.custom_id for line in lines}
    request = class_run.request_of_batch(settings, batch, will_run=False)
    return set(request.selected_names(WHOLE_CLASS))


def _say_names(heading: str, names: Iterable[str]) -> None:
    if names:
        say(f"{heading}: {', '.join(sorted(names))}")
