"""Decides which files make one submission: all of a student's top-level files and folders.

An LMS's download holds the current attempt, and each of its attachments is work. If a file was handed in more than once
(`hw.R`, and `hw (1).R` as browsers name a second download), the latest copy counts. This is a guess, so a person is
asked.
"""

import unicodedata
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from grading.submissions import archives
from grading.submissions.archives import ArchiveEntry, Unreadable
from grading.submissions.lms_names import age, same_student, student_id
from grading.submissions.submission import Submission
from producers.words import plural


@dataclass(slots=True)
class FileGroup:
    """The entries of one submission."""

    name: str
    is_folder: bool = False
    entries: list[ArchiveEntry] = field(default_factory=list)
    extra_files: int = 0  # number of files from this student's other attachments
    superseded_names: list[str] = field(default_factory=list)

    def matches(self, query: str) -> bool:
        """Whether a person who writes `query` means this submission."""
        name = PurePosixPath(self.name).name
        names = (self.name, name, name if self.is_folder else PurePosixPath(name).stem)
        return query in names or query == student_id(name)

    def check(self) -> None:
        """Raise Unreadable if there are too many files, or two with the same name."""
        if sum(not entry.ignored_kind for entry in self.entries) > archives.MAX_MEMBERS:
            raise Unreadable(archives.too_many_files())
        paths = [entry.path for entry in self.entries if not entry.is_folder]
        if len(set(paths)) < len(paths):
            raise Unreadable("two files have the same name; rename one of the files")


def resolve(
    groups: Iterable[FileGroup],
    readability: Callable[[FileGroup], int],
    student_of: Callable[[str], str] = same_student,
) -> list[FileGroup]:
    """Return one group for each student, sorted by name, with the names of replaced copies.

    `readability`: of a student's groups, the newest of the most readable ones names the submission. `student_of`
    returns the same key for all names of one student.
    """
    by_student: dict[str, list[FileGroup]] = {}
    for group in groups:
        by_student.setdefault(student_of(group.name), []).append(group)
    merged_groups = (_merge_groups(student_groups, readability) for student_groups in by_student.values())
    return sorted(merged_groups, key=lambda group: group.name)


def _merge_groups(student_groups: list[FileGroup], readability: Callable[[FileGroup], int]) -> FileGroup:
    """Merge one student's files into one group. Only the latest of several copies counts."""
    copies_by_name: dict[str, list[FileGroup]] = {}
    for group in sorted(student_groups, key=lambda group: age(group.name)):
        copies_by_name.setdefault(_without_copy_number(group.name), []).append(group)
    latest_groups = [copies[-1] for copies in copies_by_name.values()]
    earlier_names = [group.name for copies in copies_by_name.values() for group in copies[:-1]]
    if len(latest_groups) == 1:
        latest_groups[0].superseded_names = earlier_names
        return latest_groups[0]
    newest = max(latest_groups, key=lambda group: (readability(group), age(group.name)))
    return FileGroup(
        newest.name,
        is_folder=True,
        entries=[entry for group in latest_groups for entry in group.entries],
        extra_files=len(latest_groups) - 1,
        superseded_names=earlier_names,
    )


def _without_copy_number(name: str) -> str:
    """Return the name that copies of one file share: the student's file name without the number in brackets."""
    attachment, copy_number, _ = age(name)
    own_name = name.partition(f"_{attachment}_")[2] if attachment else ""
    path = PurePosixPath(unicodedata.normalize("NFC", own_name or name))
    return path.stem.removesuffix(f"({copy_number})").rstrip() + path.suffix


def ignored_files_sentence(submissions: Iterable[Submission]) -> str:
    """Return one sentence about the class's files that are nobody's work, or ""."""
    counts = Counter(kind for submission in submissions for kind in submission.ignored_kinds)
    kinds = [f"{kind} (in {plural(count, 'submission')})" for kind, count in sorted(counts.items())]
    return f"Not the students' own, so not read: {', '.join(kinds)}" if kinds else ""
