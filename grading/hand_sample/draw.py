"""The record of a draw (`bound.json`), and the sheet of hand grades (`hand-grades.csv`).

The record says who was drawn to be graded by hand, when, by whom, and what is to be promised. It is written before
anybody grades and is not changed afterwards: otherwise somebody could see the hand grades and then choose the promise
or the sample that suits. The sheet begins empty. It is read as a whole, or points are entered one by one.
"""

import fcntl
import hashlib
import json
import os
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from decimal import Decimal, InvalidOperation
from pathlib import Path

from grading.error_bound import CONFIDENCE, SIGNALS, BoundError, bonferroni_confidence, check_plan, uniform_sample
from grading.points import EXAMPLE_REMARK, Grade
from grading.report.grades import GradedClass, load_graded, one_line
from grading.reviews import read_overrides
from grading.rubric.rubric import Points, exact, plain, total_points
from grading.tables import ExportError, Sheet, cell, read_sheet, with_cell, write_sheet
from infra.config.next_command import next_command
from messages.errors import BatchError
from producers.storage.private import open_ordinary, open_private, read_ordinary, write_atomically
from producers.storage.shapes import from_json, parse_as
from producers.words import plural, shorten_names

FILE = "bound.json"
SHEET = "hand-grades.csv"  # the sheet does not contain the model's points
_NAME, _REMARK = "submission", "remark"
_VERSION = 1


@dataclass(frozen=True, slots=True)
class SamplePlan:
    """The planned promise. With `thresholds` (), the signal's default thresholds are used."""

    # The sample sizes at which the bound is computed. Each further size makes the bound looser.
    sizes: tuple[int, ...] = (30,)
    tolerance: Points = 1  # allowed difference between the model's points and the person's
    at_most: float = 0.2  # the promise: at most this share of the unseen grades differs by more than `tolerance`
    confidence: float = CONFIDENCE
    signal: str = "reasons"
    thresholds: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class SampleMember:
    """One submission of the class, as it was when the sample was drawn."""

    item_id: str
    submission: str
    doubt: float
    digest: str  # digest of the model's points


@dataclass(frozen=True, slots=True)
class Stratum:
    """A part of the class with its own sample and bound. The name "" means the whole class."""

    name: str
    members: tuple[SampleMember, ...]
    # Item ids in the order of the draw. There are as many as the largest planned size needs.
    sample: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Draw:
    """The contents of bound.json. `looks` is how many of the planned sizes are in use so far."""

    by: str
    # Seconds since the epoch.
    at: float
    # Computed from the grades, so a second draw from the same grades gives the same sample.
    seed: str
    plan: SamplePlan
    strata: tuple[Stratum, ...]
    # Number of grades that were left out of the draw, because a person had decided on them before.
    reviewed_before: int = 0
    looks: int = 1
    version: int = field(default=_VERSION)

    @property
    def size(self) -> int:
        """How many submissions of each part are to be graded by hand now."""
        return self.plan.sizes[self.looks - 1]

    @property
    def confidence(self) -> float:
        """The confidence of each single bound, so that all bounds hold together with the plan's confidence."""
        return bonferroni_confidence(
            self.plan.confidence, len(self.plan.thresholds) * len(self.strata) * len(self.plan.sizes)
        )

    def sample(self, stratum: Stratum) -> tuple[str, ...]:
        """Return the item ids to be graded by hand now."""
        return stratum.sample[: self.size]

    def sampled_members(self) -> dict[str, SampleMember]:
        """Return all submissions to be graded by hand now, in the order drawn."""
        by_id = {member.item_id: member for stratum in self.strata for member in stratum.members}
        return {id: by_id[id] for stratum in self.strata for id in self.sample(stratum)}


