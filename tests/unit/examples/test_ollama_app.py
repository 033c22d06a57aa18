"""An app written for Ollama, with another OLLAMA_HOST and nothing else."""

import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.processes import ROOT, environment, serving

APP = ROOT / "examples" / "ollama_app.py"
MODEL = "tiny:1b"


@pytest.fixture
def url(tmp_path: Path) -> Iterator[str]:
    with serving(tmp_path, MODEL) as url:
        yield url


def app(url: str, folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    variables = environment(folder) | {"OLLAMA_HOST": url}
    command = [sys.executable, str(APP), *arguments]
    return subprocess.run(command, env=variables, cwd=folder, capture_output=True, text=True, timeout=60)


def test_an_app_written_for_ollama_needs_its_variable_and_nothing_else(url: str, tmp_path: Path) -> None:
    names = [f"{number}.py" for number in range(6)]
    for name in names:
        (tmp_path / name).write_text(f"def mean(values):\n    return sum(values) / len(values)  # {name}\n")
    done = app(url, tmp_path, MODEL, *names)
    assert done.returncode == 0, done.stderr
    *graded, summary = done.stdout.splitlines()
    assert [re.match(r"(\S+): ([0-5]) of 5, ", line)[1] for line in graded[: len(names)]] == names  # type: ignore[index]
    assert summary

    done = app(url, tmp_path, "llama3", names[0])
    assert (done.returncode, done.stderr) == (1, f"the server has no llama3; it has {MODEL}\n")
