"""What sketches of KV caches show, and what they do not: `python -m benchmarks.sketches [--seeds 100]`.

Tiny models with random weights (`matrix_models`), the same in a GGUF file and in a folder, both float32.

    pairs      the sketches of llama.cpp and MLX of the same weights, for each model and seed
    mutations  MLX, and PyTorch where it is installed, with the model changed in a way that two engines may differ in,
               against llama.cpp's sketch of it as it is, at the tolerance of each rounding; the weights stay float32,
               so rounding itself adds nothing

`sketch_agrees`: whether KV caches would be taken. `beyond`: the difference in the worst layer, as a multiple of what is
taken for rounding. What engines state of their RoPE is left out of the comparison, since it would tell at once: the
numbers have to. `all_agree`: every pair agrees; `all_refused`: every mutation is at least 3 times beyond float16's
rounding. Those that coarser rounding hides are the rows with `sketch_agrees` true, or below 3.
"""

import json
import shutil
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import mlx.core as mx
import mlx.nn as nn
import mlx.optimizers as optim
import numpy as np
from mlx.utils import tree_flatten
from mlx_lm.utils import load_model
from safetensors.numpy import load_file, save_file

from benchmarks import harness, matrix_models
from engines.huggingface.weights import layout_of, open_folder
from engines.registry import EngineOptions, entries, open_engine
from engines.sketch import TOKENS, Sketch, SketchAgreement, compare, prompt_ids
from engines.sketching import compute_numbers
from messages.kv import KVLayout

STEPS, LEARNING_RATE, BATCH, LENGTH = 100, 2e-5, 2, 32

Config = dict[str, Any]
Weights = dict[str, Any]
Row = dict[str, Any]


@dataclass(frozen=True)
class Mutation:
    """A change of a model's folder; `models`: those that it can be made to."""

    change: Callable[[Config, Weights, np.random.Generator], None]
    models: tuple[str, ...] = ("qwen3", "llama", "gpt-oss")


def sketch(engine: str, folder: Path, model: str, weights: Path | str = "", layout: KVLayout | None = None) -> Sketch:
    """A sketch of what the engine computes; no file is kept. `layout` is taken for the engine's, whatever that is."""
    context = matrix_models.context_of(model)
    options = EngineOptions(
        str(weights or matrix_models.weights_for(engine, folder, model)), context, slots=1, threads=1
    )
    with closing(open_engine(engine, options)) as opened:
        info = opened.info
        shape = layout or info.layout
        assert shape is not None
        tokens = min(TOKENS, context) - 1
        numbers = compute_numbers(opened, shape, prompt_ids(info.vocabulary, tokens))
        return Sketch(engine, info.rounding, info.fingerprint, info.tokenizer, tokens, shape, (), numbers)


def beyond(found: SketchAgreement) -> float:
    """How far the worst layer is beyond what is taken for rounding, as a factor; below 1: accepted."""
    return max((max(keys, values) / tolerance for keys, values, tolerance in found.layers), default=float("inf"))


def pairs(models: Sequence[str], seeds: int) -> list[Row]:
    """Both engines' sketches of the same weights."""
    found = []
    for model in models:
        for seed in range(seeds):
            with tempfile.TemporaryDirectory() as folder:
                matrix_models.write(Path(folder), model, seed)
                made = compare(*(sketch(engine, Path(folder), model) for engine in ("llamacpp", "mlx")))
            row = {"model": model, "seed": seed, "sketch_agrees": not made.problem}
            found.append(row | {"beyond": round(beyond(made), 2), "why": made.problem})
    return found


def mutations(folder: Path, models: Sequence[str], seed: int, engine: str) -> list[Row]:
    """Every mutation of every model in `engine` against llama.cpp's sketch of the model as it is, at each rounding.

    A coarser rounding is judged by its tolerance; the model itself stays float32, so rounding adds nothing.
    """
    found = []
    for model in models:
        own = sketch("llamacpp", folder, model)
        for name in [name for name, mutation in MUTATIONS.items() if model in mutation.models]:
            theirs = mutated_sketch(folder, model, name, seed, engine)
            for rounding in ("f16", "bf16", "q8", "q4"):
                made = compare(replace(own, rounding=rounding), theirs)
                row = {"engine": engine, "model": model, "mutation": name, "rounding": rounding}
                row |= {"sketch_agrees": not made.problem}
                found.append(row | {"beyond": round(beyond(made), 2), "why": made.problem})
    return found


def mutated_sketch(folder: Path, model: str, name: str, seed: int, engine: str = "mlx") -> Sketch:
    """What MLX or PyTorch computes from the model changed in this way, taken for the model as it is."""
    as_is = open_folder(str(matrix_models.weights_for(engine, folder, model)))
    changed = mutated(as_is.path, folder / f"{model}, {name}", name, seed)
    try:
        return sketch(engine, folder, model, changed, layout_of(as_is, "f32"))
    finally:
        shutil.rmtree(changed)


def mutated(source: Path, target: Path, name: str, seed: int) -> Path:
    """The folder, changed, at `target`."""
    shutil.copytree(source, target)
    config = json.loads((target / "config.json").read_text())
    weights = load_file(target / "model.safetensors")
    if name == FINE_TUNED:
        weights = _fine_tuned(target, seed)
    else:
        MUTATIONS[name].change(config, weights, np.random.default_rng(seed))
    (target / "config.json").write_text(json.dumps(config))
    save_file(weights, target / "model.safetensors", metadata={"format": "pt"})
    return target


