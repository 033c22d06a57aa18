"""Whatever lies in a folder: nothing of it is executed, signalled, or followed out of the folder."""

import fcntl
import json
import os
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from desk.assignments import Inputs, grading_work, read_inputs, save_inputs
from desk.work import Work
from kvasir import cli
from messages.errors import BatchError
from tests.support.desk import plan_tiny_class
from tests.support.homework import tiny, tiny_class
from tests.support.processes import command, environment
from tests.support.waiting import wait_until

SETTLED_S = 1.0  # a process that was started has long touched its file
as_root = pytest.mark.skipif(os.getuid() != 0, reason="only root can give a file away")
NOBODY = 65534


@pytest.fixture(autouse=True)
def configured(configured_folder: Path) -> None:
    # A desk whose browser page ends at once: what happens before anybody clicks is all that is looked at.
    page = configured_folder / "stand-in" / "streamlit"
    page.mkdir(parents=True)
    (page / "__init__.py").write_text("")
    (page / "__main__.py").write_text("")


def open_desk(tmp_path: Path, *words: str) -> str:
    """`kvasir ui`, until its page would be served; what it said."""
    env = environment(tmp_path) | {"PYTHONPATH": f"{tmp_path / 'stand-in'}:{Path(cli.__file__).parents[1]}"}
    done = subprocess.run(command("ui", *words), env=env, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stderr


def plant(place: Path, **more: Any) -> Path:
    """A grading that looks cut off, with a command of the planter's; the file that the command makes."""
    made = place / "executed"
    folder = place / "runs" / "grade"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "lock").touch()
    words = ["/bin/sh", "-c", f"touch '{made}'"]
    (folder / "work.json").write_text(json.dumps({"command": words, "pid": 4_000_000, "started_at": 1.0} | more))
    return made


# --- what is run


def test_a_folder_named_on_the_command_line_is_only_shown(tmp_path: Path) -> None:
    out, _ = plan_tiny_class(tmp_path / "downloaded", 1)
    made = [plant(out), plant(out / "rounds" / "1"), plant(out / "rounds" / "2")]
    save_inputs(out / "rounds" / "1", Inputs("T", str(tmp_path), "r"))

    said = open_desk(tmp_path, str(out))

    time.sleep(SETTLED_S)
    assert [path.exists() for path in made] == [False] * 3
    assert "goes on" not in said


@pytest.mark.system  # a whole grading
def test_below_home_the_command_is_made_anew_from_the_inputs(tmp_path: Path) -> None:
    homework = tiny_class(tmp_path / "homework", 2)
    folder = tmp_path / "home" / "hw"
    folder.mkdir(parents=True)
    save_inputs(folder, Inputs("Means", str(homework / "submissions"), str(homework / "rubric.yaml")))
    made = plant(folder)

    said = open_desk(tmp_path, "--home", str(tmp_path / "home"))

    wait_until(lambda: grading_work(folder).exit_code is not None, "what was started has ended", 60)
    assert not made.exists()
    assert grading_work(folder).exit_code == 0, grading_work(folder).last_words()
    assert (folder / "grades.csv").read_text("utf-8").count("student") == 2
    assert not made.exists()
    assert "it goes on where it stopped" in said


def loose(path: Path) -> None:
    path.chmod(0o666)


def linked(path: Path) -> None:
    moved = path.rename(path.with_name("elsewhere"))
    path.symlink_to(moved)


def given_away(path: Path) -> None:
    os.chown(path, NOBODY, -1)


@pytest.mark.parametrize(
    ("spoil", "name"),
    [
        (loose, "desk.json"),
        pytest.param(linked, "runs/grade", marks=pytest.mark.system),
        pytest.param(given_away, "runs/grade/work.json", marks=[as_root, pytest.mark.system]),
    ],
)
def test_what_others_may_have_written_is_not_taken_up(tmp_path: Path, spoil: Any, name: str) -> None:
    homework = tiny_class(tmp_path / "homework", 1)
    folder = tmp_path / "home" / "hw"
    folder.mkdir(parents=True)
    save_inputs(folder, Inputs("Means", str(homework / "submissions"), str(homework / "rubric.yaml")))
    plant(folder)
    spoil(folder / name)

    open_desk(tmp_path, "--home", str(tmp_path / "home"))

    assert not (folder / "runs/grade/log").exists(), "nothing was started"


