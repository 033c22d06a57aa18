"""`kvasir plan`: predicts how long a class will take on the configured machines, what it costs, and what limits it."""

import json
import random
from pathlib import Path

import click

from grading import planning
from grading.request import GradeRequest
from grading.submissions.tokens import estimate_tokens
from kvasir import class_run
from kvasir.options import Globals, Models, class_options, group_options, path
from kvasir.plan import report, workload
from kvasir.plan.cluster import fleet_of
from kvasir.plan.fleet import PlannedJob, models_of
from kvasir.plan.prediction import predict
from kvasir.plan.simulate import typical
from kvasir.plan.targets import targets
from messages.errors import UsageError

_ANSWERS = {"code": workload.CODE_ANSWER_TOKENS, "feedback": workload.FEEDBACK_ANSWER_TOKENS}


@click.command()
@click.argument("folder", type=path, required=False)
@click.option("--submissions", type=click.IntRange(1, 100_000), metavar="N", help="Plan for N made-up submissions.")
@click.option("--rubric", type=path, help="Use this rubric with FOLDER.")
@class_options
@click.option(
    "--code-answer",
    type=click.IntRange(1, 1_000_000),
    metavar="TOKENS",
    help="Set the mean number of tokens in a code model's answer.",
)
@click.option(
    "--feedback-answer",
    type=click.IntRange(1, 1_000_000),
    metavar="TOKENS",
    help="Set the mean number of tokens in a feedback model's answer.",
)
@click.option("--no-steal", is_flag=True, help="Plan without stealing: decode workers serve only their own model.")
@click.option("--seed", type=int, default=0, show_default=True, help="Set the seed for random lengths.")
@click.option("--chart", type=path, metavar="FILE.svg", help="Write an SVG chart of each machine's working times.")
@click.option("--json", "as_json", is_flag=True, help="Print the result as JSON.")
@group_options(models=Models)
@click.pass_obj
def plan(
    global_options: Globals,
    /,
    folder: Path | None,
    submissions: int | None,
    rubric: Path | None,
    solution: Path | None,
    template: Path | None,
    models: Models,
    code_answer: int | None,
    feedback_answer: int | None,
    seed: int,
    no_steal: bool,
    chart: Path | None,
    as_json: bool,
) -> int:
    """Predict makespan, busy shares, energy and cost of grading FOLDER, or --submissions N, and what limits it.

    Simulates the pipeline on the machines of kvasir.toml with the workers' own rules, calls no model, and ends with the
    team's targets, each met or missed.
    """
    settings = global_options.settings(models)
    if (folder is None) == (submissions is None):
        raise UsageError("there is nothing to plan for: name either a FOLDER of submissions or --submissions N")
    documents = {"--rubric": rubric, "--solution": solution, "--template": template}
    if submissions and (named := [name for name, file in documents.items() if file]):
        raise UsageError(
            f"{named[0]} can't be used with --submissions N, which draws random prompts: give a FOLDER instead"
        )
    answers = {"code": code_answer, "feedback": feedback_answer}
    tokens = {aspect: answer or _ANSWERS[aspect] for aspect, answer in answers.items()}
    if submissions:
        names = settings.code_model().name, settings.feedback_model().name
        jobs = workload.draw_class(submissions, *names, seed, tokens["code"], tokens["feedback"])
    elif rubric is None:
        raise UsageError("--rubric is missing: the plan for a FOLDER counts the prompts that grading would make")
    else:
        request = class_run.request_from(settings, folder or Path(), rubric, solution, template)
        jobs = _jobs_of_request(request, tokens, seed)
    fleet = fleet_of(settings, models_of(jobs), steal=not no_steal)
    prediction = predict(settings, fleet, jobs, submissions or len({job.name.split(".")[0] for job in jobs}))
    goals = list(targets(prediction, fleet))
    if chart:
        report.write_chart(chart, typical(fleet, jobs))
    click.echo(json.dumps(report.as_json(prediction, goals))) if as_json else report.print_prediction(prediction, goals)
    return 0


def _jobs_of_request(request: GradeRequest, answers: dict[str, int], seed: int) -> list[PlannedJob]:
    """Return the jobs that the request would make, with estimated prompts and randomly drawn answers."""
    tasks = planning.prepare(request, "plan", bytes(16)).tasks
    if not tasks:
        raise UsageError(f"{request.folder} holds no submission that a model would read")
    source = random.Random(seed)
    shared_tokens = {task.aspect: estimate_tokens(task.job.prompt[0].text) for task in tasks}
    return workload.longest_first(
        [
            PlannedJob(
                task.job.item_id,
                task.job.model,
                shared_tokens[task.aspect],
                estimate_tokens(task.job.prompt[-1].text),
                workload.draw_around(answers[task.aspect], source),
                prefix=task.aspect,
            )
            for task in tasks
        ]
    )
