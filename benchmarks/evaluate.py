"""What `kvasir evaluate` says where the truth is known, and what it says of models on published graded work.

    coverage    planted raters of known agreement, of 200 submissions each: the share of classes whose 95% interval
                holds the truth, for each measure and world. `flat`: one grade a submission; `clustered`: five criteria
                that share the grader's mood. Wanted: 0.93 to 0.97
    ceiling     two planted raters of one class: their true kappa, and what `evaluate` says of people among themselves
    floor       tf-idf and a line on a third of each question's grades, on SAF (`tfidf_floor`: sublinear tf, the
                benchmark's seed, cosine with the reference answer, predictions to the nearest eighth). It has seen
                grades of the same question
    qwk, mae, bias, by_band, doubts
                of each model and set of `--models NAME=FILE.gguf`, with the number of answers that there was time for
                (`--minutes` for each model and set); null without models

Sets are read from ../shared/datasets, or from KVASIR_DATASETS; what isn't there is left out, or null. Of each question
as many answers are drawn by the seed as make 300 over all of them; one batch a question, in an order drawn by the seed,
until the time is up. Models that fit a test are poor graders: their figures
show that the harness measures, and nothing of what a large one would do. Energy is not measured here. `--quick` has
fewer planted classes.
"""

import argparse
import io
import random
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from contextlib import redirect_stdout, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks import harness
from benchmarks.evaluate_sets import Question, exams, saf
from grading.evaluation.agreement import MEASURES, Agreement, EvaluationError, GradePair, agreement, tfidf_floor
from grading.evaluation.evaluate import BANDS, band_of, evaluate
from grading.evaluation.hand_grades import HandGrades, read_hand_grades
from grading.points import Grade
from grading.prompts.answers import CriterionGrade
from grading.report.grades import GradedClass, load_graded
from kvasir import cli

CLASSES, QUICK_CLASSES = 1000, 40
SIZE = 200
LEVELS = 5  # 0 to 4 points
ANSWERS = 300  # of a set
CONTEXT = 8192
MAX_TOKENS = 500  # of an answer: small models repeat themselves, and feedback is not measured
# How often a grader who sees a row's points gives each column's, and how often there are such.
CONFUSION = np.array(
    [
        [0.7, 0.2, 0.1, 0, 0],
        [0.2, 0.5, 0.2, 0.1, 0],
        [0.05, 0.2, 0.5, 0.2, 0.05],
        [0, 0.1, 0.2, 0.5, 0.2],
        [0, 0, 0.1, 0.2, 0.7],
    ]
)
PRIOR = np.array([0.15, 0.15, 0.2, 0.25, 0.25])
_Floats = NDArray[np.float64]


def draw_pairs(draw: np.random.Generator, size: int, criteria: int) -> list[GradePair]:
    """Points by a planted grader and by a person. With several criteria a grader is strict with some whole works."""
    person = draw.choice(LEVELS, size=(size, criteria), p=PRIOR)
    model = (draw.random((size, criteria, 1)) > CONFUSION[person].cumsum(-1)).sum(-1)
    strict = (draw.random((size, 1)) < 0.3) & (criteria > 1)
    points = np.maximum(model - strict, 0).tolist(), person.tolist()
    return [
        GradePair(str(unit), f"c{number}", points[0][unit][number], points[1][unit][number], LEVELS - 1)
        for unit in range(size)
        for number in range(criteria)
    ]


def truth_of(criteria: int) -> dict[str, float]:
    """What the measures are in a class without end: their joint distribution, summed."""
    joint = PRIOR[:, None] * CONFUSION
    if criteria > 1:
        strict = np.zeros_like(joint)
        for model in range(LEVELS):
            strict[:, max(0, model - 1)] += joint[:, model]
        joint = 0.7 * joint + 0.3 * strict
    person, model = np.meshgrid(range(LEVELS), range(LEVELS), indexing="ij")
    difference = model - person
    by_chance = (joint.sum(1)[:, None] * joint.sum(0)[None, :] * difference**2).sum()
    return {
        "qwk": 1 - (joint * difference**2).sum() / by_chance,
        "mae": (joint * abs(difference)).sum(),
        "mae_share": (joint * abs(difference)).sum() / (LEVELS - 1),
        "bias": (joint * difference).sum(),
        "exact": (joint * (difference == 0)).sum(),
        "within_step": (joint * (abs(difference) <= 1)).sum(),
    }


def coverage(classes: int, seed: int) -> dict[str, dict[str, float]]:
    """By world and measure: the share of classes whose interval holds the truth."""
    found = {}
    for world, criteria in {"flat": 1, "clustered": 5}.items():
        draw, truth, held = np.random.default_rng(seed), truth_of(criteria), Counter[str]()
        for number in range(classes):
            measured = agreement("", draw_pairs(draw, SIZE, criteria), seed=number).measures
            for name in MEASURES:
                interval = measured[name].interval
                held[name] += interval is not None and interval[0] <= truth[name] <= interval[1]
        found[world] = {name: held[name] / classes for name in MEASURES}
        print(f"coverage, {world}: {found[world]}", flush=True)
    return found


def ceiling(seed: int) -> dict[str, Any]:
    """A class that two planted people graded, measured as the command does."""
    pairs = draw_pairs(np.random.default_rng(seed), 400, 1)
    by_hand = {(pair.submission, "c0", rater): points for pair in pairs for rater, points in _two(pair).items()}
    grades = [
        Grade(pair.submission, "graded", pair.second, 4, (CriterionGrade("c0", "c0", 4, pair.second),))
        for pair in pairs
    ]
    people = evaluate(GradedClass("", "planted", 4, tuple(grades)), by_hand, seed=seed).agreements["people"]
    found = {"planted": truth_of(1)["qwk"], **asdict(people[0].measures["qwk"])}
    print(f"ceiling: {found}", flush=True)
    return found


