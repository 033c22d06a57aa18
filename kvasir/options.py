"""Options that several commands share, and what they add up to."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import click

from infra.settings import Settings, load_settings
from messages.lifecycle import Moment
from monitoring import logs
from monitoring.events import fan_out

F = TypeVar("F", bound=Callable[..., Any])

Observer = Callable[[Moment], None]


@dataclass(frozen=True, slots=True)
class Globals:
    """What was given before the command's name."""

    config: Path | None
    log_level: str
    log_style: str

    def settings(self, **flags: object) -> Settings:
        """The settings, with these flags on top; a flag that is None was not given."""
        given = {name: value for name, value in flags.items() if value is not None}
        return load_settings(given, config=self.config)

    def observer(self) -> Observer:
        """What is told of each job's steps."""
        return fan_out(logs.log_moment)


def global_options(function: F) -> F:
    """--config and the log options, kept for the commands."""

    @click.option("--config", type=click.Path(path_type=Path), help="Configuration file [default: ./kvasir.toml].")
    @click.option(
        "--log-level",
        type=click.Choice(["debug", "info", "warning", "error"]),
        default="warning",
        show_default=True,
        help="How much is logged, to stderr.",
    )
    @click.option(
        "--log-style", type=click.Choice(["console", "json"]), default="console", show_default=True, help="Log format."
    )
    @click.pass_context
    def with_globals(
        context: click.Context, /, config: Path | None, log_level: str, log_style: str, **rest: Any
    ) -> object:
        context.obj = Globals(config, log_level, log_style)
        logs.configure(log_level, "json" if log_style == "json" else "console")
        return context.invoke(function, **rest)

    with_globals.__doc__ = function.__doc__
    return with_globals  # type: ignore[return-value]


def grading_options(function: F) -> F:
    """What to grade, for `grade` and `submit`."""
    path = click.Path(path_type=Path)
    for option in reversed(
        [
            click.argument("folder", type=path),
            click.option("--rubric", type=path, required=True, help="Rubric, YAML or JSON."),
            click.option("--solution", type=path, help="Reference solution."),
            click.option("--template", type=path, help="What the students were given to start from."),
            click.option("--code-model", metavar="M", help="Model that grades code [default: from the configuration]."),
            click.option("--feedback-model", metavar="M", help="Model that grades text and writes feedback."),
            click.option("--out", type=path, help="Folder of the batch [default: results/FOLDER's name]."),
            click.option("--limit", type=click.IntRange(0), default=0, help="Only the first N submissions."),
            click.option("--only", default="", metavar="IDS", help="Only these: names or LMS ids, comma-separated."),
            click.option(
                "--samples",
                type=click.IntRange(1, 15),
                default=1,
                help="Answers to each prompt, from one prefill; where they disagree, a person looks.",
            ),
        ]
    ):
        function = option(function)
    return function


def out_folder(folder: Path, out: Path | None) -> Path:
    """Where a batch lives unless it is said."""
    return out or Path("results") / (folder.resolve().stem or "batch")


def id_list(text: str) -> tuple[str, ...]:
    """`a, b` as ('a', 'b')."""
    return tuple(part.strip() for part in text.split(",") if part.strip())
