"""A worker's consumer loop, where its deliveries come from, and the slots they go to.

Both workers are such a loop and a handler.

The loop takes deliveries while there is capacity, keeps suspects apart, and listens for broadcasts. It knows nothing of
engines, and the handler nothing of queues.

Deliveries come from a model's two lanes, and from the suspects. `now` is pulled, but only when it was rung or the last
look is a while ago, so that it costs the broker nothing while empty and goes first when not. Suspects are pulled by a
worker that holds nothing else, and block everything else while they run. How `bulk` comes is each stage's own affair:
its `Flow`.
"""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from datetime import datetime
from functools import partial
from typing import Protocol

from infra.broker import topology
from infra.broker.base import Broker, Consumer, Delivery
from infra.broker.control import ControlListener
from infra.broker.deaths import answer_deaths
from infra.broker.envelope import is_redelivery
from infra.broker.settle import Settler
from infra.config.hours import ALL_HOURS, Hours
from messages.errors import BrokerUnavailable, NoQueue
from messages.workers import ENGINE_AWAY, WorkerStage

log = logging.getLogger(__name__)

_IDLE_WAIT_S = 0.2
_TICK_S = 0.5
_DEATHS_EVERY_S = 5.0  # between looks for deaths, for deleted queues, and for jobs that wait and don't come
_FORGOTTEN_S = 10.0  # nothing came for so long, though jobs wait: the broker has lost our subscription
_LOOK_AT_NOW_S = 0.25
_LOOK_AT_SUSPECTS_S = 2.0
LISTEN_S = 0.02  # how long to listen for bulk alone; waking up costs the broker nothing

# Of quick jobs so many are held at once, by the time that one takes: together they take a second or two.
QUICK_S, HELD_IF_QUICK = 0.05, 32
INSTANT_S, HELD_IF_INSTANT = 0.005, 256
# Jobs that arrived together make a group if they take no longer than this together.
GROUP_S = 0.02
# After so long the rest of a group goes back: somebody else may be free, and what is ready waits for them.
GROUP_PATIENCE_S = 0.5


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

    def throttle(self, urgent: Callable[[], Delivery | None]) -> None:
        """Called again and again while there is no capacity. `urgent` gives the next job of `now`, if there is one."""

    def pause(self) -> list[Delivery]:
        """Hold nothing, until `next` is called."""

    def close(self) -> list[Delivery]:
        """Hold nothing any more."""

    def nudge(self) -> None:
        """Have `next` return at once, from any thread."""


class JobSource:
    """One worker's source of deliveries. Used from one thread, `ring` excepted.

    `count_in_progress` says how many deliveries are being worked on.
    """

    def __init__(
        self, broker: Broker, stage: WorkerStage, model: str, flow: Flow, count_in_progress: Callable[[], int]
    ) -> None:
        self._broker = broker
        self._now = topology.work_queue(stage, model, "now")
        self._suspects = topology.suspects_queue(stage, model)
        self._count_in_progress = count_in_progress
        self._next_look_at_now = 0.0
        self._next_look_at_suspects = 0.0
        self.flow = flow

    def ring(self, queue: str) -> None:
        """Somebody published to `queue`."""
        if queue == self._now:
            self._next_look_at_now = 0.0
            self.flow.nudge()

    def next(self, timeout_s: float) -> list[Delivery]:
        """The next delivery for a free slot, and what is done with it in one go; none after `timeout_s` at most."""
        try:
            first = self.urgent() or self._suspect()
            return [first] if first else self.flow.next(min(timeout_s, LISTEN_S))
        except BrokerUnavailable:
            time.sleep(min(timeout_s, 0.2))  # the broker reconnects by itself
            return []

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
        if time.monotonic() < self._next_look_at_suspects or self._count_in_progress():
            return None
        self._next_look_at_suspects = time.monotonic() + _LOOK_AT_SUSPECTS_S
        delivery = self._broker.get(self._suspects)
        if delivery:
            self._next_look_at_suspects = 0.0
        return delivery


class Handler(Protocol):
    """What a worker does with its deliveries."""

    def wait_for_capacity(self, timeout_s: float) -> bool:
        """Whether one more delivery can be taken now."""

    def count_in_progress(self) -> int:
        """How many deliveries are being worked on."""

    def accept(self, deliveries: list[Delivery]) -> None:
        """Work on deliveries of one model, one after the other, here or in another thread; never raises."""

    def finish(self) -> None:
        """Return when everything taken has been settled."""

    def on_cancel(self, batch_id: str) -> None:
        """The batch was cancelled."""

    def tick(self) -> None:
        """Called about twice a second."""


