"""What README.md and the tutorial say to type, typed in their order: each line of their code blocks, in a shell.

The model of the pages is the demo's, where Ollama would have put it. A line of a page is run here, or ELSEWHERE names
the test that runs it, or says why none can.
"""

import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from tests.support.homework import EXAMPLE
from tests.support.processes import ROOT, SIMULATED_MODEL, Cluster, environment

pytestmark = [pytest.mark.system, pytest.mark.gate]  # some forty processes

README = (ROOT / "README.md").read_text("utf-8")
TUTORIAL = (ROOT / "docs/tutorial/first_evening.md").read_text("utf-8")
PAGES = {"README.md": README.partition("## On a cluster")[0], "first_evening.md": TUTORIAL}
MODEL = "qwen3-coder:30b"
ELSEWHERE = {
    "make demo": "tests/acceptance/test_demo.py",
    "make ui": "tests/system/test_desk_evening.py",
    "kvasir ui results/hw4": "tests/system/test_desk_evening.py",
    "uv tool run --from '.[llamacpp]' kvasir demo": "tests/acceptance/test_demo_installed.py",
    "pipx run --spec '.[llamacpp]' kvasir demo": "tests/acceptance/test_demo_installed.py",
    'eval "$(_KVASIR_COMPLETE=bash_source kvasir)"': "tests/unit/kvasir/test_help.py",
    "make services": "tests/integration/test_services.py",
    "export KVASIR_BROKER_URL=… KVASIR_STORE_URL=…": "tests/acceptance/test_commands_over_cluster.py",
    ". .venv/bin/activate": "the environment is the one that runs the tests",
    f"ollama pull {MODEL}": "Ollama is somebody else's, and the model has 19 GB",
}
# What the tutorial says that the reader will see.
SEEN = {
    "kvasir doctor": "0 errors",
    f"kvasir doctor --try {MODEL}": "verified     1 of",
    "--limit 3": "3 submissions: 3 graded",
    "--dry-run": "1 can't be read",
}
CLASS = ("brookside", "cloverfield", "emberly", "fairweather", "larkspur")  # one of them can't be read
ALL_IS_NOT_GRADED = ("kvasir grade", "kvasir export")  # they end with 1 then, as the pages say
GRADED_CELL = {
    "cell_type": "code",
    "execution_count": None,
    "metadata": {"nbgrader": {"grade": True, "grade_id": "joins", "points": 4, "solution": True, "locked": False}},
    "outputs": [],
    "source": "# YOUR CODE HERE",
}


def lines(page: str) -> Iterator[str]:
    """What its blocks without a language say to type, without remarks."""
    for language, block in re.findall(r"^ *```(\w*)\n(.*?)^ *```", page, re.MULTILINE | re.DOTALL):
        for line in block.splitlines() if not language else ():
            if typed := re.split(r"\s{2,}# ", line.strip())[0]:
                yield typed


@pytest.fixture
def course(tmp_path: Path) -> Path:
    """The folder of a course: its class, its kvasir.toml from the tutorial, and `kvasir` for the shell."""
    for name in ("rubric.yaml", "solution.ipynb", "gradebook.csv"):
        shutil.copy(EXAMPLE / name, tmp_path)
    for path in (EXAMPLE / "submissions").iterdir():
        if path.name.startswith(CLASS):
            (tmp_path / "submissions").mkdir(exist_ok=True)
            shutil.copy(path, tmp_path / "submissions")
    notebook = {"cells": [GRADED_CELL], "metadata": {}, "nbformat": 4, "nbformat_minor": 5}
    (tmp_path / "homework.ipynb").write_text(json.dumps(notebook), "utf-8")
    (settings,) = re.findall(r"```toml\n(.*?)```", TUTORIAL, re.DOTALL)
    (tmp_path / "kvasir.toml").write_text(settings, "utf-8")
    _pull(ROOT / "examples/model/kvasir-demo.gguf", tmp_path / "ollama")
    program = tmp_path / "bin/kvasir"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -m kvasir "$@"\n', "utf-8")
    program.chmod(0o755)
    return tmp_path


