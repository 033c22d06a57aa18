"""The final grade of an export: the models' points, a person's decision, or a blank with the reason."""

from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from grading.export.late import UNKNOWN_DELAY, Late, Penalty, late_of
from grading.points import CriterionGrade, Doubt, Grade, total_of
from grading.report.grades import FILE, GradedClass, load_graded, one_line, show_points
from grading.reviews import Override, current_decisions, read_overrides
from grading.roster import (
    SAY_WHOSE,
    UNASSIGNED_QUESTION,
    UNMATCHED_QUESTION,
    Owner,
    kept_files,
    read_rosters,
    roster_in,
)
from grading.rubric.rubric import Points, exact, plain, total_points
from grading.tables import Sheet, cell, differs
from producers.words import join_with_and, plural

EarlierGrades = Sequence[tuple[float, Mapping[str, Grade]]]  # (time when the grades were replaced, grades by id)
NEEDS_REVIEW = "needs review"
_SHOWN_CHANGES = 5


@dataclass(frozen=True, slots=True)
class LeftBlank:
    """A submission that has no grade in an export, with all reasons on one line."""

    submission: str
    reason: str


@dataclass(frozen=True, slots=True)
class ExportFile:
    """A file to give out: save `data` as `name`. Show `left_blank` and `notes` below it.

    A person must read the sentences in `asks` and agree before the file is given out. `held_ids` are the ids of the
    class's grades that the file holds, including blank ones; None means all.
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
    """One submission's grade after review. `points` is None exactly when `why_blank` gives a reason."""

    grade: Grade  # the models' grade; if an approval has lapsed, one of its doubts says so
    criteria: tuple[CriterionGrade, ...]  # with the changes that a person made
    summary: str
    points: Points | None  # after the penalty is subtracted
    why_blank: str
    is_reviewed: bool
    # Reasons for review that no decision has settled yet.
    open_doubts: tuple[str, ...] = ()
    # The names of the people who decided. They appear only in files that stay with the instructor.
    reviewers: tuple[str, ...] = ()
    penalty: Penalty | None = None  # for lateness
    lapsed: str = ""  # why an approval no longer counts

    @property
    def earned_points(self) -> Points | None:
        """The points before any deduction for lateness."""
        if self.points is None or self.penalty is None:
            return self.points
        return plain(exact(self.points) + exact(self.penalty.points))

    @property
    def submission(self) -> str:
        """The submission's real name. Use it only in files that stay with the instructor."""
        return self.grade.submission


def final_grades(folder: Path, include_unreviewed: bool = False) -> tuple[GradedClass, list[FinalGrade]]:
    """Read the class in `folder`, and its grades in order, with the decisions in reviews.jsonl applied.

    Args:
        include_unreviewed: include complete grades that still need a person's review.

    A decision about a criterion that is no longer in the rubric has no effect. Raises BatchError if the folder has no
    grades.
    """
    graded_class = load_graded(folder)
    overrides = read_overrides(folder)
    late, earlier = late_of(folder, graded_class.late), earlier_grades(folder, overrides)
    finals = [
        apply_decisions(
            grade, current_decisions(overrides, grade.item_id, grade.submission), include_unreviewed, late, earlier
        )
        for grade in graded_class.grades
    ]
    if (points := [final.points for final in finals if final.points is not None]) and not any(points):
        alarm = f"everybody would get 0 points, all {plural(len(points), 'submission')} that have a grade"
        graded_class = replace(graded_class, alarms=(*graded_class.alarms, alarm))
    return graded_class, finals


def earlier_grades(folder: Path, overrides: Iterable[Override]) -> EarlierGrades:
    """Return the grades that rounds have replaced, oldest first, if an approval does not say which points it saw."""
    if all(override.seen is not None or override.criterion_id or override.points is not None for override in overrides):
        return ()
    files = sorted((file.stat().st_mtime, file) for file in (folder / "versions").glob(f"*/{FILE}"))
    return [(at, {grade.id: grade for grade in load_graded(file.parent).grades}) for at, file in files]


def lapsing_approvals(folder: Path, before: Iterable[Grade], after: Iterable[Grade]) -> list[str]:
    """Say in lines which approvals in `folder` would not cover the grades `after`, if they replaced those `before`."""
    overrides = read_overrides(folder)
    earlier = [*earlier_grades(folder, overrides), (float("inf"), {grade.id: grade for grade in before})]
    lines = [
        one_line(f"{grade.display_name}: {final.lapsed}")
        for grade in after
        for decisions in [current_decisions(overrides, grade.item_id, grade.submission)]
        if (final := apply_decisions(grade, decisions, earlier=earlier)).lapsed
    ]
    return (
        [f"{plural(len(lines), 'approval')} would lapse, and these submissions would need review again:", *lines]
        if lines
        else []
    )


def apply_decisions(
    grade: Grade,
    decisions: Mapping[str | None, Override],
    include_unreviewed: bool = False,
    late: Late | None = None,
    earlier: EarlierGrades = (),
) -> FinalGrade:
    """Apply the decisions about one grade. A total that a person set is final: lateness takes nothing off it.

    An approval covers the points that its person saw. If the model's are others now, it has lapsed: the submission
    needs review again, and does not count as reviewed. `earlier` says what was seen where the approval does not.
    """
    whole = decisions.get(None)
    criteria = tuple(_apply_override(criterion, decisions.get(criterion.id)) for criterion in grade.criteria)
    points = whole.points if whole and whole.points is not None else total_of(criteria)
    blank_reason = "" if points is not None else _why_none(grade, criteria)
    lapsed = _why_lapsed(grade, criteria, decisions, whole, earlier) if whole and whole.points is None else ""
    grade = replace(grade, doubts=(*([Doubt("", lapsed)] if lapsed else []), *grade.doubts))
    # A decision about a criterion settles only the doubts about this criterion. A decision about the whole submission
    # settles all doubts.
    open_doubts = [doubt for doubt in grade.doubts if not doubt.criterion_id or doubt.criterion_id not in decisions]
    doubts = () if whole and not lapsed else tuple(doubt.why for doubt in open_doubts)
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
        bool(decisions) and not lapsed,
        doubts,
        tuple(dict.fromkeys(each.reviewer for each in decisions.values() if each.reviewer and not lapsed)),
        penalty,
        lapsed,
    )


