"""`kvasir export`: writes the grades of a batch in the form that the LMS expects."""

import re
from codecs import BOM_UTF8
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from grading import export as out
from grading.export import Choices, ExportFile, ExportFormat, SinceLast
from grading.report.grades import load_graded
from grading.roster import kept_files
from grading.tables import MAX_BYTES
from infra.config.next_command import next_command
from kvasir import class_run
from kvasir.options import F, Globals, path
from kvasir.terminal import print_groups, say, stderr, stdout
from messages.errors import BatchError, UsageError
from producers.batch import batch as batches
from producers.storage.private import kept_in, open_ordinary, write_atomically

_BEGINNING = 4096  # this many bytes from the start of a file are enough to tell its kind


_OF_FORMAT = "of_format_"  # prefix of the argument names of a format's options


def _format_options(function: F) -> F:
    """Return the options of all formats. An option of several formats is included only once."""
    options = {option.flag: option for export_format in out.FORMATS for option in export_format.options}
    for option in reversed(options.values()):
        kinds: dict[str, dict[str, Any]] = {
            "file": {"type": path},
            "text": {"default": "", "metavar": option.metavar},
            "flag": {"is_flag": True},
            "choice": {"type": click.Choice(option.choices)},
        }
        declare = click.option(option.flag, _OF_FORMAT + option.name, help=option.help, **kinds[option.kind])
        function = declare(function)
    return function


@click.command()
@click.argument("batch", type=path)
@click.option(
    "--format",
    "format_name",
    type=click.Choice([export_format.name for export_format in out.FORMATS]),
    required=True,
    help="Choose the format of the export.",
)
@_format_options
@click.option("--times", type=path, help="Apply the late rule to the times in this CSV (submission, submitted_at).")
@click.option("--include-unreviewed", is_flag=True, help="Include grades that still need review.")
@click.option(
    "--yes", is_flag=True, help="Export without asking, even if grades are replaced or the class looks doubtful."
)
@click.option("--dry-run", is_flag=True, help="Show what changed since the last export, and write no file.")
@click.option("--to", type=path, help="Write to this file or folder [default: a file in the folder BATCH].")
@click.pass_obj
def export(
    global_options: Globals,
    /,
    batch: Path,
    format_name: str,
    times: Path | None,
    include_unreviewed: bool,
    yes: bool,
    dry_run: bool,
    to: Path | None,
    **format_values: Any,
) -> int:
    """Write the grades of the batch in folder BATCH for Canvas, Moodle or a spreadsheet, or as feedback files.

    What failed, is incomplete or needs review is left blank, never 0, and listed. Only --yes replaces grades in the
    LMS's file, or gives out a class that raised an alarm.
    """
    _bring_up_to_date(global_options, batch)
    times_data = bytes_of(times)
    if times_data is not None:
        _keep_times(times_data, batch)
    export_format = next(registered for registered in out.FORMATS if registered.name == format_name)
    choices = _choices(export_format, format_values)
    try:
        # The grades are read before the file is made. If somebody makes a decision in between, the next export counts
        # that decision as a change.
        _, grades = out.final_grades(batch, include_unreviewed)
        export_file = export_format.make(batch, include_unreviewed=include_unreviewed, **choices)
        since = out.since_last(batch, export_format.name, grades, export_file.held_ids)
        if dry_run:
            _print_changes(since)
            return 0
    except out.ExportError as error:
        raise out.ExportError(f"{error} ({error.option})" if error.option else str(error)) from None
    if since.last:
        _print_changes(since)
    if export_file.asks:
        lines = ("With --yes:" if yes else "Read this first:", *export_file.asks)
        say("\n".join(lines), stderr)
    if export_file.asks and not yes:
        raise out.ExportError("nothing was written: read the lines above, and add --yes if you agree")
    source_files = [value for value in (times, *format_values.values()) if isinstance(value, Path)]
    exit_code = write_export(export_file, batch, to, source_files)
    out.record_export(batch, since.now)
    return exit_code


def _choices(export_format: ExportFormat, format_values: Mapping[str, Any]) -> Choices:
    """Return the options given for this format, by name. Raises ExportError."""
    values = {option.name: format_values[_OF_FORMAT + option.name] for option in export_format.options}
    return {
        name: bytes_of(value) if isinstance(value, Path) else value
        for name, value in values.items()
        if value is not None
    }


