"""The ollama engine's entry."""

from engines.base import Capabilities
from engines.entry import EngineEntry

ENGINE = EngineEntry(
    name="ollama",
    module="engines.ollama.engine",
    capabilities=Capabilities.text_only(),
    weights="http://HOST:11434/MODEL, ollama:MODEL",
    weights_type="text",
    packages=("ollama",),
    note="the decoder does the prompt; llamacpp transfers KV with the same model (--weights ollama:MODEL)",
    mend_transfer="--engine llamacpp --weights ollama:{model} at both ends would transfer KV, "
    "if that is its name there",
)
