"""How the jobs of `bulk` come to a prefill worker: one at a time, or many while they are quick; or one for each slot.

Computing a prompt takes seconds as a rule, and then nothing is held beside it. Short prompts that decode does itself
take less than the way to the broker and back; held one at a time, they would mostly wait for that.
"""

from __future__ import annotations

import time
from collections.abc import Callable

from infra.broker.base import Broker, Consumer, Delivery
from infra.broker.consume import QUICK_S, adaptive_prefetch, receive_group
from infra.broker.topology import work_queue

_SLOW_S = 2 * QUICK_S  # from here on they are quick no more
_LARGE_BYTES = 16 * 1024


def is_large(delivery: Delivery) -> bool:
    """Whether its prompt is so long that it is not quick, whatever came before it."""
    return len(delivery.message.body) > _LARGE_BYTES


class PrefillFlow:
    """See infra.broker.consume.Flow. `next` is called when the worker is done with what it was given before."""

    def __init__(self, broker: Broker, model: str, hand_back: Callable[[list[Delivery]], None]) -> None:
        self._broker = broker
        self._bulk = work_queue("prefill", model, "bulk")
        self._consumer = broker.consume(self._bulk, 1)
        self._hand_back = hand_back
        self._prefetch = 1
        self._mean_s = _SLOW_S  # of a job
        self._given = 0  # how many were given out last
        self._given_at = 0.0
        self._paused = False

    def next(self, timeout_s: float) -> list[Delivery]:
        """One job, or a group of quick ones."""
        if self._paused:
            self._consumer.resume()
            self._paused = False
        if self._given:
            took_s = (time.monotonic() - self._given_at) / self._given
            self._mean_s += (1 - 0.9**self._given) * (took_s - self._mean_s)
        self._set_prefetch(adaptive_prefetch(self._mean_s, self._prefetch))
        first = self._consumer.receive(timeout_s)
        if first is None:
            group = []
        elif self._prefetch == 1 or is_large(first):
            group = [first]
        else:
            group = receive_group(self._consumer, first, self._mean_s)
        if self._prefetch > 1 and any(map(is_large, group)):
            self._mean_s = _SLOW_S
            self._set_prefetch(1)
        self._given, self._given_at = len(group), time.monotonic()
        return group

    def full(self, _urgent: Callable[[], Delivery | None]) -> None:
        """The store has no room: nothing is held that another worker might take."""
        self._hand_back(self.pause())

    def pause(self) -> list[Delivery]:
        """See Flow."""
        self._paused, self._given = True, 0
        return self._consumer.pause()

    def close(self) -> list[Delivery]:
        """See Flow."""
        return self._consumer.close()

    def nudge(self) -> None:
        """See Flow."""
        self._consumer.nudge()

    def _set_prefetch(self, wanted: int) -> None:
        if wanted > self._prefetch:
            self._consumer.widen(wanted)
        elif wanted < self._prefetch:
            self._hand_back(self._consumer.close())
            self._consumer = self._broker.consume(self._bulk, wanted)
        self._prefetch = wanted


class SlotFlow:
    """See infra.broker.consume.Flow: of a worker whose engine computes several prompts at once.

    A job is pulled when a slot is free: one that was pushed would lie here while another worker idles. Only a worker
    that finds none listens.
    """

    def __init__(self, broker: Broker, model: str, hand_back: Callable[[list[Delivery]], None]) -> None:
        self._broker = broker
        self._bulk = work_queue("prefill", model, "bulk")
        self._hand_back = hand_back
        self._listening: Consumer | None = None

    def next(self, timeout_s: float) -> list[Delivery]:
        """One job."""
        if self._listening is None:
            if delivery := self._broker.get(self._bulk):
                return [delivery]
            self._listening = self._broker.consume(self._bulk, 1)
        delivery = self._listening.receive(timeout_s)
        if delivery is None:
            return []
        self._hand_back(self.pause())
        return [delivery]

    def full(self, _urgent: Callable[[], Delivery | None]) -> None:
        """No slot is free, or the store has no room: nothing is held that another worker might take."""
        self._hand_back(self.pause())

    def pause(self) -> list[Delivery]:
        """See Flow."""
        listening, self._listening = self._listening, None
        return listening.close() if listening else []

    def close(self) -> list[Delivery]:
        """See Flow."""
        return self.pause()

    def nudge(self) -> None:
        """See Flow."""
        if listening := self._listening:
            listening.nudge()
