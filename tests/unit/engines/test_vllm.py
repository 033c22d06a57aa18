"""What the vllm engine refuses before anything is started, and what it says to its host. No vLLM is needed."""

import io
import json
import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import matrix_models
from engines.registry import EngineOptions, open_engine
from engines.vllm import environment
from engines.vllm.engine import gapless_replies, launch_for, write_cache
from engines.vllm.host.kvasir_vllm import wire
from engines.vllm.process import vllm_environ
from kvasir import cli
from messages.errors import ConfigError, EngineUnavailable
from messages.kv import Block, KVCache, KVLayout, Window
from tests.support.tiny_gguf import TinyModel, write_gguf
from tests.support.tiny_hf import write_hf


@pytest.fixture
def a_release(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A Python that says it has a vLLM: its version is all that is asked before the model's folder is looked at."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\necho vllm 0.31.7+cpu\n")
    python.chmod(0o700)
    monkeypatch.setenv(environment.VARIABLE, str(python))
    return python


def folder(tmp_path: Path, architecture: str = "qwen3", **changes: Any) -> Path:
    model = TinyModel(architecture, layers=2)
    made = write_hf(tmp_path / "model", write_gguf(tmp_path / "tiny.gguf", model), model)
    config = json.loads((made / "config.json").read_text()) | changes
    (made / "config.json").write_text(json.dumps(config))
    return made


@pytest.mark.parametrize(
    ("architecture", "changes", "why"),
    [
        ("qwen3", {"model_type": "deepseek_v3"}, "Kvasir does not know how a 'deepseek_v3' model keeps its keys"),
        ("qwen3", {"model_type": "jamba"}, "Kvasir can't transfer the recurrent state of a 'jamba' model"),
        ("qwen3", {"architectures": None}, "has no 'architectures', which vLLM needs"),
        ("qwen3", {"dtype": "float8_e4m3fn"}, "states the unsupported dtype 'float8_e4m3fn'; add ?dtype=bfloat16"),
    ],
)
def test_what_is_not_transferred_is_refused_by_name(
    architecture: str, changes: dict[str, Any], why: str, a_release: Path, tmp_path: Path
) -> None:
    weights = str(folder(tmp_path, architecture, **changes))
    with pytest.raises(ConfigError) as refused:
        open_engine("vllm", EngineOptions(weights, context=512, slots=1))
    assert why in str(refused.value)


def test_a_recurrent_state_is_refused(a_release: Path, tmp_path: Path) -> None:
    matrix_models.write(tmp_path, "qwen3.5", seed=0)
    made = matrix_models.weights_for("mlx", tmp_path, "qwen3.5")
    config = json.loads((made / "config.json").read_text()) | {"architectures": ["Qwen3_5ForConditionalGeneration"]}
    (made / "config.json").write_text(json.dumps(config))
    with pytest.raises(ConfigError, match="a recurrent state; run it with the llamacpp, mlx or transformers engine"):
        open_engine("vllm", EngineOptions(str(made), context=512, slots=1))


@pytest.mark.parametrize(("name", "window_layers", "groups"), [("gemma3-wide", 5, 6), ("gpt-oss-wide", 2, 2)])
def test_layers_with_a_window_get_memory_for_it_and_not_for_the_context(
    name: str, window_layers: int, groups: int, a_release: Path, tmp_path: Path
) -> None:
    # Given a model with windows of 40 positions, and a context of 1,024
    matrix_models.write(tmp_path, name, seed=0)
    weights = str(matrix_models.weights_for("vllm", tmp_path, name))
    taken = []
    for slots in (1, 101):
        _, launch = launch_for(EngineOptions(weights, context=1024, slots=slots, prefill_slots=1))
        taken.append(launch.arguments["kv_cache_memory_bytes"])
    # Then a sequence takes 33 pages of each group of layers that see all, and four of each that sees a window
    page = 32 * 2 * 2 * 32 * 4 * (window_layers // (groups - 1))
    assert taken[1] - taken[0] == 100 * page * (33 + 4 * (groups - 1))


def test_a_core_is_left_to_vllm_s_scheduler(a_release: Path, tmp_path: Path) -> None:
    options = EngineOptions(str(folder(tmp_path)), context=512, slots=1)
    assert launch_for(options)[1].threads == max(1, (os.cpu_count() or 2) - 1)
    assert launch_for(replace(options, threads=7))[1].threads == 7
    # And where a GPU computes the threads are vLLM's own affair
    a_release.write_text("#!/bin/sh\necho vllm 0.31.7\n")
    assert launch_for(options)[1].threads == 0


@pytest.mark.parametrize("dtype", ["f32", "bf16"])
@pytest.mark.parametrize("window", [0, 9])
def test_a_cache_is_written_as_one_array_and_the_rows_of_its_windows(window: int, dtype: Any, tmp_path: Path) -> None:
    # Given blocks of different lengths, and what two windowed layers look back at
    layout = KVLayout(5, 2, 4, "f32", window, (1, 3) if window else ())
    whole = np.random.default_rng(0).standard_normal(layout.block_shape(70)).astype(np.float32)
    whole = (whole.view(np.uint32) & 0xFFFF0000).view(np.float32)  # which bfloat16 can hold
    blocks = [
        Block(start, np.ascontiguousarray(whole[:, :, start:end])) for start, end in ((0, 32), (32, 64), (64, 70))
    ]
    rows = whole[:2, :, -window + 1 :].copy() if window else whole[:0]
    cache = KVCache(layout, tuple(blocks), Window(70, rows) if window else None)
    # When it is written for a vLLM of either dtype
    receiver = replace(layout, dtype=dtype)
    with open(tmp_path / "cache", "xb") as file:
        write_cache(file, cache, receiver)
    # Then the file holds the one behind the other
    found = np.fromfile(tmp_path / "cache", receiver.numpy_type)
    expected = np.concatenate([whole.reshape(-1), rows.reshape(-1)])
    assert np.array_equal(found, expected if dtype == "f32" else (expected.view(np.uint32) >> 16).astype(np.uint16))


@pytest.mark.skipif(sys.platform != "linux", reason="vLLM runs on Linux, and only there is a /dev/full")
def test_a_cache_for_which_there_is_no_room_is_an_error_and_no_end_of_the_process() -> None:
    layout = KVLayout(2, 2, 4, "f32")
    cache = KVCache(layout, (Block(0, np.zeros(layout.block_shape(64), np.float32)),))
    with pytest.raises(OSError, match="No space left"), open("/dev/full", "wb") as file:
        write_cache(file, cache, layout)


def test_a_missing_environment_is_named_with_its_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    monkeypatch.delenv(environment.VARIABLE, raising=False)
    with pytest.raises(ConfigError, match="kvasir engines install vllm"):
        open_engine("vllm", EngineOptions(str(folder(tmp_path))))
    # And one that has no vLLM
    monkeypatch.setenv(environment.VARIABLE, sys.executable)
    with pytest.raises(ConfigError, match="has no vLLM: run kvasir engines install vllm"):
        environment.find()
    assert cli.run_command(["engines", "install", "vllm"]) == 2  # somebody named it, so it is not ours to fix


def test_another_release_than_the_tested_one_is_said(a_release: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = environment.find()
    assert (found.release, found.cpu) == ("0.31.7", True)
    assert cli.run_command(["engines", "install", "vllm"]) == 0
    said = capsys.readouterr()
    assert f"{environment.TESTED_RELEASE} was" in said.out + said.err
    assert cli.run_command(["engines", "install", "mlx"]) == 2


def test_the_host_gets_no_secret_and_tells_nobody_anything() -> None:
    environ = {"KVASIR_BROKER_PASSWORD": "hidden", "KVASIR_API_KEY": "k", "PYTHONPATH": "/ours", "HOME": "/home/ada"}
    given = vllm_environ(environ, 3)
    assert "hidden" not in given.values()
    assert not [name for name in given if name.startswith("KVASIR_")]
    assert given["HOME"] == "/home/ada"
    assert (given["VLLM_NO_USAGE_STATS"], given["HF_HUB_OFFLINE"], given["OMP_NUM_THREADS"]) == ("1", "1", "3")
    # And of ours it finds the host's own package
    assert os.listdir(given["PYTHONPATH"]).count("kvasir_vllm") == 1
    assert not (Path(given["PYTHONPATH"]) / "engines").exists()


def test_messages_survive_the_wire_and_nothing_else_is_taken_for_one() -> None:
    message = {"op": "tokens", "id": "a", "tokens": [1, 2], "logprobs": None}
    stream = io.BytesIO(wire.pack_message(message) * 2 + b"\x01\x00")
    assert [wire.read_message(stream.read) for _ in range(3)] == [message, message, None]
    cut = io.BytesIO(wire.pack_message(message)[:-1])
    assert wire.read_message(cut.read) is None
    for garbled in (
        b"\xff\xff\xff\xff",
        wire.LENGTH.pack(1) + b"\xc1",
        wire.LENGTH.pack(1) + b"\x05",
        wire.pack_message({}),
    ):
        with pytest.raises(wire.GarbledMessage):
            wire.read_message(io.BytesIO(garbled).read)


def test_a_block_that_got_lost_is_noticed() -> None:
    blocks = [{"op": "block", "start": start, "end": start + 32} for start in (32, 64, 96)]
    done = {"op": "done", "evaluated": 100}
    tokens = {"op": "tokens", "tokens": [1]}
    assert list(gapless_replies([*blocks, tokens, done], 32, 128)) == [*blocks, tokens, done]
    assert list(gapless_replies([done], 128, 100)) == [done]  # the store has them all
    for lost in range(3):
        with pytest.raises(EngineUnavailable, match="gap"):
            list(gapless_replies([*blocks[:lost], *blocks[lost + 1 :], done], 32, 128))
    # And so is the record of a model's windows
    window = {"op": "window", "position": 128}
    assert list(gapless_replies([*blocks, window, done], 32, 128, window=True)) == [*blocks, window, done]
    with pytest.raises(EngineUnavailable, match="gap"):
        list(gapless_replies([*blocks, done], 32, 128, window=True))
