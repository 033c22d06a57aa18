"""Whether anybody would use a prefill worker's KV caches, by what decode workers register."""

from dataclasses import replace

import pytest

from kvstore.cluster_state import BestEffortClusterState
from kvstore.memory import MemoryClusterState
from messages.workers import WorkerInfo
from prefill_worker.kv_transfer import REFUSALS_EVERY_S, Refusals

OURS, WHY = "5e7c40", "mlx and llamacpp compute different KV caches"
DECODER = WorkerInfo("d1", "decode", "m", "llamacpp", "cpu", "f", "t", 512, 1, "h", 1, 0.0)
REFUSING = replace(DECODER, worker_id="d2", refuses=("another", OURS), refuses_because=("of old", WHY))


class Watch:
    """A clock that stands until it is told to go on."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


class Counting(BestEffortClusterState):
    """How often registrations are read."""

    reads = 0

    def registrations(self) -> list[WorkerInfo]:
        self.reads += 1
        return super().registrations()


def why(*registrations: WorkerInfo, sketch: str = OURS) -> str:
    cluster_state = MemoryClusterState()
    for registration in registrations:
        cluster_state.register(registration, 60)
    return Refusals(cluster_state, "m", sketch).reason()


@pytest.mark.parametrize(
    ("registrations", "expected"),
    [
        ([], ""),
        ([REFUSING], WHY),
        ([REFUSING, DECODER], ""),
        ([REFUSING, replace(DECODER, model="another")], WHY),
        ([replace(REFUSING, model="another")], ""),
        ([REFUSING, replace(DECODER, role="prefill")], WHY),
        ([replace(DECODER, refuses=("another",), refuses_because=("of old",))], ""),
    ],
    ids=["nobody", "the only one", "one of two", "of another model", "nobody of this", "a prefill worker", "others"],
)
def test_only_what_every_decoder_of_the_model_refuses_is_of_no_use(
    registrations: list[WorkerInfo], expected: str
) -> None:
    assert why(*registrations) == expected


def test_who_makes_no_sketch_is_not_refused_for_it() -> None:
    assert why(replace(REFUSING, refuses=("",), refuses_because=("of old",)), sketch="") == ""


def test_registrations_are_read_every_few_seconds_and_not_for_every_job() -> None:
    # Given a decoder that takes all
    inner, clock = MemoryClusterState(), Watch()
    cluster_state = Counting(inner)
    inner.register(DECODER, 60)
    refusals = Refusals(cluster_state, "m", OURS, clock)
    assert refusals.reason() == ""

    # When it begins to refuse
    inner.register(replace(REFUSING, worker_id=DECODER.worker_id), 60)
    clock.now += REFUSALS_EVERY_S - 0.1
    assert [refusals.reason() for _ in range(1000)] == [""] * 1000
    assert cluster_state.reads == 1

    # Then that is known after a few seconds
    clock.now += 0.1
    assert refusals.reason() == WHY
    assert cluster_state.reads == 2
