"""Fetches what `make test-gpu` needs on a machine without a network: `python -m tests.support.gpu_wheels FOLDER`.

Kvasir's own wheel, and those that it and its transformers engine depend on. Left out is what PyTorch and transformers
bring along, which are on that machine. For another Python than this one's: GPU_PYTHON_VERSION=3.12. For another
processor: GPU_MACHINE=aarch64.
"""

import os
import platform
import subprocess
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[2]
MOST_BYTES = 40_000_000
_BROUGHT_ALONG = ("numpy", "torch", "transformers", "tokenizers", "safetensors", "huggingface_hub", "hf_xet")
# pip takes a wheel for a machine that it does not run on only by a tag that it is given word for word. llguidance's
# wheels want a glibc of 2.31, which Ubuntu has had since 20.04; numpy's oldest tag is of 2.5.
_PLATFORMS = (*(f"manylinux_2_{minor}" for minor in range(31, 4, -1)), "manylinux2014", "manylinux2010", "manylinux1")
_MACHINES = {"arm64": "aarch64", "AMD64": "x86_64"}  # as macOS and Windows call them


def wanted() -> list[str]:
    """The requirements of the distribution and of its transformers engine, but for what is on that machine."""
    with (ROOT / "pyproject.toml").open("rb") as file:
        project = tomllib.load(file)["project"]
    requirements: list[str] = [*project["dependencies"], *project["optional-dependencies"]["torch"]]
    return [each for each in requirements if not each.startswith(_BROUGHT_ALONG)]


def fetch(folder: Path, python_version: str, machine: str) -> int:
    """The bytes of the wheels that lie there now."""
    folder.mkdir(parents=True, exist_ok=True)
    for wheel in folder.glob("*.whl"):
        wheel.unlink()
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    platforms = [f"--platform={name}_{machine}" for name in _PLATFORMS]
    target = ["--only-binary=:all:", f"--python-version={python_version}", "--implementation=cp", *platforms]
    subprocess.run([*pip, "download", *target, "--dest", str(folder), *wanted()], check=True)
    for name in _BROUGHT_ALONG:
        for wheel in folder.glob(f"{name}-*.whl"):
            wheel.unlink()
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", str(folder), str(ROOT)], check=True)
    return sum(wheel.stat().st_size for wheel in folder.glob("*.whl"))


def main() -> int:
    """Fetch them, and say how large they are."""
    folder = Path(sys.argv[1])
    python_version = os.environ.get("GPU_PYTHON_VERSION") or platform.python_version().rpartition(".")[0]
    machine = os.environ.get("GPU_MACHINE") or _MACHINES.get(platform.machine(), platform.machine())
    size = fetch(folder, python_version, machine)
    count = len(list(folder.glob("*.whl")))
    sys.stdout.write(f"{folder}: {count} wheels for Python {python_version} on {machine}, {size / 1e6:.1f} MB\n")
    return 0 if size <= MOST_BYTES else 1


if __name__ == "__main__":
    sys.exit(main())
