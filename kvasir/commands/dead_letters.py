"""`dead list | show | replay | drop`: looks at jobs that could not succeed, and runs or deletes them."""

import json
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path

import click

from infra.config.next_command import next_command
from kvasir.connect import connect, require_cluster
from kvasir.options import Globals, combine_options, group_options, json_option
from kvasir.terminal import confirm, print_table, say, say_json, stderr
from messages.errors import UsageError
from producers.batch import batch as batches
from producers.batch.batch import Batch
from producers.batch.dead_letters import DeadLetters, Letter, LetterFilter, readable
from producers.client import Client
from producers.words import plural

_ROWS = 100  # the table shows at most this many dead letters; --json prints all
_MESSAGE_CHARS = 100

all_option = click.option(
    "--all",
    "all_letters",
    is_flag=True,
    help="Select all dead letters. Required if you name no JOB, batch, model or error.",
)


@dataclass(frozen=True, slots=True)
class _Filters:
    """Which letters the command line selects."""

    jobs: tuple[str, ...]
    batch: str  # the batch's id or folder
    model: str
    error: str

    def letter_filter(self) -> LetterFilter:
        """Return the filter."""
        return LetterFilter(batches.id_or_folder(self.batch), self.model, self.error, self.jobs)

    def required_filter(self, all_letters: bool) -> LetterFilter:
        """Return the filter for a command that changes letters. Raises UsageError if nothing was selected."""
        if not (self.jobs or self.batch or self.model or self.error or all_letters):
            raise UsageError("no dead letters are selected: name jobs, --batch, --model or --error, or pass --all")
        return self.letter_filter()


# Options that select dead letters.
filter_options = combine_options(
    click.argument("jobs", nargs=-1, metavar="[JOB]..."),
    click.option(
        "--batch", default="", metavar="B", help="Select the dead letters of this batch. B is its id or folder."
    ),
    click.option("--model", default="", metavar="M", help="Select the dead letters of this model."),
    click.option(
        "--error", default="", metavar="CLASS", help="Select the dead letters with this error class, such as Poison."
    ),
    group_options(filters=_Filters),
)


@click.group()
def dead() -> None:
    """Look at dead letters: jobs that could not succeed. Each has its failed result already.

    JOB is a job's id, or the start of one. Letters that are not meant stay where they are.
    """


@dead.command("list")
@filter_options
@json_option
@click.pass_obj
def list_letters(global_options: Globals, filters: _Filters, as_json: bool) -> int:
    """Show which jobs lie among the dead letters, and why."""
    with _open_dead_letters(global_options) as (_, graveyard):
        letters = graveyard.matching(filters.letter_filter())
        if as_json:
            say_json([letter.facts() for letter in letters])
        else:
            _print_letters(letters)
    return 0


@dead.command()
@filter_options
@json_option
@click.pass_obj
def show(global_options: Globals, filters: _Filters, as_json: bool) -> int:
    """Show everything about dead letters, prompts included."""
    with _open_dead_letters(global_options) as (_, graveyard):
        letters = [readable(letter) for letter in graveyard.matching(filters.letter_filter())]
    if as_json:
        say_json(letters)
        return 0
    for letter in letters:
        for name, value in letter.items():
            say(f"{name}: {_format_time(value) if name == 'failed_at' else value}")
        say("")
    say(plural(len(letters), "dead letter"))
    return 0


