"""A folder of all wheels that a machine needs, made here, because the machine may have no internet."""

import hashlib
import platform
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from infra.config.settings import MachineSettings
from infra.deploy.remote import DeployFailed
from messages.installed import engine_entry, engine_requirement

# What to ask for where the platform is another than this one's, oldest last.
_TAGS = {
    ("linux", "aarch64"): ["manylinux_2_39_aarch64", "manylinux_2_34_aarch64", "manylinux_2_31_aarch64",
                           "manylinux_2_28_aarch64", "manylinux_2_17_aarch64", "manylinux2014_aarch64"],
    ("linux", "x86_64"): ["manylinux_2_34_x86_64", "manylinux_2_31_x86_64", "manylinux_2_28_x86_64",
                          "manylinux_2_17_x86_64", "manylinux2014_x86_64"],
    ("macos", "arm64"): ["macosx_15_0_arm64", "macosx_14_0_arm64", "macosx_13_0_arm64", "macosx_12_0_arm64",
                         "macosx_11_0_arm64", "macosx_11_0_universal2", "macosx_10_9_universal2"],
}  # fmt: skip
_NO_SOURCES = shutil.ignore_patterns(".*", "tests", "docs", "examples", "build")  # not part of a wheel


@dataclass(frozen=True, slots=True)
class WheelTarget:
    """What a machine runs: "linux" or "macos", "x86_64", "aarch64" or "arm64", and Python's "3.11.7"."""

    system: str
    processor: str
    python: str

    @property
    def is_here(self) -> bool:
        """Whether this machine's own pip chooses the same wheels."""
        return self == WheelTarget(system_of(platform.system()), platform.machine(), platform.python_version())


def extras_of(machine: MachineSettings) -> list[str]:
    """What its gateway and its workers' engines need installed, and on NVIDIA machines the figures of their GPUs.

    There llama.cpp is `llama-server` from PATH: the wheel that pip chooses computes on the CPU.
    """
    extras = {engine_entry(role.engine).extra for role in machine.roles if role.engine} - {""}
    extras |= {role.role for role in machine.roles if role.role == "gateway"}
    if machine.platform == "linux-cuda":
        extras = extras - {"llamacpp"} | {"nvml"}
    return sorted(extras)


def requirements_of(machine: MachineSettings, wheel: Path) -> list[str]:
    """The requirements for pip, there and here."""
    extras = extras_of(machine)
    requirements = [f"{wheel}[{','.join(extras)}]" if extras else str(wheel)]
    if machine.platform == "linux-cuda" and "mlx" in extras:
        requirements.append("mlx[cuda13]")
    brought = {engine_requirement(role.engine) for role in machine.roles if role.engine} - {""}
    return requirements + sorted(brought)


def build_wheel(checkout: Path, into: Path) -> Path:
    """This project's own wheel. Raises DeployFailed where it does not run from a checkout."""
    if not (checkout / "pyproject.toml").is_file():
        raise DeployFailed(f"{checkout} is not a checkout of Kvasir to build a wheel from: give --wheel FILE")
    into.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="kvasir-wheel-") as folder:  # a build leaves products beside its sources
        copy = shutil.copytree(checkout, Path(folder) / "kvasir", ignore=_NO_SOURCES)
        _pip("wheel", "--no-deps", "--wheel-dir", str(into), str(copy))
    return max(into.glob("kvasir_inference-*.whl"), key=lambda path: path.stat().st_mtime)


def fill(folder: Path, requirements: Sequence[str], target: WheelTarget, wheel: Path) -> None:
    """Download what the requirements probably need on the target; `fetch` brings what is found missing there.

    Probably, because pip judges conditions ("; sys_platform == …") by the machine that it runs on, and never by the
    one that it downloads for. So for another system there is nothing to begin with but our own wheel.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(wheel, folder)
    if target.system == system_of(platform.system()):
        _pip("download", *_options(folder, target), *requirements)


def fetch(folder: Path, requirement: str, target: WheelTarget) -> None:
    """Download one wheel for the target, without what it needs in turn. Raises DeployFailed with pip's last words."""
    _pip("download", "--no-deps", *_options(folder, target), requirement)


def missing_in(error: str) -> str:
    """The requirement that pip did not find, by its error message; "" if that says something else."""
    match = re.search(r"No matching distribution found for ([^;()]+)", error)
    return match[1].strip() if match else ""


def _options(folder: Path, target: WheelTarget) -> list[str]:
    options = ["--dest", str(folder), "--only-binary=:all:"]
    if target.is_here:
        return options
    try:
        tags = _TAGS[target.system, target.processor]
    except KeyError:
        raise DeployFailed(f"no wheels are known for {target.system} on {target.processor}") from None
    options += ["--python-version", target.python, "--implementation", "cp"]
    return options + [word for tag in tags for word in ("--platform", tag)]


def release_name(wheel: Path, requirements: Sequence[str]) -> str:
    """Names what is installed: the wheel's bytes, and what else is asked for."""
    digest = hashlib.sha256(wheel.read_bytes())
    digest.update("\n".join(Path(requirement).name for requirement in requirements).encode())
    return f"{wheel.name.split('-')[1]}-{digest.hexdigest()[:12]}"


def _pip(*arguments: str) -> None:
    command = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    completed_process = subprocess.run(command, capture_output=True, text=True, check=False)
    if completed_process.returncode:
        errors = [line for line in completed_process.stderr.splitlines() if line.strip()]
        raise DeployFailed(f"pip {arguments[0]}: {errors[-1] if errors else 'it failed'}")


def system_of(name: str) -> str:
    """A system as `uname -s` calls it, by its name in WheelTarget."""
    return {"Darwin": "macos", "Linux": "linux"}.get(name, name.lower())
