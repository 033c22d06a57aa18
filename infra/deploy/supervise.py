"""Keeps one command running without systemd or launchd: `start | stop | status RUN LOG -- COMMAND…`.

RUN is a path without a suffix. RUN.pid holds the supervisor's process id and is locked while the supervisor lives, so a
process id that the system has reused is not mistaken for it. When the command ends, it is started again after 1 to 30
seconds; the pause grows each time the command ends soon. SIGTERM is passed on to the command, and the supervisor ends
after it.
"""

import fcntl
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType

_FIRST_PAUSE_S, _LONGEST_PAUSE_S = 1.0, 30.0
_RAN_WELL_S = 60.0
_START_S, _STOP_S = 30.0, 900.0  # _START_S: Python starts slowly on a busy machine
_POLL_S = 0.1


def main(arguments: Sequence[str]) -> int:
    """Do what the arguments say. Returns 0 if it was done or the command runs, 3 if it doesn't run, 2 on bad usage."""
    if len(arguments) < 5 or arguments[3] != "--" or arguments[0] not in ("start", "stop", "status"):
        print("usage: supervise start|stop|status RUN LOG -- COMMAND…", file=sys.stderr)  # noqa: T201
        return 2
    verb, lock, log, command = arguments[0], Path(f"{arguments[1]}.pid"), Path(arguments[2]), list(arguments[4:])
    if verb == "status":
        return 0 if supervisor_pid(lock) else 3
    if verb == "stop":
        return stop(lock)
    return start(lock, log, command)


def supervisor_pid(lock: Path) -> int:
    """Return the supervisor's process id; 0 if no supervisor runs."""
    try:
        with lock.open() as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
                return 0
            except BlockingIOError:
                return int(file.read() or 0)
    except (OSError, ValueError):
        return 0


def stop(lock: Path) -> int:
    """Send SIGTERM, and wait until the supervisor has ended."""
    if pid := supervisor_pid(lock):
        os.kill(pid, signal.SIGTERM)
    return _wait_until(lambda: not supervisor_pid(lock), _STOP_S)


def start(lock: Path, log: Path, command: list[str]) -> int:
    """Start a supervisor in the background, unless one runs already."""
    if supervisor_pid(lock):
        return 0
    for folder in (lock.parent, log.parent):
        folder.mkdir(parents=True, exist_ok=True)
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            _detach(log)
            os._exit(SupervisedCommand(lock, command).run())
        os._exit(0)
    os.wait()
    return _wait_until(lambda: supervisor_pid(lock), _START_S)


def _wait_until(condition: Callable[[], object], within_s: float) -> int:
    """Return 0 once the condition holds, or 1 if it doesn't hold in time."""
    deadline = time.monotonic() + within_s
    while not condition():
        if time.monotonic() > deadline:
            return 1
        time.sleep(_POLL_S)
    return 0


def _detach(log: Path) -> None:
    """Redirect the standard streams to the log, because ssh waits until the caller's terminal is closed."""
    with open(os.devnull, "rb") as null_device, log.open("ab") as file:
        for number, target in ((0, null_device), (1, file), (2, file)):
            os.dup2(target.fileno(), number)


class SupervisedCommand:
    """The command, and the lock that shows that it is supervised."""

    def __init__(self, lock: Path, command: list[str]) -> None:
        self._lock = lock
        self._command = command
        self._leaving = False
        self._child: subprocess.Popen[bytes] | None = None

    def run(self) -> int:
        """Keep the command running until SIGTERM."""
        with self._lock.open("a+") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                return 0
            file.truncate(0)
            file.write(str(os.getpid()))
            file.flush()
            signal.signal(signal.SIGTERM, self._on_term)
            self._keep_running()
        return 0

    def _keep_running(self) -> None:
        pause_s = _FIRST_PAUSE_S
        while not self._leaving:
            started_at = time.monotonic()
            code = self._run_once()
            if self._leaving:
                return
            pause_s = _FIRST_PAUSE_S if time.monotonic() - started_at > _RAN_WELL_S else pause_s
            os.write(2, f"supervise: the command ended with {code}; it starts again in {pause_s:.0f} s\n".encode())
            _wait_until(lambda: self._leaving, pause_s)
            pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)

    def _run_once(self) -> int | None:
        try:
            # The child must not inherit the lock, because the lock would then outlive the supervisor.
            self._child = subprocess.Popen(self._command, close_fds=True)
        except OSError as error:
            os.write(2, f"supervise: {error}\n".encode())
            return None
        if self._leaving:  # SIGTERM came while no child was running
            self._child.terminate()
        return self._child.wait()

    def _on_term(self, _number: int, _frame: FrameType | None) -> None:
        self._leaving = True
        if self._child is not None and self._child.poll() is None:
            self._child.terminate()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
