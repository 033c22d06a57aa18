"""Turns answers into a grade: adds up points, checks the evidence, and says what a person should look at.

A grade is never invented. An answer that can't be read leaves its criteria without points and says why. The total is
computed here, from all criteria or not at all.

    graded      every criterion has points
    incomplete  some criteria have no points, and so there is no total
    failed      no criterion has points: the submission can't be read, or no answer can be used
    empty       nothing was handed in: 0 points, with the reason
    link only   an address was handed in instead of work: no points, and a person has to look there
    waiting     some answer has not come yet
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from grading.attacks.detection import instruction_flags
from grading.prompts.answers import CriterionGrade as CriterionGrade
from grading.prompts.answers import ParsedAnswer, criterion_grade
from grading.prompts.prompt import ExampleSet, cut_summary, text_of
from grading.quotes import PrivateTexts, SubmissionTexts, evidence_state, leaks, squeeze, submission_texts
from grading.rubric.checks import CheckFinding
from grading.rubric.rubric import Aspect, Criterion, Points, Rubric, total_points
from grading.submissions.reading import Submission
from grading.submissions.truncation import Cut
from grading.submissions.visible import MAX_PASSAGES
from producers.words import plural

GradeState = Literal["graded", "incomplete", "failed", "empty", "link only", "waiting"]
# `Grade.reason` while an answer of a model is missing.
NO_RESULT_YET = "no result yet"
# `Grade.reason` if the work was not sent earlier, because its student was unknown.
NOT_SENT_YET = "not sent yet: it is known now whose it is, so run kvasir grade again"
# Remarks on a grade that a later run has kept.
KEPT_REMARK = "as it was graded before: the work, a model or a setting has changed since"
NAMED_REMARK = "as it was graded before it was known whose it is: a name in a text is left out now"
EXAMPLE_REMARK = "graded by hand: the others were graded with it as an example"
EARLIER_REMARK = "as it was graded before, with another rubric, solution or template"

# Several answers to one prompt disagree if their points differ by at least this share of the criterion's points.
DISAGREEMENT = 0.25


@dataclass(frozen=True, slots=True)
class Doubt:
    """A reason why a person must look before a grade is given out.

    `criterion_id` is "" for the submission as a whole.
    """

    criterion_id: str
    why: str


@dataclass(frozen=True, slots=True)
class Grade:
    """The grade of one submission. `points` is None unless the state is graded or empty."""

    submission: str
    state: GradeState
    points: Points | None
    max_points: Points
    criteria: tuple[CriterionGrade, ...]
    summary: str = ""
    remarks: tuple[str, ...] = ()  # information in whole sentences; nobody needs to decide on it
    cuts: tuple[Cut, ...] = ()
    # Why there is no total, or why an empty submission has 0 points.
    reason: str = ""
    # Pseudonym of the submission in reviews and in queues.
    item_id: str = ""
    # Reasons for review. They are not repeated in the remarks.
    doubts: tuple[Doubt, ...] = ()
    # The versions of the rubric, the solution and other inputs that were used for this grade. Empty if the versions are
    # unknown.
    versions: Mapping[str, str] = field(default_factory=dict)
    person: str = ""  # the person whose work it is, if known

    @property
    def display_name(self) -> str:
        """The name under which people see the submission, in the terminal, on the desk and in the report."""
        return self.person or self.submission

    @property
    def id(self) -> str:
        """The name of the submission in files about the class: its pseudonym, or its name if it has none."""
        return self.item_id or self.submission

    @property
    def needs_review(self) -> bool:
        """Whether exports leave it blank until a person has looked."""
        return bool(self.doubts)

    @property
    def review_reasons(self) -> tuple[str, ...]:
        """The reasons why a person must decide, one sentence each."""
        return tuple(doubt.why for doubt in self.doubts)

    @property
    def is_unreadable(self) -> bool:
        """Whether it failed before any model was asked."""
        return self.state == "failed" and all(criterion.reason == self.reason for criterion in self.criteria)

    @property
    def has_nothing_yet(self) -> bool:
        """Whether it is waiting and has no points yet for any criterion."""
        return self.state == "waiting" and all(criterion.points is None for criterion in self.criteria)


def criterion_points(criteria: Iterable[CriterionGrade], id: str) -> Points | None:
    """Return the points for one criterion, or None if it has none or does not exist."""
    return next((criterion.points for criterion in criteria if criterion.id == id), None)


# --- doubts for a person to decide on, and remarks ---


def _truncation_notes(cuts: Iterable[Cut], outputs: bool) -> list[str]:
    """Describe what was cut. Without an output, points are hardly lost; cut code or text may have cost points."""
    matching_cuts = [cut for cut in cuts if (cut.kind == "output") == outputs]
    return [f"truncated: {line} not shown to the models" for line in cut_summary(matching_cuts)]


def _submission_remarks(submission: Submission, cuts: Sequence[Cut]) -> list[str]:
    remarks = _truncation_notes(cuts, outputs=True)
    if submission.images_left_out:
        remarks.append(_images_left_out(submission))
    return [*remarks, *(note for note in submission.notes if note not in submission.doubtful_notes)]


def _images_left_out(submission: Submission) -> str:
    return f"{plural(submission.images_left_out, 'image')} not shown to the models"


def _doubts(
    submission: Submission,
    criteria: Iterable[CriterionGrade],
    findings: Sequence[CheckFinding],
    summary_leaks: bool,
    copy_reason: str,
    cuts: Sequence[Cut],
    public_text: str,
) -> list[Doubt]:
    """Return the reasons why a person must look, in the order in which they are shown."""
    whole = (
        *instruction_flags(submission),
        *_hidden_text(submission, public_text),
        copy_reason,
        *submission.doubtful_notes,
        *_truncation_notes(cuts, outputs=False),
    )
    doubts = [Doubt("", reason) for reason in whole if reason]
    for criterion in criteria:
        doubts += [
            Doubt(criterion.id, f"{criterion.id}: {reason}") for reason in _criterion_doubts(criterion, findings)
        ]
    if summary_leaks:
        doubts.append(Doubt("", "summary withheld: it repeats what only graders see"))
    return doubts


def _hidden_text(submission: Submission, public_text: str) -> list[str]:
    """Find text that only the source of the work shows, unless the class was given it.

    A cell's mark is not believed.
    """
    texts = [
        f"hidden text ({part.location or part.kind}): “{passage}”"
        for part in submission.parts
        if not part.holds_only_given_text
        for passage in part.visible.hidden_passages
        if squeeze(passage) not in public_text
    ]
    more = len(texts) - MAX_PASSAGES
    return [*texts[:MAX_PASSAGES], *([plural(more, "more hidden text")] if more > 0 else [])]


def _criterion_doubts(criterion: CriterionGrade, findings: Sequence[CheckFinding]) -> Iterable[str]:
    if criterion.points is None:
        return
    state = criterion.evidence_state
    if state == "not found" or (state == "none given" and criterion.points):
        yield f"evidence {state}"
    if state == "not their own" and criterion.points:
        yield "evidence only in what the students were given"
    if criterion.leaks:
        yield "the feedback repeats what only graders see"
    spread = max(criterion.sampled, default=0) - min(criterion.sampled, default=0)
    if spread > 0 and spread >= DISAGREEMENT * (criterion.max_points - criterion.min_points):
        yield f"{len(criterion.sampled)} answers disagree: {', '.join(map(str, criterion.sampled))} points"
    failed_checks = [
        finding.text for finding in findings if finding.criterion == criterion.id and not finding.has_passed
    ]
    if failed_checks and criterion.points == criterion.max_points:
        yield f"full points, but a check failed ({failed_checks[0]})"


# --- the grade ---


def grade_submission(
    name: str,
    rubric: Rubric,
    answers: Mapping[Aspect, ParsedAnswer | str],
    submission: Submission,
    cuts: Sequence[Cut] = (),
    findings: Sequence[CheckFinding] = (),
    private_texts: PrivateTexts = PrivateTexts(),  # noqa: B008  frozen
    copying_evidence: str = "",
) -> Grade:
    """Make the grade of one submission.

    Args:
        name: the submission's name in results; a pseudonym if the class uses them.
        answers: for each aspect its answer, or one sentence that says why there is none.
        submission: as it was handed in, before cuts. Evidence is searched for in all of it.
        findings: results of the deterministic checks.
        private_texts: text that feedback must not repeat.
        copying_evidence: why it looks like a copy of the solution.
    """
    if submission.problem:
        return _without_answers(name, rubric, "failed", submission.problem)
    if submission.link:
        only_a_link = f"only a link was handed in: {submission.link}"
        return replace(
            _without_answers(name, rubric, "link only", "; ".join([only_a_link, *submission.notes])),
            doubts=(Doubt("", only_a_link),),
        )
    if submission.empty:
        cause = "only the template was handed in" if submission.only_template else "nothing to grade was handed in"
        unseen_parts = [
            *_hidden_text(submission, private_texts.public_text),
            *submission.doubtful_notes,
            *([_images_left_out(submission)] if submission.images_left_out else []),
        ]
        return replace(
            _without_answers(name, rubric, "empty", "; ".join([cause, *submission.notes])),
            doubts=tuple(Doubt("", unseen_part) for unseen_part in unseen_parts),
        )
    work_texts = submission_texts(submission, private_texts.foreign_lines)
    criteria = tuple(_criterion_grade(criterion, answers, work_texts, private_texts) for criterion in rubric.criteria)
    summary, no_summary = _summary(answers)
    summary_leaks = leaks(summary, private_texts, work_texts)
    state = "waiting" if NO_RESULT_YET in answers.values() else _state(criteria)
    doubts = (
        (
            *_passages(answers, work_texts),
            *_doubts(submission, criteria, findings, summary_leaks, copying_evidence, cuts, private_texts.public_text),
        )
        if state != "waiting"
        else ()
    )
    check_remarks = [f"check: {finding.text}" for finding in findings if not finding.has_passed]
    remarks = [*_submission_remarks(submission, cuts), *check_remarks, *no_summary]
    return Grade(
        submission=name,
        state=state,
        points=total_of(criteria) if state == "graded" else None,
        max_points=rubric.total,
        criteria=criteria,
        summary="" if summary_leaks else summary,
        remarks=tuple(dict.fromkeys(remarks)),
        cuts=tuple(cuts),
        reason=NO_RESULT_YET if state == "waiting" else _why_missing(criteria),
        doubts=doubts,
    )


def grade_by_hand(submission: Submission, rubric: Rubric, examples: ExampleSet) -> Grade:
    """Return the grade that a person gave before any model saw the work.

    Work that has changed since then needs a look.
    """
    (shown_work,) = [work for work in examples.works if work.name == submission.name]
    criteria = tuple(
        criterion_grade(criterion, points, reason="" if points is not None else "not graded by hand")
        for criterion in rubric.criteria
        for points in [examples.points[submission.name].get(criterion.id)]
    )
    doubts = [Doubt("", "handed in again since it was graded by hand")] * (text_of(submission) != text_of(shown_work))
    return replace(
        _without_answers(submission.name, rubric, _state(criteria), _why_missing(criteria)),
        points=total_of(criteria),
        criteria=criteria,
        remarks=(EXAMPLE_REMARK,),
        doubts=tuple(doubts),
    )


def _without_answers(name: str, rubric: Rubric, state: GradeState, reason: str) -> Grade:
    points, criterion_reason = (0, "") if state == "empty" else (None, reason)
    criteria = tuple(criterion_grade(criterion, points, reason=criterion_reason) for criterion in rubric.criteria)
    return Grade(name, state, points, rubric.total, criteria, reason=reason)


def _criterion_grade(
    criterion: Criterion,
    answers: Mapping[Aspect, ParsedAnswer | str],
    work_texts: SubmissionTexts,
    private_texts: PrivateTexts,
) -> CriterionGrade:
    answer = answers.get(criterion.model, "no answer has come")
    if isinstance(answer, str) or criterion.id not in answer.criteria:
        return criterion_grade(criterion, None, reason=answer if isinstance(answer, str) else "the answer lacks it")
    grade = answer.criteria[criterion.id]
    return replace(
        grade,
        evidence_state=evidence_state(grade.evidence, work_texts),
        leaks=leaks(grade.feedback, private_texts, work_texts),
    )


def _summary(answers: Mapping[Aspect, ParsedAnswer | str]) -> tuple[str, list[str]]:
    answer = answers.get("feedback")
    if isinstance(answer, ParsedAnswer):
        return answer.summary, [f"no summary: {answer.no_summary}"] if answer.no_summary else []
    return "", [f"no summary: {answer}"] if answer and answer != NO_RESULT_YET else []


def _passages(answers: Mapping[Aspect, ParsedAnswer | str], work_texts: SubmissionTexts) -> list[Doubt]:
    """Return doubts about passages that a model says address the grader.

    They must be in the work: models invent quotes.
    """
    passages = dict.fromkeys(answer.passage for answer in answers.values() if isinstance(answer, ParsedAnswer))
    return [
        Doubt("", f"a passage seems to speak to whoever grades{_sure(likelihood)}: “{quote}”")
        for quote, likelihood in filter(None, passages)
        if evidence_state(quote, work_texts) == "found"
    ]


def _sure(likelihood: float | None) -> str:
    return "" if likelihood is None else f" (the model's own likelihood: {likelihood:.0%})"


def _state(criteria: Sequence[CriterionGrade]) -> GradeState:
    missing_count = sum(criterion.points is None for criterion in criteria)
    return "graded" if not missing_count else "failed" if missing_count == len(criteria) else "incomplete"


def total_of(criteria: Sequence[CriterionGrade]) -> Points | None:
    """Return the total of all criteria, or None if a criterion has no points."""
    points = [item.points for item in criteria if item.points is not None]
    return total_points(points) if points and len(points) == len(criteria) else None


def _why_missing(criteria: Iterable[CriterionGrade]) -> str:
    by_reason: dict[str, list[str]] = {}
    for criterion in criteria:
        if criterion.points is None:
            by_reason.setdefault(criterion.reason, []).append(criterion.id)
    return "; ".join(f"no points for {', '.join(ids)}: {reason}" for reason, ids in by_reason.items())
