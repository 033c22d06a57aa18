"""`kvasir job`: one job's life, from its batch's folder, its workers' logs, and what broker and store know of it."""

from collections.abc import Iterator
from pathlib import Path

import click

from infra.config.next_command import next_command
from infra.config.settings import Settings
from kvasir.commands.logs import lines_in_order, lines_with
from kvasir.commands.status import cluster_state, remarks
from kvasir.commands.top_batches import batch_folders
from kvasir.connect import connect, is_cluster
from kvasir.options import Globals, path, ssh_config_option
from kvasir.terminal import say
from messages import codec
from messages.jobs import JobResult
from monitoring.logs import as_console_line
from producers.batch.batch import Batch
from producers.batch.dead_letters import DeadLetters, LetterFilter
from producers.client import Client

_MOST_EVENTS = 8
_FIELDS_OF_ALL = (
    "job",
    "batch",
    "model",
    "stage",
    "run",
    "lane",
)  # the same in each of its lines, or told by its event


@click.command()
@click.argument("job_id", metavar="ID")
@click.option("--batch", "folder", type=path, help="Its batch's folder [default: those in results/].")
@ssh_config_option
@click.pass_obj
def job(global_options: Globals, job_id: str, folder: Path | None, ssh_config: Path | None) -> None:
    """Tell a job's life: what happened to it, who had it, where it is, and why it waits.

    ID is a job's id, or the start of one that is in a batch's folder. What happened is read from the logs of the
    machines of kvasir.toml, over ssh.
    """
    settings = global_options.settings()
    batch, entry = next(
        (
            (batch, entry)
            for batch in (Batch(place, is_owner=False) for place in ([folder] if folder else batch_folders()))
            for entry in batch.entries
            if entry.job_id.startswith(job_id)
        ),
        (None, None),
    )
    job_id, model = (entry.job_id, entry.model) if entry else (job_id, "")
    say(f"job {job_id}: {f'{entry.item_id} of {batch.folder}, for {model}' if batch and entry else 'of no batch here'}")
    events = lines_in_order(settings, lines_with(job_id), ssh_config, set()) if settings.machines else []
    for name, line in events[-_MOST_EVENTS:]:
        say(f"{as_console_line(line, _FIELDS_OF_ALL)} ({name})")
    result = batch.result(job_id) if batch else None
    if result or not is_cluster(settings):
        return say(_ending(result) if result else "It has no result, and without a broker nothing runs now.")
    with connect(settings, (), name="job") as client:
        for sentence in _whereabouts(settings, client, batch, job_id, model):
            say(sentence)


def _whereabouts(settings: Settings, client: Client, batch: Batch | None, job_id: str, model: str) -> Iterator[str]:
    """Where a job is that has no result in a batch's folder, and why it waits there."""
    if batch and not batch.is_confirmed(job_id):
        yield f"It was never sent: {next_command('watch', batch.folder)} does that."
    run = batch.runs.get(job_id, 1) if batch else 1
    # What nobody decodes is claimed by that, for a millisecond.
    ((body, _),) = client.cluster_state.take_up("kvasir-job", [(job_id, run)], 0.001)
    if body:
        yield f"{_ending(codec.decode(body, JobResult))} That is in the store, and on its way to its batch's owner."
    holders = [worker for worker in client.workers() if job_id in worker.jobs]
    yield from (f"{holder.worker_id} has it now, for {holder.role}." for holder in holders)
    if body or holders:
        return
    with DeadLetters(client.broker) as dead_letters:
        letters = dead_letters.matching(LetterFilter(jobs=[job_id]))
    yield from (f"It is a dead letter: {letter.error}: {letter.message}" for letter in letters)
    state = cluster_state(settings, client)
    places = [f"{ready:,} in {queue}" for queue, ready in state["queues"].items() if ready and model in queue]
    yield f"Nobody has it now. Jobs that wait: {', '.join(places) or 'none'}."
    yield from remarks(state)


def _ending(result: JobResult) -> str:
    prefill, decode, error = result.prefill, result.decode, result.error
    if error:
        return f"It failed at {error.stage} after {result.attempts} attempts: {error.kind}: {error.message}."
    return (
        f"It {result.state}: prefilled by {prefill.worker_id or 'nobody'} in {prefill.prefill_s:.1f} s, decoded by "
        f"{decode.worker_id or 'nobody'} in {decode.decode_s:.1f} s, {decode.total_s:.1f} s in all; KV transfer: "
        f"{decode.why_none or decode.kv_transfer}."
    )
