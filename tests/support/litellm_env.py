"""LiteLLM in an environment of its own, since it pins packages that Kvasir uses too; made once, in the cache folder."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

RELEASE = "litellm==1.108.7"
CLIENT = Path(__file__).with_name("litellm_client.py")


class LiteLLMMissing(RuntimeError):
    """It can't be had; the message says why."""


def python() -> Path:
    """The environment's Python, made if it is not there yet. Raises LiteLLMMissing: without it a test must fail."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvasir"
    folder, made = cache / RELEASE.replace("==", "-"), cache / f"{RELEASE.replace('==', '-')}.made"
    program = folder / "bin" / "python"
    if not made.exists():
        _run([sys.executable, "-m", "venv", "--clear", str(folder)])
        _run([str(program), "-m", "pip", "install", "--quiet", "--disable-pip-version-check", RELEASE])
        made.touch()  # an environment that is half done is made anew
    return program


def _run(command: list[str]) -> None:
    done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if done.returncode:
        said = done.stderr.strip().splitlines()
        raise LiteLLMMissing(f"{RELEASE} can't be installed: {said[-1] if said else 'nothing was said'}")
