"""Students' requests for another look at their grade. `requests.jsonl` in the batch's folder is only appended to.

    {"id": "3f0c…", "item_id": "…", "criterion_id": "joins", "text": "…", "points": 2, "by": "…", "time": …}
    {"answers": "3f0c…", "reply": "…", "points": 3, "by": "…", "time": …}

`points` are the points at that time, for the criterion, or for the whole grade if `criterion_id` is null. An answer
does not change points; a decision does (`grading.reviews`). A request may be answered again, and then the last answer
counts. A student's words are shown and kept, but never go into a prompt.
"""

import hashlib
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path

from grading.export.final import ExportFile, FinalGrade, final_grades, with_people
from grading.export.format import ExportFormat
from grading.points import criterion_points
from grading.report.grades import name_cell, one_line, show_points
from grading.reviews import MAX_TEXT
from grading.roster import Roster, kept_files, read_rosters
from grading.rubric.rubric import Points
from grading.tables import ExportError, Sheet, cell, column, read_sheet, student, students, write_sheet
from producers.storage.journal import Lines, lock_lines
from producers.storage.shapes import parse_as
from producers.words import shorten_names

FILE = "requests.jsonl"
_REPLIES_FILE = "replies.csv"
COLUMNS = (
    *("id", "submission", "student_id", "criterion", "request", "reply"),
    *("points_then", "points_now", "evidence", "feedback", "entered_by", "answered_by"),
)


@dataclass(frozen=True, slots=True)
class RequestReply:
    """A person's reply to a request, with the points at that time."""

    answers: str  # the request's id
    reply: str
    points: Points | None
    by: str = ""
    time: float = field(default_factory=time.time)  # seconds since the epoch

    def __post_init__(self) -> None:
        if not self.reply.strip():
            raise ExportError("the reply is empty: write what the student will read")
        _require_short("reply", self.reply)


@dataclass(frozen=True, slots=True)
class Request:
    """A student's request, as somebody entered it."""

    # Hash of submission, criterion and text. If a file is read twice, a request gets the same id again and is not added
    # twice.
    id: str
    item_id: str  # `Grade.item_id`
    criterion_id: str | None  # None if the request is about the whole grade
    text: str
    points: Points | None
    by: str = ""
    time: float = field(default_factory=time.time)  # seconds since the epoch
    answer: RequestReply | None = None

    @classmethod
    def about(cls, final: FinalGrade, criterion_id: str | None, text: str, by: str = "") -> "Request":
        """Make a request about a grade, or about one of its criteria. Raises ExportError."""
        if not text.strip():
            raise ExportError("the request is empty: enter the student's words")
        _require_short("request", text)
        item_id = final.grade.id
        identity = "\0".join((item_id, criterion_id or "", text.strip()))
        points = points_of(final, criterion_id)
        return cls(hashlib.sha256(identity.encode()).hexdigest()[:12], item_id, criterion_id, text.strip(), points, by)


def points_of(final: FinalGrade, criterion_id: str | None) -> Points | None:
    """Return the current points for a criterion, or for the whole grade."""
    return final.points if criterion_id is None else criterion_points(final.criteria, criterion_id)


def read_requests(folder: Path) -> list[Request]:
    """Read all requests of the batch in `folder`, oldest first, each with its last answer. Raises BatchError."""
    requests: dict[str, Request] = {}
    for _, entry in Lines(folder / FILE).read_all(
        lambda row: parse_as(RequestReply if "answers" in row else Request, row, "the request"), "request"
    ):
        if isinstance(entry, Request):
            requests.setdefault(entry.id, entry)
        elif entry.answers in requests:
            requests[entry.answers] = replace(requests[entry.answers], answer=entry)
    return list(requests.values())


def add_requests(folder: Path, requests: Iterable[Request]) -> int:
    """Keep the requests that are new, and return how many there were. If it raises BatchError, nothing was kept."""
    with lock_lines(folder / FILE, "request"):
        stored_ids = {request.id for request in read_requests(folder)}
        new = {request.id: request for request in requests if request.id not in stored_ids}
        rows = (
            {name: value for name, value in asdict(request).items() if name != "answer"} for request in new.values()
        )
        Lines(folder / FILE, is_owner=True).append(rows)
    return len(new)


def save_reply(folder: Path, request: Request, reply: str, points: Points | None, by: str = "") -> None:
    """Keep a reply to a request.

    Raises ExportError if the reply is empty, or if somebody else has answered since `request` was read; BatchError.
    """
    new_reply = RequestReply(request.id, reply.strip(), points, by)
    with lock_lines(folder / FILE, "request"):
        standing = next(
            (stored_request.answer for stored_request in read_requests(folder) if stored_request.id == request.id), None
        )
        if standing and standing != request.answer:
            replier = f" ({standing.by})" if standing.by else ""
            raise ExportError(f"somebody else has replied in the meantime{replier}: read that reply first")
        Lines(folder / FILE, is_owner=True).append([asdict(new_reply)])