def _two(pair: GradePair) -> dict[str, float]:
    return {"first": pair.first, "second": pair.second}


def floor(questions: Sequence[Question], seed: int) -> Agreement | None:
    """Of all questions together, on the two thirds that no line was fitted on."""
    draw, pairs = np.random.default_rng(seed), []
    for question in questions:
        answers, shares = zip(*question.answers, strict=True)
        for place, share in tfidf_floor(question.reference, answers, shares, draw):
            name = f"{question.name} {place}"
            pairs.append(GradePair(name, question.name, round(share * 8) / 8, shares[place], 1, 0.125))
    return agreement("floor", pairs, seed=seed) if pairs else None


# --- models


def grade_set(
    questions: Sequence[Question], model: str, weights: Path, minutes: float, seed: int, place: Path
) -> dict[str, Any]:
    """Grade answers of these questions as `kvasir grade` does, while there is time, and pool what was measured.

    Classes and batches are made in the folder `place`; a batch that is there already is resumed.
    """
    pairs: list[GradePair] = []
    doubts: dict[str, Counter[str]] = {}
    ends_at = time.monotonic() + 60 * minutes
    place.mkdir(parents=True, exist_ok=True)
    config = write_config(place, model, weights)
    for question in random.Random(seed).sample(questions, len(questions)):
        chosen = question.sample(-(-ANSWERS // len(questions)), seed)
        if ends_at < time.monotonic():
            break
        graded = graded_by(chosen.write_class(place / chosen.name), config, ends_at - time.monotonic())
        with suppress(EvaluationError):  # nothing was graded in time
            measured = evaluate(*graded, tolerance=0.25, seed=seed)
            pairs += [replace(pair, submission=f"{question.name} {pair.submission}") for pair in measured.pairs]
            for record in measured.doubts:
                counts = {name: number for name, number in record.items() if name != "kind"}
                doubts.setdefault(record["kind"], Counter()).update(counts)
    criteria = [pair for pair in pairs if pair.criterion]
    by_band = [agreement(band, [pair for pair in criteria if band_of(pair) == band], seed=seed) for band in BANDS]
    found = {
        "answers": len(criteria),
        "all": asdict(agreement("all", criteria, seed=seed)),
        "by_band": {each.name: asdict(each) for each in by_band},
        "doubts": doubts,
    }
    print(f"{model}: {len(criteria)} answers, {found['all']['measures']}", flush=True)
    return found


def write_config(place: Path, model: str, weights: Path) -> Path:
    """A kvasir.toml with this model alone."""
    config = place / "kvasir.toml"
    config.write_text(
        f'[grading]\ncode_model = "{model}"\nfeedback_model = "{model}"\ntemperature = 0.0\n'
        f"max_tokens = {MAX_TOKENS}\n"
        f'[models."{model}"]\nengine = "llamacpp"\ncontext = {CONTEXT}\nslots = 4\nthreads = 1\n'
        f'weights = {{ llamacpp = "{weights}" }}\n',
        "utf-8",
    )
    return config


def graded_by(folder: Path, config: Path, seconds: float) -> tuple[GradedClass, HandGrades]:
    """The class as it is after so many seconds, and its hand grades."""
    out = folder / "out"
    solution = ["--solution", str(folder / "solution.md")] if (folder / "solution.md").exists() else []
    words = [str(folder / "submissions"), "--rubric", str(folder / "rubric.yaml"), *solution, "--out", str(out)]
    with redirect_stdout(io.StringIO()):
        cli.run_command(["--config", str(config), "grade", *words, "--quiet", "--json", "--max-wait", f"{seconds:.0f}"])
    return load_graded(out), read_hand_grades((folder / "hand.csv").read_bytes(), "hand.csv")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run it."""
    parser = harness.parser(__doc__)
    parser.add_argument("--models", nargs="*", default=[], metavar="NAME=FILE", help="models to grade with (GGUF)")
    parser.add_argument("--sets", nargs="*", default=["english", "exams"], help="to grade (default: english exams)")
    parser.add_argument("--minutes", type=float, default=4.0, help="for each model and set (default: %(default)s)")
    parser.add_argument("--keep", type=Path, metavar="FOLDER", help="keep the classes there, and resume their batches")
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as temporary:
        measure(options, options.keep or Path(temporary))


def measure(options: argparse.Namespace, folder: Path) -> None:
    """Run all parts, and print their figures. `folder`: see `grade_set`."""
    sets = {"english": saf("english"), "german": saf("german"), "exams": exams()}
    floors = {name: asdict(found) for name in ("english", "german") if (found := floor(sets[name], options.seed))}
    for name, found in floors.items():
        print(f"floor, {name}: {found['pairs']} answers, {found['measures']}", flush=True)
    runs = {
        f"{model}, {name}": grade_set(
            sets[name], model, Path(weights), options.minutes, options.seed, folder / f"{model} {name}"
        )
        for model, _, weights in (entry.partition("=") for entry in options.models)
        for name in options.sets
        if sets[name]
    }
    harness.finish(
        **{
            measure: {run: figures["all"]["measures"][measure] for run, figures in runs.items()} or None
            for measure in ("qwk", "mae", "bias")
        },
        answers={run: figures["answers"] for run, figures in runs.items()},
        by_band={run: figures["by_band"] for run, figures in runs.items()} or None,
        doubts={run: figures["doubts"] for run, figures in runs.items()} or None,
        ceiling=ceiling(options.seed),
        floor=floors or None,
        coverage=coverage(QUICK_CLASSES if options.quick else CLASSES, options.seed),
    )


if __name__ == "__main__":
    main()
