"""A program that an engine has started ends with us, even if we are gone by SIGKILL."""

import subprocess


def start_watchdog(pid: int, end: str) -> subprocess.Popen[bytes]:
    """A process that has a shell run `end`, in which "$1" is `pid`, when we die without telling it.

    It waits for a line (all is well) or for the end of its input: we are gone.
    """
    return subprocess.Popen(
        ["/bin/sh", "-c", f"read -r _ || {end}", "sh", str(pid)],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
