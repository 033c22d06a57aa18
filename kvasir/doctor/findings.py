"""A finding of doctor: its level, what it is, and what to do about it."""

from dataclasses import dataclass, field
from typing import Literal

Level = Literal["ok", "warn", "error"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of `kvasir doctor`."""

    level: Level
    subject: str  # what was checked: configuration, broker, store, links, versions, or a model's name
    what: str
    todo: str = ""
    # For a pair of workers, one entry for each layer of the model: the difference between the two workers' keys, the
    # difference between their values, and the largest difference that rounding can cause. All are shares of the norm.
    layers: tuple[dict[str, float], ...] = ()
    # A fixed word that programs can test for, such as dns, mtu, login, store_full.
    cause: str = ""
    # For a service that was tried step by step: seconds for each completed step, and the step that failed.
    steps: dict[str, float] = field(default_factory=dict)
    stopped_at: str = ""
    server: str = ""  # the server's name for itself; "" if the server was not reached


def ok(subject: str, message: str) -> Finding:
    """All is well."""
    return Finding("ok", subject, message)


def warn(subject: str, message: str, todo: str, cause: str = "") -> Finding:
    """It works, but less well than it could."""
    return Finding("warn", subject, message, todo, cause=cause)


def error(subject: str, message: str, todo: str, cause: str = "") -> Finding:
    """Jobs will fail, wait for ever, or get wrong answers."""
    return Finding("error", subject, message, todo, cause=cause)
