"""What a student handed in, as it looked: cells of text and code, what the code printed and drew."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from desk.pages.markup import Markup
from desk.plots import Plot, plots
from desk.tables import tables
from desk.text import SHOWN_CHARS, shortened
from grading.quotes import quoted_lines
from grading.submissions.figures import figures_of, place_of
from grading.submissions.reading import Part, Submission
from producers.words import plural

MOST_CHARS = 60_000  # of a submission, until everything is asked for


def drawn_work(folder: Path, submission: Submission, quotes: Mapping[str, str], most: int) -> Markup:
    """At most so many characters of the submission in `folder`, with its pictures, which are read now.

    Lines that are quoted as evidence are highlighted, each with the ids of its criteria: `quotes` has theirs.
    """
    drawn = Markup()
    pictures = plots(figures_of(folder, submission.name).first) if submission.images_left_out else []
    waiting = sorted(pictures, key=lambda each: each.place)
    left = most
    for part in submission.parts:
        here = place_of(part.where)
        while waiting and here and waiting[0].place < here:
            _picture(drawn, waiting.pop(0))
        if left <= 0:
            break
        left -= _part(drawn, part, submission.language, quotes, left)
    else:
        for plot in waiting:
            _picture(drawn, plot)
    if submission.images_left_out:
        lost = submission.images_left_out - len(pictures)
        said = f"; {lost} of them can't be shown here" if lost > 0 else ""
        drawn.caption(f"{plural(submission.images_left_out, 'picture')}, seen by no model{said}.")
    return drawn


def _picture(drawn: Markup, plot: Plot) -> None:
    names = zip(("file", "cell", "output"), plot.place, strict=True)
    drawn.plot(plot, ", ".join(["picture", *(f"{name} {number}" for name, number in names if number)]))


def _part(drawn: Markup, part: Part, language: str, quotes: Mapping[str, str], most: int) -> int:
    """Draw it; how many characters that were."""
    body, left_out = shortened(part.text, min(most, SHOWN_CHARS))
    marked = _marked(body, quotes)
    drawn.caption(part.where if place_of(part.where) and part.kind == "output" else f"{part.kind}, {part.where}")
    if part.kind == "code":
        drawn.code(body, language, marked)
    else:
        _lines(drawn, body.split("\n"), marked, part.kind == "output")
    if left_out:
        drawn.caption(f"{plural(left_out, 'character')} more")
    return len(body)


def _marked(body: str, quotes: Mapping[str, str]) -> dict[int, str]:
    why: dict[int, str] = {}
    for criterion, evidence in quotes.items():
        for line in quoted_lines(body, [evidence]):
            why[line] = f"{why[line]}, {criterion}" if line in why else criterion
    return why


def _lines(drawn: Markup, lines: list[str], marked: Mapping[int, str], output: bool) -> None:
    """Lines, and the tables among them."""
    draw = drawn.output if output else drawn.prose
    start = 0
    for table in tables(lines, aligned=output):
        if any(line.strip() for line in lines[start : table.start]):
            draw(lines[start : table.start], _from(marked, start))
        drawn.table(table, marked)
        start = table.end
    if any(line.strip() for line in lines[start:]):
        draw(lines[start:], _from(marked, start))


def _from(marked: Mapping[int, str], start: int) -> dict[int, str]:
    return {line - start: why for line, why in marked.items() if line >= start}
