"""RoPE: as folders state it, as MLX computes it, as llama.cpp does, and what is said where two differ."""

import json
import math
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest
from mlx.utils import tree_flatten
from mlx_lm.models import gemma3_text, gpt_oss, llama, olmo2, phi3, qwen2, qwen2_moe, qwen3, qwen3_moe

from engines.family import family_fingerprint
from engines.huggingface.rope import FULL, SLIDING, stated_rope
from engines.huggingface.weights import HFFolder, layout_of, open_folder
from engines.mlx import folder as mlx_folder
from engines.mlx import model as mlx_model
from engines.mlx import rope as mlx_rope
from engines.rope import Rope, difference, ropes_text
from messages.errors import ConfigError, KVTransferFailed
from messages.kv import KVLayout
from tests.support.rope_folders import CASES, configuration

CLASSES: dict[str, Any] = {
    "llama": llama, "mistral": llama, "qwen2": qwen2, "qwen2_moe": qwen2_moe, "qwen3": qwen3, "qwen3_moe": qwen3_moe,
    "gpt_oss": gpt_oss, "gemma3_text": gemma3_text, "olmo2": olmo2, "phi3": phi3,
}  # fmt: skip
LAYOUT = KVLayout(2, 2, 16, "f16")


def write_folder(path: Path, config: dict[str, Any]) -> HFFolder:
    """A folder with random weights under mlx-lm's own names."""
    module = CLASSES[config["model_type"]]
    model = module.Model(module.ModelArgs.from_dict(config | mlx_folder.config_changes(config)))
    path.mkdir()
    mx.save_safetensors(str(path / "model.safetensors"), dict(tree_flatten(model.parameters())))
    (path / "config.json").write_text(json.dumps(config))
    return open_folder(str(path))


def by_hand(case: str) -> list[float]:
    """The frequencies of a case without scaling, or with one that slows all pairs alike."""
    _, base, scaling = CASES[case]
    return [base ** (-pair / 8) / scaling.get("factor", 1.0) for pair in range(8)]


@pytest.mark.parametrize("version", [4, 5])
@pytest.mark.parametrize("case", CASES)
def test_mlx_turns_keys_as_either_version_of_a_folder_states(case: str, version: int, tmp_path: Path) -> None:
    # Given a folder as transformers 4 or 5 writes it, which stays as it is
    config = configuration(case, version)
    folder = write_folder(tmp_path / "model", config)
    # When MLX loads it
    model = mlx_model.load(folder, 0).model
    # Then each layer turns its keys by the formula
    for layer in model.layers:
        kind = SLIDING if getattr(layer.self_attn, "is_sliding", False) else FULL
        assert difference([mlx_rope.measure_rope(layer.self_attn.rope, 16)], [stated_rope(config, kind)]) == ""
        if kind == FULL and CASES[case][2].get("rope_type", "linear") == "linear":
            np.testing.assert_allclose(mlx_rope.measure_rope(layer.self_attn.rope, 16).frequencies, by_hand(case), 1e-5)
    assert json.loads((tmp_path / "model" / "config.json").read_text()) == config


@pytest.mark.parametrize("case", CASES)
def test_both_versions_state_the_same(case: str) -> None:
    for kind in (FULL, SLIDING):
        assert stated_rope(configuration(case, 4), kind) == stated_rope(configuration(case, 5), kind)


def test_experts_of_one_tensor_are_known_under_mlx_s_names(tmp_path: Path) -> None:
    # Given a folder of qwen3_moe with its experts as mlx-lm keeps them, and one as transformers 5 may
    config = configuration("qwen3_moe", 5)
    plain = write_folder(tmp_path / "plain", config)
    (tmp_path / "fused").mkdir()
    weights = mx.load(str(tmp_path / "plain" / "model.safetensors"))
    fused = dict(weights)
    for layer in range(2):
        inside = f"model.layers.{layer}.mlp."
        gate, up, down = (fused.pop(f"{inside}switch_mlp.{name}_proj.weight") for name in ("gate", "up", "down"))
        fused |= {f"{inside}experts.gate_up_proj": mx.concatenate([gate, up], 1), f"{inside}experts.down_proj": down}
    mx.save_safetensors(str(tmp_path / "fused" / "model.safetensors"), fused)
    (tmp_path / "fused" / "config.json").write_text(json.dumps(config))
    # Then both are the same model
    tokens = mx.array([[1, 2, 3, 4]])
    one, other = (mlx_model.load(each, 0).model(tokens) for each in (plain, open_folder(str(tmp_path / "fused"))))
    assert mx.array_equal(one, other)


