"""A pipe in the place of any file of a folder is one sentence: opening one would wait for ever."""

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from desk.assignments import grading_work, read_inputs
from desk.dry_runs import read_findings
from grading.report.grades import load_graded
from grading.rubric.rubric import load_rubric
from kvasir import cli
from messages.errors import KvasirError
from tests.support.homework import tiny, tiny_class
from tests.support.processes import SIMULATED_MODEL, config_text

FILES = ["results.jsonl", "submitted.jsonl", "reviews.jsonl", "grades.json", "grades.csv", "batch.json", "batch.lock"]
FILES += ["final-grades.csv"]
COMMANDS = ["results", "export --format csv --include-unreviewed", "watch", "retry", "forget --yes"]
PATIENCE_S = 30  # far more than any of them takes


class Waits(BaseException):
    """It waits for somebody at the other end of the pipe. (A TimeoutError would be an OSError.)"""


@pytest.fixture(autouse=True)
def alarm() -> Iterator[None]:
    def ring(*_: object) -> None:
        raise Waits

    before = signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, PATIENCE_S)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture(scope="module")
def graded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A class of one, graded once for all tests."""
    home = tmp_path_factory.mktemp("graded")
    config = home / "kvasir.toml"
    config.write_text(config_text({"tiny:1b": SIMULATED_MODEL}), "utf-8")
    homework = tiny_class(home / "homework", 1)
    assert cli.run_command(["--config", str(config), "grade", *tiny(homework, home / "out", "--quiet")]) == 0
    return home


@pytest.fixture
def batch(graded: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of it, in which a pipe harms nobody else."""
    monkeypatch.chdir(tmp_path)
    shutil.copy(graded / "kvasir.toml", tmp_path)
    return shutil.copytree(graded / "out", tmp_path / "out")


def pipe(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    return path


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_waits_for_a_pipe(batch: Path, name: str, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    pipe(batch / name)
    capsys.readouterr()
    verb, *options = command.split()

    cli.run_command([verb, str(batch), *options])

    said = "".join(capsys.readouterr())
    assert said
    assert "None" not in said
    assert "Traceback" not in said


def test_an_export_leaves_a_pipe_in_its_place(batch: Path, capsys: pytest.CaptureFixture[str]) -> None:
    target = pipe(batch / "final-grades.csv")

    # --yes: the one grade may be 0 points, which the export asks about first.
    options = ["--format", "csv", "--include-unreviewed", "--yes"]
    assert cli.run_command(["export", str(batch), *options]) == cli.EXIT_USAGE

    assert target.is_fifo()
    assert "not a regular file; name another place with --to" in " ".join(capsys.readouterr().err.split())


def test_the_desk_waits_for_none(batch: Path) -> None:
    work = grading_work(batch)
    for path in (work.log, work.out, *(work.folder / name for name in ("work.json", "lock", "exit"))):
        pipe(path)

    assert work.record() is None
    assert work.exit_code is None
    assert work.last_words() == ""
    assert not work.is_alive
    assert read_findings(batch) == {}
    pipe(batch / "desk.json")
    assert read_inputs(batch).rubric  # as the batch was made
    pipe(batch / "grades.json")
    with pytest.raises(KvasirError, match="not a regular file"):
        load_graded(batch)
    with pytest.raises(KvasirError, match="not a regular file"):
        load_rubric(pipe(batch / "rubric.yaml"))


def test_a_configuration_that_is_a_pipe_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    pipe(tmp_path / "kvasir.toml").chmod(0o600)

    assert cli.run_command(["config"]) == cli.EXIT_USAGE

    assert "kvasir.toml is not a regular file" in capsys.readouterr().err
