"""What a decode worker may steal: the other models of the configuration, as things that it could load."""

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
# Of a machine's memory: what is left is for KV caches in slots, the store if it lives here, and the system.
SHARE_FOR_WEIGHTS = 0.8

# (model, engine, weights) -> the engine, checked against who serves the model already.
Load = Callable[[ModelSettings, str, str], LoadedEngine[Engine]]


def stealables(
    settings: Settings, home: str, engine: str, requested_models: Sequence[str], load: Load
) -> list[Stealable]:
    """The models in `requested_models` ("all": every configured one) that this worker could load, its own left out.

    By the worker's own engine where a model has weights for it, else by the model's default. Raises ConfigError if a
    model that was named is not configured, or has no weights for a settled engine; "all" leaves such a one out.
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
    """Size on disk of what an engine loads, which is about what it takes in memory; 0: unknown, or not in this process.

    Files and folders, `ollama:NAME`, and files after a prefix; a URL's model is in somebody else's memory.
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
    """What the weights of all models together may take: as given, else a share of this machine's memory."""
    if given_gb:
        return int(given_gb * 1e9)
    return int(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") * SHARE_FOR_WEIGHTS)
