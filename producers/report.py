"""What is kept of a class's grades: grades.csv, and rows for the terminal."""

from __future__ import annotations

import csv
import io
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from producers.files import write_atomically
from producers.grading import Grade, GradeState
from producers.rubric import Points, Rubric

FIXED_COLUMNS = ("submission", "state", "points", "max_points")
LAST_COLUMNS = ("flags", "reason")

_STATES: tuple[GradeState, ...] = ("graded", "incomplete", "failed", "empty")
# A spreadsheet takes a cell that starts so for a formula, and some of them skip blanks first.
FORMULA_STARTS = ("=", "+", "-", "@", "\t", "\r", "\n", "＝", "＋", "－", "＠")


def write_grades_csv(path: Path, grades: Iterable[Grade], rubric: Rubric) -> None:
    """One row a submission, in the order given: submission, state, points, max_points, each criterion, flags, reason.

    Where there are no points the cell is blank, never 0; an empty submission has 0 points and a reason. The file is
    replaced as a whole or not at all.
    """
    table = io.StringIO()
    writer = csv.writer(table, lineterminator="\n")
    ids = [criterion.id for criterion in rubric.criteria]
    writer.writerow([*FIXED_COLUMNS, *ids, *LAST_COLUMNS])
    writer.writerows(_row(grade, ids) for grade in grades)
    write_atomically(path, table.getvalue())


def _row(grade: Grade, ids: Sequence[str]) -> list[str]:
    points = {criterion.id: criterion.points for criterion in grade.criteria}
    return [
        _cell(grade.submission),
        grade.state,
        show_points(grade.points),
        show_points(grade.max_points),
        *(show_points(points.get(id)) for id in ids),
        _cell("; ".join(grade.flags)),
        _cell(grade.reason),
    ]


def _cell(text: str) -> str:
    """Text on one line that a spreadsheet shows instead of computing."""
    text = one_line(text)
    return f"'{text}" if text.lstrip().startswith(FORMULA_STARTS) else text


def show_points(points: Points | None) -> str:
    """`7`, `7.5`, or nothing."""
    return "" if points is None else str(points)


def one_line(text: str) -> str:
    """The text without line breaks and without characters that a terminal or a file would stumble over."""
    joiners = "\u200c\u200d"  # unprintable by name, but part of Persian words and of emoji
    return "".join(char if char.isprintable() or char in joiners else "�" for char in " ".join(text.split()))


def count_states(grades: Iterable[Grade]) -> dict[GradeState, int]:
    """How many submissions are in each state; all four states, in the order graded, incomplete, failed, empty."""
    counts = Counter(grade.state for grade in grades)
    return {state: counts[state] for state in _STATES}


def summary_rows(grades: Iterable[Grade]) -> list[tuple[str, str, str, str]]:
    """(submission, state, points, remark) for the terminal: one line each, no control characters.

    The remark is the reason if there is one, else the number of flags.
    """
    return [
        (one_line(grade.submission), grade.state, _out_of(grade), one_line(grade.reason) or _num_flags(grade))
        for grade in grades
    ]


def _out_of(grade: Grade) -> str:
    return f"{show_points(grade.points) or '–'} / {show_points(grade.max_points)}"


def _num_flags(grade: Grade) -> str:
    return f"{len(grade.flags)} to check" if grade.flags else ""
