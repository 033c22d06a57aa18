"""`regrade`: asks again about what changed in the rubric, compares, and replaces the grades if you agree."""

from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path

import click

from desk.differences import Difference, difference_row
from grading.report.grades import one_line
from infra.config.next_command import next_command
from kvasir.commands.batch import show_outcome
from kvasir.options import Globals, json_option, path, quiet_option, wait_option
from kvasir.regrading import Regrade
from kvasir.terminal import TerminalProgress, confirm, print_table, say, shortened, stderr
from producers.words import plural

_NO_CHANGE_MESSAGE = "the grades stay as they are"


@click.command()
@click.argument("batch", type=path)
@click.option("--criterion", "criteria", multiple=True, metavar="ID", help="Ask about this criterion only.")
@click.option("--rubric", type=path, help="Use another rubric [default: the batch's rubric file with your changes].")
@click.option("--yes", is_flag=True, help="Run and replace the grades without asking.")
@json_option
@quiet_option
@wait_option
@click.pass_obj
def regrade(
    global_options: Globals,
    batch: Path,
    criteria: tuple[str, ...],
    rubric: Path | None,
    yes: bool,
    as_json: bool,
    quiet: bool,
    max_wait: float | None,
) -> int:
    """Ask about what changed in the rubric of the batch in folder BATCH, and compare before anything is replaced.

    Of a class graded with --ask criteria only changed criteria are asked about.
    """
    regrading = Regrade(global_options.settings(), batch, criteria, rubric)
    if not regrading.needed:
        say("Nothing has changed since the class was graded.")
        return 0
    _print_changes(regrading)
    if not (yes or regrading.cost.is_fully_answered) and not confirm("Ask?", _NO_CHANGE_MESSAGE):
        return 1
    with TerminalProgress(quiet) as progress:
        outcome = regrading.run(progress, global_options.observer(), max_wait)
    differences = regrading.differences
    if outcome.counts.open:
        open_jobs = plural(outcome.counts.open, "job", "is", "are")
        say(f"{open_jobs} still open; go on with: {next_command('regrade', batch)}", stderr)
        return 1
    if not as_json:
        people = {grade.submission: one_line(grade.display_name) for grade in outcome.whole}
        _print_differences(differences, people, regrading)
    if regrading.failed:
        say(f"{plural(regrading.failed, 'job')} failed; the same command runs what failed once more", stderr)
        if yes:
            say(_NO_CHANGE_MESSAGE, stderr)
            return 1
    if not yes and not confirm(
        "Replace the grades?", f"{_NO_CHANGE_MESSAGE}; those of the regrade are in {outcome.folder}"
    ):
        return 1
    changed_rows = [difference_row(difference) for difference in differences if not difference.is_none]
    return show_outcome(regrading.adopt(), as_json, {"cost": asdict(regrading.cost), "changed": changed_rows})


def _print_changes(regrading: Regrade) -> None:
    """Print what changed, what it costs to ask about it, and what need not be asked."""
    say(str(regrading.cost), stderr)
    for criterion, shared_words in regrading.may_affect.items():
        say(_ruling_sentence(criterion, shared_words), stderr)
    if regrading.cost.answered:
        say(f"{plural(regrading.cost.answered, 'job', 'is', 'are')} answered already, in {regrading.place}.", stderr)


def _ruling_sentence(criterion: str, shared_words: dict[str, tuple[str, ...]]) -> str:
    if not shared_words:
        return f"The rulings on {criterion} share no telling word with anybody's evidence."
    start = f"Look there first: the rulings on {criterion} share words with the evidence of "
    return shortened(start, [f"{name} ({', '.join(words)})" for name, words in shared_words.items()])


def _print_differences(differences: list[Difference], people: Mapping[str, str], regrading: Regrade) -> None:
    changed_rows = [difference_row(difference, people) for difference in differences if not difference.is_none]
    if changed_rows:
        say("The models' points, without people's decisions and deductions for lateness:")
        print_table(
            tuple(changed_rows[0]),
            # without blanks around the arrows, each row fits into 80 columns
            [[text.replace(" → ", "→") for text in row.values()] for row in changed_rows],
            right=("before", "after", "change"),
        )
    say(f"{len(changed_rows)} of {plural(len(differences), 'submission')} would change.")
    if regrading.decided:
        say(f"Points that a person typed would stay: {regrading.decided:,} about these criteria.")
    for line in regrading.lapsing:
        say(line)
