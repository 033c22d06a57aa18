"""Finds models that were pulled with Ollama, and decides which of its files llama.cpp can load.

A model's manifest, `manifests/<registry>/<namespace>/<name>/<tag>` in Ollama's model folder, is JSON that lists
layers; the one of the type `application/vnd.ollama.image.model` is a GGUF file, `blobs/sha256-<digest>`.
"""

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from engines.llamacpp.gguf_file import GGUFFile
from messages.errors import ConfigError

SCHEME = "ollama:"
_REGISTRY, _NAMESPACE, _TAG = "registry.ollama.ai", "library", "latest"
_MODEL_LAYER = "application/vnd.ollama.image.model"
_ADAPTER_LAYER = "application/vnd.ollama.image.adapter"
# Architecture names that only Ollama's own converter writes. The value says where a file for llama.cpp is; "" if
# unknown.
_DIALECTS = {"gptoss": "ggml-org/gpt-oss-20b-GGUF or ggml-org/gpt-oss-120b-GGUF", "mllama": "", "qwen25vl": ""}


@dataclass(frozen=True, slots=True)
class ModelName:
    """A model's full name. Missing parts are filled in as `ollama pull` does."""

    registry: str
    namespace: str
    name: str
    tag: str

    def __str__(self) -> str:
        place = [self.registry, self.namespace, self.name]
        if self.registry == _REGISTRY:
            place = place[2:] if self.namespace == _NAMESPACE else place[1:]
        return f"{'/'.join(place)}:{self.tag}"


def parse_name(text: str) -> ModelName:
    """`qwen3-coder:30b`, `someone/model`, `hf.co/org/repository:Q4_K_M`. Raises ConfigError."""
    path, _, tag = text.rpartition(":") if ":" in text.rpartition("/")[2] else (text, "", _TAG)
    parts = path.split("/")
    if len(parts) > 3 or not all(_is_plain(part) for part in (*parts, tag)):
        raise ConfigError(f"{text!r:.120} is not the name of an Ollama model; a name looks like 'qwen3-coder:30b'")
    registry, namespace, name = [_REGISTRY, _NAMESPACE][: 3 - len(parts)] + parts
    return ModelName(registry, namespace, name, tag)


def model_folders() -> list[Path]:
    """Where Ollama keeps models on this machine: the folder in OLLAMA_MODELS, the user's folder, and that of the Linux
    service."""
    configured_folder = os.environ.get("OLLAMA_MODELS", "")
    folders = [Path(configured_folder).expanduser()] if configured_folder else []
    return [*folders, Path.home() / ".ollama" / "models", Path("/usr/share/ollama/.ollama/models")]


def find_gguf(name: str, folders: Sequence[Path] | None = None) -> Path:
    """The GGUF file of a pulled model. Raises ConfigError, which says what is there, or what to do."""
    model_name = parse_name(name)
    search_path = model_folders() if folders is None else list(folders)
    for folder in search_path:
        manifest = _manifest(folder, model_name)
        if manifest is not None:
            return _blob(folder, model_name, manifest)
    model_names = ", ".join(sorted({str(name) for folder in search_path for name in _local_models(folder)}))
    places = ", ".join(str(folder) for folder in search_path)
    raise ConfigError(
        f"Ollama has no model {model_name} on this machine (looked in {places}; found {model_names or 'none'}): "
        f"run `ollama pull {model_name}`, or set OLLAMA_MODELS to Ollama's model folder"
    )


def check_dialect(gguf: GGUFFile) -> None:
    """Raises ConfigError for a file that only Ollama's own engine can read. llama.cpp would fail inside its loader."""
    architecture = gguf.architecture
    if architecture in _DIALECTS:
        source = f", such as {_DIALECTS[architecture]}" if _DIALECTS[architecture] else ""
        raise ConfigError(
            f"{gguf.path} is in Ollama's own dialect (architecture {architecture!r}), which llama.cpp does not read: "
            f"download a GGUF made for llama.cpp{source} from huggingface.co, and give its .gguf file as weights"
        )
    if gguf.hyperparameter("vision.block_count") and architecture != "clip":
        raise ConfigError(
            f"{gguf.path} also holds a vision model, which only Ollama's own engine can read: download a GGUF "
            "made for llama.cpp from huggingface.co, and give its .gguf file as weights"
        )


def _is_plain(part: str) -> bool:
    """Whether a part of a name is safe as a file's name: no separator, no `..`."""
    return bool(part) and not part.startswith(".") and "\\" not in part and part.isprintable() and " " not in part


def _manifest(folder: Path, name: ModelName) -> dict[str, Any] | None:
    path = folder / "manifests" / name.registry / name.namespace / name.name / name.tag
    try:
        manifest = json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return None
    except PermissionError:
        raise ConfigError(
            f"this user is not allowed to read Ollama's model folder {folder}: run the worker as a member of the "
            "folder's group, or copy the model"
        ) from None
    except (OSError, ValueError) as error:
        raise ConfigError(f"Ollama's manifest {path} can't be read: {error}") from None
    if not isinstance(manifest, dict) or not isinstance(manifest.get("layers"), list):
        raise ConfigError(f"Ollama's manifest {path} lists no layers: pull {name} again")
    return manifest


def _blob(folder: Path, name: ModelName, manifest: dict[str, Any]) -> Path:
    layers = [layer for layer in manifest["layers"] if isinstance(layer, dict)]
    if any(layer.get("mediaType") == _ADAPTER_LAYER for layer in layers):
        raise ConfigError(f"{name} has an adapter, which Kvasir would ignore: merge the adapter into the model first")
    models = [layer for layer in layers if layer.get("mediaType") == _MODEL_LAYER]
    if len(models) != 1:
        raise ConfigError(f"{name} must have exactly one GGUF file, not {len(models)}: llama.cpp can't load it")
    digest, size = str(models[0].get("digest")), models[0].get("size")
    path = folder / "blobs" / digest.replace(":", "-")
    if not _is_plain(path.name) or path.parent != folder / "blobs":
        raise ConfigError(
            f"Ollama's manifest of {name} names a blob with the invalid digest {digest!r:.80}: pull the model again"
        )
    if not path.is_file() or path.stat().st_size != size:
        raise ConfigError(f"Ollama's file {path} of {name} is missing or cut short: run `ollama pull {name}`")
    return path


def _local_models(folder: Path) -> Iterator[ModelName]:
    """The models in a folder, according to their manifests."""
    manifests = folder / "manifests"
    for path in manifests.glob("*/*/*/*"):
        if path.is_file() and not path.name.startswith("."):
            yield ModelName(*path.relative_to(manifests).parts)
