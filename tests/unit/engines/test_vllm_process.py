"""Who looks after the vLLM host: one that hangs or dies is started again, and its jobs are tried again. Needs no vLLM.

In its place a program speaks the protocol: its first life does what a test says, the later ones answer.
"""

import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from pathlib import Path

import pytest

from engines.vllm import conversation, process
from engines.vllm.environment import Environment
from engines.vllm.process import HostLaunch, HostProcess
from messages.errors import ConfigError, EngineUnavailable
from tests.support.processes import ROOT
from tests.support.waiting import wait_until

# The protocol's other end, run by the Python that the launch names.
HOST = """
import os, signal, socket, sys, time
from pathlib import Path
from kvasir_vllm import wire

first, lives = sys.argv[1], Path(sys.argv[2])
life = len(lives.read_text()) if lives.exists() else 0
lives.write_text("x" * (life + 1))
connection = socket.socket(socket.AF_UNIX)
connection.connect(sys.argv[3])
stream = connection.makefile("rb")
def say(**message): connection.sendall(wire.pack_message(message))
def hear(): return wire.read_message(stream.read)
loading = hear()
if first == "never load":
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    time.sleep(600)
if life == 1 and first == "load slowly later":
    time.sleep(600)
say(op="loaded", version=loading["version"], vllm="0", device="cpu", shape={})
while (asked := hear()) is not None:
    if asked["op"] != "generate":
        continue
    if life == 0 and first in ("hang", "load slowly later"):
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(600)
    if life == 0 and first == "die":
        os._exit(1)
    if first == "be slow":
        for _ in range(20):
            time.sleep(0.1)
            say(op="step", id=asked["id"])
    say(op="done", id=asked["id"], evaluated=len(asked["tokens"]))
"""


def launch(folder: Path, first: str) -> HostLaunch:
    """What starts the program, whose first life does `first`."""
    python, program = folder / "python", folder / "host.py"
    program.write_text(HOST)
    # It is called as PYTHON -P -m kvasir_vllm.main SOCKET.
    python.write_text(f"#!/bin/sh\nexec '{sys.executable}' '{program}' '{first}' '{folder / 'lives'}' \"$4\"\n")
    python.chmod(0o700)
    return HostLaunch(Environment(python, "0", True), "a model", {}, 32)


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], HostProcess]]:
    monkeypatch.setattr(conversation, "SILENT_S", 1.0)
    monkeypatch.setattr(process, "END_S", 0.5)
    hosts: list[HostProcess] = []

    def start(first: str) -> HostProcess:
        hosts.append(HostProcess(launch(tmp_path, first)))
        return hosts[-1]

    yield start
    for host in hosts:
        host.close()


def evaluated(host: HostProcess) -> int | None:
    """What comes of a request; None while the host is down."""
    try:
        *_, last = host.ask(None, tokens=[1, 2, 3])
    except EngineUnavailable:
        return None
    return int(last["evaluated"])


@pytest.mark.parametrize("how", ["hang", "die"])
def test_a_host_that_hangs_or_dies_is_started_again_and_all_its_callers_are_told(
    how: str, started: Callable[[str], HostProcess]
) -> None:
    # Given two requests at a host that ends, or does nothing any more and does not end when it is told to
    host = started(how)
    before, found = host.process.pid, []
    callers = [threading.Thread(target=lambda: found.append(evaluated(host))) for _ in range(2)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(20)

    # Then both fail for now, it is gone, and the next one answers
    assert found == [None, None]
    wait_until(lambda: host.process.pid != before, "another one is started", 20)
    with pytest.raises(ProcessLookupError):
        os.kill(before, 0)
    wait_until(lambda: evaluated(host) == 3, "it answers", 20)


def test_a_host_that_is_slow_and_says_so_is_left_alone(started: Callable[[str], HostProcess]) -> None:
    host = started("be slow")
    before, began = host.process.pid, time.monotonic()
    assert evaluated(host) == 3
    assert time.monotonic() - began > conversation.SILENT_S
    assert host.process.pid == before


@pytest.mark.system  # some six seconds
def test_one_that_hangs_while_it_loads_again_is_not_waited_for(
    started: Callable[[str], HostProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    host = started("load slowly later")
    monkeypatch.setattr(process, "LOAD_S", 2.0)
    assert evaluated(host) is None
    wait_until(lambda: evaluated(host) == 3, "its third life answers", 30)


def test_one_that_hangs_while_it_loads_at_first_is_a_model_that_can_not_be_loaded(
    started: Callable[[str], HostProcess], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "LOAD_S", 1.0)
    (tmp_path / "lives").write_text("x")
    with pytest.raises(ConfigError, match="vLLM can't load a model"):
        started("load slowly later")


def test_a_host_that_is_loading_does_not_outlive_an_owner_that_is_killed(tmp_path: Path) -> None:
    # Given a host that hears nothing while it loads, as vLLM does, and ends by no polite signal
    made = launch(tmp_path, "never load")
    program = f"""
from pathlib import Path
from engines.vllm.environment import Environment
from engines.vllm.process import HostLaunch, HostProcess
HostProcess(HostLaunch(Environment(Path({str(made.environment.python)!r}), "0", True), "a model", {{}}, 32))
"""
    with subprocess.Popen([sys.executable, "-c", program], cwd=ROOT) as owner:
        wait_until(lambda: (tmp_path / "lives").exists(), "the host has begun", 30)
        (host,) = [pid for pid, of in children().items() if of == owner.pid and is_host(pid)]
        # When its owner is killed, then so is it
        owner.kill()
    wait_until(lambda: not is_host(host), "the host is gone", 30)


def children() -> dict[int, int]:
    """The parent of each process (Linux)."""
    found = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            found[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    return found


def is_host(pid: int) -> bool:
    """Whether this is the program, alive."""
    try:
        return b"never load" in Path(f"/proc/{pid}/cmdline").read_bytes()
    except OSError:
        return False
