"""Who handed in when, `times.csv` in the batch's folder, and what lateness costs by the rubric's rule.

A column `submission` (its name), `student_id`, `ID` or `Identifier` (the learning platform's), and `submitted_at` as
ISO 8601. Who is not in it counts as on time, unless Canvas marked the work as late: then nobody knows how late.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from messages.errors import BatchError
from producers.export.tables import ExportError, Sheet, cell, column, read_sheet, student, students
from producers.files.private import open_ordinary, write_atomically
from producers.report.graded import load_graded
from producers.report.grades import one_line
from producers.rubric.late import LateRule
from producers.rubric.rubric import Points, exact, plain
from producers.submissions.lms_names import is_late, student_id
from producers.words import plural

FILE = "times.csv"
UNKNOWN = "late by Canvas's mark, and when is not known: upload the times of submission"


@dataclass(frozen=True, slots=True)
class Penalty:
    """What lateness takes off one grade."""

    points: Points
    words: str  # `late, 2 days begun: 20 % of 6 points, −1.2`


@dataclass(frozen=True, slots=True)
class Late:
    """The rule of a class and when each submission came, by name and by the student's id."""

    rule: LateRule
    times: Mapping[str, datetime]

    def penalty(self, submission: str, points: Points, possible: Points) -> Penalty | None:
        """What is taken off, at most all of the points; None: nothing. Raises ExportError where it can't be told."""
        submitted = self.times.get(submission) or self.times.get(student_id(submission))
        if submitted is None:
            return None
        days = _days(self.rule, submitted)
        percent, taken = self.rule.off(days, possible)
        off = plain(min(taken, exact(points)))
        if not off:
            return None
        return Penalty(
            off, f"late, {plural(days, 'day')} begun: {plain(percent)} % of {plain(exact(possible))} points, −{off}"
        )

    def unknown(self, submission: str) -> bool:
        """Whether it was late and nobody knows how much."""
        return is_late(submission) and not {submission, student_id(submission)} & self.times.keys()


def late_of(folder: Path, rule: LateRule | None) -> Late | None:
    """The rule with the folder's times; None without a rule. Raises ExportError, BatchError."""
    if rule is None:
        return None
    try:
        with open_ordinary(folder / FILE) as file:
            return Late(rule, _times(file.read()))
    except FileNotFoundError:
        return Late(rule, {})
    except OSError as error:
        raise BatchError(f"{folder / FILE} can't be read: {error.strerror}") from None


def keep_times(folder: Path, data: bytes) -> int:
    """Check a table of times, and keep it for the batch in `folder`; how many it holds.

    Raises ExportError, also for times that can't be compared with the rule's, where the class's grades are written.
    """
    found = _times(data)
    with suppress(BatchError):
        if rule := load_graded(folder).late:
            for time in found.values():
                _days(rule, time)
    with suppress(FileNotFoundError), open_ordinary(folder / FILE) as file:
        if file.read() == data:
            return len(found)
    write_atomically(folder / FILE, data)
    return len(found)


def _days(rule: LateRule, submitted: datetime) -> int:
    try:
        return rule.days(submitted)
    except TypeError:
        raise ExportError("due time and times of submission: write an offset (+01:00) in both, or in none") from None


def _times(data: bytes) -> dict[str, datetime]:
    sheet = read_sheet(data, "table of times")
    who, when = students(sheet), column(sheet.rows[0], "submitted_at")
    if not who or when < 0:
        raise ExportError("the table of times needs submitted_at, and submission (or student_id, ID, Identifier)")
    return {
        key: time
        for number in range(1, len(sheet.rows))
        if (time := _time(sheet, number, when))
        for place in who
        if (key := student(sheet, number, place))
    }


def _time(sheet: Sheet, number: int, when: int) -> datetime | None:
    text = cell(sheet.rows[number], when).strip()
    try:
        return datetime.fromisoformat(text) if text else None
    except ValueError:
        said = one_line(text)[:40]
        raise ExportError(f"times, row {number + 1}: {said!r} is no time as in 2026-11-04T08:30+01:00") from None
