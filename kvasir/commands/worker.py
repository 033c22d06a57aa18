"""`worker`, `prefill-worker` and `decode-worker`: run one worker as a process, with both roles or one."""

from collections.abc import Callable
from typing import Any

import click

from infra.config.hours import Hours
from kvasir.options import F, Globals, Number, combine_options, group_options, page_options
from kvasir.worker.page import PageOptions
from kvasir.worker.process import DecodeOptions, EngineChoice, WorkerOptions, serve
from messages.errors import InvalidMessage
from messages.workers import BOTH_ROLES, WorkerStage
from monitoring import logs
from producers.words import names_in


def _hours(_context: click.Context, parameter: click.Parameter, value: str) -> Hours:
    try:
        return Hours.parse(parameter.opts[0], value)
    except InvalidMessage as error:
        raise click.BadParameter(str(error)) from None


_worker_options = combine_options(
    click.option("--model", required=True, metavar="M", help="Serve the queue of this model."),
    click.option("--engine", default="", metavar="E", help="Use this engine [default: the engine set for the model]."),
    click.option("--weights", default="", metavar="W", help="Load these weights: a file, folder or URL."),
    click.option(
        "--context",
        type=click.IntRange(0),
        default=0,
        help="Limit the prompt and the answer together to this many tokens.",
    ),
    click.option(
        "--grace",
        "grace_s",
        type=Number(0),
        default=60.0,
        show_default=True,
        help="After SIGTERM, let running jobs finish for up to this many seconds.",
    ),
    click.option(
        "--hours",
        default="",
        metavar="HH:MM-HH:MM",
        envvar="KVASIR_HOURS",
        callback=_hours,
        help="Take jobs only in these hours of local time. Separate several ranges with commas [default: always].",
    ),
    page_options,
    group_options(choice=EngineChoice, page=PageOptions),
)


def _decode_options(kv_cache_help: str) -> Callable[[F], F]:
    return combine_options(
        click.option(
            "--slots",
            type=click.IntRange(0, 1024),
            default=0,
            help="Decode this many jobs at once [default: the number set for the model].",
        ),
        click.option("--kv-cache-gb", type=Number(0), default=2.0, show_default=True, help=kv_cache_help),
        click.option(
            "--steal",
            default="",
            metavar="MODEL[,MODEL…]",
            envvar="KVASIR_STEAL",
            callback=lambda _context, _parameter, value: names_in(value),
            help="When idle, take jobs of these models if that saves time; 'all' means all configured models.",
        ),
        click.option(
            "--memory",
            "memory_gb",
            type=Number(0),
            default=0.0,
            metavar="GB",
            envvar="KVASIR_MEMORY_GB",
            help="Limit the weights of all loaded models to this many GB [default: 80% of this machine's memory].",
        ),
        group_options(decode=DecodeOptions),
    )


def _roles(_context: click.Context, _parameter: click.Parameter, value: str) -> tuple[WorkerStage, ...]:
    names = names_in(value)
    if unknown := set(names) - {*BOTH_ROLES}:
        raise click.BadParameter(f"{min(unknown)!r} is not a role; the roles are {', '.join(BOTH_ROLES)}")
    if not names:
        raise click.BadParameter(f"no role is named: name at least one of {', '.join(BOTH_ROLES)}")
    return tuple(role for role in BOTH_ROLES if role in names)


@click.command("worker")
@_worker_options
@click.option(
    "--roles",
    default=",".join(BOTH_ROLES),
    show_default=True,
    metavar="ROLE[,ROLE]",
    callback=_roles,
    help="Serve the model in these roles. Both roles share one copy of the weights.",
)
@_decode_options("Keep up to this many GB of KV caches in memory: shared ones, and those of its own prefill.")
@click.pass_obj
def worker(global_options: Globals, /, roles: tuple[WorkerStage, ...], **options: Any) -> int:
    """Prefill a model's prompts and generate its answers, whichever is needed more. Stops on SIGTERM after its jobs."""
    return _serve(global_options, *roles, **options)


@click.command("prefill-worker")
@_worker_options
@click.pass_obj
def prefill_worker(global_options: Globals, /, **options: Any) -> int:
    """Compute the KV caches of a model's prompts. Stops on SIGTERM after the job in hand."""
    return _serve(global_options, "prefill", **options)


@click.command("decode-worker")
@_worker_options
@_decode_options("Keep up to this many GB of shared KV caches in memory.")
@click.pass_obj
def decode_worker(global_options: Globals, /, **options: Any) -> int:
    """Generate a model's answers from KV caches in the store. Stops on SIGTERM after the jobs in its slots."""
    return _serve(global_options, "decode", **options)


def _serve(global_options: Globals, *roles: WorkerStage, **options: Any) -> int:
    # The log is all that a worker shows, so it logs at level info by default.
    level = "info" if global_options.log_level == "warning" else global_options.log_level
    logs.configure(level, global_options.log_style, background=True)
    serve(global_options.settings(), WorkerOptions(roles, **options), global_options.observer())
    return 0
