"""The other configured models whose jobs a decode worker may steal, and how to load them."""

import logging
import os
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

from decode_worker.stealing.models import Stealable
from engines.base import LoadedEngine
from engines.llamacpp.ollama_models import find_gguf
from engines.registry import Engine
from infra.config.settings import ModelSettings, Settings
from messages.errors import ConfigError

log = logging.getLogger(__name__)

ALL_MODELS = "all"
# Share of a machine's memory for weights. The rest is for KV caches in slots, the store if it runs there, and the
# system.
SHARE_FOR_WEIGHTS = 0.8

# (model, engine, weights) -> the loaded engine, checked against the workers that serve the model already.
Load = Callable[[ModelSettings, str, str], LoadedEngine[Engine]]


def stealables(
    settings: Settings, home: str, engine: str, requested_models: Sequence[str], load: Load
) -> list[Stealable]:
    """Return the models in `requested_models` that this worker could load, except its own.

    "all" means every configured model. A model is loaded with the worker's own engine if it has weights for it, else
    with its default engine. Raises ConfigError if a named model is not configured, or has no weights for a tested
    engine; with "all", such a model is left out.
    """
    takes_all = ALL_MODELS in requested_models
    stealable_models = []
    for name in settings.models if takes_all else dict.fromkeys(requested_models):
        model = settings.model(name)
        if name == home:
            continue
        try:
            engine_name, weights = model.weights_for(engine if engine in model.weights else "")
        except ConfigError as error:
            if not takes_all:
                raise
            log.info("%s is not stolen: %s", name, error)
            continue
        stealable_models.append(Stealable(name, weights_bytes(weights), partial(load, model, engine_name, weights)))
    return stealable_models


def weights_bytes(weights: str) -> int:
    """Return the size on disk of an engine's weights, which is about their size in memory.

    It is 0 if unknown, or if they are loaded in another process. Files, folders, `ollama:NAME`, and files after a
    prefix are measured; the model behind a URL is in another process's memory.
    """
    if weights.startswith("ollama:"):
        try:
            return find_gguf(weights.removeprefix("ollama:")).stat().st_size
        except (ConfigError, OSError):
            return 0
    path = Path(weights.removeprefix("llama-server:").partition("?")[0])
    if path.is_file():
        return path.stat().st_size
    files = path.glob("*") if path.is_dir() else ()
    return sum(file.stat().st_size for file in files if file.suffix in (".safetensors", ".gguf", ".npz"))


def memory_bytes(given_gb: float) -> int:
    """Return how much memory the weights of all models may take together.

    This is the given value, or else a share of this machine's memory.
    """
    if given_gb:
        return int(given_gb * 1e9)
    return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * SHARE_FOR_WEIGHTS)
