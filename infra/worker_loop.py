"""A worker's consumer loop: where its deliveries come from, and the slots that they go to.

Each worker consists of such a loop and a handler. The loop takes deliveries while there is capacity, keeps suspects
apart, and listens for broadcasts. It knows nothing of engines, and the handler knows nothing of queues.

Deliveries come from a model's two lanes and from its suspects queue. `now` goes before `bulk`. It is pulled only after
a wakeup, or some time after the last check, so that an empty lane costs the broker little. Suspects are pulled only by
a worker that holds no other job, and nothing else runs beside them. Each stage decides how `bulk` is read: see its
`Flow`.
"""

import logging
import math
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from datetime import datetime
from functools import partial
from typing import Any, Generic, Protocol, TypeVar

from infra.broker import topology
from infra.broker.base import Broker, Consumer, Delivery
from infra.broker.control import ControlListener
from infra.broker.failpoints import failpoint
from infra.broker.settle import Settler
from infra.config.hours import ALL_HOURS, Hours
from infra.sd_notify import WATCHDOG_S, notify
from messages.errors import BrokerUnavailable, NoQueue
from messages.workers import ENGINE_AWAY, SELF_PAUSED, WorkerStage

log = logging.getLogger(__name__)
T = TypeVar("T")

_IDLE_WAIT_S = 0.2
_TICK_S = 0.5
# Pause between checks for jobs that the broker gave up on, for deleted queues, and for waiting jobs that don't arrive.
_DEATHS_EVERY_S = 5.0
_FORGOTTEN_S = 10.0  # if jobs wait but none arrives for this many seconds, the broker has lost the subscription
_LOOK_AT_NOW_S = 0.25
_LOOK_AT_SUSPECTS_S = 2.0
# A result is late if the broker has not confirmed it after this time. Restarting the broker, or reconnecting to it,
# takes less time.
_LATE_S = 20.0
# After waiting this long for a `bulk` job, the loop checks whether a `now` job was announced. The wait is short,
# because the check costs nothing.
LISTEN_S = 0.02


class Flow(Protocol):
    """How `bulk` jobs come to a worker. All but `nudge` are used from one thread.

    A flow hands back jobs that it holds and that were not begun, or returns them from `pause` and `close` to be
    settled.
    """

    def next(self, timeout_s: float) -> Delivery | None:
        """Return the next job; None after `timeout_s`. After a pause, this starts the flow again.

        Raises BrokerUnavailable, NoQueue.
        """

    def throttle(self, urgent: Callable[[], Delivery | None]) -> None:
        """Is called repeatedly while there is no capacity. `urgent` returns the next job of `now`, if there is one."""

    def pause(self) -> list[Delivery]:
        """Hold no jobs until `next` is called. Returns those to be settled."""

    def close(self) -> list[Delivery]:
        """Hold no jobs any more. Returns those to be settled."""

    def nudge(self) -> None:
        """Make `next` return at once. May be called from any thread."""


