"""Programs of two versions: commits of this repository, each in an environment of its own, and this checkout."""

import os
import shutil
import subprocess
import sys
import venv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from tests.support.processes import ROOT, environment

PREVIOUS = "992a9c4"  # the first release
EARLIER = "809876f"  # message version 1, and plans of the first form
_PLACE = ROOT / ".venv/upgrade"  # goes with `make clean`


@dataclass(frozen=True, slots=True)
class Program:
    """A `kvasir` of some version."""

    name: str
    python: Path
    wheel: Path | None = None  # None: it runs from this checkout

    def command(self, *words: str) -> list[str]:
        """`kvasir` with these words."""
        return [str(self.python), "-m", "kvasir", *words]

    def environment(self, home: Path) -> dict[str, str]:
        """Of its processes."""
        variables = environment(home)
        return variables if self.wheel is None else variables | {"PYTHONPATH": ""}


TODAY = Program("today", Path(sys.executable))


def built(commit: str, extras: str = "") -> Program:
    """The program of a commit, from its wheel. Built once, and kept. Ends the process where the history lacks it."""
    place = _PLACE / commit
    if not list(place.glob("*.whl")):
        _check_known(commit)
        click.echo(f"building {commit} in {place}")
        shutil.rmtree(place, ignore_errors=True)
        (place / "source").mkdir(parents=True)
        archive = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, capture_output=True).stdout
        subprocess.run(["tar", "x", "-C", str(place / "source")], input=archive, check=True)
        built_wheel(place / "source", place)
    [wheel] = place.glob("*.whl")
    return Program(commit, environment_of(commit, f"{wheel}{extras}"), wheel)


def built_wheel(source: Path, place: Path) -> Path:
    """The wheel of a source tree."""
    _run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(place), str(source))
    shutil.rmtree(source / "build", ignore_errors=True)
    return next(place.glob("*.whl"))


def environment_of(name: str, requirement: str) -> Path:
    """The Python of a virtual environment of this name, which is made with this in it if it isn't there."""
    folder = _PLACE / name / "environment"
    if not (folder / "whole").exists():
        venv.create(folder, with_pip=False, symlinks=True)
        install(folder / "bin/python", requirement)
        (folder / "whole").touch()
    return folder / "bin/python"


def install(python: Path, *words: str) -> None:
    """pip's `install` into the environment of this Python."""
    _run(sys.executable, "-m", "pip", "--python", str(python), "install", "-q", *words)


def _check_known(commit: str) -> None:
    known = subprocess.run(["git", "cat-file", "-e", f"{commit}^{{commit}}"], cwd=ROOT, capture_output=True)
    if known.returncode:
        sys.exit(f"test-upgrade needs commit {commit} in the history: git fetch --unshallow")


def _run(*words: str, env: dict[str, str] | None = None) -> None:
    variables = {**os.environ, **(env or {}), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
    done = subprocess.run(words, capture_output=True, text=True, env=variables)
    if done.returncode:
        sys.exit(f"{' '.join(words)}\n{done.stderr[-3000:]}")


def output_of(program: Program, folder: Path, words: Sequence[str], codes: Sequence[int] = (0,)) -> str:
    """What a command of this program prints, to its end."""
    done = subprocess.run(program.command(*words), cwd=folder, env=program.environment(folder), capture_output=True)
    if done.returncode not in codes:
        raise AssertionError(f"{program.name}: kvasir {' '.join(words)} ended with {done.returncode}: {done.stderr!r}")
    return done.stdout.decode()