class ConsumerLoop:
    """Serves the queues of one stage of one model. `run` blocks until `stop`."""

    def __init__(
        self,
        broker: Broker,
        settler: Settler,
        stage: WorkerStage,
        model: str,
        name: str,
        open_flow: Callable[[], Flow],  # called once the queues are there
        find_outage: Callable[[], str] = lambda: "",  # whether its engine is: while it is, a job is better with another
    ) -> None:
        self._broker = broker
        self._settler = settler
        self._stage = stage
        self._model = model
        self._name = name
        self._open_flow = open_flow
        self._stopping = threading.Event()
        self._is_paused = False
        self._find_outage = find_outage
        self._hours = ALL_HOURS  # in which to take jobs
        self._bulk = topology.work_queue(stage, model, "bulk")
        self._listening_since = math.inf  # monotonic clock; nothing has come since then
        self._subscription_lost = False  # by the broker, which has jobs and brings none
        self._pause_reason = ""

    @property
    def idle_reason(self) -> str:
        """Why it takes no jobs now, in a few words; "": it takes some."""
        return self._pause_reason or (ENGINE_AWAY if self._find_outage() else "")

    def run(self, handler: Handler, hours: Hours = ALL_HOURS) -> None:
        """Take deliveries in these hours until stopped; finish what is in hand, hand back the rest, leave."""
        self._hours = hours
        self._update_pause()
        for remark in self._broker.declare([self._model]):
            log.warning(remark)
        source = JobSource(self._broker, self._stage, self._model, self._open_flow(), handler.count_in_progress)
        house = threading.Thread(target=self._keep_house, args=(source, handler), name="housekeeping", daemon=True)
        house.start()
        try:
            while not self._stopping.is_set():
                self._turn(source, handler)
        finally:
            self._stopping.set()
            self._settler.hand_back_all(source.flow.close())
            handler.finish()
            house.join()

    def stop(self) -> None:
        """Take nothing more. May be called from any thread, and from a signal handler."""
        self._stopping.set()

    def _turn(self, source: JobSource, handler: Handler) -> None:
        """Once there is capacity: the next deliveries go to the worker, or nothing comes for a moment."""
        if self.idle_reason or self._subscription_lost:
            self._listening_since, self._subscription_lost = math.inf, False
            self._settler.hand_back_all(source.flow.pause())
            self._stopping.wait(_IDLE_WAIT_S)
            return
        if not handler.wait_for_capacity(0):
            self._listening_since = math.inf
            source.flow.throttle(source.urgent)
            if not handler.wait_for_capacity(_IDLE_WAIT_S):
                return
        try:
            deliveries = source.next(_IDLE_WAIT_S)
        except NoQueue:  # housekeeping declares it again
            self._stopping.wait(_IDLE_WAIT_S)
            return
        self._listening_since = math.inf if deliveries else min(self._listening_since, time.monotonic())
        if self._stopping.is_set():
            return self._settler.hand_back_all(deliveries)
        if deliveries and topology.is_suspects_queue(deliveries[0].queue):
            self._settler.hand_back_all(source.flow.pause())  # nothing is held beside it that could crash with it
            handler.accept(deliveries)
            return handler.finish()
        # One that came back goes by itself: if it takes the worker along, its neighbours shall not count as crashed.
        if fresh_deliveries := [delivery for delivery in deliveries if not is_redelivery(delivery)]:
            handler.accept(fresh_deliveries)
        for delivery in deliveries:
            if is_redelivery(delivery):
                handler.accept([delivery])

    def _look_at_queues(self) -> None:
        """Declare what somebody deleted, and listen anew where jobs wait and none has come for a while.

        The jobs in a deleted queue were lost with it: their batch's owner publishes them again. A quorum queue can lose
        a subscription in a partition that heals (rabbitmq-server #15473): its channel stays open, and nothing comes.
        """
        specs = topology.queues([self._model], self._broker.is_clustered)
        names = [spec.name for spec in specs if not (self._broker.is_clustered and spec.is_classic)]
        depths = {name: self._broker.depth(name) for name in names}
        if missing_queues := [name for name, depth in depths.items() if depth is None]:
            log.error("somebody deleted %s with all it held: declaring it again", ", ".join(missing_queues))
            self._broker.declare([self._model])
        bulk = depths[self._bulk]
        if bulk and bulk.ready and time.monotonic() - self._listening_since > _FORGOTTEN_S:
            log.info("jobs wait in %s, and none has come for %.0f s: listening anew", self._bulk, _FORGOTTEN_S)
            self._subscription_lost = True

    def _pause(self, worker: str, is_paused: bool) -> None:
        if self._name == worker or self._name.startswith(f"{worker}."):
            self._is_paused = is_paused
            self._update_pause()

    def _update_pause(self) -> None:
        outside = not self._hours.include(datetime.now())
        self._pause_reason = "paused" if self._is_paused else "outside its hours" if outside else ""

    def _keep_house(self, source: JobSource, handler: Handler) -> None:
        control = None
        handlers: dict[str, Callable[[str], None]] = {"wakeup": source.ring, "cancel": handler.on_cancel}
        handlers |= {"pause": partial(self._pause, is_paused=True), "resume": partial(self._pause, is_paused=False)}
        next_look = next_tick = time.monotonic()
        while not self._stopping.is_set():
            try:
                control = control or ControlListener(self._broker, self._name, handlers)
                control.poll(_TICK_S)
                if time.monotonic() > next_look:
                    self._look_at_queues()
                    answer_deaths(self._broker, self._settler, self._model)
                    next_look = time.monotonic() + _DEATHS_EVERY_S
            except (BrokerUnavailable, NoQueue):
                self._stopping.wait(0.5)  # it reconnects by itself; what was deleted is declared again at the next look
            if time.monotonic() >= next_tick:  # not at every wakeup: those come as often as jobs
                self._update_pause()
                handler.tick()
                next_tick = time.monotonic() + _TICK_S
        if control:
            control.close()


