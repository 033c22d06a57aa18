"""The table of a class: a row a submission, filtered, sorted, and cut into pages."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from desk.decisions import Decided
from desk.view import BatchView
from grading.export import FinalGrade
from grading.export.final import apply
from grading.export.late import Late, late_of
from grading.export.requests import Request, read_requests
from grading.points import Grade
from grading.report.grades import outcome_of
from grading.rubric.rubric import Points

Order = Literal["name", "points, lowest first", "points, highest first", "needs review first"]
ORDERS: tuple[Order, ...] = get_args(Order)
PAGE_SIZE = 25


@dataclass(frozen=True, slots=True)
class Row:
    """One submission as the table shows it."""

    number: int  # index in the batch
    name: str
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
    def reviewed(self) -> bool:
        """Whether a person has decided something."""
        return self.final.reviewed

    @property
    def needs_review(self) -> tuple[str, ...]:
        """Why a person must still decide; empty where nobody must."""
        return () if self.state == "waiting" else self.final.open_doubts

    @property
    def asked(self) -> bool:
        """Whether a request of the student has no reply yet."""
        return any(request.answer is None for request in self.requests)


@dataclass(frozen=True, slots=True)
class Filter:
    """What is shown. Empty fields let everything through."""

    text: str = ""
    states: tuple[str, ...] = ()
    reviewed: bool | None = None
    needs_review: bool = False
    order: Order = "name"
    asked: bool = False


# What a reviewer goes through: those that wait for a decision come first, and by themselves.
QUEUES = {
    "needs review": Filter(needs_review=True, order="needs review first"),
    "asked for another look": Filter(asked=True),
    "without points": Filter(states=("unreadable", "incomplete", "failed")),
    "all": Filter(),
}


@dataclass(frozen=True, slots=True)
class Counters:
    """Submissions of one assignment. `total` may be more than are planned: a trial plans a few."""

    total: int
    graded: int  # graded or empty: they have points
    reviewed: int
    need_review: int

    @property
    def ungraded(self) -> int:
        """Those without points, for whatever reason."""
        return self.total - self.graded


def rows(view: BatchView, decisions: Mapping[str, Decided]) -> list[Row]:
    """A row for each submission, in the batch's order."""
    late = late_of(view.folder, view.rubric.late if view.rubric else None)
    asked: dict[str, list[Request]] = {}
    for request in read_requests(view.folder):
        asked.setdefault(request.item_id, []).append(request)
    return [_row(number, grade, decisions, late, asked) for number, grade in enumerate(view.grades)]


def _row(
    number: int,
    grade: Grade,
    decisions: Mapping[str, Decided],
    late: Late | None,
    asked: Mapping[str, Sequence[Request]],
) -> Row:
    final = apply(grade, decisions.get(grade.item_id, {}), late=late)
    requests = tuple(asked.get(grade.item_id, ()))
    return Row(number, grade.submission, outcome_of(grade), grade.points, final, grade.remarks, requests)


def counters(found: Sequence[Row], total: int = 0) -> Counters:
    """The counters of these rows; `total` is how many submissions there are, if that is known to be more."""
    states = [row.state for row in found]
    return Counters(
        total=max(total, len(found)),
        graded=states.count("graded") + states.count("empty"),
        reviewed=sum(row.reviewed for row in found),
        need_review=sum(bool(row.needs_review) for row in found),
    )


def select(found: Sequence[Row], wanted: Filter) -> list[Row]:
    """The rows that pass, in the order that is wanted."""
    text = wanted.text.strip().casefold()
    kept = [
        row
        for row in found
        if text in row.name.casefold()
        and (not wanted.states or row.state in wanted.states)
        and wanted.reviewed in (None, row.reviewed)
        and (not wanted.needs_review or row.needs_review)
        and (not wanted.asked or row.asked)
    ]
    return _sorted(kept, wanted.order)


def _sorted(kept: list[Row], order: Order) -> list[Row]:
    if order == "name":
        return kept
    if order == "needs review first":  # by what the models left open: a decision moves nobody while the rest is seen
        return sorted(kept, key=lambda row: (not row.needs_review, -len(row.final.grade.doubts)))
    sign = 1 if order == "points, lowest first" else -1
    return sorted(kept, key=lambda row: (row.ai is None, sign * float(row.ai or 0)))


def page_count(found: Sequence[Row], size: int = PAGE_SIZE) -> int:
    """Pages of the table; at least one."""
    return max(1, -(-len(found) // size))


def page_of(found: Sequence[Row], page: int, size: int = PAGE_SIZE) -> list[Row]:
    """The rows of a page, from 1; the last one where there are fewer."""
    page = min(max(1, page), page_count(found, size))
    return list(found[(page - 1) * size : page * size])