class JobSource:
    """The source of one worker's deliveries. All but `ring` are used from one thread.

    `count_in_progress` returns how many deliveries are being worked on.
    """

    def __init__(
        self, broker: Broker, stage: WorkerStage, model: str, flow: Flow, count_in_progress: Callable[[], int]
    ) -> None:
        self._broker = broker
        self.urgent_queue = topology.work_queue(stage, model, "now")
        self._suspects = topology.suspects_queue(stage, model)
        self._count_in_progress = count_in_progress
        self._next_looks: dict[str, float] = defaultdict(float)  # when to check each queue next; monotonic clock
        self.flow = flow

    def ring(self, queue: str) -> None:
        """Note that a job was published to `queue`."""
        if queue == self.urgent_queue:
            self._next_looks[queue] = 0.0
            self.flow.nudge()

    def next(self, timeout_s: float, wants_bulk: bool = True) -> Delivery | None:
        """Return the next delivery for a free slot; None after `timeout_s` at most.

        Without `wants_bulk` it returns only urgent jobs and suspects.
        """
        try:
            if delivery := self.urgent() or self._suspect():
                return delivery
            if wants_bulk:
                return self.flow.next(min(timeout_s, LISTEN_S))
            time.sleep(min(timeout_s, LISTEN_S))
            return None
        except BrokerUnavailable:
            time.sleep(min(timeout_s, 0.2))  # the broker client reconnects on its own
            return None

    def urgent(self) -> Delivery | None:
        """Return the next job of `now`, if it is time to check that queue."""
        return self._look_at(self.urgent_queue, _LOOK_AT_NOW_S)

    def _suspect(self) -> Delivery | None:
        return None if self._count_in_progress() else self._look_at(self._suspects, _LOOK_AT_SUSPECTS_S)

    def _look_at(self, queue: str, every_s: float) -> Delivery | None:
        if time.monotonic() < self._next_looks[queue]:
            return None
        # The time is set before the queue is checked, so that a wakeup during the check is not lost.
        self._next_looks[queue] = time.monotonic() + every_s
        delivery = self._broker.get(queue)
        if delivery:
            self._next_looks[queue] = 0.0  # perhaps the queue has more jobs
        return delivery


class Handler(Protocol):
    """What the loop needs from a worker, apart from handling jobs."""

    def has_room(self) -> bool:
        """Whether there is room for the result of one more job, as far as is known."""

    def on_cancel(self, batch_id: str) -> None:
        """Note that the batch was cancelled."""

    def tick(self) -> None:
        """Is called about twice a second."""