class SlotPool:
    """The `count` slots of a worker that does several jobs at once. One thread takes them; anybody may ask.

    A job leaves its slot when the engine is done with it. Storing, publishing and acking what came of it take
    milliseconds in which the next job is begun already.
    """

    def __init__(self, count: int) -> None:
        self.count = count
        self.jobs_done = 0
        self._condition = threading.Condition()
        self._slots_in_use: set[object] = set()
        self._lent_slots = 0  # slots that no delivery has, and a job with several answers uses
        self._threads: set[Future[None]] = set()
        self._pool = ThreadPoolExecutor(2 * count, thread_name_prefix="slot")

    @property
    def active_groups(self) -> int:
        """Groups of jobs whose thread still runs: only just being looked at, decoded, or leaving."""
        return len(self._threads)

    @property
    def free(self) -> int:
        """Slots not taken."""
        return self.count - len(self._slots_in_use)

    def wait(self, timeout_s: float | None) -> bool:
        """Whether a slot is free, after `timeout_s` at most; None: as long as it takes.

        As many jobs again may be ending. If there are more, something holds up the ends, and no more are begun.
        """
        with self._condition:
            return self._condition.wait_for(
                lambda: len(self._slots_in_use) < self.count and len(self._threads) < 2 * self.count, timeout_s
            )

    def run_in_slot(self, work: Callable[[Callable[[], None]], None], jobs: int = 1) -> None:
        """Do `work`, of so many jobs, in a slot; waits for one if there is none.

        It is given what leaves its slot, to be called early and more than once if need be; the slot is left when it
        returns, too. It must not raise.
        """
        self.wait(None)
        slot = object()

        def leave() -> None:
            with self._condition:
                self._slots_in_use.discard(slot)
                self._condition.notify_all()

        def on_done(future: Future[None]) -> None:
            if error := future.exception():
                log.error("bug in a slot: what it held comes back when this worker leaves", exc_info=error)
            leave()
            with self._condition:
                self.jobs_done += jobs
                self._threads.discard(future)
                self._condition.notify_all()

        with self._condition:
            self._slots_in_use.add(slot)
            future = self._pool.submit(work, leave)
            self._threads.add(future)
        future.add_done_callback(on_done)

    def lend(self, work: Callable[[], bool]) -> threading.Thread | None:
        """Do `work` in a slot that idles, and again as long as it returns True and no delivery has taken that slot.

        Deliveries come first: they are given slots as if none were lent, and one that finds the engine full waits for
        the end of `work`. The thread; None if no slot idles. `work` must not raise.
        """
        with self._condition:
            if len(self._slots_in_use) + self._lent_slots >= self.count:
                return None
            self._lent_slots += 1
        helper = threading.Thread(target=self._help, args=(work,), name="lent-slot", daemon=True)
        helper.start()
        return helper

    def _help(self, work: Callable[[], bool]) -> None:
        keeps_slot = True
        while keeps_slot:
            has_more = work()
            with self._condition:
                keeps_slot = has_more and len(self._slots_in_use) + self._lent_slots <= self.count
                self._lent_slots -= not keeps_slot

    def finish(self) -> None:
        """Return when no slot's thread runs any more. Answers may still be on their way out."""
        wait(list(self._threads))

    def close(self) -> None:
        """Wait for all, and take no more."""
        self._pool.shutdown()
