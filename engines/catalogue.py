"""What each engine can do at its best, before any model is loaded, and whether this machine has it.

A loaded model may do less (`EngineInfo.capabilities`, proved when a worker starts): an architecture whose keys nobody
here knows hands nothing over, whatever its engine can.
"""

from __future__ import annotations

import importlib.util
from dataclasses import dataclass

from engines.base import Capabilities
from engines.llamacpp.server import PROGRAM, find_program
from engines.vllm import environment

_LOCAL_CAPABILITIES = Capabilities.local(transfers_kv=True, blocks_while_computing=True)


@dataclass(frozen=True, slots=True)
class EngineEntry:
    """One engine. `packages` are what it imports, `extra` the extra of the distribution that brings them."""

    name: str
    capabilities: Capabilities
    packages: tuple[str, ...]
    extra: str
    weights: str  # what `--weights` takes
    family: str  # engines of one family read each other's KV caches, where the weights are the same
    note: str = ""

    @property
    def install_command(self) -> str:
        """What has to be installed before it runs here, as a command; "": nothing."""
        absent = [package for package in self.packages if importlib.util.find_spec(package) is None]
        if not absent or (self.name == "llamacpp" and find_program()):
            return environment.COMMAND if self.name == "vllm" and not environment.is_installed() else ""
        return f"pip install 'kvasir-inference[{self.extra}]'" if self.extra else f"pip install {' '.join(absent)}"

    def partners(self) -> tuple[str, ...]:
        """Engines that can decode from what this one prefilled."""
        if not self.capabilities.exports_kv:
            return ()
        return tuple(entry.name for entry in CATALOGUE if entry.capabilities.imports_kv and entry.family == self.family)


CATALOGUE = (
    EngineEntry(
        "llamacpp",
        Capabilities.local(transfers_kv=True),
        ("xllamacpp",),
        "llamacpp",
        "FILE.gguf, ollama:NAME, llama-server:FILE.gguf, http://HOST:PORT?slots=FOLDER",
        "canonical",
        f"a GPU that the wheel has no build for needs {PROGRAM} on PATH",
    ),
    EngineEntry("mlx", _LOCAL_CAPABILITIES, ("mlx", "mlx_lm"), "mlx", "FOLDER or hub name", "canonical"),
    EngineEntry(
        "ollama",
        Capabilities(prefill=False, decode=True, exports_kv=False, imports_kv=False),
        ("ollama",),
        "",
        "http://HOST:11434/MODEL, ollama:MODEL",
        "",
        "the decoder does the prompt; llamacpp transfers KV with the same model (--weights ollama:MODEL)",
    ),
    EngineEntry(
        "openai",
        Capabilities(prefill=False, decode=True, exports_kv=False, imports_kv=False),
        ("httpx",),
        "",
        "http://HOST:PORT/v1/MODEL",
        "",
        "any server of chat completions; the server does the prompt",
    ),
    EngineEntry(
        "simulated",
        _LOCAL_CAPABILITIES,
        (),
        "",
        "sim:prefill=2000,decode=60,…",
        "synthetic",
        "no model: tests and planning",
    ),
    EngineEntry(
        "transformers", _LOCAL_CAPABILITIES, ("torch", "transformers"), "torch", "FOLDER or hub name", "canonical"
    ),
    EngineEntry(
        "vllm",
        _LOCAL_CAPABILITIES,
        ("tokenizers", "llguidance"),
        "vllm",
        "FOLDER or hub name, http://HOST:PORT?model=FOLDER",
        "canonical",
        f"runs in an environment of its own ({environment.SIZE}; tested with vLLM {environment.TESTED_RELEASE})",
    ),
)
BY_NAME = {entry.name: entry for entry in CATALOGUE}
