"""`kvasir status`: shows the cluster's workers, queues and store as they are now."""

import json
from collections import defaultdict
from collections.abc import Iterator
from contextlib import closing
from dataclasses import asdict
from typing import Any

import click
from rich.console import Group
from rich.table import Table

from infra.broker import topology
from infra.broker.base import Broker
from infra.config.settings import Settings
from kvasir.connect import connect, is_cluster, open_stores
from kvasir.missing import missing_workers
from kvasir.options import Globals, json_option
from kvasir.plan.cluster import remainder_of
from kvasir.terminal import make_table, print_table, say, stdout
from messages.workers import WorkerInfo
from prefill_worker.admission import high_water_mark
from producers.client import Client

_FAR_SLOWER = 4


@click.command()
@json_option
@click.pass_obj
def status(global_options: Globals, as_json: bool) -> int:
    """Show the cluster: workers, queues, store, and results that nobody fetched."""
    settings = global_options.settings()
    if not is_cluster(settings):
        say("No broker is configured: kvasir runs everything in its own process, and nothing is running now.")
        return 0
    with connect(settings, (), name="status") as client:
        finish = remainder_of(settings, client).finish()
        state = cluster_state(settings, client) | {
            "finish": finish and asdict(finish) | {"interval_s": finish.interval_s}
        }
    click.echo(json.dumps(state)) if as_json else _print(state)
    if finish and not as_json:
        say(f"Everything that waits: {finish.words()}")
    return 0


def cluster_state(settings: Settings, client: Client) -> dict[str, Any]:
    """Return what `kvasir status --json` prints: workers (present and missing), queues, unserved models, store."""
    return {
        "workers": [_worker(registration) for registration in client.workers()],
        "queues": queue_depths(client.broker, list(settings.models)),
        "unserved": client.unserved(settings.models),
        "unprefilled": client.unprefilled(settings.models),
        "missing": missing_workers(settings, client.cluster_state),
        "store": store_state(settings),
    }


def store_state(settings: Settings) -> dict[str, Any]:
    """Return how full the store is, how much running prefills have reserved, and whether the next one has to wait."""
    with closing(open_stores(settings)) as stores:
        usage, reserved_bytes = stores.kv.usage(), stores.cluster_state.reserved_bytes()
    return {
        "used_bytes": usage.used_bytes,
        "reserved_bytes": reserved_bytes,
        "mark_bytes": high_water_mark(usage),
        "max_bytes": usage.max_bytes,
        "full": round(usage.used_bytes / usage.max_bytes, 3) if usage.max_bytes else 0.0,
    }


def _worker(registration: WorkerInfo) -> dict[str, Any]:
    names = ("worker_id", "role", "model", "engine", "device", "slots", "busy", "done", "tokens_per_s", "transfers_kv")
    fields = {name: getattr(registration, name) for name in (*names, "off", "notes")}
    return fields | {name: getattr(registration.details, name) for name in ("roles", "paused_because")}


def queue_depths(broker: Broker, models: list[str]) -> dict[str, int]:
    """Return the number of ready messages in each queue that has any; work queues are always included."""
    specs = list(topology.queues(models, broker.is_clustered))
    always = {spec.name for spec in specs if spec.exchange == topology.WORK and spec.name.endswith((".now", ".bulk"))}
    depths = broker.depths(*(spec.name for spec in specs))
    return {name: depth.ready for name, depth in depths.items() if depth and (depth.ready or name in always)}


def _print(state: dict[str, Any]) -> None:
    stdout.print(worker_table(state), crop=False)
    print_table(("queue", "ready"), [[name, str(ready)] for name, ready in state["queues"].items()], right=("ready",))
    for sentence in (store_line(state["store"]), *remarks(state)):
        say(sentence)


def worker_table(state: dict[str, Any]) -> Table | Group:
    """Return the workers, those of a model together. A worker that does nothing has no tokens/s."""
    rows = [
        (
            worker["model"],
            worker["role"],
            worker["worker_id"],
            worker["engine"] + (f" on {worker['device']}" if worker["device"] != worker["engine"] else ""),
            f"{worker['busy']}/{worker['slots']}",
            f"{worker['done']:,}",
            f"{worker['tokens_per_s']:,.0f}" if worker["busy"] and not worker["paused_because"] else "",
            " ".join(filter(None, (worker["off"], worker["notes"]))),
        )
        for worker in sorted(state["workers"], key=lambda worker: (worker["model"], worker["role"] != "prefill"))
    ]
    headings = ("model", "stage", "worker", "engine", "busy", "done", "tokens/s", "remark")
    return make_table(headings, rows, right=("busy", "done", "tokens/s"))


def remarks(state: dict[str, Any]) -> list[str]:
    """Return sentences about problems of the cluster."""
    return [
        *state["missing"],
        *_slow_workers(state["workers"]),
        *(
            f"{worker['worker_id']} paused itself: {why}."
            for worker in state["workers"]
            if (why := worker["paused_because"])
        ),
        *(f"Nobody serves {model}: its jobs wait for a decode worker." for model in state["unserved"]),
        *(
            f"No prefill worker serves {model}: its decode workers do the prompts, which takes longer."
            for model in state["unprefilled"]
        ),
    ]


def _slow_workers(workers: list[dict[str, Any]]) -> Iterator[str]:
    """Yield a sentence for each busy worker that is far slower than another one with the same engine and device."""
    alike = defaultdict(list)
    for worker in workers:
        if worker["busy"] and worker["tokens_per_s"]:
            alike[tuple(worker[name] for name in ("model", "role", "engine", "device"))].append(worker)
    for group in alike.values():
        fastest = max(group, key=lambda worker: worker["tokens_per_s"])
        for worker in group:
            if worker["tokens_per_s"] * _FAR_SLOWER < fastest["tokens_per_s"]:
                yield (
                    f"{worker['worker_id']} makes {worker['tokens_per_s']:,.0f} tokens/s and {fastest['worker_id']} "
                    f"{fastest['tokens_per_s']:,.0f}: look at its machine (another program, heat, swapping)."
                )


def store_line(store: dict[str, Any]) -> str:
    """Describe what the store holds in one sentence."""
    used_gb, reserved_gb, mark_gb, limit_gb = (
        store[f"{name}_bytes"] / 1e9 for name in ("used", "reserved", "mark", "max")
    )
    line = f"Store: {used_gb:.2f} GB{f' of {_rounded(limit_gb)} GB' if limit_gb else ''} in use"
    line += f", {reserved_gb:.2f} GB reserved by prefills under way"
    return f"{line}; prefill fills it up to {_rounded(mark_gb)} GB" if limit_gb else line


def _rounded(size_gb: float) -> str:
    return f"{size_gb:,.1f}" if size_gb >= 1 else f"{size_gb:.2g}"
