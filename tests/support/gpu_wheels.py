"""Fetches what `make test-gpu` needs on a machine without a network: `python -m tests.support.gpu_wheels FOLDER`.

Kvasir's own wheel, and those that it depends on. Left out is what PyTorch and transformers bring along, which are on
that machine. For another Python than this one's: GPU_PYTHON_VERSION=3.12.
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
# That a transformers engine needs beside the distribution's own.
_MORE = ("llguidance>=1.3",)


def fetch(folder: Path, python_version: str) -> int:
    """The bytes of the wheels that lie there now."""
    folder.mkdir(parents=True, exist_ok=True)
    for wheel in folder.glob("*.whl"):
        wheel.unlink()
    with (ROOT / "pyproject.toml").open("rb") as file:
        wanted = [*tomllib.load(file)["project"]["dependencies"], *_MORE]
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet"]
    machine = platform.machine()
    platforms = [f"--platform={name}_{machine}" for name in ("manylinux_2_28", "manylinux_2_17", "manylinux2014")]
    target = ["--only-binary=:all:", f"--python-version={python_version}", "--implementation=cp", *platforms]
    subprocess.run([*pip, "download", *target, "--dest", str(folder), *wanted], check=True)
    for name in _BROUGHT_ALONG:
        for wheel in folder.glob(f"{name}-*.whl"):
            wheel.unlink()
    subprocess.run([*pip, "wheel", "--no-deps", "--wheel-dir", str(folder), str(ROOT)], check=True)
    return sum(wheel.stat().st_size for wheel in folder.glob("*.whl"))


def main() -> int:
    """Fetch them, and say how large they are."""
    folder = Path(sys.argv[1])
    python_version = os.environ.get("GPU_PYTHON_VERSION") or platform.python_version().rpartition(".")[0]
    size = fetch(folder, python_version)
    count = len(list(folder.glob("*.whl")))
    sys.stdout.write(f"{folder}: {count} wheels for Python {python_version}, {size / 1e6:.1f} MB\n")
    return 0 if size <= MOST_BYTES else 1


if __name__ == "__main__":
    sys.exit(main())
