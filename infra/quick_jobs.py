"""Handles jobs that take milliseconds in groups, because a round trip to a real broker takes longer than such a job.

    one by one (`OneByOne`)                  in groups (`QuickJobs`)
    one delivery is held for each slot       many are held; how many depends on a job's time (`adaptive_prefetch`)
    one delivery is handled in a slot        a group of deliveries that have arrived is handled (`QuickJobs.accept`)
    each is committed in its slot's thread   all that are ready are committed together in one thread (`GroupCommit`)

The order of steps within each job stays the same. After a crash, more jobs are delivered again. A worker also works
without this module. It is used only with a real broker, because it saves nothing in one process.
"""

import logging
import threading
import time
from collections.abc import Callable, Iterable
from contextlib import nullcontext
from functools import partial
from typing import Generic, TypeVar

from infra.broker.base import Broker, Consumer, Delivery
from infra.broker.envelope import is_redelivery
from infra.broker.settle import Settler
from infra.worker_loop import NO_HELP, GroupHelp, OneByOne, SlotPool

log = logging.getLogger(__name__)
T = TypeVar("T")

# A worker prefetches HELD_IF_QUICK jobs if a job takes less than QUICK_S, and HELD_IF_INSTANT jobs if it takes less
# than INSTANT_S. In both cases, the jobs are at most two seconds of work.
QUICK_S, HELD_IF_QUICK = 0.05, 32
INSTANT_S, HELD_IF_INSTANT = 0.005, 256
# Jobs that arrive together are handled as a group if they take no longer than this in total.
GROUP_S = 0.02
# If a group takes longer than this, its remaining jobs are handed back. Other workers can then take them, and the
# results of the finished jobs don't wait.
GROUP_PATIENCE_S = 0.5
# Maximum time that quick jobs wait behind a job that turns out to be slow.
_FULL_S = 1.0
_SLOW_S = 2 * QUICK_S  # jobs that take this many seconds don't count as quick
_LARGE_BYTES = 16 * 1024


def adaptive_prefetch(mean_s: float, current: int) -> int:
    """Return how many jobs that take `mean_s` to hold at once; 1 if they are not quick.

    `current` is the number held now. A level is left only at twice the time at which it is entered, so that it doesn't
    change with every job.
    """
    for limit_s, count in ((INSTANT_S, HELD_IF_INSTANT), (QUICK_S, HELD_IF_QUICK)):
        if mean_s < limit_s * (2 if current >= count else 1):
            return count
    return 1


class QuickConsumer(Consumer):
    """A consumer that holds more jobs than asked for while jobs are quick. All but `nudge` are used from one thread."""

    def __init__(
        self,
        broker: Broker,
        queue: str,
        prefetch: int,
        mean_s: Callable[[], float],
        hand_back: Callable[[Iterable[Delivery]], None],
    ) -> None:
        self.queue = queue
        self.at_once = 1  # number of jobs to prefetch, as computed by `adaptive_prefetch`
        self._broker = broker
        self._least = self._prefetch = prefetch
        self._mean_s = mean_s
        self._hand_back = hand_back
        self._consumer = broker.consume(queue, prefetch)

    def receive(self, timeout_s: float) -> Delivery | None:
        """See `Consumer`."""
        self.hold(adaptive_prefetch(self._mean_s(), self.at_once))
        return self._consumer.receive(timeout_s)

    def receive_more(self) -> Delivery | None:
        """Return a delivery that has arrived already, or None."""
        return self._consumer.receive(0)

    def hold(self, at_once: int) -> None:
        """Hold this many deliveries at once from now on. If that is fewer than now, unreceived ones are handed back."""
        prefetch, narrower = max(self._least, at_once), at_once < self.at_once
        self.at_once = at_once
        if narrower:
            self._hand_back(self._consumer.close())
            self._consumer = self._broker.consume(self.queue, prefetch)
        elif prefetch > self._prefetch:
            self._consumer.widen(prefetch)
        self._prefetch = prefetch

    def nudge(self) -> None:
        """See `Consumer`."""
        self._consumer.nudge()

    def widen(self, prefetch: int) -> None:
        """See `Consumer`."""
        self._least = self._prefetch = prefetch
        self._consumer.widen(prefetch)

    def pause(self) -> list[Delivery]:
        """See `Consumer`."""
        return self._consumer.pause()

    def resume(self) -> None:
        """See `Consumer`."""
        self._consumer.resume()

    def close(self) -> list[Delivery]:
        """See `Consumer`."""
        self.at_once = 1
        return self._consumer.close()


