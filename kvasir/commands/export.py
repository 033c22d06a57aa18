"""`kvasir export`: the grades of a batch, as the LMS wants them."""

from __future__ import annotations

import re
from codecs import BOM_UTF8
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from grading import export as out
from grading.export import ExportFile, SinceLast
from grading.report.graded import load_graded
from infra.config.next_command import next_command
from kvasir import class_run
from kvasir.options import Globals, gathered, path
from kvasir.terminal import say, stderr
from messages.errors import UsageError
from producers.batch import batch as batches
from producers.batch.batch import Batch
from producers.files.private import kept_in, open_ordinary, open_private

_BEGINNING = 4096  # bytes, which tell what a file is


@dataclass(frozen=True, slots=True)
class _Format:
    """What to write, and what each kind was given for it."""

    kind: str
    gradebook: Path | None
    assignment: str
    all_columns: bool
    scale: bool
    worksheet: Path | None
    file_kind: str | None
    times: Path | None


@click.command()
@click.argument("batch", type=path)
@click.option(
    "--format",
    "kind",
    type=click.Choice(["canvas", "moodle", "moodle-feedback", "csv", "feedback"]),
    required=True,
    help="What to write.",
)
@click.option("--gradebook", type=path, help="canvas: the gradebook that you exported there.")
@click.option("--assignment", default="", metavar="A", help="canvas: the assignment's id, or 'Title (id)'.")
@click.option("--all-columns", is_flag=True, help="canvas: keep the other assignments' columns.")
@click.option("--scale", is_flag=True, help="canvas: scale to the points possible there.")
@click.option("--worksheet", type=path, help="moodle: the grading worksheet that you downloaded there.")
@click.option("--as", "file_kind", type=click.Choice(["md", "html"]), help="feedback: Markdown or HTML.")
@click.option("--times", type=path, help="CSV of submission and submitted_at, for a rubric with a rule on lateness.")
@click.option("--include-unreviewed", is_flag=True, help="Also grades that a person should look at and has not.")
@click.option("--yes", is_flag=True, help="I have read what it asked: replace grades, or give out a doubtful class.")
@click.option("--dry-run", is_flag=True, help="Only say what differs from the last such export; make no file.")
@click.option("--to", type=path, help="Where to write it [default: in the folder BATCH].")
@gathered(wanted=_Format)
@click.pass_obj
def export(
    given: Globals,
    batch: Path,
    wanted: _Format,
    include_unreviewed: bool,
    yes: bool,
    dry_run: bool,
    to: Path | None,
) -> int:
    """Write the grades of the batch in folder BATCH for Canvas, Moodle or a spreadsheet, or as feedback files.

    What failed, is incomplete or needs a person's look is left blank, never 0, and listed. Grades that the LMS's file
    holds are replaced, and a class that raises an alarm is given out, only with --yes.
    """
    _bring_up_to_date(given, batch)
    times = bytes_of(wanted.times)
    if times is not None:
        _take(times, batch)
    theirs = bytes_of({"canvas": wanted.gradebook, "moodle": wanted.worksheet}.get(wanted.kind))
    try:
        since = _since_last(batch, wanted, theirs, include_unreviewed)
        if dry_run:
            _say(since)
            return 0
        made = _made(batch, wanted, theirs, include_unreviewed)
    except out.ExportError as error:
        raise out.ExportError(f"{error} ({error.option})" if error.option else str(error)) from None
    if since.last:
        _say(since)
    if made.asks:
        lines = ("With --yes:" if yes else "Read this first:", *made.asks)
        stderr.print("\n".join(lines), soft_wrap=True, markup=False, highlight=False)
    if made.asks and not yes:
        raise out.ExportError("nothing is written yet: read the lines above, and add --yes if that is what you want")
    done = write(made, batch, to, (wanted.gradebook, wanted.worksheet, wanted.times))
    out.record_export(batch, since.now)
    return done


def _made(batch: Path, wanted: _Format, theirs: bytes | None, include_unreviewed: bool) -> ExportFile:
    """The file; `theirs` is the one that the LMS takes back filled in. Raises ExportError, BatchError."""
    makers: dict[str, Callable[[], ExportFile]] = {
        "canvas": lambda: out.export_canvas(
            batch,
            theirs,
            wanted.assignment,
            include_unreviewed=include_unreviewed,
            all_columns=wanted.all_columns,
            scale=wanted.scale,
        ),
        "moodle": lambda: out.export_moodle(batch, _needed(theirs), include_unreviewed=include_unreviewed),
        "moodle-feedback": lambda: out.export_moodle_feedback(
            batch, "md" if wanted.file_kind == "md" else "html", include_unreviewed=include_unreviewed
        ),
        "csv": lambda: out.export_csv(batch, include_unreviewed=include_unreviewed),
        "feedback": lambda: out.export_feedback(
            batch, "html" if wanted.file_kind == "html" else "md", include_unreviewed=include_unreviewed
        ),
    }
    return makers[wanted.kind]()


