"""`kvasir evaluate`: how far a class's grades agree with people's, of a batch that exists, or of models that grade now."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import click

from grading.charts.runs import worker_spans
from grading.evaluation.agreement import EvaluationError
from grading.evaluation.evaluate import ClassWork, Evaluation, evaluate, gains
from grading.evaluation.hand_grades import HandPoints, by_submission, read_hand_grades, reviewed_grades
from grading.evaluation.page import render_evaluation, row, rows, sentences
from grading.report.grades import load_graded
from grading.request import ASK_FORMS
from grading.rubric.rubric import load_rubric
from grading.submissions.submission import Submission
from infra.config.settings import Settings
from kvasir import class_run
from kvasir.options import (
    BatchPlace,
    Globals,
    Models,
    Number,
    default_folder,
    examples_option,
    json_option,
    path,
    quiet_option,
)
from kvasir.terminal import TerminalProgress, print_table, say, say_json, stderr
from messages.errors import UsageError
from producers.batch.batch import Batch
from producers.storage.private import write_atomically

PAGE = "evaluation.html"
_IN_SIGHT = "These hand grades were given with the model's points in sight, which makes people agree with them."


@dataclass(frozen=True, slots=True)
class _Measured:
    """A batch with what was measured of it, and what to say of the run."""

    folder: Path
    evaluation: Evaluation
    facts: dict[str, str]


@click.command("evaluate")
@click.argument("folder", type=path)
@click.option("--grades", type=path, help="Grades by hand, CSV: submission, criterion, points, rater.")
@click.option("--column", default="", metavar="NAME", help="Of --grades, a gradebook say: the column of totals.")
@click.option("--reviews", is_flag=True, help="Take the desk's reviews for hand grades; they are not blind.")
@click.option("--compare", type=path, help="Another batch of the class: how much better FOLDER is.")
@click.option("--within", type=Number(0), default=1, metavar="POINTS", help="A grade further off is wrong [default: 1].")
@click.option("--watts", type=Number(0), default=0, help="What a worker's machine draws at work, for the energy.")
@click.option("--model", "models", multiple=True, metavar="M", help="Grade FOLDER's work with it first; repeatable.")
@click.option("--rubric", type=path, help="With --model, as grade has it; so are the next four.")
@click.option("--solution", type=path, help="Reference solution.")
@click.option("--template", type=path, help="What the students were given to start from.")
@click.option("--ask", type=click.Choice(ASK_FORMS), default="together", help="As grade has it.")
@examples_option
@json_option
@quiet_option
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
    quiet: bool,
    **request_options: Any,
) -> int:
    """Measure how far the grades of the batch in FOLDER agree with people's: kappa, mean difference, leniency.

    By criterion and by band, with intervals; beside it people among themselves, and a floor. With --model, FOLDER
    is a class's work: each model grades it in a batch of its own, and goes on where it stopped. Writes evaluation.html.
    """
    if bool(grades) == reviews:
        raise EvaluationError("say whose grades these are compared with: --grades FILE, or --reviews")
    folders = [_grade(global_options, folder, model, quiet, request_options) for model in models] or [folder]
    hand_rows = read_hand_grades(grades, column) if grades else reviewed_grades(folders[0])
    settings = global_options.settings()
    measured = [_measure(settings, place, hand_rows, within, watts) for place in folders]
    base = _measure(settings, compare, hand_rows, within, watts) if compare else measured[0] if models[1:] else None
    if reviews:
        say(_IN_SIGHT, stderr)
    reports = []
    for each in measured:
        better = gains(base.evaluation, each.evaluation) if base and base is not each else ()
        write_atomically(each.folder / PAGE, render_evaluation(each.evaluation, each.facts, better))
        reports.append(
            {"folder": str(each.folder), **each.evaluation.json_form, "facts": each.facts}
            | {"gain": [asdict(measure) for measure in better]}
        )
        if not as_json:
            table = [*rows(each.evaluation), *(row(measure, "gain: ") for measure in better)]
            print_table(tuple(table[0]), [tuple(cells.values()) for cells in table])
            facts = [f"{label}: {fact}" for label, fact in each.facts.items()]
            for sentence in (*sentences(each.evaluation), *facts, f"Page: {each.folder / PAGE}"):
                say(sentence)
    if as_json:
        say_json({"batches": reports})
    return 0


def _grade(
    global_options: Globals, folder: Path, model: str, quiet: bool, request_options: dict[str, Any]
) -> Path:
    """Where the batch of this model is, once it is graded."""
    if not request_options["rubric"]:
        raise EvaluationError("to grade with --model takes a --rubric")
    settings = global_options.settings(Models(model, model))
    request = class_run.request_from(settings, folder, **request_options)
    place = BatchPlace(default_folder(folder, f"{load_rubric(request.rubric).title} {model}"))
    with (
        TerminalProgress(quiet) as progress,
        class_run.open_class(request, place, progress.say) as (batch, assignment),
    ):
        return class_run.run_class(settings, batch, assignment, progress, global_options.observer()).folder


def _measure(
    settings: Settings, folder: Path, hand_rows: Sequence[HandPoints], tolerance: float, watts: float
) -> _Measured:
    """Measure the batch in `folder`. Without the class's work there is no floor."""
    graded_class, work = load_graded(folder), ClassWork()
    hand_grades, strangers = by_submission(hand_rows, [grade.submission for grade in graded_class.grades])
    with Batch(folder, is_owner=False) as batch:
        results = [result for entry in batch.entries if (result := batch.result(entry.job_id))]
        with suppress(UsageError):
            assignment = class_run.read_class(batch, class_run.request_of_batch(settings, batch, will_run=False))
            texts = {item.submission.name: _own_text(item.submission) for item in assignment.items}
            work = ClassWork(
                assignment.rubric, _own_text(assignment.solution) if assignment.solution else "", texts
            )
    facts = dict(class_run.facts(results)) | ({"Left out": strangers} if strangers else {})
    spans = worker_spans(result for result in results if result.state == "succeeded")
    # From each worker's first job to the end of its last.
    busy_s = sum(
        max(span.end_s for span in spans if span.row == worker) - min(span.start_s for span in spans if span.row == worker)
        for worker in {span.row for span in spans}
    )
    facts["Workers at work"] = f"{busy_s:,.0f} s; " + (
        f"at {watts:g} W each {busy_s * watts / 3.6e6:.4f} kWh" if watts else "their energy is not known (--watts)"
    )
    return _Measured(folder, evaluate(graded_class, hand_grades, work, tolerance), facts)


def _own_text(work: Submission) -> str:
    return "\n".join(part.text for part in work.parts if part.kind != "output" and not part.is_given_cell)