def requests_from(folder: Path, data: bytes, grades: Sequence[FinalGrade], by: str = "") -> tuple[list[Request], str]:
    """Read requests from a CSV: `submission` (or student_id, ID, Identifier), `request`, and `criterion` (id or title).

    A submission may be called by its own name, or by the number or name that the batch in `folder` knows.

    Also returns a sentence on rows that name a student but hold no request, or "". Raises ExportError, which names the
    row.
    """
    sheet = read_sheet(data, "table of requests")
    header = sheet.rows[0]
    student_columns, text_column, criterion_column = (
        students(sheet),
        column(header, "request"),
        column(header, "criterion"),
    )
    if not student_columns or text_column < 0:
        raise ExportError(
            "the table of requests lacks columns: it needs a column request, and one of submission, student_id, "
            "ID and Identifier"
        )
    roster, by_submission = read_rosters(kept_files(folder)), {final.submission: final for final in grades}
    by_name = {
        name: by_submission[submission]
        for submission, owner in roster.owners(by_submission).items()
        for person in [owner.display_name]
        for name in (person, " ".join(reversed(person.split(", ", 1))), *reversed(roster.names(submission)))
    }
    requests = list(_rows(sheet, by_name, student_columns, text_column, criterion_column, by))
    empty = [
        str(number + 1)
        for number, row in enumerate(sheet.rows)
        if not cell(row, text_column).strip() and any(student(sheet, number, place) for place in student_columns)
    ]
    rows, hold = ("rows", "hold") if empty[1:] else ("row", "holds")
    return requests, f"requests, {rows} {shorten_names(empty)} {hold} no request" if empty else ""


def _rows(
    sheet: Sheet,
    by_name: Mapping[str, FinalGrade],
    student_columns: Sequence[int],
    text_column: int,
    criterion_column: int,
    by: str,
) -> Iterator[Request]:
    for number in range(1, len(sheet.rows)):
        text = cell(sheet.rows[number], text_column)
        if not text.strip():
            continue
        names = [name for place in student_columns if (name := student(sheet, number, place))]
        final = next((by_name[name] for name in names if name in by_name), None)
        if final is None:
            row_names = one_line(", ".join(names))[:60] or "nobody"
            raise ExportError(
                f"requests, row {number + 1}: this class has no submission {row_names!r}; correct the name"
            )
        yield Request.about(final, _criterion(final, cell(sheet.rows[number], criterion_column), number), text, by)


def _criterion(final: FinalGrade, text: str, row: int) -> str | None:
    sought_name = text.strip().casefold()
    if not sought_name:
        return None
    for criterion in final.criteria:
        if sought_name in (criterion.id.casefold(), criterion.title.casefold()):
            return criterion.id
    raise ExportError(
        f"requests, row {row + 1}: {one_line(text)[:60]!r} is not a criterion of this class; use one of "
        + ", ".join(criterion.id for criterion in final.criteria)
    )


def export_replies(folder: Path) -> ExportFile:
    """Export each request with its reply, the points then and now, and the current evidence and feedback.

    If anybody is known, the last column is `person`.

    Raises BatchError.
    """
    _, grades = final_grades(folder)
    by_item = {final.grade.id: final for final in grades}
    requests, roster = read_requests(folder), read_rosters(kept_files(folder))
    finals = [by_item.get(request.item_id) for request in requests]
    rows = [[*COLUMNS], *(_reply(request, final, roster) for request, final in zip(requests, finals, strict=True))]
    open_count = sum(request.answer is None for request in requests)
    notes = (f"{open_count} of {len(requests)} requests have no reply yet.",) if open_count else ()
    data = write_sheet(Sheet(with_people(rows, finals)), newline="\n")
    return ExportFile(_REPLIES_FILE, "text/csv", data, notes=notes)


def _reply(request: Request, final: FinalGrade | None, roster: Roster) -> list[str]:
    criteria = [
        criterion
        for criterion in (final.criteria if final else ())
        if request.criterion_id in (None, criterion.id) and not criterion.leaks
    ]
    evidence = [criterion.evidence for criterion in criteria if criterion.evidence_state == "found"]
    return [
        request.id,
        name_cell(final.submission) if final else "",
        "; ".join(roster.names(final.submission)[1:]) if final else "",
        request.criterion_id or "",
        one_line(request.text),
        one_line(request.answer.reply) if request.answer else "",
        show_points(request.points),
        show_points(points_of(final, request.criterion_id) if final else None),
        one_line(" … ".join(filter(None, evidence))),
        one_line(" ".join(criterion.feedback for criterion in criteria if criterion.feedback)),
        one_line(request.by),
        one_line(request.answer.by) if request.answer else "",
    ]


def _require_short(label: str, text: str) -> None:
    if len(text) > MAX_TEXT:
        raise ExportError(
            f"the {label} is too long: at most {MAX_TEXT:,} characters are allowed, and it has {len(text):,}"
        )


# Only the desk offers this format. In the terminal, `kvasir requests --to` writes the replies.
REPLIES = ExportFormat(
    "replies",
    "Replies to requests for another look",
    "Each request for another look beside its reply.",
    (_REPLIES_FILE,),
    lambda folder, **_choices: export_replies(folder),
    is_compared=False,
)