def draw_sample(folder: Path, plan: SamplePlan, by: str, strata: Mapping[str, str] | None = None) -> Draw:
    """Draw a sample of the class in `folder`, and write the record and an empty sheet for the hand grades.

    Args:
        by: the person who draws.
        strata: the part of the class that each submission (by name) belongs to; None: one sample of the whole class.

    Raises BoundError if a sample of these grades is being graded already, or if there is nothing to draw from;
    BatchError.
    """
    graded_class = load_graded(folder)
    plan = _complete_plan(plan, graded_class)
    _refuse_second(folder, graded_class)
    members = undecided_members(folder, graded_class, plan.signal)
    if not members:
        raise BoundError(
            "there is no grade to draw: either the class is not graded yet (grade it first), or a person has "
            "already decided on every grade"
        )
    parts, seed = _parts(members, strata), _seed(graded_class.batch_id, members)
    record = Draw(
        one_line(by),
        time.time(),
        seed,
        plan,
        tuple(
            Stratum(
                name, tuple(part), uniform_sample([member.item_id for member in part], plan.sizes[-1], f"{seed} {name}")
            )
            for name, part in parts.items()
        ),
        reviewed_before=sum(map(counts, graded_class.grades)) - len(members),
    )
    _set_aside(folder)
    _save(folder, record)
    _extend_sheet(folder, record, Sheet([_header(limits(graded_class))]))
    return record


def undecided_members(folder: Path, graded_class: GradedClass, signal: str) -> list[SampleMember]:
    """Return the models' grades on which no person has decided. Grades that somebody has looked at are not unseen."""
    # A decision identifies its submission either by an item id or by a name.
    decided_names = {override.item_id for override in read_overrides(folder)}
    members = [member_of(grade, signal) for grade in graded_class.grades if counts(grade)]
    return [member for member in members if not {member.item_id, member.submission} & decided_names]


def _seed(batch_id: str, members: Iterable[SampleMember]) -> str:
    """Derive the seed from the grades, so that nobody can choose it.

    Other grades (another rubric, a regrade) give another seed.
    """
    grades = sorted((member.item_id, member.digest) for member in members)
    return hashlib.sha256(json.dumps([batch_id, grades]).encode()).hexdigest()[:16]


def _complete_plan(plan: SamplePlan, graded_class: GradedClass) -> SamplePlan:
    if plan.signal not in SIGNALS:
        raise BoundError(f"{plan.signal!r} is not a signal; the signals are {', '.join(SIGNALS)}")
    thresholds = plan.thresholds or SIGNALS[plan.signal].thresholds
    check_plan(thresholds, plan.sizes, plan.at_most, plan.confidence)
    if not 0 <= plan.tolerance < graded_class.total:
        raise BoundError(
            f"the assignment has {graded_class.total} points, so no grade can differ by more than {plan.tolerance}: "
            "choose a smaller tolerance"
        )
    if plan.signal == "spread" and not any(
        len(item.sampled) > 1 for grade in graded_class.grades for item in grade.criteria
    ):
        raise BoundError(
            "the signal 'spread' needs several answers to each prompt: grade with kvasir grade --samples 3"
        )
    return replace(plan, thresholds=tuple(thresholds))


def strata_from(data: bytes, label: str) -> dict[str, str]:
    """Read which part each submission belongs to, from a CSV with a header (submission, part). Raises ExportError."""
    return {
        one_line(cell(row, 0)): one_line(cell(row, 1))
        for row in read_sheet(data, label).rows[1:]
        if cell(row, 0).strip()
    }


def _parts(members: Iterable[SampleMember], strata: Mapping[str, str] | None) -> dict[str, list[SampleMember]]:
    parts: dict[str, list[SampleMember]] = {}
    partless_names = []
    for member in members:
        part = "" if strata is None else strata.get(member.submission, "")
        partless_names += [member.submission] if strata is not None and not part else []
        parts.setdefault(part, []).append(member)
    if partless_names:
        raise BoundError(
            f"no part of the class is given for {plural(len(partless_names), 'submission')} (the first is "
            f"{partless_names[0]!r}): add a row for each of them to the table of parts"
        )
    return dict(sorted(parts.items()))


def _refuse_second(folder: Path, graded_class: GradedClass) -> None:
    """Raise BoundError if somebody has begun to grade a sample of the same grades."""
    earlier_draw = load_draw(folder) if is_drawn(folder) else None
    if earlier_draw and not changed_submissions(earlier_draw, graded_class) and _is_being_graded(folder):
        day = time.strftime("%Y-%m-%d %H:%M", time.localtime(earlier_draw.at))
        raise BoundError(
            f"{folder} already has a sample, drawn by {earlier_draw.by} on {day}: grade that sample. If you could "
            "draw a second sample of the same grades and keep the better one, no bound would hold"
        )


