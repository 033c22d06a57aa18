"""Where a decode worker's next job comes from: `now`, then its own bulk, then other models'.

Short jobs are pushed by the broker, one a slot, and more at once if they take milliseconds. Long ones are pulled, one
for each slot that is free, because a pushed one can't be left to a faster worker: while all slots are busy nothing
flows, and when one is free a `get` finds the next job; only a worker that finds none listens. At most one job more is
held, and not for long: when a slot is about to free, so that its KV cache comes while the slot is still busy.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress

from decode_worker.fetching import AheadFetch
from decode_worker.outlook import Outlook
from decode_worker.pace import Pace
from decode_worker.residency import Residency
from decode_worker.running import RunningJobs
from decode_worker.slots import Slots
from decode_worker.stealing import leave_to_faster
from decode_worker.thief import Thief
from infra.broker import Broker, Delivery
from infra.intake import Intake, held_if, in_one_go
from infra.topology import model_of
from kvstore.base import KVStore
from messages.errors import BrokerUnavailable, NoQueue

# Jobs that take less are pushed, and neither fetched ahead nor left to others: deciding would cost what it saves.
LONG_S = 0.5
# A slot is about to free if its job has that long to go, or twice the time that a KV cache takes.
_SOON_S = 0.5
# A job fetched ahead goes back after that long, or a quarter of a job's mean time: the estimate was wrong.
_HOLD_S = 2.0
# So long quick jobs may lie here behind one that turned out slow.
_FULL_S = 1.0


class Tail:
    """Whether to leave the next job of our own queue to faster workers. Used from one thread.

    Faster workers may be stuck: what they leave lying for twice the time that they should have taken is taken here.
    """

    def __init__(self, outlook: Outlook, pace: Pace, model: str) -> None:
        self._outlook = outlook
        self._pace = pace
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
        service_s = self._outlook.service_s(self._model)
        if service_s < LONG_S or not self._outlook.has_faster(self._model, service_s):
            return self._take()
        queue = self._outlook.queue(self._model, in_hand)
        leave = leave_to_faster(queue, service_s, self._pace.fetch_s(self._model))
        if leave is None or self._waited_enough(queue.ready, leave.end_there_s):
            return self._take()
        self.left += 1
        self._next_look = time.monotonic() + min(1.0, max(0.1, leave.end_there_s / 10))
        return True

    def _take(self) -> bool:
        self._since = 0.0
        return False

    def _waited_enough(self, ready: int, end_there_s: float) -> bool:
        now = time.monotonic()
        if not self._since or ready < self._ready or not ready:
            self._since, self._ready = now, ready
        return now - self._since > 2 * end_there_s + 2


class Supply(Intake):
    """The intake of a decode worker. Used from one thread, `bell` excepted."""

    def __init__(
        self,
        broker: Broker,
        model: str,
        slots: Slots,
        running: RunningJobs,
        outlook: Outlook,
        pace: Pace,
        residency: Residency,
        thief: Thief,
        tail: Tail,
        kv: KVStore,
        hand_back: Callable[[list[Delivery]], None],
    ) -> None:
        super().__init__(broker, "decode", model, slots.count)
        self._slots = slots
        self._running = running
        self._outlook = outlook
        self._pace = pace
        self._residency = residency
        self._thief = thief
        self._tail = tail
        self._kv = kv
        self._hand_back = hand_back
        self._model = model
        self._flows = True
        self._held = 1  # how many quick jobs the flow brings at once; 1: they are not quick
        self._full_since = 0.0  # 0: a slot was free at the last look
        self._width = slots.count  # how many deliveries of the flow may be unacked
        self._room = slots.count  # how many more the flow may bring; of long jobs, at least
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="fetch ahead")
        self._ahead: Delivery | None = None
        self._ahead_since = 0.0
        self._ahead_wanted = True
        self._fetches: dict[int, AheadFetch] = {}

    def routine(self, timeout_s: float) -> Delivery | None:
        """The next job for a free slot, none of which is urgent."""
        self._full_since = 0.0
        return self._take_ahead() or self._home(timeout_s) or self._thief.steal()

    def along(self, first: Delivery) -> list[Delivery]:
        """See Intake."""
        if self._held == 1 or not self._flows or first.queue != self.bulk:
            return []
        return in_one_go(self.consumer, self._outlook.service_s(self._model))

    def full(self) -> None:
        """No slot is free: let nothing flow that would only lie here; fetch the next job's KV cache in time."""
        if self._are_short() and not self._holds_too_long():
            return
        with suppress(BrokerUnavailable, NoQueue):
            self._stop_flow()
            self._look_ahead()

    def fetched(self, delivery: Delivery) -> AheadFetch | None:
        """The KV cache that was fetched ahead for a delivery that now begins, or None."""
        return self._fetches.pop(id(delivery), None)

    def pause(self) -> list[Delivery]:
        """See Intake."""
        return self._drop_ahead() + self._stopped()

    def resume(self) -> None:
        """Nothing: what flows and when is decided with each job."""

    def close(self) -> list[Delivery]:
        """See Intake."""
        left = self._drop_ahead() + self._stopped()
        self._pool.shutdown()
        return left

    def _are_short(self) -> bool:
        return self._outlook.service_s(self._model) < LONG_S and not self._running.foreign(self._model)

    def _held_if_quick(self) -> int:
        if self._running.foreign(self._model):
            return 1
        return held_if(self._outlook.service_s(self._model), self._held)

    def _holds_too_long(self) -> bool:
        now = time.monotonic()
        self._full_since = self._full_since or now
        return self._held > 1 and self._flows and now - self._full_since > _FULL_S

    # The worker's own model

    def _home(self, timeout_s: float) -> Delivery | None:
        if self._tail.is_leaving():
            time.sleep(timeout_s)
            return None
        if not self._flows and self._are_short():  # they were not known to be, before the first was done
            self._start_flow()
        return self._pushed(timeout_s) if self._flows else self._pulled()

    def _pulled(self) -> Delivery | None:
        if self._tail.leaves():
            return None
        delivery = self.broker.get(self.bulk)
        if delivery is None:
            self._start_flow()
        return delivery

    def _pushed(self, timeout_s: float) -> Delivery | None:
        if self._slots.free > self._room and not self._are_short():
            self._stop_flow()  # it does not know of a slot that is free again
            return self._pulled()
        self._take_in(self._held_if_quick())
        delivery = self.consumer.receive(timeout_s)
        self._room -= bool(delivery)
        if delivery and self._tail.leaves(in_hand=1):
            self._stop_flow()
            self._hand_back([delivery])
            return None
        return delivery

    def _take_in(self, wanted: int) -> None:
        """Hold so many quick jobs at once from now on."""
        if wanted == self._held:
            return
        narrower, self._held = wanted < self._held, wanted
        if narrower:
            self._stop_flow()
            self._start_flow()
        elif wanted > self._width:
            self._room += wanted - self._width
            self._width = wanted
            self.consumer.widen(wanted)

    def _start_flow(self) -> None:
        width = self._slots.count if self._are_short() else max(1, self._slots.free)
        self._width = self._room = max(width, self._held)
        self.consumer = self.broker.consume(self.bulk, self._width)
        self._flows = True

    def _stop_flow(self) -> None:
        self._hand_back(self._stopped())

    def _stopped(self) -> list[Delivery]:
        if not self._flows:
            return []
        self._flows = False
        return self.consumer.close()

    # One job ahead

    def _look_ahead(self) -> None:
        now = time.monotonic()
        service_s = self._outlook.service_s(self._model)
        if self._ahead:
            if now - self._ahead_since > max(_HOLD_S, service_s / 4):
                self._hand_back(self._drop_ahead())
                self._ahead_wanted = False  # until a slot has freed
            return
        soon_s = max(_SOON_S, 2 * self._pace.fetch_s(self._model))
        if self._ahead_wanted and self._running.next_end_s() <= soon_s:
            self._hold(self.urgent() or self._home_ahead(service_s) or self._thief.steal())

    def _home_ahead(self, service_s: float) -> Delivery | None:
        """A job of our own, unless it is among the last: another worker might be free for it first."""
        others = self._outlook.at_home(self._model)
        if others:
            queue = self._outlook.queue(self._model)
            in_s = self._running.next_end_s() + service_s
            if queue.ready <= len(others) or leave_to_faster(queue, in_s):
                return None
        return self.broker.get(self.bulk)

    def _hold(self, delivery: Delivery | None) -> None:
        if delivery is None:
            return
        self._ahead, self._ahead_since = delivery, time.monotonic()
        loaded = self._residency.get(model_of(delivery.queue))
        if loaded and not loaded.why_no_kv:
            self._fetches[id(delivery)] = AheadFetch(self._kv, delivery, loaded.engine.info, self._pool)

    def _take_ahead(self) -> Delivery | None:
        self._ahead_wanted = True
        delivery, self._ahead = self._ahead, None
        return delivery

    def _drop_ahead(self) -> list[Delivery]:
        delivery, self._ahead = self._ahead, None
        if delivery is None:
            return []
        self._fetches.pop(id(delivery), None)
        return [delivery]
