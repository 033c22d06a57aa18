"""Sketches of real engines: two that compute the same agree; what computes something else is told from rounding."""

import json
from contextlib import closing
from pathlib import Path

import pytest

from benchmarks import matrix_models
from benchmarks.sketches import FINE_TUNED, MUTATIONS, beyond, mutated_sketch, sketch
from engines.registry import EngineOptions, open_engine
from engines.sketch import compare, read_sketch
from engines.sketching import sketch_of

DEMO = Path(__file__).parents[2] / "examples" / "model"
PAIRS = [(model, name) for name, mutation in MUTATIONS.items() for model in mutation.models]
# What a refusal of each must say, in a layer that attends to everything, and in one with a window.
REASONS = {
    "RoPE base 12,000 for 10,000": "RoPE's base or scaling",
    "RoPE scaled linearly by 1.1": "RoPE's base or scaling",
    "pairs interleaved": "interleaved",
    "window 24 for 16": "a sliding window, or of attention: nothing differs up to position 9",
    "layer 0 by 5 %": "they hold other weights",
    "layer 1 by 5 %": "they hold other weights",
    FINE_TUNED: "they hold other weights",
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models")
    for model in matrix_models.KINDS:
        matrix_models.write(folder, model, seed=0)
    return folder


@pytest.mark.system  # every kind of model
@pytest.mark.parametrize("model", [model for model in matrix_models.KINDS if model not in matrix_models.DIFFERENT])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_two_engines_with_the_same_weights_agree(model: str, seed: int, tmp_path: Path) -> None:
    matrix_models.write(tmp_path, model, seed)
    ours, theirs = (sketch(engine, tmp_path, model) for engine in ("llamacpp", "mlx"))

    found = compare(ours, theirs)

    assert found.problem == ""
    assert found.formats_differ, "llama.cpp's cache is float16, MLX's float32"
    assert 0.01 < beyond(found) < 0.6, found.layers  # there is rounding, and room for more of it
    assert compare(theirs, ours).layers == found.layers


def test_a_ramp_that_only_one_engine_truncates_is_seen_in_their_sketches(models: Path) -> None:
    ours, theirs = (sketch(engine, models, "gpt-oss-untruncated") for engine in ("llamacpp", "mlx"))

    found = compare(ours, theirs)

    assert beyond(found) >= 3
    assert "RoPE's base or scaling" in found.problem


@pytest.mark.system  # every kind of model
@pytest.mark.parametrize(("model", "mutation"), PAIRS)
def test_what_computes_something_else_is_refused_with_the_likely_reason(
    models: Path, model: str, mutation: str
) -> None:
    found = compare(sketch("llamacpp", models, model), mutated_sketch(models, model, mutation, seed=0))

    assert beyond(found) >= 3
    assert "mlx and llamacpp compute different KV caches: in layer " in found.problem
    assert REASONS[mutation] in found.problem


def test_the_same_weights_in_other_formats_agree_and_are_called_rounded(models: Path) -> None:
    folder = matrix_models.weights_for("mlx", models, "qwen3")
    whole = sketch("mlx", models, "qwen3")

    for dtype in ("float16", "bfloat16"):
        found = compare(whole, sketch("mlx", models, "qwen3", f"{folder}?dtype={dtype}"))
        assert (found.problem, found.formats_differ) == ("", True)
        assert beyond(found) < 0.6, (dtype, found.layers)


def test_an_engine_makes_its_sketch_once_and_keeps_it_for_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a worker that starts for the first time
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    options = EngineOptions(str(DEMO / "kvasir-demo.gguf"), 512, slots=1, threads=1)
    with closing(open_engine("llamacpp", options)) as engine:
        made = sketch_of(engine)
        (note,) = (tmp_path / "kvasir" / "sketches").iterdir()
        assert note.stat().st_mode & 0o777 == 0o600

        # When it starts again, then nothing is computed
        monkeypatch.setattr(engine, "prefill", lambda *_: pytest.fail("it was computed again"))
        again = sketch_of(engine)

    assert made
    assert again
    assert again.name == made.name
    assert again.body == made.body
    assert (made.engine, made.rounding, made.tokens) == ("llamacpp", "f32", 511)
    assert made.ropes[0].base == json.loads((DEMO / "kvasir-demo/config.json").read_text())["rope_theta"]
    assert compare(made, read_sketch(again.body, made.name)).formats_differ is False


def test_a_damaged_file_is_made_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    options = EngineOptions(str(DEMO / "kvasir-demo.gguf"), 256, slots=1, threads=1)
    with closing(open_engine("llamacpp", options)) as engine:
        made = sketch_of(engine)
        (note,) = (tmp_path / "kvasir" / "sketches").iterdir()
        note.write_bytes(note.read_bytes()[:-4])

        again = sketch_of(engine)

    assert made
    assert again
    assert again.name == made.name
    assert note.read_bytes() == made.body
