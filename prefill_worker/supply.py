"""Where a prefill worker's next job comes from: one at a time, or many while they are quick.

Computing a prompt takes seconds as a rule, and then nothing is held beside it. Short prompts that decode does itself
take less than the way to the broker and back; held one at a time, they would mostly wait for that.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from infra.broker import Broker, Delivery
from infra.intake import QUICK_S, Intake, held_if, in_one_go

_SLOW_S = 2 * QUICK_S  # from here on they are quick no more
LARGE_BYTES = 16 * 1024  # a prompt that long is not quick, whatever came before it


class Supply(Intake):
    """The intake of a prefill worker, which asks for a job when it is done with the one before."""

    def __init__(self, broker: Broker, model: str, hand_back: Callable[[list[Delivery]], None]) -> None:
        super().__init__(broker, "prefill", model, prefetch=1)
        self._hand_back = hand_back
        self._held = 1
        self._mean_s = _SLOW_S  # of a job
        self._given = 0  # how many were given out last
        self._given_at = 0.0

    def next(self, timeout_s: float, holding: int) -> Delivery | None:
        """See Intake."""
        if self._given:
            took_s = (time.monotonic() - self._given_at) / self._given
            self._mean_s += (1 - 0.9**self._given) * (took_s - self._mean_s)
        delivery = super().next(timeout_s, holding)
        self._given, self._given_at = int(bool(delivery)), time.monotonic()
        return delivery

    def along(self, first: Delivery) -> list[Delivery]:
        """See Intake."""
        if self._held == 1 or first.queue != self.bulk:
            return []
        more = in_one_go(self.consumer, self._mean_s)
        self._given += len(more)
        return more

    def routine(self, timeout_s: float) -> Delivery | None:
        """See Intake."""
        self._hold(held_if(self._mean_s, self._held))
        delivery = super().routine(timeout_s)
        if delivery and self._held > 1 and len(delivery.message.body) > LARGE_BYTES:
            self._mean_s = _SLOW_S
            self._hold(1)
        return delivery

    def _hold(self, wanted: int) -> None:
        if wanted > self._held:
            self.consumer.widen(wanted)
        elif wanted < self._held:
            self._hand_back(self.consumer.close())
            self.consumer = self.broker.consume(self.bulk, wanted)
        self._held = wanted
