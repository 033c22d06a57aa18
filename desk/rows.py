"""The table of a class: a row for each submission, filtered, sorted, and divided into pages."""

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from desk.decisions import Overrides
from desk.view import BatchView
from grading.export import FinalGrade
from grading.export.final import apply_decisions, earlier_grades
from grading.export.late import late_of
from grading.export.requests import Request, read_requests
from grading.points import criterion_points
from grading.report.grades import outcome_of
from grading.reviews import ROUND_REASON
from producers.words import plural, shorten_names

Order = Literal["name", "points, lowest first", "points, highest first", "needs review first"]
ORDERS: tuple[Order, ...] = get_args(Order)
PAGE_SIZE = 25


@dataclass(frozen=True, slots=True)
class Row:
    """One submission as the table shows it."""

    number: int  # index in the batch
    name: str  # the person's displayed name
    state: str  # one of OUTCOMES
    final: FinalGrade  # includes the reviewers' decisions
    requests: tuple[Request, ...] = ()  # the student's requests to look at the grade again

    @property
    def needs_review(self) -> tuple[str, ...]:
        """The reasons why a person must still decide; empty if nobody must."""
        return () if self.state == "waiting" else self.final.open_doubts

    @property
    def awaits_reply(self) -> bool:
        """Whether a request of the student has no reply yet."""
        return any(request.answer is None for request in self.requests)


@dataclass(frozen=True, slots=True)
class Filter:
    """The conditions for what is shown. An empty field lets everything through."""

    text: str = ""
    states: tuple[str, ...] = ()
    is_reviewed: bool | None = None
    needs_review: bool = False
    order: Order = "name"
    awaits_reply: bool = False


# A reviewer works through one of these queues. The first queue holds the submissions that wait for a decision. Until a
# person chooses a queue, the desk shows the first queue that is not empty.
QUEUES = {
    "needs review": Filter(needs_review=True, order="needs review first"),
    "asked for another look": Filter(awaits_reply=True),
    "all": Filter(),
    "without points": Filter(states=("link only", "unreadable", "unassigned", "incomplete", "failed")),
}


def make_rows(view: BatchView, decisions: Mapping[str, Overrides]) -> list[Row]:
    """Return a row for each submission, in the batch's order."""
    late = late_of(view.folder, view.rubric.late if view.rubric else None)
    earlier = earlier_grades(
        view.folder, (override for overrides in decisions.values() for override in overrides.values())
    )
    requests_by_item: dict[str, list[Request]] = {}
    for request in read_requests(view.folder):
        requests_by_item.setdefault(request.item_id, []).append(request)
    rows = []
    for number, grade in enumerate(view.grades):
        final = apply_decisions(grade, decisions.get(grade.item_id, {}), late=late, earlier=earlier)
        requests = tuple(requests_by_item.get(grade.item_id, ()))
        rows.append(Row(number, grade.display_name, outcome_of(grade), final, requests))
    return rows


def without_points(class_rows: Iterable[Row]) -> list[Row]:
    """Return the rows that are blank for another reason than an open doubt."""
    return [row for row in class_rows if row.final.why_blank and not row.needs_review and row.state != "waiting"]


def count_words(class_rows: Sequence[Row], total: int = 0, finish: str = "") -> dict[str, str]:
    """How many wait for what, in the words of all pages: `review`, `reply`, `points` and `open`, where there are any.

    Args:
        total: how many submissions there are, if that is known to be more: a trial plans a few.
        finish: when what is open will be done; "" while nothing runs.
    """
    total = max(total, len(class_rows))
    doubtful, asked = sum(bool(row.needs_review) for row in class_rows), sum(row.awaits_reply for row in class_rows)
    blank, waiting = len(without_points(class_rows)), total - sum(row.state != "waiting" for row in class_rows)
    facts = {
        "review": (doubtful, f"{doubtful} of {total} need{'s' * (doubtful == 1)} review"),
        "reply": (asked, f"{plural(asked, 'request', 'waits', 'wait')} for a reply"),
        "points": (blank, f"{blank} without points"),
        "open": (waiting, f"{waiting} being graded, {finish}" if finish else f"{waiting} not graded yet"),
    }
    return {name: words for name, (count, words) in facts.items() if count}


def standing_words(class_rows: Sequence[Row], total: int = 0, finish: str = "") -> str:
    """`38 of 200 need review; 12 being graded, done by about 23:10`: how a class stands, as `count_words`."""
    return "; ".join(count_words(class_rows, total, finish).values()) or (
        f"none of {len(class_rows)} needs review" if class_rows else "nothing is graded yet"
    )


