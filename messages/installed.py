"""Which engines are installed. They are entry points of the group `kvasir.engines`, from Kvasir itself and from other
distributions.

An entry point exists once its distribution is installed. A checkout that runs from its path has none, or has those of
an older installation. In that case Kvasir's own engines are read from pyproject.toml, the source from which an
installation would create the entry points.
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
    """The names of all installed engines, sorted. No engine is imported."""
    return tuple(_entry_points())


@cache
def engine_entry(name: str) -> Any:
    """The entry of an installed engine (`engines.entry.EngineEntry`). Raises ConfigError if it is not installed or
    can't be imported."""
    if name not in _entry_points():
        raise ConfigError(f"there is no engine {name!r}; choose from: {', '.join(engine_names())}")
    point = _entry_points()[name]
    try:
        entry = point.load()
        entry_name = entry.name
    except Exception as error:
        raise ConfigError(f"engine {name!r} is installed, but {point.value} can't be imported: {error}") from error
    if entry_name != name:
        raise ConfigError(f"engine {name!r} is installed, but {point.value} is named {entry_name!r}")
    return entry


def engine_requirement(name: str) -> str:
    """The requirement that pip needs to install an engine of another distribution; "" if the engine comes with
    Kvasir."""
    distribution = _entry_points()[name].dist
    if distribution is None or distribution.name == _DISTRIBUTION:
        return ""
    return f"{distribution.name}=={distribution.version}"


@cache
def _entry_points() -> Mapping[str, metadata.EntryPoint]:
    """The entry points by name. Kvasir's own win over another distribution's of the same name."""
    points = metadata.entry_points(group=GROUP)
    own_last = sorted(points, key=lambda point: point.dist is not None and point.dist.name == _DISTRIBUTION)
    project = tomllib.loads(_PYPROJECT.read_text("utf-8")).get("project", {}) if _PYPROJECT.is_file() else {}
    of_checkout = project.get("entry-points", {}).get(GROUP, {}) if project.get("name") == _DISTRIBUTION else {}
    points_of_checkout = [metadata.EntryPoint(name, value, GROUP) for name, value in of_checkout.items()]
    by_name = {point.name: point for point in (*own_last, *points_of_checkout)}
    return {name: by_name[name] for name in sorted(by_name)}
