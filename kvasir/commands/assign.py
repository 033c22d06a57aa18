"""`kvasir assign`: says whose a submission is, if its name does not say so or contradicts the roster."""

from pathlib import Path

import click

from desk.decisions import account
from grading.report.grades import one_line
from grading.roster import keep_answer, kept_files, read_rosters
from infra.config.next_command import next_command
from kvasir.options import path
from kvasir.terminal import say
from messages.errors import UsageError
from producers.batch import batch as batches


@click.command()
@click.argument("batch", type=path)
@click.argument("submission", default="")
@click.argument("person", default="")
def assign(batch: Path, submission: str, person: str) -> int:
    """Say whose SUBMISSION in the batch in folder BATCH is: PERSON is a number, a name or a group of the roster.

    Without SUBMISSION, list what is open. Answers are kept in the folder and count in every export.
    """
    names = sorted({entry.name for entry in batches.manifest_of(batch)["jobs"]})
    roster = read_rosters(kept_files(batch))
    if not submission:
        open_lines = [f"{name}: {owner.question}" for name, owner in roster.owners(names).items() if owner.question]
        say("\n".join(map(one_line, open_lines)) or "Nothing is open: it is known whose each submission is.")
        return 1 if open_lines else 0
    matching_names = [name for name in names if submission in (name, Path(name).name, Path(name).stem)]
    if len(matching_names) != 1:
        raise UsageError(
            f"{'several' if matching_names else 'no'} submissions are called {submission!r:.80}: give its full name"
        )
    owner = roster.find(person)
    keep_answer(batch, matching_names[0], owner, account())
    people = roster.display_name(owner)
    say(f"{one_line(matching_names[0])} is {people}'s; send what was held back: {next_command('watch', batch)}")
    return 0
