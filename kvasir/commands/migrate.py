"""`kvasir migrate`: plans a batch again that an earlier version planned and never sent."""

from collections.abc import Iterable
from pathlib import Path

import click

from grading.request import WHOLE_CLASS
from infra.config.next_command import next_command
from infra.config.settings import Settings
from kvasir import class_run
from kvasir.options import Globals, path
from kvasir.terminal import say
from producers.batch import batch as batches
from producers.batch.batch import Batch
from producers.batch.openai_body import Defaults
from producers.batch.prompt_lines import check_file, read_lines
from producers.words import plural


@click.command()
@click.argument("batch", type=path)
@click.pass_obj
def migrate(global_options: Globals, batch: Path) -> int:
    """Have the batch in folder BATCH, planned by an earlier version and never sent, planned again from its input.

    Says what has changed in the input since. Sends nothing: the command that it ends with does.
    """
    batches.check_exists(batch)
    with Batch(batch) as owned_batch:
        if owned_batch.may_publish:
            say(f"{batch} is of this version's form already.")
            return 0
        # A batch with answers can't be planned again, because the prompts of these answers can't be rebuilt.
        if not owned_batch.may_plan:
            owned_batch.check_may_publish()
        planned_names = {entry.name for entry in owned_batch.entries}
        names = _names_now(global_options.settings(), owned_batch)
        say(f"{plural(len(owned_batch.entries), 'job')} planned in an older form, none of them sent: dropped.")
        _say_names("In the input and not in the plan", names - planned_names)
        _say_names("In the plan and not in the input", planned_names - names)
        owned_batch.drop_plan()
        source = owned_batch.request.get("prompts")
        go_on = ("run", source, "--out", batch) if source else ("watch", batch)
    say(f"Plan and send it with the options that it had: {next_command(*go_on)}")
    return 0


def _names_now(settings: Settings, batch: Batch) -> set[str]:
    """Return the current lines or submissions of its input, by the names of its jobs. Raises UsageError, BatchError."""
    if prompts := batch.request.get("prompts"):
        check_file(Path(prompts), prompts)
        lines = read_lines(Path(prompts), batch.batch_id, batch.secret, lambda _name: Defaults("any", 1, 0.0, 1.0))
        return {line.custom_id for line in lines}
    request = class_run.request_of_batch(settings, batch, will_run=False)
    return set(request.selected_names(WHOLE_CLASS))


def _say_names(heading: str, names: Iterable[str]) -> None:
    if names:
        say(f"{heading}: {', '.join(sorted(names))}")
