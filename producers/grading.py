"""From answers to a grade: what the points add up to, whether the evidence is there, what a person should look at.

A grade is never invented. An answer that can't be read leaves its criteria without points and says why; the total is
computed here, from all criteria or not at all.

    graded      every criterion has points
    incomplete  some criteria have no points, and so there is no total
    failed      no criterion has points: the submission can't be read, or no answer can be used
    empty       nothing was handed in: 0 points, with the reason
"""

from __future__ import annotations

import json
import re
import unicodedata
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Literal, get_args

from producers.answers import (
    EVIDENCE_CHARS,
    FEEDBACK_CHARS,
    SUMMARY_CHARS,
    AnswerError,
    CriterionAnswer,
    ParsedAnswer,
    answer_schema,
    max_answer_tokens,
    parse_answer,
)
from producers.prompts import cut_summary, has_control_tokens, neutralise, plural
from producers.rubric import Criterion, Points, Role, Rubric, add_points
from producers.submissions import Submission
from producers.truncation import Cut

# The one door to grading: who asks a model for a grade needs these and nothing else of `producers.answers`.
__all__ = [
    "EVIDENCE_CHARS",
    "FEEDBACK_CHARS",
    "SUMMARY_CHARS",
    "AnswerError",
    "CriterionAnswer",
    "CriterionGrade",
    "Evidence",
    "Grade",
    "GradeState",
    "ParsedAnswer",
    "answer_schema",
    "check_evidence",
    "from_json",
    "grade_submission",
    "instruction_flags",
    "max_answer_tokens",
    "parse_answer",
    "to_json",
]

GradeState = Literal["graded", "incomplete", "failed", "empty"]
Evidence = Literal["found", "not found", "none given"]

# A shorter quote is in nearly every submission: it counts only where it stands letter for letter.
SHORT_QUOTE_CHARS = 8
MAX_INSTRUCTION_FLAGS = 3


@dataclass(frozen=True, slots=True)
class CriterionGrade:
    """One criterion of one submission. `points` is None exactly when `reason` says why there are none."""

    id: str
    title: str
    max_points: Points
    points: Points | None
    evidence: str = ""
    evidence_state: Evidence = "none given"
    feedback: str = ""
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Grade:
    """What came of one submission. `points` is None unless the state is graded or empty."""

    submission: str
    state: GradeState
    points: Points | None
    max_points: Points
    criteria: tuple[CriterionGrade, ...]
    summary: str = ""
    flags: tuple[str, ...] = ()  # what a person should look at, a sentence each
    cuts: tuple[Cut, ...] = ()
    reason: str = ""  # why there is no total, or why it is 0 without a look

    @property
    def missing(self) -> tuple[CriterionGrade, ...]:
        """The criteria without points."""
        return tuple(criterion for criterion in self.criteria if criterion.points is None)


# --- evidence, and what a person should look at ---


def check_evidence(quote: str, submission: Submission) -> bool:
    """Whether the quote stands in the submission; white space and case don't count. An empty quote does not."""
    return _evidence_state(quote, _shown_texts(submission)) == "found"


@dataclass(frozen=True, slots=True)
class _Shown:
    """A submission's texts as the models saw them, and all of them squeezed into one."""

    texts: tuple[str, ...]
    squeezed: str


def _shown_texts(submission: Submission) -> _Shown:
    texts = tuple(neutralise(part.text) for part in submission.parts)
    return _Shown(texts, _squeeze("\n".join(texts)))


def _evidence_state(quote: str, shown: _Shown) -> Evidence:
    quote = neutralise(quote).strip().strip("\"'`“”‘’").strip()  # models put quotes around their quotes
    needle = _squeeze(quote)
    if not needle:
        return "none given"
    if len(needle) < SHORT_QUOTE_CHARS:
        return "found" if any(quote in text for text in shown.texts) else "not found"
    return "found" if needle in shown.squeezed else "not found"


def _squeeze(text: str) -> str:
    return "".join(unicodedata.normalize("NFKC", text).casefold().split())


# A short list: it asks a person to look, it decides nothing.
_INSTRUCTION_LIKE = re.compile(
    r"\b(?:ignore|disregard|forget|override)\b[^.\n]{0,40}\b(?:instruction|rubric|prompt|guideline|criteria)s?\b"
    r"|\b(?:you are|act as|pretend to be)\b[^.\n]{0,20}\b(?:grader|grading|ai|assistant|language model|chatbot)\b"
    r"|\b(?:give|award|assign|grant)\b[^.\n]{0,30}\b(?:full|maximum|max|all|highest|perfect)\b[^.\n]{0,20}"
    r"\b(?:points?|marks?|grades?|scores?|credits?)\b"
    r"|\b(?:note|message|instructions?)\s+(?:to|for)\s+(?:the\s+)?(?:ai|grader|model|llm|assistant)\b"
    r"|\bsystem prompt\b|\bas an? (?:ai|language) (?:model|assistant)\b",
    re.IGNORECASE,
)


def instruction_flags(submission: Submission) -> list[str]:
    """A sentence for each part, at most three, with a passage that reads as if it were addressed to the grader."""
    flags = []
    for part in submission.parts:
        match = _INSTRUCTION_LIKE.search(part.text)
        if match:
            flags.append(f"reads like an instruction to the grader ({part.where or part.kind}): “{match.group():.80}”")
        elif has_control_tokens(part.text):
            flags.append(f"holds a chat control token ({part.where or part.kind})")
    return flags[:MAX_INSTRUCTION_FLAGS]


