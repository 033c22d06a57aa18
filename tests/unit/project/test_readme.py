"""The README says what is not known as plainly as what is."""

import re
from pathlib import Path
from typing import get_args

from grading.points import GradeState
from grading.report.grades import OUTCOMES

README = (Path(__file__).resolve().parents[3] / "README.md").read_text("utf-8")


def test_what_is_not_measured_stands_before_the_first_command() -> None:
    assert (
        "How good are the grades with a real model?** Large ones have not been measured."
        in README[: README.index("make demo")]
    )


def test_it_is_compared_with_what_people_would_use_instead_and_loses_somewhere() -> None:
    table = README[README.index("## Is it for you?") : README.index("## Never run")]
    rows = [
        [cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line.startswith("| ")
    ]
    assert [cell for cell in rows[0] if cell] == ["by hand", "nbgrader", "PrairieLearn", "vLLM run-batch", "Kvasir"]
    assert sum(row[-1].startswith(("no", "**no", "**not")) for row in rows) >= 3


def test_what_was_never_run_is_one_table() -> None:
    table = README[README.index("## Never run") : README.index("## Documentation")]
    for what in ("GPU", "Metal", "RabbitMQ 3.13, 4.1", "containers", "a class of real students"):
        assert what in table


def test_the_states_are_those_of_the_files_and_the_terminals_own_word_is_explained() -> None:
    said = " ".join(README[README.index("Each submission is") :].split())
    states = re.findall(r"`([\w ]+)`", said[: said.index(";")])
    assert sorted(states) == sorted(get_args(GradeState))
    assert set(re.findall(r"`([\w ]+)`", said[: said.index("A grade that")])) == {*states, *OUTCOMES}