def _set_aside(folder: Path) -> None:
    """Rename an earlier record and sheet, even if only one of them is left, so that neither is overwritten."""
    at = time.time_ns()
    for name in (FILE, SHEET):
        place = folder / name
        if place.exists():
            stem, _, ending = name.partition(".")
            place.rename(folder / f"{stem}.{at}.{ending}")


def _is_being_graded(folder: Path) -> bool:
    """Whether the sheet holds points, or is missing or unreadable."""
    try:
        rows = _read_rows(folder / SHEET).rows[1:]
    except BoundError:
        return True
    return any(text.strip() for row in rows for text in row[1:])


def member_of(grade: Grade, signal: str) -> SampleMember:
    """Return a submission as the record keeps it."""
    return SampleMember(grade.id, one_line(grade.submission), SIGNALS[signal].of(grade), digest(grade))


def counts(grade: Grade) -> bool:
    """Whether a model gave this submission a total. All others are looked at by a person anyway."""
    return grade.state == "graded" and grade.points is not None and EXAMPLE_REMARK not in grade.remarks


def digest(grade: Grade) -> str:
    """Return a digest of a grade's points, by criterion."""
    points = [(item.id, str(item.points), str(item.max_points)) for item in grade.criteria]
    return hashlib.sha256(json.dumps([str(grade.points), points]).encode()).hexdigest()[:16]


def changed_submissions(draw: Draw, graded_class: GradedClass) -> list[str]:
    """Return the submissions whose points have changed since the draw, or that are gone."""
    now = {
        member.item_id: member
        for member in (member_of(grade, draw.plan.signal) for grade in graded_class.grades if counts(grade))
    }
    members = [member for stratum in draw.strata for member in stratum.members]
    return [member.submission for member in members if now.get(member.item_id) != member]


def ever_sampled(folder: Path) -> frozenset[str]:
    """Return the submissions of a sample that was drawn here, including those for later looks.

    Raises as `load_draw`.
    """
    strata = load_draw(folder).strata if is_drawn(folder) else ()
    return frozenset(
        member.submission for stratum in strata for member in stratum.members if member.item_id in stratum.sample
    )


def is_drawn(folder: Path) -> bool:
    """Whether a sample was drawn in this folder."""
    return (folder / FILE).is_file()


def load_draw(folder: Path) -> Draw:
    """Read the record of the draw. Raises BoundError if there is none, or if it can't be read."""
    try:
        record: Draw = parse_as(Draw, from_json(read_ordinary(folder / FILE)), "the sample")
        _check(record)
        return record
    except FileNotFoundError:
        raise _not_drawn(folder) from None
    except (OSError, ValueError) as error:
        raise BoundError(f"{folder / FILE} can't be used ({error}): restore the file as kvasir wrote it") from None


def _check(record: Draw) -> None:
    """Raise ValueError if `draw_sample` can't have made this record."""
    if (
        record.version != _VERSION
        or record.plan.signal not in SIGNALS
        or not 1 <= record.looks <= len(record.plan.sizes)
    ):
        raise ValueError("another version of kvasir wrote the file: upgrade kvasir on this machine")
    check_plan(record.plan.thresholds, record.plan.sizes, record.plan.at_most, record.plan.confidence)
    for stratum in record.strata:
        ids = [member.item_id for member in stratum.members]
        if stratum.sample != uniform_sample(ids, record.plan.sizes[-1], f"{record.seed} {stratum.name}"):
            raise ValueError("the sample does not match its seed")


def draw_more(folder: Path) -> Draw:
    """Begin the next planned look: add its rows to the sheet. Raises BoundError if none was planned."""
    with _lock_sheet(folder):
        record = load_draw(folder)
        if record.looks == len(record.plan.sizes):
            raise BoundError(
                f"the sample was drawn for {record.size} grades only. To look again at a larger sample, name both "
                "sizes when you draw (--draw 30,60), because the bound depends on how often you look"
            )
        extended_record = replace(record, looks=record.looks + 1)
        _extend_sheet(folder, extended_record, _read_rows(folder / SHEET))
        _save(folder, extended_record)
    return extended_record


