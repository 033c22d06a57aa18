"""`grades.json`: a graded class as its folder keeps it, for exports and reviews. Needs no model and no submissions."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from grading.points import Grade
from grading.report.grades import summary
from grading.rubric.late import LateRule
from grading.rubric.rubric import Points
from infra.config.next_command import UPGRADE_COMMAND, next_command
from messages.errors import BatchError
from producers.storage.private import read_ordinary, write_atomically
from producers.storage.shapes import from_json, parse_as

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
    late: LateRule | None = None

    def __repr__(self) -> str:
        return f"<GradedClass {self.title!r}: {summary(self.grades)}>"


def save_graded(folder: Path, graded_class: GradedClass) -> None:
    """Write grades.json, whole or not at all. Raises BatchError."""
    fields = {"version": _VERSION, **asdict(graded_class)}
    write_atomically(folder / FILE, json.dumps(fields, indent=1, ensure_ascii=True))


def load_graded(folder: Path) -> GradedClass:
    """Read grades.json. Raises BatchError if the folder has none, or it can't be read."""
    path = folder / FILE
    command_hint = f"with: {next_command('results', folder)}"
    try:
        fields = from_json(read_ordinary(path))
        if isinstance(fields, dict) and fields.get("version") != _VERSION:
            problem = f"{path} was written by another version of kvasir; upgrade this one ({UPGRADE_COMMAND})"
            raise BatchError(f"{problem}, or write it anew {command_hint}")
        graded_class: GradedClass = parse_as(GradedClass, _as_now(fields), "the class")
        if not graded_class.total > 0:
            raise ValueError("the class has no points")
        return graded_class
    except FileNotFoundError:
        if not (folder / "batch.json").is_file():
            raise BatchError(f"{folder} holds no batch; name the folder given to --out") from None
        raise BatchError(f"{folder} has no {FILE} yet; write it {command_hint}") from None
    except (OSError, ValueError) as error:
        raise BatchError(f"{path} can't be read ({error}); write it anew {command_hint}") from None


def _as_now(fields: Any) -> Any:
    """Of a class that was written when one list, `flags`, held both: the remarks apart."""
    grades = fields.get("grades") if isinstance(fields, dict) else None
    for grade in grades if isinstance(grades, list) else ():
        if isinstance(grade, dict) and isinstance(grade.get("flags"), list):
            doubts = grade.get("doubts")
            reasons = (
                [doubt.get("why") for doubt in doubts if isinstance(doubt, dict)] if isinstance(doubts, list) else []
            )
            grade["remarks"] = [flag for flag in grade["flags"] if flag not in reasons]
    return fields