def _rope(**values: Any) -> Callable[[Config, Weights, np.random.Generator], None]:
    def change(config: Config, _weights: Weights, _random: np.random.Generator) -> None:
        rope = {"rope_type": "default", "rope_theta": matrix_models.ROPE_THETA} | values
        config = config.get("text_config", config)
        stated = config.get("rope_parameters", {})
        if "partial_rotary_factor" in stated:  # a hybrid model's, which says more of RoPE
            rope = stated | rope
        config["rope_parameters"] = rope
        config |= {"rope_theta": rope["rope_theta"], "rope_scaling": rope if rope["rope_type"] != "default" else None}

    return change


def _interleaved(_config: Config, weights: Weights, _random: np.random.Generator) -> None:
    """Q and K in the order that llama.cpp's converter gives a llama's, for a reader who turns halves."""
    for name, value in weights.items():
        if name.endswith(("q_proj.weight", "k_proj.weight", "q_proj.bias", "k_proj.bias")):
            halves = value.reshape(-1, 2, matrix_models.HEAD_DIM // 2, *value.shape[1:])
            weights[name] = np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(value.shape)
        if name.endswith(("q_norm.weight", "k_norm.weight")):
            weights[name] = np.ascontiguousarray(value.reshape(2, -1).T).reshape(value.shape)


def _wider_window(config: Config, _weights: Weights, _random: np.random.Generator) -> None:
    config["sliding_window"] = matrix_models.WINDOW + 8


def _layer(number: int, share: float) -> Callable[[Config, Weights, np.random.Generator], None]:
    """Noise of this share of each matrix' numbers, in one layer."""

    def change(_config: Config, weights: Weights, random: np.random.Generator) -> None:
        for name, value in weights.items():
            if f".layers.{number}." in name and value.ndim > 1:
                noise = random.standard_normal(value.shape) * value.std() * share
                weights[name] = (value + noise).astype(value.dtype)

    return change


def _as_it_is(_config: Config, _weights: Weights, _random: np.random.Generator) -> None:
    """Its weights come from training."""


def _fine_tuned(folder: Path, seed: int) -> Weights:
    """Adam on made-up text: what another fine-tune of the same base has after its first steps."""
    model, _ = load_model(folder)
    optimizer = optim.Adam(learning_rate=LEARNING_RATE)
    random = np.random.default_rng(seed)

    def loss(model: nn.Module, ids: mx.array) -> mx.array:
        return nn.losses.cross_entropy(model(ids[:, :-1]), ids[:, 1:], reduction="mean")

    step = nn.value_and_grad(model, loss)
    for _ in range(STEPS):
        starts = random.integers(0, matrix_models.num_plain_tokens(), (BATCH, 1))
        ids = (starts + np.arange(LENGTH) * random.integers(1, 7, (BATCH, 1))) % matrix_models.num_plain_tokens()
        _, gradients = step(model, mx.array(ids))
        optimizer.update(model, gradients)
        mx.eval(model.parameters(), optimizer.state)
    return {name: np.array(value) for name, value in tree_flatten(model.parameters())}


FINE_TUNED = "fine-tuned for 100 steps"
MUTATIONS = {
    "RoPE base 12,000 for 10,000": Mutation(_rope(rope_theta=12_000.0)),
    "RoPE scaled linearly by 1.1": Mutation(_rope(rope_type="linear", factor=1.1), ("qwen3", "llama")),
    "pairs interleaved": Mutation(_interleaved),
    "window 24 for 16": Mutation(_wider_window, ("gpt-oss",)),
    "layer 0 by 5 %": Mutation(_layer(0, 0.05)),
    "layer 1 by 5 %": Mutation(_layer(1, 0.05)),
    FINE_TUNED: Mutation(_as_it_is, ("qwen3", "llama")),
}


def main() -> int:
    """All pairs and all mutations."""
    parser = harness.parser(__doc__)
    parser.add_argument("--seeds", type=int, default=5, help="of random weights for each model's pair")
    arguments = parser.parse_args()
    print(harness.machine())
    models = (
        ("qwen3",)
        if arguments.quick
        else tuple(model for model in matrix_models.KINDS if model not in matrix_models.DIFFERENT)
    )
    true = pairs(models, 1 if arguments.quick else arguments.seeds)
    with tempfile.TemporaryDirectory() as folder:
        for model in models:
            matrix_models.write(Path(folder), model, arguments.seed)
        engines = [engine for engine in ("mlx", "transformers") if not entries()[engine].install_command()]
        changed = [row for engine in engines for row in mutations(Path(folder), models, arguments.seed, engine)]
    for model in models:
        worst = max(row["beyond"] for row in true if row["model"] == model)
        print(f"{model:10} true pairs: at most {worst:.2f} of what is taken for rounding")
    for row in changed:
        case = f"{row['engine']:12} {row['model']:10} {row['mutation']:28} {row['rounding']:4}"
        print(f"{case} {row['beyond']:8.2f}  {row['why']}")
    fine = [row for row in changed if row["rounding"] == "f16"]
    harness.finish(
        pairs=true,
        mutations=changed,
        all_agree=all(row["sketch_agrees"] for row in true),
        all_refused=bool(fine) and all(row["beyond"] >= 3 for row in fine),
        seed=arguments.seed,
    )
    return 0


if __name__ == "__main__":
    sys.exit(main())
