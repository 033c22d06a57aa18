"""Tells a student's own text from text that the class was given. White space and case don't count."""

import re
from collections import Counter
from collections.abc import Iterable, Sequence, Set
from dataclasses import replace

from grading.quotes import line_counts, squeeze
from grading.rubric.rubric import Rubric
from grading.submissions.reading import Submission
from grading.submissions.visible import visible_text
from producers.words import plural

# Fewer equal lines than this do not suggest copying, because all right answers share a few lines.
MANY_LINES = 6
# If there are only a few ways to solve a task, about half of the lines of a right answer are also in the solution. Work
# looks like a copy only if it shares more: at least the fraction MOST_OF_ITS_OWN of the student's lines, or at least
# the fraction MOST_OF_THEIRS of the solution's lines.
MOST_OF_ITS_OWN, MOST_OF_THEIRS = 0.75, 0.9
# A line from the grading notes counts as much as this many lines of code, because students never saw the notes.
NOTE_COUNTS = 3
_NOTE_CHARS = 25
_A_FEW = 3  # if at most this many students have a file, it can be a copy, even in a small class
_LINE_CHARS = 4  # shorter lines, such as `end` or `)`, occur in everyone's work

# A notebook itself says which cells came from the teacher, and a student can change that. So a cell counts as given to
# the class only if enough students have it: at least _MIN_STUDENTS, and at least the share _PART_OF_THEM of those
# students whose notebooks have teacher's cells.
_MIN_STUDENTS, _PART_OF_THEM = 2, 0.1

# A line that names the author of the work: in prose, in a comment, or as a constant (nbgrader).
_PERSON_FIELD = (
    r"(?:(?:your|full|student|first|last|given)[ _-])*(?:names?|authors?|students?|id|e-?mail|date|collaborators?)"
)
_CONSTANT = r"[A-Z_]*(?:NAMES?|AUTHORS?|COLLABORATORS?|STUDENT_ID|EMAIL)"
_HEADER = re.compile(rf"(?:[#%/*>|\s_-]*(?i:{_PERSON_FIELD})[\s*_]*:|{_CONSTANT}\s*(?:=|<-)).{{0,120}}\Z")


def given_to_class(template: Submission | None, class_work: Iterable[Submission]) -> tuple[str, ...]:
    """Return the text that the class was given to start from.

    This is the template's text, and teacher's cells that several students have. A teacher's cell that only one student
    has counts for that student only (`SubmissionPart.is_given_cell`).
    """
    given_cells = [{part.text: None for part in work.parts if part.is_given_cell} for work in class_work]
    times = Counter(text for texts in given_cells for text in texts)
    min_count = max(_MIN_STUDENTS, _PART_OF_THEM * sum(map(bool, given_cells)))
    template_texts = [part.text for part in template.parts if part.kind != "output"] if template else []
    return (*template_texts, *(text for text, number in times.items() if number >= min_count))


def given_with_rubric(rubric: Rubric, given_passages: Sequence[str]) -> list[str]:
    """Return the given text, and the rubric's text for students."""
    return [rubric.instructions, *(criterion.title for criterion in rubric.criteria), *given_passages]


def mark_given(work: Submission, rubric: Rubric, given_passages: Sequence[str]) -> Submission:
    """Mark the parts that hold only text that the class was given, and whether the work adds anything to it.

    A line of the rubric may be an answer, if students choose one of several. So the rubric's lines don't make work
    empty.
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
    """Whether a student added nothing except a name. Outputs, order and white space don't count."""
    if not given_passages and not any(part.is_given_cell for part in work.parts):
        return False
    own_source = "".join(part.text for part in work.parts if part.kind != "output" and not part.is_given_cell)
    if squeeze("".join(given_passages)) == squeeze(own_source):
        return True
    lines = (line for text in _own_texts(work) for line in text.split("\n") if not _HEADER.match(line.strip()))
    return not line_counts(lines) - _given_lines(given_passages)


def _given_lines(passages: Sequence[str]) -> Counter[str]:
    """Return the lines of given text, both as written and as a reader sees them.

    Students' lines are compared as seen.
    """
    return line_counts(passages) | line_counts(visible_text(text, "text").shown(text) for text in passages)


def common_lines(class_work: Iterable[Submission]) -> Set[str]:
    """Return the lines that more than half of a class wrote; an empty set for fewer than three submissions."""
    line_sets = [line_counts(_texts(work)).keys() for work in class_work if work.is_gradable]
    times = Counter(line for lines in line_sets for line in lines)
    return {line for line, number in times.items() if 2 * number > len(line_sets) > 2}


def with_equal_files_noted(class_work: Sequence[Submission]) -> list[Submission]:
    """Add a remark to each submission that shares a file with a few classmates.

    A file that most of the class has was given to them, and is not remarked on.
    """
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
    """Return why the work looks like a copy, or "": most of its lines are also in the solution or the rubric."""
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
    """Return all that a student wrote, without outputs and without cells that were given."""
    return "\n".join(_own_texts(work))


def _own_texts(work: Submission) -> list[str]:
    return [part.seen_text for part in work.parts if part.kind != "output" and not part.is_given_cell]


def _texts(work: Submission | None) -> list[str]:
    return [part.seen_text for part in work.parts if part.kind != "output"] if work else []
