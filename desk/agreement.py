"""How often a person left the model's points as they were, and what a regrade changed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from statistics import fmean
from types import MappingProxyType

from desk.decisions import Overrides
from grading.points import Grade, criterion_points
from grading.report.grades import show_points
from grading.rubric.rubric import Criterion, Points, exact


@dataclass(frozen=True, slots=True)
class Agreement:
    """One criterion over all reviewed submissions that the model gave points to."""

    title: str
    reviewed_count: int
    same_count: int
    near_count: int  # the same, or at most one step apart
    mean_difference: float  # person minus model, points
    largest: float  # difference, without its sign

    @property
    def share(self) -> float:
        """Of the reviewed ones, those where both gave the same; 0 to 1."""
        return self.same_count / self.reviewed_count if self.reviewed_count else 0.0


def agreement(
    criteria: Iterable[Criterion], grades: Iterable[Grade], decisions: Mapping[str, Overrides]
) -> list[Agreement]:
    """A row for each criterion, in the rubric's order, also where nothing was reviewed yet.

    A submission that was looked at and left as it is agrees in every criterion.
    """
    reviewed_pairs = [(grade, decisions[grade.item_id]) for grade in grades if grade.item_id in decisions]
    return [_criterion(criterion, reviewed_pairs) for criterion in criteria]


def _criterion(criterion: Criterion, reviewed_pairs: list[tuple[Grade, Overrides]]) -> Agreement:
    point_differences = []
    for grade, overrides in reviewed_pairs:
        ai, override = criterion_points(grade.criteria, criterion.id), overrides.get(criterion.id)
        human = override.points if override and override.points is not None else ai
        if ai is not None and human is not None:
            point_differences.append(exact(human) - exact(ai))
    return Agreement(
        criterion.title,
        reviewed_count=len(point_differences),
        same_count=sum(not difference for difference in point_differences),
        near_count=sum(abs(difference) <= exact(criterion.step) for difference in point_differences),
        mean_difference=fmean(map(float, point_differences)) if point_differences else 0.0,
        largest=float(max(map(abs, point_differences), default=0)),
    )


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


def difference_row(difference: Difference, people: Mapping[str, str] = MappingProxyType({})) -> dict[str, str]:
    """A row of a table, by column; `people` are the names to be shown, by submission."""
    change = difference.change
    criterion_changes = [
        f"{id}: {show_points(old) or '–'} → {show_points(new) or '–'}" for id, old, new in difference.criteria
    ]
    return {
        "submission": people.get(difference.submission, difference.submission),
        "before": show_points(difference.before) or "–",
        "after": show_points(difference.after) or "–",
        "change": "" if change is None else f"{change:+g}",
        "criteria": ", ".join(criterion_changes),
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
    criterion_changes = tuple((id, old.get(id), new.get(id)) for id in ids if old.get(id) != new.get(id))
    return Difference(after.submission, before.points if before else None, after.points, criterion_changes)
