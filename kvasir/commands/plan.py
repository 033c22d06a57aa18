"""`kvasir plan`: predicts how long a class will take on the configured machines, what it costs, and what limits it."""

import json
import random
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from desk.estimate import duration
from grading import planning
from grading.charts.drawing import Span, spans
from grading.request import GradeRequest
from grading.submissions.tokens import estimate_tokens
from kvasir import class_run
from kvasir.options import Globals, Models, class_options, group_options, path
from kvasir.plan import workload
from kvasir.plan.cluster import fleet_of
from kvasir.plan.fleet import PlannedJob, models_of
from kvasir.plan.prediction import Prediction, predict
from kvasir.plan.simulate import SimulatedRun, typical
from kvasir.plan.targets import Target, targets
from kvasir.terminal import print_table, say
from messages.errors import UsageError
from producers.words import plural

_ANSWERS = {"code": workload.CODE_ANSWER_TOKENS, "feedback": workload.FEEDBACK_ANSWER_TOKENS}
_ASSUMPTIONS = (
    "A slot with a single rate is taken to decode at it whoever sits beside it: `kvasir measure` gives curves.",
    "While a machine prefills it is taken to decode nothing, and models that it decodes side by side to take turns.",
    "How long answers are is assumed, not known: --code-answer and --feedback-answer set their means.",
)


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
@click.option(
    "--seed", type=int, default=0, show_default=True, help="Set the seed for the random lengths of prompts and answers."
)
@click.option(
    "--chart", type=path, metavar="FILE.svg", help="Write an SVG chart of each machine's working times to this file."
)
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
        raise UsageError("there is nothing to plan for: give either a FOLDER of submissions or --submissions N")
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
        raise UsageError(
            "--rubric is missing: to plan for a FOLDER, Kvasir builds the prompts that grading would send, and they "
            "depend on the rubric"
        )
    else:
        request = class_run.request_from(settings, folder or Path(), rubric, solution, template)
        jobs = _jobs_of_request(request, tokens, seed)
    fleet = fleet_of(settings, models_of(jobs), steal=not no_steal)
    prediction = predict(settings, fleet, jobs, submissions or len({job.name.split(".")[0] for job in jobs}))
    goals = list(targets(prediction, fleet))
    if chart:
        _write_chart(chart, typical(fleet, jobs))
    click.echo(json.dumps(_prediction_json(prediction, goals))) if as_json else _print_prediction(prediction, goals)
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


def _prediction_json(prediction: Prediction, goals: Sequence[Target]) -> dict[str, Any]:
    """Return the prediction as plain data: seconds, tokens, kWh, and the currency of [costs]."""
    derived_figures = {
        "students_per_hour": prediction.students_per_hour,
        "utilisation": prediction.utilisation,
        "requests_per_s": prediction.jobs / prediction.makespan_s,
        "energy_wh_per_submission": _per_submission(prediction, prediction.energy_kwh, 1000.0),
        "cost_per_submission": _per_submission(prediction, prediction.cost),
        "cost_per_request": prediction.cost / prediction.jobs if prediction.cost is not None else None,
    }
    return (
        asdict(prediction)
        | derived_figures
        | {"targets": [asdict(goal) for goal in goals], "assumptions": list(_ASSUMPTIONS)}
    )


def _print_prediction(prediction: Prediction, goals: Sequence[Target]) -> None:
    """Print tables and sentences on stdout; the targets come last."""
    say(
        f"{plural(prediction.submissions, 'submission')}, {plural(prediction.jobs, 'request')}: "
        f"{duration(prediction.makespan_s)}, "
        f"{prediction.students_per_hour:.0f} students an hour"
    )
    say(
        f"without stealing {duration(prediction.without_stealing_s)}; "
        f"{_bound_words(prediction)}; "
        f"{plural(prediction.steals, 'request')} decoded by another model's worker"
    )
    say(f"limited by {prediction.limit}")
    watt_hours = _per_submission(prediction, prediction.energy_kwh, 1000.0)
    cost = _per_submission(prediction, prediction.cost)
    energy_words = (
        f"{watt_hours:.1f} Wh a submission" if watt_hours is not None else "watts not known for every machine"
    )
    cost_words = f"${cost:.4f} a submission" if cost is not None else "price_per_kwh in [costs] not known"
    say(f"energy and cost: {energy_words}, {cost_words}")
    say("")
    print_table(
        ("machine", "stage", "busy"), [(b.machine, b.stage, f"{b.share:.0%}") for b in prediction.busy], right=("busy",)
    )
    say("")
    rows = [
        (w.machine, w.stages, duration(w.makespan_s), f"{w.saves_s / prediction.makespan_s:.0%}")
        for w in prediction.what_if
    ]
    print_table(
        ("one more like", "which does", "then it takes", "sooner by"), rows, right=("then it takes", "sooner by")
    )
    say("")
    say("\n".join(_ASSUMPTIONS) + "\n")
    print_table(("target", "goal", "predicted", "", "why"), map(_row, goals))


def _bound_words(prediction: Prediction) -> str:
    if prediction.bound_s is None:
        return "for what no schedule can beat, pip install 'kvasir-inference[plan]'"
    rate = prediction.submissions * 3600 / prediction.bound_s
    return f"no schedule can beat {duration(prediction.bound_s)}, {rate:.0f} students an hour"


def _write_chart(path: Path, run: SimulatedRun) -> None:
    """Write an SVG chart of who works when, like that of a real run. Raises UsageError."""
    prefills = [Span(f"{p.machine} · prefill", p.job.model, p.started_s, p.ended_s) for p in run.prefills]
    answers = [Span(f"{t.machine} · decode", t.job.model, t.started_s, t.ended_s) for t in run.timings]
    bars = [*sorted(prefills, key=lambda bar: bar.row), *sorted(answers, key=lambda bar: bar.row)]
    try:
        path.write_text(spans("Who works when, as predicted", bars).file(), "utf-8")
    except OSError as error:
        raise UsageError(f"can't write {path}: {error.strerror}; choose another file with --chart") from None


def _row(goal: Target) -> list[str]:
    verdict = "not known" if goal.met is None else "met" if goal.met else "missed"
    return [goal.name, goal.goal, goal.predicted, verdict, goal.why]


def _per_submission(prediction: Prediction, total: float | None, factor: float = 1.0) -> float | None:
    return total * factor / prediction.submissions if total is not None else None
