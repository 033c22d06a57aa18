"""The demo model's files: what training and export made, in two forms that say the same."""

import hashlib
import json
import subprocess
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from safetensors.numpy import load_file
from tokenizers import Tokenizer

from examples.model import export, formats
from examples.model.shape import TRAINED
from examples.model.tokens import END, SPECIALS, learn_bpe, training_texts

HERE = Path(formats.__file__).parent
FOLDER = HERE / formats.NAME
FILE = HERE / f"{formats.NAME}.gguf"
RUNS = json.loads((HERE / export.CURVES).read_text("utf-8"))
MIB = 1 << 20


def hashes(root: Path, paths: list[Path]) -> dict[str, str]:
    return {str(path.relative_to(root)): hashlib.sha256(path.read_bytes()).hexdigest() for path in paths}


def model_files(root: Path) -> list[Path]:
    return sorted([root / FILE.name, *(root / formats.NAME).iterdir()])


@pytest.fixture(scope="module")
def reader() -> gguf.GGUFReader:
    return gguf.GGUFReader(FILE)


def field(reader: gguf.GGUFReader, name: str) -> Any:
    found = reader.get_field(name)
    assert found is not None, f"{name} is missing"
    return found.contents()


def test_a_run_s_weights_are_exported_to_the_committed_bytes(tmp_path: Path) -> None:
    weights = load_file(FOLDER / "model.safetensors")
    np.savez(tmp_path / "weights.npz", **weights)
    for name in ("tokenizer.json", export.CURVES):
        source = FOLDER if name == "tokenizer.json" else HERE
        (tmp_path / name).write_bytes((source / name).read_bytes())

    export.export([tmp_path], tmp_path / "out")

    assert hashes(tmp_path / "out", model_files(tmp_path / "out")) == hashes(HERE, model_files(HERE))


def test_the_tokenizer_is_nearly_the_one_that_the_run_s_seed_gives() -> None:
    # The generator has changed a little since the run (README.md says how).
    again = learn_bpe(training_texts(RUNS[0]["plan"]["seed"]), TRAINED.vocabulary).get_vocab()

    ours = Tokenizer.from_file(str(FOLDER / "tokenizer.json")).get_vocab()

    assert len(again.keys() & ours.keys()) > 0.97 * len(ours)


def test_the_loss_curves_are_kept_with_their_plans_and_end_low() -> None:
    for run in RUNS:
        steps = [row["step"] for row in run["curve"]]
        assert steps == sorted(steps)
        assert steps[-1] <= run["plan"]["steps"]
        assert run["curve"][-1]["loss"] < 0.1
    assert [not run["plan"].get("start") for run in RUNS] == [True, False, False, False]
    assert RUNS[0]["curve"][0]["loss"] > 1


def test_both_forms_hold_exactly_the_same_weights(reader: gguf.GGUFReader) -> None:
    ours = load_file(FOLDER / "model.safetensors")
    theirs = {tensor.name: tensor.data for tensor in reader.tensors}

    assert len(theirs) == len(ours)
    for name, value in ours.items():
        assert np.isfinite(value).all(), name
        assert np.array_equal(theirs[formats.gguf_name(name)], value.astype(np.float32)), name


def test_both_forms_hold_the_same_tokenizer_and_template(reader: gguf.GGUFReader) -> None:
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))
    settings = json.loads((FOLDER / "tokenizer_config.json").read_text())
    tokens = field(reader, "tokenizer.ggml.tokens")

    assert tokens == [tokenizer.id_to_token(token_id) for token_id in range(TRAINED.vocabulary)]
    assert field(reader, "tokenizer.chat_template") == settings["chat_template"]
    assert tokens[field(reader, "tokenizer.ggml.eos_token_id")] == settings["eos_token"] == END
    controls = [i for i, kind in enumerate(field(reader, "tokenizer.ggml.token_type")) if kind == 3]
    assert [tokens[i] for i in controls] == list(SPECIALS)
    assert field(reader, "tokenizer.ggml.pre") == "qwen2"
    assert field(reader, "tokenizer.ggml.add_bos_token") is False


@pytest.mark.parametrize(
    "text", ["", "x <- c(1, 2)\r\n\r\n", "naïve 日本語 🙂 é", "<|im_end|> 12345", "\x00\x1f\u2028"]
)
def test_any_text_survives_the_tokenizer(text: str) -> None:
    tokenizer = Tokenizer.from_file(str(FOLDER / "tokenizer.json"))

    ids = tokenizer.encode(text, add_special_tokens=False).ids

    assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_the_files_are_small_and_tracked_by_git() -> None:
    files = model_files(HERE)
    tracked = subprocess.run(["git", "ls-files", "."], cwd=HERE, capture_output=True, text=True, check=True).stdout

    assert sum(path.stat().st_size for path in files) < 8 * MIB
    assert {str(path.relative_to(HERE)) for path in files} <= set(tracked.splitlines())
