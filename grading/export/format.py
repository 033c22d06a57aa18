"""What an export format is: one object beside the function that makes its file, read by command, desk and docs."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from grading.export.final import ExportFile

Choices = Mapping[str, Any]  # the options chosen for a format, by name


class Form(Protocol):
    """Fields that the desk shows one below the other, each with its label; each method gives what is in it now."""

    def file(self, label: str) -> bytes | None:
        """An upload (CSV); None as long as there is none."""

    def text(self, label: str) -> str:
        """A line of text."""

    def flag(self, label: str) -> bool:
        """A box to tick."""

    def one_of(self, label: str, choices: Sequence[str]) -> str:
        """One of a few; at first the first."""

    def column(self, label: str, columns: Sequence[str], suggestion: str | None) -> str | None:
        """A column of an upload; None as long as none is chosen."""


@dataclass(frozen=True, slots=True)
class ExportOption:
    """An option of a format: `flag` in the command, and the argument `name` of the function that makes the file."""

    flag: str
    kind: Literal["file", "text", "flag", "choice"]
    help: str
    argument: str = ""  # "": as the flag is called
    metavar: str | None = None
    choices: tuple[str, ...] = ()  # of a choice

    @property
    def name(self) -> str:
        """The name of the function's argument."""
        return self.argument or self.flag.lstrip("-").replace("-", "_")


@dataclass(frozen=True, slots=True)
class ExportFormat:
    """One format.

    `make` is called with the batch's folder, `include_unreviewed`, and what was chosen for the options. An option that
    was not given is left out, a file is its bytes.
    """

    name: str  # the name in `kvasir export --format` and in exports.jsonl
    title: str  # on the desk
    purpose: str  # a sentence
    file_names: tuple[str, ...]
    make: Callable[..., ExportFile]
    options: tuple[ExportOption, ...] = ()
    is_compared: bool = True  # with the last export of its kind, and then noted as one
    # What the desk asks, given the names of the assignment: the choices, or None as long as something is missing. A
    # format without one is asked for each of its options.
    fields: Callable[[Form, Sequence[str]], Choices | None] | None = None

    def choices_from(self, form: Form, names: Sequence[str]) -> Choices | None:
        """The choices on the desk; None as long as one is missing. Raises ExportError."""
        if self.fields:
            return self.fields(form, names)
        choices = {option.name: _field(form, option) for option in self.options}
        return {name: value for name, value in choices.items() if value is not None}


def _field(form: Form, option: ExportOption) -> bytes | str | bool | None:
    if option.kind == "choice":
        return form.one_of(option.help, option.choices)
    ask: Callable[[str], bytes | str | bool | None] = getattr(form, option.kind)
    return ask(option.help)
