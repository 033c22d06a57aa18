"""How a configured model is to be loaded: its settings as an engine's options."""

from engines.entry import EngineOptions
from infra.config.settings import ModelSettings
from messages.installed import engine_entry


def engine_options(
    model: ModelSettings | None, engine: str, weights: str, context: int, slots: int, prefill_slots: int = 1
) -> EngineOptions:
    """`model` is None where a worker's flags say everything. Raises ConfigError on an unreadable key file."""
    if model is None:
        return EngineOptions(weights, context, slots, prefill_slots=prefill_slots)
    key = model.api_key.reveal() if model.api_key and engine_entry(engine).takes_api_key else ""
    return EngineOptions(weights, context, slots, model.threads, model.allow_external, key, prefill_slots)
