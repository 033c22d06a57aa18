"""What llama.cpp does to keys is what its formula says of the GGUF: read off the keys of one token, repeated."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from gguf import GGUFWriter

from engines.huggingface.rope import FULL, SLIDING, stated_rope
from engines.llamacpp.gguf_file import read_gguf
from engines.llamacpp.model import effective_rope, effective_ropes, require_known
from engines.registry import EngineOptions, open_engine
from engines.rope import difference
from messages.errors import ConfigError, KVTransferFailed
from messages.kv import Array
from tests.support.kv_samples import layer_of, prefilled
from tests.support.rope_folders import configuration
from tests.support.tiny_gguf import TinyModel, write_gguf

POSITIONS = 160
FACTORS = (1.0, 1.0, 1.0, 1.5, 2.5, 4.0, 8.0, 8.0)
MODELS = {
    "plain": TinyModel("qwen2"),
    "yarn": TinyModel("qwen2", rope=("yarn", 8.0, 128)),
    "yarn, interleaved": TinyModel("llama", rope=("yarn", 8.0, 128)),
    "linear": TinyModel("qwen2", rope=("linear", 4.0, 128)),
    "llama3": TinyModel("llama", rope_factors=FACTORS),
}


def keys_of(gguf: Path) -> Array:
    """The first layer's keys, (positions, kv_heads, head_dim) as float64."""
    engine = open_engine("llamacpp", EngineOptions(str(gguf), context=512, slots=1, threads=1))
    assert engine.info.ropes == (effective_rope(read_gguf(gguf)),)
    keys, _ = layer_of(prefilled(engine, (40,) * POSITIONS), 0)
    engine.close()
    return keys.astype(np.float64)


@pytest.mark.parametrize("name", MODELS)
def test_keys_are_turned_as_the_formula_says(name: str, tmp_path: Path) -> None:
    # Given the keys of one token at all positions, which only RoPE tells apart
    gguf = write_gguf(tmp_path / "model.gguf", MODELS[name])
    keys, rope = keys_of(gguf), effective_rope(read_gguf(gguf))
    # When the first one is turned by the formula
    angles = np.arange(POSITIONS)[:, None, None] * np.array(rope.frequencies)
    first, second = keys[:1, :, :8], keys[:1, :, 8:]
    turned = [first * np.cos(angles) - second * np.sin(angles), first * np.sin(angles) + second * np.cos(angles)]
    # Then it is every other one, up to what float16 rounds
    np.testing.assert_allclose(keys, np.concatenate(turned, -1), atol=4e-3 * np.abs(keys).max())


def test_keys_are_scaled_by_yarn_s_attention_factor(tmp_path: Path) -> None:
    plain, yarn = (write_gguf(tmp_path / f"{name}.gguf", MODELS[name]) for name in ("plain", "yarn"))
    scale = np.abs(keys_of(yarn)[0]).sum() / np.abs(keys_of(plain)[0]).sum()
    assert scale == pytest.approx(effective_rope(read_gguf(yarn)).scale, rel=1e-3)
    assert effective_rope(read_gguf(plain)).scale == 1


def test_a_ramp_that_is_not_truncated_is_another_rope(tmp_path: Path) -> None:
    # Given a gpt-oss whose folder says that YaRN's ramp is not truncated, which a GGUF has no word for
    model = replace(MODELS["yarn"], architecture="gpt-oss")
    ours = effective_rope(read_gguf(write_gguf(tmp_path / "model.gguf", model)))
    yarn = {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 128, "rope_theta": 10_000.0}
    config = {"model_type": "gpt_oss", "head_dim": 16, "rope_parameters": yarn}
    # Then llama.cpp computes the other one
    assert difference([ours], [stated_rope(config)]) == ""
    assert "RoPE scaling" in difference([ours], [stated_rope(config | {"rope_parameters": yarn | {"truncate": False}})])


def test_a_gemma3_has_another_rope_in_layers_with_a_window(tmp_path: Path) -> None:
    # Given the metadata of a gemma3, and the configuration of the same
    file = read_gguf(write_gguf(tmp_path / "model.gguf", TinyModel("qwen2", rope=("linear", 4.0, 0))))
    renamed = {key.replace("qwen2.", "gemma3."): value for key, value in file.metadata.items()}
    renamed |= {"general.architecture": "gemma3", "gemma3.rope.freq_base": 1_000_000.0}
    config = configuration("gemma3_text, linear", 5)
    # Then both RoPEs are those that transformers computes, once the file states them
    windowed = renamed | {"gemma3.attention.sliding_window": 512, "gemma3.rope.freq_base_swa": 5_000.0}
    stated = [stated_rope(config, kind) for kind in (FULL, SLIDING)]
    assert difference(effective_ropes(replace(file, metadata=windowed)), stated) == ""
    # And layers with a window have base 10,000 if it does not, and there are none of them without a window
    del windowed["gemma3.rope.freq_base_swa"]
    full, sliding = effective_ropes(replace(file, metadata=windowed))
    assert (full.base, sliding.base) == (1_000_000.0, 10_000.0)
    assert effective_ropes(replace(file, metadata=renamed)) == (full,)


@pytest.mark.parametrize(
    ("metadata", "reason"),
    [
        ({"general.architecture": "deepseek2", "deepseek2.attention.kv_lora_rank": 512}, "'deepseek2' .*latent"),
        ({"general.architecture": "mamba"}, "the keys of a 'mamba' model"),
        ({"general.architecture": "olmo2", "olmo2.attention.sliding_window": 4096}, "sliding windows"),
    ],
)
def test_an_architecture_that_is_not_known_is_named(metadata: dict[str, object], reason: str, tmp_path: Path) -> None:
    file = read_gguf(write_gguf(tmp_path / "model.gguf"))
    with pytest.raises(KVTransferFailed, match=reason):
        require_known(replace(file, metadata=metadata))


def test_keys_that_depend_on_the_context_of_a_worker_are_refused(tmp_path: Path) -> None:
    # Given a phi3 of a long context, whose factors are all that tells it
    writer = GGUFWriter(tmp_path / "model.gguf", "phi3")
    writer.add_tensor("rope_factors_long.weight", np.ones(8, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    # Then it is refused, and one without them is not
    file = read_gguf(tmp_path / "model.gguf")
    with pytest.raises(KVTransferFailed, match="depend on the context that llama"):
        require_known(file)
    require_known(replace(file, long_rope=False))


def test_a_scaling_that_is_not_known_is_refused(tmp_path: Path) -> None:
    gguf = read_gguf(write_gguf(tmp_path / "model.gguf", TinyModel("qwen2", rope=("longrope", 8.0, 128))))
    with pytest.raises(KVTransferFailed, match="scaling of the type 'longrope'"):
        effective_rope(gguf)


def test_an_architecture_that_llama_cpp_can_not_load_is_named(tmp_path: Path) -> None:
    gguf = write_gguf(tmp_path / "model.gguf", TinyModel("no-such-thing"))
    with pytest.raises(ConfigError, match=r"can't load .*, a 'no-such-thing' model"):
        open_engine("llamacpp", EngineOptions(str(gguf), context=512, slots=1, threads=1))
