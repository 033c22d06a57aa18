"""`kvasir forget`: a batch's traces deleted everywhere, when the retention period is over."""

from __future__ import annotations

from pathlib import Path

import click

from infra.settings import Settings
from kvasir.connect import connect, is_cluster
from kvasir.options import Globals
from kvasir.terminal import say, stderr
from kvstore.forget import forget_jobs
from producers import batch as batches
from producers.batch import Batch
from producers.client import Client
from producers.dead_letters import DeadLetters, Which

path = click.Path(path_type=Path)

# Everything that kvasir writes into a batch's folder; batch.json last, so that forgetting can be repeated.
FILES = (
    "results.jsonl",
    "submitted.jsonl",
    "reviews.jsonl",
    "grades.csv",
    "grades.json",
    "report.html",
    "answers.jsonl",
    "errors.jsonl",
    "canvas-gradebook.csv",
    "moodle-worksheet.csv",
    "moodle-feedback.zip",
    "feedback-md.zip",
    "feedback-html.zip",
    "batch.json",
    "batch.lock",
)


@click.command()
@click.argument("batch", type=path)
@click.option("--yes", is_flag=True, help="Don't ask.")
@click.pass_obj
def forget(given: Globals, batch: Path, yes: bool) -> int:
    """Delete the batch in folder BATCH everywhere: queues, store, dead letters, and what kvasir wrote in the folder.

    The submissions themselves stay where they are.
    """
    settings = given.settings()
    name = batches.batch_id(batch)
    present = [file for file in FILES if (batch / file).exists()]
    if not yes:
        stderr.print(f"{name}: {', '.join(present)} in {batch}", soft_wrap=True, markup=False)
        click.confirm("Delete this batch and all its grades for good?", abort=True, err=True)
    with Batch(batch) as owned:  # nobody else works on it
        job_ids = [entry.job_id for entry in owned.entries]
        if is_cluster(settings):
            _forget_in_cluster(given, settings, name, job_ids)
        for file in present:
            (batch / file).unlink(missing_ok=True)
    left = sorted(item.name for item in batch.iterdir())
    if not left:
        batch.rmdir()
    say(f"{name} is forgotten: {len(job_ids)} jobs, {len(present)} files")
    if left:
        say(f"Not kvasir's, and left in {batch}: {', '.join(left)}")
    return 0


def _forget_in_cluster(given: Globals, settings: Settings, batch_id: str, job_ids: list[str]) -> None:
    """Queues and store. What still waits for a worker is dropped by whoever takes it: the tombstone says so."""
    with connect(settings, (), given.observer(), "forget") as client:
        client.cancel(batch_id)
        say(f"results that nobody had fetched: {_results(client, batch_id)}")
        with DeadLetters(client.broker) as graveyard:
            say(f"dead letters: {graveyard.drop(graveyard.matching(Which(batch=batch_id)))}")
    say(f"records in the store: {forget_jobs(settings.store_url_with_secret(), job_ids)}")


def _results(client: Client, batch_id: str) -> int:
    """Delete the reply queue, and take what was parked."""
    replies = client.replies(batch_id)
    parked = replies.parked()
    for reply in parked:
        reply.delivery.ack()
    replies.close(delete=True)
    return replies.backlog + len(parked)


COMMANDS = (forget,)
