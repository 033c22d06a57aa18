"""The documentation holds: links lead somewhere, every page is found from the README, commands are commands."""

import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from kvasir import cli

ROOT = Path(__file__).resolve().parents[3]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").glob("*.md"))]
LINK = re.compile(r"\]\(([^)#\s]+)(?:#[^)]*)?\)")
# Pages that are followed command by command.
TYPED = ["quickstart.md", "first_real_day.md", "deployment.md"]
PLACEHOLDERS = ("…", "|")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    targets = [link for link in LINK.findall(page.read_text("utf-8")) if "://" not in link]
    assert [link for link in targets if not (page.parent / link).exists()] == []


def test_every_page_is_found_from_the_readme() -> None:
    linked = {(ROOT / link).resolve() for link in LINK.findall((ROOT / "README.md").read_text("utf-8"))}
    assert [page.name for page in PAGES[1:] if page not in linked] == []


def typed(name: str) -> Iterator[list[str]]:
    """What follows `kvasir` in the code blocks of a page."""
    for block in re.findall(r"```\w*\n(.*?)```", (ROOT / "docs" / name).read_text("utf-8"), re.DOTALL):
        for line in block.splitlines():
            words = shlex.split(line, comments=True) if line.startswith("kvasir ") else []
            for part in " ".join(words).split(" && "):
                if part and not any(mark in part for mark in PLACEHOLDERS):
                    yield part.split()[1:]


@pytest.mark.parametrize("name", TYPED)
def test_what_a_page_says_to_type_is_a_command_with_its_options(name: str) -> None:
    commands = list(typed(name))
    assert len(commands) > 3
    for words in commands:
        command = cli.kvasir.commands[words[0]]
        assert isinstance(command, click.Command)
        command.make_context(words[0], words[1:])  # raises for an option that there is not
