"""What a terminal of 80 columns shows: a line a person, and no name cut inside."""

import io

import pytest
from rich.console import Console

from kvasir import terminal

COLUMNS = ("submission", "state", "points", "remarks")
LONG_NAME = "María del Carmen Fernández-Castellanos de la Fuente"
GROUP = "Team Espresso (Ana Sobrino; Chloé van der Berg; Jean Luc de la Cruz; Zed Underhill; Quynh Silverbrook)"


@pytest.fixture
def screen(monkeypatch: pytest.MonkeyPatch) -> io.StringIO:
    written = io.StringIO()
    monkeypatch.setattr(terminal, "stdout", Console(file=written, width=80, force_terminal=True, color_system=None))
    return written


def shown(screen: io.StringIO, *names: str) -> list[str]:
    rows = [(name, "graded", "17 / 20", str(number)) for number, name in enumerate(names)]
    terminal.print_table(COLUMNS, rows, right=COLUMNS[2:])
    return [line.rstrip() for line in screen.getvalue().splitlines()]


def test_a_long_name_moves_the_figures_beside_it(screen: io.StringIO) -> None:
    lines = shown(screen, "Aldertree, Ada", LONG_NAME, "Birkenau, Bo", "x" * 90)

    assert len(lines) == 6
    assert {len(line) for line in lines[:4]} <= {*range(81)}
    assert lines[2].split(LONG_NAME)[1].startswith("  ")
    assert lines[2].endswith("17 / 20        1")
    assert lines[1].index("graded") == lines[3].index("graded")
    assert lines[4] == "x" * 90
    assert lines[5].split() == ["graded", "17", "/", "20", "3"]


def test_no_line_of_a_paragraph_ends_between_a_heading_and_its_text(screen: io.StringIO) -> None:
    columns = ("worker", "role", "model", "engine", "busy", "done", "tokens/s", "transfers KV")
    rows = [
        (
            "host.41234.9f2c01",
            "decode",
            "gemma3:27b-it-q4",
            "llamacpp on NVIDIA GB10",
            "4/4 paused",
            "1234",
            "123",
            "KV",
        )
    ]
    terminal.print_table(columns, rows, right=("busy", "done", "tokens/s"))
    lines = [line.rstrip() for line in screen.getvalue().splitlines()]
    assert not any(line.endswith(":") for line in lines)
    assert any("busy: 4/4 paused" in line for line in lines)


def test_the_members_of_a_group_are_named_and_none_is_cut(screen: io.StringIO) -> None:
    lines = shown(screen, "Aldertree, Ada", GROUP)

    assert max(map(len, lines)) <= 80
    for member in ("Ana Sobrino", "Chloé van der Berg", "Jean Luc de la Cruz", "Zed Underhill", "Quynh Silverbrook"):
        assert sum(member in line for line in lines) == 1


def test_a_list_of_names_breaks_between_them(screen: io.StringIO) -> None:
    names = [f"van der Berg, Jean Luc {number}" for number in range(20)]
    terminal.say(terminal.shortened("  handed in late: ", names), terminal.stdout)

    lines = screen.getvalue().splitlines()
    assert len(lines) == 2
    assert max(map(len, lines)) <= 80
    for line in lines:
        assert line.count("van der Berg") == line.count("Jean Luc")
