"""Regrading with another rubric: a round beside the batch, which is compared with it and then adopted or left.

A round has the batch's identity (id and secret). So a submission's job in a round is exactly the job that the batch
would make with that rubric. Adopting a round hands its results over, and nothing is computed twice.
"""

import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from desk.assignments import InputError, Inputs, grade_command, grading_work, read_inputs, save_inputs
from desk.backend import Backend
from desk.view import BatchView
from grading.grades import make_graded_class
from grading.inputs import kept_inputs
from grading.jobs import Assignment
from grading.prompts.prompt import criterion_text
from grading.report.grades import GradedClass, save_graded
from grading.roster import copy_kept
from grading.rubric.rubric import load_rubric
from messages.errors import BatchError
from messages.jobs import JobResult
from producers.batch import batch as batches
from producers.batch.batch import Batch
from producers.batch.forms import form_of
from producers.storage.journal import Lines, append_line
from producers.storage.private import make_folder
from producers.storage.shapes import parse_as
from producers.words import plural

CHANGES = "changes.jsonl"


def rounds(folder: Path) -> list[Path]:
    """Return the rounds of an assignment, oldest first."""
    return sorted((folder / "rounds").glob("*/"), key=lambda path: _number(path.name))


def start_round(backend: Backend, folder: Path, view: BatchView, rubric: Path, names: Sequence[str] = ()) -> Path:
    """Grade these submissions (all if none is named) with another rubric, in a separate folder.

    Raises InputError or BatchError if the batch is not finished, a round is running, or a name can't be passed on.
    """
    _check_idle(folder, view)
    inputs = replace(read_inputs(folder), rubric=str(rubric))
    place = next_round(folder)
    command = grade_command(backend, inputs, place, names=names)
    make_round(folder, place)
    save_inputs(place, inputs)
    grading_work(place).start(command, names=names)
    return place


def continue_round(backend: Backend, folder: Path, view: BatchView, place: Path) -> None:
    """Grade what an interrupted or failed round left open. Raises as `start_round`."""
    _check_idle(folder, view)
    names = record.only if (record := grading_work(place).record()) else ()
    grading_work(place).start(grade_command(backend, read_inputs(place), place, names=names), names=names)


def next_round(folder: Path) -> Path:
    """Return the folder of the next round."""
    return folder / "rounds" / str(max(map(_number, (path.name for path in rounds(folder))), default=0) + 1)


def make_round(folder: Path, place: Path) -> None:
    """Create the round's folder with the batch's identity and answered questions, which are not asked again."""
    with Batch(folder) as batch:
        make_folder(place)
        batch.copy(place)
        copy_kept(folder, place)


def is_same_plan(place: Path, assignment: Assignment) -> bool:
    """Whether this round has exactly these jobs, and so is the one to continue."""
    planned_ids = {entry.job_id for entry in batches.manifest_of(place)["jobs"] if entry.role != "intake"}
    return planned_ids == {job.job_id for job in assignment.jobs}


def adopt_round(
    backend: Backend, folder: Path, view: BatchView, place: Path, results: Iterable[JobResult], author: str = ""
) -> None:
    """Grade the class as in this round. Its results are used, and submissions that it left out are graded now.

    After a trial only the trial's submissions are graded, because the rubric may be corrected again. The old grades are
    kept as a version. Raises BatchError while anything of the assignment is running.
    """
    _check_idle(folder, view)
    if graded_class := graded_class_of(view):
        keep_grades(folder, graded_class)
    with Batch(folder) as batch:
        batch.journal.record(results)
    record_change(folder, place, author)
    inputs: Inputs = replace(read_inputs(folder), rubric=read_inputs(place).rubric)
    save_inputs(folder, inputs)
    work = grading_work(folder)
    limit, names = (record.limit, record.only) if (record := work.record()) else (0, ())
    work.start(grade_command(backend, inputs, folder, limit, names), limit=limit, names=names)


def record_change(folder: Path, place: Path, author: str) -> None:
    """Record that the class is now graded as in this round: when, by whom, and which criteria were asked about.

    It is one line of JSON in changes.jsonl. It contains the criteria's texts, because a rubric that is edited in place
    keeps no old text.
    """
    manifest = batches.manifest_of(place)
    old_keys = {key for entry in batches.manifest_of(folder)["jobs"] for key in entry.asked}
    criterion_ids = {key.partition(":")[0] for entry in manifest["jobs"] for key in {*entry.asked} - old_keys}
    request = manifest["request"]
    rubric = load_rubric(kept_inputs(place, request).get("rubric", Path(request["rubric"])))
    new = [criterion for criterion in rubric.criteria if criterion.id in criterion_ids or not old_keys]
    line = {
        "at": time.time(),
        "who": author,
        "round": place.name,
        "rubric": rubric.digest,
        "criteria": {criterion.id: criterion_text(criterion) for criterion in new},
    }
    append_line(folder / CHANGES, line, "change")


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
    return sorted((folder / "versions").glob("*/"), key=lambda path: _number(path.name.partition("-")[0]))


def _number(name: str) -> int:
    return int(name) if name.isascii() and name.isdigit() and len(name) < 10 else 0


def graded_class_of(view: BatchView) -> GradedClass | None:
    """Return the class as exports read it, or None if nothing is planned yet."""
    if view.assignment is None or not view.grades:
        return None
    return make_graded_class(batches.batch_id(view.folder), view.assignment, view.grades, view.stored_class)


def _check_idle(folder: Path, view: BatchView) -> None:
    if any(grading_work(place).is_alive for place in (folder, *rounds(folder))):
        raise BatchError("this assignment is being graded now; wait until the grading ends, or stop the grading")
    manifest = batches.manifest_of(folder)
    if manifest["prompt_form"] != form_of(manifest["request"]):
        raise BatchError(batches.other_form(folder, manifest["prompt_form"]))
    counts = view.counts()
    if not counts.total:
        raise InputError("the class has no grades to compare with yet; grade the class first")
    if counts.open:
        raise InputError(f"{plural(counts.open, 'job', 'has', 'have')} no result yet; finish the grading first")
