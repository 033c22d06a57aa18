"""`kvasir run`: answers any batch of prompts, in the format of OpenAI's Batch API."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import click

from infra.config.settings import Settings
from kvasir.compat.models import resolve_model
from kvasir.connect import connect
from kvasir.options import Globals, path, quiet_option, wait_option
from kvasir.plan.cluster import expectation
from kvasir.terminal import TerminalProgress, say, stderr
from messages.errors import BatchError, ConfigError
from messages.lines import on_one_line
from producers.batch import prompt_lines
from producers.batch.batch import Batch, other_form
from producers.batch.openai_body import Defaults
from producers.batch.prompt_lines import PromptLine
from producers.batch.runner import ReadAgain, Runner
from producers.storage.private import write_atomically
from producers.words import plural


@click.command()
@click.argument("prompts", type=path)
@click.option("--model", metavar="M", default="", help="Use this model for lines that name no model.")
@click.option(
    "--max-tokens",
    type=click.IntRange(1),
    help="Limit answers to this many tokens where a line sets no limit [default: the model's limit].",
)
@click.option(
    "--out", type=path, help="Put the batch into this folder [default: a folder in results/ named after PROMPTS]."
)
@click.option("--retry-failed", is_flag=True, help="Run prompts again that failed, expired or were cancelled.")
@click.option("--json", "as_json", is_flag=True, help="Print the counts as JSON.")
@quiet_option
@wait_option
@click.pass_obj
def run(
    global_options: Globals,
    prompts: Path,
    model: str,
    max_tokens: int | None,
    out: Path | None,
    retry_failed: bool,
    as_json: bool,
    quiet: bool,
    max_wait: float | None,
) -> int:
    """Answer every prompt in PROMPTS (JSON lines, as for OpenAI's Batch API, or {"id", "prompt"}).

    Answers go to answers.jsonl in the batch's folder, failures to errors.jsonl. Run it again to go on where it stopped.
    """
    settings = global_options.settings()
    target = out or Path("results") / (prompts.stem or "prompts")
    with Batch(target) as batch, TerminalProgress(quiet) as progress:
        if "folder" in batch.request:
            raise BatchError(f"{target} holds the grades of a class: choose another folder with --out")
        prompt_lines.check_file(prompts, str(prompts))
        resolve = _model_resolver(settings, model, max_tokens)
        objects = prompt_lines.objects_of(batch)

        def lines() -> Iterator[PromptLine]:
            return prompt_lines.read_lines(prompts, batch.batch_id, batch.secret, resolve, model, objects=objects)

        if batch.may_plan:
            prompt_lines.plan(batch, lines(), prompts, next(iter(settings.models), "none"), objects)
        if retry_failed:
            batch.check_may_publish()
            batch.run_again(batch.jobs_to_retry())
        if batch.open_jobs:
            models = sorted({entry.model for entry in batch.open_jobs.values()})
            with connect(settings, models, global_options.observer(), f"run {batch.batch_id}") as client:
                progress.expect(lambda: expectation(settings, client, batch))
                jobs = ReadAgain(lambda: (line.job for line in lines() if line.job))
                Runner(batch, jobs, client, progress).run(max_wait)
        return _write_results(batch, as_json)


def _model_resolver(settings: Settings, default: str, max_tokens: int | None) -> Callable[[str], Defaults]:
    def resolve(name: str) -> Defaults:
        if not name:
            raise ConfigError("no model is named: add a model to the line, or pass --model")
        model_settings = settings.model(resolve_model(settings, name))
        return Defaults(
            model_settings.name,
            max_tokens or model_settings.max_tokens,
            model_settings.temperature,
            model_settings.top_p,
        )

    if default:
        resolve(default)  # a wrong --model is reported once, not for each line
    return resolve


def _write_results(batch: Batch, as_json: bool) -> int:
    """Write both files in the order of the input. Returns 1 if any prompt has no answer."""
    results = [(entry, result) for entry in batch.entries if (result := batch.result(entry.job_id))]
    for name, is_success in (("answers.jsonl", True), ("errors.jsonl", False)):
        rows = [
            on_one_line(json.dumps(prompt_lines.output_line(entry, result, batch.created_at), ensure_ascii=False))
            for entry, result in results
            if (result.state == "succeeded") == is_success
        ]
        write_atomically(batch.folder / name, "".join(row + "\n" for row in rows))
    counts = batch.counts()
    figures = {name: getattr(counts, name) for name in ("total", "succeeded", "failed", "cancelled", "expired", "open")}
    if as_json:
        click.echo(json.dumps({"batch": batch.batch_id, "folder": str(batch.folder), "jobs": figures}))
    else:
        say(f"{counts.succeeded} of {plural(counts.total, 'prompt')} answered: {batch.folder / 'answers.jsonl'}")
        for entry, result in results:
            if result.state != "succeeded":
                say(f"  {entry.name}: {result.error.message if result.error else result.state}")
    if counts.open:
        open_prompts = plural(counts.open, "prompt", "is", "are")
        hint = (
            "run the same command again to go on" if batch.may_publish else other_form(batch.folder, batch.prompt_form)
        )
        say(f"{open_prompts} still open; {hint}", stderr)
    return 0 if counts.succeeded == counts.total else 1
