"""`kvasir plan`: how long a class will take on the configured machines, what it costs, and what limits it."""

from __future__ import annotations

import json
import random
from pathlib import Path

import click

from infra.settings import Settings
from kvasir import grading
from kvasir.options import Globals
from kvasir.plan import report, workload
from kvasir.plan.cluster import fleet_of
from kvasir.plan.fleet import Job
from kvasir.plan.forecast import forecast
from kvasir.plan.targets import targets
from messages.errors import UsageError
from producers import grade
from producers.tokens import estimate_tokens

_ANSWERS = {"code": workload.CODE_ANSWER_TOKENS, "feedback": workload.FEEDBACK_ANSWER_TOKENS}


@click.command()
@click.argument("folder", type=click.Path(path_type=Path), required=False)
@click.option("--submissions", type=click.IntRange(1, 100_000), metavar="N", help="Plan for N drawn ones instead.")
@click.option("--rubric", type=click.Path(path_type=Path), help="Rubric, with FOLDER.")
@click.option("--solution", type=click.Path(path_type=Path), help="Reference solution.")
@click.option("--template", type=click.Path(path_type=Path), help="What the students were given to start from.")
@click.option("--code-model", metavar="M", help="Model that grades code [default: from the configuration].")
@click.option("--feedback-model", metavar="M", help="Model that grades text and writes feedback.")
@click.option(
    "--code-answer", type=click.IntRange(1, 1_000_000), metavar="TOKENS", help="Mean answer of the code model."
)
@click.option(
    "--feedback-answer", type=click.IntRange(1, 1_000_000), metavar="TOKENS", help="Mean answer of the other."
)
@click.option("--no-steal", is_flag=True, help="Decode workers serve their own model alone.")
@click.option("--seed", type=int, default=0, show_default=True, help="For the lengths that are drawn.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@click.pass_obj
def plan(
    given: Globals,
    folder: Path | None,
    submissions: int | None,
    rubric: Path | None,
    solution: Path | None,
    template: Path | None,
    code_model: str | None,
    feedback_model: str | None,
    code_answer: int | None,
    feedback_answer: int | None,
    no_steal: bool,
    seed: int,
    as_json: bool,
) -> int:
    """Predict makespan, busy shares, energy and cost of grading FOLDER, or --submissions N, and what limits it.

    Simulates the pipeline on the machines of kvasir.toml with the workers' own rules, calls no model, and ends with the
    team's targets, each met or missed.
    """
    settings = given.settings(code_model=code_model, feedback_model=feedback_model)
    answers = {"code": code_answer or _ANSWERS["code"], "feedback": feedback_answer or _ANSWERS["feedback"]}
    if (folder is None) == (submissions is None):
        raise UsageError("say what to plan for: a FOLDER of submissions, or --submissions N, and not both")
    if submissions:
        jobs = _drawn(settings, submissions, answers, seed)
    else:
        jobs = _of_folder(settings, folder or Path(), rubric, solution, template, answers, seed)
    fleet = fleet_of(settings, list(dict.fromkeys(job.model for job in jobs)), steal=not no_steal)
    made = forecast(settings, fleet, jobs, submissions or len({job.name.split(".")[0] for job in jobs}))
    goals = targets(made, fleet, jobs)
    click.echo(json.dumps(report.as_json(made, goals))) if as_json else report.show(made, goals)
    return 0


def _drawn(settings: Settings, submissions: int, answers: dict[str, int], seed: int) -> list[Job]:
    code, feedback = settings.code_model().name, settings.feedback_model().name
    return workload.drawn(submissions, code, feedback, seed, answers["code"], answers["feedback"])


def _of_folder(
    settings: Settings,
    folder: Path,
    rubric: Path | None,
    solution: Path | None,
    template: Path | None,
    answers: dict[str, int],
    seed: int,
) -> list[Job]:
    """The jobs that grading this folder would make, with estimated tokens and drawn answers."""
    if rubric is None:
        raise UsageError("a folder is planned with the prompts that grading it would make: pass --rubric too")
    request = grading.request_from(settings, folder, rubric, solution, template)
    tasks = grade.prepare(request, "plan", bytes(16)).tasks
    if not tasks:
        raise UsageError(f"{folder} holds no submission that a model would have to read")
    source = random.Random(seed)
    shared = {task.role: estimate_tokens(task.prompt.shared) for task in tasks}
    return workload.longest_first(
        [
            Job(
                task.item_id,
                task.model,
                shared[task.role],
                estimate_tokens(task.prompt.own),
                workload.around(answers[task.role], source),
                prefix=task.role,
            )
            for task in tasks
        ]
    )


COMMANDS = (plan,)
