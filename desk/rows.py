"""The table of a class: a row a submission, filtered, sorted, and cut into pages."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from desk.decisions import Overrides
from desk.view import BatchView
from grading.export import FinalGrade
from grading.export.final import apply_decisions
from grading.export.late import late_of
from grading.export.requests import Request, read_requests
from grading.report.grades import outcome_of
from grading.rubric.rubric import Points

Order = Literal["name", "points, lowest first", "points, highest first", "needs review first"]
ORDERS: tuple[Order, ...] = get_args(Order)
PAGE_SIZE = 25


@dataclass(frozen=True, slots=True)
class Row:
    """One submission as the table shows it."""

    number: int  # index in the batch
    name: str  # whose it is, as people are shown
    state: str  # one of OUTCOMES
    ai: Points | None  # as the models left it
    final: FinalGrade  # with what a person decided
    remarks: tuple[str, ...]
    requests: tuple[Request, ...] = ()  # of the student, for another look

    @property
    def points(self) -> Points | None:
        """What counts now; None where it is open."""
        return self.final.points

    @property
    def is_reviewed(self) -> bool:
        """Whether a person has decided something."""
        return self.final.is_reviewed

    @property
    def needs_review(self) -> tuple[str, ...]:
        """Why a person must still decide; empty where nobody must."""
        return () if self.state == "waiting" else self.final.open_doubts

    @property
    def awaits_reply(self) -> bool:
        """Whether a request of the student has no reply yet."""
        return any(request.answer is None for request in self.requests)


@dataclass(frozen=True, slots=True)
class Filter:
    """What is shown. Empty fields let everything through."""

    text: str = ""
    states: tuple[str, ...] = ()
    is_reviewed: bool | None = None
    needs_review: bool = False
    order: Order = "name"
    awaits_reply: bool = False


# What a reviewer goes through: those that wait for a decision come first, and by themselves.
QUEUES = {
    "needs review": Filter(needs_review=True, order="needs review first"),
    "asked for another look": Filter(awaits_reply=True),
    "without points": Filter(states=("link only", "unreadable", "unassigned", "incomplete", "failed")),
    "all": Filter(),
}


@dataclass(frozen=True, slots=True)
class Counters:
    """Submissions of one assignment. `total` may be more than are planned: a trial plans a few."""

    total: int
    graded_count: int  # graded or empty: they have points
    reviewed_count: int
    need_review: int

    @property
    def ungraded_count(self) -> int:
        """Those without points, for whatever reason."""
        return self.total - self.graded_count


def make_rows(view: BatchView, decisions: Mapping[str, Overrides]) -> list[Row]:
    """A row for each submission, in the batch's order."""
    late = late_of(view.folder, view.rubric.late if view.rubric else None)
    requests_by_item: dict[str, list[Request]] = {}
    for request in read_requests(view.folder):
        requests_by_item.setdefault(request.item_id, []).append(request)
    rows = []
    for number, grade in enumerate(view.grades):
        final = apply_decisions(grade, decisions.get(grade.item_id, {}), late=late)
        requests = tuple(requests_by_item.get(grade.item_id, ()))
        rows.append(Row(number, grade.display_name, outcome_of(grade), grade.points, final, grade.remarks, requests))
    return rows


def counters(class_rows: Sequence[Row], total: int = 0) -> Counters:
    """The counters of these rows; `total` is how many submissions there are, if that is known to be more."""
    states = [row.state for row in class_rows]
    return Counters(
        total=max(total, len(class_rows)),
        graded_count=states.count("graded") + states.count("empty"),
        reviewed_count=sum(row.is_reviewed for row in class_rows),
        need_review=sum(bool(row.needs_review) for row in class_rows),
    )


def select(class_rows: Sequence[Row], row_filter: Filter) -> list[Row]:
    """The rows that pass, in the order that is wanted."""
    text = row_filter.text.strip().casefold()
    selection = [
        row
        for row in class_rows
        if text in f"{row.name} {row.final.submission}".casefold()
        and (not row_filter.states or row.state in row_filter.states)
        and row_filter.is_reviewed in (None, row.is_reviewed)
        and (not row_filter.needs_review or row.needs_review)
        and (not row_filter.awaits_reply or row.awaits_reply)
    ]
    if row_filter.order == "name":
        return selection
    if row_filter.order == "needs review first":
        # By what the models left open: a decision moves nobody while the rest is seen.
        return sorted(selection, key=lambda row: (not row.needs_review, -len(row.final.grade.doubts)))
    sign = 1 if row_filter.order == "points, lowest first" else -1
    return sorted(selection, key=lambda row: (row.ai is None, sign * float(row.ai or 0)))


def page_count(class_rows: Sequence[Row], size: int = PAGE_SIZE) -> int:
    """Pages of the table; at least one."""
    return max(1, -(-len(class_rows) // size))


def page_of(class_rows: Sequence[Row], page: int, size: int = PAGE_SIZE) -> list[Row]:
    """The rows of a page, from 1; the last one where there are fewer."""
    page = min(max(1, page), page_count(class_rows, size))
    return list(class_rows[(page - 1) * size : page * size])
