"""`kvasir assign`: whose a submission is, where its name doesn't say, or says what the roster doesn't."""

from __future__ import annotations

from pathlib import Path

import click

from desk.decisions import account
from grading.report.grades import one_line
from grading.roster import keep_answer
from infra.config.next_command import next_command
from kvasir import class_run
from kvasir.options import Globals, path
from kvasir.terminal import say, stderr
from messages.errors import UsageError
from producers.batch import batch as batches
from producers.batch.batch import Batch


@click.command()
@click.argument("batch", type=path)
@click.argument("submission", default="")
@click.argument("person", default="")
@click.pass_obj
def assign(global_options: Globals, batch: Path, submission: str, person: str) -> int:
    """Say whose a SUBMISSION of the batch in folder BATCH is: PERSON is a number, a name or a group of the roster.

    Without them: list what is open. An answer is kept in the folder, and counts in every export.
    """
    settings = global_options.settings()
    batches.batch_id(batch)  # says that there is none
    with Batch(batch) as owned_batch:
        request = class_run.request_of_batch(settings, owned_batch, will_run=False)
        names = sorted({entry.name for entry in owned_batch.entries})
        roster = request.read_roster()
        if not submission:
            open_questions = roster.questions(names)
            for name, question in open_questions.items():
                say(f"{one_line(name)}: {question}")
            if not open_questions:
                say("Nothing is open: whose each submission is, is known.")
            return 1 if open_questions else 0
        meant = [name for name in names if submission in (name, Path(name).name, Path(name).stem)]
        if len(meant) != 1:
            raise UsageError(f"the batch has {'several' if meant else 'no'} submissions called {submission!r:.80}")
        if not person:
            raise UsageError(f"say whose {submission} is: a number, a name or a group of the roster")
        owner = roster.find(person)
        keep_answer(batch, meant[0], owner, account())
        say(f"{one_line(meant[0])} is {roster.shown(owner)}'s.")
        try:
            outcome = class_run.look(settings, owned_batch)
        except UsageError as error:
            stderr.print(f"the table shows it when it is written anew: {error}", soft_wrap=True, markup=False)
            return 0
    if any(grade.submission == meant[0] and grade.has_nothing_yet for grade in outcome.whole):
        say(f"It has not been sent: {next_command('watch', batch)}")
    return 0
