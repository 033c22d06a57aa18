"""Encoded worker registrations to those that can be read, and what versions the others are of."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from messages import codec
from messages.errors import InvalidMessage, NewerMessage
from messages.workers import WorkerInfo


def readable_registrations(bodies: Iterable[bytes]) -> list[WorkerInfo]:
    """The registrations that this program can read, by worker_id."""
    return sorted(_read(bodies), key=lambda registration: registration.worker_id)


def other_versions(bodies: Mapping[str, bytes]) -> tuple[list[str], list[str]]:
    """Of all workers that registered (by worker_id) those of older and those of newer versions.

    An older one reads no message of this version. Of a newer one this program can't read what it registered.
    """
    older_ids = [worker_id for worker_id, body in bodies.items() if 0 < codec.version_of(body) < codec.VERSION]
    return older_ids, [worker_id for worker_id, body in bodies.items() if not list(_read([body]))]


def _read(bodies: Iterable[bytes]) -> Iterator[WorkerInfo]:
    for body in bodies:
        try:
            yield codec.decode(body, WorkerInfo)
        except (InvalidMessage, NewerMessage):  # a worker of another version, in the middle of an upgrade
            continue
