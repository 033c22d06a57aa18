"""Sketches of PyTorch's KV caches against those of llama.cpp and MLX, of the same weights."""

from pathlib import Path

import pytest

from benchmarks import matrix_models
from benchmarks.sketches import MUTATIONS, beyond, mutated_sketch, sketch
from engines.sketch import compare

pytestmark = pytest.mark.torch

CHANGED = [(model, name) for name, mutation in MUTATIONS.items() for model in mutation.models]


@pytest.mark.parametrize("model", [model for model in matrix_models.KINDS if model not in matrix_models.DIFFERENT])
def test_pytorch_computes_what_the_others_do_and_not_what_a_changed_model_does(model: str, tmp_path: Path) -> None:
    matrix_models.write(tmp_path, model, seed=0)
    torch, mlx, llama = (sketch(engine, tmp_path, model) for engine in ("transformers", "mlx", "llamacpp"))

    whole, halved = compare(torch, mlx), compare(torch, llama)
    assert (whole.problem, whole.formats_differ) == ("", False)
    assert (halved.problem, halved.formats_differ) == ("", True)
    assert beyond(whole) < 0.5 > beyond(halved)

    if not model.startswith("qwen3-moe"):
        changed = compare(torch, mutated_sketch(tmp_path, model, "RoPE base 12,000 for 10,000", seed=0))
        assert beyond(changed) > 3


@pytest.mark.parametrize(("model", "mutation"), CHANGED)
def test_a_changed_model_in_pytorch_is_told_from_rounding(model: str, mutation: str, tmp_path: Path) -> None:
    matrix_models.write(tmp_path, model, seed=0)
    changed = mutated_sketch(tmp_path, model, mutation, 0, "transformers")
    for engine in ("llamacpp", "mlx"):
        found = compare(sketch(engine, tmp_path, model), changed)
        assert beyond(found) >= 3, engine
        assert f"transformers and {engine} compute different KV caches: in layer " in found.problem
