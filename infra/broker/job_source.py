"""Where a worker's deliveries come from: its model's two lanes, and the suspects.

`now` is pulled, but only when it was rung or the last look is a while ago, so that it costs the broker nothing while
empty and goes first when not. Suspects are pulled by a worker that holds nothing else, and block everything else while
they run. How `bulk` comes is each stage's own affair: its `Flow`.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol

from infra.broker import topology
from infra.broker.base import Broker, Consumer, Delivery
from messages.errors import BrokerUnavailable

_LOOK_AT_NOW_S = 0.25
_LOOK_AT_SUSPECTS_S = 2.0
LISTEN_S = 0.02  # how long to listen for bulk alone; waking up costs the broker nothing

# Of quick jobs so many are held at once, by the time that one takes: together they take a second or two.
QUICK_S, HELD_IF_QUICK = 0.05, 32
INSTANT_S, HELD_IF_INSTANT = 0.005, 256
# Jobs that arrived together make a group if they take no longer than this together.
GROUP_S = 0.02
# After so long the rest of a group goes back: somebody else may be free, and what is ready waits for them.
PATIENCE_S = 0.5


def adaptive_prefetch(mean_s: float, current: int) -> int:
    """How many jobs that take `mean_s` to hold at once; 1: they are not quick. `current`: how many are now.

    A level is left at twice the time at which it is entered, or it would change with every job.
    """
    for limit_s, count in ((INSTANT_S, HELD_IF_INSTANT), (QUICK_S, HELD_IF_QUICK)):
        if mean_s < limit_s * (2 if current >= count else 1):
            return count
    return 1


def receive_group(consumer: Consumer, first: Delivery, mean_s: float) -> list[Delivery]:
    """A delivery, and what has arrived with it as far as that is done in one go."""
    group = [first]
    while (len(group) + 1) * mean_s < GROUP_S and len(group) < HELD_IF_QUICK:
        delivery = consumer.receive(0)
        if delivery is None:
            break
        group.append(delivery)
    return group


class Flow(Protocol):
    """How the jobs of `bulk` come to a worker. Used from one thread, `nudge` excepted.

    What it holds and nobody has begun is handed back by itself, or returned by `pause` and `close` to be settled.
    """

    def next(self, timeout_s: float) -> list[Delivery]:
        """The next job, and what is done with it in one go; none after `timeout_s`. Begins to flow again after a pause.

        Raises BrokerUnavailable, NoQueue.
        """

    def full(self, urgent: Callable[[], Delivery | None]) -> None:
        """Called again and again while there is no room. `urgent` gives the next job of `now`, if there is one."""

    def pause(self) -> list[Delivery]:
        """Hold nothing, until `next` is called."""

    def close(self) -> list[Delivery]:
        """Hold nothing any more."""

    def nudge(self) -> None:
        """Have `next` return at once, from any thread."""


class JobSource:
    """One worker's source of deliveries. Used from one thread, `ring` excepted.

    `holding` says how many deliveries are being worked on.
    """

    def __init__(
        self, broker: Broker, stage: topology.WorkStage, model: str, flow: Flow, holding: Callable[[], int]
    ) -> None:
        self._broker = broker
        self._now = topology.work_queue(stage, model, "now")
        self._suspects = topology.suspects_queue(stage, model)
        self._holding = holding
        self._next_look_at_now = 0.0
        self._next_look_at_suspects = 0.0
        self._flow = flow
        self.pause = flow.pause
        self.close = flow.close

    def ring(self, queue: str) -> None:
        """Somebody published to `queue`."""
        if queue == self._now:
            self._next_look_at_now = 0.0
            self._flow.nudge()

    def next(self, timeout_s: float) -> list[Delivery]:
        """The next delivery for a free slot, and what is done with it in one go; none after `timeout_s` at most."""
        try:
            first = self.urgent() or self._suspect()
            return [first] if first else self._flow.next(min(timeout_s, LISTEN_S))
        except BrokerUnavailable:
            time.sleep(min(timeout_s, 0.2))  # the broker reconnects by itself
            return []

    def full(self) -> None:
        """Called again and again while there is no room."""
        self._flow.full(self.urgent)

    def urgent(self) -> Delivery | None:
        """The next job of `now`, if it is time to look there."""
        if time.monotonic() < self._next_look_at_now:
            return None
        # Set first: what rings during the look must not be forgotten.
        self._next_look_at_now = time.monotonic() + _LOOK_AT_NOW_S
        delivery = self._broker.get(self._now)
        if delivery:
            self._next_look_at_now = 0.0  # where one is, there may be more
        return delivery

    def _suspect(self) -> Delivery | None:
        if time.monotonic() < self._next_look_at_suspects or self._holding():
            return None
        self._next_look_at_suspects = time.monotonic() + _LOOK_AT_SUSPECTS_S
        delivery = self._broker.get(self._suspects)
        if delivery:
            self._next_look_at_suspects = 0.0
        return delivery