def _keep_times(times: bytes, batch: Path) -> None:
    graded_class = load_graded(batch)
    if graded_class.late is None:
        problem = f"the rubric had no rule on lateness when the grades were written: {next_command('results', batch)}"
        raise out.ExportError(problem)
    _, remark = out.keep_times(batch, times, graded_class)
    if remark:
        say(remark, stderr)


def _print_changes(since: SinceLast) -> None:
    say("\n".join([since.summary(), *since.lines()]), stderr)


def _bring_up_to_date(global_options: Globals, batch: Path) -> None:
    """Write grades.json from the current journal and answers, if they are newer and the class's work can be read."""
    batches.batch_id(batch)  # raises BatchError if the folder holds no batch
    grades_file, journal = batch / "grades.json", batch / "results.jsonl"
    if (
        grades_file.is_file()
        and journal.is_file()
        and grades_file.stat().st_mtime_ns > max(path.stat().st_mtime_ns for path in (journal, *kept_files(batch)))
    ):
        return
    try:
        note = class_run.look(global_options.settings(), batch).note
        if note:
            say(note, stderr)
    except UsageError as error:
        if not grades_file.is_file():
            raise
        say(f"the grades are those last written, because {error}", stderr)


def bytes_of(path: Path | None) -> bytes | None:
    """Read a file that was named; None if none was. Raises ExportError."""
    if path is None:
        return None
    try:
        with open_ordinary(path) as file:
            return file.read(MAX_BYTES + 1)
    except OSError as error:
        raise out.ExportError(f"{path} can't be read: {error.strerror}") from None


def write_export(export_file: ExportFile, batch: Path, to: Path | None, source_files: Iterable[Path] = ()) -> int:
    """Save the file and list what is blank. Returns 1 if anything is blank. `source_files` are never overwritten."""
    target = to or batch / export_file.name
    try:
        target = target / export_file.name if target.is_dir() else target
        is_named_device = to is not None and target.exists() and not target.is_file()  # or a pipe
        if target.exists() and not is_named_device:
            _check_replaceable(target, batch, export_file, [path.resolve() for path in source_files])
        if is_named_device:
            target.write_bytes(export_file.data)
        else:
            write_atomically(target.resolve() if to else target, export_file.data)
    except OSError as error:
        raise out.ExportError(f"can't write {target}: {error.strerror}; name another place with --to") from None
    except BatchError as error:
        raise out.ExportError(f"{error}; name another place with --to") from None
    say(f"Written: {target}")
    for note in export_file.notes:
        say(f"Note: {note}")
    if stdout.is_terminal:
        print_groups(
            [("left blank or out", blank.submission, blank.reason) for blank in export_file.left_blank],
            "through a pipe, as | cat, you see all",
        )
    elif export_file.left_blank:
        lines = [f"  {blank.submission}: {blank.reason}" for blank in export_file.left_blank]
        say("\n".join([f"Left blank or out: {len(lines)}", *lines]))
    return 1 if export_file.left_blank else 0


def _check_replaceable(target: Path, batch: Path, export_file: ExportFile, source_files: Sequence[Path]) -> None:
    """Raise ExportError if the target exists and may not be replaced."""
    place, hint = target.resolve(), "name another place with --to"
    if place in source_files:
        raise out.ExportError(f"{target} is a source of this export, so it is not replaced; {hint}")
    if target.name != export_file.name and place in {own_file.resolve() for own_file in kept_in(batch)}:
        raise out.ExportError(f"{target} belongs to the batch, so it is not replaced; {hint}")
    # Only an earlier export may be replaced. A file counts as an export if it and the new export are both zip files, or
    # if both begin with the same column name.
    with open_ordinary(target) as file:
        begins = file.read(_BEGINNING).removeprefix(BOM_UTF8)
    if begins and _first(begins) != _first(export_file.data.removeprefix(BOM_UTF8)):
        raise out.ExportError(f"{target} holds something other than an export: delete the file, or {hint}")


def _first(data: bytes) -> bytes:
    return data[:2] if data.startswith(b"PK") else re.split(rb"[,;\t\r\n]", data, maxsplit=1)[0].strip(b'"')
