"""`kvasir forget`: deletes a batch's traces everywhere, when the retention period is over."""

from collections import Counter
from contextlib import ExitStack, suppress
from glob import escape
from pathlib import Path

import click

from desk.assignments import FILE, dry_run_work, grading_work, uploaded_documents
from infra.config.settings import Settings
from kvasir.connect import connect, is_cluster
from kvasir.options import Globals, path
from kvasir.terminal import confirm, say, stderr
from kvstore.redis.forget import forget_named
from messages.errors import BatchError, ConfigError
from producers.batch import batch as batches
from producers.batch.batch import Batch
from producers.batch.dead_letters import DeadLetters, LetterFilter
from producers.client import Client, Replies
from producers.storage.private import kept_in
from producers.words import plural


@click.command()
@click.argument("batch", type=path)
@click.option("--yes", is_flag=True, help="Don't ask.")
@click.pass_obj
def forget(global_options: Globals, batch: Path, yes: bool) -> int:
    """Delete the batch in folder BATCH everywhere: queues, store, dead letters, and what kvasir wrote in the folder.

    With it go its regrades, and the submissions that were uploaded to the desk. Submissions elsewhere stay there.
    """
    settings = global_options.settings()
    if batch.is_symlink():
        raise BatchError(f"{batch} is a link: name the folder itself, {batch.resolve()}")
    is_batch = batches.exists(batch)
    if not is_batch and not (batch / FILE).is_file():
        raise BatchError(f"{batch} holds no batch: name the folder that was given to --out")
    name = batches.batch_id(batch) if is_batch else batch.name
    if not yes:
        say(f"{name}: {_file_list(batch)} in {batch}", stderr)
        if not confirm("Delete this batch and all its grades for good?", "nothing was deleted"):
            return 1
    job_ids: set[str] = set()
    with ExitStack() as stack:
        for folder in (batch, *_rounds(batch, name)):
            if grading_work(folder).is_alive or dry_run_work(folder).is_alive:
                raise BatchError(f"another process is working on {folder}: stop that process, or wait until it ends")
            # While the batch is open here, no other process can work on it.
            job_ids |= stack.enter_context(Batch(folder)).every_job()
        if is_batch and is_cluster(settings):
            _forget_in_cluster(global_options, settings, name, job_ids)
        number = _delete(batch)
    say(f"{name} is forgotten: {plural(len(job_ids), 'job')}, {plural(number, 'file')}")
    if batch.exists():
        say(f"Not kvasir's, and left in {batch}: {', '.join(sorted(item.name for item in batch.iterdir()))}")
    if moved_folders := sorted(str(place) for place in batch.absolute().parent.glob(f"{escape(batch.name)}.before-*")):
        say(f"Moved aside by --replace, and each to be forgotten by itself: {', '.join(moved_folders)}")
    say("Not known here, so not deleted: exports written elsewhere with --to, downloads and copies.")
    return 0


def _files(batch: Path) -> list[Path]:
    """Return everything to delete; batch.json and its lock come last."""
    return [*uploaded_documents(batch), *kept_in(batch)]


def _delete(batch: Path) -> int:
    """Delete the files, and folders that are then empty. Returns the number of files."""
    files = _files(batch)
    for file in files:
        file.unlink(missing_ok=True)
    inside = {place for file in files for place in file.parents if batch in (place, *place.parents)}
    for place in sorted(inside, key=lambda place: len(place.parts), reverse=True):
        with suppress(OSError):  # the folder is not empty
            place.rmdir()
    return len(files)


def _rounds(batch: Path, batch_id: str) -> list[Path]:
    """Return the folders of its regrades. A folder with another batch's id is not one, whatever its name is."""
    places = [file.parent for file in kept_in(batch) if file.name == "batch.json" and file.parent != batch]
    return [place for place in places if batches.batch_id(place) == batch_id]


def _file_list(batch: Path) -> str:
    """List the files by name; files in subfolders only by their number."""
    tops = Counter(str(file.relative_to(batch).parts[0]) for file in _files(batch))
    names = [f"{top}/ ({count} files)" if (batch / top).is_dir() else top for top, count in tops.items()]
    return ", ".join(name.replace("handed-in/ (", "handed-in/ (the uploaded submissions: ") for name in names)


def _forget_in_cluster(global_options: Globals, settings: Settings, batch_id: str, job_ids: set[str]) -> None:
    """Delete the batch from queues and store. A tombstone makes workers drop jobs that are still waiting."""
    with connect(settings, (), global_options.observer(), "forget") as client:
        try:
            DeadLetters(client.broker).close()
        # A login without the right to delete, such as a producer's, gets this error before anything is deleted.
        except ConfigError as error:
            raise ConfigError(
                f"nothing was deleted, because only the operator is allowed to forget a batch: {error}"
            ) from None
        client.cancel(batch_id)
        say(f"results that nobody had fetched: {_discard_results(client, batch_id)}")
        with DeadLetters(client.broker) as graveyard:
            say(f"dead letters: {graveyard.drop(graveyard.matching(LetterFilter(batch=batch_id)))}")
    say(f"records in the store: {forget_named(settings.store_url_with_secret(), job_ids)}")


def _discard_results(client: Client, batch_id: str) -> int:
    """Delete the reply queue and the parked results; returns their number."""
    replies = Replies(client.broker, batch_id)
    count = replies.backlog
    for parked_replies in replies.receive_parked():
        for reply in parked_replies:
            reply.delivery.ack()
        count += len(parked_replies)
    replies.close(delete=True)
    return count
