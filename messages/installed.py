"""Which engines are installed: entry points of the group `kvasir.engines`, Kvasir's own and those of other wheels.

An entry point appears when its distribution is installed. A checkout that runs by its path has none, or those of an
older installation; there Kvasir's own are read from pyproject.toml, out of which an installation would make them.
"""

import tomllib
from collections.abc import Mapping
from functools import cache
from importlib import metadata
from pathlib import Path
from typing import Any

from messages.errors import ConfigError

GROUP = "kvasir.engines"
_DISTRIBUTION = "kvasir-inference"
_PYPROJECT = Path(__file__).parents[1] / "pyproject.toml"


def engine_names() -> tuple[str, ...]:
    """Sorted. No engine is imported."""
    return tuple(_entry_points())


@cache
def engine_entry(name: str) -> Any:
    """The entry of an installed engine (`engines.entry.EngineEntry`). Raises ConfigError if it can't be had."""
    if name not in _entry_points():
        raise ConfigError(f"there is no engine {name!r}; choose from: {', '.join(engine_names())}")
    point = _entry_points()[name]
    try:
        entry = point.load()
        entry_name = entry.name
    except Exception as error:
        raise ConfigError(f"engine {name!r} is installed, but {point.value} can't be imported: {error}") from error
    if entry_name != name:
        raise ConfigError(f"engine {name!r} is installed, but {point.value} calls itself {entry_name!r}")
    return entry


def engine_requirement(name: str) -> str:
    """What pip is asked for to have an engine that another distribution brings; "": it comes with Kvasir."""
    distribution = _entry_points()[name].dist
    if distribution is None or distribution.name == _DISTRIBUTION:
        return ""
    return f"{distribution.name}=={distribution.version}"


@cache
def _entry_points() -> Mapping[str, metadata.EntryPoint]:
    """By name. Kvasir's own go before another distribution's of the same name."""
    points = metadata.entry_points(group=GROUP)
    own_last = sorted(points, key=lambda point: point.dist is not None and point.dist.name == _DISTRIBUTION)
    project = tomllib.loads(_PYPROJECT.read_text("utf-8")).get("project", {}) if _PYPROJECT.is_file() else {}
    of_checkout = project.get("entry-points", {}).get(GROUP, {}) if project.get("name") == _DISTRIBUTION else {}
    points_of_checkout = [metadata.EntryPoint(name, value, GROUP) for name, value in of_checkout.items()]
    by_name = {point.name: point for point in (*own_last, *points_of_checkout)}
    return {name: by_name[name] for name in sorted(by_name)}