class ConsumerLoop:
    """Serves the queues of one stage of one model. `run` blocks until `stop`."""

    def __init__(
        self,
        broker: Broker,
        settler: Settler,
        stage: WorkerStage,
        model: str,
        name: str,
        # Called after the queues are declared.
        open_flow: Callable[[], Flow],
        # Returns the reason if the engine can't be reached, or "" if it can. If there is a reason, other workers should
        # take the jobs.
        find_outage: Callable[[], str] = lambda: "",
        find_trouble: Callable[[], str] = lambda: "",  # returns any other reason to take no jobs; "" if there is none
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
        self._find_trouble = find_trouble
        self._late_because = ""
        self._hours = ALL_HOURS  # the hours in which this loop takes jobs
        self._bulk = topology.work_queue(stage, model, "bulk")
        # When the loop began to wait for a job (monotonic clock); inf while it is not waiting.
        self._listening_since = math.inf
        self._subscription_lost = False  # whether the broker has jobs but delivers none
        self._pause_reason = ""
        self._jobs: OneByOne[Any] | None = None
        self._may_hold_bulk = True
        # True while this loop takes no jobs.
        self._is_idle = True
        # The loop of the other role, if this process has both roles.
        self._partner: ConsumerLoop | None = None
        # Returns whether this loop is allowed to take `bulk` jobs now.
        self.wants_bulk: Callable[[], bool] = lambda: True
        self._alone = threading.Lock()  # this lock is held while a suspect job runs

    @property
    def paused_because(self) -> str:
        """Why the worker paused itself, as a sentence, so that others do its jobs; "" if it didn't."""
        return self._late_because or self._find_trouble()

    @property
    def idle_reason(self) -> str:
        """Why the worker takes no jobs now, in a few words; "" if it takes jobs."""
        return self._pause_reason or (
            SELF_PAUSED if self.paused_because else ENGINE_AWAY if self._find_outage() else ""
        )

    def pair_with(self, partner: "ConsumerLoop") -> None:
        """Connect the two loops of one process, before either runs.

        No job of one then runs beside a suspect of the other.
        """
        self._partner, partner._partner = partner, self
        partner._alone = self._alone

    def count_in_progress(self) -> int:
        """Return how many jobs the process works on, in both roles, since a suspect must run beside none of them."""
        own = self._jobs.count_in_progress() if self._jobs else 0
        return own + (self._partner._jobs.count_in_progress() if self._partner and self._partner._jobs else 0)

    def run(self, jobs: "OneByOne[Any]", handler: Handler, hours: Hours = ALL_HOURS) -> None:
        """Give deliveries to `jobs` in these hours until stopped. Then finish the jobs in hand and hand back others."""
        self._jobs = jobs
        self._hours = hours
        self._update_pause()
        for remark in self._broker.declare([self._model]):
            log.warning(remark)
        source = JobSource(self._broker, self._stage, self._model, self._open_flow(), self.count_in_progress)
        house = threading.Thread(target=self._keep_house, args=(source, handler), name="housekeeping", daemon=True)
        house.start()
        try:
            while not self._stopping.is_set():
                self._turn(source, jobs, handler)
        finally:
            self._stopping.set()
            self._settler.hand_back_all(source.flow.close())
            jobs.close()
            self._is_idle = True
            house.join()

    def stop(self) -> None:
        """Take no more jobs. May be called from any thread, and from a signal handler."""
        self._stopping.set()

    def _turn(self, source: JobSource, jobs: "OneByOne[Any]", handler: Handler) -> None:
        """Put the next delivery into a free slot, or wait for a moment if none is free or no delivery comes."""
        # `_is_idle` is set before the lock is checked. If the other loop takes the lock after the check, it sees that
        # this loop is not idle, and waits for this loop's jobs.
        self._is_idle = False
        if self.idle_reason or self._subscription_lost or self._alone.locked() or not handler.has_room():
            self._listening_since, self._subscription_lost = math.inf, False
            self._settler.hand_back_all(source.flow.pause())
            self._is_idle = True
            self._stopping.wait(_IDLE_WAIT_S)
            return
        if not jobs.wait(0):
            self._listening_since = math.inf
            source.flow.throttle(source.urgent)
            self._may_hold_bulk = True  # the flow may have prefetched jobs
            if not jobs.wait(_IDLE_WAIT_S):
                return
        wants_bulk = self.wants_bulk()
        if not wants_bulk and self._may_hold_bulk:
            failpoint("bulk.held", self._name)
            self._settler.hand_back_all(source.flow.pause())
        self._may_hold_bulk = wants_bulk
        try:
            delivery = source.next(_IDLE_WAIT_S, wants_bulk)
        except NoQueue:  # housekeeping will declare the queue again
            self._stopping.wait(_IDLE_WAIT_S)
            return
        is_waiting = wants_bulk and delivery is None
        self._listening_since = min(self._listening_since, time.monotonic()) if is_waiting else math.inf
        if delivery is None:
            return
        if self._stopping.is_set():
            return self._settler.hand_back_all([delivery])
        if topology.is_suspects_queue(delivery.queue):
            # Hand back all other jobs, because the suspect could kill this worker.
            self._settler.hand_back_all(source.flow.pause())
            return self._run_alone(jobs, delivery)
        jobs.accept(delivery)

    def _run_alone(self, jobs: "OneByOne[Any]", suspect: Delivery) -> None:
        if not self._alone.acquire(blocking=False):  # the other role's loop is running a suspect job
            return self._settler.hand_back_all([suspect])
        try:
            while self.count_in_progress() or not (self._partner is None or self._partner._is_idle):
                if self._stopping.wait(LISTEN_S):
                    return self._settler.hand_back_all([suspect])
            jobs.accept(suspect)
            jobs.finish()
        finally:
            self._alone.release()

    def _look_at_queues(self) -> None:
        """Declare deleted queues again, and subscribe again if jobs wait but none has come for a while.

        The jobs in a deleted queue were lost with it; their batch's owner publishes them again. A quorum queue can lose
        a subscription when a network partition heals (rabbitmq-server #15473): the channel stays open, but nothing is
        delivered.
        """
        specs = topology.queues([self._model], self._broker.is_clustered)
        names = [spec.name for spec in specs if not (self._broker.is_clustered and spec.is_classic)]
        depths = self._broker.depths(*names)
        if missing_queues := [name for name, depth in depths.items() if depth is None]:
            log.error("somebody deleted %s and the messages in it: declaring it again", ", ".join(missing_queues))
            self._broker.declare([self._model])
        bulk = depths[self._bulk]
        if bulk and bulk.ready and time.monotonic() - self._listening_since > _FORGOTTEN_S:
            log.info("jobs wait in %s, but none has come for %.0f s: subscribing again", self._bulk, _FORGOTTEN_S)
            self._subscription_lost = True

    def _pause(self, worker: str, is_paused: bool) -> None:
        if self._name == worker or self._name.startswith(f"{worker}."):
            self._is_paused = is_paused
            self._update_pause()

    def _update_pause(self) -> None:
        outside = not self._hours.include(datetime.now())
        self._pause_reason = "paused" if self._is_paused else "outside its hours" if outside else ""
        # Late results are sent again and again, so the pause ends on its own. The worker does not pause while there is
        # no connection, because then the broker is unavailable and the worker is not at fault.
        if self._settler.late_s < _LATE_S:
            self._late_because = ""
        elif self._broker.is_connected and not self._late_because:
            self._late_because = f"the broker is connected, and has not confirmed its results for {_LATE_S:.0f} s"
            log.error("paused: %s", self._late_because)

    def _keep_house(self, source: JobSource, handler: Handler) -> None:
        control = None
        handlers: dict[str, Callable[[str], None]] = {"wakeup": source.ring, "cancel": handler.on_cancel}
        handlers |= {"pause": partial(self._pause, is_paused=True), "resume": partial(self._pause, is_paused=False)}
        next_look = next_tick = time.monotonic()
        notify(f"READY=1\nWATCHDOG_USEC={WATCHDOG_S * 1_000_000}")
        while not self._stopping.is_set():
            try:
                if control is None:
                    control = ControlListener(self._broker, self._name, handlers)
                    source.ring(source.urgent_queue)  # a wakeup may have been sent before this loop listened
                control.poll(_TICK_S)
                if time.monotonic() > next_look:
                    self._look_at_queues()
                    self._settler.answer_deaths(self._model)
                    next_look = time.monotonic() + _DEATHS_EVERY_S
            except (BrokerUnavailable, NoQueue):
                # The broker client reconnects on its own. Deleted queues are declared again at the next check.
                self._stopping.wait(0.5)
            if time.monotonic() >= next_tick:  # not at every wakeup, because each `now` job causes one
                self._update_pause()
                handler.tick()
                notify("WATCHDOG=1")
                next_tick = time.monotonic() + _TICK_S
        # This turns off the watchdog, because unfinished jobs can take longer than its limit.
        notify("STOPPING=1\nWATCHDOG_USEC=0")
        if control:
            control.close()


class SlotPool:
    """The `count` slots of a worker. One thread takes slots; any thread may ask about them.

    A job leaves its slot when the engine is done with it. Storing, publishing and acking its outcome takes
    milliseconds, and meanwhile the next job can begin.

    `inline`: there is only one slot, and its work runs in the thread that takes it.
    """

    def __init__(self, count: int, inline: bool = False) -> None:
        self.count = count
        self._inline = inline
        self.jobs_done = 0
        self._condition = threading.Condition()
        self._slots_in_use: set[object] = set()
        self._works_inline = False
        self._lent_slots = 0  # number of slots that have no delivery and are lent to a job with several answers
        self._threads: set[Future[None]] = set()
        self._pool = ThreadPoolExecutor(2 * count, thread_name_prefix="slot")

    @property
    def active_groups(self) -> int:
        """The number of groups of jobs whose thread still runs, from their first check until they have left."""
        return len(self._threads) + self._works_inline

    @property
    def free(self) -> int:
        """The number of slots that are not taken."""
        return self.count - len(self._slots_in_use)

    def wait(self, timeout_s: float | None) -> bool:
        """Wait until a slot is free, and return whether one is. `timeout_s` None: without limit.

        Besides the jobs in slots, as many others may be ending. If there are more, their ends are held up, and no slot
        counts as free.
        """
        with self._condition:
            return self._condition.wait_for(
                lambda: len(self._slots_in_use) < self.count and len(self._threads) < 2 * self.count, timeout_s
            )

    def run_in_slot(self, work: Callable[[Callable[[], None]], None], jobs: int = 1) -> None:
        """Do `work`, which handles `jobs` jobs, in a slot. Waits until a slot is free.

        `work` gets a function that leaves the slot, which it may call early and more than once. The slot is also left
        when `work` returns. `work` must not raise.
        """
        if self._inline:
            self._works_inline = True
            work(lambda: None)
            self._works_inline = False
            self.jobs_done += jobs
            return
        self.wait(None)
        slot = object()

        def leave() -> None:
            with self._condition:
                if slot in self._slots_in_use:
                    self._slots_in_use.remove(slot)
                    self._condition.notify_all()

        def on_done(future: Future[None]) -> None:
            if error := future.exception():
                log.error("bug in a slot: its jobs are delivered again when this worker ends", exc_info=error)
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
        """Do `work` in an idle slot, and repeat it while it returns True and no delivery needs the slot.

        Deliveries come first: they get slots as if none were lent, and a job that finds the engine full waits until
        `work` ends. Returns the thread, or None if no slot is idle. `work` must not raise.
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
        """Return when no slot's thread runs any more. Results may still be on their way to the broker."""
        wait(list(self._threads))

    def close(self) -> None:
        """Wait for all threads, and accept no more work."""
        self._pool.shutdown()


@dataclass(frozen=True, slots=True)
class GroupHelp:
    """What a worker can provide so that several of its jobs are done in one go.

    A worker that does them singly needs none.
    """

    # Returns the mean time of a job. If this is None, the loop measures the time.
    mean_s: Callable[[], float] | None = None
    # A context manager for a group of jobs. Within it, one look-up for the group replaces a look-up for each job.
    looked_up: Callable[[list[Delivery]], AbstractContextManager[None]] = lambda _group: nullcontext()


NO_HELP = GroupHelp()


class OneByOne(Generic[T]):
    """A worker's jobs, one for each slot. Each is handled and committed in its slot's thread.

    `QuickJobs` does the same in groups.

    Args:
        handle: does everything that a delivery needs; it gets a function that leaves the slot early. It must not raise.
        commit: publishes outcomes of jobs with confirms, and acks. It must not raise.
    """

    def __init__(
        self,
        broker: Broker,
        settler: Settler,
        slots: SlotPool,
        handle: Callable[[Delivery, Callable[[], None]], None],
        commit: Callable[[list[T]], None],
        _group_help: GroupHelp = NO_HELP,
    ) -> None:
        self._broker = broker
        self._settler = settler
        self.slots = slots
        self._handle = handle
        self._commit = commit

    def consume(self, queue: str, prefetch: int) -> Consumer:
        """Return a consumer for a flow whose jobs come here."""
        return self._broker.consume(queue, prefetch)

    def wait(self, timeout_s: float) -> bool:
        """Wait for a free slot for at most `timeout_s`, and return whether one is free."""
        return self.slots.wait(timeout_s)

    def accept(self, delivery: Delivery) -> None:
        """Handle a delivery in a slot."""
        self.slots.run_in_slot(partial(self._handle, delivery))

    def commit(self, outcome: T) -> None:
        """Publish a job's outcome, and ack."""
        self._commit([outcome])

    def uncommitted(self) -> list[T]:
        """Return the outcomes that wait to be committed, or are being committed, outside of the slots."""
        return []

    def count_in_progress(self) -> int:
        """Return the number of groups of jobs in slots, plus the number of jobs that are not committed yet."""
        return self.slots.active_groups + len(self.uncommitted())

    def finish(self) -> None:
        """Return when all accepted jobs are settled."""
        self.slots.finish()

    def close(self) -> None:
        """Finish, and accept no more jobs."""
        self.slots.close()