class QuickJobs(OneByOne[T]):
    """Handles jobs in groups. It replaces `OneByOne`, with the same handler and settler."""

    def __init__(
        self,
        broker: Broker,
        settler: Settler,
        slots: SlotPool,
        handle: Callable[[Delivery, Callable[[], None]], None],
        commit: Callable[[list[T]], None],
        group_help: GroupHelp = NO_HELP,
    ) -> None:
        super().__init__(broker, settler, slots, handle, commit)
        self._help = group_help
        self._measured_s = _SLOW_S
        self._consumer: QuickConsumer | None = None
        self._full_since = 0.0  # when all slots became busy (monotonic clock); 0 if a slot was free at the last check
        self._group_commit = GroupCommit("committing", commit, HELD_IF_INSTANT)
        self._of_thread = threading.local()  # `.ready`: the outcomes of the group that the thread is handling

    def consume(self, queue: str, prefetch: int) -> Consumer:
        """See `OneByOne`."""
        self._consumer = QuickConsumer(self._broker, queue, prefetch, self._mean_s, self._settler.hand_back_all)
        return self._consumer

    def wait(self, timeout_s: float) -> bool:
        """See `OneByOne`. Jobs that have waited long behind a slow one are handed back."""
        is_free = super().wait(timeout_s)
        now = time.monotonic()
        self._full_since = 0.0 if is_free else self._full_since or now
        if self._full_since and now - self._full_since > _FULL_S and self._consumer and self._consumer.at_once > 1:
            self._consumer.hold(1)
        return is_free

    def accept(self, delivery: Delivery) -> None:
        """See `OneByOne`. Jobs that arrived after this one join it, if all of them can be done in one go.

        A redelivered job is handled separately: if it kills the worker, the others must not be counted as crashed with
        it.
        """
        group, newest = [delivery], delivery
        alone: list[Delivery] = []
        mean_s = self._mean_s()
        if self._consumer and self._consumer.at_once > 1 and self._may_have_neighbours(delivery):
            while not self._is_large(newest) and (len(group) + 1) * mean_s < GROUP_S and len(group) < HELD_IF_QUICK:
                more = self._consumer.receive_more()
                if more is None:
                    break
                (alone if is_redelivery(more) else group).append(more)
                newest = more
            if self._is_large(newest):  # hand back the jobs behind a large job, so that other workers can do them
                self._measured_s = _SLOW_S
                self._consumer.hold(1)
        for together in (group, *([single] for single in alone)):
            self.accept_group(together)

    def accept_group(self, group: list[Delivery]) -> None:
        """Handle these deliveries in one slot, one after the other."""
        self.slots.run_in_slot(partial(self._handle_group, group), len(group))

    def commit(self, outcome: T) -> None:
        """See `OneByOne`. The outcome is committed soon, together with all others that are ready then."""
        self._of_thread.ready.append(outcome)

    def uncommitted(self) -> list[T]:
        """See `OneByOne`."""
        return self._group_commit.snapshot()

    def finish(self) -> None:
        """See `OneByOne`."""
        super().finish()
        self._group_commit.finish()

    def close(self) -> None:
        """See `OneByOne`."""
        super().close()
        self._group_commit.close()

    def _handle_group(self, group: list[Delivery], leave_slot: Callable[[], None]) -> None:
        ready: list[T] = []
        self._of_thread.ready = ready
        start, left = time.monotonic(), group
        try:
            with self._help.looked_up(group) if len(group) > 1 else nullcontext():
                # The first job is always handled. If the group takes longer than expected, the remaining jobs are
                # handed back.
                while left and (left is group or time.monotonic() - start <= GROUP_PATIENCE_S):
                    delivery, *left = left
                    if ready and self._is_large(delivery):  # results of finished jobs must not wait for a large job
                        self._group_commit.add(*ready)
                        ready.clear()
                    self._handle(delivery, _stay)
            self._settler.hand_back_all(left)
        finally:  # the finished outcomes are committed even if the group ends with an error
            leave_slot()
            if ready:
                self._group_commit.add(*ready)
            weight = 1 - 0.9 ** len(group)
            self._measured_s += weight * ((time.monotonic() - start) / len(group) - self._measured_s)

    def _mean_s(self) -> float:
        return self._help.mean_s() if self._help.mean_s else self._measured_s

    def _may_have_neighbours(self, delivery: Delivery) -> bool:
        """Whether the delivery was pushed by the broker, for the first time."""
        return self._consumer is not None and delivery.queue == self._consumer.queue and not is_redelivery(delivery)

    def _is_large(self, delivery: Delivery) -> bool:
        """Whether the prompt is too long to be quick. This is used only if the job's time is measured here."""
        return self._help.mean_s is None and len(delivery.message.body) > _LARGE_BYTES


def _stay() -> None:
    """Do nothing, because the group leaves its slot only at its end."""


class GroupCommit(Generic[T]):
    """Calls `work` in a separate thread with all items that are ready, in order. Errors of `work` are logged.

    While one group is being committed, the next one gathers, because settling many jobs at once is cheaper. If items
    come only now and then, each forms its own group and doesn't wait. The name comes from databases.

    `add` waits while `limit` or more items are unfinished. Thread-safe.
    """

    def __init__(self, name: str, work: Callable[[list[T]], None], limit: int) -> None:
        self._name = name
        self._work = work
        self._limit = limit
        self._condition = threading.Condition()
        self._queue: list[T] = []
        self._under_way: list[T] = []
        self._thread: threading.Thread | None = None
        self._closed = False

    def add(self, *items: T) -> None:
        """Add items, to be committed soon."""
        with self._condition:
            self._condition.wait_for(lambda: len(self._under_way) + len(self._queue) < self._limit)
            self._queue += items
            self._condition.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()

    def snapshot(self) -> list[T]:
        """Return the items that are not finished now."""
        with self._condition:
            return self._under_way + self._queue

    def finish(self) -> None:
        """Return when every item that was added so far is finished."""
        with self._condition:
            self._condition.wait_for(lambda: not self._under_way and not self._queue)

    def close(self) -> None:
        """Finish all items and end the thread. No item may be added after that."""
        self.finish()
        with self._condition:
            self._closed = True
            self._condition.notify_all()

    def _run(self) -> None:
        while True:
            with self._condition:
                self._condition.wait_for(lambda: self._queue or self._closed)
                self._under_way, self._queue = self._queue, []
            if not self._under_way:
                return
            try:
                self._work(self._under_way)
            except Exception:  # a bug must not end the thread that all slots depend on
                log.exception("%s: bug", self._name)
            with self._condition:
                self._under_way = []
                self._condition.notify_all()