def what_goes_out(finals: Iterable[FinalGrade], overrides_by_item: Mapping[str, Overrides]) -> list[str]:
    """Of the grades that are given out, in sentences: who has decided on them, and which feedback fits other points."""
    given_grades = [final for final in finals if final.points is not None]
    decided_count = sum(
        any(not decision.reason.startswith(ROUND_REASON) for decision in standing.values())
        for final in given_grades
        for standing in [overrides_by_item.get(final.grade.item_id, {})]
        if final.is_reviewed
    )
    misfits = [
        final.grade.display_name
        for final in given_grades
        for points, old_points, text, old_text in [
            (final.earned_points, final.grade.points, final.summary, final.grade.summary),
            *(
                (item.points, original.points, item.feedback, original.feedback)
                for item, original in zip(final.criteria, final.grade.criteria, strict=True)
            ),
        ]
        if None not in (points, old_points) and points != old_points and text.strip() == old_text.strip() != ""
    ]
    empty_count = sum(
        final.grade.state == "empty" and not overrides_by_item.get(final.grade.item_id) for final in given_grades
    )
    texts = plural(len(misfits), "feedback text", "was", "were")
    return [
        f"{plural(len(given_grades), 'grade')} in this file: {decided_count} that a person has decided on, "
        f"{len(given_grades) - decided_count - empty_count} on the model's points alone"
        + (f", {empty_count} with nothing handed in." if empty_count else "."),
        *(
            [
                f"{texts} written for other points than those given now: "
                f"{shorten_names(list(dict.fromkeys(misfits)), 10)}. Review marks them with ⚑."
            ]
            if misfits
            else []
        ),
    ]


def open_questions(class_rows: Iterable[Row]) -> str:
    """Return where a person has to decide, such as `works in 12, clear in 3`, most frequent first; "" if nowhere."""
    places = dict.fromkeys(
        (row.number, doubt.criterion_id or "the whole work")
        for row in class_rows
        for doubt in row.final.grade.doubts
        if doubt.why in row.needs_review
    )
    return ", ".join(f"{place} in {count:,}" for place, count in Counter(place for _, place in places).most_common())


def undecided_rows(
    class_rows: Iterable[Row], decisions: Mapping[str, Overrides], criterion_id: str, doubtful_only: bool
) -> dict[str, Row]:
    """Return by item id the rows with points for this criterion on which no decision counts, there or as a whole."""
    return {
        grade.item_id: row
        for row in class_rows
        for grade in [row.final.grade]
        if criterion_points(grade.criteria, criterion_id) is not None
        and not {criterion_id, criterion_id if row.final.lapsed else None} & decisions.get(grade.item_id, {}).keys()
        and (not doubtful_only or any(doubt.criterion_id == criterion_id for doubt in grade.doubts))
    }


def select(class_rows: Sequence[Row], row_filter: Filter) -> list[Row]:
    """Return the rows that pass the filter, in the wanted order."""
    text = row_filter.text.strip().casefold()
    selection = [
        row
        for row in class_rows
        if text in f"{row.name} {row.final.submission}".casefold()
        and (not row_filter.states or row.state in row_filter.states)
        and row_filter.is_reviewed in (None, row.final.is_reviewed)
        and (not row_filter.needs_review or row.needs_review)
        and (not row_filter.awaits_reply or row.awaits_reply)
    ]
    if row_filter.order == "name":
        return selection
    if row_filter.order == "needs review first":
        # The submissions that need review are sorted by the number of the model's doubts, because a decision does not
        # change that number. Those that still need review therefore keep their order while people decide.
        return sorted(selection, key=lambda row: (not row.needs_review, -len(row.final.grade.doubts)))
    sign = 1 if row_filter.order == "points, lowest first" else -1
    return sorted(
        selection, key=lambda row: (row.final.grade.points is None, sign * float(row.final.grade.points or 0))
    )


def page_count(class_rows: Sequence[Row], size: int = PAGE_SIZE) -> int:
    """Return the number of pages of the table, at least one."""
    return max(1, -(-len(class_rows) // size))


def page_of(class_rows: Sequence[Row], page: int, size: int = PAGE_SIZE) -> list[Row]:
    """Return the rows of a page, counted from 1, or those of the last page if there are fewer."""
    page = min(max(1, page), page_count(class_rows, size))
    return list(class_rows[(page - 1) * size : page * size])