def _since_last(batch: Path, wanted: _Format, theirs: bytes | None, include_unreviewed: bool) -> SinceLast:
    graded, grades = out.final_grades(batch, include_unreviewed)
    held = grades
    if wanted.kind == "canvas":
        held = out.held_by_canvas(grades, theirs, wanted.assignment, graded.title)
    elif wanted.kind in ("moodle", "moodle-feedback"):
        held = out.held_by_moodle(grades, theirs)
    return out.since_last(batch, wanted.kind, grades, held)


def _take(times: bytes, batch: Path) -> None:
    graded = load_graded(batch)
    if graded.late is None:
        why = f"the rubric had no rule on lateness when the grades were written: {next_command('results', batch)}"
        raise out.ExportError(why)
    _, remark = out.keep_times(batch, times, graded)
    if remark:
        stderr.print(remark, soft_wrap=True, markup=False, highlight=False)


def _say(since: SinceLast) -> None:
    stderr.print("\n".join([since.summary(), *since.lines()]), soft_wrap=True, markup=False, highlight=False)


def _bring_up_to_date(given: Globals, batch: Path) -> None:
    """Write grades.json from the journal as it is now, where that is newer and possible."""
    batches.batch_id(batch)  # says that there is none
    written, journal = batch / "grades.json", batch / "results.jsonl"
    if written.is_file() and journal.is_file() and written.stat().st_mtime_ns > journal.stat().st_mtime_ns:
        return
    try:
        with Batch(batch) as owned:
            note = class_run.look(given.settings(), owned).note
        if note:
            stderr.print(note, soft_wrap=True, markup=False)
    except UsageError as error:
        if not written.is_file():
            raise
        stderr.print(f"the grades are those last written, because {error}", soft_wrap=True, markup=False)


def bytes_of(path: Path | None) -> bytes | None:
    """A file that was named; None where none was. Raises ExportError."""
    if path is None:
        return None
    try:
        return path.read_bytes()
    except OSError as error:
        raise out.ExportError(f"{path} can't be read: {error.strerror}") from None


def _needed(worksheet: bytes | None) -> bytes:
    if worksheet is None:
        raise out.ExportError(
            "Moodle takes back only its own worksheet: download it (Assignment, Download grading worksheet) "
            "and name it with --worksheet"
        )
    return worksheet


def write(made: ExportFile, batch: Path, to: Path | None, read: Iterable[Path | None] = ()) -> int:
    """Save the file, list what is blank; 1 if anything is. `read`: what it was made of, which stays as it is."""
    target = to or batch / made.name
    try:
        target = target / made.name if target.is_dir() else target
        if target.is_file():
            _check_replaceable(target, batch, made, [path.resolve() for path in read if path])
        with open_private(target, "wb", follow=to is not None) as file:
            file.write(made.data)
    except OSError as error:
        raise out.ExportError(f"can't write {target}: {error.strerror}; name another place with --to") from None
    say(f"Written: {target}")
    for note in made.notes:
        say(f"Note: {note}")
    if made.left_blank:
        say(f"Left blank or out: {len(made.left_blank)}")
    for blank in made.left_blank:
        say(f"  {blank.submission}: {blank.reason}")
    return 1 if made.left_blank else 0


def _check_replaceable(target: Path, batch: Path, made: ExportFile, read: Sequence[Path]) -> None:
    """Raises ExportError where a file is at the place that is none of ours to replace."""
    place, another = target.resolve(), "name another place with --to"
    if place in read:
        raise out.ExportError(f"{target} is what this is made of, and stays as it is; {another}")
    if target.name != made.name and place in {kept.resolve() for kept in kept_in(batch)}:
        raise out.ExportError(f"{target} is a file of the batch's own; {another}")
    with open_ordinary(target) as file:  # an earlier export begins alike: a zip, or the name of the first column
        begins = file.read(_BEGINNING).removeprefix(BOM_UTF8)
    if begins and _first(begins) != _first(made.data.removeprefix(BOM_UTF8)):
        raise out.ExportError(f"something else is in {target}: delete it, or {another}")


def _first(data: bytes) -> bytes:
    return data[:2] if data.startswith(b"PK") else re.split(rb"[,;\t\r\n]", data, maxsplit=1)[0].strip(b'"')


COMMANDS = (export,)
