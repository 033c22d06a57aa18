"""Like answers of a class that wait for a decision, and decisions that were made about several of them at once.

What was decided together has one time, one criterion, one person and one reason: no mark in the record is needed.
"""

import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from difflib import SequenceMatcher
from typing import Literal

from desk.decisions import Overrides, ReviewError
from desk.rows import Row
from grading.likeness import Answer
from grading.reviews import ROUND_REASON, Override, version_of
from grading.rubric.rubric import Points

ALIKE_REASON = "decided together with the answers that are like it"
_TOKEN = re.compile(r"\w+|\s+|[^\w\s]")

Change = Literal["same", "added", "missing"]


def undecided_rows(
    rows: Iterable[Row], overrides_by_item: Mapping[str, Overrides], criterion_id: str, doubtful_only: bool
) -> list[Row]:
    """The submissions with points for this criterion that nobody has decided on, neither there nor as a whole."""
    return [
        row
        for row in rows
        if row.state != "waiting"
        and any(item.id == criterion_id and item.points is not None for item in row.final.grade.criteria)
        and not {criterion_id, None} & overrides_by_item.get(row.final.grade.item_id, {}).keys()
        and (not doubtful_only or any(doubt.criterion_id == criterion_id for doubt in row.final.grade.doubts))
    ]


def decide_together(
    answers: Sequence[Answer],
    criterion_id: str,
    points: Points,
    reason: str,
    overrides_by_item: Mapping[str, Overrides],
    reviewer: str,
) -> list[Override]:
    """A decision about each of these answers, made on what `overrides_by_item` says. Raises ReviewError if on none."""
    if not answers:
        raise ReviewError("tick the answers that are to get these points")
    if not reason.strip():
        raise ReviewError("choose a reason, or write one: it is kept beside what the model said")
    moment = time.time()
    return [
        Override(
            answer.item_id, criterion_id, points, None, reason.strip(), reviewer, moment, version_of(seen.values())
        )
        for answer in answers
        for seen in [overrides_by_item.get(answer.item_id, {})]
    ]


def decided_together(overrides_by_item: Mapping[str, Overrides], criterion_id: str) -> list[list[Override]]:
    """What people decided on this criterion, the latest first; decisions of one moment are one."""
    by_moment: dict[tuple[float, str, str], list[Override]] = {}
    for overrides in overrides_by_item.values():
        decision = overrides.get(criterion_id)
        if decision and not decision.reason.startswith(ROUND_REASON):
            by_moment.setdefault((decision.time, decision.reviewer, decision.reason), []).append(decision)
    return [by_moment[moment] for moment in sorted(by_moment, reverse=True)]


def used_reasons(overrides_by_item: Mapping[str, Overrides], criterion_id: str) -> list[str]:
    """Reasons given on this criterion, the most used first; then the one that always fits."""
    reasons = (decisions[0].reason for decisions in decided_together(overrides_by_item, criterion_id))
    return [*dict.fromkeys([*(reason for reason, _ in Counter(reasons).most_common()), ALIKE_REASON])]


def word_changes(first: str, other: str) -> list[tuple[Change, str]]:
    """`other` in pieces beside `first`: what both have, what only it has, and what only the first has."""
    tokens = [_TOKEN.findall(text) for text in (first, other)]
    pieces: list[tuple[Change, str]] = []
    for kind, start, end, other_start, other_end in SequenceMatcher(None, *tokens, autojunk=False).get_opcodes():
        if kind == "equal":
            pieces.append(("same", "".join(tokens[1][other_start:other_end])))
            continue
        pieces += [("missing", "".join(tokens[0][start:end]))] * (start < end)
        pieces += [("added", "".join(tokens[1][other_start:other_end]))] * (other_start < other_end)
    return pieces