def _pull(weights: Path, folder: Path) -> None:
    """What `ollama pull` leaves behind."""
    digest = hashlib.sha256(weights.read_bytes()).hexdigest()
    (folder / "blobs").mkdir(parents=True)
    (folder / f"blobs/sha256-{digest}").symlink_to(weights)
    layer = {
        "mediaType": "application/vnd.ollama.image.model",
        "digest": f"sha256:{digest}",
        "size": weights.stat().st_size,
    }
    name, _, tag = MODEL.partition(":")
    manifest = folder / "manifests/registry.ollama.ai/library" / name / tag
    manifest.parent.mkdir(parents=True)
    manifest.write_text(json.dumps({"layers": [layer]}), "utf-8")


def _type(line: str, folder: Path, variables: Mapping[str, str]) -> tuple[int, str]:
    """The exit code of a line, and what it printed; a question is answered with yes."""
    done = subprocess.run(
        ["sh", "-c", line], env=dict(variables), cwd=folder, input="y\n", capture_output=True, text=True, timeout=240
    )
    assert "Traceback" not in done.stderr, done.stderr
    return done.returncode, done.stdout + done.stderr


def _variables(folder: Path) -> dict[str, str]:
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    return environment(folder) | {"PATH": path, "OLLAMA_MODELS": str(folder / "ollama")}


@pytest.mark.parametrize("page", PAGES)
def test_the_commands_of_a_page_do_what_it_says(page: str, course: Path) -> None:
    typed = [line for line in lines(PAGES[page]) if line not in ELSEWHERE]
    assert len(typed) > 3
    for line in typed:
        code, output = _type(line, course, _variables(course))
        assert code in ((0, 1) if line.startswith(ALL_IS_NOT_GRADED) else (0,)), f"{line}\n{output}"
        said = [words for mark, words in SEEN.items() if mark == line or (mark.startswith("--") and mark in line)]
        assert all(words in output for words in said), f"{line}\n{output}"
        if "> rubric.yaml" in line:
            assert "joins" in (course / "rubric.yaml").read_text("utf-8")
            shutil.copy(EXAMPLE / "rubric.yaml", course)  # as the reader has written it
    assert not (course / "results/hw4").exists()  # the last command deletes it


def test_the_tutorials_lines_of_python_do_what_they_say(course: Path) -> None:
    (script,) = re.findall(r"```python\n(.*?)```", TUTORIAL, re.DOTALL)
    done = subprocess.run([sys.executable, "-c", script], env=_variables(course), cwd=course, timeout=240)
    assert done.returncode == 0
    assert (course / "grades.csv").read_text("utf-8").count("graded") >= 4


def test_the_readmes_commands_over_a_cluster_do_what_it_says(
    course: Path, broker_url: str, store_url: str, model_name: str
) -> None:
    page = README.partition("## On a cluster")[2].partition("\n## ")[0].replace(MODEL, model_name)
    typed = [line for line in lines(page) if line not in ELSEWHERE]
    services = {"KVASIR_BROKER_URL": broker_url, "KVASIR_STORE_URL": store_url}
    with Cluster(course, broker_url, store_url, {model_name: SIMULATED_MODEL}) as cluster:
        (course / "kvasir.toml").write_text(cluster.config.read_text("utf-8"), "utf-8")
        for line in typed:
            words = shlex.split(line)
            if words[1] in ("prefill-worker", "decode-worker"):
                assert words[2:4] == ["--model", model_name]
                cluster.worker("prefill" if words[1] == "prefill-worker" else "decode", *words[3:])
                continue
            code, output = _type(line, course, _variables(course) | services)
            assert code == (1 if words[1] == "watch" else 0), f"{line}\n{output}"  # a file of the class can't be read
    assert (course / "results/hw5/grades.csv").read_text("utf-8").count("graded") >= 4


def test_a_line_that_is_run_elsewhere_stands_on_a_page_and_its_test_exists() -> None:
    there = {*lines(README), *lines(TUTORIAL)}
    assert set(ELSEWHERE) <= there
    tests = [where for where in ELSEWHERE.values() if where.startswith("tests/")]
    assert [name for name in tests if not (ROOT / name).is_file()] == []
