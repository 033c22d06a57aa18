"""From answers to a grade: what the points add up to, whether the evidence is there, what a person should look at.

A grade is never invented. An answer that can't be read leaves its criteria without points and says why; the total is
computed here, from all criteria or not at all.

    graded      every criterion has points
    incomplete  some criteria have no points, and so there is no total
    failed      no criterion has points: the submission can't be read, or no answer can be used
    empty       nothing was handed in: 0 points, with the reason
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

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
from producers.attacks import instruction_flags
from producers.checks import Finding
from producers.prompts import cut_summary, plural
from producers.quotes import Evidence, Private, Shown, check_evidence, evidence_state, leaks, shown_texts
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
    "Doubt",
    "Evidence",
    "Grade",
    "GradeState",
    "ParsedAnswer",
    "answer_schema",
    "check_evidence",
    "grade_submission",
    "instruction_flags",
    "max_answer_tokens",
    "parse_answer",
]

GradeState = Literal["graded", "incomplete", "failed", "empty"]

# Answers to the same prompt that are this part of a criterion's points apart disagree.
DISAGREEMENT = 0.25


@dataclass(frozen=True, slots=True)
class Doubt:
    """Why a person must look before this grade is given out. `criterion_id` is "" for the submission as a whole."""

    criterion_id: str
    why: str


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
    sampled: tuple[Points, ...] = ()  # what each of several answers awarded, the one that counts first
    leaks: bool = False  # the feedback repeats the grading notes, the solution or the prompt: no student may see it


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
    item_id: str = ""  # pseudonym: what reviews and queues call the submission
    doubts: tuple[Doubt, ...] = ()  # each of them is among the flags too

    @property
    def needs_review(self) -> bool:
        """Whether it is exported blank until a person has looked."""
        return bool(self.doubts)

    @property
    def missing(self) -> tuple[CriterionGrade, ...]:
        """The criteria without points."""
        return tuple(criterion for criterion in self.criteria if criterion.points is None)


# --- what a person should look at ---


def _submission_flags(submission: Submission, cuts: Sequence[Cut]) -> list[str]:
    flags = [f"truncated: {line} not shown to the models" for line in cut_summary(cuts)]
    if submission.images_left_out:
        flags.append(f"{plural(submission.images_left_out, 'image')} not shown to the models")
    return [*flags, *submission.notes]


def _doubts(
    submission: Submission, criteria: Iterable[CriterionGrade], findings: Sequence[Finding], summary_leaks: bool
) -> list[Doubt]:
    """Why a person must look, in the order in which they are shown."""
    doubts = [Doubt("", flag) for flag in instruction_flags(submission)]
    for criterion in criteria:
        doubts += [Doubt(criterion.id, f"{criterion.id}: {why}") for why in _criterion_doubts(criterion, findings)]
    if summary_leaks:
        doubts.append(Doubt("", "summary withheld: it repeats what only graders see"))
    return doubts


def _criterion_doubts(criterion: CriterionGrade, findings: Sequence[Finding]) -> Iterable[str]:
    if criterion.points is None:
        return
    state = criterion.evidence_state
    if state == "not found" or (state == "none given" and criterion.points):
        yield f"evidence {state}"
    if criterion.leaks:
        yield "the feedback repeats what only graders see"
    if _disagree(criterion):
        yield f"{len(criterion.sampled)} answers disagree: {', '.join(map(str, criterion.sampled))} points"
    failed = [finding.text for finding in findings if finding.criterion == criterion.id and not finding.passed]
    if failed and criterion.points == criterion.max_points:
        yield f"full points, but a check failed ({failed[0]})"


def _disagree(criterion: CriterionGrade) -> bool:
    spread = max(criterion.sampled, default=0) - min(criterion.sampled, default=0)
    return spread > 0 and spread >= DISAGREEMENT * criterion.max_points


# --- the grade ---


def grade_submission(
    name: str,
    rubric: Rubric,
    answers: Mapping[Role, ParsedAnswer | str],
    submission: Submission,
    cuts: Sequence[Cut] = (),
    flags: Sequence[str] = (),
    findings: Sequence[Finding] = (),
    hidden: Private = Private(),  # noqa: B008  frozen
) -> Grade:
    """The grade of one submission.

    Args:
        name: how results call the submission; a pseudonym where the class uses them.
        answers: for each role its answer, or one sentence that says why there is none.
        submission: as it was handed in, before cuts; evidence is looked for in all of it.
        flags: sentences of the caller's own, put first.
        findings: what deterministic checks found.
        hidden: what feedback must not repeat.
    """
    if submission.problem:
        return _without_answers(name, rubric, "failed", submission.problem, flags)
    if submission.empty:
        reason = "; ".join(["nothing to grade was handed in", *submission.notes])
        return _without_answers(name, rubric, "empty", reason, flags)
    shown = shown_texts(submission)
    criteria = tuple(_criterion_grade(criterion, answers, shown, hidden) for criterion in rubric.criteria)
    summary, summary_flags = _summary(answers)
    summary_leaks = leaks(summary, hidden, shown)
    doubts = _doubts(submission, criteria, findings, summary_leaks)
    failed = [f"check: {finding.text}" for finding in findings if not finding.passed]
    found = [*flags, *_submission_flags(submission, cuts), *(doubt.why for doubt in doubts), *failed, *summary_flags]
    state = _state(criteria)
    return Grade(
        submission=name,
        state=state,
        points=add_points(item.points for item in criteria if item.points is not None) if state == "graded" else None,
        max_points=rubric.total,
        criteria=criteria,
        summary="" if summary_leaks else summary,
        flags=tuple(dict.fromkeys(found)),
        cuts=tuple(cuts),
        reason=_why_missing(criteria),
        doubts=tuple(doubts),
    )


def _without_answers(name: str, rubric: Rubric, state: GradeState, reason: str, flags: Sequence[str]) -> Grade:
    points, why = (0, "") if state == "empty" else (None, reason)
    criteria = tuple(
        CriterionGrade(criterion.id, criterion.title, criterion.points, points, reason=why)
        for criterion in rubric.criteria
    )
    return Grade(name, state, points, rubric.total, criteria, flags=tuple(flags), reason=reason)


def _criterion_grade(
    criterion: Criterion, answers: Mapping[Role, ParsedAnswer | str], shown: Shown, hidden: Private
) -> CriterionGrade:
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
        evidence_state=evidence_state(said.evidence, shown),
        feedback=said.feedback,
        sampled=said.sampled,
        leaks=leaks(said.feedback, hidden, shown),
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
