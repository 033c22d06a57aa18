"""The grade that leaves the house: what the models said, what a person decided, or a blank with the reason."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from grading.export.late import UNKNOWN_DELAY, Late, Penalty, late_of
from grading.points import CriterionGrade, Grade, total_of
from grading.report.grades import GradedClass, load_graded, one_line
from grading.reviews import Override, current_decisions, read_overrides
from grading.roster import UNASSIGNED_QUESTION, Owner, kept_files, read_rosters, roster_in
from grading.rubric.rubric import Points, exact, plain
from grading.tables import Sheet, cell, differs
from producers.words import join_with_and

NEEDS_REVIEW = "needs review"
_SHOWN_CHANGES = 5


@dataclass(frozen=True, slots=True)
class LeftBlank:
    """A submission without a grade in an export, and all reasons why; one line each."""

    submission: str
    reason: str


@dataclass(frozen=True, slots=True)
class ExportFile:
    """One file: save `data` as `name`. `left_blank` and `notes` belong under it.

    `asks` are sentences that a person must have read, and said yes to, before the file leaves the house.
    `held_ids` are the ids of the class's grades, blank ones too, that the file holds; None: of all of them.
    """

    name: str
    media_type: str
    data: bytes
    left_blank: tuple[LeftBlank, ...] = ()
    notes: tuple[str, ...] = ()
    asks: tuple[str, ...] = ()
    held_ids: Collection[str] | None = None


@dataclass(frozen=True, slots=True)
class FinalGrade:
    """One submission's grade with its reviews. `points` is None exactly when `why_blank` says why."""

    grade: Grade  # as the models left it
    criteria: tuple[CriterionGrade, ...]  # with what a person changed
    summary: str
    points: Points | None  # less the penalty
    why_blank: str
    is_reviewed: bool
    open_doubts: tuple[str, ...] = ()  # why it needs review: what no decision has settled
    reviewers: tuple[str, ...] = ()  # who decided; only for files that stay with the instructor
    penalty: Penalty | None = None  # for lateness

    @property
    def earned_points(self) -> Points | None:
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
    graded_class = load_graded(folder)
    overrides = read_overrides(folder)
    late = late_of(folder, graded_class.late)
    named_grades = [(grade, {grade.item_id, grade.submission} - {""}) for grade in graded_class.grades]
    return graded_class, [
        apply_decisions(grade, current_decisions(overrides, *names), include_unreviewed, late)
        for grade, names in named_grades
    ]


def apply_decisions(
    grade: Grade, decisions: Mapping[str | None, Override], include_unreviewed: bool = False, late: Late | None = None
) -> FinalGrade:
    """One grade with the decisions about it. A total that a person set is final: nothing is taken off."""
    whole = decisions.get(None)
    criteria = tuple(_apply_override(criterion, decisions.get(criterion.id)) for criterion in grade.criteria)
    points = whole.points if whole and whole.points is not None else total_of(criteria)
    blank_reason = "" if points is not None else _why_none(grade, criteria)
    # A decision about a criterion settles what was doubtful there, one about the whole everything.
    open_doubts = [doubt for doubt in grade.doubts if not doubt.criterion_id or doubt.criterion_id not in decisions]
    doubts = () if whole else tuple(doubt.why for doubt in open_doubts)
    if points is not None and doubts and not include_unreviewed:
        blank_reason = f"{NEEDS_REVIEW}: {'; '.join(doubts)}"
    own_total = whole is not None and whole.points is not None
    penalty = None
    if late and points is not None and not own_total:
        penalty = late.penalty(grade.submission, points, grade.max_points)
        blank_reason = blank_reason or (UNKNOWN_DELAY if points and late.has_unknown_delay(grade.submission) else "")
    return FinalGrade(
        grade,
        criteria,
        whole.feedback if whole and whole.feedback is not None else grade.summary,
        None if blank_reason or points is None else plain(exact(points) - exact(penalty.points if penalty else 0)),
        blank_reason,
        bool(decisions),
        doubts,
        tuple(dict.fromkeys(override.reviewer for override in decisions.values() if override.reviewer)),
        penalty,
    )


def _apply_override(criterion: CriterionGrade, override: Override | None) -> CriterionGrade:
    if override and override.points is not None:
        criterion = replace(criterion, points=override.points, reason="")
    if override and override.feedback is not None:
        criterion = replace(criterion, feedback=override.feedback, leaks=False)
    return criterion


