"""Converts a configured model's settings into an engine's options."""

from engines.entry import EngineOptions
from infra.config.settings import ModelSettings
from messages.installed import engine_entry


def engine_options(
    model: ModelSettings, engine: str, weights: str, context: int, slots: int, prefill_slots: int = 1
) -> EngineOptions:
    """Return the engine's options. Raises ConfigError for a bad key file."""
    key = model.api_key.reveal() if model.api_key and engine_entry(engine).takes_api_key else ""
    return EngineOptions(weights, context, slots, model.threads, model.allow_external, key, prefill_slots)
