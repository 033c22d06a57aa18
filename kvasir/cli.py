"""The `kvasir` command: its root, and the one place that turns errors into exit codes.

Exit codes: 0 all succeeded, 1 some jobs failed, 2 bad usage or input, 3 the cluster can't be reached,
130 interrupted.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence

import click

from kvasir.commands import batch as batch_commands
from kvasir.commands import dead_letters as dead_commands
from kvasir.commands import demo, top
from kvasir.commands import deploy as deploy_commands
from kvasir.commands import engines as engine_commands
from kvasir.commands import error_bound as bound_commands
from kvasir.commands import export as export_commands
from kvasir.commands import forget as forget_commands
from kvasir.commands import migrate as migrate_commands
from kvasir.commands import pause as pause_commands
from kvasir.commands import query as query_commands
from kvasir.commands import regrade as regrade_commands
from kvasir.commands import requests as requests_commands
from kvasir.commands import run as run_commands
from kvasir.commands import serve as serve_commands
from kvasir.commands import ui as ui_commands
from kvasir.commands import worker as worker_commands
from kvasir.early import EXIT_INTERRUPTED, interrupt
from kvasir.help_texts import COMPLETION, complete
from kvasir.options import global_options
from kvasir.plan import command as plan_command
from kvasir.terminal import adapt_streams_to_locale
from messages.errors import BrokerUnavailable, DeadLetter, KvasirError, StoreUnavailable, UsageError

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_UNREACHABLE = 3

RESUMABLE_COMMANDS = ("demo", "grade", "submit", "watch", "retry", "regrade", "run")  # where they stopped


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog=f"\b\nCompletion in bash (zsh_source and fish_source for those):\n  {COMPLETION}",
)
@click.version_option(package_name="kvasir-inference", prog_name="kvasir")
@global_options
def kvasir() -> None:
    """Grade a class's homework with language models, and lose nothing.

    Without a broker everything runs in this process. With KVASIR_BROKER_URL and KVASIR_STORE_URL (or kvasir.toml)
    the same commands use the cluster.
    """


for module in (
    demo,
    batch_commands,
    regrade_commands,
    dead_commands,
    deploy_commands,
    export_commands,
    requests_commands,
    bound_commands,
    run_commands,
    migrate_commands,
    serve_commands,
    forget_commands,
    query_commands,
    engine_commands,
    plan_command,
    worker_commands,
    pause_commands,
    top,
    ui_commands,
):
    for command in module.COMMANDS:
        kvasir.add_command(command)
complete(kvasir)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command and leave with its exit code."""
    sys.exit(run_command(arguments))


def run_command(arguments: Sequence[str] | None = None) -> int:
    """Run the command; its exit code. Errors of ours become one sentence on stderr."""
    adapt_streams_to_locale()
    try:
        interrupt()
        code = kvasir.main(args=arguments, prog_name="kvasir", standalone_mode=False)
    except click.exceptions.Exit as leave:
        return leave.exit_code
    except click.ClickException as error:
        error.show()
        return EXIT_USAGE
    except (click.Abort, KeyboardInterrupt):
        words = sys.argv[1:] if arguments is None else arguments
        command = next((word for word in words if word in kvasir.commands), "")
        hint = "; run the same command again to go on where it stopped" if command in RESUMABLE_COMMANDS else ""
        click.echo(f"interrupted{hint}", err=True)
        return EXIT_INTERRUPTED
    except KvasirError as error:
        click.echo(f"kvasir: {error}", err=True)
        return _code_of(error)
    except BrokenPipeError:  # whoever read our output has left: `kvasir results … | head`
        sys.stderr.close()
        return EXIT_FAILURE
    except OSError as error:  # of a file whose reader had nothing better to say
        click.echo(f"kvasir: {error.filename or 'a file'} can't be used: {error.strerror or error}", err=True)
        return EXIT_USAGE
    return code if isinstance(code, int) else 0


def _code_of(error: KvasirError) -> int:
    if isinstance(error, BrokerUnavailable | StoreUnavailable):
        return EXIT_UNREACHABLE
    return EXIT_USAGE if isinstance(error, UsageError | DeadLetter) else EXIT_FAILURE


if __name__ == "__main__":
    main()
