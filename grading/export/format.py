"""An export format: one object beside the function that makes its file. The command, the desk and the docs read it."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from grading.export.final import ExportFile

Choices = Mapping[str, Any]  # the values chosen for a format's options, by option name


class Form(Protocol):
    """Form fields that the desk shows one below the other, each with a label.

    Each method returns the field's current value.
    """

    def file(self, label: str) -> bytes | None:
        """Return an uploaded CSV file, or None if there is none yet."""

    def text(self, label: str) -> str:
        """Return a line of text."""

    def flag(self, label: str) -> bool:
        """Return whether a box is ticked."""

    def one_of(self, label: str, choices: Sequence[str]) -> str:
        """Return one of a few choices. The first is chosen by default."""

    def column(self, label: str, columns: Sequence[str], suggestion: str | None) -> str | None:
        """Return a column of an uploaded file, or None if none is chosen yet."""


@dataclass(frozen=True, slots=True)
class ExportOption:
    """An option of a format: `flag` in the command, and `name` as an argument of the function that makes the file."""

    flag: str
    kind: Literal["file", "text", "flag", "choice"]
    help: str
    argument: str = ""  # if empty, the name is derived from the flag
    metavar: str | None = None
    choices: tuple[str, ...] = ()  # the possible values, if the kind is "choice"

    @property
    def name(self) -> str:
        """The name of the function's argument."""
        return self.argument or self.flag.lstrip("-").replace("-", "_")


@dataclass(frozen=True, slots=True)
class ExportFormat:
    """An export format.

    `make` is called with the batch's folder, `include_unreviewed`, and the chosen options. A file or a choice that was
    not given is left out; such a text is "", and such a flag False. A file is passed as its bytes.

    The names in `file_names` must match `producers.storage.private.kept_in`, so that `kvasir forget` finds the files.
    """

    name: str  # the format's name in `kvasir export --format` and in exports.jsonl
    title: str  # on the desk
    purpose: str  # a sentence
    file_names: tuple[str, ...]
    make: Callable[..., ExportFile]
    options: tuple[ExportOption, ...] = ()
    # Whether an export is recorded and compared with the last export of its kind.
    is_compared: bool = True
    # Shows the format's form on the desk. The function gets the names of the class's assignment, and returns the
    # choices, or None while a choice is missing. Without this function, the desk shows a field for each option.
    fields: Callable[[Form, Sequence[str]], Choices | None] | None = None

    def choices_from(self, form: Form, names: Sequence[str]) -> Choices | None:
        """Return the choices made on the desk, or None while one is missing. Raises ExportError."""
        if self.fields:
            return self.fields(form, names)
        choices = {option.name: _field(form, option) for option in self.options}
        return {name: value for name, value in choices.items() if value is not None}


def _field(form: Form, option: ExportOption) -> bytes | str | bool | None:
    if option.kind == "choice":
        return form.one_of(option.help, option.choices)
    ask: Callable[[str], bytes | str | bool | None] = getattr(form, option.kind)
    return ask(option.help)
