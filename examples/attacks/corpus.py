"""Made-up attacks on a grader and made-up harmless homework, by language and by kind. All of it is written by hand."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True)
class Text:
    text: str
    language: str
    kind: str  # family of an attack, or kind of harmless text
    attack: bool


def read(folder: str) -> list[Text]:
    """The texts of `train` or `held_out`."""
    return [text for path in sorted((HERE / folder).glob("*.txt")) for text in _read(path)]


def _read(path: Path) -> Iterator[Text]:
    language, kind, attack = path.stem, "", False
    for line in path.read_text("utf-8").splitlines():
        if line.startswith("# language: "):
            language = line.removeprefix("# language: ")
        elif line.startswith("[") and line.endswith("]") and line[1:-1].startswith(("attack ", "harmless ")):
            sort, kind = line[1:-1].split()
            attack = sort == "attack"
        elif line:
            yield Text(line.replace("\\n", "\n"), language, kind, attack)