@pytest.mark.parametrize("kind", ["mistral", "phi3", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe"])
def test_a_window_that_mlx_ignores_is_refused_unless_nothing_reaches_beyond_it(kind: str, tmp_path: Path) -> None:
    case = next(name for name in CASES if name.startswith(kind) and CASES[name][0] == kind)
    window = {"sliding_window": 512, "use_sliding_window": True, "max_window_layers": 1}
    folder = write_folder(tmp_path / "model", configuration(case, 5) | window)
    with pytest.raises(ConfigError, match=f"MLX ignores the sliding window of 512 positions .* a {kind} model"):
        mlx_model.load(folder, 0)
    assert mlx_model.load(folder, 512)
    if kind not in ("mistral", "phi3"):  # whose windows nothing turns off
        assert mlx_model.load(write_folder(tmp_path / "off", folder.config | {"use_sliding_window": False}), 0)


def test_a_rope_that_depends_on_the_prompt_or_turns_a_part_is_not_transferred() -> None:
    config = configuration("llama", 5)
    for rope in ({"rope_type": "dynamic", "factor": 2.0}, {"partial_rotary_factor": 0.5}):
        changed = config | {"rope_parameters": {"rope_theta": 1e4, **rope}}
        with pytest.raises(KVTransferFailed):
            stated_rope(changed)
        with pytest.raises(KVTransferFailed):
            layout_of(HFFolder(Path("model"), changed, (), ""), "f16")


def test_a_scaling_of_which_mlx_knows_nothing_is_refused_and_not_left_out(tmp_path: Path) -> None:
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}
    with pytest.raises(ConfigError, match=r"MLX ignores this model's RoPE scaling: .*'dynamic'"):
        mlx_model.load(write_folder(tmp_path / "moe", configuration("qwen3_moe", 5) | {"rope_parameters": rope}), 0)
    loaded = mlx_model.load(write_folder(tmp_path / "llama", configuration("llama", 5) | {"rope_parameters": rope}), 0)
    assert (loaded.layout, loaded.ropes) == (None, ())


def test_what_differs_is_named_and_rounding_is_not() -> None:
    plain, yarn = (stated_rope(configuration(case, 5)) for case in ("qwen2", "qwen2, yarn"))
    ramp, truncated = (stated_rope(configuration(case, 5)) for case in ("gpt_oss, yarn", "gpt_oss, truncated yarn"))
    rounded = Rope(tuple(float(np.float32(f)) for f in yarn.frequencies), yarn.scale, yarn.base)

    assert difference([yarn], [rounded]) == ""
    assert difference([yarn], []) == ""
    assert difference([plain], [yarn]) == "RoPE base 10,000 and 1,000,000"
    assert difference([ramp], [truncated]).startswith("RoPE scaling: pair 3 of 8 is turned by 0.02071 and 0.02541")
    assert difference([yarn], [Rope(yarn.frequencies, 1.0)]) == "RoPE scaling: an attention factor of 1.1386 and 1"
    assert "pairs of each key" in difference([yarn], [Rope(yarn.frequencies[1:])])
    assert "kinds of layers" in difference([yarn], [yarn, plain])


def test_a_family_is_one_rope() -> None:
    ramp, truncated = (stated_rope(configuration(case, 5)) for case in ("gpt_oss, yarn", "gpt_oss, truncated yarn"))
    rounded = Rope(tuple(float(np.float32(f)) for f in ramp.frequencies), ramp.scale, ramp.base)
    names = [family_fingerprint("m", ["mlx", "llamacpp"], LAYOUT, [rope]) for rope in (ramp, truncated, rounded)]

    assert names[0] == names[2] != names[1]
    assert ropes_text([ramp]).startswith("RoPE base 1.5e+05, 8 pairs, scaling 0.25 x 1.139, ")
    assert math.isclose(ramp.scale, 0.1 * math.log(4) + 1)
