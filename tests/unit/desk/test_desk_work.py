"""Work that outlives the desk: found again, stopped, taken up."""

import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from desk.assignments import Inputs, grading_work, resume_interrupted, save_inputs
from desk.work import Work
from messages.errors import BatchError
from tests.support.waiting import wait_until

# Writes a line, and then waits for a signal; ends with 7 at Ctrl-C.
WAITS = """
import signal, sys
def leave(*_): sys.exit(7)
signal.signal(signal.SIGINT, leave)
print("ready", flush=True)
signal.pause()
"""


def python(script: str) -> list[str]:
    return [sys.executable, "-c", script]


@pytest.fixture
def work(tmp_path: Path) -> Iterator[Work]:
    made = Work(tmp_path / "work")
    yield made
    cut_off(made)


def cut_off(work: Work) -> None:
    """As when the machine goes down."""
    record = work.record()
    if record and work.is_alive:
        os.killpg(record.pid, signal.SIGKILL)
        wait_until(lambda: not work.is_alive, "the work is dead")


def ready(work: Work) -> bool:
    return "ready" in work.out.read_text()


def test_work_that_ended_says_how_and_what_it_said_last(work: Work) -> None:
    work.start(python("import sys; print('{\"event\": 1}\\nkvasir: no such rubric', file=sys.stderr); sys.exit(2)"))
    wait_until(lambda: not work.is_alive, "the work has ended")

    assert (work.exit_code, work.is_interrupted, work.last_words()) == (2, False, "no such rubric")


def test_another_desk_sees_that_work_is_alive_and_starts_no_second(work: Work) -> None:
    work.start(python(WAITS))

    again = Work(work.folder)

    assert again.is_alive
    with pytest.raises(BatchError, match="running already"):
        again.start(python(WAITS))


def test_stopped_work_ends_as_at_ctrl_c_and_is_not_taken_up_by_itself(work: Work) -> None:
    work.start(python(WAITS))
    wait_until(lambda: ready(work), "it can be stopped")

    work.stop()

    wait_until(lambda: not work.is_alive, "the work has ended")
    assert (work.exit_code, work.is_interrupted) == (7, False)


def test_work_that_is_stopped_as_soon_as_it_starts_hears_it(work: Work) -> None:
    work.start(["/bin/sh", "-c", "trap '' INT; sleep 0.1; trap 'exit 7' INT; while :; do sleep 0.05; done"])

    work.stop()

    wait_until(lambda: not work.is_alive, "the work has ended")
    assert work.exit_code == 7


class Waiting:
    """As much of a Backend as takes work up: its command waits, whatever it is given."""

    def __init__(self, home: Path) -> None:
        self.home = home

    def command(self, *arguments: str) -> list[str]:
        return [*python(WAITS), *arguments]


def test_work_that_was_cut_off_is_taken_up_for_what_it_was_limited_to(tmp_path: Path) -> None:
    folder = tmp_path / "hw"
    folder.mkdir()
    save_inputs(folder, Inputs("T", "w", "r"))
    work = grading_work(folder)
    work.start(python(WAITS), limit=5, names=["a", "b"])
    wait_until(lambda: ready(work), "it runs")
    cut_off(work)
    assert work.is_interrupted

    resumed = resume_interrupted(Waiting(tmp_path))  # type: ignore[arg-type]

    try:
        assert resumed == [(folder, "")]
        assert grading_work(folder).is_alive
        record = work.record()
        assert record
        assert (record.limit, record.only) == (5, ("a", "b"))
        starts = [line for line in work.log.read_text().splitlines() if json.loads(line)["event"] == "work_started"]
        assert len(starts) == 2
    finally:
        cut_off(work)


def test_work_that_ended_by_itself_is_not_taken_up(tmp_path: Path) -> None:
    folder = tmp_path / "hw"
    folder.mkdir()
    save_inputs(folder, Inputs("T", "w", "r"))
    work = grading_work(folder)
    work.start(python("pass"))
    wait_until(lambda: not work.is_alive, "the work has ended")

    assert resume_interrupted(Waiting(tmp_path)) == []  # type: ignore[arg-type]


def test_a_program_that_is_not_there_ends_at_once_with_a_reason(work: Work) -> None:
    work.start(["/nonexistent/program"])
    wait_until(lambda: not work.is_alive, "the work has ended")

    assert work.exit_code == 127
    assert "nonexistent" in work.last_words()
