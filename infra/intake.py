"""Where a worker's deliveries come from: its model's two lanes, and the suspects.

`bulk` is pushed by the broker with a prefetch of one delivery a slot; while jobs take less than the way to the broker
and back, with more of them, or the worker would mostly wait. `now` is pulled, but only when a bell rang or
the last look is a while ago, so that it costs the broker nothing while empty and goes first when not. Suspects are
pulled by a worker that holds nothing else, and block everything else while they run.
"""

from __future__ import annotations

import time

from infra import topology
from infra.broker import Broker, Consumer, Delivery
from messages.errors import BrokerUnavailable

_LOOK_AT_NOW_S = 0.25
_LOOK_AT_SUSPECTS_S = 2.0
LISTEN_S = 0.02  # how long to listen for bulk alone; waking up costs the broker nothing

# Of quick jobs so many are held at once, by the time that one takes: together they take a second or two.
QUICK_S, HELD_IF_QUICK = 0.05, 32
INSTANT_S, HELD_IF_INSTANT = 0.005, 256
# Jobs that arrived together are done in one go if they take no longer than this together.
GO_S = 0.02
# After so long the rest of them goes back: somebody else may be free, and what is ready waits for them.
PATIENCE_S = 0.5


def held_if(mean_s: float, held: int) -> int:
    """How many jobs that take `mean_s` to hold at once; 1: they are not quick. `held`: how many are now.

    A level is left at twice the time at which it is entered, or it would change with every job.
    """
    for limit_s, count in ((INSTANT_S, HELD_IF_INSTANT), (QUICK_S, HELD_IF_QUICK)):
        if mean_s < limit_s * (2 if held >= count else 1):
            return count
    return 1


def in_one_go(consumer: Consumer, mean_s: float) -> list[Delivery]:
    """What has arrived, as far as it is done in one go with one delivery more."""
    taken: list[Delivery] = []
    while (len(taken) + 2) * mean_s < GO_S and len(taken) + 1 < HELD_IF_QUICK:
        delivery = consumer.receive(0)
        if delivery is None:
            break
        taken.append(delivery)
    return taken


class Intake:
    """One worker's source of deliveries. Used from one thread, `bell` excepted."""

    def __init__(self, broker: Broker, stage: topology.WorkStage, model: str, prefetch: int) -> None:
        self.broker = broker
        self._now = topology.work_queue(stage, model, "now")
        self.bulk = topology.work_queue(stage, model, "bulk")
        self._suspects = topology.suspects_queue(stage, model)
        self.consumer: Consumer = broker.consume(self.bulk, prefetch)
        self._next_look_at_now = 0.0
        self._next_look_at_suspects = 0.0

    def bell(self, queue: str) -> None:
        """Somebody published to `queue`."""
        if queue == self._now:
            self._next_look_at_now = 0.0
            self.consumer.nudge()

    def next(self, timeout_s: float, holding: int) -> Delivery | None:
        """The next delivery for a free slot, or None after `timeout_s` at most. `holding`: how many are worked on."""
        try:
            return self.urgent() or self._suspect(holding) or self.routine(min(timeout_s, LISTEN_S))
        except BrokerUnavailable:
            time.sleep(min(timeout_s, 0.2))  # the broker reconnects by itself
            return None

    def routine(self, timeout_s: float) -> Delivery | None:
        """What comes when nothing is urgent or suspect: bulk."""
        return self.consumer.receive(timeout_s)

    def along(self, first: Delivery) -> list[Delivery]:
        """What has arrived besides `first`, and is done with it in one go: none as a rule."""
        return []

    def full(self) -> None:
        """Called again and again while there is no room."""

    def is_suspect(self, delivery: Delivery) -> bool:
        """Whether a delivery came from the suspects queue."""
        return delivery.queue == self._suspects

    def pause(self) -> list[Delivery]:
        """Stop the flow of bulk; returns what had arrived and must be settled."""
        return self.consumer.pause()

    def resume(self) -> None:
        """Let bulk flow again."""
        self.consumer.resume()

    def close(self) -> list[Delivery]:
        """Stop for good; returns what had arrived and must be settled."""
        return self.consumer.close()

    def urgent(self) -> Delivery | None:
        """The next job of `now`, if it is time to look there."""
        if time.monotonic() < self._next_look_at_now:
            return None
        # Set first: a bell that rings during the look must not be forgotten.
        self._next_look_at_now = time.monotonic() + _LOOK_AT_NOW_S
        delivery = self.broker.get(self._now)
        if delivery:
            self._next_look_at_now = 0.0  # where one is, there may be more
        return delivery

    def _suspect(self, holding: int) -> Delivery | None:
        if holding or time.monotonic() < self._next_look_at_suspects:
            return None
        self._next_look_at_suspects = time.monotonic() + _LOOK_AT_SUSPECTS_S
        delivery = self.broker.get(self._suspects)
        if delivery:
            self._next_look_at_suspects = 0.0
        return delivery
