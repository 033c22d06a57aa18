"""Models pulled with Ollama: found through their manifests, and refused where llama.cpp can't load them."""

import hashlib
import json
from pathlib import Path

import pytest

from engines.llamacpp.gguf_file import GGUFFile
from engines.llamacpp.ollama_models import check_dialect, find_gguf, model_folders, parse_name
from engines.registry import EngineOptions, open_engine
from messages.errors import ConfigError
from tests.support.tiny_gguf import TinyModel, write_gguf

MODEL = "application/vnd.ollama.image.model"
TEMPLATE = "application/vnd.ollama.image.template"


def pull(folder: Path, place: str, weights: bytes = b"GGUF of old", kinds: tuple[str, ...] = (MODEL, TEMPLATE)) -> Path:
    """What `ollama pull` leaves behind; the blob's path."""
    digest = hashlib.sha256(place.encode() + weights).hexdigest()
    blob = folder / "blobs" / f"sha256-{digest}"
    blob.parent.mkdir(parents=True, exist_ok=True)
    blob.write_bytes(weights)
    layers = [{"mediaType": kind, "digest": f"sha256:{digest}", "size": len(weights)} for kind in kinds]
    manifest = folder / "manifests" / place
    manifest.parent.mkdir(parents=True, exist_ok=True)
    manifest.write_text(json.dumps({"schemaVersion": 2, "config": {}, "layers": layers}))
    return blob


@pytest.mark.parametrize(
    ("name", "place"),
    [
        ("qwen3-coder:30b", "registry.ollama.ai/library/qwen3-coder/30b"),
        ("llama3", "registry.ollama.ai/library/llama3/latest"),
        ("someone/tuned:v1", "registry.ollama.ai/someone/tuned/v1"),
        ("hf.co/org/m-GGUF:Q4_K_M", "hf.co/org/m-GGUF/Q4_K_M"),
    ],
)
def test_a_name_leads_through_its_manifest_to_the_blob(tmp_path: Path, name: str, place: str) -> None:
    blob = pull(tmp_path, place)
    pull(tmp_path, "registry.ollama.ai/library/another/latest", b"x")
    assert find_gguf(name, [tmp_path / "absent", tmp_path]) == blob


def test_a_model_that_was_not_pulled_is_an_error_that_lists_what_was(tmp_path: Path) -> None:
    for place in ("registry.ollama.ai/library/qwen3-coder/30b", "hf.co/org/m-GGUF/Q4"):
        pull(tmp_path, place)
    with pytest.raises(ConfigError) as caught:
        find_gguf("qwen3-coder:480b", [tmp_path])
    assert "found hf.co/org/m-GGUF:Q4, qwen3-coder:30b)" in str(caught.value)
    assert "ollama pull qwen3-coder:480b" in str(caught.value)


def test_the_folders_are_those_of_the_variable_the_user_and_the_service(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("OLLAMA_MODELS", raising=False)
    usual = [tmp_path / ".ollama" / "models", Path("/usr/share/ollama/.ollama/models")]
    assert model_folders() == usual
    monkeypatch.setenv("OLLAMA_MODELS", "~/big disk")
    assert model_folders() == [tmp_path / "big disk", *usual]


@pytest.mark.parametrize("name", ["", "a/b/c/d", "../../etc/passwd", "m:..", "a b", "m:", "/m"])
def test_what_is_no_name_is_refused(name: str) -> None:
    with pytest.raises(ConfigError, match="the name of an Ollama model"):
        parse_name(name)


def test_a_pull_that_broke_off_and_models_of_other_kinds_are_refused(tmp_path: Path) -> None:
    root = "registry.ollama.ai/library/"
    pull(tmp_path, f"{root}cut/latest").write_bytes(b"GG")
    pull(tmp_path, f"{root}gone/latest", b"gone").unlink()
    pull(tmp_path, f"{root}tuned/latest", kinds=(MODEL, "application/vnd.ollama.image.adapter"))
    pull(tmp_path, f"{root}tensors/latest", kinds=("application/vnd.ollama.image.tensor",) * 3)
    broken = tmp_path / "manifests" / root / "broken" / "latest"
    broken.parent.mkdir()
    broken.write_text('{"layers": 3}')
    complaints = {"cut": "cut short", "gone": "missing", "tuned": "adapter", "tensors": "one GGUF", "broken": "layers"}
    for name, complaint in complaints.items():
        with pytest.raises(ConfigError, match=complaint):
            find_gguf(name, [tmp_path])


def test_a_manifest_can_not_point_outside_the_blobs(tmp_path: Path) -> None:
    (tmp_path / "secret").write_text("x")
    pull(tmp_path, "registry.ollama.ai/library/m/latest")
    manifest = tmp_path / "manifests/registry.ollama.ai/library/m/latest"
    manifest.write_text(json.dumps({"layers": [{"mediaType": MODEL, "digest": "../secret", "size": 1}]}))
    with pytest.raises(ConfigError, match="names a blob"):
        find_gguf("m", [tmp_path])


@pytest.mark.parametrize(
    ("metadata", "refused"),
    [
        ({"general.architecture": "gptoss"}, "gpt-oss-120b-GGUF"),
        ({"general.architecture": "gemma3", "gemma3.vision.block_count": 27}, "vision"),
        ({"general.architecture": "gpt-oss"}, ""),
        ({"general.architecture": "qwen3moe"}, ""),
    ],
)
def test_files_in_ollamas_own_dialect_are_refused_with_the_way_out(metadata: dict[str, object], refused: str) -> None:
    gguf = GGUFFile(Path("sha256-1"), metadata, data_start=64, size=128)
    if not refused:
        return check_dialect(gguf)
    with pytest.raises(ConfigError, match=refused):
        check_dialect(gguf)


def test_the_llamacpp_engine_loads_a_pulled_model_by_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Given two pulled models, one of them Ollama's gpt-oss
    monkeypatch.setenv("OLLAMA_MODELS", str(tmp_path / "models"))
    for name, model in (("tiny", TinyModel()), ("gpt-oss", TinyModel("gptoss"))):
        path = write_gguf(tmp_path / f"{name}.gguf", model)
        pull(tmp_path / "models", f"registry.ollama.ai/library/{name}/latest", path.read_bytes())
    # When they are loaded by name
    engine = open_engine("llamacpp", EngineOptions("ollama:tiny", context=256, slots=1, threads=1))
    # Then one hands KV caches over, and the other is refused before llama.cpp sees it
    assert engine.info.capabilities.exports_kv
    engine.close()
    with pytest.raises(ConfigError, match="Ollama's own dialect"):
        open_engine("llamacpp", EngineOptions("ollama:gpt-oss", context=256, slots=1, threads=1))
