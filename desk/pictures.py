"""Charts of a class: the model's points beside the current ones, and the points for each criterion."""

from collections.abc import Iterable, Sequence

from desk.rows import Row
from grading.charts.drawing import Picture, columns, histogram
from grading.points import criterion_points
from grading.report.grades import one_line
from grading.rubric.rubric import Criterion, Points, Rubric

BY_MODEL, NOW = "by the model", "with what people decided"


def draw_class(rubric: Rubric, rows: Sequence[Row]) -> list[Picture]:
    """Draw the totals by the model and with people's decisions. None if there are no grades."""
    graded_rows = [row for row in rows if row.state == "graded"]
    if not graded_rows:
        return []
    step = min(criterion.step for criterion in rubric.criteria)
    reviewed_rows = [row for row in graded_rows if row.final.is_reviewed]
    # The current points, before any deduction for lateness. Until a review ends, these are the model's points.
    now = [
        row.final.grade.points if row.final.earned_points is None else row.final.earned_points for row in graded_rows
    ]
    model = [row.final.grade.points for row in graded_rows]
    return [_columns("Submissions by points", model, now, rubric.total, step, reviewed_rows)]


def draw_criteria(rubric: Rubric, rows: Sequence[Row]) -> list[Picture]:
    """Draw how often each number of points occurs for each criterion. None as in `draw_class`."""
    handed_in = [row for row in rows if row.state in ("graded", "incomplete")]
    reviewed_rows = [row for row in handed_in if row.final.is_reviewed]
    return [_criterion(criterion, handed_in, reviewed_rows) for criterion in rubric.criteria] if handed_in else []


def _criterion(criterion: Criterion, rows: Sequence[Row], reviewed_rows: Sequence[Row]) -> Picture:
    model = [criterion_points(row.final.grade.criteria, criterion.id) for row in rows]
    now = [criterion_points(row.final.criteria, criterion.id) for row in rows]
    title = one_line(criterion.title)
    short = title if len(title) <= 44 else f"{title[:43]}…"
    return _columns(short, model, now, criterion.points, criterion.step, reviewed_rows)


def _columns(
    title: str,
    model: Iterable[Points | None],
    now: Iterable[Points | None],
    max_points: Points,
    step: Points,
    reviewed_rows: Sequence[Row],
) -> Picture:
    series = {BY_MODEL: histogram(_drop_missing(model), max_points, step)}
    if reviewed_rows:
        series[NOW] = histogram(_drop_missing(now), max_points, step)
    return columns(title, "points", "submissions", series)


def _drop_missing(all_points: Iterable[Points | None]) -> list[Points]:
    return [value for value in all_points if value is not None]
