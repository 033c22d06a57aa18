"""`dead list | show | replay | drop`: what became of jobs that could not succeed."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import click

from infra.config.next_command import next_command
from kvasir.connect import connect, need_cluster
from kvasir.options import Globals, gathered, json_option, together
from kvasir.terminal import confirmed, say, say_json, stderr, table
from messages.errors import UsageError
from producers.batch import batch as batches
from producers.batch.batch import Batch
from producers.batch.dead_letters import DeadLetters, Letter, Which, readable
from producers.client import Client
from producers.words import plural

_ROWS = 100  # of a table; --json has all
_MESSAGE_CHARS = 100

all_option = click.option("--all", "everything", is_flag=True, help="Every letter: needed where nothing else is said.")


@dataclass(frozen=True, slots=True)
class _Filters:
    """Which letters are meant, as it was said."""

    jobs: tuple[str, ...]
    batch: str  # its id, or its folder
    model: str
    error: str

    def which(self) -> Which:
        """What to look for."""
        owned = self.batch and batches.exists(Path(self.batch))
        return Which(batches.batch_id(Path(self.batch)) if owned else self.batch, self.model, self.error, self.jobs)

    def chosen(self, everything: bool) -> Which:
        """The same for what changes letters: raises UsageError where nothing was said."""
        if not (self.jobs or self.batch or self.model or self.error or everything):
            raise UsageError("which dead letters? name jobs, --batch, --model or --error, or say --all")
        return self.which()


# Options that say which letters are meant.
filters = together(
    click.argument("jobs", nargs=-1, metavar="[JOB]..."),
    click.option("--batch", default="", metavar="B", help="Only this batch's: its id, or its folder."),
    click.option("--model", default="", metavar="M", help="Only this model's."),
    click.option("--error", default="", metavar="CLASS", help="Only of this error class, such as Poison."),
    gathered(said=_Filters),
)


@click.group()
def dead() -> None:
    """Look at dead letters: jobs that could not succeed. Each has its failed result already.

    JOB is a job's id, or the start of one. Letters that are not meant stay where they are.
    """


@dead.command("list")
@filters
@json_option
@click.pass_obj
def list_letters(given: Globals, said: _Filters, as_json: bool) -> int:
    """Show which jobs lie among the dead letters, and why."""
    with _opened(given) as (_, graveyard):
        letters = graveyard.matching(said.which())
        if as_json:
            say_json([letter.facts() for letter in letters])
        else:
            _print_letters(letters)
    return 0


@dead.command()
@filters
@json_option
@click.pass_obj
def show(given: Globals, said: _Filters, as_json: bool) -> int:
    """Show everything about dead letters, prompts included."""
    with _opened(given) as (_, graveyard):
        found = [readable(letter) for letter in graveyard.matching(said.which())]
    if as_json:
        say_json(found)
        return 0
    for letter in found:
        for name, value in letter.items():
            say(f"{name}: {_when(value) if name == 'failed_at' else value}")
        say("")
    say(plural(len(found), "dead letter"))
    return 0


@dead.command()
@filters
@all_option
@json_option
@click.pass_obj
def replay(given: Globals, said: _Filters, everything: bool, as_json: bool) -> int:
    """Run the jobs of dead letters once more, each as its job's next run.

    The batch's owner takes the results: `kvasir watch FOLDER` fetches them. With --batch FOLDER the batch also waits
    for them.
    """
    which = said.chosen(everything)
    with _opened(given) as (client, graveyard), _owned(said.batch) as owner:
        done = graveyard.replay(graveyard.matching(which), client, owner)
    if as_json:
        left = [letter.facts() | {"why": why} for letter, why in done.left]
        click.echo(json.dumps({"replayed": [[job.job_id, job.run] for job in done.jobs], "left": left}))
    else:
        for letter, why in done.left:
            stderr.print(f"{letter.envelope.job_id}: stays: {why}", soft_wrap=True, markup=False, highlight=False)
        say(f"{plural(len(done.jobs), 'job')} run again, {plural(len(done.left), 'letter')} left where they were")
        for batch_id in sorted({job.batch_id for job in done.jobs}):
            say(f"Fetch the results of {batch_id} with: {next_command('watch', said.batch if owner else 'FOLDER')}")
    return 1 if done.left else 0


@dead.command()
@filters
@all_option
@click.option("--yes", is_flag=True, help="Don't ask.")
@json_option
@click.pass_obj
def drop(given: Globals, said: _Filters, everything: bool, yes: bool, as_json: bool) -> int:
    """Delete dead letters for good. Their jobs keep their failed results."""
    which = said.chosen(everything)
    with _opened(given) as (_, graveyard):
        letters = graveyard.matching(which)
        if letters and not yes:
            if not as_json:
                _print_letters(letters)
            if not confirmed(f"Delete {plural(len(letters), 'dead letter')} for good?", "nothing was deleted"):
                return 1
        dropped = graveyard.drop(letters)
    if as_json:
        click.echo(json.dumps({"dropped": dropped, "left": len(letters) - dropped}))
    else:
        say(f"{plural(dropped, 'dead letter')} dropped")
    if dropped < len(letters):
        stderr.print("The connection was lost meanwhile; the rest still lies there: run the same command again.")
    return 0 if dropped == len(letters) else 1


@contextmanager
def _opened(given: Globals) -> Iterator[tuple[Client, DeadLetters]]:
    settings = given.settings()
    need_cluster(settings, "dead")
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


def _print_letters(letters: list[Letter]) -> None:
    if not letters:
        return say("No dead letter.")
    rows = [_row(letter) for letter in letters[:_ROWS]]
    table(("job", "batch", "model", "stage", "run", "error", "when", "message"), rows, right=("run",))
    if len(letters) > _ROWS:
        say(f"… and {len(letters) - _ROWS:,} more; --json prints all")
    kinds = Counter(letter.error for letter in letters)
    counted = ", ".join(f"{number} {kind}" for kind, number in kinds.most_common())
    return say(f"{plural(len(letters), 'dead letter')}: {counted}")


def _row(letter: Letter) -> list[str]:
    envelope = letter.envelope
    message = letter.message.replace("\n", " ")
    short = message if len(message) <= _MESSAGE_CHARS else f"{message[: _MESSAGE_CHARS - 1]}…"
    names = [envelope.job_id[:12], envelope.batch_id, envelope.model, envelope.stage, str(envelope.run), letter.error]
    return [*names, _when(letter.failed_at), short]


def _when(seconds: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds)) if seconds else "not known"


COMMANDS = (dead,)
