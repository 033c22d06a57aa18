"""What is kept of a class's grades: grades.csv, and rows for the terminal."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import get_args

from grading.cells import csv_text
from grading.points import CriterionGrade, Grade, GradeState
from grading.rubric.rubric import Points, Rubric
from producers.storage.private import write_atomically
from producers.words import plural

FIXED_COLUMNS = ("submission", "state", "points", "max_points")
LAST_COLUMNS = ("needs_review", "remarks", "reason")
SUMMARY_COLUMNS = ("submission", "state", "points", "needs review", "remarks")

_STATES: tuple[GradeState, ...] = get_args(GradeState)
OUTCOMES = ("graded", "empty", "unreadable", "incomplete", "failed", "waiting")


def write_grades_csv(path: Path, grades: Iterable[Grade], rubric: Rubric) -> None:
    """One row a submission, in the order given: FIXED_COLUMNS, the points of each criterion, LAST_COLUMNS.

    `needs_review` says why a person must decide, and is blank where nobody must. Where there are no points the cell is
    blank, never 0; an empty submission has 0 points and a reason. The file is replaced as a whole or not at all.
    """
    ids = [criterion.id for criterion in rubric.criteria]
    rows = [[*FIXED_COLUMNS, *ids, *LAST_COLUMNS], *(_row(grade, ids) for grade in grades)]
    write_atomically(path, csv_text(rows))


def _row(grade: Grade, ids: Sequence[str]) -> list[str]:
    points = {criterion.id: criterion.points for criterion in grade.criteria}
    return [
        one_line(grade.submission),
        grade.state,
        show_points(grade.points),
        show_points(grade.max_points),
        *(show_points(points.get(id)) for id in ids),
        one_line("; ".join(grade.review_reasons)),
        one_line("; ".join(grade.remarks)),
        one_line(grade.reason),
    ]


def show_points(points: Points | None) -> str:
    """`7`, `7.5`, or nothing."""
    return "" if points is None else str(points)


def show_distribution(item: CriterionGrade) -> str:
    """`the model: 81% for 2, 15% for 1`, or the same of several answers; "" if nothing is known. From 1% on."""
    source = "the model's own likelihoods" if item.likelihoods else f"{len(item.sampled)} answers"
    likely = sorted(item.distribution.items(), key=lambda step_share: -step_share[1])
    shares = [f"{share:.0%} for {step}" for step, share in likely if share >= 0.01]
    return f"{source}: {', '.join(shares)}" if shares else ""


def one_line(text: str) -> str:
    """The text without line breaks and without characters that a terminal or a file would stumble over."""
    joiners = "\u200c\u200d"  # unprintable by name, but part of Persian words and of emoji
    return "".join(char if char.isprintable() or char in joiners else "�" for char in " ".join(text.split()))


def count_states(grades: Iterable[Grade]) -> dict[GradeState, int]:
    """How many submissions are in each state; all states, in the order of `GradeState`."""
    counts = Counter(grade.state for grade in grades)
    return {state: counts[state] for state in _STATES}


def outcome_of(grade: Grade) -> str:
    """Its state in the words of a summary: an `unreadable` file is nobody's failure."""
    return "unreadable" if grade.is_unreadable else grade.state


def summary(grades: Sequence[Grade]) -> str:
    """`16 submissions: 14 graded, 1 empty, 1 unreadable; 3 need review`."""
    need = sum(grade.needs_review for grade in grades)
    review = "none needs review" if not need else f"{need:,} {'needs' if need == 1 else 'need'} review"
    return f"{plural(len(grades), 'submission')}: {outcomes(grades)}; {review}"


def outcomes(grades: Iterable[Grade]) -> str:
    """`14 graded, 1 empty, 1 unreadable`."""
    counts = Counter(map(outcome_of, grades))
    return ", ".join(f"{counts[outcome]:,} {outcome}" for outcome in OUTCOMES if counts[outcome]) or "none"


def summary_rows(grades: Iterable[Grade]) -> list[tuple[str, str, str, str, str]]:
    """SUMMARY_COLUMNS for the terminal: one line each, no control characters.

    The last is the reason if there is one, else the number of remarks.
    """
    return [
        (
            one_line(grade.submission),
            outcome_of(grade),
            f"{show_points(grade.points) or '–'} / {show_points(grade.max_points)}",
            plural(len(grade.doubts), "reason") if grade.doubts else "",
            one_line(grade.reason) or (plural(len(grade.remarks), "remark") if grade.remarks else ""),
        )
        for grade in grades
    ]
