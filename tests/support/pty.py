"""A command in a real terminal: a pseudo-terminal with a size, keys through its line discipline, and what it showed.

with Terminal(kvasir("grade", …), env, folder, columns=80) as terminal:
    terminal.until("50%")
    terminal.type("\\x03")                    # Ctrl-C, as the terminal sends it
    assert terminal.wait() == 130
assert terminal.cursor_shown
"""

import fcntl
import os
import re
import select
import signal
import struct
import subprocess
import termios
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Self

CTRL_C = "\x03"
_ESCAPES = re.compile(r"\x1b\[[0-9;?]*[ -/]*[@-~]|\x1b[()][0-9A-Za-z]|\x1b[=>78]")
_PERCENT = re.compile(r"(?<!\()\b(\d+)%")  # of the jobs; a prediction's "(90%: …" is none


class Terminal:
    """One command, the leader of its own session on its own terminal. Leaving the block ends it."""

    def __init__(
        self, command: Sequence[str], env: Mapping[str, str], cwd: Path, columns: int = 80, rows: int = 30
    ) -> None:
        self._our_end, command_end = os.openpty()
        fcntl.ioctl(command_end, termios.TIOCSWINSZ, struct.pack("HHHH", rows, columns, 0, 0))
        self._settings_before = termios.tcgetattr(command_end)
        env = {name: value for name, value in env.items() if name not in ("COLUMNS", "LINES", "CI")}
        self._process = subprocess.Popen(
            ["/bin/sh", "-c", 'exec "$@" <"$0" >"$0" 2>&1', os.ttyname(command_end), *command],
            env=env,
            cwd=cwd,
            start_new_session=True,
        )
        self._command_end = command_end  # held open: its settings are looked at when the command has ended
        self._settings_after: list[object] = []
        self._output = b""

    @property
    def raw(self) -> str:
        """All that was written so far, escape sequences too."""
        self._read(0)
        return self._output.decode("utf-8", errors="replace")

    @property
    def text(self) -> str:
        """All that was written so far, without escape sequences; redrawn lines stand below each other."""
        return _ESCAPES.sub("", self.raw).replace("\r\n", "\n").replace("\r", "\n")

    @property
    def percentages(self) -> list[int]:
        """Every percentage that was shown, repetitions left out."""
        numbers = [int(number) for number in _PERCENT.findall(self.text)]
        return [number for previous, number in zip([-1, *numbers], numbers, strict=False) if number != previous]

    @property
    def cursor_shown(self) -> bool:
        """Whether the cursor was shown again after it was last hidden."""
        return self.raw.rfind("\x1b[?25h") >= self.raw.rfind("\x1b[?25l")

    @property
    def is_restored(self) -> bool:
        """Whether the terminal was left as it was found: echo, line editing, cursor, main screen."""
        other_screen = self.raw.rfind("\x1b[?1049h") > self.raw.rfind("\x1b[?1049l")
        return self.cursor_shown and not other_screen and self._settings_after == self._settings_before

    def type(self, keys: str) -> None:
        """Keys, as a person presses them."""
        os.write(self._our_end, keys.encode())

    def until(self, words: str, timeout_s: float = 60.0) -> None:
        """Wait until these words (a regular expression) were shown. Raises AssertionError with what was shown."""
        deadline = time.monotonic() + timeout_s
        while not re.search(words, self.text):
            assert time.monotonic() < deadline, f"{words!r} was not shown:\n{self.text[-3000:]}"
            assert self._read(0.1) or self._process.poll() is None, f"it ended before {words!r}:\n{self.text[-3000:]}"

    def wait(self, timeout_s: float = 120.0) -> int:
        """Its exit code, once it has ended by itself."""
        deadline = time.monotonic() + timeout_s
        while self._process.poll() is None:
            assert time.monotonic() < deadline, f"it did not end:\n{self.text[-3000:]}"
            self._read(0.1)
        return self._process.returncode

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_exception: object) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        self._read(0)
        self._settings_after = termios.tcgetattr(self._command_end)
        os.close(self._our_end)
        os.close(self._command_end)
        self._our_end = -1

    def _read(self, timeout_s: float) -> bool:
        """Take what was written; whether anything was."""
        length = len(self._output)
        while self._our_end >= 0 and select.select([self._our_end], [], [], timeout_s)[0]:
            timeout_s = 0
            self._output += os.read(self._our_end, 65536)
        return len(self._output) > length
