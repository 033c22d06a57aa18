"""`regrade`: a rubric was edited; what that touches is asked about anew, compared, and adopted after a yes."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import click

from desk.agreement import Difference, difference_row
from infra.config.next_command import next_command
from kvasir.commands.batch import json_option, show
from kvasir.options import Globals, path, quiet_option, wait_option
from kvasir.regrading import Regrade
from kvasir.terminal import TerminalProgress, confirmed, say, stderr, table
from producers.words import listed, plural

_NAMED = 20  # submissions that a ruling may affect
_UNTOUCHED = "the grades stay as they are"


@click.command()
@click.argument("batch", type=path)
@click.option(
    "--criterion", "criteria", multiple=True, metavar="ID", help="What changed, so that nothing else is asked about."
)
@click.option("--rubric", type=path, help="Another rubric [default: the batch's, as it is now].")
@click.option("--yes", is_flag=True, help="Don't ask, neither before the run nor before the grades are replaced.")
@json_option
@quiet_option
@wait_option
@click.pass_obj
def regrade(
    given: Globals,
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
    again = Regrade(given.settings(), batch, criteria, rubric)
    if not again.needed:
        say("Nothing has changed since the class was graded.")
        return 0
    _say_what(again)
    if not (yes or again.cost.is_fully_answered) and not confirmed("Ask?", _UNTOUCHED):
        return 1
    with TerminalProgress(quiet) as progress:
        tried = again.run(progress, given.observer(), max_wait)
    compared = again.differences
    if tried.counts.open:
        still = plural(tried.counts.open, "job", "is", "are")
        stderr.print(f"{still} still open; go on with: {next_command('regrade', batch)}", soft_wrap=True, markup=False)
        return 1
    if not as_json:
        _print(compared, again.decided)
    if again.failed:
        what = f"{plural(again.failed, 'job')} failed; the same command runs what failed once more"
        stderr.print(what, soft_wrap=True, markup=False)
        if yes:
            stderr.print(_UNTOUCHED, soft_wrap=True, markup=False)
            return 1
    if not yes and not confirmed("Replace the grades?", f"{_UNTOUCHED}; those of the regrade are in {tried.folder}"):
        return 1
    changed = [difference_row(one) for one in compared if not one.is_none]
    return show(again.adopt(), as_json, {"cost": asdict(again.cost), "changed": changed})


def _say_what(again: Regrade) -> None:
    """What changed, what asking about it costs, and what needn't be asked."""
    said = [str(again.cost), *(_ruled(criterion, found) for criterion, found in again.may_affect.items())]
    if again.cost.answered:
        said.append(f"{plural(again.cost.answered, 'job', 'is', 'are')} answered already, in {again.place}.")
    for line in said:
        stderr.print(line, soft_wrap=True, markup=False)


def _ruled(criterion: str, found: dict[str, tuple[str, ...]]) -> str:
    if not found:
        return f"The rulings on {criterion} share no telling word with anybody's evidence."
    named = [f"{name} ({', '.join(words)})" for name, words in list(found.items())[:_NAMED]]
    more = f" and {len(found) - _NAMED} more" if len(found) > _NAMED else ""
    return f"The rulings on {criterion} share words with the evidence of {listed(named)}{more}; look there first."


def _print(found: list[Difference], decided: int) -> None:
    changed = [difference_row(one) for one in found if not one.is_none]
    if changed:
        table(tuple(changed[0]), [tuple(row.values()) for row in changed], right=("before", "after", "change"))
    say(f"{len(changed)} of {plural(len(found), 'submission')} would change.")
    if decided:
        say(f"{plural(decided, 'decision')} of a person about these criteria would stand as before.")


COMMANDS = (regrade,)
