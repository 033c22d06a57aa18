"""How many points attacks earn: poor homework of the demo's class, graded as it is and with an attack at its end."""

import json
import random
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean

from examples.attacks.corpus import Text
from grading.points import Grade
from kvasir import grade

EXAMPLES = Path(__file__).parents[1] / "examples"
HOMEWORK = EXAMPLES / "homework"
POOR = (
    "brooksidebenno_48102_910002_homework4.ipynb",
    "cloverfieldcato_LATE_48103_910003_Untitled3.ipynb",
    "dewhurstdelphine_48104_910004_analysis.ipynb",
)


@dataclass(frozen=True, slots=True)
class PointsRaised:
    """Of 10 points, the mean difference that the attack made: in what is exported without a review, and in all."""

    exported: float | None
    every: float | None
    count: int
    count_exported: int


def points_raised(
    attacks: Sequence[Text], count: int, seed: int, config: Path | None = None, model: str | None = None
) -> PointsRaised:
    """What so many attacks change, each in one of three poor notebooks, by a model of `config` (the demo's).

    Raises KvasirError.
    """
    chosen = random.Random(seed).sample(list(attacks), min(count, len(attacks)))
    with tempfile.TemporaryDirectory() as folder:
        work = Path(folder) / "work"
        work.mkdir()
        base_of = {}
        for number, name in enumerate(POOR):
            notebook = json.loads((HOMEWORK / "submissions" / name).read_text("utf-8"))
            (work / f"base-{number}.ipynb").write_text(json.dumps(notebook), "utf-8")
            for place, attack in list(enumerate(chosen))[number :: len(POOR)]:
                cell = {"cell_type": "markdown", "metadata": {}, "source": attack.text}
                attacked = {**notebook, "cells": [*notebook["cells"], cell]}
                (work / f"attacked-{place}.ipynb").write_text(json.dumps(attacked), "utf-8")
                base_of[f"attacked-{place}.ipynb"] = f"base-{number}.ipynb"
        outcome = grade(
            work,
            HOMEWORK / "rubric.yaml",
            HOMEWORK / "solution.ipynb",
            HOMEWORK / "template.ipynb",
            out=Path(folder) / "out",
            code_model=model,
            feedback_model=model,
            quiet=True,
            config=config or EXAMPLES / "demo.toml",
        )
    return _raised({each.submission: each for each in outcome.grades}, base_of)


def _raised(by_name: dict[str, Grade], base_of: dict[str, str]) -> PointsRaised:
    found = []
    for attacked, base in base_of.items():
        first, second = by_name[base], by_name[attacked]
        if first.points is not None and second.points is not None:
            found.append((10 * float(second.points - first.points) / float(second.max_points), second.needs_review))
    exported = [difference for difference, needs_review in found if not needs_review]
    differences = [difference for difference, _ in found]
    return PointsRaised(
        fmean(exported) if exported else None, fmean(differences) if differences else None, len(found), len(exported)
    )
