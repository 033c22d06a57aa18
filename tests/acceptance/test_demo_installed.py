"""`kvasir demo`: the first command that anybody types, from a wheel, in a terminal, in a folder of their own."""

import json
import re
import shutil
import subprocess
import sys
import venv
from pathlib import Path

import pytest

from tests.support.processes import ROOT, environment
from tests.support.pty import CTRL_C, Terminal

pytestmark = pytest.mark.system

LAST_WORDS = r"16 submissions: 14 graded, 1 empty, 1 unreadable; (\d+) needs? review"


def run(*words: str, cwd: Path) -> str:
    done = subprocess.run(words, cwd=cwd, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{words}\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}"
    return done.stdout


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An environment with the wheel and its extra, far from the repository."""
    folder = tmp_path_factory.mktemp("installed")
    checkout = folder / "checkout"
    kept = run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=ROOT).splitlines()
    for name in kept:
        if (ROOT / name).is_file():
            (checkout / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, checkout / name)
    run(sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", str(folder), str(checkout), cwd=folder)
    shutil.rmtree(checkout)
    venv.create(folder / "venv", with_pip=False, symlinks=True)
    python, wheel = folder / "venv/bin/python", next(folder.glob("*.whl"))
    run(sys.executable, "-m", "pip", "--python", str(python), "install", "-q", f"{wheel}[llamacpp]", cwd=folder)
    return folder / "venv"


def files_of(folder: Path) -> dict[Path, int]:
    return {path: path.stat().st_mtime_ns for path in folder.rglob("*") if "__pycache__" not in path.parts}


def test_the_installed_demo_grades_its_class_in_any_folder(installed: Path, tmp_path: Path) -> None:
    before = files_of(installed)
    (tmp_path / "kvasir.toml").write_text("[services]\nbroker = 'amqp://nobody@127.0.0.1:1/'\n", "utf-8")
    env = environment(tmp_path) | {"TERM": "xterm", "LC_ALL": "C.UTF-8", "PYTHONDONTWRITEBYTECODE": "1"}
    del env["PYTHONPATH"]

    with Terminal([str(installed / "bin/kvasir"), "demo"], env, tmp_path) as terminal:
        assert terminal.wait(400) == 0, terminal.text

    assert files_of(installed) == before  # an installation may be read-only
    assert "Traceback" not in terminal.text
    assert len(terminal.percentages) >= 3
    assert terminal.is_restored
    last = terminal.text[terminal.text.index("16 submissions:") :]
    assert re.search(LAST_WORDS, last)
    assert "failed" not in terminal.text
    report = tmp_path / "results/demo/report.html"
    assert report.is_file()
    unwrapped = last.replace("\n", "")
    assert str(report) in unwrapped
    assert " ui results/demo" in unwrapped
    rows = json.loads((tmp_path / "results/demo/grades.json").read_text("utf-8"))["grades"]
    assert int(re.search(LAST_WORDS, last)[1]) == sum(bool(row["doubts"]) for row in rows)  # type: ignore[index]


def test_make_demo_in_a_terminal_ends_well(tmp_path: Path) -> None:
    env = environment(tmp_path) | {"TERM": "xterm", "LC_ALL": "C.UTF-8"}
    results = tmp_path / "results"
    (tmp_path / "demo").touch()  # so that make installs nothing: all is here
    words = [f"PY={sys.executable}", f"STAMPS={tmp_path}", f"RESULTS={results}"]

    with Terminal(["make", "demo", *words], env, ROOT, 80) as terminal:
        assert terminal.wait(500) == 0, terminal.text

    assert "Traceback" not in terminal.text
    assert len(terminal.percentages) >= 3
    assert re.search(LAST_WORDS, terminal.text)
    assert "1 failed" not in terminal.text
    assert str(results / "report.html") in terminal.text.replace("\n", "")
    assert (results / "report.html").is_file()
    with Terminal(["make", "demo", *words], env, ROOT, 80) as again:
        assert again.wait(500) == 0, again.text
    assert "Everything is already graded" in again.text


def test_the_demo_can_be_interrupted(tmp_path: Path) -> None:
    env = environment(tmp_path) | {"TERM": "xterm", "LC_ALL": "C.UTF-8"}
    with Terminal([sys.executable, "-m", "examples.demo", "--out", str(tmp_path)], env, ROOT) as terminal:
        terminal.until(r"[1-9]\d*/29")
        terminal.type(CTRL_C)
        assert terminal.wait() == 130
    assert terminal.text.strip().splitlines()[-1].startswith("interrupted; ")
    assert terminal.is_restored
