"""Options that several commands share."""

import math
import re
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, fields
from functools import wraps
from pathlib import Path
from typing import Any, TypeVar

import click

from grading.request import ASK_FORMS
from infra.config.settings import Settings, load_settings
from monitoring import logs
from monitoring.access import LOOPBACK
from monitoring.events import Observer, fan_out
from monitoring.traces import trace_observers
from producers.words import names_in

F = TypeVar("F", bound=Callable[..., Any])


@dataclass(frozen=True, slots=True)
class Globals:
    """The options before the command's name."""

    config: Path | None
    log_level: str
    log_style: logs.Style

    def settings(self, models: "Models | None" = None) -> Settings:
        """Load the settings, overridden by these flags."""
        flags = asdict(models) if models else {}
        return load_settings({name: value for name, value in flags.items() if value is not None}, config=self.config)

    def observer(self) -> Observer:
        """Return the observer of each job's steps."""
        return fan_out(logs.log_event, *trace_observers())


@dataclass(frozen=True, slots=True)
class BatchPlace:
    """Where a batch is kept.

    With `replace`, another class's batch there is moved aside. With `yes`, grades on which people have decided may be
    replaced without a question.
    """

    out: Path | None = None
    replace: bool = False
    yes: bool = False


@dataclass(frozen=True, slots=True)
class Models:
    """Flags that override the settings; None means not given."""

    code_model: str | None
    feedback_model: str | None


class Number(click.FloatRange):
    """A finite number. Click's own range accepts NaN, because NaN is neither below nor above a limit."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """See click.ParamType."""
        number = float(super().convert(value, param, ctx))
        return number if math.isfinite(number) else self.fail(f"{value!r} is not a finite number.", param, ctx)


path = click.Path(path_type=Path)
json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
quiet_option = click.option("--quiet", is_flag=True, help="Show no progress.")
ssh_config_option = click.option(
    "--ssh-config",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Use this configuration file for ssh (ssh -F).",
)
wait_option = click.option("--max-wait", type=Number(0), metavar="SECONDS", help="Stop waiting after this long.")


def combine_options(*options: Callable[[F], F]) -> Callable[[F], F]:
    """Combine options that several commands share into one decorator."""

    def decorate(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return decorate


def group_options(**groups: type) -> Callable[[F], F]:
    """Pass options as objects.

    Each named argument becomes an object of its class, built from the options with the names of the class's fields.
    """

    def decorate(function: F) -> F:
        @wraps(function)
        def call(*args: Any, **arguments: Any) -> object:
            option_objects = {
                name: cls(**{field.name: arguments.pop(field.name) for field in fields(cls)})
                for name, cls in groups.items()
            }
            return function(*args, **arguments, **option_objects)

        return call  # type: ignore[return-value]

    return decorate


page_options = combine_options(
    click.option(
        "--metrics-port",
        type=click.IntRange(0, 65535),
        envvar="KVASIR_METRICS_PORT",
        help="Serve /metrics, /health, /ready and /status on this port; 0 picks a free port [default: no port].",
    ),
    click.option(
        "--metrics-host",
        default=LOOPBACK,
        show_default=True,
        metavar="ADDRESS",
        help="Listen on this address if --metrics-port is given.",
    ),
)


def only_option(help_text: str) -> Callable[[F], F]:
    """Make the option --only, which can be repeated. Its value is all names given."""

    def names(_context: click.Context, _parameter: click.Parameter, values: Iterable[str]) -> tuple[str, ...]:
        names = tuple(name for text in values for name in names_in(text))
        # An empty value may come from an empty shell variable. If it were ignored, the whole class would be graded.
        if values and not names:
            raise click.BadParameter("the list of names is empty")
        return names

    return click.option("--only", "names", multiple=True, metavar="IDS", callback=names, help=help_text)


def _not_zero(context: click.Context, parameter: click.Parameter, number: int) -> int:
    """Refuse a 0 that a person typed, because it would mean nobody. The default 0 means all."""
    if number == 0 and context.get_parameter_source(str(parameter.name)) is click.core.ParameterSource.COMMANDLINE:
        raise click.BadParameter("0 would grade nobody: leave --limit out to grade everybody")
    return number


# Options for the class's files and models, shared by the commands that grade and the commands that plan.
class_options = combine_options(
    click.option("--solution", type=path, help="Put this reference solution into the models' prompts."),
    click.option(
        "--template", type=path, help="Put this template, the file that students were given, into the models' prompts."
    ),
    click.option("--code-model", metavar="M", help="Grade code with this model [default: from the configuration]."),
    click.option("--feedback-model", metavar="M", help="Grade text and write feedback with this model."),
)

examples_option = click.option(
    "--examples",
    type=path,
    help=(
        "Read hand grades from this CSV (same format as for kvasir evaluate). Some of the graded submissions become "
        "examples in the prompts."
    ),
)

# Options of `grade` and `submit`. `request_from` takes them all, except those of `Models` and `BatchPlace`.
grading_options = combine_options(
    click.argument("folder", type=path),
    click.option("--rubric", type=path, required=True, help="Grade by this rubric (YAML or JSON)."),
    click.option(
        "--roster",
        "rosters",
        type=path,
        multiple=True,
        help="Read the students' names from this CSV of the LMS (gradebook, worksheet or groups); can be repeated.",
    ),
    class_options,
    click.option("--out", type=path, help="Keep the batch in this folder [default: results/TITLE-FOLDER]."),
    click.option("--replace", is_flag=True, help="If --out holds another class's batch, move that batch aside."),
    click.option("--yes", is_flag=True, help="If the rubric has changed, grade again without asking."),
    click.option(
        "--limit", type=click.IntRange(0), default=0, callback=_not_zero, help="Grade only the first N submissions."
    ),
    only_option("Grade only these names or LMS ids, separated by commas; put a name with a comma in double quotes."),
    click.option(
        "--samples",
        type=click.IntRange(1, 15),
        default=1,
        help=(
            "Ask for this many answers to each prompt, from one prefill. If answers disagree, the grade needs review."
        ),
    ),
    click.option(
        "--ask",
        type=click.Choice(ASK_FORMS),
        default="together",
        help="Ask about all criteria in one question, or ask one question for each criterion.  [default: together]",
    ),
    examples_option,
)


def default_folder(folder: Path, title: str) -> Path:
    """Return the default folder of a class's batch, such as `results/homework-4-submissions`.

    It is named after the rubric and the submissions' folder.
    """
    words = (re.sub(r"[\W_]+", "-", text.casefold()).strip("-")[:40] for text in (title, folder.resolve().stem))
    return Path("results") / ("-".join(word for word in words if word) or "batch")
