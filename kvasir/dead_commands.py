"""`dead list | show | replay | drop`: what became of jobs that could not succeed."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

import click

from kvasir.connect import connect, is_cluster
from kvasir.options import Globals
from kvasir.terminal import say, stderr, table
from messages.errors import BatchError, UsageError
from producers import batch as batches
from producers.batch import Batch
from producers.client import Client
from producers.dead_letters import DeadLetters, Letter, Which, readable

F = TypeVar("F", bound=Callable[..., Any])

_ROWS = 100  # of a table; --json has all
_MESSAGE_CHARS = 100

json_option = click.option("--json", "as_json", is_flag=True, help="Print as JSON.")
all_option = click.option("--all", "everything", is_flag=True, help="Every letter: needed where nothing else is said.")


def filters(function: F) -> F:
    """Options that say which letters are meant."""
    for option in reversed(
        [
            click.argument("jobs", nargs=-1, metavar="[JOB]..."),
            click.option("--batch", default="", metavar="B", help="Only this batch's: its id, or its folder."),
            click.option("--model", default="", metavar="M", help="Only this model's."),
            click.option("--error", default="", metavar="CLASS", help="Only of this error class, such as Poison."),
        ]
    ):
        function = option(function)
    return function


@click.group()
def dead() -> None:
    """Look at dead letters: jobs that could not succeed. Each has its failed result already.

    JOB is a job's id, or the start of one. Letters that are not meant stay where they are.
    """


@dead.command("list")
@filters
@json_option
@click.pass_obj
def list_letters(given: Globals, jobs: tuple[str, ...], batch: str, model: str, error: str, as_json: bool) -> int:
    """Show which jobs lie among the dead letters, and why."""
    with _opened(given) as (_, graveyard):
        letters = graveyard.matching(_which(jobs, batch, model, error))
        if as_json:
            click.echo(json.dumps([letter.facts() for letter in letters], ensure_ascii=False))
        else:
            _print_letters(letters)
    return 0


@dead.command()
@filters
@json_option
@click.pass_obj
def show(given: Globals, jobs: tuple[str, ...], batch: str, model: str, error: str, as_json: bool) -> int:
    """Show everything about dead letters, prompts included."""
    with _opened(given) as (_, graveyard):
        found = [readable(letter) for letter in graveyard.matching(_which(jobs, batch, model, error))]
    if as_json:
        click.echo(json.dumps(found, ensure_ascii=False))
        return 0
    for letter in found:
        for name, value in letter.items():
            say(f"{name}: {_when(value) if name == 'failed_at' else value}")
        say("")
    say(_counted(len(found), "dead letter"))
    return 0


@dead.command()
@filters
@all_option
@json_option
@click.pass_obj
def replay(
    given: Globals, jobs: tuple[str, ...], batch: str, model: str, error: str, everything: bool, as_json: bool
) -> int:
    """Run the jobs of dead letters once more, each as its job's next run.

    The batch's owner takes the results: `kvasir watch FOLDER` fetches them. With --batch FOLDER the batch also waits
    for them.
    """
    which = _chosen(jobs, batch, model, error, everything)
    with _opened(given) as (client, graveyard), _owned(batch) as owner:
        done = graveyard.replay(graveyard.matching(which), client, owner)
    if as_json:
        left = [letter.facts() | {"why": why} for letter, why in done.left]
        click.echo(json.dumps({"replayed": [[job.job_id, job.run] for job in done.jobs], "left": left}))
    else:
        for letter, why in done.left:
            stderr.print(f"{letter.envelope.job_id}: stays: {why}", soft_wrap=True, markup=False, highlight=False)
        say(f"{_counted(len(done.jobs), 'job')} run again, {_counted(len(done.left), 'letter')} left where they were")
        for batch_id in sorted({job.batch_id for job in done.jobs}):
            say(f"Fetch the results of {batch_id} with: kvasir watch {batch if owner else 'FOLDER'}")
    return 1 if done.left else 0


@dead.command()
@filters
@all_option
@click.option("--yes", is_flag=True, help="Don't ask.")
@json_option
@click.pass_obj
def drop(
    given: Globals,
    jobs: tuple[str, ...],
    batch: str,
    model: str,
    error: str,
    everything: bool,
    yes: bool,
    as_json: bool,
) -> int:
    """Delete dead letters for good. Their jobs keep their failed results."""
    which = _chosen(jobs, batch, model, error, everything)
    with _opened(given) as (_, graveyard):
        letters = graveyard.matching(which)
        if letters and not yes:
            if not as_json:
                _print_letters(letters)
            click.confirm(f"Delete {_counted(len(letters), 'dead letter')} for good?", abort=True, err=True)
        dropped = graveyard.drop(letters)
    if as_json:
        click.echo(json.dumps({"dropped": dropped, "left": len(letters) - dropped}))
    else:
        say(f"{_counted(dropped, 'dead letter')} dropped")
    if dropped < len(letters):
        stderr.print("The connection was lost meanwhile; the rest still lies there: run the same command again.")
    return 0 if dropped == len(letters) else 1


@contextmanager
def _opened(given: Globals) -> Iterator[tuple[Client, DeadLetters]]:
    settings = given.settings()
    if not is_cluster(settings):
        raise BatchError(
            "kvasir dead needs a broker that outlives this process: set KVASIR_BROKER_URL and KVASIR_STORE_URL"
        )
    with connect(settings, (), given.observer(), "dead") as client, DeadLetters(client.broker) as graveyard:
        yield client, graveyard


@contextmanager
def _owned(batch: str) -> Iterator[Batch | None]:
    """The batch whose folder was named, unless its owner is at work: the results then reach that process."""
    if not batches.exists(Path(batch)) or batches.is_owned(Path(batch)):
        yield None
        return
    with Batch(Path(batch)) as owned:
        yield owned


def _which(jobs: tuple[str, ...], batch: str, model: str, error: str) -> Which:
    batch_id = batches.batch_id(Path(batch)) if batch and batches.exists(Path(batch)) else batch
    return Which(batch_id, model, error, jobs)


def _chosen(jobs: tuple[str, ...], batch: str, model: str, error: str, everything: bool) -> Which:
    if not (jobs or batch or model or error or everything):
        raise UsageError("which dead letters? name jobs, --batch, --model or --error, or say --all")
    return _which(jobs, batch, model, error)


def _print_letters(letters: list[Letter]) -> None:
    if not letters:
        return say("No dead letter.")
    rows = [_row(letter) for letter in letters[:_ROWS]]
    table(("job", "batch", "model", "stage", "run", "error", "when", "message"), rows, right=("run",))
    if len(letters) > _ROWS:
        say(f"… and {len(letters) - _ROWS:,} more; --json prints all")
    kinds = Counter(letter.error for letter in letters)
    counted = ", ".join(f"{number} {kind}" for kind, number in kinds.most_common())
    return say(f"{_counted(len(letters), 'dead letter')}: {counted}")


def _row(letter: Letter) -> list[str]:
    envelope = letter.envelope
    message = letter.message.replace("\n", " ")
    short = message if len(message) <= _MESSAGE_CHARS else f"{message[: _MESSAGE_CHARS - 1]}…"
    names = [envelope.job_id[:12], envelope.batch_id, envelope.model, envelope.stage, str(envelope.run), letter.error]
    return [*names, _when(letter.failed_at), short]


def _when(seconds: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds)) if seconds else "not known"


def _counted(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


COMMANDS = (dead,)
