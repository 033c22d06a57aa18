"""Work that outlives the page: a `kvasir` command in a process of its own, which a new desk finds again.

Each kind of work has a folder: `work.json` says what was started, `out` and `log` hold what it printed, `exit` how it
ended, and `lock` is held by the process as long as it lives: it inherits the lock, so nobody has to trust a process
number. A shell around the command writes `exit`, whether or not a desk is there to see it.

Folders come from anywhere, so nothing in one is run: what was started is kept as fields, from which whoever takes it up
makes the command again. A process is signalled only if it is the one that was started: by number, start and user.
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

RESTART_EVENT = "work_started"  # the line in `log` that parts one process's lines from the next one's

# A trap that does nothing keeps the shell through Ctrl-C without making the command deaf to it.
_WRAPPER = 'trap : INT; ended=$1; shift; "$@"; echo $? >"$ended"'

# Until the command has taken the place of a copy of the shell, that copy may swallow the signal.
_DEAF_S = 0.3

_BOOT = "/proc/sys/kernel/random/boot_id"

_children: dict[Path, subprocess.Popen[bytes]] = {}
_lock = threading.RLock()


@dataclass(frozen=True, slots=True)
class Record:
    """work.json."""

    pid: int
    started_at: float  # seconds since the epoch
    process: str = ""  # when the system says that the process began
    stopped: bool = False  # a person stopped it: it must not resume by itself
    kind: str = "grade"  # or "retry"
    limit: int = 0  # limits of this run; 0 and (): the whole class
    only: tuple[str, ...] = ()
    command: tuple[str, ...] = ()  # for people who look here: it is never run again

    def __post_init__(self) -> None:
        if self.pid < 2 or self.limit < 0:
            raise ValueError("work.json is none of ours")


class Work:
    """One kind of work in its folder."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.out = folder / "out"
        self.log = folder / "log"

    def start(self, command: Sequence[str], kind: str = "grade", limit: int = 0, names: Sequence[str] = ()) -> None:
        """Start the command, in a session of its own: closing the desk doesn't end it.

        The rest is what the command was made of, to be kept. Raises BatchError if it is running already, or can't be
        started.
        """
        with _lock:
            if self.folder.is_symlink() or self.folder.parent.is_symlink():
                raise BatchError(f"{self.folder} leads elsewhere by a link; nothing is started there")
            try:
                make_folder(self.folder)
                lock = take_lock(self.folder / "lock")
            except OSError as error:
                raise BatchError(f"can't work in {self.folder}: {error.strerror}") from None
            if lock is None:
                raise BatchError("this is running already; wait for it, or stop it first")
            try:
                with open_private(self.log, "ab") as log:
                    log.write(json.dumps({"event": RESTART_EVENT, "time": time.time()}).encode() + b"\n")
                (self.folder / "exit").unlink(missing_ok=True)
                process = self._spawn(command, lock)
            except OSError as error:
                raise BatchError(f"can't start {command[0]}: {error.strerror}") from None
            finally:
                os.close(lock)  # from here on only the process holds it
            _children[self.folder] = process
            request_fields = {"kind": kind, "limit": limit, "only": tuple(names), "command": tuple(command)}
            self._save(Record(process.pid, time.time(), _process_start(process.pid), **request_fields))  # type: ignore[arg-type]

    def stop(self) -> None:
        """Ask it to end, as Ctrl-C does: it keeps what is done. Nothing happens if it doesn't run.

        Raises BatchError if it is not known to be ours.
        """
        with _lock:
            if self.is_alive:
                record = self.record()
                if record is None or not record.process or record.process != _process_start(record.pid):
                    raise BatchError("what works here was not started by this user's desk; end it where it was started")
                self._save(replace(record, stopped=True))
                time.sleep(min(_DEAF_S, max(0.0, record.started_at + _DEAF_S - time.time())))
                with suppress(ProcessLookupError):
                    os.killpg(record.pid, signal.SIGINT)

    @property
    def is_alive(self) -> bool:
        """Whether its process lives, whichever desk started it."""
        with _lock:
            process = _children.get(self.folder)
            if process is not None and process.poll() is not None:  # the system keeps it until somebody has asked
                del _children[self.folder]
            if not (self.folder / "lock").exists():
                return False
            try:
                lock = take_lock(self.folder / "lock")
            except OSError:  # a link, or somebody else's: not from a desk of this user's
                return False
            if lock is not None:
                os.close(lock)
            return lock is None

    def record(self) -> Record | None:
        """The command started last; None if there was none."""
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
        """How the last command ended; None while it runs, and where it was cut off with its shell."""
        try:
            return int(read_ordinary(self.folder / "exit"))
        except (OSError, ValueError):
            return None

    @property
    def is_interrupted(self) -> bool:
        """Whether it was cut off: the machine went down, or the process and its shell were killed."""
        record = self.record()
        return record is not None and not record.stopped and self.exit_code is None and not self.is_alive

    def last_words(self) -> str:
        """The last line that it logged that is not a machine's: why it ended, if it ended badly."""
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
                umask=0o077,  # for `exit`, and whatever the command writes
            )

    def _save(self, record: Record) -> None:
        write_atomically(self.folder / "work.json", json.dumps(asdict(record)))


def _process_start(pid: int) -> str:
    """When a process of this user's began, as exactly as the system tells; "" if there is none."""
    try:
        if sys.platform == "linux":  # in ticks since the machine started
            place = Path(f"/proc/{pid}")
            ticks = (place / "stat").read_text("utf-8", errors="replace").rpartition(")")[2].split()[19]
            return f"{Path(_BOOT).read_text('ascii').strip()} {ticks}" if place.stat().st_uid == os.getuid() else ""
        command = ["ps", "-o", "uid=,lstart=", "-p", str(pid)]
        user, _, began = subprocess.run(command, capture_output=True, text=True).stdout.strip().partition(" ")
        return began.strip() if user == str(os.getuid()) else ""
    except (OSError, IndexError):
        return ""


def _end_of(path: Path) -> str:
    """Its last 16 KiB as text."""
    try:
        with open_ordinary(path) as file:
            file.seek(max(0, os.fstat(file.fileno()).st_size - 16_384))
            return file.read().decode("utf-8", "replace")
    except OSError:
        return ""
