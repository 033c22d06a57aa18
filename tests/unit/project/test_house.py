"""The plan of the house holds: import arrows, the list of rooms, the Makefile's targets, scripts in plain shell."""

import importlib.metadata
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from monitoring import logs
from tests.support.processes import ROOT
from tests.support.rooms import ROOMS

DISTRIBUTION = "kvasir-inference"
TARGETS = re.findall(r"^([a-z-]+):.*## ", (ROOT / "Makefile").read_text(), re.MULTILINE)


def _run(*command: str, cwd: Path = ROOT) -> str:
    done = subprocess.run(command, cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 0, f"{' '.join(command)}\n{done.stdout}\n{done.stderr}"
    return done.stdout


def test_imports_follow_the_arrows() -> None:
    lint = Path(sys.executable).with_name("lint-imports")
    assert " 0 broken" in _run(str(lint), "--no-cache")


def test_the_arrows_cover_every_room() -> None:
    contracts = (ROOT / ".importlinter").read_text()
    roots = contracts.split("root_packages =")[1].split("include_external")[0].split()
    assert sorted(roots) == sorted(ROOMS)


def test_every_room_logs_at_the_level_asked_for() -> None:
    assert sorted(logs.ROOMS) == sorted(ROOMS)


def test_the_wheel_gets_every_room_and_each_says_that_it_is_typed() -> None:
    assert sorted(path.parent.name for path in ROOT.glob("*/py.typed")) == sorted(ROOMS)


def test_git_ignores_no_module_and_every_folder_of_them_is_a_package() -> None:
    """`submissions/` in .gitignore, which keeps students' work out, would keep the room of that name out too."""
    inside = [*ROOMS, "tests", "benchmarks", "examples"]
    ignored = _run("git", "ls-files", "--others", "--ignored", "--exclude-standard", *inside).splitlines()
    modules = [path for name in ROOMS for path in (ROOT / name).rglob("*.py")]

    assert [name for name in ignored if name.endswith(".py")] == []
    assert {path.parent for path in modules} == {path.parent for path in modules if path.name == "__init__.py"}


def test_no_dependency_of_ours_owns_one_of_our_names() -> None:
    """This environment holds what pyproject.toml asks for: one of those could bring a package named `messages`."""
    owners = importlib.metadata.packages_distributions()
    strangers = {name: set(owners.get(name, [])) - {DISTRIBUTION} for name in ROOMS}
    assert {name: others for name, others in strangers.items() if others} == {}


@pytest.mark.parametrize("target", TARGETS)
def test_make_knows_what_to_do_for(target: str, tmp_path: Path) -> None:
    folder = tmp_path / "a fresh clone"
    folder.mkdir()
    for name in ("Makefile", "pyproject.toml"):
        shutil.copy(ROOT / name, folder)
    assert _run("make", "--dry-run", target, cwd=folder).strip()


def test_make_help_names_every_target() -> None:
    listed = _run("make", "help")
    declared = re.search(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    assert declared is not None
    assert [name for name in declared[1].split() if f"make {name} " not in listed] == []


@pytest.mark.parametrize("script", sorted(path.name for path in (ROOT / "scripts").iterdir() if path.is_file()))
def test_scripts_are_plain_shell(script: str) -> None:
    assert (ROOT / "scripts" / script).read_text().startswith("#!/bin/sh\n")
    _run("sh", "-n", str(ROOT / "scripts" / script))


def test_a_machine_without_python_is_told_one_command(tmp_path: Path) -> None:
    tools = tmp_path / "bin"
    tools.mkdir()
    for name in ("sh", "cat", "uname"):
        (tools / name).symlink_to(shutil.which(name) or name)
    done = subprocess.run(
        [str(tools / "sh"), str(ROOT / "scripts/find-python")],
        env={"PATH": str(tools)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 1
    assert "Python 3.11 or newer" in done.stderr
    assert "PYTHON=/path/to/python3" in done.stderr
