"""Engines by name. Each engine's module is imported only when it is asked for: it may need an extra."""

from __future__ import annotations

import importlib
from dataclasses import dataclass, field
from typing import Any, Protocol

from engines.base import DecodeEngine, PrefillEngine
from messages import checks
from messages.errors import ConfigError, InvalidMessage

_MODULES = {
    "llamacpp": "engines.llamacpp.engine",
    "mlx": "engines.mlx.engine",
    "ollama": "engines.ollama.engine",
    "openai": "engines.openai.engine",
    "simulated": "engines.simulated.engine",
    "transformers": "engines.transformers.engine",
    "vllm": "engines.vllm.engine",
}
ENGINES = tuple(sorted(_MODULES))


class Engine(PrefillEngine, DecodeEngine, Protocol):
    """An engine that can do both; each worker uses its half."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """How to load a model. `weights` means what the engine says it means: a file, a folder, a URL."""

    weights: str
    context: int = 0  # tokens; 0: as much as the model was trained for
    slots: int = 4  # sequences decoded at once
    threads: int = 0  # CPU threads; 0: the engine's choice
    allow_external: bool = False  # a server outside private networks may get prompts
    api_key: str = field(default="", repr=False)  # of a server that wants one
    prefill_slots: int = 1  # prompts computed at once, by an engine that batches them


def open_engine(name: str, options: EngineOptions) -> Engine:
    """Load a model. Raises ConfigError with what to do if the engine, its extra, or the weights are missing."""
    if name not in _MODULES:
        raise ConfigError(f"there is no engine {name!r}; choose from: {', '.join(ENGINES)}")
    try:
        module: Any = importlib.import_module(_MODULES[name])
    except ModuleNotFoundError as error:
        extra = {"transformers": "torch"}.get(name, name)
        raise ConfigError(
            f"engine {name!r} needs the package {error.name!r}: pip install 'kvasir-inference[{extra}]'"
        ) from error
    try:
        checks.readable("weights", options.weights)
    except InvalidMessage as error:
        raise ConfigError(str(error)) from None
    engine: Engine = module.open_engine(options)
    return engine
