"""Slots: as many jobs as there are, the next one begun while the last is settled, and never without bound."""

import threading
from collections.abc import Callable, Iterator

import pytest

from infra.worker_loop import SlotPool
from tests.support.waiting import wait_until


class Work:
    """A job: it waits for its answer, leaves its slot, and waits until it is settled."""

    def __init__(self) -> None:
        self.answered, self.settled, self.begun = threading.Event(), threading.Event(), threading.Event()

    def __call__(self, leave: Callable[[], None]) -> None:
        self.begun.set()
        self.answered.wait(10)
        leave()
        self.settled.wait(10)


@pytest.fixture
def slots() -> Iterator[SlotPool]:
    slots = SlotPool(1)
    yield slots
    slots.close()


def test_a_slot_is_taken_until_its_job_has_its_answer(slots):
    work = Work()
    slots.run_in_slot(work)
    assert (slots.wait(0), slots.free, slots.active_groups) == (False, 0, 1)

    work.answered.set()

    assert slots.wait(10)
    assert (slots.free, slots.active_groups) == (1, 1)
    work.settled.set()
    wait_until(lambda: slots.active_groups == 0, "it is settled")
    assert (slots.jobs_done, slots.free) == (1, 1)


def test_the_next_job_begins_while_the_last_is_settled_and_then_no_more(slots):
    # Given a job that is being settled
    first, second = Work(), Work()
    slots.run_in_slot(first)
    first.answered.set()
    assert slots.wait(10)

    # When the next is begun, and has its answer too
    slots.run_in_slot(second)
    assert second.begun.wait(10)
    second.answered.set()
    wait_until(lambda: slots.free == 1, "its slot is free")

    # Then none is begun until one is settled: whatever holds the ends up must not pile them up
    assert not slots.wait(0)
    third = Work()
    beginning = threading.Thread(target=slots.run_in_slot, args=(third,))
    beginning.start()
    beginning.join(0.05)
    assert (beginning.is_alive(), slots.active_groups) == (True, 2)
    first.settled.set()
    assert third.begun.wait(10)
    for event in (second.settled, third.answered, third.settled):
        event.set()
    beginning.join(10)


def test_a_bug_in_a_slot_is_logged_and_frees_it(slots: SlotPool, caplog: pytest.LogCaptureFixture) -> None:
    def work(_leave: Callable[[], None]) -> None:
        raise RuntimeError("a bug wanted by the test")

    slots.run_in_slot(work, jobs=3)
    wait_until(lambda: slots.active_groups == 0, "it has ended")
    assert (slots.free, slots.jobs_done) == (1, 3)
    assert "a bug wanted by the test" in caplog.text


def test_an_idle_slot_is_lent_until_its_work_is_done_or_a_delivery_takes_it(slots: SlotPool) -> None:
    # Given work that has more to do twice
    more = iter([True, True, False])
    helper = slots.lend(lambda: next(more))
    assert helper
    helper.join(10)
    assert list(more) == []

    # When a delivery takes the slot meanwhile
    rounds, held, delivery = [0], threading.Event(), Work()

    def endless() -> bool:
        rounds[0] += 1
        held.wait(10)
        return True

    helper = slots.lend(endless)
    assert helper
    assert slots.lend(endless) is None  # it is lent already
    slots.run_in_slot(delivery)
    held.set()

    # Then the work ends with the round that it is at, and no other begins before the slot is free
    helper.join(10)
    assert (helper.is_alive(), rounds) == (False, [1])
    assert slots.lend(endless) is None
    delivery.answered.set()
    delivery.settled.set()
    wait_until(lambda: slots.free == 1, "its slot is free")
    helper = slots.lend(lambda: False)
    assert helper
    helper.join(10)


def test_leaving_twice_frees_one_slot(slots):
    done = threading.Event()

    def work(leave: Callable[[], None]) -> None:
        leave()
        leave()
        done.set()

    slots.run_in_slot(work)
    assert done.wait(10)
    slots.finish()
    busy = Work()
    slots.run_in_slot(busy)
    assert not slots.wait(0)
    busy.answered.set()
    busy.settled.set()
