"""Work that outlives the page: a `kvasir` command in a process of its own, which a new desk finds again.

Each kind of work has a folder: `work.json` says what was started, `out` and `log` hold what it printed, `exit` how it
ended, and `lock` is held by the process as long as it lives: it inherits the lock, so nobody has to trust a process
number. A shell around the command writes `exit`, whether or not a desk is there to see it.
"""

from __future__ import annotations

import fcntl
import json
import os
import signal
import subprocess
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from messages.errors import BatchError
from producers.files import write_atomically

RESTARTED = "work_started"  # the line in `log` that parts one process's lines from the next one's

# A trap that does nothing keeps the shell through Ctrl-C without making the command deaf to it.
_AROUND = 'trap : INT; ended=$1; shift; "$@"; echo $? >"$ended"'

_children: dict[Path, subprocess.Popen[bytes]] = {}
_lock = threading.RLock()


@dataclass(frozen=True, slots=True)
class Record:
    """work.json."""

    command: tuple[str, ...]
    pid: int
    started_at: float  # seconds since the epoch
    stopped: bool = False  # by a person: not to be taken up again by itself


class Work:
    """One kind of work in its folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.out = folder / "out"
        self.log = folder / "log"

    def start(self, command: Sequence[str]) -> None:
        """Start the command, in a session of its own: closing the desk doesn't end it.

        Raises BatchError if it is running already, or can't be started.
        """
        with _lock:
            self.folder.mkdir(parents=True, exist_ok=True)
            lock = self._take_lock()
            if lock is None:
                raise BatchError("this is running already; wait for it, or stop it first")
            try:
                self._mark_log()
                (self.folder / "exit").unlink(missing_ok=True)
                process = self._spawn(command, lock)
            except OSError as error:
                raise BatchError(f"can't start {command[0]}: {error.strerror}") from None
            finally:
                os.close(lock)  # from here on the process alone holds it
            _children[self.folder] = process
            self._save(Record(tuple(command), process.pid, time.time()))

    def stop(self) -> None:
        """Ask it to end, as Ctrl-C does: it keeps what is done. Nothing happens if it doesn't run."""
        with _lock:
            record = self.record()
            if record and self.alive:
                self._save(replace(record, stopped=True))
                with suppress(ProcessLookupError):
                    os.killpg(record.pid, signal.SIGINT)

    @property
    def alive(self) -> bool:
        """Whether its process lives, whichever desk started it."""
        with _lock:
            self._reap()
            if not (self.folder / "lock").exists():
                return False
            lock = self._take_lock()
            if lock is not None:
                os.close(lock)
            return lock is None

    def record(self) -> Record | None:
        """What was started last; None if nothing was."""
        try:
            fields = json.loads((self.folder / "work.json").read_text("utf-8"))
            return Record(**{**fields, "command": tuple(fields["command"])})
        except (OSError, ValueError, TypeError, KeyError):
            return None

    @property
    def exit_code(self) -> int | None:
        """How the last command ended; None while it runs, and where it was cut off with its shell."""
        try:
            return int((self.folder / "exit").read_text("ascii"))
        except (OSError, ValueError):
            return None

    @property
    def interrupted(self) -> bool:
        """Whether it was cut off: the machine went down, or the process and its shell were killed."""
        record = self.record()
        return record is not None and not record.stopped and self.exit_code is None and not self.alive

    def resume(self) -> None:
        """Start the same command again. Raises BatchError."""
        record = self.record()
        if record is None:
            raise BatchError("nothing was started here yet")
        self.start(record.command)

    def last_words(self) -> str:
        """The last line that it logged that is not a machine's: why it ended, if it ended badly."""
        lines = [line for line in _end_of(self.log).splitlines() if line.strip() and not line.startswith("{")]
        return lines[-1].removeprefix("kvasir: ") if lines else ""

    def _spawn(self, command: Sequence[str], lock: int) -> subprocess.Popen[bytes]:
        with self.out.open("wb") as out, self.log.open("ab") as log:
            return subprocess.Popen(
                ["/bin/sh", "-c", _AROUND, "sh", str(self.folder / "exit"), *command],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=log,
                start_new_session=True,
                pass_fds=(lock,),
            )

    def _take_lock(self) -> int | None:
        descriptor = os.open(self.folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            os.close(descriptor)
            return None
        return descriptor

    def _mark_log(self) -> None:
        with self.log.open("ab") as log:
            log.write(json.dumps({"event": RESTARTED, "time": time.time()}).encode() + b"\n")

    def _reap(self) -> None:
        """Let a child that has ended go; the system keeps it until somebody has asked."""
        process = _children.get(self.folder)
        if process is not None and process.poll() is not None:
            del _children[self.folder]

    def _save(self, record: Record) -> None:
        write_atomically(self.folder / "work.json", json.dumps(asdict(record)))


def _end_of(path: Path, at_most: int = 16_384) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - at_most))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""