@contextmanager
def _lock_sheet(folder: Path) -> Iterator[None]:
    """Lock record and sheet against other processes. Raises BoundError if nothing is drawn; BatchError."""
    while True:
        try:
            with open_private(folder / FILE, "r+b") as record:
                fcntl.flock(record, fcntl.LOCK_EX)
                # A different inode means that another process replaced the file before this process got the lock.
                if os.fstat(record.fileno()).st_ino == (folder / FILE).stat().st_ino:
                    yield
                    return
        except FileNotFoundError:
            raise _not_drawn(folder) from None
        except OSError as error:
            raise BatchError(f"can't write {folder / SHEET}: {error.strerror}; nothing was saved") from None


def _not_drawn(folder: Path) -> BoundError:
    return BoundError(f"no sample is drawn yet in {folder}: {next_command('bound', folder, '--draw', 30)}")


# --- the sheet


def limits(graded_class: GradedClass) -> dict[str, tuple[Points, Points]]:
    """Return the fewest and the most points of each criterion, in the rubric's order."""
    grade = next(grade for grade in graded_class.grades if counts(grade))
    return {item.id: (item.min_points, item.max_points) for item in grade.criteria}


def _header(limits_by_id: Mapping[str, tuple[Points, Points]]) -> list[str]:
    """Return the sheet's columns: the submission, a column for each criterion, and a remark."""
    return [_NAME, *(f"{id} ({low} to {high})" for id, (low, high) in limits_by_id.items()), _REMARK]


def _extend_sheet(folder: Path, record: Draw, sheet: Sheet) -> None:
    """Write the sheet with rows for the drawn submissions that are not in it yet. Raises BatchError."""
    listed_names = {cell(row, 0) for row in sheet.rows[1:]}
    new_names = [
        member.submission for member in record.sampled_members().values() if member.submission not in listed_names
    ]
    rows = [*sheet.rows, *([name, *[""] * (len(sheet.rows[0]) - 1)] for name in new_names)]
    write_atomically(folder / SHEET, write_sheet(Sheet(rows, sheet.delimiter, sheet.bom), newline="\n"))


def _read_rows(place: Path) -> Sheet:
    """Read the sheet. Raises BoundError."""
    try:
        with open_ordinary(place) as file:
            return read_sheet(file.read(), f"sheet {place}")
    except ExportError as error:
        raise BoundError(str(error)) from None
    except OSError as error:
        raise BoundError(f"{place} can't be read: {error.strerror}") from None


# --- the hand grades


@dataclass(frozen=True, slots=True)
class HandGrade:
    """The points that a person gave one submission."""

    criteria: Mapping[str, Points]
    total: Points


def read_sheet_of(folder: Path, draw: Draw, graded_class: GradedClass, place: Path | None) -> dict[str, HandGrade]:
    """Read the hand grades by item id: of all submissions drawn, or of none.

    Raises BoundError if the sheet is half filled in, was changed, or holds other submissions than those drawn.
    """
    place = place or folder / SHEET
    cells_by_id = entered_points(place, draw, graded_class)
    names = {id: member.submission for id, member in draw.sampled_members().items()}
    empty = [name for id, name in names.items() if not any(cells_by_id[id].values())]
    if empty:
        raise BoundError(
            f"{place}: {len(empty)} of {len(names)} submissions have no points yet ({shorten_names(empty)}). "
            "Fill them in first: the submissions graded so far are not a random sample, so no bound follows from them"
        )
    return {id: _grade(place, names[id], cells, limits(graded_class)) for id, cells in cells_by_id.items()}


class SheetConflict(BoundError):
    """The cell was changed after the person looked at it. `stands` is its content now."""

    def __init__(self, stands: str) -> None:
        super().__init__(f"somebody else has changed this cell to {stands or 'nothing'}; your entry is not saved")
        self.stands = stands


