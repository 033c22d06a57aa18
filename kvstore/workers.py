"""Encoded worker registrations to those that can be read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from messages import codec
from messages.errors import InvalidMessage, NewerMessage
from messages.workers import WorkerInfo


def readable_registrations(bodies: Iterable[bytes | None]) -> list[WorkerInfo]:
    """The registrations that this program can read, by worker_id. None stands for one that has expired meanwhile."""
    return sorted(_read(bodies), key=lambda registration: registration.worker_id)


def _read(bodies: Iterable[bytes | None]) -> Iterator[WorkerInfo]:
    for body in bodies:
        try:
            if body is not None:
                yield codec.decode(body, WorkerInfo)
        except (InvalidMessage, NewerMessage):  # a worker of another version, in the middle of an upgrade
            continue
