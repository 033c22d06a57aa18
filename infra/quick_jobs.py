"""Jobs of milliseconds in larger steps: the way to a real broker and back takes longer than they do.

    one by one (`OneByOne`)                  here
    one delivery held for each slot          many, by the time that one takes (`adaptive_prefetch`)
    one delivery handled in a slot           a group of those that have arrived (`QuickJobs.accept`)
    each committed in its slot's thread      all that are ready together, in a thread of its own (`GroupCommit`)

The order within each job stays the same; after a crash more jobs are delivered again. A worker is complete without
this. It is used with a real broker only: in one process nothing is saved by it.
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

# Of quick jobs so many are held at once, by the time that one takes: together they take a second or two.
QUICK_S, HELD_IF_QUICK = 0.05, 32
INSTANT_S, HELD_IF_INSTANT = 0.005, 256
# Jobs that arrived together make a group if they take no longer than this together.
GROUP_S = 0.02
# After so long the rest of a group goes back: somebody else may be free, and what is ready waits for them.
GROUP_PATIENCE_S = 0.5
# So long quick jobs may lie here behind one that turned out slow.
_FULL_S = 1.0
_SLOW_S = 2 * QUICK_S  # from here on jobs are quick no more
_LARGE_BYTES = 16 * 1024


def adaptive_prefetch(mean_s: float, current: int) -> int:
    """How many jobs that take `mean_s` to hold at once; 1: they are not quick. `current`: how many are now.

    A level is left at twice the time at which it is entered, or it would change with every job.
    """
    for limit_s, count in ((INSTANT_S, HELD_IF_INSTANT), (QUICK_S, HELD_IF_QUICK)):
        if mean_s < limit_s * (2 if current >= count else 1):
            return count
    return 1


class QuickConsumer(Consumer):
    """A consumer that holds more jobs than asked for while they are quick. Used from one thread, `nudge` excepted."""

    def __init__(
        self,
        broker: Broker,
        queue: str,
        prefetch: int,
        mean_s: Callable[[], float],
        hand_back: Callable[[Iterable[Delivery]], None],
    ) -> None:
        self.queue = queue
        self.at_once = 1  # by `adaptive_prefetch`
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
        """A delivery that has arrived already, or None."""
        return self._consumer.receive(0)

    def hold(self, at_once: int) -> None:
        """Hold so many at once from now on; fewer than now: what nobody received goes back."""
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
    """See `OneByOne`; around the same handler and settler."""

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
        self._full_since = 0.0  # monotonic clock; 0: a slot was free at the last look
        self._group_commit = GroupCommit("committing", commit, HELD_IF_INSTANT)
        self._of_thread = threading.local()  # `.ready`: what the group in a slot's thread has come to so far

    def consume(self, queue: str, prefetch: int) -> Consumer:
        """See `OneByOne`."""
        self._consumer = QuickConsumer(self._broker, queue, prefetch, self._mean_s, self._settler.hand_back_all)
        return self._consumer

    def wait(self, timeout_s: float) -> bool:
        """See `OneByOne`. What lies here for long behind a slow job goes back."""
        is_free = super().wait(timeout_s)
        now = time.monotonic()
        self._full_since = 0.0 if is_free else self._full_since or now
        if self._full_since and now - self._full_since > _FULL_S and self._consumer and self._consumer.at_once > 1:
            self._consumer.hold(1)
        return is_free

    def accept(self, delivery: Delivery) -> None:
        """See `OneByOne`; with it what has arrived after it, as far as that is done in one go.

        One that came back goes by itself: if it takes the worker along, its neighbours shall not count as crashed.
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
            if self._is_large(newest):  # nothing is held behind it that somebody else could do meanwhile
                self._measured_s = _SLOW_S
                self._consumer.hold(1)
        for together in (group, *([single] for single in alone)):
            self.accept_group(together)

    def accept_group(self, group: list[Delivery]) -> None:
        """Have these handled in one slot, one after the other."""
        self.slots.run_in_slot(partial(self._handle_group, group), len(group))

    def commit(self, outcome: T) -> None:
        """See `OneByOne`; soon, with all that are ready then."""
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
                # The first is handled in any case; those behind it may turn out slower than was thought.
                while left and (left is group or time.monotonic() - start <= GROUP_PATIENCE_S):
                    delivery, *left = left
                    if ready and self._is_large(delivery):  # jobs that are ready must not wait for this one
                        self._group_commit.add(*ready)
                        ready.clear()
                    self._handle(delivery, _stay)
            self._settler.hand_back_all(left)
        finally:  # whatever ends the group: what is ready is committed
            leave_slot()
            if ready:
                self._group_commit.add(*ready)
            weight = 1 - 0.9 ** len(group)
            self._measured_s += weight * ((time.monotonic() - start) / len(group) - self._measured_s)

    def _mean_s(self) -> float:
        return self._help.mean_s() if self._help.mean_s else self._measured_s

    def _may_have_neighbours(self, delivery: Delivery) -> bool:
        """Whether it was pushed, and for the first time."""
        return self._consumer is not None and delivery.queue == self._consumer.queue and not is_redelivery(delivery)

    def _is_large(self, delivery: Delivery) -> bool:
        """Whether its prompt is so long that it is not quick, whatever came before it, as far as was measured here."""
        return self._help.mean_s is None and len(delivery.message.body) > _LARGE_BYTES


def _stay() -> None:
    """A group leaves its slot at its end."""


class GroupCommit(Generic[T]):
    """Gives items to `work` in a thread of its own, as many as there are, in order. What `work` raises is logged.

    While one group is under way, the next one gathers: settling is cheaper for many at once. With one item now and
    then each is a group of its own, and waits for nobody. The word is that of databases.

    While `limit` or more are unfinished `add` waits. Thread-safe.
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
        """Have these done soon."""
        with self._condition:
            self._condition.wait_for(lambda: len(self._under_way) + len(self._queue) < self._limit)
            self._queue += items
            self._condition.notify_all()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name=self._name, daemon=True)
                self._thread.start()

    def snapshot(self) -> list[T]:
        """A snapshot."""
        with self._condition:
            return self._under_way + self._queue

    def finish(self) -> None:
        """Return when everything added so far is done."""
        with self._condition:
            self._condition.wait_for(lambda: not self._under_way and not self._queue)

    def close(self) -> None:
        """Finish, and end the thread. Nothing may be added after that."""
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
            except Exception:  # a bug of ours must not end the thread that everybody waits for
                log.exception("%s: bug", self._name)
            with self._condition:
                self._under_way = []
                self._condition.notify_all()
