"""What of a submission is the student's own: the lines that the template has not. White space and case don't count."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Set

from grading.quotes import line_counts, squeeze
from grading.rubric.rubric import Rubric
from grading.submissions.reading import Submission

# Fewer lines in common are no copy: everybody who is right writes the same few lines.
MANY_LINES = 6
# Where a task leaves little choice, half of a right answer is the solution's. A copy is more: this part of its own
# lines, or this part of the solution's.
MOST_OF_ITS_OWN, MOST_OF_THEIRS = 0.75, 0.9
# A line of the grading notes has no reason to be in a submission: one counts as this many lines of code.
NOTE_COUNTS = 3
_NOTE_CHARS = 25
_LINE_CHARS = 4  # shorter ones (`end`, `)`) are nobody's

# A line that says whose work it is: in prose or a comment, or a constant as nbgrader's.
_WHO = r"(?:(?:your|full|student|first|last|given)[ _-])*(?:names?|authors?|students?|id|e-?mail|date|collaborators?)"
_CONSTANT = r"[A-Z_]*(?:NAMES?|AUTHORS?|COLLABORATORS?|STUDENT_ID|EMAIL)"
_HEADER = re.compile(rf"(?:[#%/*>|\s_-]*(?i:{_WHO})[\s*_]*:|{_CONSTANT}\s*(?:=|<-)).{{0,120}}\Z")


def is_template(work: Submission, template: Submission) -> bool:
    """Whether nothing was added to the template but who it is from; outputs, order and white space don't count."""
    given, written = _texts(template), _texts(work)
    if squeeze("".join(given)) == squeeze("".join(written)):
        return True
    lines = (line for text in written for line in text.split("\n") if not _HEADER.match(line.strip()))
    return not line_counts(lines) - line_counts(given)


def common_lines(class_work: Iterable[Submission]) -> Set[str]:
    """Lines that more than half of a class wrote; none for less than three."""
    written = [line_counts(_texts(work)).keys() for work in class_work if not work.problem and not work.empty]
    times = Counter(line for lines in written for line in lines)
    return {line for line, number in times.items() if 2 * number > len(written) > 2}


def copied(
    work: Submission, rubric: Rubric, solution: Submission | None, template: Submission | None, common: Set[str]
) -> str:
    """Why it looks like a copy of the solution or the rubric: most of its own lines are theirs; "" if it doesn't."""
    given = line_counts([rubric.instructions, *_texts(template)])
    own, right = (
        {line for line in line_counts(_texts(one)) - given if len(line) >= _LINE_CHARS} for one in (work, solution)
    )
    notes = {line for line in line_counts(one.guidance for one in rubric.criteria) if len(line) >= _NOTE_CHARS}
    theirs = own & (notes | right)
    much = sum(NOTE_COUNTS if line in notes else 1 for line in theirs - common) >= MANY_LINES
    whole = 2 * len(theirs) > len(own) and len(own & right) >= MOST_OF_THEIRS * len(right) > 0
    if much and (whole or len(theirs) >= MOST_OF_ITS_OWN * len(own)):
        return f"{len(theirs)} of {len(own)} lines of its own are those of the solution or of the grading notes"
    return ""


def _texts(work: Submission | None) -> list[str]:
    return [part.text for part in work.parts if part.kind != "output"] if work else []
