"""The end of a queue: whether to leave its last jobs to faster workers."""

from __future__ import annotations

import time

from decode_worker.stealing.forecast import QueueForecast, Throughput
from decode_worker.stealing.policy import leave_to_faster

# Jobs that take less are pushed, and neither fetched ahead nor left to others: deciding would cost what it saves.
LONG_S = 0.5


class Tail:
    """Whether to leave the next job of our own queue to faster workers. Used from one thread.

    Faster workers may be stuck: what they leave lying for twice the time that they should have taken is taken here.
    """

    def __init__(self, forecast: QueueForecast, throughput: Throughput, model: str) -> None:
        self._forecast = forecast
        self._throughput = throughput
        self._model = model
        self._next_look = 0.0
        self._since = 0.0  # when the queue was last seen to shrink, or leaving began; 0: not leaving
        self._ready = 0
        self.left = 0

    def is_leaving(self) -> bool:
        """Whether we left something just now: it is too early to look again."""
        return time.monotonic() < self._next_look

    def leaves(self, in_hand: int = 0) -> bool:
        """Whether the next job is left, of those that wait and those `in_hand`. Raises BrokerUnavailable."""
        decode_s = self._forecast.decode_s(self._model)
        leave = None
        if decode_s >= LONG_S and any(each.is_faster(decode_s) for each in self._forecast.peers(self._model)):
            queue = self._forecast.queue(self._model, in_hand)
            leave = leave_to_faster(queue, decode_s, self._throughput.fetch_s(self._model))
        if leave is None or self._waited_enough(queue.ready, leave.end_there_s):
            self._since = 0.0
            return False
        self.left += 1
        self._next_look = time.monotonic() + min(1.0, max(0.1, leave.end_there_s / 10))
        return True

    def _waited_enough(self, ready: int, end_there_s: float) -> bool:
        now = time.monotonic()
        if not self._since or ready < self._ready or not ready:
            self._since, self._ready = now, ready
        return now - self._since > 2 * end_there_s + 2
