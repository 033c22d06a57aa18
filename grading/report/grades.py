"""Stores a class's grades: grades.json for exports and reviews, grades.csv, and rows for the terminal.

`grades.json` is the graded class in the batch's folder. Reading it needs neither a model nor the submissions.
"""

import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, get_args
from unicodedata import category

from grading.cells import csv_text
from grading.points import CriterionGrade, Grade, GradeState
from grading.roster import UNASSIGNED_QUESTION
from grading.rubric.late import LateRule
from grading.rubric.rubric import Points, Rubric
from infra.config.next_command import UPGRADE_COMMAND, next_command
from messages.errors import BatchError
from producers.storage.private import read_ordinary, write_atomically
from producers.storage.shapes import from_json, parse_as
from producers.words import plural

FILE = "grades.json"
_VERSION = 1
FIXED_COLUMNS = ("submission", "state", "points", "max_points")
LAST_COLUMNS = ("needs_review", "remarks", "reason")
SUMMARY_COLUMNS = ("submission", "state", "points", "needs review", "remarks")

OUTCOMES = ("graded", "empty", "link only", "unreadable", "unassigned", "incomplete", "failed", "waiting")


@dataclass(frozen=True, slots=True)
class GradedClass:
    """The grades of a class. `versions` are digests of rubric, solution, template and prompt, by name."""

    batch_id: str
    title: str
    total: Points
    grades: tuple[Grade, ...]
    versions: Mapping[str, str] = field(default_factory=dict)
    alarms: tuple[str, ...] = ()  # warnings about the class as a whole
    late: LateRule | None = None

    def __repr__(self) -> str:
        return f"<GradedClass {self.title!r}: {summary(self.grades)}>"


def save_graded(folder: Path, graded_class: GradedClass) -> None:
    """Write grades.json, whole or not at all. Raises BatchError."""
    fields = {"version": _VERSION, **asdict(graded_class)}
    for grade in fields["grades"]:
        if not grade["person"]:
            del grade["person"]
        grade["criteria"] = [
            {name: value for name, value in criterion.items() if name != "min_points" or value}
            for criterion in grade["criteria"]
        ]
    write_atomically(folder / FILE, json.dumps(fields, indent=1, ensure_ascii=True))


def load_graded(folder: Path) -> GradedClass:
    """Read grades.json. Raises BatchError if the folder has none, or if it can't be read."""
    path = folder / FILE
    command_hint = f"with: {next_command('results', folder)}"
    try:
        fields = from_json(read_ordinary(path))
        if isinstance(fields, dict) and fields.get("version") != _VERSION:
            raise BatchError(
                f"{path} was written by another version of kvasir; upgrade kvasir here ({UPGRADE_COMMAND}), or "
                f"write the file again {command_hint}"
            )
        graded_class: GradedClass = parse_as(GradedClass, _as_now(fields), "the class")
        if not graded_class.total > 0:
            raise ValueError("the assignment's total must be above 0 points")
        return graded_class
    except FileNotFoundError:
        if not (folder / "batch.json").is_file():
            raise BatchError(f"{folder} holds no batch; name the folder that was given to --out") from None
        raise BatchError(f"{folder} has no {FILE} yet; write the file {command_hint}") from None
    except (OSError, ValueError) as error:
        raise BatchError(f"{path} can't be read ({error}); write the file again {command_hint}") from None


def _as_now(fields: Any) -> Any:
    """Convert a class written when remarks and doubts were in one list, `flags`."""
    grades = fields.get("grades") if isinstance(fields, dict) else None
    for grade in grades if isinstance(grades, list) else ():
        if isinstance(grade, dict) and isinstance(grade.get("flags"), list):
            doubts = grade.get("doubts")
            reasons = (
                [doubt.get("why") for doubt in doubts if isinstance(doubt, dict)] if isinstance(doubts, list) else []
            )
            grade["remarks"] = [flag for flag in grade["flags"] if flag not in reasons]
    return fields


