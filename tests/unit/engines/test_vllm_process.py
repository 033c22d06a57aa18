"""Who looks after the vLLM host: one that hangs or dies is started again, and its jobs are tried again. Needs no vLLM.

In its place a program speaks the protocol: its first life does what a test says, the later ones answer.
"""

from __future__ import annotations

import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from engines.vllm import process
from engines.vllm.environment import Environment
from engines.vllm.process import HostLaunch, HostProcess
from messages.errors import ConfigError, EngineUnavailable
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
def say(**message): connection.sendall(wire.packed(message))
def hear(): return wire.received(stream.read)
loading = hear()
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


@pytest.fixture
def started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], HostProcess]]:
    monkeypatch.setattr(process, "SILENT_S", 1.0)
    monkeypatch.setattr(process, "_END_S", 0.5)
    hosts: list[HostProcess] = []

    def start(first: str) -> HostProcess:
        python, program = tmp_path / "python", tmp_path / "host.py"
        program.write_text(HOST)
        # It is called as PYTHON -P -m kvasir_vllm.main SOCKET.
        python.write_text(f"#!/bin/sh\nexec '{sys.executable}' '{program}' '{first}' '{tmp_path / 'lives'}' \"$4\"\n")
        python.chmod(0o700)
        hosts.append(HostProcess(HostLaunch(Environment(python, "0", True), "a model", {}, 32)))
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
    before, found = host.pid, []
    callers = [threading.Thread(target=lambda: found.append(evaluated(host))) for _ in range(2)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join(20)

    # Then both fail for now, it is gone, and the next one answers
    assert found == [None, None]
    wait_until(lambda: host.pid != before, "another one is started", 20)
    with pytest.raises(ProcessLookupError):
        os.kill(before, 0)
    wait_until(lambda: evaluated(host) == 3, "it answers", 20)


def test_a_host_that_is_slow_and_says_so_is_left_alone(started: Callable[[str], HostProcess]) -> None:
    host = started("be slow")
    before, began = host.pid, time.monotonic()
    assert evaluated(host) == 3
    assert time.monotonic() - began > process.SILENT_S
    assert host.pid == before


def test_one_that_hangs_while_it_loads_again_is_not_waited_for(
    started: Callable[[str], HostProcess], monkeypatch: pytest.MonkeyPatch
) -> None:
    host = started("load slowly later")
    monkeypatch.setattr(process, "_LOAD_S", 2.0)
    assert evaluated(host) is None
    wait_until(lambda: evaluated(host) == 3, "its third life answers", 30)


def test_one_that_hangs_while_it_loads_at_first_is_a_model_that_can_not_be_loaded(
    started: Callable[[str], HostProcess], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "_LOAD_S", 1.0)
    (tmp_path / "lives").write_text("x")
    with pytest.raises(ConfigError, match="vLLM can't load a model"):
        started("load slowly later")
