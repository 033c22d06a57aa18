"""Work done in groups: nothing is lost, order stays, and whoever adds too much waits."""

import threading
from collections.abc import Iterator

import pytest

from infra.quick_jobs import GroupCommit
from tests.support.pipeline import Gate
from tests.support.waiting import wait_until


class Bench:
    """Notes the groups, and can be held up within the first."""

    def __init__(self, most: int = 100) -> None:
        self.groups: list[list[int]] = []
        self.gate = Gate()
        self.group = GroupCommit("bench", self.work, most)

    def work(self, items: list[int]) -> None:
        self.groups.append(items)
        if len(self.groups) == 1:
            self.gate((), None)
        if 13 in items:
            raise RuntimeError("a bug wanted by the test")


@pytest.fixture
def bench() -> Iterator[Bench]:
    bench = Bench(most=5)
    yield bench
    bench.gate.open()
    bench.group.close()


def test_what_comes_while_a_group_is_under_way_is_the_next_group(bench: Bench) -> None:
    bench.group.add(1)
    bench.gate.wait()
    for number in (2, 3, 4):
        bench.group.add(number)
    assert bench.group.snapshot() == [1, 2, 3, 4]

    bench.gate.open()
    bench.group.finish()

    assert bench.groups == [[1], [2, 3, 4]]
    assert bench.group.snapshot() == []


def test_who_adds_more_than_may_be_unfinished_waits(bench: Bench) -> None:
    bench.group.add(0)
    bench.gate.wait()
    adding = threading.Thread(target=lambda: [bench.group.add(number) for number in range(1, 8)])
    adding.start()
    wait_until(lambda: len(bench.group.snapshot()) == 5, "it is full")
    assert adding.is_alive()

    bench.gate.open()
    adding.join(10)
    bench.group.finish()

    assert [number for group in bench.groups for number in group] == list(range(8))


def test_a_bug_in_one_group_does_not_hold_up_the_next(bench: Bench) -> None:
    bench.gate.open()
    bench.group.add(13)
    bench.group.finish()

    bench.group.add(14)
    bench.group.finish()

    assert bench.groups[-1] == [14]


def test_its_thread_ends_with_it(bench: Bench) -> None:
    bench.gate.open()
    bench.group.add(1)
    bench.group.close()

    wait_until(lambda: "bench" not in [thread.name for thread in threading.enumerate()], "its thread has ended")
