"""What a student handed in, as it looked: cells of text and code, what the code printed and drew."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import streamlit as st

from desk import review_screen
from desk.plots import Plot, plots
from desk.review_screen.blocks import WorkBlocks
from desk.tables import tables
from grading.quotes import quoted_lines
from grading.submissions.figures import figures_of, place_of
from grading.submissions.reading import Submission, SubmissionPart
from producers.words import plural

SCRIPT = (Path(review_screen.__file__).parent / "work.js").read_text("utf-8")
# This component draws the blocks of `WorkBlocks` on all pages except the review screen.
BLOCKS = st.components.v2.component(
    "kvasir_work",
    html='<div class="kv-blocks"></div>',
    css=".kv-blocks .kv-faint { overflow-wrap: anywhere; opacity: 0.9; font-size: 0.875rem; margin: 0.5rem 0 0.2rem; }",
    js=f"""{SCRIPT}
export default ({{ data, parentElement }}) =>
  parentElement.querySelector(".kv-blocks").replaceChildren(...data.blocks.map(block));""",
    isolate_styles=False,
)
_MOST_CHARS = 60_000  # maximum number of characters of a submission that are shown at first
_MOST_PART_CHARS = 20_000  # maximum number of characters of one cell or output that are shown at first


def draw_work(
    folder: Path, submission: Submission, quotes: Mapping[str, str], is_whole: bool = False
) -> list[dict[str, Any]]:
    """Return the blocks of the submission in `folder`, of a long one the beginning unless `is_whole`.

    Its pictures are among them, and are read now. Lines that are quoted as evidence are highlighted, each with the ids
    of its criteria: `quotes` has theirs.
    """
    work = WorkBlocks()
    pictures = plots(figures_of(folder, submission.name)) if submission.images_left_out else []
    pending_plots = sorted(pictures, key=lambda plot: plot.place)
    chars_left, most_part = (char_count(submission),) * 2 if is_whole else (_MOST_CHARS, _MOST_PART_CHARS)
    for part in submission.parts:
        place = place_of(part.location)
        while pending_plots and place and pending_plots[0].place < place:
            _picture(work, pending_plots.pop(0))
        if chars_left <= 0:
            break
        chars_left -= _part(work, part, submission.language, quotes, min(chars_left, most_part))
    else:
        for plot in pending_plots:
            _picture(work, plot)
    if submission.images_left_out:
        hidden_count = submission.images_left_out - len(pictures)
        hidden_text = f"; {hidden_count} of them can't be shown here" if hidden_count > 0 else ""
        work.caption(
            f"{plural(submission.images_left_out, 'picture')}, seen by no model{hidden_text}."
            + (" A click on one makes it larger." if pictures else "")
        )
    return work.blocks


def char_count(submission: Submission) -> int:
    """How long all of its parts are together."""
    return sum(len(part.text) for part in submission.parts)


def is_cut(submission: Submission) -> bool:
    """Whether less than the whole is shown until all of it is asked for."""
    return char_count(submission) > _MOST_CHARS or any(len(part.text) > _MOST_PART_CHARS for part in submission.parts)


def _picture(work: WorkBlocks, plot: Plot) -> None:
    names = zip(("file", "cell", "output"), plot.place, strict=True)
    work.plot(plot, ", ".join(["picture", *(f"{name} {number}" for name, number in names if number)]))


def _part(work: WorkBlocks, part: SubmissionPart, language: str, quotes: Mapping[str, str], most_chars: int) -> int:
    """Draw it; how many characters that were."""
    body = part.text[:most_chars]
    marks = _marks(body, quotes)
    work.caption(
        part.location if place_of(part.location) and part.kind == "output" else f"{part.kind}, {part.location}"
    )
    if part.kind == "code":
        work.code(body, language, marks)
    else:
        _lines(work, body.split("\n"), marks, part.kind == "output")
    if left_out := len(part.text) - len(body):
        work.caption(f"{plural(left_out, 'character')} more, not shown", kind="cut")
    return len(body)


def _marks(body: str, quotes: Mapping[str, str]) -> dict[int, str]:
    marks: dict[int, str] = {}
    for criterion, evidence in quotes.items():
        for line in quoted_lines(body, [evidence]):
            marks[line] = f"{marks[line]}, {criterion}" if line in marks else criterion
    return marks


def _lines(work: WorkBlocks, lines: list[str], marks: Mapping[int, str], output: bool) -> None:
    """Lines, and the tables among them."""
    draw = work.output if output else work.prose
    start = 0
    for table in tables(lines, with_spaces=output):
        if any(line.strip() for line in lines[start : table.start]):
            draw(lines[start : table.start], _marks_from(marks, start))
        work.table(table, marks)
        start = table.end
    if any(line.strip() for line in lines[start:]):
        draw(lines[start:], _marks_from(marks, start))


def _marks_from(marks: Mapping[int, str], start: int) -> dict[int, str]:
    return {line - start: reason for line, reason in marks.items() if line >= start}
