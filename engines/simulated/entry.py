"""The simulated engine's entry."""

from engines.base import Capabilities
from engines.entry import EngineEntry

ENGINE = EngineEntry(
    name="simulated",
    module="engines.simulated.engine",
    capabilities=Capabilities.local(transfers_kv=True, blocks_while_computing=True),
    weights="sim:prefill=2000,decode=60,…",
    weights_type="text",
    weights_text="`sim:prefill=2000,decode=60,…`: no model, for tests and planning",
    family="synthetic",
    note="no model: tests and planning",
)
