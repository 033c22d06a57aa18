"""Model folders are checked before a library sees them; their KV layout and family name follow from their files."""

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from engines.huggingface.weights import HFFolder, fingerprint, layout_of, open_folder, weights_digest
from messages.errors import ConfigError, KVTransferFailed
from messages.kv import KVLayout

SIZES = {"num_hidden_layers": 4, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2}


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def write_folder(path: Path, seed: int = 0, **config: Any) -> Path:
    path.mkdir(exist_ok=True)
    (path / "config.json").write_text(json.dumps({"model_type": "qwen3"} | SIZES | config), encoding="utf-8")
    source = np.random.default_rng(seed)
    save_file({name: source.standard_normal((3, 5)) for name in ("a", "b")}, path / "model.safetensors")
    return path


def folder_of(**config: Any) -> HFFolder:
    return HFFolder(Path("model"), {"model_type": "qwen3"} | SIZES | config, (), "")


@pytest.mark.parametrize("keep", [0, 3, 20, 200, -1])
def test_weights_cut_short_anywhere_are_refused_in_one_sentence(tmp_path: Path, keep: int) -> None:
    file = write_folder(tmp_path / "model") / "model.safetensors"
    file.write_bytes(file.read_bytes()[:keep])
    with pytest.raises(ConfigError, match=str(file)):
        open_folder(str(tmp_path / "model"))


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    # Given no folder, one without weights, and one whose index names a file that isn't there
    folder = write_folder(tmp_path / "model")
    (tmp_path / "empty").mkdir()
    indexed = write_folder(tmp_path / "indexed")
    (indexed / "model.safetensors.index.json").write_text('{"weight_map": {"a": "model-00002.safetensors"}}')
    bare = write_folder(tmp_path / "bare")
    (bare / "model.safetensors").unlink()
    complaints = {
        str(tmp_path / "gone"): "no model folder",
        str(tmp_path / "empty"): "no config.json",
        str(indexed): "model-00002.safetensors",
        str(bare): "no model\\*.safetensors",
        f"{folder}?dtype=int4": "must be one of float16",
    }
    for weights, complaint in complaints.items():
        with pytest.raises(ConfigError, match=complaint):
            open_folder(weights)


def test_a_dtype_can_be_asked_for(tmp_path: Path) -> None:
    folder = write_folder(tmp_path / "model")
    assert open_folder(f"{folder}?dtype=float32").dtype == "float32"
    assert open_folder(str(folder)).dtype == ""


def test_the_layout_follows_from_the_configuration() -> None:
    kinds = ["sliding_attention", "full_attention"] * 2
    assert layout_of(folder_of(), "f16") == KVLayout(4, 2, 16, "f16")
    assert layout_of(folder_of(head_dim=32, num_key_value_heads=None), "bf16") == KVLayout(4, 4, 32, "bf16")
    for windowed in (folder_of(model_type="gpt_oss", sliding_window=8), folder_of(layer_types=kinds, sliding_window=8)):
        assert layout_of(windowed, "f32") == KVLayout(4, 2, 16, "f32", 8, (0, 2))
    assert layout_of(folder_of(sliding_window=8, use_sliding_window=False), "f16").window == 0
    gemma = folder_of(model_type="gemma3_text", sliding_window=8, sliding_window_pattern=4)
    assert layout_of(gemma, "f32") == KVLayout(4, 2, 16, "f32", 8, (0, 1, 2))


_STATES = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 16,
    "linear_conv_kernel_dim": 4,
}


def test_recurrent_layers_are_those_that_the_configuration_names_or_all_but_every_fourth() -> None:
    state = {"conv_shape": (2 * 2 * 8 + 4 * 16, 3), "matrix_shape": (4, 8, 16)}
    expected = KVLayout(4, 2, 16, "bf16", recurrent_layers=(0, 1, 2), **state)  # type: ignore[arg-type]

    flat = folder_of(model_type="qwen3_next", **_STATES)
    assert layout_of(flat, "bf16") == expected
    inner = flat.config | {"model_type": "qwen3_5_text"}
    nested = replace(flat, config={"model_type": "qwen3_5", "text_config": inner})
    assert layout_of(nested, "bf16") == expected
    kinds = ["linear_attention", "full_attention"] * 2
    assert layout_of(folder_of(model_type="qwen3_next", layer_types=kinds, **_STATES), "f16").recurrent_layers == (0, 2)
    every = folder_of(model_type="qwen3_5_text", full_attention_interval=2, **_STATES)
    assert layout_of(every, "f16").recurrent_layers == (0, 2)


