"""Failpoints: off unless wanted, and each of them is on the way of a job."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from infra.broker import failpoints
from messages.errors import EngineUnavailable

ROOT = Path(failpoints.__file__).resolve().parents[2]
HANDLERS = ("prefill_worker", "decode_worker", "infra")


def test_without_the_variable_a_fault_point_does_nothing():
    assert failpoints.failpoint is failpoints.parse("")
    failpoints.failpoint("decode.stored", "a-job")


@pytest.mark.parametrize("name", failpoints.PREFILL + failpoints.DECODE)
def test_every_fault_point_is_passed_somewhere_in_the_handlers(name):
    paths = [path for room in HANDLERS for path in (ROOT / room).rglob("*.py")]
    sources = [path.read_text() for path in paths if path.name != "failpoints.py"]
    assert sum(source.count(f'"{name}"') for source in sources) == 1


def test_the_first_jobs_meet_a_transient_error_and_the_next_does_not():
    failpoint = failpoints.parse("fail:prefill.taken:-2")
    for job in ("one", "two"):
        with pytest.raises(EngineUnavailable):
            failpoint("prefill.taken", job)
    failpoint("prefill.stored", "two")
    failpoint("prefill.taken", "three")


def test_only_the_named_job_meets_the_fault_and_it_does_so_every_time():
    failpoint = failpoints.parse("fail:decode.loaded:bad")
    failpoint("decode.loaded", "good")
    for _ in range(2):
        with pytest.raises(EngineUnavailable):
            failpoint("decode.loaded", "bad")


def test_the_process_is_killed_at_the_job_counted():
    code = (
        "from infra.broker.failpoints import failpoint; "
        "[failpoint('decode.stored', str(n)) or print(n) for n in range(3)]"
    )
    done = subprocess.run(
        [sys.executable, "-u", "-c", code],
        env={failpoints.VARIABLE: "kill:decode.stored:2"},
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
        failpoints.parse(setting)
