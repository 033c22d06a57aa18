"""`kvasir assign`: says whose a submission is, if its name does not say so or contradicts the roster."""

from pathlib import Path

import click

from desk.decisions import account
from grading.report.grades import one_line
from grading.roster import UNASSIGNED_QUESTION, keep_answer, kept_files, read_rosters
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
    manifest = batches.manifest_of(batch)
    # Includes the submissions that were left out because a run graded only a part of the class.
    names = sorted({*manifest["request"].get("submissions", ()), *(entry.name for entry in manifest["jobs"])})
    roster = read_rosters(kept_files(batch))
    owners = roster.owners(names)
    if not submission:
        open_lines = [one_line(f"{name}: {owner.question}") for name, owner in owners.items() if owner.question]
        answer_hint = [f"Answer with: {next_command('assign', batch)} SUBMISSION PERSON"] if open_lines else []
        say("\n".join([*open_lines, *answer_hint]) or "Nothing is open: it is known whose each submission is.")
        return 1 if open_lines else 0
    matching_names = [name for name in names if submission in (name, Path(name).name, Path(name).stem)]
    if len(matching_names) != 1:
        raise UsageError(
            f"{'several' if matching_names else 'no'} submissions are called {submission!r:.80}: give the submission's "
            "full name"
        )
    owner = roster.find(person)
    keep_answer(batch, matching_names[0], owner, account())
    send = "; to send it, run kvasir grade again" if owners[matching_names[0]].question == UNASSIGNED_QUESTION else ""
    say(f"{one_line(matching_names[0])} is {roster.display_name(owner)}'s{send}")
    return 0
