"""`grade`, `submit`, `watch`, `results`, `retry`, `cancel`: a batch from start to end."""

from __future__ import annotations

import json
from pathlib import Path

import click

from kvasir import dry_run, grading
from kvasir.connect import connect, is_cluster
from kvasir.deadline import deadline_option
from kvasir.options import Globals, grading_options, id_list, out_folder
from kvasir.terminal import TerminalProgress, say, stderr, table
from messages.errors import BatchError
from producers import batch as batches
from producers.batch import Batch
from producers.grade import GradeRequest
from producers.report import summary_rows
from producers.runner import cancelled

path = click.Path(path_type=Path)
json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
quiet_option = click.option("--quiet", is_flag=True, help="No progress.")
wait_option = click.option("--max-wait", type=float, metavar="SECONDS", help="Stop waiting after this long.")


@click.command()
@grading_options
@deadline_option
@click.option("--dry-run", "dry", is_flag=True, help="Show what would be done; call no model.")
@json_option
@quiet_option
@wait_option
@click.pass_obj
def grade(
    given: Globals,
    folder: Path,
    rubric: Path,
    solution: Path | None,
    template: Path | None,
    code_model: str | None,
    feedback_model: str | None,
    out: Path | None,
    limit: int,
    only: str,
    samples: int,
    deadline_s: float,
    dry: bool,
    as_json: bool,
    quiet: bool,
    max_wait: float | None,
) -> int:
    """Grade every submission in FOLDER (a folder, a zip, or one file) and write a report.

    Run it again to go on where it stopped: what is graded is not graded twice.
    """
    settings = given.settings(code_model=code_model, feedback_model=feedback_model)
    request = grading.request_from(settings, folder, rubric, solution, template, id_list(only), limit, samples)
    if dry:
        return dry_run.show(settings, request, as_json)
    with Batch(out_folder(folder, out)) as batch, TerminalProgress(quiet) as progress:
        assignment = grading.open_assignment(batch, request)
        outcome = grading.run(settings, batch, assignment, progress, given.observer(), max_wait, deadline_s)
    return _show(outcome, as_json)


@click.command()
@grading_options
@deadline_option
@quiet_option
@click.pass_obj
def submit(
    given: Globals,
    folder: Path,
    rubric: Path,
    solution: Path | None,
    template: Path | None,
    code_model: str | None,
    feedback_model: str | None,
    out: Path | None,
    limit: int,
    only: str,
    samples: int,
    deadline_s: float,
    quiet: bool,
) -> int:
    """Queue the submissions in FOLDER on the cluster and leave; `kvasir watch` gathers the results."""
    settings = given.settings(code_model=code_model, feedback_model=feedback_model)
    request = grading.request_from(settings, folder, rubric, solution, template, id_list(only), limit, samples)
    _need_cluster(given, "submit")
    target = out_folder(folder, out)
    with Batch(target) as batch, TerminalProgress(quiet) as progress:
        assignment = grading.open_assignment(batch, request)
        published = grading.submit(settings, batch, assignment, progress, given.observer(), deadline_s)
    say(f"{published} jobs queued as {batch.batch_id}; gather them with: kvasir watch {target}")
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
        assignment = grading.open_assignment(owned, grading.request_again(settings, owned))
        outcome = grading.run(settings, owned, assignment, progress, given.observer(), max_wait)
    return _show(outcome, as_json)


@click.command()
@click.argument("batch", type=path)
@json_option
@click.pass_obj
def results(given: Globals, batch: Path, as_json: bool) -> int:
    """Show what the batch in folder BATCH has so far, and write its report anew. Connects to nothing."""
    settings = given.settings()
    with _existing(batch) as owned:
        assignment = grading.open_assignment(owned, grading.request_again(settings, owned))
        outcome = grading.report(owned, assignment, worked=True, notice=settings.grading.notice)
    return _show(outcome, as_json)


@click.command()
@click.argument("batch", type=path)
@click.option("--only", default="", metavar="IDS", help="Only these submissions, and also if they succeeded.")
@json_option
@quiet_option
@wait_option
@click.pass_obj
def retry(given: Globals, batch: Path, only: str, as_json: bool, quiet: bool, max_wait: float | None) -> int:
    """Run the failed, cancelled and expired jobs of the batch in folder BATCH once more."""
    settings = given.settings()
    with _existing(batch) as owned, TerminalProgress(quiet) as progress:
        request: GradeRequest = grading.request_again(settings, owned)
        assignment = grading.open_assignment(owned, request)
        again = _to_retry(owned, {task.job_id for task in assignment.tasks}, id_list(only))
        owned.run_again(again)
        progress.say(f"{len(again)} jobs run again")
        outcome = grading.run(settings, owned, assignment, progress, given.observer(), max_wait)
    return _show(outcome, as_json)


@click.command()
@click.argument("batch", type=path)
@click.pass_obj
def cancel(given: Globals, batch: Path) -> int:
    """Stop the batch in folder BATCH; every job without a result gets the result `cancelled`."""
    settings = _need_cluster(given, "cancel").settings()
    batch_id = batches.batch_id(batch)
    with connect(settings, (), given.observer(), "cancel") as client:
        client.cancel(batch_id)
    if batches.is_owned(batch):
        say(f"{batch_id} is cancelled; the kvasir process that owns it writes the results")
        return 0
    with Batch(batch) as owned:
        written = owned.journal.record(cancelled(owned, owned.open_jobs()))
    say(f"{batch_id} is cancelled: {len(written)} jobs")
    return 0


def _need_cluster(given: Globals, command: str) -> Globals:
    if not is_cluster(given.settings()):
        raise BatchError(
            f"kvasir {command} needs a broker that outlives this process: set KVASIR_BROKER_URL and KVASIR_STORE_URL, "
            "or use kvasir grade, which waits"
        )
    return given


def _existing(folder: Path) -> Batch:
    if not batches.exists(folder):
        raise BatchError(f"{folder} holds no batch; name the folder given to --out")
    return Batch(folder)


def _to_retry(batch: Batch, known: set[str], only: tuple[str, ...]) -> list[str]:
    chosen = []
    for entry in batch.entries:
        result = batch.result(entry.job_id)
        if entry.job_id not in known or result is None:
            continue
        named = any(wanted in (entry.name, Path(entry.name).stem) for wanted in only)
        if named or (not only and result.state != "succeeded"):
            chosen.append(entry.job_id)
    return chosen


def _show(outcome: grading.Outcome, as_json: bool) -> int:
    counts = outcome.counts
    if as_json:
        click.echo(json.dumps(grading.as_json(outcome), ensure_ascii=False))
    else:
        table(("submission", "state", "points", "remarks"), summary_rows(outcome.grades), right=("points",))
        for alarm in outcome.alarms:
            say(f"Look at the class: {alarm}")
        if not outcome.worked:
            say("Everything is already graded; no engine was called.")
        say(f"Report: {outcome.folder / 'report.html'}   Grades: {outcome.folder / 'grades.csv'}")
    if counts.open:
        stderr.print(f"{counts.open} jobs are still open; go on with: kvasir watch {outcome.folder}", soft_wrap=True)
    incomplete = any(made.state in ("failed", "incomplete") for made in outcome.grades)
    return 1 if incomplete or counts.done != counts.succeeded else 0


COMMANDS = (grade, submit, watch, results, retry, cancel)
