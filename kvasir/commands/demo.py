"""`kvasir demo`: grades a small made-up class with a tiny model, in this process.

The exit code is 0 only if exactly the submissions named in expected.json could not be read, each for the reason given
there, and every other one has a grade (the empty one: 0 points, with the reason).
"""

import importlib.util
import json
import shlex
from collections.abc import Iterator
from pathlib import Path

import click

from engines.registry import entries
from grading.points import Grade
from grading.report.grades import load_graded, outcome_of
from infra.config import next_command
from infra.config.settings import Settings, load_settings
from kvasir.commands import batch as batch_commands
from kvasir.options import Globals, Models
from kvasir.terminal import say, stderr
from messages.errors import ConfigError

_INSTALLED_FILES = Path(__file__).parents[1] / "demo_files"
FILES = _INSTALLED_FILES if _INSTALLED_FILES.is_dir() else Path(__file__).parents[2] / "examples"
CONFIG, HOMEWORK = FILES / "demo.toml", FILES / "homework"
INPUTS = {
    "rubric": "rubric.yaml",
    "solution": "solution.ipynb",
    "template": "template.ipynb",
    "roster": "gradebook.csv",
}


class _DemoOptions(Globals):
    """The demo's configuration. It uses none of the user's settings: no cluster and no other models."""

    def settings(self, models: Models | None = None) -> Settings:
        return load_settings(config=CONFIG, environ={}, cwd=HOMEWORK)


@click.command()
@click.option(
    "--out",
    type=click.Path(path_type=Path),
    default=Path("results/demo"),
    show_default=True,
    help="Write the results to this folder.",
)
@click.pass_context
def demo(context: click.Context, out: Path) -> int:
    """Grade a small made-up class with a tiny model on this machine. Needs no services and no account."""
    if not CONFIG.is_file():
        raise ConfigError(
            "this installation does not contain the demo: run it in a checkout, or install a wheel built in a checkout"
        )
    if command := entries()["llamacpp"].install_command():
        raise ConfigError(f"the demo's model needs llama.cpp, which is missing: {command}")
    files = {option: HOMEWORK / name for option, name in INPUTS.items()}
    say(
        "A tiny model grades a made-up class: prefill, KV transfer and decode, all in this process.\n"
        "For your own class you type the same command:\n\n"
        f"  kvasir --config {_short(CONFIG)} grade {_short(HOMEWORK / 'submissions')} \\"
    )
    for option, file in files.items():
        say(f"      --{option} {_short(file)} \\")
    say(f"      --out {_short(out)}\n")
    context.obj = _DemoOptions(CONFIG, context.obj.log_level, context.obj.log_style)
    next_command.keep(CONFIG)
    rosters = (files.pop("roster"),)
    context.invoke(batch_commands.grade, folder=HOMEWORK / "submissions", rosters=rosters, **files, out=out, names=())
    problems = list(_problems(load_graded(out).grades))
    for problem in problems:
        say(f"demo: {problem}", stderr)
    if not problems:
        say(
            "\nAs expected: one file is empty, one is broken, and all others have a grade. They are not real grades:\n"
            "the model knows this kind of toy assignment and nothing else."
        )
    say(f"\nOpen next: {(out / 'report.html').resolve()}\nThe grading desk: {_desk(out)}")
    return 1 if problems else 0


def _problems(grades: tuple[Grade, ...]) -> Iterator[str]:
    """Return the differences from expected.json, one sentence each."""
    expected = json.loads((HOMEWORK / "expected.json").read_text("utf-8"))
    for grade in grades:
        reason = expected["failed"].get(grade.submission, "")
        expected_outcome = "unreadable" if reason else "empty" if grade.submission in expected["empty"] else "graded"
        if outcome_of(grade) != expected_outcome or reason not in grade.reason:
            yield f"{grade.submission} should be {expected_outcome}, but is {outcome_of(grade)}: {grade.reason}"


def _desk(out: Path) -> str:
    if FILES.parent == Path.cwd() and out.absolute() == HOMEWORK / "results":
        return "make ui"
    extra = "" if importlib.util.find_spec("streamlit") else "   (needs pip install 'kvasir-inference[ui]')"
    return f"kvasir --config {_short(CONFIG)} ui {_short(out)}{extra}"


def _short(path: Path) -> str:
    working_folder = Path.cwd()
    return shlex.quote(str(path.relative_to(working_folder) if path.is_relative_to(working_folder) else path))
