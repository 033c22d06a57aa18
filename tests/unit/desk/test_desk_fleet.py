"""A page never waits for the cluster."""

import threading

from desk.backend import FleetView
from desk.fleet import FleetWatch
from tests.support.waiting import wait_until


def test_a_cluster_that_does_not_answer_is_asked_once_and_holds_nobody_up() -> None:
    asked: list[int] = []
    answers = threading.Event()

    def ask() -> FleetView:
        asked.append(1)
        answers.wait()
        return FleetView(problem="the broker is away")

    watch = FleetWatch(ask)
    assert [watch.look() for _ in range(3)] == [None] * 3
    assert len(asked) <= 1

    answers.set()
    wait_until(lambda: watch.look() == FleetView(problem="the broker is away"), "the answer is seen")
    before = len(asked)
    wait_until(lambda: (watch.look(), len(asked) > before)[1], "whoever looks again asks again")
