"""`grades.json`: a graded class as its folder keeps it, for exports and reviews. Needs no model and no submissions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, get_args

from messages.errors import BatchError
from producers.files import write_atomically
from producers.grading import CriterionGrade, Doubt, Grade, GradeState
from producers.rubric import Points
from producers.truncation import Cut

FILE = "grades.json"
_VERSION = 1


@dataclass(frozen=True, slots=True)
class GradedClass:
    """What came of a class. `versions` are digests of rubric, solution, template and prompt, by name."""

    batch_id: str
    title: str
    total: Points
    grades: tuple[Grade, ...]
    versions: Mapping[str, str] = field(default_factory=dict)
    alarms: tuple[str, ...] = ()  # about the class as a whole


def save_graded(folder: Path, graded: GradedClass) -> None:
    """Write grades.json, whole or not at all. Raises BatchError."""
    fields = {"version": _VERSION, **asdict(graded)}
    write_atomically(folder / FILE, json.dumps(fields, indent=1, ensure_ascii=True))


def load_graded(folder: Path) -> GradedClass:
    """Read grades.json. Raises BatchError if the folder has none, or it can't be read."""
    path = folder / FILE
    anew = f"with: kvasir results {folder}"
    if not path.is_file():
        raise BatchError(f"{folder} has no {FILE} yet; write it {anew}")
    try:
        fields = json.loads(path.read_text("utf-8"))
        if fields.pop("version") != _VERSION:
            raise BatchError(f"{path} was written by another version; write it anew {anew}")
        fields["grades"] = tuple(_grade(grade) for grade in fields["grades"])
        fields["alarms"] = tuple(fields["alarms"])
        return GradedClass(**fields)
    except (OSError, ValueError, TypeError, KeyError, AttributeError, RecursionError) as error:
        raise BatchError(f"{path} can't be read ({error!r:.100}); write it anew {anew}") from None


def _grade(fields: dict[str, Any]) -> Grade:
    criteria = tuple(_criterion(criterion) for criterion in fields.pop("criteria"))
    cuts = tuple(Cut(**cut) for cut in fields.pop("cuts"))
    doubts = tuple(Doubt(**doubt) for doubt in fields.pop("doubts"))
    grade = Grade(**{**fields, "flags": tuple(fields["flags"])}, criteria=criteria, cuts=cuts, doubts=doubts)
    if grade.state not in get_args(GradeState):
        raise ValueError(f"a state {grade.state!r:.40}")
    return grade


def _criterion(fields: dict[str, Any]) -> CriterionGrade:
    return CriterionGrade(**{**fields, "sampled": tuple(fields["sampled"])})