@pytest.mark.parametrize(
    ("config", "reason"),
    [
        ({"model_type": "jamba"}, "Kvasir can't transfer the recurrent state of a 'jamba' model"),
        ({"model_type": "nemotron_h"}, "Kvasir can't transfer the recurrent state of a 'nemotron_h' model"),
        ({"model_type": "lfm2"}, "Kvasir can't transfer the recurrent state of a 'lfm2' model"),
        ({"model_type": "qwen3_next"}, "linear_num_key_heads"),
        ({"model_type": "qwen3_next", "layer_types": ["sliding_attention"] * 4, **_STATES}, "sliding_attention"),
        ({"model_type": "deepseek_v3"}, "deepseek_v3"),
        ({"kv_lora_rank": 512}, "that Kvasir does not know"),
        ({"partial_rotary_factor": 0.5}, "that Kvasir does not know"),
        ({"rope_traditional": True}, "that Kvasir does not know"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "scales its RoPE with the prompt"),
        ({"rope_scaling": {"type": "longrope", "factor": 2.0}}, "scales its RoPE with the prompt"),
        ({"rope_parameters": {"rope_type": "dynamic"}}, "scales its RoPE with the prompt"),
        ({"sliding_window": 8}, "which layers use a sliding window"),
        ({"layer_types": ["full_attention", "linear_attention"] * 2}, "linear_attention"),
        ({"num_hidden_layers": None}, "states no attention sizes"),
        ({"layer_types": ["sliding_attention"] * 4}, "states no attention sizes"),
        ({"num_attention_heads": 0, "num_key_value_heads": 0}, "states no attention sizes"),
    ],
)
def test_a_model_that_can_not_be_placed_is_refused_with_the_reason(config: dict[str, Any], reason: str) -> None:
    with pytest.raises(KVTransferFailed, match=reason):
        layout_of(folder_of(**config), "f16")


def test_the_fingerprint_changes_with_all_that_changes_the_cache(tmp_path: Path) -> None:
    # Given a model, and others that differ from it in one thing
    def name(path: str, tokenizer: str = "t", seed: int = 0, **config: Any) -> str:
        folder = open_folder(str(write_folder(tmp_path / path, seed, **config)))
        return fingerprint(folder, layout_of(folder, "f16"), tokenizer)

    base = name("base")
    others = [
        name("rope", rope_theta=5e5),
        name("scaled", rope_scaling={"rope_type": "yarn", "factor": 4.0}),
        name("weights", seed=1),
        name("tokenizer", tokenizer="u"),
    ]
    # Then each has its own name; what computes nothing changes none
    assert len({base, *others}) == 5
    assert name("noted", transformers_version="9.9", use_cache=False) == base


@pytest.mark.public_report("sgl-project/sglang 24758")
def test_the_digest_of_changed_weights_is_not_the_remembered_one(tmp_path: Path) -> None:
    # Given a folder whose digest was computed and noted
    folder = open_folder(str(write_folder(tmp_path / "model")))
    first = weights_digest(folder)
    assert weights_digest(folder) == first
    assert [note.read_text() for note in (tmp_path / "cache" / "kvasir" / "weights").iterdir()] == [first]
    # When the weights are written again, as many bytes, and their time is set back
    file = tmp_path / "model" / "model.safetensors"
    time = file.stat().st_mtime_ns
    again = open_folder(str(write_folder(tmp_path / "model", seed=1)))
    os.utime(file, ns=(time, time))
    # Then the note is not used
    assert weights_digest(again) != first


@pytest.mark.public_report(
    "vllm-project/vllm 42125", "vllm-project/vllm 30931", "huggingface/transformers auto_factory.py"
)
def test_a_folder_with_an_adapter_is_refused(tmp_path: Path) -> None:
    # Given a model with a LoRA adapter beside it, which transformers loads where peft is installed, and MLX never does
    folder = write_folder(tmp_path / "model")
    (folder / "adapter_config.json").write_text("{}")
    # Then two adapters of one name can't be taken for one model
    with pytest.raises(ConfigError, match="contains a LoRA adapter besides the model"):
        open_folder(str(folder))
