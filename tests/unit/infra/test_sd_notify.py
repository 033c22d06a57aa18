"""What a worker tells systemd, at a socket as systemd opens one for each unit.

sd_notify(3): datagrams with a state a line; "If the first character of $NOTIFY_SOCKET is @, the string is understood as
Linux abstract namespace socket". WATCHDOG_USEC asks for the watchdog at run time: `service_notify_message` in systemd's
src/core/service.c calls `service_override_watchdog_timeout`, which starts it whatever WatchdogSec the unit has.
"""

import os
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from infra.sd_notify import WATCHDOG_S, notify
from tests.support.pipeline import Pipeline
from tests.support.waiting import wait_until

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="systemd is Linux's")


class Supervisor:
    """The other end of NOTIFY_SOCKET."""

    def __init__(self, address: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self._socket.bind(address)
        self._socket.setblocking(False)

    def heard(self) -> list[str]:
        """The states that came since it last listened."""
        states = []
        while True:
            try:
                states += self._socket.recv(4096).decode().split("\n")
            except BlockingIOError:
                return states

    def close(self) -> None:
        self._socket.close()


@pytest.fixture(params=["path", "abstract"])
def supervisor(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Supervisor]:
    name = str(tmp_path / "notify") if request.param == "path" else f"kvasir-test-{os.getpid()}"
    monkeypatch.setenv("NOTIFY_SOCKET", name if request.param == "path" else f"@{name}")
    supervisor = Supervisor(name if request.param == "path" else f"\0{name}")
    yield supervisor
    supervisor.close()


def test_a_worker_is_ready_lives_and_stops(supervisor: Supervisor) -> None:
    with Pipeline() as pipeline:
        assert supervisor.heard() == []
        worker = pipeline.start_decode()
        states: list[str] = []
        wait_until(lambda: states.extend(supervisor.heard()) or states.count("WATCHDOG=1") > 2, "it lives")
        assert states[:2] == ["READY=1", f"WATCHDOG_USEC={WATCHDOG_S * 1_000_000}"]
        assert set(states[2:]) == {"WATCHDOG=1"}
        supervisor.heard()
        pipeline.leave(worker)
    assert supervisor.heard()[-2:] == ["STOPPING=1", "WATCHDOG_USEC=0"]  # what is in hand may take its time


def test_nobody_who_listens_is_no_trouble(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for address in ("", str(tmp_path / "nobody"), "@nobody-at-all"):
        monkeypatch.setenv("NOTIFY_SOCKET", address)
        notify("READY=1")
