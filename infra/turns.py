"""Chooses a worker's next job of lane `bulk`: batches take turns.

Each batch has its own queue while there are enough queues.
"""

import time
from collections import deque
from collections.abc import Callable

from infra.broker import topology
from infra.broker.base import Broker, Delivery
from messages.workers import WorkerStage

_LOOK_S = 0.25


class Turns:
    """The `bulk` queues of one stage of a model. Used from one thread.

    The flow reads the first queue itself, and may have its jobs pushed by the broker. The other queues are pulled. A
    queue that was empty is not asked again for a while, so the other queues cost the broker hardly anything while only
    one batch runs.
    """

    def __init__(self, broker: Broker, stage: WorkerStage, model: str) -> None:
        self._broker = broker
        self._line = deque(topology.lane_queues(stage, model, "bulk"))
        self._next_looks = dict.fromkeys(self._line, 0.0)
        self.first = self._line[0]

    def take(self, take_first: Callable[[], Delivery | None]) -> Delivery | None:
        """Return a job of the queue whose turn it is, or of the next queue that has one; None if no job waits.

        `take_first` takes a job of the first queue. Raises BrokerUnavailable, NoQueue.
        """
        for queue in list(self._line):
            self._line.rotate(-1)
            if queue == self.first:
                delivery = take_first()
            elif time.monotonic() < self._next_looks[queue]:
                continue
            else:
                delivery = self._broker.get(queue)
                self._next_looks[queue] = 0.0 if delivery else time.monotonic() + _LOOK_S
            if delivery:
                return delivery
        return None

    def pull(self) -> Delivery | None:
        """Return a job as `take` does, but pull from the first queue too."""
        return self.take(lambda: self._broker.get(self.first))
