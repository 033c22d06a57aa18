"""The `kvasir` command: its root, and the only place that turns errors into exit codes.

Exit codes: 0 all succeeded, 1 some jobs failed or nobody has said whose a grade is, 2 bad usage or input, 3 the cluster
can't be reached, 130 interrupted.
"""

import sys
from collections.abc import Iterator, Mapping, MutableMapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import cast

import click

from infra.config import next_command
from kvasir.early import EXIT_INTERRUPTED, interrupt
from kvasir.help_texts import COMPLETION, complete
from kvasir.options import Globals
from kvasir.terminal import adapt_streams_to_locale, say, stderr
from messages.errors import BrokerUnavailable, DeadLetter, KvasirError, StoreUnavailable, UsageError
from monitoring.logs import Style, configure

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_UNREACHABLE = 3

# Each module with its commands. A module is imported when one of its commands is asked for, because importing all of
# them takes most of a second.
_MODULES = {
    "kvasir.commands.ask": ("ask",),
    "kvasir.commands.assign": ("assign",),
    "kvasir.commands.batch": ("cancel", "grade", "migrate", "results", "retry", "submit", "watch"),
    "kvasir.commands.config": ("config",),
    "kvasir.commands.dead_letters": ("dead",),
    "kvasir.commands.demo": ("demo",),
    "kvasir.commands.deploy": ("deploy",),
    "kvasir.commands.engines": ("doctor", "engines"),
    "kvasir.commands.error_bound": ("bound",),
    "kvasir.commands.evaluate": ("evaluate",),
    "kvasir.commands.export": ("export",),
    "kvasir.commands.forget": ("forget",),
    "kvasir.commands.logs": ("job", "logs"),
    "kvasir.commands.pause_resume_drain": ("drain", "pause", "resume"),
    "kvasir.commands.plan": ("plan",),
    "kvasir.commands.regrade": ("regrade",),
    "kvasir.commands.requests": ("requests",),
    "kvasir.commands.rubric": ("rubric",),
    "kvasir.commands.run": ("run",),
    "kvasir.commands.serve": ("keys", "serve"),
    "kvasir.commands.status": ("status",),
    "kvasir.commands.top": ("top",),
    "kvasir.commands.ui": ("ui",),
    "kvasir.commands.worker": ("decode-worker", "prefill-worker", "worker"),
    "kvasir.measure": ("measure",),
}
_HOMES = {name: module for module, names in _MODULES.items() for name in names}
RESUMABLE_COMMANDS = ("demo", "grade", "submit", "watch", "retry", "regrade", "run", "evaluate")  # where they stopped


@click.group(
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110},
    epilog="\b\nCompletion in bash (in zsh, replace bash_source by zsh_source; in fish, replace it by fish_source):"
    f"\n  {COMPLETION}",
)
@click.version_option(package_name="kvasir-inference", prog_name="kvasir")
@click.option(
    "--config",
    "config_file",
    type=click.Path(path_type=Path),
    help="Read this configuration file [default: ./kvasir.toml].",
)
@click.option(
    "--log-level",
    type=click.Choice(["debug", "info", "warning", "error"]),
    default="warning",
    show_default=True,
    help="Write log messages of this level and of higher levels to stderr.",
)
@click.option(
    "--log-style",
    type=click.Choice(["console", "json"]),
    default="console",
    show_default=True,
    help="Choose the log format.",
)
@click.pass_context
def kvasir(context: click.Context, config_file: Path | None, log_level: str, log_style: Style) -> None:
    """Grade a class's homework with language models, and lose nothing.

    Without a broker everything runs in this process. With KVASIR_BROKER_URL and KVASIR_STORE_URL (or kvasir.toml)
    the same commands use the cluster.
    """
    interrupt()  # click has imported the command by now
    context.obj = Globals(config_file, log_level, log_style)
    next_command.keep(config_file)
    configure(log_level, log_style)


class _Commands(Mapping[str, click.Command]):
    """The commands by name. See `_MODULES`."""

    def __getitem__(self, name: str) -> click.Command:
        values = vars(import_module(_HOMES[name])).values()
        return complete(next(value for value in values if isinstance(value, click.Command) and value.name == name))

    def __iter__(self) -> Iterator[str]:
        return iter(_HOMES)

    def __len__(self) -> int:
        return len(_HOMES)


kvasir.commands = cast(MutableMapping[str, click.Command], _Commands())


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command and exit with its code."""
    sys.exit(run_command(arguments))


def run_command(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code. Kvasir's errors become one sentence on stderr."""
    adapt_streams_to_locale()
    try:
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
        say(f"interrupted{hint}", stderr)
        return EXIT_INTERRUPTED
    except KvasirError as error:
        say(f"kvasir: {error}", stderr)
        return _code_of(error)
    except BrokenPipeError:  # the program that reads our output has ended, as in `kvasir results … | head`
        sys.stderr.close()
        return EXIT_FAILURE
    except OSError as error:  # a file error that no other code has handled
        say(f"kvasir: {error.filename or 'a file'} can't be used: {error.strerror or error}", stderr)
        return EXIT_USAGE
    return code if isinstance(code, int) else 0


def _code_of(error: KvasirError) -> int:
    if isinstance(error, BrokerUnavailable | StoreUnavailable):
        return EXIT_UNREACHABLE
    return EXIT_USAGE if isinstance(error, UsageError | DeadLetter) else EXIT_FAILURE


if __name__ == "__main__":
    main()
