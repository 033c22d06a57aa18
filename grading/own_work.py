"""Which text of a submission is the student's, and which the class was given. White space and case don't count."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence, Set
from dataclasses import replace

from grading.quotes import line_counts, squeeze
from grading.rubric.rubric import Rubric
from grading.submissions.reading import Submission
from grading.submissions.visible import visible_text
from producers.words import plural

# Fewer lines in common are no copy: everybody who is right writes the same few lines.
MANY_LINES = 6
# Where a task leaves little choice, half of a right answer is the solution's. A copy is more: this part of its own
# lines, or this part of the solution's.
MOST_OF_ITS_OWN, MOST_OF_THEIRS = 0.75, 0.9
# A line of the grading notes has no reason to be in a submission: one counts as this many lines of code.
NOTE_COUNTS = 3
_NOTE_CHARS = 25
_A_FEW = 3  # in a small class, this many may be most of it
_LINE_CHARS = 4  # shorter ones (`end`, `)`) are nobody's

# Only the student's own file says that a cell came from the teacher. It is believed for the class if at least so many
# students have the cell, and this share of those who have such cells at all.
_MIN_STUDENTS, _PART_OF_THEM = 2, 0.1

# A line that says whose work it is: in prose or a comment, or a constant as nbgrader's.
_PERSON_FIELD = (
    r"(?:(?:your|full|student|first|last|given)[ _-])*(?:names?|authors?|students?|id|e-?mail|date|collaborators?)"
)
_CONSTANT = r"[A-Z_]*(?:NAMES?|AUTHORS?|COLLABORATORS?|STUDENT_ID|EMAIL)"
_HEADER = re.compile(rf"(?:[#%/*>|\s_-]*(?i:{_PERSON_FIELD})[\s*_]*:|{_CONSTANT}\s*(?:=|<-)).{{0,120}}\Z")


def given_to_class(template: Submission | None, class_work: Iterable[Submission]) -> tuple[str, ...]:
    """The passages that the class was given to work in: the template's, and cells that several have from the teacher.

    A cell that one student alone has so counts for that student only (`SubmissionPart.is_given_cell`).
    """
    given_cells = [{part.text: None for part in work.parts if part.is_given_cell} for work in class_work]
    times = Counter(text for texts in given_cells for text in texts)
    min_count = max(_MIN_STUDENTS, _PART_OF_THEM * sum(map(bool, given_cells)))
    template_texts = [part.text for part in template.parts if part.kind != "output"] if template else []
    return (*template_texts, *(text for text, number in times.items() if number >= min_count))


def given_with_rubric(rubric: Rubric, given_passages: Sequence[str]) -> list[str]:
    """The given text, and what the rubric says to students."""
    return [rubric.instructions, *(criterion.title for criterion in rubric.criteria), *given_passages]


def mark_given(work: Submission, rubric: Rubric, given_passages: Sequence[str]) -> Submission:
    """With its parts marked that hold nothing but what the class was given, and whether it adds anything to that.

    A line of the rubric may be an answer (one of several to choose from): work is not empty because of it.
    """
    if work.empty or work.problem:
        return work
    given_lines = line_counts(given_with_rubric(rubric, given_passages)).keys()
    parts = tuple(
        replace(part, holds_only_given_text=True)
        if part.kind != "output" and line_counts([part.text]).keys() <= given_lines
        else part
        for part in work.parts
    )
    return replace(work, parts=parts, only_template=_adds_nothing(work, given_passages))


def _adds_nothing(work: Submission, given_passages: Sequence[str]) -> bool:
    """Whether nothing was added but who it is from; outputs, order and white space don't count."""
    if not given_passages and not any(part.is_given_cell for part in work.parts):
        return False
    own_source = "".join(part.text for part in work.parts if part.kind != "output" and not part.is_given_cell)
    if squeeze("".join(given_passages)) == squeeze(own_source):
        return True
    lines = (line for text in _own_texts(work) for line in text.split("\n") if not _HEADER.match(line.strip()))
    return not line_counts(lines) - _given_lines(given_passages)


def _given_lines(passages: Sequence[str]) -> Counter[str]:
    """Their lines as they are written, and as a reader sees them: of the students' work only these are compared."""
    return line_counts(passages) | line_counts(visible_text(text, "text").shown(text) for text in passages)


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
    work: Submission, rubric: Rubric, solution: Submission | None, given_passages: Sequence[str], common: Set[str]
) -> str:
    """Why it looks like a copy: most of the student's lines stand in solution or rubric. "" if it doesn't."""
    given_lines = _given_lines(given_with_rubric(rubric, given_passages))
    own_lines, solution_lines = (
        {line for line in line_counts(texts) - given_lines if len(line) >= _LINE_CHARS}
        for texts in (_own_texts(work), _texts(solution))
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
            f"{len(shared_lines)} of the student's {len(own_lines)} lines also stand in the solution or the grading "
            "notes"
        )
    return ""


def own_text(work: Submission) -> str:
    """All that a student wrote: no outputs, and no cells that were given."""
    return "\n".join(_own_texts(work))


def _own_texts(work: Submission) -> list[str]:
    return [part.seen_text for part in work.parts if part.kind != "output" and not part.is_given_cell]


def _texts(work: Submission | None) -> list[str]:
    return [part.seen_text for part in work.parts if part.kind != "output"] if work else []
