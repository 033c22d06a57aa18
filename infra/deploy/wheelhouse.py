"""A folder with all the wheels that a machine needs. It is filled here, because the machine may have no internet."""

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

# Platform tags for pip, if the target's platform differs from this machine's. The oldest tag comes last.
_TAGS = {
    ("linux", "aarch64"): ["manylinux_2_39_aarch64", "manylinux_2_34_aarch64", "manylinux_2_31_aarch64",
                           "manylinux_2_28_aarch64", "manylinux_2_17_aarch64", "manylinux2014_aarch64"],
    ("linux", "x86_64"): ["manylinux_2_34_x86_64", "manylinux_2_31_x86_64", "manylinux_2_28_x86_64",
                          "manylinux_2_17_x86_64", "manylinux2014_x86_64"],
    ("macos", "arm64"): ["macosx_15_0_arm64", "macosx_14_0_arm64", "macosx_13_0_arm64", "macosx_12_0_arm64",
                         "macosx_11_0_arm64", "macosx_11_0_universal2", "macosx_10_9_universal2"],
}  # fmt: skip
_NO_SOURCES = shutil.ignore_patterns(".*", "tests", "docs", "examples", "build")  # not in the wheel


@dataclass(frozen=True, slots=True)
class WheelTarget:
    """A machine's platform: "linux" or "macos"; "x86_64", "aarch64" or "arm64"; and Python's version, "3.11.7"."""

    system: str
    processor: str
    python: str

    @property
    def is_here(self) -> bool:
        """Whether pip on this machine chooses the same wheels by itself."""
        return self == WheelTarget(system_of(platform.system()), platform.machine(), platform.python_version())


def extras_of(machine: MachineSettings) -> list[str]:
    """Return the extras that its gateway and its workers' engines need, and on NVIDIA machines the GPU metrics.

    On those machines llama.cpp is `llama-server` from PATH, because the wheel that pip chooses computes on the CPU.
    """
    extras = {engine_entry(role.engine).extra for role in machine.roles if role.engine} - {""}
    extras |= {role.role for role in machine.roles if role.role == "gateway"}
    if machine.platform == "linux-cuda":
        extras = extras - {"llamacpp"} | {"nvml"}
    return sorted(extras)


def requirements_of(machine: MachineSettings, wheel: Path) -> list[str]:
    """Return the requirements for pip, both there and here."""
    extras = extras_of(machine)
    requirements = [f"{wheel}[{','.join(extras)}]" if extras else str(wheel)]
    if machine.platform == "linux-cuda" and "mlx" in extras:
        requirements.append("mlx[cuda13]")
    brought = {engine_requirement(role.engine) for role in machine.roles if role.engine} - {""}
    return requirements + sorted(brought)


def build_wheel(checkout: Path, into: Path) -> Path:
    """Build this project's own wheel. Raises DeployFailed if the project does not run from a checkout."""
    if not (checkout / "pyproject.toml").is_file():
        raise DeployFailed(
            f"{checkout} is not a checkout of Kvasir, so no wheel can be built from it: give --wheel FILE"
        )
    into.mkdir(parents=True, exist_ok=True)
    # While pip builds a wheel, it writes files beside the sources. So pip is given a copy of the sources.
    with tempfile.TemporaryDirectory(prefix="kvasir-wheel-") as folder:
        copy = shutil.copytree(checkout, Path(folder) / "kvasir", ignore=_NO_SOURCES)
        _pip("wheel", "--no-deps", "--wheel-dir", str(into), str(copy))
    return max(into.glob("kvasir_inference-*.whl"), key=lambda path: path.stat().st_mtime)


def fill(folder: Path, requirements: Sequence[str], target: WheelTarget, wheel: Path) -> None:
    """Download what the requirements probably need on the target. `fetch` adds what turns out to be missing there.

    pip evaluates conditions ("; sys_platform == …") for the machine that it runs on, not for the one that it downloads
    for. So for another system only our own wheel is put there at first.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copy(wheel, folder)
    if target.system == system_of(platform.system()):
        _pip("download", *_options(folder, target), *requirements)


def fetch(folder: Path, requirement: str, target: WheelTarget) -> None:
    """Download one wheel for the target, without its dependencies. Raises DeployFailed with pip's last error line."""
    _pip("download", "--no-deps", *_options(folder, target), requirement)


def missing_in(error: str) -> str:
    """Return the requirement that pip did not find, from its error message; "" for another error."""
    match = re.search(r"No matching distribution found for ([^;()]+)", error)
    return match[1].strip() if match else ""


def _options(folder: Path, target: WheelTarget) -> list[str]:
    options = ["--dest", str(folder), "--only-binary=:all:"]
    if target.is_here:
        return options
    try:
        tags = _TAGS[target.system, target.processor]
    except KeyError:
        raise DeployFailed(f"Kvasir has no wheels for {target.system} on {target.processor}") from None
    options += ["--python-version", target.python, "--implementation", "cp"]
    return options + [word for tag in tags for word in ("--platform", tag)]


def release_name(wheel: Path, requirements: Sequence[str]) -> str:
    """Return a release's name, made from the wheel's content and the other requirements."""
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
    """Return the name in WheelTarget of a system that `uname -s` calls `name`."""
    return {"Darwin": "macos", "Linux": "linux"}.get(name, name.lower())
