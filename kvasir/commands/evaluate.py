"""`kvasir evaluate`: measures how far a batch's grades, or those of models that grade now, agree with people's."""

from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click

from grading.evaluation.agreement import EvaluationError, agreement
from grading.evaluation.evaluate import Evaluation, by_name, evaluate
from grading.evaluation.hand_grades import HandGrades, read_hand_grades, reviewed_grades
from grading.evaluation.page import render_evaluation, rows, sentences
from grading.report.grades import load_graded
from grading.reviews import AFTER_A_LOOK
from grading.rubric.rubric import load_rubric
from infra.config.settings import Settings
from kvasir import class_run
from kvasir.commands.export import bytes_of
from kvasir.options import BatchPlace, Globals, Models, Number, default_folder, examples_option, json_option, path
from kvasir.terminal import TerminalProgress, print_table, say, say_json
from messages.errors import UsageError
from producers.batch.batch import Batch
from producers.storage.private import write_atomically
from producers.words import plural

PAGE = "evaluation.html"


@click.command("evaluate")
@click.argument("folder", type=path)
@click.option(
    "--grades", type=path, help="Read hand grades from this CSV with columns submission, criterion, points, rater."
)
@click.option(
    "--column",
    default="",
    metavar="NAME",
    help="Read totals from this column of the --grades file, which can be a gradebook.",
)
@click.option(
    "--reviews",
    is_flag=True,
    help="Use the desk's reviews as hand grades, although the reviewers saw the model's points.",
)
@click.option(
    "--compare", type=path, help="Show whether FOLDER or this batch of the same class agrees better with hand grades."
)
@click.option(
    "--within",
    type=Number(0),
    default=1,
    metavar="POINTS",
    help="Count a grade as wrong if it is off by more points than this [default: 1].",
)
@click.option(
    "--watts",
    type=Number(0),
    default=0,
    help="Compute the energy from the power (in watts) that all machines draw together.",
)
@click.option(
    "--model", "models", multiple=True, metavar="M", help="Grade the work in FOLDER with this model; can be repeated."
)
@click.option("--rubric", type=path, help="Use this rubric when --model grades the work.")
@click.option("--solution", type=path, help="Put this reference solution into the models' prompts.")
@examples_option
@json_option
@click.pass_obj
def evaluate_command(
    global_options: Globals,
    /,
    folder: Path,
    grades: Path | None,
    column: str,
    reviews: bool,
    compare: Path | None,
    within: float,
    watts: float,
    models: tuple[str, ...],
    as_json: bool,
    **request_options: Any,
) -> int:
    """Measure how far the grades of the batch in FOLDER agree with people's: kappa, mean difference, leniency.

    With intervals, by criterion and by band, beside two people's agreement and what counting words reaches. With
    --model, FOLDER holds submissions: each model grades them in a separate batch. Writes evaluation.html.
    """
    if bool(grades) == reviews:
        raise EvaluationError("name the hand grades to compare with: pass --grades FILE, or --reviews, but not both")
    batches = [_grade(global_options, folder, model, request_options) for model in models] or [folder]
    by_hand = read_hand_grades(bytes_of(grades) or b"", str(grades), column) if grades else reviewed_grades(batches[0])
    settings, reports = global_options.settings(), []
    base = _measure(settings, compare, by_hand, within) if compare else None
    for batch in batches:
        measured = _measure(settings, batch, by_hand, within)
        base_pairs, pairs = by_name(base.pairs) if base else {}, by_name(measured.pairs)
        gains = [agreement(name, pairs[name], earlier) for name, earlier in base_pairs.items() if name in pairs]
        compared = f"{measured.submissions} of {plural(len({name for name, *_ in by_hand}), 'submission')} compared."
        facts = _facts(batch, watts) | {"Hand grades": f"{compared} {AFTER_A_LOOK if reviews else ''}".strip()}
        write_atomically(batch / PAGE, render_evaluation(measured, facts, gains))
        reports.append(
            asdict(measured) | {"folder": str(batch), "facts": facts, "gain": [asdict(each) for each in gains]}
        )
        if not as_json:
            table = rows(measured, gains)
            print_table(tuple(table[0]), [tuple(row.values()) for row in table])
            for sentence in (*sentences(measured), *map(": ".join, facts.items()), f"Page: {batch / PAGE}"):
                say(sentence)
    if as_json:
        say_json({"batches": reports})
    return 0


def _grade(global_options: Globals, folder: Path, model: str, request_options: dict[str, Any]) -> Path:
    """Grade the class with this model, and return the folder of its batch."""
    if not request_options["rubric"]:
        raise EvaluationError("--model needs a rubric: pass --rubric FILE")
    settings = global_options.settings(Models(model, model))
    request = class_run.request_from(settings, folder, **request_options)
    place = BatchPlace(default_folder(folder, f"{load_rubric(request.rubric).title} {model}"))
    with TerminalProgress(False) as progress, class_run.open_class(request, place, progress.say) as (batch, assignment):
        return class_run.run_class(settings, batch, assignment, progress, global_options.observer()).folder


def _measure(settings: Settings, folder: Path, by_hand: HandGrades, tolerance: float) -> Evaluation:
    """Measure the batch in `folder`. If the class's work is gone, there is no floor."""
    assignment = None
    with Batch(folder, is_owner=False) as batch, suppress(UsageError):
        assignment = class_run.read_class(batch, class_run.request_of_batch(settings, batch, will_run=False))
    return evaluate(load_graded(folder), by_hand, assignment, tolerance)


def _facts(folder: Path, watts: float) -> dict[str, str]:
    """Return facts about the run. Its time is from the submission of its jobs to the last answer."""
    with Batch(folder, is_owner=False) as batch:
        results = [result for entry in batch.entries if (result := batch.result(entry.job_id))]
    duration_s = max((result.decode.total_s for result in results), default=0.0)
    energy = f"{duration_s * watts / 3.6e6:.4f} kWh at {watts:g} W" if watts else "energy not known (--watts)"
    return dict(class_run.facts(results)) | {"Time": f"{duration_s:,.0f} s, {energy}"}