@dead.command()
@filter_options
@all_option
@json_option
@click.pass_obj
def replay(global_options: Globals, filters: _Filters, all_letters: bool, as_json: bool) -> int:
    """Run the jobs of dead letters once more, each as its job's next run.

    The batch's owner takes the results: `kvasir watch FOLDER` fetches them, for prompts the same `kvasir run`. With
    --batch FOLDER the batch also waits for them.
    """
    letter_filter = filters.required_filter(all_letters)
    with _open_dead_letters(global_options) as (client, graveyard), _own_batch(filters.batch) as owner:
        replay_result = graveyard.replay(graveyard.matching(letter_filter), client, owner)
    if as_json:
        click.echo(
            json.dumps(
                {
                    "replayed": [[job.job_id, job.run] for job in replay_result.jobs],
                    "left": [letter.facts() | {"why": reason} for letter, reason in replay_result.refusals],
                }
            )
        )
    else:
        for letter, reason in replay_result.refusals:
            say(f"{letter.envelope.job_id}: stays: {reason}", stderr)
        say(
            f"{plural(len(replay_result.jobs), 'job')} run again, "
            f"{plural(len(replay_result.refusals), 'letter')} left where they were"
        )
        go_on = owner.go_on_command if owner else f"{next_command('watch', 'FOLDER')}, or the same kvasir run again"
        for batch_id in sorted({job.batch_id for job in replay_result.jobs}):
            say(f"Fetch the results of {batch_id} with the options that it had: {go_on}")
    return 1 if replay_result.refusals else 0


@dead.command()
@filter_options
@all_option
@click.option("--yes", is_flag=True, help="Don't ask.")
@json_option
@click.pass_obj
def drop(global_options: Globals, filters: _Filters, all_letters: bool, yes: bool, as_json: bool) -> int:
    """Delete dead letters for good. Their jobs keep their failed results."""
    letter_filter = filters.required_filter(all_letters)
    with _open_dead_letters(global_options) as (_, graveyard):
        letters = graveyard.matching(letter_filter)
        if letters and not yes:
            if not as_json:
                _print_letters(letters)
            if not confirm(f"Delete {plural(len(letters), 'dead letter')} for good?", "nothing was deleted"):
                return 1
        drop_count = graveyard.drop(letters)
    if as_json:
        click.echo(json.dumps({"dropped": drop_count, "left": len(letters) - drop_count}))
    else:
        say(f"{plural(drop_count, 'dead letter')} dropped")
    if drop_count < len(letters):
        stderr.print("The connection was lost meanwhile; the rest still lies there: run the same command again.")
    return 0 if drop_count == len(letters) else 1


@contextmanager
def _open_dead_letters(global_options: Globals) -> Iterator[tuple[Client, DeadLetters]]:
    settings = global_options.settings()
    require_cluster(settings, "dead")
    with connect(settings, (), global_options.observer(), "dead") as client, DeadLetters(client.broker) as graveyard:
        yield client, graveyard


def _own_batch(batch: str) -> AbstractContextManager[Batch | None]:
    """Open the named batch's folder, unless another process owns the batch: then the results reach that process."""
    is_free = batches.exists(Path(batch)) and not batches.is_owned(Path(batch))
    return Batch(Path(batch)) if is_free else nullcontext()


def _print_letters(letters: list[Letter]) -> None:
    if not letters:
        return say("No dead letter.")
    rows = [_row(letter) for letter in letters[:_ROWS]]
    print_table(("job", "batch", "model", "stage", "run", "error", "when", "message"), rows, right=("run",))
    if len(letters) > _ROWS:
        say(f"… and {len(letters) - _ROWS:,} more; --json prints all")
    kinds = Counter(letter.error for letter in letters)
    kind_counts = ", ".join(f"{number} {kind}" for kind, number in kinds.most_common())
    return say(f"{plural(len(letters), 'dead letter')}: {kind_counts}")


def _row(letter: Letter) -> list[str]:
    envelope = letter.envelope
    message = letter.message.replace("\n", " ")
    short = message if len(message) <= _MESSAGE_CHARS else f"{message[: _MESSAGE_CHARS - 1]}…"
    names = [envelope.job_id[:12], envelope.batch_id, envelope.model, envelope.stage, str(envelope.run), letter.error]
    return [*names, _format_time(letter.failed_at), short]


def _format_time(seconds: int) -> str:
    return time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(seconds)) if seconds else "not known"
