"""What the review screen shows, as JSON: the class, and the submissions near the current one."""

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from desk.decisions import ACCEPTED_REASON, TOGETHER_REASON, Overrides
from desk.rows import QUEUES, Filter, Row, select, standing_words
from grading.export import Request
from grading.points import CriterionGrade
from grading.report.grades import show_distribution, show_points
from grading.reviews import ROUND_REASON, Override, version_of
from grading.rubric.rubric import Rubric

# These reasons are suggested until people have given their own.
_REASONS = {
    "raised": "the work shows more than the model saw",
    "lowered": "the work shows less than the model saw",
    "reworded": "reworded for the student",
    "confirmed": "the model's points are right",
}
_MOST_PHRASES = 9  # maximum number for each criterion, because there are only nine digit keys
# After this many uses, a reason is filled in by default, and a comment that the model wrote is offered. A text that was
# used less often may suit only the student for whom it was written.
_USES_OF_A_HABIT = 3


def class_content(
    rubric: Rubric, rows: Sequence[Row], overrides_by_item: Mapping[str, Overrides], sections: Mapping[str, str]
) -> dict[str, Any]:
    """The criteria, everybody, who is in each queue, and who has decided how much; `sections` by submission.

    Apart from each other what changes with a decision, and what does not: the screen is sent what it does not have.
    """
    reviewers = Counter(
        reviewer
        for overrides in overrides_by_item.values()
        for reviewer in {override.reviewer for override in overrides.values()}
    )
    return {
        "criteria": [
            {
                "id": criterion.id,
                "title": criterion.title,
                "guidance": criterion.guidance,
                "min": criterion.minimum,
                "max": criterion.points,
                "step": criterion.step,
            }
            for criterion in rubric.criteria
        ],
        "queues": {
            name: [row.final.grade.item_id for row in select(rows, row_filter)]
            for name, row_filter in QUEUES.items()
            if row_filter != Filter()
        },
        "people": [
            [row.final.grade.item_id, row.name, sections.get(row.final.submission, ""), len(row.final.grade.doubts)]
            for row in rows
        ],
        "open": {row.final.grade.item_id: open_ids for row in rows if (open_ids := _open_ids(row))},
        "phrases": phrases_of(rows, overrides_by_item),
        "reviewers": dict(reviewers.most_common()),
        "standing": standing_words(rows),
    }


def _open_ids(row: Row) -> list[str]:
    """Return the criteria on which a person has yet to decide."""
    open_ids = {doubt.criterion_id for doubt in row.final.grade.doubts if doubt.why in row.final.open_doubts}
    return sorted(open_ids - {""})


def digest_of(part: object) -> str:
    """Return a digest by which the screen recognises a part of the class that it already has."""
    return hashlib.sha256(json.dumps(part).encode()).hexdigest()[:16]


def version_seen(row: Row, standing: Overrides) -> str:
    """Return what identifies the state that a person sees: `version_of` the decisions, a dot, the model's points."""
    return f"{version_of(standing.values())}.{digest_of([item.points for item in row.final.grade.criteria])}"


def submission_content(row: Row, standing: Overrides) -> dict[str, Any]:
    """Return one submission without its work: the grade, the decisions about it, and its student's requests."""
    grade = row.final.grade
    return {
        "version": version_seen(row, standing),
        "points": show_points(row.final.points),
        "max": show_points(grade.max_points),
        "model": show_points(row.final.grade.points),
        "penalty": row.final.penalty.words if row.final.penalty else "",
        "whole": standing[None].points if None in standing else None,
        "state": state_words(row),
        "kind": kind_of(row),
        "isWholeOpen": None not in standing and any(not doubt.criterion_id for doubt in grade.doubts),
        "remarks": list(row.final.grade.remarks),
        "reason": grade.reason,
        "summary": row.final.summary,
        "written": grade.summary,  # by the model
        "criteria": [
            _criterion(item, original, [doubt.why for doubt in grade.doubts if doubt.criterion_id == item.id])
            for item, original in zip(row.final.criteria, grade.criteria, strict=True)
        ],
        "decisions": [_decision(override) for override in sorted(standing.values(), key=lambda each: each.time)],
        "requests": [_request(request) for request in row.requests],
    }


def state_words(row: Row) -> str:
    """Say what is to be done about a submission."""
    if row.state == "waiting":
        return "waiting for its results"
    if row.final.is_reviewed and not row.final.why_blank:
        return "The grade is final: no question is open."
    return f"⚑ {row.final.why_blank}" if row.needs_review else row.final.why_blank or row.state


def kind_of(row: Row) -> str:
    """Return the kind of its state, which decides its colour: waiting, open, missing or settled."""
    if row.state == "waiting":
        return "waiting"
    if row.needs_review or row.awaits_reply:
        return "open"
    return "missing" if row.final.why_blank else "settled"


