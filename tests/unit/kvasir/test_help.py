"""Help that helps: every command has an example that it understands, nothing is cut, completion completes."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from kvasir import cli
from tests.support.processes import ROOT, environment


def commands(group: click.Group, before: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for name, command in group.commands.items():
        yield (*before, name)
        if isinstance(command, click.Group):
            yield from commands(command, (*before, name))


COMMANDS = sorted(commands(cli.kvasir))


def shown(capsys: pytest.CaptureFixture[str], *words: str) -> str:
    assert cli.run_command([*words, "--help"]) == 0
    return capsys.readouterr().out


@pytest.mark.parametrize("words", COMMANDS, ids=" ".join)
def test_a_command_shows_an_example_that_it_understands(
    capsys: pytest.CaptureFixture[str], words: tuple[str, ...]
) -> None:
    text = shown(capsys, *words)
    assert "Example:" in text
    lines = text.partition("Example:")[2].strip().splitlines()
    assert any(line.split("kvasir ", 1)[1].find(words[-1]) >= 0 for line in lines)
    for line in lines:
        typed, _, _file = line.partition(" > ")  # the shell writes stdout to that file, and the command never sees it
        arguments = shlex.split(typed)[1:]
        with cli.kvasir.make_context("kvasir", arguments) as context:
            group: click.Group = cli.kvasir
            left = [*context._protected_args, *context.args]
            while True:
                _, command, left = group.resolve_command(context, left)
                assert command is not None
                if not isinstance(command, click.Group) or (command.invoke_without_command and not left):
                    break
                group = command
            command.make_context(command.name, left, parent=context).close()


def test_no_summary_is_cut(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    for words in ((), ("dead",)):
        text = shown(capsys, *words)
        summaries = text.partition("Commands:")[2]
        assert "..." not in summaries
        assert "grade" in text or words


def test_one_documented_line_gives_completion(tmp_path: Path) -> None:
    line = 'eval "$(_KVASIR_COMPLETE=bash_source kvasir)"'
    assert line in (ROOT / "docs/tutorial/first_evening.md").read_text("utf-8")
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    program = bin_folder / "kvasir"
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m kvasir "$@"\n', "utf-8")
    program.chmod(0o755)
    script = f"""{line}
COMP_WORDS=(kvasir gr) COMP_CWORD=1
$(complete -p kvasir | sed 's/.*-F \\([^ ]*\\).*/\\1/') kvasir gr kvasir
echo "${{COMPREPLY[@]}}"
"""
    env = environment(tmp_path) | {"PATH": f"{bin_folder}{os.pathsep}{os.environ['PATH']}"}
    done = subprocess.run(["bash", "-c", script], env=env, cwd=tmp_path, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == ["grade"], done.stderr


def test_help_says_the_line_for_completion(capsys: pytest.CaptureFixture[str]) -> None:
    assert re.search(r'^ *eval "\$\(_KVASIR_COMPLETE=bash_source kvasir\)"$', shown(capsys), re.MULTILINE)