def _why_lapsed(
    grade: Grade,
    criteria: Sequence[CriterionGrade],
    decisions: Mapping[str | None, Override],
    approval: Override,
    earlier: EarlierGrades,
) -> str:
    """Return why the approval of a grade does not count any more; "" if it counts."""
    # If the time of the approval is 0, it is unknown, and the earlier grades are not searched.
    old_grades = (grades[grade.id] for until, grades in earlier if 0 < approval.time < until and grade.id in grades)
    known = {item.id: item.points for item in next(old_grades, grade).criteria}
    seen, now = known if approval.seen is None else approval.seen, {item.id: item.points for item in criteria}
    steps = [
        f"{id}: {show_points(seen.get(id)) or '–'} → {show_points(now.get(id)) or '–'}"
        for id in {**now, **seen}
        if seen.get(id) != now.get(id) and (id not in decisions or decisions[id].points is None)
    ]
    total = None if None in seen.values() else total_points(points or 0 for points in seen.values())
    return (
        f"{approval.reviewer or 'somebody'} approved a total of {show_points(total) or '–'}; since then it has become "
        f"{show_points(total_of(criteria)) or '–'} ({', '.join(steps)})"
        if steps
        else ""
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
    """A file from the LMS with grades filled in. A team's grade is filled in for each member."""

    product: str  # the LMS that made the file
    owners: Mapping[str, Owner]  # by submission
    grades: Sequence[FinalGrade]
    rows: list[list[str]] = field(default_factory=list)
    # The ids that the LMS gave to the people in the file.
    listed_numbers: set[str] = field(default_factory=set)
    # Ids of the grades whose cells this export fills in, or leaves empty because the grade is blank.
    held_ids: set[str] = field(default_factory=set)
    kept_count: int = 0
    replacements: list[tuple[str, str, str]] = field(default_factory=list)  # student, old, new

    def left_blank(self, no_id: str, not_listed: str) -> tuple[LeftBlank, ...]:
        """Like the function `left_blank`. It also lists the grades of people who are missing from the file."""

        def why_out(final: FinalGrade) -> str:
            owner = self.owners[final.submission]
            missing_people = [
                person.name or person.number for person in owner.people if person.number not in self.listed_numbers
            ]
            if owner.question not in ("", UNASSIGNED_QUESTION, UNMATCHED_QUESTION) or (
                owner.people and not missing_people
            ):
                return owner.question
            if not owner.people:
                hint = "" if owner.claim or SAY_WHOSE in final.why_blank else f": {SAY_WHOSE}"
                return not_listed if owner.claim and owner.claim.product == self.product else f"{no_id}{hint}"
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
    """Fill each person's grade into the rows of a file from the LMS. Raises ExportError.

    The file and the batch's folder together say which person a grade belongs to.

    Args:
        sheet: the file; rows: its rows that may belong to a student.
        number_of: returns the number of the student of a row, or "".
        is_kept: whether the LMS, or a person there, has settled the row's grade, which is then kept.
        with_grade: returns the row with the points, and whatever belongs to them, filled in.
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
            # If there are no new points, the file's existing grade stays.
            elif final.points is not None or before in ("", "-"):
                row = with_grade(row, final) if final.points is not None else row
                after = cell(row, grade_column)
                filled.held_ids.add(final.grade.id)
                if differs(before, after):
                    filled.replacements.append((cell(row, name_column).strip() or number, before, after))
        filled.rows.append(row)
    return filled


def changes(place: str, replacements: Sequence[tuple[str, str, str]]) -> tuple[str, ...]:
    """Return what to ask before grades in `place` are replaced; () if none is. Replacements are (student, old, new)."""
    lines = [one_line(f"{student}: {old} → {new}") for student, old, new in replacements[:_SHOWN_CHANGES]]
    remainder = [f"… and {len(replacements) - len(lines)} more"] if len(replacements) > len(lines) else []
    return (
        (f"{place} holds grades already, and {len(replacements)} of them would change:", *lines, *remainder)
        if replacements
        else ()
    )


def with_people(rows: list[list[str]], grades: Iterable[FinalGrade | None]) -> list[list[str]]:
    """Add a last column `person` to a table with a header and a row for each of these grades, if anybody is known."""
    people = [one_line(final.grade.person) if final else "" for final in grades]
    return [[*row, name] for row, name in zip(rows, ["person", *people], strict=True)] if any(people) else rows


def left_blank(
    grades: Iterable[FinalGrade], why_left_out: Callable[[FinalGrade], str] = lambda _final: ""
) -> tuple[LeftBlank, ...]:
    """List the grades without points, and those that `why_left_out` says are not in the file, each on one line."""
    return tuple(
        LeftBlank(one_line(final.grade.display_name), one_line(reason))
        for final in grades
        if (reason := "; ".join(filter(None, (final.why_blank, why_left_out(final)))))
    )
