"""A submission as the rest of the project has it: its parts, and what an instructor should know of them."""

from dataclasses import dataclass
from typing import Literal

from grading.submissions.visible import VisibleText, visible_text

PartKind = Literal["code", "text", "output"]


@dataclass(frozen=True, slots=True)
class SubmissionPart:
    """A piece of a submission. `location` is for people ("cell 3") and never holds a file's name."""

    kind: PartKind
    text: str
    location: str
    is_given_cell: bool = False  # its notebook calls it the teacher's, as the students were given it
    holds_only_given_text: bool = False  # every line is among what the class was given
    has_no_run: bool = False  # an output, where the notebook knows of no run that could have made it

    @property
    def visible(self) -> VisibleText:
        """The text that a reader of the rendered work sees."""
        return visible_text(self.text, self.kind)

    @property
    def seen_text(self) -> str:
        """Its text without what no reader sees."""
        return self.visible.shown(self.text)


@dataclass(frozen=True, slots=True)
class Submission:
    """One student's work, or a solution or template; while it is read, one of its files.

    `parts` is empty if `problem` says why it can't be read.
    `link` is the address, if there is nothing else: the work is there, and nobody has seen it.
    """

    name: str  # relative to the folder or zip; may hold a student's name: stays with the producer, never in a queue
    language: str  # "R", "Python", "SQL", …; "" if unknown
    parts: tuple[SubmissionPart, ...]
    images_left_out: int = 0
    notes: tuple[str, ...] = ()  # what an instructor should know
    problem: str = ""
    doubtful_notes: tuple[str, ...] = ()  # notes that a person must look at: work left out, or guessed
    only_template: bool = False  # nothing was added to what the students were given
    superseded_names: tuple[str, ...] = ()  # earlier copies of the same student's files, which are left out
    link: str = ""
    ignored_kinds: tuple[str, ...] = ()  # kinds of files in it that are nobody's work, as `venv`: not read
    file_digests: tuple[str, ...] = ()  # digests of its files that aren't tiny, to find equal ones

    @property
    def empty(self) -> bool:
        """Whether it is readable but shows a reader no code or text that the student wrote."""
        return not self.problem and (
            self.only_template or all(part.kind == "output" or not part.seen_text.strip() for part in self.parts)
        )

    @property
    def is_gradable(self) -> bool:
        """Whether there is something to ask a model about."""
        return not (self.problem or self.link or self.empty)
