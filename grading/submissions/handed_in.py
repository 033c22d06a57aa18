"""Which files make one submission: top-level files and folders, and what one student handed in more than once.

Of several files of one kind by one student the latest counts; files of different kinds are graded together, because an
LMS hands out each attachment by itself. Nothing is dropped in silence: the submission names what it replaces.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from grading.submissions import archives
from grading.submissions.archives import ArchiveEntry, Unreadable
from grading.submissions.lms_names import age, claim_of, same_student, student_id


@dataclass(slots=True)
class FileGroup:
    """The entries of one submission."""

    name: str
    is_folder: bool = False
    entries: list[ArchiveEntry] = field(default_factory=list)
    extra_files: int = 0  # files beside the first that other attachments brought
    superseded_names: list[str] = field(default_factory=list)

    def matches(self, query: str) -> bool:
        """Whether a person who writes `query` means this one."""
        name = PurePosixPath(self.name).name
        names = (self.name, name, name if self.is_folder else PurePosixPath(name).stem)
        return query in names or query == student_id(name)

    def check(self) -> None:
        """Raises Unreadable if there are too many files, or two that can't be told apart."""
        if len(self.entries) > archives.MAX_MEMBERS:
            raise Unreadable(archives.too_many_files())
        paths = [entry.path for entry in self.entries if not entry.is_folder]
        if len(set(paths)) < len(paths):
            raise Unreadable("two files have the same name; rename one")


def resolve(groups: Iterable[FileGroup], student_of: Callable[[str], str] = same_student) -> list[FileGroup]:
    """One group a student, sorted by name, each with what it replaces.

    `student_of` says of a name what all have in common that one student handed in.
    """
    by_student: dict[str, list[FileGroup]] = {}
    for group in groups:
        by_student.setdefault(student_of(group.name), []).append(group)
    return sorted(
        (_merge_groups(student_groups) for student_groups in by_student.values()), key=lambda group: group.name
    )


def _merge_groups(student_groups: list[FileGroup]) -> FileGroup:
    """What counts of one student's work."""
    latest: dict[str, FileGroup] = {}
    earlier_names: list[str] = []
    for group in sorted(student_groups, key=lambda group: age(group.name)):
        kind = _kind(group)
        if kind in latest:
            earlier_names.append(latest[kind].name)
        latest[kind] = group
    latest_groups = list(latest.values())
    if len(latest_groups) == 1:
        latest_groups[0].superseded_names = earlier_names
        return latest_groups[0]
    entries = [entry for group in latest_groups for entry in group.entries]
    newest = max(latest_groups, key=lambda group: age(group.name))
    return FileGroup(
        newest.name, is_folder=True, entries=entries, extra_files=len(latest_groups) - 1, superseded_names=earlier_names
    )


def _kind(group: FileGroup) -> str:
    """What replaces what: a file one of its kind, a Moodle folder one of its plugin."""
    if group.is_folder:
        claim = claim_of(group.name)
        return claim.plugin if claim and claim.plugin else "/"
    return PurePosixPath(group.name).suffix.lower()
