"""When work was handed in (`times.csv` in the batch's folder), and what lateness costs by the rubric's rule.

The table has a column `submission` (its name), `student_id`, `ID` or `Identifier` (the learning platform's), and a
column `submitted_at` in ISO 8601. A submission that is not in the table counts as on time, unless Canvas marked it as
late; then the delay is unknown.
"""

from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from grading.report.grades import GradedClass, one_line
from grading.roster import EMPTY_ROSTER, Roster, kept_files, read_rosters
from grading.rubric.late import LateRule
from grading.rubric.rubric import Points, exact, plain
from grading.submissions.lms_names import is_late
from grading.tables import ExportError, Sheet, cell, column, read_sheet, student, students
from messages.errors import BatchError
from producers.storage.private import open_ordinary, write_atomically
from producers.words import plural, shorten_names

FILE = "times.csv"
UNKNOWN_DELAY = "late by Canvas's mark, and when is not known: upload the times of submission"
_Row = tuple[int, list[str], datetime]  # row number, names in the row, time of submission


@dataclass(frozen=True, slots=True)
class Penalty:
    """The deduction for lateness from one grade."""

    points: Points
    words: str  # for example `late, 2 days begun: 20 % of 6 points, −1.2`


@dataclass(frozen=True, slots=True)
class Late:
    """A class's late rule, and when each submission came, by its name and by the student's id."""

    rule: LateRule
    times: Mapping[str, datetime]
    roster: Roster = EMPTY_ROSTER

    def penalty(self, submission: str, points: Points, possible: Points) -> Penalty | None:
        """Return the deduction, at most all of the points, or None. Raises ExportError if it can't be computed."""
        submitted_at = next((self.times[name] for name in self.roster.names(submission) if name in self.times), None)
        if submitted_at is None:
            return None
        days = _days(self.rule, submitted_at)
        percent, deduction = self.rule.deduction(days, possible)
        off = plain(min(deduction, exact(points)))
        words = f"late, {plural(days, 'day')} begun: {plain(percent)} % of {plain(exact(possible))} points, −{off}"
        return Penalty(off, words) if off else None

    def has_unknown_delay(self, submission: str) -> bool:
        """Whether the work was late by an unknown time."""
        return is_late(submission) and self.times.keys().isdisjoint(self.roster.names(submission))


def late_of(folder: Path, rule: LateRule | None) -> Late | None:
    """Return the rule with the times in the folder, or None without a rule. Raises ExportError, BatchError."""
    if rule is None:
        return None
    try:
        with open_ordinary(folder / FILE) as file:
            times = {name: time for _, names, time in _rows(file.read()) for name in names}
    except FileNotFoundError:
        times = {}
    except OSError as error:
        raise BatchError(f"{folder / FILE} can't be read: {error.strerror}") from None
    return Late(rule, times, read_rosters(kept_files(folder)))


def keep_times(folder: Path, data: bytes, graded_class: GradedClass) -> tuple[int, str]:
    """Check a table of times, and keep it for the batch in `folder`.

    Returns how many submissions of the class have a time, and a remark or "". Raises ExportError also if the times
    can't be compared with the rule's, or if none belongs to the class: otherwise all deductions for lateness would
    silently be lost.
    """
    rows = _rows(data)
    if graded_class.late:
        for _, _, time in rows:
            _days(graded_class.late, time)
    count, remark = _match_rows(rows, graded_class, read_rosters(kept_files(folder)))
    with suppress(FileNotFoundError), open_ordinary(folder / FILE) as file:
        if file.read() == data:
            return count, remark
    write_atomically(folder / FILE, data)
    return count, remark


def _match_rows(rows: Iterable[_Row], graded_class: GradedClass, roster: Roster) -> tuple[int, str]:
    """Count the submissions that have a time, and return a remark on rows of other people.

    Students who handed in nothing may have a row too.
    """
    submissions = [grade.submission for grade in graded_class.grades]
    by_name = {name: submission for submission in submissions for name in roster.names(submission)}
    times: dict[str, datetime] = {}
    strangers = []
    for number, names, time in rows:
        row_names = one_line(", ".join(names))[:60] or "nobody"
        submission = next((by_name[name] for name in names if name in by_name), "")
        if not submission:
            strangers.append(repr(row_names))
        if names and times.setdefault(submission or names[0], time) != time:
            raise ExportError(
                f"times, row {number}: {row_names!r} has a different time in an earlier row; keep only the row "
                "that counts"
            )
    count = len(times.keys() & set(submissions))
    if not count:
        problem = f"no submission of this class is {shorten_names(strangers)}" if strangers else "no row has a time"
        raise ExportError(f"the table of times can't be used: {problem}; the table needs the submissions' names or ids")
    others = f"{plural(len(strangers), 'row', 'is', 'are')} of no submission of this class: {shorten_names(strangers)}"
    return count, f"times: {others}" if strangers else ""


def _days(rule: LateRule, submitted_at: datetime) -> int:
    try:
        return rule.days(submitted_at)
    except TypeError:
        raise ExportError(
            "the due time and the times of submission can't be compared: write a UTC offset (such as +01:00) in both, "
            "or in neither"
        ) from None


def _rows(data: bytes) -> list[_Row]:
    """Return the rows that hold a time."""
    sheet = read_sheet(data, "table of times")
    student_columns, time_column = students(sheet), column(sheet.rows[0], "submitted_at")
    if not student_columns or time_column < 0:
        raise ExportError(
            "the table of times lacks columns: it needs submitted_at, and one of submission, student_id, ID and "
            "Identifier"
        )
    return [
        (number + 1, [name for place in student_columns if (name := student(sheet, number, place))], time)
        for number in range(1, len(sheet.rows))
        if (time := _time(sheet, number, time_column))
    ]


def _time(sheet: Sheet, number: int, time_column: int) -> datetime | None:
    text = cell(sheet.rows[number], time_column).strip()
    try:
        return datetime.fromisoformat(text) if text else None
    except ValueError:
        raise ExportError(
            f"times, row {number + 1}: {one_line(text)[:40]!r} is not a time; write it as in 2026-11-04T08:30+01:00"
        ) from None
