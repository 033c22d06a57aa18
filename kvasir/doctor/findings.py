"""What doctor found: a level, what it is, and what to do about it."""

from dataclasses import dataclass, field
from typing import Literal

Level = Literal["ok", "warn", "error"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of `kvasir doctor`."""

    level: Level
    subject: str  # configuration, broker, store, links, versions, or a model's name
    what: str
    todo: str = ""
    # Of a pair of workers, for each layer: how far K and V are apart and what rounding makes, as shares of their norms.
    layers: tuple[dict[str, float], ...] = ()
    cause: str = ""  # a fixed word for programs: dns, mtu, login, store_full …
    # Of a service that was tried step by step: seconds of each step that was done, and the step at which it stopped.
    steps: dict[str, float] = field(default_factory=dict)
    stopped_at: str = ""
    server: str = ""  # the name it knows itself by, if it was reached


def ok(subject: str, message: str) -> Finding:
    """All is well."""
    return Finding("ok", subject, message)


def warn(subject: str, message: str, todo: str, cause: str = "") -> Finding:
    """It works, but not as it could."""
    return Finding("warn", subject, message, todo, cause=cause)


def error(subject: str, message: str, todo: str, cause: str = "") -> Finding:
    """Jobs will fail, wait for ever, or be answered wrongly."""
    return Finding("error", subject, message, todo, cause=cause)
