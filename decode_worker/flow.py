"""Where a decode worker's next job comes from if no urgent job waits: its own `bulk` queue, then other models' queues.

Short jobs are pushed by the broker, one for each slot. Long jobs are pulled when a slot is free, because a pushed job
can't be left to a faster worker: while all slots are busy no jobs flow, and when one is free, a `get` finds the next
job. A worker listens only if it finds none. At most one more job is held, and only shortly before a slot frees, so that
its KV cache is fetched while the slot is still busy.
"""

import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

from decode_worker.generate import DecodeAttempt, FetchedCache, RunningJobs, fetch_ahead
from decode_worker.stealing.policy import leave_to_faster
from decode_worker.stealing.thief import QueueChoice
from infra.broker.base import Broker, Delivery
from infra.broker.topology import stage_and_model
from infra.turns import Turns
from infra.worker_loop import OneByOne
from kvstore.base import KVStore
from messages.errors import BrokerUnavailable, NoQueue

# A slot counts as nearly free if its job will end within this time, or within twice the time that it takes to fetch a
# KV cache.
_SOON_S = 0.5
# A job that was fetched ahead is handed back if it gets no slot within this time, because the worker expected a free
# slot too early. For long jobs, the limit is a quarter of the mean job time.
_HOLD_S = 2.0


class DecodeFlow:
    """A decode worker's `Flow`; see `infra.worker_loop`."""

    def __init__(
        self,
        broker: Broker,
        jobs: OneByOne[DecodeAttempt],
        running_jobs: RunningJobs,
        choice: QueueChoice,
        kv: KVStore,
        hand_back: Callable[..., None],  # Settler.hand_back_all
    ) -> None:
        self._model_cache = choice.model_cache
        self._model = self._model_cache.home.model
        self._turns = Turns(broker, "decode", self._model)
        self._consume = jobs.consume
        self._slots = jobs.slots
        self._consumer = jobs.consume(self._turns.first, self._slots.count)
        self._running_jobs = running_jobs
        self._choice = choice
        self._throughput, self._thief, self._tail = choice.throughput, choice.thief, choice.tail
        self._kv = kv
        self._hand_back = hand_back
        self._is_pushed = True
        self._credit = self._slots.count  # the broker can push at least this many more jobs
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="fetch ahead")
        self._ahead: Delivery | None = None
        self._ahead_since = 0.0
        self._ahead_wanted = True
        self._fetches: dict[int, Future[FetchedCache | None]] = {}

    def next(self, timeout_s: float) -> Delivery | None:
        """Return the next job for a free slot."""
        self._ahead_wanted = True
        ahead, self._ahead = self._ahead, None
        if ahead:
            return ahead
        home = None
        if time.monotonic() < self._tail.next_look:
            time.sleep(timeout_s)
        else:
            # Once the first job has shown that jobs are short, the broker pushes them.
            if not self._is_pushed and self._are_short():
                self._start_flow()
            home = self._receive_pushed(timeout_s) if self._is_pushed else self._pull()
        return home or self._thief.steal()

    def throttle(self, urgent: Callable[[], Delivery | None]) -> None:
        """Stop the flow while no slot is free, and fetch the next job's KV cache shortly before one frees."""
        if self._are_short():
            return
        with suppress(BrokerUnavailable, NoQueue):
            self._hand_back(self._stop_flow(), keep_turn=True)
            self._look_ahead(urgent)

    def pop_fetch(self, delivery: Delivery) -> Future[FetchedCache | None] | None:
        """Return the KV cache that was fetched ahead for a delivery that begins now, or None.

        Its `result` raises what `fetch_ahead` raises, so problems are reported only when the job is decoded.
        """
        return self._fetches.pop(id(delivery), None)

    def pause(self) -> list[Delivery]:
        """See `Flow`. Nothing has to be resumed, because the flow is decided with each job."""
        return self._drop_ahead() + self._stop_flow()

    def nudge(self) -> None:
        """See `Flow`."""
        self._consumer.nudge()

    def close(self) -> list[Delivery]:
        """See `Flow`."""
        deliveries = self.pause()
        self._pool.shutdown()
        return deliveries

    def _are_short(self) -> bool:
        return self._choice.outlook.are_short and not self._running_jobs.has_foreign(self._model)

    # Jobs of the worker's own model

    def _pull(self) -> Delivery | None:
        if self._tail.should_leave(self._choice.outlook_for_long()):
            return None
        delivery = self._turns.pull()
        if delivery is None:
            self._start_flow()
        return delivery

    def _receive_pushed(self, timeout_s: float) -> Delivery | None:
        if self._slots.free > self._credit and not self._are_short():
            # The broker might push fewer jobs than there are free slots, so close the consumer and pull a job instead.
            self._hand_back(self._stop_flow(), keep_turn=True)
            return self._pull()
        delivery = self._turns.take(lambda: self._consumer.receive(0)) or self._consumer.receive(timeout_s)
        if delivery is None:
            return None
        if delivery.queue == self._turns.first:
            self._credit -= 1
        if self._tail.should_leave(self._choice.outlook_for_long(), in_hand=1):
            self._hand_back([*self._stop_flow(), delivery])
            return None
        return delivery

    def _start_flow(self) -> None:
        self._credit = self._slots.count if self._are_short() else max(1, self._slots.free)
        self._consumer = self._consume(self._turns.first, self._credit)
        self._is_pushed = True

    def _stop_flow(self) -> list[Delivery]:
        """Stop the flow, and return the deliveries that arrived and were not received."""
        if not self._is_pushed:
            return []
        self._is_pushed = False
        return self._consumer.close()

    # Fetching one job ahead

    def _look_ahead(self, urgent: Callable[[], Delivery | None]) -> None:
        now = time.monotonic()
        decode_s = self._choice.outlook_for_long().decode_s
        if self._ahead:
            if now - self._ahead_since > max(_HOLD_S, decode_s / 4):
                self._hand_back(self._drop_ahead(), keep_turn=True)
                self._ahead_wanted = False  # don't fetch ahead until a slot becomes free
            return
        soon_s = max(_SOON_S, 2 * self._throughput.fetch_s(self._model))
        if not self._ahead_wanted or self._running_jobs.next_end_s(self._throughput.expected_s) > soon_s:
            return
        if delivery := urgent() or self._home_ahead(decode_s) or self._thief.steal():
            self._keep_ahead(delivery)

    def _home_ahead(self, decode_s: float) -> Delivery | None:
        """Return a job of the home model, unless it is among the last, which another worker may be free for first."""
        if self._choice.outlook.has_peers:
            queue = self._choice.forecast.queue(self._model)
            in_s = self._running_jobs.next_end_s(self._throughput.expected_s) + decode_s
            if queue.ready <= len(queue.peers) or leave_to_faster(queue, in_s) is not None:
                return None
        return self._turns.pull()

    def _keep_ahead(self, delivery: Delivery) -> None:
        self._ahead, self._ahead_since = delivery, time.monotonic()
        loaded_model = self._model_cache.get(stage_and_model(delivery.queue)[1])
        if loaded_model and not loaded_model.why_no_kv:
            self._fetches[id(delivery)] = self._pool.submit(fetch_ahead, self._kv, delivery, loaded_model)

    def _drop_ahead(self) -> list[Delivery]:
        delivery, self._ahead = self._ahead, None
        if delivery is None:
            return []
        self._fetches.pop(id(delivery), None)
        return [delivery]
