"""Other people's programs in environments of their own, since they pin packages that Kvasir uses too.

Each is made once, in the cache folder.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

# Of each release what pip is told, command by command. LMCache's C++ client needs PyTorch, and nothing else that it
# asks for.
INSTALLS = {
    "instructor-1.17.0": [["instructor==1.17.0"]],
    "pydantic-ai-2.38.0": [["pydantic-ai-slim[openai]==2.38.0"]],
    "llama-index-0.14.25": [
        ["llama-index-core==0.14.25", "llama-index-llms-openai-like==0.8.1", "llama-index-llms-ollama==0.11.0"]
    ],
    "langchain-1.8.3": [["langchain-core==1.8.3", "langchain-openai==1.7.4", "langchain-ollama==1.1.0"]],
    "llm-0.36": [["llm==0.36"]],
    "lm-eval-0.4.13": [["lm-eval[api]==0.4.13"]],
    "litellm-1.108.7": [["litellm==1.108.7"]],
    "lmcache-0.5.6": [["torch==2.13.0"], ["--no-deps", "lmcache==0.5.6"]],
    "xllamacpp-2026.8.10229": [["--no-deps", "xllamacpp==2026.8.10229"]],
    "xllamacpp-2026.8.10566": [["--no-deps", "xllamacpp==2026.8.10566"]],
    "xllamacpp-2026.9.10809": [["--no-deps", "xllamacpp==2026.9.10809"]],
    "xllamacpp-2026.9.11063": [["--no-deps", "xllamacpp==2026.9.11063"]],
    "xllamacpp-2026.10.11549": [["--no-deps", "xllamacpp==2026.10.11549"]],
}


class EnvironmentMissing(RuntimeError):
    """It can't be had; the message says why."""


def folder(release: str) -> Path:
    """The environment's folder, made if it is not there yet. Raises EnvironmentMissing: without it a test must fail."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvasir"
    environment, marker = cache / release, cache / f"{release}.made"
    if not marker.exists():
        _run(release, [sys.executable, "-m", "venv", "--clear", str(environment)])
        for arguments in INSTALLS[release]:
            pip = [
                str(environment / "bin" / "python"),
                "-m",
                "pip",
                "install",
                "--quiet",
                "--disable-pip-version-check",
            ]
            _run(release, [*pip, *arguments])
        marker.touch()  # an environment that is half done is made again
    return environment


def node_modules(release: str, packages: Sequence[str]) -> Path:
    """The folder of these packages of npm's, installed if they are not there yet. Raises EnvironmentMissing."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvasir"
    environment, marker = cache / release, cache / f"{release}.made"
    if not marker.exists():
        if not shutil.which("npm"):
            raise EnvironmentMissing(f"{release} needs Node.js 20 with npm: apt-get install nodejs npm")
        _run(release, ["npm", "install", "--silent", "--omit=optional", "--prefix", str(environment), *packages])
        marker.touch()
    return environment


def python(release: str) -> Path:
    """Its Python."""
    return folder(release) / "bin" / "python"


def packages(release: str) -> Path:
    """Where its packages are, for a Python of the same version."""
    return next((folder(release) / "lib").glob("python*/site-packages"))


def _run(release: str, command: list[str]) -> None:
    completed_process = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    if completed_process.returncode:
        error_lines = completed_process.stderr.strip().splitlines()
        raise EnvironmentMissing(
            f"{release} can't be installed: {error_lines[-1] if error_lines else 'nothing was said'}"
        )
