"""Encoded worker cards to those that can be read."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from messages import codec
from messages.cards import WorkerCard
from messages.errors import InvalidMessage, NewerMessage


def readable_cards(bodies: Iterable[bytes | None]) -> list[WorkerCard]:
    """The cards that this program can read, by worker_id. None stands for one that has expired meanwhile."""
    return sorted(_read(bodies), key=lambda card: card.worker_id)


def _read(bodies: Iterable[bytes | None]) -> Iterator[WorkerCard]:
    for body in bodies:
        try:
            if body is not None:
                yield codec.decode(body, WorkerCard)
        except (InvalidMessage, NewerMessage):  # a worker of another version, in the middle of an upgrade
            continue
