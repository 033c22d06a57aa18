"""Runs a program that an engine needs: limits its start, reads its output, and makes sure that it ends with this
process."""

import logging
import subprocess
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

SHARED_MEMORY = Path("/dev/shm")
LOAD_S = 1800.0  # enough to load 60 GB from a slow disk and to capture CUDA graphs
END_S = 10.0
LAST_WORDS = 40  # lines
FIRST_PAUSE_S, LONGEST_PAUSE_S = 1.0, 30.0  # first and longest pause between attempts to start or find the program
STEADY_S = 60.0  # a process that ran for this many seconds did not fail at startup


@contextmanager
def ends_with_us(pid: int, end: str) -> Iterator[None]:
    """Within this context, a shell runs `end` (with `pid` as "$1") if this process dies, even by SIGKILL.

    The shell waits for a line, which means that all is well, or for the end of its input, which means that this process
    is gone.
    """
    with subprocess.Popen(
        ["/bin/sh", "-c", f"read -r _ || {end}", "sh", str(pid)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    ) as watchdog:
        yield
        assert watchdog.stdin is not None
        with suppress(BrokenPipeError):
            watchdog.stdin.write(b"\n")


def read_output(process: subprocess.Popen[str], last_words: deque[str], log: logging.Logger, name: str) -> None:
    """Collect what the program prints, until its output ends."""
    assert process.stdout is not None
    with process.stdout:
        for line in process.stdout:
            last_words.append(line.rstrip())
            log.debug("%s: %s", name, line.rstrip())
