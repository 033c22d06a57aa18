"""`make test-gpu` where there is no GPU: it says so, and on the CPU all its parts run with tiny shapes."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks import gpu_figures, gpu_parts
from tests.support import gpu_wheels

pytestmark = pytest.mark.torch

ROOT = Path(__file__).parents[2]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "benchmarks.gpu_figures", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300, check=False)


def test_without_cuda_it_says_so_and_writes_nothing(tmp_path: Path) -> None:
    done = run("--out", str(tmp_path / "gpu.json"))
    assert done.returncode == 2
    assert "finds no CUDA device here. Nothing was run." in done.stderr
    assert not (tmp_path / "gpu.json").exists()


def test_releases_that_are_too_old_or_absent_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_figures, "version", {"torch": "2.10.1+cu129", "transformers": "5.17.0"}.__getitem__)
    assert gpu_figures.why_not("cpu") == "torch 2.10.1+cu129 is installed; 2.11 or later is needed"
    monkeypatch.setattr(gpu_figures, "version", {"torch": "2.11.0", "transformers": "5.17.0"}.__getitem__)
    assert gpu_figures.why_not("cpu") == ""
    monkeypatch.setattr(gpu_figures, "MINIMUM", {"no_such_package": (1, 0)})
    assert gpu_figures.why_not("cpu") == "no no_such_package is installed; 1.0 or later is needed"


def test_the_real_shapes_fit_what_the_parts_load(tmp_path: Path) -> None:
    """Of what only a GPU is given, the prompt that is copied out while it is computed."""
    bench = gpu_parts.Bench("cuda", 0, tmp_path)
    assert bench.longest == max(bench.lengths) * 2 == gpu_parts._CONTEXT
    assert all(shape["max_position_embeddings"] >= max(bench.lengths) for shape in gpu_parts._SHAPES.values())


def test_the_wheels_are_for_the_engine_and_leave_out_what_the_machine_has() -> None:
    wanted = gpu_wheels.wanted()
    assert any(each.startswith("llguidance") for each in wanted)
    assert any(each.startswith("pika") for each in wanted)
    assert not [each for each in wanted if each.startswith(("torch", "transformers", "tokenizers", "numpy"))]


def test_every_part_runs_and_one_file_holds_all_of_them(tmp_path: Path) -> None:
    done = run("--out", str(tmp_path / "gpu.json"), "--device", "cpu", "--seed", "3")
    assert done.returncode == 0, done.stderr
    found = json.loads((tmp_path / "gpu.json").read_text())
    assert found == json.loads(done.stdout.splitlines()[-1])
    assert (found["ok"], found["failed"], found["seed"]) == (True, {}, 3)
    assert [row["dtype"] for row in found["engine"]] == ["bf16", "f16"]
    assert {row["prompts"] for row in found["prefill"]} == {1, 2}
    assert all(row["tokens_per_s"] > 0 for row in found["prefill"])
    assert 0 < found["export"]["first_block_share"] <= 1
    assert found["copies"]["upload_seconds"] > 0
    # And layers that did not fit are named
    assert [row["did_not_fit"] for row in found["shapes"]] == [
        f"1 of 4 layers of {name}" for name in ("qwen3-30B-A3B", "gpt-oss-120b")
    ]
    assert found["a_class"]["verified"] == found["a_class"]["succeeded"] == found["a_class"]["jobs"] == 6
    assert found["a_class"]["evaluated_tokens"] == 6
