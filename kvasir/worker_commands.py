"""`prefill-worker` and `decode-worker`: one worker a process."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import click

from kvasir.options import Globals
from kvasir.worker_process import WorkerOptions, serve
from monitoring import logs

F = TypeVar("F", bound=Callable[..., Any])


def _worker_options(function: F) -> F:
    for option in reversed(
        [
            click.option("--model", required=True, metavar="M", help="Model name: the queue to serve."),
            click.option("--engine", default="", metavar="E", help="Engine [default: the model's]."),
            click.option("--weights", default="", metavar="W", help="What the engine loads: a file, folder or URL."),
            click.option("--context", type=click.IntRange(0), default=0, help="Tokens a sequence may have."),
            click.option("--grace", type=float, default=60.0, show_default=True, help="Seconds to finish on SIGTERM."),
        ]
    ):
        function = option(function)
    return function


@click.command("prefill-worker")
@_worker_options
@click.pass_obj
def prefill_worker(given: Globals, model: str, engine: str, weights: str, context: int, grace: float) -> int:
    """Compute the KV caches of a model's prompts. Stops on SIGTERM after the job in hand."""
    return _serve(given, WorkerOptions("prefill", model, engine, weights, context, 1, grace))


@click.command("decode-worker")
@_worker_options
@click.option("--slots", type=click.IntRange(0), default=0, help="Jobs decoded at once.")
@click.option(
    "--kv-cache-gb", type=click.FloatRange(0), default=2.0, show_default=True, help="Shared KV kept in memory, in GB."
)
@click.pass_obj
def decode_worker(
    given: Globals,
    model: str,
    engine: str,
    weights: str,
    context: int,
    grace: float,
    slots: int,
    kv_cache_gb: float,
) -> int:
    """Generate a model's answers from KV caches in the store. Stops on SIGTERM after the jobs in its slots."""
    return _serve(given, WorkerOptions("decode", model, engine, weights, context, slots, grace, kv_cache_gb))


def _serve(given: Globals, options: WorkerOptions) -> int:
    if given.log_level == "warning":  # a worker's log is its only face
        logs.configure("info", "json" if given.log_style == "json" else "console")

    serve(given.settings(), options, given.observer())
    return 0


COMMANDS = (prefill_worker, decode_worker)