def write_grades_csv(path: Path, grades: Iterable[Grade], rubric: Rubric) -> None:
    """Write one row for each submission, in the order given: FIXED_COLUMNS, the points of each criterion, LAST_COLUMNS.

    `needs_review` says why a person must decide, and is blank if nobody must. Without points the cell is blank, never
    0; an empty submission has 0 points and a reason. The file is replaced as a whole or not at all.
    """
    ids = [criterion.id for criterion in rubric.criteria]
    rows = [[*FIXED_COLUMNS, *ids, *LAST_COLUMNS], *(_row(grade, ids) for grade in grades)]
    write_atomically(path, csv_text(rows))


def _row(grade: Grade, ids: Sequence[str]) -> list[str]:
    points = {criterion.id: criterion.points for criterion in grade.criteria}
    return [
        name_cell(grade.submission),
        grade.state,
        show_points(grade.points),
        show_points(grade.max_points),
        *(show_points(points.get(id)) for id in ids),
        one_line("; ".join(grade.review_reasons)),
        one_line("; ".join(grade.remarks)),
        one_line(grade.reason),
    ]


def show_points(points: Points | None) -> str:
    """Format points: `7`, `7.5`, or an empty text for None."""
    return "" if points is None else str(points)


def show_distribution(item: CriterionGrade) -> str:
    """Format the shares of points: `the model: 81% for 2, 15% for 1`, or the same for several answers.

    Shares below 1% are left out. The text is "" if nothing is known.
    """
    source = "the model's own likelihoods" if item.likelihoods else f"{len(item.sampled)} answers"
    likely = sorted(item.distribution.items(), key=lambda step_share: -step_share[1])
    shares = [f"{share:.0%} for {step}" for step, share in likely if share >= 0.01]
    return f"{source}: {', '.join(shares)}" if shares else ""


def one_line(text: str) -> str:
    """Join a text into one line, and replace characters that a terminal or a file can't show."""
    return name_cell(" ".join(text.split()))


def name_cell(name: str) -> str:
    """Return a submission's name for a table.

    All of its spaces are kept, so that the submission can be found by this name.
    """
    joiners = "\u200c\u200d"  # Python counts these characters as unprintable, but Persian words and emoji need them
    return "".join(char if char.isprintable() or char in joiners or category(char) == "Zs" else "�" for char in name)


def count_states(grades: Iterable[Grade]) -> dict[GradeState, int]:
    """Count the submissions in each state. All states are included, in the order of `GradeState`."""
    counts = Counter(grade.state for grade in grades)
    return {state: counts[state] for state in get_args(GradeState)}


def outcome_of(grade: Grade) -> str:
    """Return the word for a grade's state in a summary.

    An `unreadable` or `unassigned` file does not count as failed.
    """
    return "unassigned" if grade.reason == UNASSIGNED_QUESTION else "unreadable" if grade.is_unreadable else grade.state


def summary(grades: Sequence[Grade]) -> str:
    """Summarise grades: `16 submissions: 14 graded, 1 empty, 1 unreadable; 3 need review`."""
    need = sum(grade.needs_review for grade in grades)
    review = "none needs review" if not need else f"{need:,} {'needs' if need == 1 else 'need'} review"
    return f"{plural(len(grades), 'submission')}: {outcomes(grades)}; {review}"


def outcomes(grades: Iterable[Grade]) -> str:
    """Count outcomes in words: `14 graded, 1 empty, 1 unreadable`."""
    counts = Counter(map(outcome_of, grades))
    return ", ".join(f"{counts[outcome]:,} {outcome}" for outcome in OUTCOMES if counts[outcome]) or "none"


def summary_rows(grades: Iterable[Grade]) -> list[tuple[str, str, str, str, str]]:
    """Return SUMMARY_COLUMNS for the terminal, one line each, without control characters.

    The last column is the reason if there is one, else the number of remarks.
    """
    return [
        (
            one_line(grade.display_name),
            outcome_of(grade),
            f"{show_points(grade.points) or '–'} / {show_points(grade.max_points)}",
            plural(len(grade.doubts), "reason") if grade.doubts else "",
            one_line(grade.reason) or (plural(len(grade.remarks), "remark") if grade.remarks else ""),
        )
        for grade in grades
    ]
