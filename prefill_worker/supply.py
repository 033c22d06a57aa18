"""Where a prefill worker's next job comes from: one at a time, or many while they are quick.

Computing a prompt takes seconds as a rule, and then nothing is held beside it. Short prompts that decode does itself
take less than the way to the broker and back; held one at a time, they would mostly wait for that.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from infra.broker import Broker, Delivery
from infra.intake import HELD_IF_QUICK, QUICK_S, Intake

_SLOW_S = 2 * QUICK_S  # from here on they are quick no more; between the two nothing changes
_LARGE_BYTES = 16 * 1024  # a prompt that long is not quick, whatever came before it


class Supply(Intake):
    """The intake of a prefill worker, which asks for a job when it is done with the one before."""

    def __init__(self, broker: Broker, model: str, hand_back: Callable[[list[Delivery]], None]) -> None:
        super().__init__(broker, "prefill", model, prefetch=1)
        self._hand_back = hand_back
        self._holds_many = False
        self._mean_s = _SLOW_S  # of a job
        self._given_at = 0.0  # when the last one was given out

    def next(self, timeout_s: float, holding: int) -> Delivery | None:
        """See Intake."""
        if self._given_at:
            self._mean_s += 0.1 * (time.monotonic() - self._given_at - self._mean_s)
        delivery = super().next(timeout_s, holding)
        self._given_at = time.monotonic() if delivery else 0.0
        return delivery

    def routine(self, timeout_s: float) -> Delivery | None:
        """See Intake."""
        self._hold_many(self._mean_s < (_SLOW_S if self._holds_many else QUICK_S))
        delivery = super().routine(timeout_s)
        if delivery and self._holds_many and len(delivery.message.body) > _LARGE_BYTES:
            self._mean_s = _SLOW_S
            self._hold_many(False)
        return delivery

    def _hold_many(self, wanted: bool) -> None:
        if wanted != self._holds_many:
            self._hand_back(self.consumer.close())
            self.consumer = self.broker.consume(self.bulk, HELD_IF_QUICK if wanted else 1)
            self._holds_many = wanted
