"""The README says what is not known as plainly as what is."""

import re
from pathlib import Path
from typing import get_args

from grading.points import GradeState
from grading.report.grades import OUTCOMES

README = (Path(__file__).resolve().parents[3] / "README.md").read_text("utf-8")


def _rows(heading: str) -> list[list[str]]:
    """The first table below a heading, without its rule."""
    lines = README[README.index(f"## {heading}\n") :].splitlines()
    first = next(number for number, line in enumerate(lines) if line.startswith("| "))
    table = lines[first : first + next(n for n, line in enumerate(lines[first:]) if not line.startswith("|"))]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table if not line.startswith("|--")]


def test_what_is_not_measured_and_where_it_does_not_run_stands_before_the_first_command() -> None:
    first_lines = README[: README.index("make demo")]
    assert "No large model has been measured on a real class." in first_lines
    assert "Windows was never tried" in first_lines


def test_it_says_where_others_are_better() -> None:
    header, *rows = _rows("Is it for you?")
    assert header == ["better elsewhere", "take"]
    taken = " ".join(take for _when, take in rows)
    assert all(name in taken for name in ("nbgrader", "PrairieLearn", "vLLM", "by hand"))


def test_what_was_never_run_is_one_table() -> None:
    never = " ".join(row[0] for row in _rows("Never run"))
    for what in ("GPU", "Metal", "Windows", "RabbitMQ 3.13, 4.1", "containers", "a class of real students"):
        assert what in never


def test_the_states_are_those_of_the_files_and_the_terminals_own_words_are_explained() -> None:
    said = " ".join(README[README.index("Each submission ends as") :].split())
    states = re.findall(r"`([\w ]+)`", said[: said.index(";")])
    assert sorted(states) == sorted(get_args(GradeState))
    assert set(re.findall(r"`([\w ]+)`", said[: said.index("A grade that")])) == {*states, *OUTCOMES}
