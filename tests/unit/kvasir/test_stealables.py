"""Which models `--steal` offers a decode worker, by which engine, and how large they are."""

from pathlib import Path
from typing import Any

import pytest

from engines.base import LoadedEngine
from engines.registry import Engine
from infra.config.settings import ModelSettings, Settings, load_settings
from kvasir.worker.stealables import memory_bytes, stealables, weights_bytes
from messages.errors import ConfigError

CONFIG = """
[models.home]
weights.simulated = "sim:scale=0"
[models.both]
engine = "llamacpp"
weights.llamacpp = "both.gguf"
weights.simulated = "sim:seed=2"
[models.other]
weights.llamacpp = "other.gguf"
[models.unsettled]
weights.llamacpp = "a.gguf"
weights.mlx = "b"
"""


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    (tmp_path / "kvasir.toml").write_text(CONFIG)
    (tmp_path / "other.gguf").write_bytes(bytes(1000))
    return load_settings(config=tmp_path / "kvasir.toml", environ={}, cwd=tmp_path, user_dir=tmp_path)


def offered(settings: Settings, *wanted: str) -> dict[str, tuple[str, str]]:
    """Model: (engine, file) of what would be loaded."""
    loaded: dict[str, tuple[str, str]] = {}

    def load(model: ModelSettings, engine: str, weights: str) -> LoadedEngine[Engine]:
        loaded[model.name] = (engine, Path(weights).name)
        nothing: Any = None
        return LoadedEngine(nothing)

    for stealable in stealables(settings, "home", "simulated", wanted, load):
        stealable.load()
    return loaded


def test_all_are_those_with_settled_weights_by_the_workers_own_engine_where_there_is_one(settings):
    assert offered(settings, "all") == {"both": ("simulated", "sim:seed=2"), "other": ("llamacpp", "other.gguf")}


def test_only_those_named_are_offered_and_never_the_home_model(settings):
    assert list(offered(settings, "other", "home", "other")) == ["other"]
    assert offered(settings) == {}


@pytest.mark.parametrize(("name", "problem"), [("othr", "did you mean 'other'"), ("unsettled", "set engine in")])
def test_a_named_model_that_can_not_be_loaded_is_an_error(settings, name, problem):
    with pytest.raises(ConfigError, match=problem):
        offered(settings, name)


def test_a_models_size_is_that_of_its_files_and_nothing_where_they_are_elsewhere(tmp_path):
    folder = tmp_path / "mlx"
    folder.mkdir()
    for name, size in (("model-1.safetensors", 300), ("model-2.safetensors", 200), ("tokenizer.json", 99)):
        (folder / name).write_bytes(bytes(size))
    assert weights_bytes(str(folder)) == 500
    assert weights_bytes(str(folder / "model-1.safetensors")) == 300
    assert weights_bytes(f"llama-server:{folder / 'model-1.safetensors'}") == 300
    for elsewhere in ("http://127.0.0.1:11434/m", "sim:scale=0", "ollama:no-such-model-anywhere"):
        assert weights_bytes(elsewhere) == 0


def test_the_memory_budget_is_what_was_given_or_a_share_of_the_machines():
    assert memory_bytes(1.5) == 1_500_000_000
    assert memory_bytes(0) > 100_000_000