@pytest.mark.parametrize(
    ("field", "value"),
    [("submissions", "--out=/tmp/elsewhere"), ("code_model", "--help"), ("template", ["a"]), ("rubric", {"a": 1})],
)
def test_inputs_that_would_be_options_are_refused(tmp_path: Path, field: str, value: Any) -> None:
    kept = {"title": "T", "submissions": "/w", "rubric": "/r"} | {field: value}
    (tmp_path / "desk.json").write_text(json.dumps(kept))

    with pytest.raises(BatchError, match=field):
        read_inputs(tmp_path)


# --- what is signalled


def test_a_planted_process_number_is_never_signalled(tmp_path: Path) -> None:
    victim = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
    try:
        plant(tmp_path, pid=victim.pid, process="", started_at=time.time())
        with (tmp_path / "runs/grade/lock").open() as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            with suppress(BatchError):  # the sentence that says so
                grading_work(tmp_path).stop()

        time.sleep(0.2)
        assert victim.poll() is None
    finally:
        victim.kill()
        victim.wait()


def test_what_the_desk_started_is_still_stopped_by_another_desk(tmp_path: Path) -> None:
    work = Work(tmp_path / "work")
    script = "signal.signal(signal.SIGINT, lambda *_: sys.exit(7)); print(1, flush=True); signal.pause()"
    work.start([sys.executable, "-c", f"import signal, sys; {script}"])
    wait_until(lambda: work.out.read_text() == "1\n", "it can be stopped")

    Work(work.folder).stop()

    wait_until(lambda: not work.is_alive, "it has ended")
    assert work.exit_code == 7


# --- what is written through links


def test_a_link_in_the_place_of_a_journal_is_not_followed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = plan_tiny_class(tmp_path / "class", 1)
    precious = tmp_path / "precious.txt"
    precious.write_text("one line\nand an end without a line break")
    (out / "results.jsonl").unlink(missing_ok=True)
    (out / "results.jsonl").symlink_to(precious)

    code = cli.run_command(["results", str(out)])

    assert precious.read_text() == "one line\nand an end without a line break"
    assert code == cli.EXIT_USAGE
    assert "results.jsonl" in capsys.readouterr().err


@pytest.mark.parametrize("name", ["out", "log", "lock"])
def test_work_writes_through_no_link(tmp_path: Path, name: str) -> None:
    precious = tmp_path / "precious.txt"
    precious.write_text("mine")
    work = Work(tmp_path / "runs" / "grade")
    work.folder.mkdir(parents=True)
    (work.folder / name).symlink_to(precious)

    with pytest.raises(BatchError):
        work.start([sys.executable, "-c", "print('written')"])

    assert precious.read_text() == "mine"


# --- what is believed


def test_a_configuration_that_others_may_write_is_refused_until_it_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = tmp_path / "kvasir.toml"
    for mode in (0o620, 0o602):
        config.chmod(mode)
        assert cli.run_command(["config"]) == cli.EXIT_USAGE
        assert f"chmod go-w {config}" in capsys.readouterr().err

    assert cli.run_command(["--config", str(config), "config"]) == 0
    config.chmod(0o644)
    assert cli.run_command(["config"]) == 0


@as_root
def test_a_configuration_or_a_batch_of_another_user_is_not_believed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    homework = tiny_class(tmp_path / "homework", 1)
    assert cli.run_command(["grade", *tiny(homework, tmp_path / "out", "--quiet")]) == 0
    given_away(tmp_path / "out" / "batch.json")
    assert cli.run_command(["results", str(tmp_path / "out")]) == cli.EXIT_USAGE
    given_away(tmp_path / "kvasir.toml")
    assert cli.run_command(["config"]) == cli.EXIT_USAGE

    assert capsys.readouterr().err.count("belongs to another user") == 2
