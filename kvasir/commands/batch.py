"""`grade`, `submit`, `watch`, `results`, `retry`, `cancel`: a batch from start to end."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from types import MappingProxyType
from typing import Any

import click

from grading.grade import GradeRequest
from grading.report.grades import SUMMARY_COLUMNS, summary, summary_rows
from infra.config.next_command import next_command
from kvasir import api, class_run, dry_run
from kvasir.connect import connect, need_cluster
from kvasir.deadline import deadline_option
from kvasir.options import (
    BatchPlace,
    Chosen,
    ClassFiles,
    Globals,
    Models,
    Output,
    gathered,
    grading_options,
    only_option,
    path,
    quiet_option,
    wait_option,
)
from kvasir.terminal import TerminalProgress, say, say_json, stderr, table
from messages.errors import BatchError
from producers.batch import batch as batches
from producers.batch.batch import Batch
from producers.batch.runner import cancelled
from producers.words import plural

json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
_WAITS = ", or use kvasir grade, which waits"


@click.command()
@grading_options
@deadline_option
@click.option("--dry-run", "dry", is_flag=True, help="Show what would be done; call no model.")
@json_option
@quiet_option
@wait_option
@gathered(files=ClassFiles, models=Models, place=BatchPlace, chosen=Chosen, output=Output)
@click.pass_obj
def grade(
    given: Globals,
    files: ClassFiles,
    models: Models,
    place: BatchPlace,
    chosen: Chosen,
    deadline_s: float,
    dry: bool,
    output: Output,
) -> int:
    """Grade every submission in FOLDER (a folder, a zip, or one file) and write a report.

    Run it again to go on where it stopped: what is graded is not graded twice.
    """
    settings = given.settings(models)
    if dry:
        request = class_run.request_from(settings, files, chosen)
        class_run.place_of(request, place)  # a dry run says what the run would refuse
        return dry_run.show(settings, request, output.as_json)
    outcome = api.grade(
        **asdict(files),
        **asdict(place),
        **asdict(chosen),
        deadline_s=deadline_s,
        max_wait_s=output.max_wait,
        quiet=output.quiet,
        settings=settings,
        observe=given.observer(),
    )
    return show(outcome, output.as_json)


@click.command()
@grading_options
@deadline_option
@quiet_option
@gathered(files=ClassFiles, models=Models, place=BatchPlace, chosen=Chosen)
@click.pass_obj
def submit(
    given: Globals,
    files: ClassFiles,
    models: Models,
    place: BatchPlace,
    chosen: Chosen,
    deadline_s: float,
    quiet: bool,
) -> int:
    """Queue the submissions in FOLDER on the cluster and leave; `kvasir watch` gathers the results."""
    settings = given.settings(models)
    request = class_run.request_from(settings, files, chosen)
    need_cluster(settings, "submit", _WAITS)
    with (
        TerminalProgress(quiet) as progress,
        class_run.open_class(request, place, progress.say) as (batch, assignment),
    ):
        published = class_run.submit(settings, batch, assignment, progress, given.observer(), deadline_s)
    gather = next_command("watch", batch.folder)
    say(f"{plural(published, 'job')} queued as {batch.batch_id}; gather them with: {gather}")
    return 0


@click.command()
@click.argument("batch", type=path)
@json_option
@quiet_option
@wait_option
@click.pass_obj
def watch(given: Globals, batch: Path, as_json: bool, quiet: bool, max_wait: float | None) -> int:
    """Wait for the results of the batch in folder BATCH, and write its report."""
    settings = given.settings()
    with _existing(batch) as owned, TerminalProgress(quiet) as progress:
        assignment = class_run.open_assignment(owned, class_run.request_again(settings, owned))
        outcome = class_run.run(settings, owned, assignment, progress, given.observer(), max_wait)
    return show(outcome, as_json)


@click.command()
@click.argument("batch", type=path)
@json_option
@click.pass_obj
def results(given: Globals, batch: Path, as_json: bool) -> int:
    """Show what the batch in folder BATCH has so far, and write its report anew. Connects to nothing."""
    settings = given.settings()
    with _existing(batch) as owned:
        outcome = class_run.look(settings, owned)
    return show(outcome, as_json)


@click.command()
@click.argument("batch", type=path)
@only_option("Only these submissions, and also if they succeeded.")
@json_option
@quiet_option
@wait_option
@click.pass_obj
def retry(
    given: Globals, batch: Path, only: tuple[str, ...], as_json: bool, quiet: bool, max_wait: float | None
) -> int:
    """Run the failed, cancelled and expired jobs of the batch in folder BATCH once more."""
    settings = given.settings()
    with _existing(batch) as owned, TerminalProgress(quiet) as progress:
        owned.check_may_publish()
        request: GradeRequest = class_run.request_again(settings, owned)
        assignment = class_run.open_assignment(owned, request)
        known = {task.job_id for task in assignment.tasks if task.may_run}
        again = _to_retry(owned, known, _named(owned, request, only))
        owned.run_again(again)
        progress.say(f"{plural(len(again), 'job')} run again")
        outcome = class_run.run(settings, owned, assignment, progress, given.observer(), max_wait)
    return show(outcome, as_json)


@click.command()
@click.argument("batch", type=path)
@click.pass_obj
def cancel(given: Globals, batch: Path) -> int:
    """Stop the batch in folder BATCH; every job without a result gets the result `cancelled`."""
    settings = given.settings()
    _check_exists(batch)
    need_cluster(settings, "cancel", "; without them nothing runs but kvasir grade itself, which ends at Ctrl-C")
    batch_id = batches.batch_id(batch)
    with connect(settings, (), given.observer(), "cancel") as client:
        client.cancel(batch_id)
    if batches.is_owned(batch):
        say(f"{batch_id} is cancelled; the kvasir process that owns it writes the results")
        return 0
    with Batch(batch) as owned:
        written = owned.journal.record(cancelled(owned))
    say(f"{batch_id} is cancelled: {plural(len(written), 'job')}")
    return 0


def _existing(folder: Path) -> Batch:
    _check_exists(folder)
    return Batch(folder)


def _check_exists(folder: Path) -> None:
    if not batches.exists(folder):
        raise BatchError(f"{folder} holds no batch; name the folder given to --out")


def _named(batch: Batch, request: GradeRequest, only: tuple[str, ...]) -> set[str]:
    """The submissions that are meant, by the rule of `grade --only`. Raises UsageError for what is not in the batch."""
    names = {submission.name for submission in request.read(only)} if only else set()
    strangers = names - {entry.name for entry in batch.entries}
    if strangers:
        raise BatchError(f"the batch in {batch.folder} holds no {', '.join(sorted(strangers))}")
    return names


def _to_retry(batch: Batch, known: set[str], named: set[str]) -> list[str]:
    chosen = []
    for entry in batch.entries:
        result = batch.result(entry.job_id)
        if entry.job_id not in known or result is None:
            continue
        if entry.name in named or (not named and result.state != "succeeded"):
            chosen.append(entry.job_id)
    return chosen


def show(outcome: class_run.Outcome, as_json: bool, more: Mapping[str, Any] = MappingProxyType({})) -> int:
    """Print it, as JSON with `more` in it; the exit code."""
    counts = outcome.counts
    if as_json:
        say_json({**class_run.as_json(outcome), **more})
    else:
        table(SUMMARY_COLUMNS, summary_rows(outcome.grades), right=("points",))
        for alarm in outcome.alarms:
            say(f"Look at the class: {alarm}")
        if not outcome.worked:
            say("Everything is already graded; no engine was called.")
        say(("" if outcome.grades == outcome.whole else "The class: ") + summary(outcome.whole))
        say(f"Report: {outcome.folder / 'report.html'}   Grades: {outcome.folder / 'grades.csv'}")
    if outcome.note:
        stderr.print(outcome.note, soft_wrap=True, markup=False)
    if counts.open:
        still = plural(counts.open, "job", "is", "are")
        stderr.print(f"{still} still open; {outcome.go_on}", soft_wrap=True, markup=False)
    incomplete = any(made.state in ("failed", "incomplete", "waiting") for made in outcome.grades)
    return 1 if incomplete or counts.done != counts.succeeded else 0


COMMANDS = (grade, submit, watch, results, retry, cancel)
