"""The differences that a regrade made."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from grading.points import Grade
from grading.report.grades import show_points
from grading.rubric.rubric import Points, exact


@dataclass(frozen=True, slots=True)
class Difference:
    """One submission before and after a regrade."""

    submission: str
    before: Points | None
    after: Points | None
    criteria: tuple[tuple[str, Points | None, Points | None], ...]  # changed criteria: (id, old points, new points)

    @property
    def is_none(self) -> bool:
        """Whether there is no difference."""
        return not self.criteria and self.before == self.after

    @property
    def change(self) -> float | None:
        """The points gained, or None if one of the two grades has no total."""
        return None if self.before is None or self.after is None else float(exact(self.after) - exact(self.before))


def difference_row(difference: Difference, people: Mapping[str, str] = MappingProxyType({})) -> dict[str, str]:
    """Return a table row by column. `people` are the names to show, by submission."""
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
    """Return the changes that a regrade made, in its order. `before` is by submission.

    A criterion that is in only one of the two rubrics is compared with None.
    """
    return [_difference(before.get(grade.submission), grade) for grade in after]


def _difference(before: Grade | None, after: Grade) -> Difference:
    old = {item.id: item.points for item in before.criteria} if before else {}
    new = {item.id: item.points for item in after.criteria}
    ids = [*old, *(id for id in new if id not in old)]
    criterion_changes = tuple((id, old.get(id), new.get(id)) for id in ids if old.get(id) != new.get(id))
    return Difference(after.submission, before.points if before else None, after.points, criterion_changes)
