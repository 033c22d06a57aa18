"""Slot files as releases of llama.cpp write them, recorded for tests/unit/engines/test_slot_releases.py.

`python -m tests.support.slot_recordings` records them again: each release's wheel, in its own environment, loads a
tiny random model, evaluates TOKENS in the first of two slots, and saves it.
"""

import os
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path

from engines.llamacpp.start import start
from engines.registry import EngineOptions
from tests.support import scratch_env
from tests.support.tiny_gguf import TinyModel, write_gguf

RELEASES = ("2026.8.10229", "2026.8.10566", "2026.9.10809", "2026.9.11063", "2026.10.11549")
MODELS = {
    "qwen3": TinyModel(layers=2, context=256),
    "gpt-oss": TinyModel("gpt-oss", layers=2, context=256, window=4),
}
TOKENS = (5, 17, 40, 41, 42, 60, 99)
FOLDER = Path(__file__).parents[1] / "unit" / "engines" / "slot_files"


def path_of(model: str, release: str) -> Path:
    """Where a recording lies."""
    return FOLDER / f"{model}-{release}.slot"


def _record(release: str) -> None:
    """With the release that this Python has."""
    for name, model in MODELS.items():
        with tempfile.TemporaryDirectory() as folder:
            weights = write_gguf(Path(folder) / f"{name}.gguf", model)
            with closing(start(EngineOptions(str(weights), model.context, slots=1, threads=1))) as backing:
                body = {"prompt": TOKENS, "n_predict": 0, "id_slot": 0, "cache_prompt": True}
                backing.server.post("/completion", body)
                backing.server.post("/slots/0?action=save", {"filename": "recorded"})
                assert backing.slot_folder is not None
                path_of(name, release).write_bytes((backing.slot_folder / "recorded").read_bytes())


def main() -> None:
    """Record them all."""
    if len(sys.argv) > 1:
        _record(sys.argv[1])
        return
    FOLDER.mkdir(exist_ok=True)
    for release in RELEASES:
        packages = str(scratch_env.packages(f"xllamacpp-{release}"))
        environment = os.environ | {"PYTHONPATH": os.pathsep.join((packages, *sys.path[:1]))}
        subprocess.run([sys.executable, "-m", __spec__.name, release], env=environment, check=True)


if __name__ == "__main__":
    main()
