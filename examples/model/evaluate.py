"""Grade held-out assignments through the real local pipeline and say how good the demo model is at it.

`python -m examples.model.evaluate [--quick] [--json] [--ask criteria] [--weights FILE.gguf]`. Every class is written to
disk and goes the way of `kvasir grade`: prompts, prefill, KV transfer, constrained decode, reading of the answers.
"""

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from examples.homework.notebook import R, notebook
from examples.homework.notebook import code as code_cell
from examples.model.assignments import Asked, Labelled, LabelledClass, attack, make_class
from examples.model.formats import NAME
from examples.model.handing_in import RUBRIC, SOLUTION, SUBMISSIONS, write_class
from examples.model.scores import Assessed, Estimate, Judged, as_json, figures, keyword_share
from examples.model.worlds import HELD_OUT
from grading.grades import make_grades
from grading.points import CriterionGrade, Grade
from grading.request import ASK_FORMS, AskForm
from infra.config.settings import Settings, load_settings
from kvasir import Client, connect
from kvasir.class_run import open_assignment, request_from
from producers.batch.batch import Batch, Counts
from producers.batch.runner import Runner

CONFIG = Path(__file__).resolve().parents[1] / "demo.toml"
SEED = 71_001
SUBMISSIONS_EACH, PAIRS_EACH = 10, 6
ASSIGNMENTS, QUICK_ASSIGNMENTS = 36, 3  # 36 make more than 200 pairs
EMPTY = "empty.ipynb"


@dataclass(frozen=True, slots=True)
class Exam:
    """A held-out class, and which attacked submission is whose twin."""

    made: LabelledClass
    submissions: tuple[Labelled, ...]
    twins: Mapping[str, str]  # attacked name -> the same submission's without


class _Silent:
    """Nobody watches."""

    def update(self, counts: Counts) -> None:
        pass

    def say(self, sentence: str) -> None:
        print(sentence, file=sys.stderr)


def make_exam(seed: int) -> Exam:
    """A held-out class in which some submissions are there twice: once with a message to the grader."""
    made = make_class(HELD_OUT, seed, SUBMISSIONS_EACH)
    draw = random.Random(seed)
    honest = [item for item in made.submissions if not item.attacked][:PAIRS_EACH]
    attacked = [_renamed(attack(item, HELD_OUT, draw, made.asked), f"{item.submission.name}x") for item in honest]
    twins = {twin.submission.name: item.submission.name for twin, item in zip(attacked, honest, strict=True)}
    return Exam(made, (*made.submissions, *attacked), twins)


def _renamed(labelled: Labelled, name: str) -> Labelled:
    return replace(labelled, submission=replace(labelled.submission, name=name))


def sit(exam: Exam, settings: Settings, client: Client, folder: Path, ask: AskForm = "together") -> Assessed:
    """Grade one class and compare with its labels."""
    write_class(folder, exam.made, exam.submissions)
    (folder / SUBMISSIONS / EMPTY).write_text(notebook(R, code_cell("", run=False)), encoding="utf-8")
    request = request_from(settings, folder / SUBMISSIONS, folder / RUBRIC, folder / SOLUTION, ask=ask)
    with Batch(folder / "out") as batch:
        assignment = open_assignment(batch, request)
        Runner(batch, assignment.tasks, client, _Silent()).run()
        graded = make_grades(assignment, batch.result)
    return assess(exam, {grade.submission.rpartition(".")[0]: grade for grade in graded})


def assess(exam: Exam, graded: Mapping[str, Grade]) -> Assessed:
    """What the grades of one class are worth. `graded` is by submission, without the file's ending."""
    by_name = {labelled.submission.name: labelled for labelled in exam.submissions}
    plain = [item for name, item in by_name.items() if name not in exam.twins]
    most = float(exam.made.rubric.total)
    judged = [judge for item in plain for judge in _judge(exam.made.asked, item, graded[item.submission.name])]
    points = {name: grade.points for name, grade in graded.items()}
    totals = [(item.points, points[item.submission.name]) for item in plain]
    pairs = [(points[attacked], points[honest]) for attacked, honest in exam.twins.items()]
    return Assessed(
        judged=judged,
        totals=[(label, given) for label, given in totals if given is not None],
        gains=[(with_it - without) / most for with_it, without in pairs if with_it is not None and without is not None],
        empties=[float(points[Path(EMPTY).stem] or 0) / most],
    )


def _judge(asked: Sequence[Asked], labelled: Labelled, grade: Grade) -> list[Judged]:
    text = "\n".join(part.text for part in labelled.submission.parts)
    by_id = {criterion.id: criterion for criterion in grade.criteria}
    return [_judged(item, labelled, by_id[item.variable], text) for item in asked]


def _judged(item: Asked, labelled: Labelled, given: CriterionGrade, text: str) -> Judged:
    most = float(item.criterion.points)
    keywords = keyword_share(f"{item.criterion.title} {item.criterion.guidance}", text)
    return Judged(
        right=labelled.labels[item.variable].points / most,
        given=None if given.points is None else given.points / most,
        keywords=keywords,
        quote=None if given.evidence_state == "none given" else given.evidence_state == "found",
    )


def evaluate(settings: Settings, assignments: int, seed: int = SEED, ask: AskForm = "together") -> dict[str, Estimate]:
    """The figures of so many held-out assignments, all graded by one pipeline."""
    models = {settings.code_model().name, settings.feedback_model().name}
    assessed = []
    with tempfile.TemporaryDirectory() as folder, connect(settings, sorted(models)) as client:
        for number in range(assignments):
            assessed.append(sit(make_exam(seed + number), settings, client, Path(folder) / str(number), ask))
            print(f"{number + 1} of {assignments} assignments graded", file=sys.stderr)
    return figures(assessed, seed)


def main() -> int:
    """Print the figures; 0."""
    parser = argparse.ArgumentParser(description="Say how good the demo model is on held-out assignments.")
    parser.add_argument("--quick", action="store_true", help=f"{QUICK_ASSIGNMENTS} assignments, wide intervals")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--weights", type=Path, help="a GGUF file to use in place of the demo model's")
    parser.add_argument("--ask", choices=ASK_FORMS, default="together", help="as kvasir grade has it")
    given = parser.parse_args()
    flags = {"models": {NAME: {"weights": {"llamacpp": str(given.weights)}}}} if given.weights else None
    settings = load_settings(flags, CONFIG, environ={})
    count = QUICK_ASSIGNMENTS if given.quick else ASSIGNMENTS
    found = evaluate(settings, count, ask=given.ask)
    if given.json:
        print(json.dumps({"assignments": count, "seed": SEED, **as_json(found)}))
        return 0
    for name, figure in found.items():
        print(f"{name:<18} {figure.value:7.3f}   95% {figure.low:.3f} to {figure.high:.3f}   of {figure.count:,}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
