"""`kvasir top`: shows queues, workers, store and batches live in a terminal."""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import click
from rich.console import Group, RenderableType
from rich.live import Live
from rich.text import Text

from infra.broker import topology
from infra.config.settings import Settings
from kvasir.commands.status import cluster_state, remarks, store_line, worker_table
from kvasir.commands.top_batches import BatchState, find_batches
from kvasir.connect import connect, is_cluster
from kvasir.options import Globals, Number
from kvasir.plan.cluster import expectation
from kvasir.terminal import make_table, stdout
from messages.errors import BrokerUnavailable, StoreUnavailable
from messages.urls import addresses
from producers.batch.batch import Batch
from producers.client import Client

State = dict[str, Any]
EXPECT_EVERY_S = 30.0  # pause between two predictions of a batch's end; a prediction takes a second
_PLACES = ("now", "bulk", "suspects")
_NO_CLUSTER = "No broker is configured: each grading runs in its own kvasir process."
_HEADINGS = ("model", *(f"{stage} {place}" for stage in ("prefill", "decode") for place in _PLACES))


@click.command()
@click.argument("folders", nargs=-1, type=click.Path(path_type=Path))
@click.option("--once", is_flag=True, help="Print one frame and exit.")
@click.option(
    "--every", type=Number(0.2), default=2.0, show_default=True, help="Refresh the screen at this interval, in seconds."
)
@click.pass_obj
def top(global_options: Globals, folders: tuple[Path, ...], once: bool, every: float) -> int:
    """Watch queues, workers, store, and the batches in FOLDERS [default: those in results/]. Ctrl-C leaves.

    Without a cluster the batches alone are shown: what grades them is in their own process.
    """
    settings = global_options.settings()
    watches = find_batches(folders)
    cluster = is_cluster(settings)
    with ExitStack() as stack:
        clients: list[Client] = []
        words_at = lru_cache(maxsize=256)(lambda folder, _moment: _finish_words(settings, folder, clients[0]))

        def look() -> RenderableType:
            if cluster and not clients:
                clients.append(stack.enter_context(connect(settings, (), name="top")))
            watches[:] = find_batches(folders, watches)
            state = cluster_state(settings, clients[0]) if clients else None
            moment = int(time.monotonic() / EXPECT_EVERY_S)
            batches = [watch.look() for watch in watches]
            for number, batch in enumerate(batches):
                if clients and batch.open:
                    batches[number] = replace(batch, finish_words=words_at(watches[number].folder, moment))
            return frame(state, batches, time.time())

        if once:
            stdout.print(look())
        else:
            _live(look, every, _looked_for(settings) if cluster else "")
    return 0


def _finish_words(settings: Settings, folder: Path, client: Client) -> str:
    """Return when a batch will be done in words, or "" if that is unknown."""
    with Batch(folder, is_owner=False) as batch:
        return expectation(settings, client, batch)


def _looked_for(settings: Settings) -> str:
    places = (addresses(url) for url in (settings.services.broker, settings.services.store))
    broker, store = (" or ".join(urlsplit(url).netloc.rpartition("@")[2] or url for url in urls) for urls in places)
    return f"looking for the broker at {broker} and the store at {store} …"


def _live(look: Callable[[], RenderableType], every_s: float, looked_for: str) -> None:
    """Redraw until Ctrl-C. In a pipe, print one frame after the other.

    The screen says what is being looked up until it is found. If a service is unreachable, a message replaces the
    frame, and the next frame tries again.
    """
    try:
        if not stdout.is_terminal or stdout.is_dumb_terminal:
            if looked_for:
                stdout.print(Text(looked_for))
            while True:
                stdout.print(_look_or_problem(look))
                time.sleep(every_s)
        with Live(Text(looked_for), console=stdout, screen=True, auto_refresh=False) as live:
            while True:
                live.update(_look_or_problem(look), refresh=True)
                time.sleep(every_s)
    except KeyboardInterrupt:
        return


def _look_or_problem(look: Callable[[], RenderableType]) -> RenderableType:
    try:
        return look()
    except (BrokerUnavailable, StoreUnavailable) as error:
        return Text(f"{error}\nlooking again", style="red")


def frame(state: State | None, batches: Sequence[BatchState], now: float) -> RenderableType:
    """Return one frame. `state` is what `kvasir status --json` prints about a cluster, or None without one."""
    parts: list[RenderableType] = [Text(time.strftime("%H:%M:%S", time.localtime(now)), style="dim")]
    parts += _cluster(state) if state else [Text(_NO_CLUSTER)]
    if batches:
        parts += [Text(), _batches(batches)]
    elif not state:
        parts.append(Text("There is no batch in results/ yet; kvasir grade makes one, kvasir demo too."))
    return Group(*parts)


def _cluster(state: State) -> list[RenderableType]:
    parts: list[RenderableType] = [_queues(state), Text(), worker_table(state), Text(), _store(state)]
    parts += [Text(sentence, style="bold red") for sentence in remarks(state)]
    other_queues = {name: ready for name, ready in state["queues"].items() if ready and not _is_work(name)}
    if other_queues:
        parts.append(Text("Also waiting: " + ", ".join(f"{name} {ready}" for name, ready in other_queues.items())))
    return parts


def _is_work(queue: str) -> bool:
    return queue.startswith(("prefill.", "decode.", "suspects."))


def _queues(state: State) -> RenderableType:
    """Return the ready messages: one line for each model, with the queues in the order in which a job passes them."""
    ready: dict[str, Counter[str]] = defaultdict(Counter)
    for name, count in state["queues"].items():
        if _is_work(name):
            stage, model = topology.stage_and_model(name)
            # the lane `bulk` has several queues, so their counts are added up
            place = "suspects" if topology.is_suspects_queue(name) else name.rpartition(".")[2].partition("-")[0]
            ready[model][f"{stage} {place}"] += count
    rows = [(model, *(_count(counts.get(place, 0)) for place in _HEADINGS[1:])) for model, counts in ready.items()]
    return make_table(_HEADINGS, rows, right=_HEADINGS[1:])


def _store(state: State) -> Text:
    store = state["store"]
    full = store["max_bytes"] and store["used_bytes"] >= store["mark_bytes"]
    return Text(store_line(store) + ("; prefill waits" if full else ""), style="bold red" if full else "")


def _batches(batches: Iterable[BatchState]) -> RenderableType:
    rows = [
        (
            batch.name,
            f"{batch.result_count:,}/{batch.total:,}",
            f"{batch.result_count / batch.total:.0%}" if batch.total else "–",
            _count(batch.failure_count),
            (batch.finish_words or "unknown") if batch.open else "done",
            batch.batch_id,
        )
        for batch in batches
    ]
    figures = ("jobs", "done", "not succeeded", "left")
    return make_table(("batch", *figures, "id"), rows, right=figures)


def _count(number: int) -> str:
    return f"{number:,}" if number else "·"
