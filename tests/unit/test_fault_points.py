"""Fault points: off unless wanted, and each of them is on the way of a job."""

from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from infra import fault_points
from messages.errors import EngineUnavailable

ROOT = Path(fault_points.__file__).resolve().parents[1]
HANDLERS = ("prefill_worker", "decode_worker", "infra")


def test_without_the_variable_a_fault_point_does_nothing():
    assert fault_points.reached is fault_points.parse("")
    fault_points.reached("decode.stored", "a-job")


@pytest.mark.parametrize("name", fault_points.PREFILL + fault_points.DECODE)
def test_every_fault_point_is_passed_somewhere_in_the_handlers(name):
    paths = [path for room in HANDLERS for path in (ROOT / room).rglob("*.py")]
    sources = [path.read_text() for path in paths if path.name != "fault_points.py"]
    assert sum(source.count(f'"{name}"') for source in sources) == 1


def test_the_first_jobs_meet_a_transient_error_and_the_next_does_not():
    reached = fault_points.parse("fail:prefill.taken:-2")
    for job in ("one", "two"):
        with pytest.raises(EngineUnavailable):
            reached("prefill.taken", job)
    reached("prefill.stored", "two")
    reached("prefill.taken", "three")


def test_only_the_named_job_meets_the_fault_and_it_does_so_every_time():
    reached = fault_points.parse("fail:decode.loaded:bad")
    reached("decode.loaded", "good")
    for _ in range(2):
        with pytest.raises(EngineUnavailable):
            reached("decode.loaded", "bad")


def test_the_process_is_killed_at_the_job_counted():
    code = "from infra.fault_points import reached; [reached('decode.stored', str(n)) or print(n) for n in range(3)]"
    done = subprocess.run(
        [sys.executable, "-u", "-c", code],
        env={fault_points.VARIABLE: "kill:decode.stored:2"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == -signal.SIGKILL
    assert done.stdout == "0\n"


@pytest.mark.parametrize("setting", ["kill", "kill:decode.stored", "kill:nowhere:1", "burn:decode.stored:1"])
def test_a_setting_that_means_nothing_is_refused(setting):
    with pytest.raises(ValueError, match="must look like"):
        fault_points.parse(setting)
