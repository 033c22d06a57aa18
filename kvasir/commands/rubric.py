"""`kvasir rubric`: makes rubrics from a teacher's existing files."""

from pathlib import Path

import click
import yaml

from grading.rubric.formats import from_notebook
from grading.rubric.rubric import parse_rubric
from grading.submissions.archives import Unreadable, decode_text, read_file
from grading.submissions.notebooks import slim_notebook
from kvasir.options import path
from messages.errors import RubricError


@click.group()
def rubric() -> None:
    """Make a rubric."""


@rubric.command("from")
@click.argument("notebook", type=path)
def from_(notebook: Path) -> int:
    """Print a rubric made from NOTEBOOK: the points of nbgrader's graded cells, or of Otter-Grader's questions.

    Hidden tests stay out of it. Write it to a file, and read it before you grade with it.
    """
    try:
        text, *_ = decode_text(slim_notebook(read_file(notebook)))
        data = from_notebook(str(notebook), text)
    except Unreadable as error:
        raise RubricError(f"{notebook} can't be read: {error}") from None
    written = yaml.safe_dump(data, sort_keys=False, allow_unicode=True, width=100)
    parse_rubric(str(notebook), written, ".yaml")
    click.echo(written, nl=False)
    return 0
