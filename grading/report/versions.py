"""The grades that a class had before it was graded with another rubric, and the record of those changes."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from grading.points import Grade
from grading.report.grades import FILE, GradedClass, load_graded, save_graded
from producers.storage.journal import Lines
from producers.storage.private import make_folder
from producers.storage.shapes import parse_as

CHANGES = "changes.jsonl"
EarlierGrades = Sequence[tuple[float, Mapping[str, Grade]]]  # when they were replaced, and the grades by id


@dataclass(frozen=True, slots=True)
class Change:
    """A line of changes.jsonl. `criteria` has the new texts of the criteria that were asked about again."""

    at: float  # seconds since the epoch
    who: str
    round: str
    criteria: Mapping[str, str]


def changes(folder: Path) -> list[Change]:
    """Return the adopted rounds, oldest first. Raises BatchError for a line of another form."""
    lines = Lines(folder / CHANGES).read_all(lambda row: parse_as(Change, row, "the change"), "change")
    return [change for _, change in lines]


def keep_grades(folder: Path, graded_class: GradedClass) -> None:
    """Keep these grades as a version, which `load_graded` can read."""
    place = folder / "versions" / f"{len(versions(folder)) + 1}-{graded_class.versions['rubric'][:8]}"
    make_folder(place)
    save_graded(place, graded_class)


def versions(folder: Path) -> list[Path]:
    """Return the folders of the kept grades, oldest first."""
    return sorted((folder / "versions").glob("*/"), key=lambda path: number_of(path.name.partition("-")[0]))


def number_of(name: str) -> int:
    """Return the number that a folder's name is, or 0 if it is none."""
    return int(name) if name.isascii() and name.isdigit() and len(name) < 10 else 0


def earlier_grades(folder: Path) -> EarlierGrades:
    """Return the grades that each adopted round replaced, oldest first. Raises BatchError if they can't be read.

    The times are those of changes.jsonl, because copying a folder changes the times of its files. Each change is
    recorded after the version is kept, so the last ones belong together.
    """
    pairs = [*zip(reversed(versions(folder)), reversed(changes(folder)), strict=False)]
    return [(change.at, _grades_in(place, (place / FILE).stat().st_mtime_ns)) for place, change in pairs[::-1]]


@lru_cache(maxsize=4)
def _grades_in(place: Path, _mtime_ns: int) -> Mapping[str, Grade]:
    """Return a version's grades by id. The desk asks for them after each decision."""
    return {grade.id: grade for grade in load_graded(place).grades}
