"""The `kvasir` command: its root, and the only place that turns errors into exit codes.

Exit codes: 0 all succeeded, 1 some jobs failed or nobody has said whose a grade is, 2 bad usage or input, 3 the cluster
can't be reached, 130 interrupted.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

import click

from infra.config import next_command
from kvasir.commands.ask import ask
from kvasir.commands.assign import assign
from kvasir.commands.batch import cancel, grade, migrate, results, retry, submit, watch
from kvasir.commands.config import config
from kvasir.commands.dead_letters import dead
from kvasir.commands.demo import demo
from kvasir.commands.deploy import deploy
from kvasir.commands.engines import doctor, engines
from kvasir.commands.error_bound import bound
from kvasir.commands.evaluate import evaluate_command as evaluate
from kvasir.commands.export import export
from kvasir.commands.forget import forget
from kvasir.commands.logs import job, logs
from kvasir.commands.pause_resume_drain import drain, pause, resume
from kvasir.commands.plan import plan
from kvasir.commands.regrade import regrade
from kvasir.commands.requests import requests
from kvasir.commands.rubric import rubric
from kvasir.commands.run import run
from kvasir.commands.serve import keys, serve
from kvasir.commands.status import status
from kvasir.commands.top import top
from kvasir.commands.ui import ui
from kvasir.commands.worker import decode_worker, prefill_worker, worker
from kvasir.early import EXIT_INTERRUPTED, interrupt
from kvasir.help_texts import COMPLETION, complete
from kvasir.measure import measure
from kvasir.options import Globals
from kvasir.terminal import adapt_streams_to_locale, say, stderr
from messages.errors import BrokerUnavailable, DeadLetter, KvasirError, StoreUnavailable, UsageError
from monitoring.logs import Style, configure

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_UNREACHABLE = 3

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
    context.obj = Globals(config_file, log_level, log_style)
    next_command.keep(config_file)
    configure(log_level, log_style)


for command in (
    *(demo, grade, submit, watch, results, retry, cancel, regrade, assign, dead, deploy, logs, export, requests, bound),
    *(run, migrate, serve, keys, forget, ask, job, status, config, engines, doctor, plan, measure),
    *(worker, prefill_worker, decode_worker, pause, resume, drain, top, ui, rubric, evaluate),
):
    kvasir.add_command(command)
complete(kvasir)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the command and exit with its code."""
    sys.exit(run_command(arguments))


def run_command(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code. Kvasir's errors become one sentence on stderr."""
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
