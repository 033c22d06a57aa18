"""Work that continues when the page is closed: a `kvasir` command as a separate process, which a new desk finds again.

Each kind of work has a folder. `work.json` says what was started, `out` and `log` hold what it printed, and `exit` how
it ended. The process holds a lock on `lock` as long as it lives, because it inherits the lock; so no process number has
to be trusted. A shell around the command writes `exit`, even if no desk is running then.

Folders can come from anywhere, so no command in them is run. What was started is stored as fields, and a desk that
continues the work makes the command again from these. A process is signalled only if its number, start time and user
show that it is the one that was started.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path

from infra.config.ownership import is_foreign
from messages.errors import BatchError
from producers.storage.private import (
    make_folder,
    open_ordinary,
    open_private,
    read_ordinary,
    take_lock,
    write_atomically,
)
from producers.storage.shapes import from_json, parse_as

# In the log, this line separates the lines of one process from the lines of the next process.
RESTART_EVENT = "work_started"

# Because of this empty trap, Ctrl-C ends the command, but not the shell. The shell then writes the exit code.
_WRAPPER = 'trap : INT; ended=$1; shift; "$@"; echo $? >"$ended"'

# For this many seconds after the start, the process can still be a copy of the shell. Such a copy can swallow the
# signal that stops the process.
_DEAF_S = 0.3

_BOOT = "/proc/sys/kernel/random/boot_id"

_children: dict[Path, subprocess.Popen[bytes]] = {}
_lock = threading.RLock()


@dataclass(frozen=True, slots=True)
class Record:
    """work.json."""

    pid: int
    # Seconds since the epoch.
    started_at: float
    # When the process started, as the system reports it.
    process: str = ""
    # Whether a person stopped the process. A process that a person stopped must not be resumed automatically.
    stopped: bool = False
    kind: str = "grade"  # or "retry"
    limit: int = 0  # `limit` and `only` say which submissions this run grades; 0 and () mean the whole class
    only: tuple[str, ...] = ()
    # The command is kept for people who read the file. No program runs it.
    command: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.pid < 2 or self.limit < 0:
            raise ValueError("kvasir did not write this work.json")


class Work:
    """One kind of work in its folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.out = folder / "out"
        self.log = folder / "log"

    def start(self, command: Sequence[str], kind: str = "grade", limit: int = 0, names: Sequence[str] = ()) -> None:
        """Start the command in a separate session, so that closing the desk doesn't end it.

        The other arguments are what the command was made from; they are stored. Raises BatchError if the work is
        running already, or can't be started.
        """
        with _lock:
            if self.folder.is_symlink() or self.folder.parent.is_symlink():
                raise BatchError(
                    f"{self.folder} or its parent is a symbolic link, so the desk can't work in this folder; "
                    "replace the link with a folder"
                )
            try:
                make_folder(self.folder)
                lock = take_lock(self.folder / "lock")
            except OSError as error:
                raise BatchError(f"can't work in {self.folder}: {error.strerror}") from None
            if lock is None:
                raise BatchError("this work is running already; wait until it ends, or stop it")
            try:
                with open_private(self.log, "ab") as log:
                    log.write(json.dumps({"event": RESTART_EVENT, "time": time.time()}).encode() + b"\n")
                (self.folder / "exit").unlink(missing_ok=True)
                process = self._spawn(command, lock)
            except OSError as error:
                raise BatchError(f"can't start {command[0]}: {error.strerror}") from None
            finally:
                os.close(lock)  # from here on, only the process holds the lock
            _children[self.folder] = process
            request_fields = {"kind": kind, "limit": limit, "only": tuple(names), "command": tuple(command)}
            self._save(Record(process.pid, time.time(), _process_start(process.pid), **request_fields))  # type: ignore[arg-type]

    def stop(self) -> None:
        """Ask the process to end, as Ctrl-C does; it keeps what is done. Nothing happens if it is not running.

        Raises BatchError if it can't be verified that the process is ours.
        """
        with _lock:
            if self.is_alive:
                record = self.record()
                if record is None or not record.process or record.process != _process_start(record.pid):
                    raise BatchError("your desk did not start this process; stop the process where it was started")
                self._save(replace(record, stopped=True))
                time.sleep(min(_DEAF_S, max(0.0, record.started_at + _DEAF_S - time.time())))
                with suppress(ProcessLookupError):
                    os.killpg(record.pid, signal.SIGINT)

    @property
    def is_alive(self) -> bool:
        """Whether its process is alive, no matter which desk started it."""
        with _lock:
            process = _children.get(self.folder)
            # The system keeps an ended process until `poll` asks for its exit status.
            if process is not None and process.poll() is not None:
                del _children[self.folder]
            if not (self.folder / "lock").exists():
                return False
            try:
                lock = take_lock(self.folder / "lock")
            except OSError:  # the path is a link or another user's file, so no desk of this user wrote it
                return False
            if lock is not None:
                os.close(lock)
            return lock is None

    def record(self) -> Record | None:
        """Return the record of the command started last, or None."""
        path = self.folder / "work.json"
        try:
            if is_foreign(path):
                return None
            record: Record = parse_as(Record, from_json(read_ordinary(path)), "the work")
            return record
        except (OSError, ValueError):
            return None

    @property
    def exit_code(self) -> int | None:
        """Return the exit code of the last command; None while it runs, or if its shell was killed too."""
        try:
            return int(read_ordinary(self.folder / "exit"))
        except (OSError, ValueError):
            return None

    @property
    def is_interrupted(self) -> bool:
        """Whether it was interrupted: the machine went down, or the process and its shell were killed."""
        record = self.record()
        return record is not None and not record.stopped and self.exit_code is None and not self.is_alive

    def last_words(self) -> str:
        """Return the last log line that was written for people; it says why the work ended, if it ended badly."""
        lines = [line for line in _end_of(self.log).splitlines() if line.strip() and not line.startswith("{")]
        return lines[-1].removeprefix("kvasir: ") if lines else ""

    def _spawn(self, command: Sequence[str], lock: int) -> subprocess.Popen[bytes]:
        with open_private(self.out, "wb") as out, open_private(self.log, "ab") as log:
            return subprocess.Popen(
                ["/bin/sh", "-c", _WRAPPER, "sh", str(self.folder / "exit"), *command],
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=log,
                start_new_session=True,
                pass_fds=(lock,),
                umask=0o077,  # makes `exit` and all files of the command private to this user
            )

    def _save(self, record: Record) -> None:
        write_atomically(self.folder / "work.json", json.dumps(asdict(record)))


def _process_start(pid: int) -> str:
    """Return when a process of this user began, as exactly as the system tells; "" if there is none."""
    try:
        if sys.platform == "linux":  # the start time is in clock ticks since the machine was started
            place = Path(f"/proc/{pid}")
            ticks = (place / "stat").read_text("utf-8", errors="replace").rpartition(")")[2].split()[19]
            return f"{Path(_BOOT).read_text('ascii').strip()} {ticks}" if place.stat().st_uid == os.getuid() else ""
        command = ["ps", "-o", "uid=,lstart=", "-p", str(pid)]
        user, _, began = subprocess.run(command, capture_output=True, text=True).stdout.strip().partition(" ")
        return began.strip() if user == str(os.getuid()) else ""
    except (OSError, IndexError):
        return ""


def _end_of(path: Path) -> str:
    """Return the last 16 KiB of a file as text."""
    try:
        with open_ordinary(path) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 16_384))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""
