"""Finds engines by name."""

from engines.entry import Engine, EngineEntry, EngineOptions
from messages.installed import engine_entry, engine_names

__all__ = ["Engine", "EngineOptions", "entries", "open_engine", "partners"]


def entries() -> dict[str, EngineEntry]:
    """All installed engines, in the order of their names."""
    return {name: engine_entry(name) for name in engine_names()}


def partners(name: str) -> tuple[str, ...]:
    """The engines that can decode from KV caches that this one prefilled."""
    sender = entries()[name]
    return tuple(entry.name for entry in entries().values() if sender.transfers_to(entry))


def open_engine(name: str, options: EngineOptions) -> Engine:
    """Load a model. Raises ConfigError, which says what to do, if the engine, its extra, or the weights are missing."""
    entry: EngineEntry = engine_entry(name)
    return entry.open_engine(options)