def _submission_flags(submission: Submission, cuts: Sequence[Cut]) -> list[str]:
    flags = [f"truncated: {line} not shown to the models" for line in cut_summary(cuts)]
    if submission.images_left_out:
        flags.append(f"{plural(submission.images_left_out, 'image')} not shown to the models")
    return [*flags, *submission.notes, *instruction_flags(submission)]


def _evidence_flags(criteria: Iterable[CriterionGrade]) -> list[str]:
    return [
        f"{criterion.id}: evidence {criterion.evidence_state}"
        for criterion in criteria
        if criterion.points is not None
        and (criterion.evidence_state == "not found" or (criterion.evidence_state == "none given" and criterion.points))
    ]


# --- the grade ---


def grade_submission(
    name: str,
    rubric: Rubric,
    answers: Mapping[Role, ParsedAnswer | str],
    submission: Submission,
    cuts: Sequence[Cut] = (),
    flags: Sequence[str] = (),
) -> Grade:
    """The grade of one submission.

    Args:
        name: how results call the submission; a pseudonym where the class uses them.
        answers: for each role its answer, or one sentence that says why there is none.
        submission: as it was handed in, before cuts; evidence is looked for in all of it.
        flags: sentences of the caller's own, put first.
    """
    if submission.problem:
        return _without_answers(name, rubric, "failed", submission.problem, flags)
    if submission.empty:
        reason = "; ".join(["nothing to grade was handed in", *submission.notes])
        return _without_answers(name, rubric, "empty", reason, flags)
    shown = _shown_texts(submission)
    criteria = tuple(_criterion_grade(criterion, answers, shown) for criterion in rubric.criteria)
    summary, summary_flags = _summary(answers)
    found = [*flags, *_submission_flags(submission, cuts), *_evidence_flags(criteria), *summary_flags]
    state = _state(criteria)
    return Grade(
        submission=name,
        state=state,
        points=add_points(item.points for item in criteria if item.points is not None) if state == "graded" else None,
        max_points=rubric.total,
        criteria=criteria,
        summary=summary,
        flags=tuple(dict.fromkeys(found)),
        cuts=tuple(cuts),
        reason=_why_missing(criteria),
    )


def _without_answers(name: str, rubric: Rubric, state: GradeState, reason: str, flags: Sequence[str]) -> Grade:
    points, why = (0, "") if state == "empty" else (None, reason)
    criteria = tuple(
        CriterionGrade(criterion.id, criterion.title, criterion.points, points, reason=why)
        for criterion in rubric.criteria
    )
    return Grade(name, state, points, rubric.total, criteria, flags=tuple(flags), reason=reason)


def _criterion_grade(criterion: Criterion, answers: Mapping[Role, ParsedAnswer | str], shown: _Shown) -> CriterionGrade:
    answer = answers.get(criterion.model, "no answer has come")
    said = answer.criteria.get(criterion.id) if isinstance(answer, ParsedAnswer) else None
    if said is None:
        reason = answer if isinstance(answer, str) else "the answer lacks it"
        return CriterionGrade(criterion.id, criterion.title, criterion.points, None, reason=reason)
    return CriterionGrade(
        id=criterion.id,
        title=criterion.title,
        max_points=criterion.points,
        points=said.points,
        evidence=said.evidence,
        evidence_state=_evidence_state(said.evidence, shown),
        feedback=said.feedback,
    )


def _summary(answers: Mapping[Role, ParsedAnswer | str]) -> tuple[str, list[str]]:
    answer = answers.get("feedback")
    if isinstance(answer, ParsedAnswer):
        return answer.summary, []
    return "", [f"no summary: {answer}"] if answer else []


def _state(criteria: Sequence[CriterionGrade]) -> GradeState:
    missing = sum(criterion.points is None for criterion in criteria)
    if not missing:
        return "graded"
    return "failed" if missing == len(criteria) else "incomplete"


def _why_missing(criteria: Iterable[CriterionGrade]) -> str:
    by_reason: dict[str, list[str]] = {}
    for criterion in criteria:
        if criterion.points is None:
            by_reason.setdefault(criterion.reason, []).append(criterion.id)
    return "; ".join(f"no points for {', '.join(ids)}: {reason}" for reason, ids in by_reason.items())


# --- kept on disk ---


def to_json(grade: Grade) -> str:
    """The grade as one line of JSON."""
    return json.dumps(asdict(grade), ensure_ascii=True)


def from_json(text: str) -> Grade:
    """The grade that `to_json` wrote. Raises AnswerError if it is not one."""
    try:
        fields = json.loads(text)
        fields["criteria"] = tuple(CriterionGrade(**criterion) for criterion in fields["criteria"])
        fields["cuts"] = tuple(Cut(**cut) for cut in fields["cuts"])
        fields["flags"] = tuple(fields["flags"])
        grade = Grade(**fields)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise AnswerError(f"not a stored grade: {error!r:.200}") from None
    if grade.state not in get_args(GradeState):
        raise AnswerError(f"not a stored grade: its state is {grade.state!r:.40}")
    return grade