def _why_none(grade: Grade, criteria: Iterable[CriterionGrade]) -> str:
    missing_ids = ", ".join(criterion.id for criterion in criteria if criterion.points is None)
    return f"{grade.state}: {grade.reason or f'no points for {missing_ids}'}"


@dataclass(slots=True)
class FilledIn:
    """A file of the LMS's with a class's grades in it, a team's for each of its members, and what came of its rows."""

    product: str  # whose the file is
    owners: Mapping[str, Owner]  # by submission
    grades: Sequence[FinalGrade]
    rows: list[list[str]] = field(default_factory=list)
    listed_numbers: set[str] = field(default_factory=set)  # people of the class who are listed in the file
    held_ids: set[str] = field(default_factory=set)  # grades, blank ones too, whose cell in the file is ours to write
    kept_count: int = 0
    replacements: list[tuple[str, str, str]] = field(default_factory=list)  # student, old, new

    def left_blank(self, no_id: str, not_listed: str) -> tuple[LeftBlank, ...]:
        """As `left_blank`, and the grades that aren't, or not for each of their people, in the file."""

        def why_out(final: FinalGrade) -> str:
            owner = self.owners[final.submission]
            missing_people = [
                person.name or person.number for person in owner.people if person.number not in self.listed_numbers
            ]
            if owner.question not in ("", UNASSIGNED_QUESTION) or (owner.people and not missing_people):
                return owner.question
            if not owner.people:
                return not_listed if owner.claim and owner.claim.product == self.product else no_id
            return f"{join_with_and(missing_people)}: {not_listed}" if owner.group else not_listed

        return left_blank(self.grades, why_out)


def fill_in(
    folder: Path,
    sheet: Sheet,
    grades: Sequence[FinalGrade],
    rows: Iterable[list[str]],
    number_of: Callable[[list[str]], str],
    grade_column: int,
    name_column: int,
    is_kept: Callable[[str, list[str]], bool],
    with_grade: Callable[[list[str], FinalGrade], list[str]],
) -> FilledIn:
    """The rows of a file from the LMS with each person's grade, where there is one. Raises ExportError.

    Whose the grades are is said by the file, and by what the batch's folder knows.

    Args:
        sheet: the file; rows: those of it that may be somebody's.
        number_of: whose a row is; "" of nobody.
        is_kept: whether the LMS, or a person there, has settled a row with this grade: it stays as it is.
        with_grade: a row with points, and what else goes with them.
    """
    roster = roster_in(sheet).with_more(read_rosters(kept_files(folder)))
    owners = roster.owners(final.submission for final in grades)
    owned_grades = ((person.number, final) for final in grades for person in owners[final.submission].people)
    by_number = {number: final for number, final in owned_grades if number}
    filled = FilledIn(roster.product, owners, grades)
    for row in rows:
        number, before = number_of(row), cell(row, grade_column).strip()
        if final := by_number.get(number):
            filled.listed_numbers.add(number)
            if is_kept(before, row):
                filled.kept_count += 1
            elif final.points is not None or before in ("", "-"):  # it stays if we have nothing in its place
                row = with_grade(row, final) if final.points is not None else row
                after = cell(row, grade_column)
                filled.held_ids.add(final.grade.id)
                if differs(before, after):
                    filled.replacements.append((cell(row, name_column).strip() or number, before, after))
        filled.rows.append(row)
    return filled


def changes(place: str, replacements: Sequence[tuple[str, str, str]]) -> tuple[str, ...]:
    """What to ask before grades that stand in `place` are replaced: (student, old, new); () if none is."""
    lines = [one_line(f"{student}: {old} → {new}") for student, old, new in replacements[:_SHOWN_CHANGES]]
    remainder = [f"… and {len(replacements) - len(lines)} more"] if len(replacements) > len(lines) else []
    return (
        (f"{place} holds grades already, and {len(replacements)} of them would change:", *lines, *remainder)
        if replacements
        else ()
    )


def left_blank(
    grades: Iterable[FinalGrade], why_left_out: Callable[[FinalGrade], str] = lambda _final: ""
) -> tuple[LeftBlank, ...]:
    """Those without points, and those that `why_left_out` says are not in the file: each once, on one line."""
    blank_reasons = ((final, "; ".join(filter(None, (final.why_blank, why_left_out(final))))) for final in grades)
    return tuple(
        LeftBlank(one_line(final.grade.display_name), one_line(reason)) for final, reason in blank_reasons if reason
    )