def enter_points(folder: Path, item_id: str, criterion: str, points: str, seen_text: str) -> None:
    """Write the points for one criterion of one submission into the sheet. They are on disk on return; "" removes them.

    Args:
        seen_text: what the cell held when the person who grades looked at it.

    Raises SheetConflict if the cell holds something else now. Raises BoundError if the points are out of range, the
    sheet was changed, or the submission was not drawn. In all these cases nothing is written.
    """
    with _lock_sheet(folder):
        draw, graded_class = load_draw(folder), load_graded(folder)
        member, limits_by_id = draw.sampled_members().get(item_id), limits(graded_class)
        stands = entered_points(folder / SHEET, draw, graded_class).get(item_id, {}).get(criterion)
        if member is None or stands is None:
            raise BoundError("this submission was not drawn, or the rubric has changed; load the page again")
        text = (
            str(points_in(f"{member.submission!r}, {criterion}", points, limits_by_id[criterion]))
            if points.strip()
            else ""
        )
        if stands not in (seen_text, text):
            raise SheetConflict(stands)
        sheet = _read_rows(folder / SHEET)
        column = [*limits_by_id].index(criterion) + 1
        rows = [
            with_cell(row, column, text) if cell(row, 0).strip() == member.submission else row for row in sheet.rows
        ]
        write_atomically(folder / SHEET, write_sheet(Sheet(rows, sheet.delimiter, sheet.bom), newline="\n"))


def entered_points(place: Path, draw: Draw, graded_class: GradedClass) -> dict[str, dict[str, str]]:
    """Return what the sheet holds for each submission drawn, by item id: a text for each criterion, "" if empty.

    Raises BoundError if the sheet was changed, or holds other submissions than those drawn.
    """
    limits_by_id = limits(graded_class)
    sheet = _read_rows(place)
    header = [text.strip() for text in sheet.rows[0]]
    if header[: len(limits_by_id) + 1] != _header(limits_by_id)[:-1]:
        raise BoundError(f"{place}: the columns were changed; they must be {', '.join(_header(limits_by_id))}")
    ids = {member.submission: id for id, member in draw.sampled_members().items()}
    cells_by_id: dict[str, dict[str, str]] = {}
    for row in sheet.rows[1:]:
        name = cell(row, 0).strip()
        cells = {id: cell(row, index).strip() for index, id in enumerate(limits_by_id, 1)}
        if not name and not any(cells.values()):
            continue
        if ids.get(name) in cells_by_id:
            raise BoundError(f"{place}: {name!r} has two rows; keep only one row")
        if name not in ids:
            if any(grade.submission == name for grade in graded_class.grades):
                raise BoundError(
                    f"{place}: {name!r} was not drawn at random, so its grade says nothing about the "
                    "other grades: remove the row"
                )
            raise BoundError(f"{place}: this class has no submission called {name!r}; write the name as in the batch")
        cells_by_id[ids[name]] = cells
    missing_names = [name for name, id in ids.items() if id not in cells_by_id]
    if missing_names:
        raise BoundError(
            f"{place}: rows are missing ({shorten_names(missing_names)}); each drawn submission must have a row"
        )
    return cells_by_id


def _grade(
    place: Path, name: str, cells: Mapping[str, str], limits_by_id: Mapping[str, tuple[Points, Points]]
) -> HandGrade:
    empty_criteria = [id for id, text in cells.items() if not text]
    if empty_criteria:
        raise BoundError(f"{place}: {name!r} has empty cells: add points for {', '.join(empty_criteria)}")
    points_by_criterion = {
        id: points_in(f"{place}: {name!r}, {id}", text, limits_by_id[id]) for id, text in cells.items()
    }
    return HandGrade(points_by_criterion, total_points(points_by_criterion.values()))


def points_in(place: str, text: str, bounds: tuple[Points, Points]) -> Points:
    """Parse a number of points as somebody typed it. `place` names the cell in errors. Raises BoundError."""
    try:
        value = Decimal(text.replace(",", "."))
    except InvalidOperation:
        raise BoundError(f"{place}: {text!r} is not a number of points") from None
    if not (value.is_finite() and exact(bounds[0]) <= value <= exact(bounds[1])):
        raise BoundError(f"{place}: points must be from {bounds[0]} to {bounds[1]}, not {text}")
    return plain(value)


def _save(folder: Path, record: Draw) -> None:
    write_atomically(folder / FILE, json.dumps(asdict(record), indent=1))
