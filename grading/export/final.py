"""The grade that leaves the house: what the models said, what a person decided, or a blank with the reason."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from grading.export.late import UNKNOWN, Late, Penalty, late_of
from grading.points import CriterionGrade, Grade
from grading.report.graded import GradedClass, load_graded
from grading.report.grades import one_line
from grading.reviews import Override, current, read_overrides
from grading.rubric.rubric import Points, add_points, exact, plain

UNREVIEWED = "needs review"
_SHOWN_CHANGES = 5


@dataclass(frozen=True, slots=True)
class LeftBlank:
    """A submission without a grade in an export, and all reasons why; one line each."""

    submission: str
    why: str


@dataclass(frozen=True, slots=True)
class Exported:
    """One file: save `data` as `name`. `left_blank` and `notes` belong under it.

    `asks` are sentences that a person must have read, and said yes to, before the file leaves the house.
    """

    name: str
    media_type: str
    data: bytes
    left_blank: tuple[LeftBlank, ...] = ()
    notes: tuple[str, ...] = ()
    asks: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class FinalGrade:
    """One submission's grade with its reviews. `points` is None exactly when `why_blank` says why."""

    grade: Grade  # as the models left it
    criteria: tuple[CriterionGrade, ...]  # with what a person changed
    summary: str
    points: Points | None  # less the penalty
    why_blank: str
    reviewed: bool
    open_doubts: tuple[str, ...] = ()  # why it needs review: what no decision has settled
    reviewers: tuple[str, ...] = ()  # who decided: for files that stay with the instructor, as the submission's name
    penalty: Penalty | None = None  # for lateness

    @property
    def earned(self) -> Points | None:
        """The points before anything is taken off for lateness."""
        if self.points is None or self.penalty is None:
            return self.points
        return plain(exact(self.points) + exact(self.penalty.points))

    @property
    def submission(self) -> str:
        """The submission's own name: for files that stay with the instructor."""
        return self.grade.submission


def final_grades(folder: Path, include_unreviewed: bool = False) -> tuple[GradedClass, list[FinalGrade]]:
    """The class in `folder` and its grades with the decisions of its reviews.jsonl applied, in order.

    Args:
        include_unreviewed: give out complete grades that nobody has looked at although somebody should.

    A decision about a criterion that the rubric no longer has changes nothing. Raises BatchError if the folder has no
    grades.
    """
    graded = load_graded(folder)
    decided = read_overrides(folder)
    late = late_of(folder, graded.late)
    named = [(grade, {grade.item_id, grade.submission} - {""}) for grade in graded.grades]
    return graded, [apply(grade, current(decided, *names), include_unreviewed, late) for grade, names in named]


def apply(
    grade: Grade, decided: Mapping[str | None, Override], include_unreviewed: bool = False, late: Late | None = None
) -> FinalGrade:
    """One grade with the decisions about it. A total that a person set is final: nothing is taken off."""
    whole = decided.get(None)
    criteria = tuple(_decided(criterion, decided.get(criterion.id)) for criterion in grade.criteria)
    points = whole.points if whole and whole.points is not None else _sum(criteria)
    why = "" if points is not None else _why_none(grade, criteria)
    doubts = () if whole else _open_doubts(grade, decided)
    if points is not None and doubts and not include_unreviewed:
        why = f"{UNREVIEWED}: {'; '.join(doubts)}"
    own_total = whole is not None and whole.points is not None
    penalty = None
    if late and points is not None and not own_total:
        penalty = late.penalty(grade.submission, points, grade.max_points)
        why = why or (UNKNOWN if points and late.unknown(grade.submission) else "")
    return FinalGrade(
        grade,
        criteria,
        whole.feedback if whole and whole.feedback is not None else grade.summary,
        None if why or points is None else plain(exact(points) - exact(penalty.points if penalty else 0)),
        why,
        bool(decided),
        doubts,
        tuple(dict.fromkeys(override.reviewer for override in decided.values() if override.reviewer)),
        penalty,
    )


def _decided(criterion: CriterionGrade, override: Override | None) -> CriterionGrade:
    if override is None:
        return criterion
    changed = criterion
    if override.points is not None:
        changed = replace(changed, points=override.points, reason="")
    if override.feedback is not None:
        changed = replace(changed, feedback=override.feedback, leaks=False)
    return changed


def _sum(criteria: Iterable[CriterionGrade]) -> Points | None:
    """All criteria or no total."""
    points = [criterion.points for criterion in criteria]
    known = [value for value in points if value is not None]
    return add_points(known) if known and len(known) == len(points) else None


def _why_none(grade: Grade, criteria: Iterable[CriterionGrade]) -> str:
    missing = ", ".join(criterion.id for criterion in criteria if criterion.points is None)
    return f"{grade.state}: {grade.reason or f'no points for {missing}'}"


def _open_doubts(grade: Grade, decided: Mapping[str | None, Override]) -> tuple[str, ...]:
    """Doubts that no decision settles."""
    return tuple(doubt.why for doubt in grade.doubts if not doubt.criterion_id or doubt.criterion_id not in decided)


def by_user(grades: Iterable[FinalGrade], id_of: Callable[[str], str]) -> dict[str, FinalGrade]:
    """The grades by the id that an LMS has of their submissions' names; those without one are left out."""
    return {user: final for final in grades if (user := id_of(final.submission))}


def changes(place: str, found: Sequence[tuple[str, str, str]]) -> tuple[str, ...]:
    """What to ask before grades that stand in `place` are replaced: (student, old, new); () if none is."""
    shown = [one_line(f"{student}: {old} → {new}") for student, old, new in found[:_SHOWN_CHANGES]]
    more = [f"… and {len(found) - len(shown)} more"] if len(found) > len(shown) else []
    return (f"{place} holds grades already, and {len(found)} of them would change:", *shown, *more) if found else ()


def left_blank(
    grades: Iterable[FinalGrade], why_out: Callable[[FinalGrade], str] = lambda _final: ""
) -> tuple[LeftBlank, ...]:
    """Those without points, and those that `why_out` says are not in the file: each once, on one line."""
    found = ((final, "; ".join(filter(None, (final.why_blank, why_out(final))))) for final in grades)
    return tuple(LeftBlank(one_line(final.submission), one_line(why)) for final, why in found if why)
