"""A submission as all other modules see it: its parts, and notes for the instructor."""

from dataclasses import dataclass
from typing import Literal

from grading.submissions.visible import VisibleText, visible_text

PartKind = Literal["code", "text", "output"]


@dataclass(frozen=True, slots=True)
class SubmissionPart:
    """A piece of a submission. `location` is for people ("cell 3") and never contains a file's name."""

    kind: PartKind
    text: str
    location: str
    is_given_cell: bool = False  # the notebook marks the cell as the teacher's, and the cell was not changed
    holds_only_given_text: bool = False  # all of its lines were given to the class
    has_no_run: bool = False  # the part is an output, but the notebook shows no run that could have made it

    @property
    def visible(self) -> VisibleText:
        """The parts of the text that a reader of the rendered work sees."""
        return visible_text(self.text, self.kind)

    @property
    def seen_text(self) -> str:
        """The text without what no reader sees."""
        return self.visible.shown(self.text)


@dataclass(frozen=True, slots=True)
class Submission:
    """One student's work, or a solution or template. While a submission is being read, also one of its files.

    `parts` is empty if `problem` says why it can't be read. `link` is an address, if nothing else was handed in: then
    nobody has seen the work behind it.
    """

    # The path inside the folder or zip. It can contain a student's name, so it stays with the producer and never gets
    # into a queue.
    name: str
    language: str  # "R", "Python", "SQL", …; "" if unknown
    parts: tuple[SubmissionPart, ...]
    images_left_out: int = 0
    notes: tuple[str, ...] = ()  # information for the instructor
    problem: str = ""
    # Notes that a person must look at, because work was left out or something was guessed.
    doubtful_notes: tuple[str, ...] = ()
    only_template: bool = False  # the student added nothing to the text that the class was given
    superseded_names: tuple[str, ...] = ()  # names of the student's earlier copies, which are left out
    link: str = ""
    # Kinds of files that were not read, because they are nobody's work, such as `venv`.
    ignored_kinds: tuple[str, ...] = ()
    file_digests: tuple[str, ...] = ()  # digests of the files, except tiny ones; equal files have equal digests

    @property
    def empty(self) -> bool:
        """Whether it is readable, but shows a reader no code or text that the student wrote."""
        return not self.problem and (
            self.only_template or all(part.kind == "output" or not part.seen_text.strip() for part in self.parts)
        )

    @property
    def is_gradable(self) -> bool:
        """Whether there is work about which a model can be asked."""
        return not (self.problem or self.link or self.empty)
