"""`kvasir export`: the grades of a batch, as the LMS wants them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import click

from kvasir import grading
from kvasir.options import Globals
from kvasir.terminal import say, stderr
from messages.errors import UsageError
from producers import batch as batches
from producers import export as out
from producers.batch import Batch
from producers.export import Exported

path = click.Path(path_type=Path)


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
@click.option("--include-unreviewed", is_flag=True, help="Also grades that a person should look at and has not.")
@click.option("--to", type=path, help="Where to write it [default: in the folder BATCH].")
@click.pass_obj
def export(
    given: Globals,
    batch: Path,
    kind: str,
    gradebook: Path | None,
    assignment: str,
    all_columns: bool,
    scale: bool,
    worksheet: Path | None,
    file_kind: str | None,
    include_unreviewed: bool,
    to: Path | None,
) -> int:
    """Write the grades of the batch in folder BATCH for Canvas, Moodle or a spreadsheet, or as feedback files.

    What failed, is incomplete or needs a person's look is left blank, never 0, and listed.
    """
    _bring_up_to_date(given, batch)
    unreviewed = include_unreviewed
    makers: dict[str, Callable[[], Exported]] = {
        "canvas": lambda: out.export_canvas(
            batch,
            _bytes(gradebook),
            assignment,
            include_unreviewed=unreviewed,
            all_columns=all_columns,
            scale=scale,
        ),
        "moodle": lambda: out.export_moodle(batch, _needed(worksheet), include_unreviewed=unreviewed),
        "moodle-feedback": lambda: out.export_moodle_feedback(
            batch, "md" if file_kind == "md" else "html", include_unreviewed=unreviewed
        ),
        "csv": lambda: out.export_csv(batch, include_unreviewed=unreviewed),
        "feedback": lambda: out.export_feedback(
            batch, "html" if file_kind == "html" else "md", include_unreviewed=unreviewed
        ),
    }
    return _write(makers[kind](), batch, to)


def _bring_up_to_date(given: Globals, batch: Path) -> None:
    """Write grades.json from the journal as it is now, where that is newer and possible."""
    batches.batch_id(batch)  # says that there is none
    written, journal = batch / "grades.json", batch / "results.jsonl"
    if written.is_file() and journal.is_file() and written.stat().st_mtime_ns > journal.stat().st_mtime_ns:
        return
    try:
        with Batch(batch) as owned:
            request = grading.request_again(given.settings(), owned)
            grading.report(owned, grading.open_assignment(owned, request), worked=True)
    except UsageError as error:
        if not written.is_file():
            raise
        stderr.print(f"the grades are those last written, because {error}", soft_wrap=True, markup=False)


def _bytes(path: Path | None) -> bytes | None:
    if path is None:
        return None
    try:
        return path.read_bytes()
    except OSError as error:
        raise out.ExportError(f"{path} can't be read: {error.strerror}") from None


def _needed(worksheet: Path | None) -> bytes:
    data = _bytes(worksheet)
    if data is None:
        raise out.ExportError(
            "Moodle takes back only its own worksheet: download it (Assignment, Download grading worksheet) "
            "and name it with --worksheet"
        )
    return data


def _write(made: Exported, batch: Path, to: Path | None) -> int:
    """Save the file, list what is blank; 1 if anything is."""
    target = to / made.name if to and to.is_dir() else to or batch / made.name
    try:
        target.write_bytes(made.data)
    except OSError as error:
        raise out.ExportError(f"can't write {target}: {error.strerror}; name another place with --to") from None
    say(f"Written: {target}")
    for note in made.notes:
        say(f"Note: {note}")
    if made.left_blank:
        say(f"Left blank or out: {len(made.left_blank)}")
    for blank in made.left_blank:
        say(f"  {blank.submission}: {blank.why}")
    return 1 if made.left_blank else 0


COMMANDS = (export,)