def _criterion(item: CriterionGrade, original: CriterionGrade, doubts: Sequence[str]) -> dict[str, Any]:
    """Return a criterion with its current values and the model's."""
    return {
        "id": item.id,
        "title": item.title,
        "min": item.min_points,
        "max": item.max_points,
        "points": item.points,
        "model": original.points,
        "evidence": item.evidence,
        "found": item.evidence_state,
        "likelihoods": show_distribution(original),
        "feedback": item.feedback,
        "written": original.feedback,
        "reason": item.reason,
        "doubts": list(doubts),
    }


def _decision(override: Override) -> dict[str, str]:
    return {
        "label": override.criterion_id or "whole",
        "points": show_points(override.points),
        "feedback": override.feedback or "",
        "reason": override.reason,
        "by": override.reviewer,
    }


def _request(request: Request) -> dict[str, Any]:
    answer = request.answer
    return {
        "id": request.id,
        "about": request.criterion_id or "",
        "points": show_points(request.points),
        "text": request.text,
        "reply": answer.reply if answer else None,
        "by": answer.by if answer else "",
    }


def phrases_of(rows: Iterable[Row], overrides_by_item: Mapping[str, Overrides]) -> dict[str, Any]:
    """Return reasons and comments that people have given, for each criterion the most used first.

    After people's comments come those that the model wrote for several submissions.

    {"reasons": {criterion: {"raised": […], "lowered": […], …}}, "comments": {criterion: [[text, uses]]}}
    """
    reasons: dict[tuple[str, str], Counter[str]] = defaultdict(Counter)
    comments: dict[str, Counter[str]] = defaultdict(Counter)
    model_texts: dict[str, Counter[str]] = defaultdict(Counter)
    for row in rows:
        grade = row.final.grade
        by_model = [("", None, grade.summary), *((item.id, item.points, item.feedback) for item in grade.criteria)]
        for id, points, text in by_model:
            model_texts[id][text.strip()] += 1
            override = overrides_by_item.get(grade.item_id, {}).get(id or None)
            if override and override.reason != ACCEPTED_REASON and not override.reason.startswith(ROUND_REASON):
                is_reworded = override.feedback not in (None, text.strip())
                # TOGETHER_REASON is not suggested for other submissions, because it is given to many at once and
                # explains none of them.
                if override.reason != TOGETHER_REASON:
                    reasons[id, _kind(points, override, is_reworded)][override.reason] += 1
                if override.feedback and is_reworded:
                    comments[id][override.feedback] += 1
    return {
        "reasons": {
            id: {kind: _by_use(reasons[id, kind], default) for kind, default in _REASONS.items()} for id in model_texts
        },
        "comments": {id: _comments_of(comments[id], texts) for id, texts in model_texts.items()},
    }


def same_comments(
    rows: Iterable[Row], overrides_by_item: Mapping[str, Overrides], criterion_id: str, text: str, reviewer: str
) -> list[list[str]]:
    """Return [item id, version, who decided] of each submission with this text for this criterion.

    The last is "" if nobody, or `reviewer`, has decided.
    """
    places = []
    for row in rows:
        standing = overrides_by_item.get(row.final.grade.item_id, {})
        if any(item.id == criterion_id and item.feedback == text for item in row.final.criteria):
            override = standing.get(criterion_id)
            name = override.reviewer or "somebody" if override and override.reviewer != reviewer else ""
            places.append([row.final.grade.item_id, version_seen(row, standing), name])
    return places


def _kind(points: Any, override: Override, is_reworded: bool) -> str:
    """Return which of _REASONS a decision has; `points` are the model's."""
    if override.points is None or override.points == points:
        return "reworded" if is_reworded or override.points is None else "confirmed"
    return "lowered" if points is not None and override.points < points else "raised"


def _comments_of(comments: Counter[str], model_texts: Counter[str]) -> list[tuple[str, int]]:
    """Return comments with their uses: people's, and then what the model wrote often."""
    often = [(text, uses) for text, uses in model_texts.most_common(_MOST_PHRASES) if text and uses >= _USES_OF_A_HABIT]
    return list(dict([*comments.most_common(_MOST_PHRASES), *often]).items())[:_MOST_PHRASES]


def _by_use(counter: Counter[str], default: str) -> list[str]:
    """Return texts, the most used first. The first text is filled in by default, so it must be `default` or a habit."""
    uses = counter.most_common(_MOST_PHRASES)
    habits = [reason for reason, count in uses if count >= _USES_OF_A_HABIT]
    return list(dict.fromkeys([*habits, default, *(reason for reason, _ in uses)]))[:_MOST_PHRASES]
