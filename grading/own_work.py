"""What of a submission is the student's own: the lines that the template has not. White space and case don't count."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence, Set
from dataclasses import replace

from grading.quotes import line_counts, squeeze
from grading.rubric.rubric import Rubric
from grading.submissions.reading import Submission
from producers.words import plural

# Fewer lines in common are no copy: everybody who is right writes the same few lines.
MANY_LINES = 6
# Where a task leaves little choice, half of a right answer is the solution's. A copy is more: this part of its own
# lines, or this part of the solution's.
MOST_OF_ITS_OWN, MOST_OF_THEIRS = 0.75, 0.9
# A line of the grading notes has no reason to be in a submission: one counts as this many lines of code.
NOTE_COUNTS = 3
_NOTE_CHARS = 25
_A_FEW = 3  # of a small class that may be most
_LINE_CHARS = 4  # shorter ones (`end`, `)`) are nobody's

# A line that says whose work it is: in prose or a comment, or a constant as nbgrader's.
_PERSON_FIELD = (
    r"(?:(?:your|full|student|first|last|given)[ _-])*(?:names?|authors?|students?|id|e-?mail|date|collaborators?)"
)
_CONSTANT = r"[A-Z_]*(?:NAMES?|AUTHORS?|COLLABORATORS?|STUDENT_ID|EMAIL)"
_HEADER = re.compile(rf"(?:[#%/*>|\s_-]*(?i:{_PERSON_FIELD})[\s*_]*:|{_CONSTANT}\s*(?:=|<-)).{{0,120}}\Z")


def is_template(work: Submission, template: Submission) -> bool:
    """Whether nothing was added to the template but who it is from; outputs, order and white space don't count."""
    template_texts, work_texts = _texts(template), _texts(work)
    if squeeze("".join(template_texts)) == squeeze("".join(work_texts)):
        return True
    lines = (line for text in work_texts for line in text.split("\n") if not _HEADER.match(line.strip()))
    return not line_counts(lines) - line_counts(template_texts)


def common_lines(class_work: Iterable[Submission]) -> Set[str]:
    """Lines that more than half of a class wrote; none for less than three."""
    line_sets = [line_counts(_texts(work)).keys() for work in class_work if work.is_gradable]
    times = Counter(line for lines in line_sets for line in lines)
    return {line for line, number in times.items() if 2 * number > len(line_sets) > 2}


def with_equal_files_noted(class_work: Sequence[Submission]) -> list[Submission]:
    """With a remark on each that shares a file with classmates; not one that most have, or all: that was given."""
    file_sets = [set() if work.only_template else set(work.file_digests) for work in class_work]
    times = Counter(digest for digests in file_sets for digest in digests)
    shared_by_few = {digest for digest, count in times.items() if 1 < count <= max(_A_FEW, len(class_work) // 2)}
    return [
        replace(work, notes=(*work.notes, *(_equal_note(digest, times[digest]) for digest in sorted(digests))))
        for work, digests in zip(class_work, (digests & shared_by_few for digests in file_sets), strict=True)
    ]


def _equal_note(digest: str, count: int) -> str:
    return f"the same file is in {plural(count - 1, 'other submission')}, too (mark {digest[:6]})"


def copy_reason(
    work: Submission, rubric: Rubric, solution: Submission | None, template: Submission | None, common: Set[str]
) -> str:
    """Why it looks like a copy of the solution or the rubric: most of its own lines are theirs; "" if it doesn't."""
    template_lines = line_counts([rubric.instructions, *_texts(template)])
    own_lines, solution_lines = (
        {line for line in line_counts(_texts(source)) - template_lines if len(line) >= _LINE_CHARS}
        for source in (work, solution)
    )
    notes = {
        line for line in line_counts(criterion.guidance for criterion in rubric.criteria) if len(line) >= _NOTE_CHARS
    }
    shared_lines = own_lines & (notes | solution_lines)
    is_substantial = sum(NOTE_COUNTS if line in notes else 1 for line in shared_lines - common) >= MANY_LINES
    is_whole_solution = (
        2 * len(shared_lines) > len(own_lines)
        and len(own_lines & solution_lines) >= MOST_OF_THEIRS * len(solution_lines) > 0
    )
    if is_substantial and (is_whole_solution or len(shared_lines) >= MOST_OF_ITS_OWN * len(own_lines)):
        return (
            f"{len(shared_lines)} of {len(own_lines)} lines of its own are those of the solution or of the grading "
            "notes"
        )
    return ""


def _texts(work: Submission | None) -> list[str]:
    return [part.text for part in work.parts if part.kind != "output"] if work else []
