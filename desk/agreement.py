"""How often a person left the model's points as they were, and what a regrade changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean

from desk.decisions import Decided
from grading.points import Grade
from grading.report.grades import show_points
from grading.rubric.rubric import Criterion, Points, exact


@dataclass(frozen=True, slots=True)
class Agreement:
    """One criterion over all reviewed submissions that the model gave points to."""

    title: str
    reviewed: int
    same: int
    near: int  # the same, or at most one step apart
    mean_difference: float  # person minus model, points
    largest: float  # difference, without its sign

    @property
    def share(self) -> float:
        """Of the reviewed ones, those where both gave the same; 0 to 1."""
        return self.same / self.reviewed if self.reviewed else 0.0


def agreement(
    criteria: Iterable[Criterion], grades: Iterable[Grade], decisions: Mapping[str, Decided]
) -> list[Agreement]:
    """A row for each criterion, in the rubric's order, also where nothing was reviewed yet.

    A submission that was looked at and left as it is agrees in every criterion.
    """
    reviewed = [(grade, decisions[grade.item_id]) for grade in grades if grade.item_id in decisions]
    return [_criterion(criterion, reviewed) for criterion in criteria]


def _criterion(criterion: Criterion, reviewed: list[tuple[Grade, Decided]]) -> Agreement:
    apart = [
        exact(human) - exact(ai)
        for grade, decided in reviewed
        for ai, human in [_pair(criterion.id, grade, decided)]
        if ai is not None and human is not None
    ]
    return Agreement(
        criterion.title,
        reviewed=len(apart),
        same=sum(not difference for difference in apart),
        near=sum(abs(difference) <= exact(criterion.step) for difference in apart),
        mean_difference=fmean(map(float, apart)) if apart else 0.0,
        largest=float(max(map(abs, apart), default=0)),
    )


def _pair(criterion: str, grade: Grade, decided: Decided) -> tuple[Points | None, Points | None]:
    """What the model and the person gave; the person's is the model's where nothing else was decided."""
    ai = next((item.points for item in grade.criteria if item.id == criterion), None)
    own = decided.get(criterion)
    return ai, own.points if own and own.points is not None else ai


@dataclass(frozen=True, slots=True)
class Difference:
    """One submission before and after a regrade."""

    submission: str
    before: Points | None
    after: Points | None
    criteria: tuple[tuple[str, Points | None, Points | None], ...]  # those that changed: id, before, after

    @property
    def is_none(self) -> bool:
        """Whether nothing is different."""
        return not self.criteria and self.before == self.after

    @property
    def change(self) -> float | None:
        """Points gained, or None where one of the two has no total."""
        return None if self.before is None or self.after is None else float(exact(self.after) - exact(self.before))


def difference_row(difference: Difference) -> dict[str, str]:
    """A row of a table, by column."""
    change = difference.change
    changed = [f"{id}: {show_points(old) or '–'} → {show_points(new) or '–'}" for id, old, new in difference.criteria]
    return {
        "submission": difference.submission,
        "before": show_points(difference.before) or "–",
        "after": show_points(difference.after) or "–",
        "change": "" if change is None else f"{change:+g}",
        "criteria": ", ".join(changed),
    }


def differences(before: Mapping[str, Grade], after: Iterable[Grade]) -> list[Difference]:
    """What a regrade changed, in its order; `before` is by submission. A criterion that only one of the two rubrics
    has is compared with None.
    """
    return [_difference(before.get(grade.submission), grade) for grade in after]


def _difference(before: Grade | None, after: Grade) -> Difference:
    old = {item.id: item.points for item in before.criteria} if before else {}
    new = {item.id: item.points for item in after.criteria}
    ids = [*old, *(id for id in new if id not in old)]
    changed = tuple((id, old.get(id), new.get(id)) for id in ids if old.get(id) != new.get(id))
    return Difference(after.submission, before.points if before else None, after.points, changed)
