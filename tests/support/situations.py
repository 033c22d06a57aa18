"""Six situations, made on purpose, and what the dashboard shows of each."""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from tests.support.diagnosis import Situation
from tests.support.observation import ObservedCluster, PanelMeans

FAST = "sim:scale=1,prefill=20000,decode=1000,answer=30"
PREFILL_SLOW = "sim:scale=1,prefill=400,decode=1000,answer=30"
DECODE_STEADY = "sim:scale=1,prefill=20000,decode=150,answer=30"
DECODE_SLOW = "sim:scale=1,prefill=20000,decode=15,answer=30"
# The first block of a prompt lies in the store for most of a second before its job comes to decode, and is looked for
# a hundred times a second: whoever deletes it need not hurry.
PREFILL_WHILE_LOSING = "sim:scale=1,prefill=1000,decode=1000,answer=30"

# Before a look the rates' windows must hold nothing but the situation.
_SETTLE_S = 8.0
_LOOK_S = 4.0


def decode_bound(world: ObservedCluster, model: str) -> PanelMeans:
    """Prefill is quick, decode is not."""
    world.pair(model, FAST, DECODE_SLOW)
    world.submit(model, 60)
    return _look(world)


def prefill_bound(world: ObservedCluster, model: str) -> PanelMeans:
    """The other way round."""
    world.pair(model, PREFILL_SLOW, FAST)
    world.submit(model, 60)
    return _look(world)


def model_unserved(world: ObservedCluster, model: str) -> PanelMeans:
    """Prefill works, and nobody decodes."""
    world.worker("prefill", model, FAST)
    world.submit(model, 20)
    return _look(world)


def not_reusing(world: ObservedCluster, model: str) -> PanelMeans:
    """Blocks vanish between the two stages."""
    world.pair(model, PREFILL_WHILE_LOSING, FAST)
    with losing_blocks(world), _feed(world, model, every_s=1.5):  # each is prefilled twice, and takes half a second
        return _look(world)


def store_full(world: ObservedCluster, model: str) -> PanelMeans:
    """Something else has filled Redis."""
    with world.fill_store(0.93):
        world.pair(model, FAST, FAST)
        world.submit(model, 30)
        return _look(world, settle_s=3.0)  # prefill's patience ends after ten seconds: then it goes on without KV


def healthy(world: ObservedCluster, model: str) -> PanelMeans:
    """Jobs come and go."""
    world.pair(model, FAST, FAST)
    with _feed(world, model):
        return _look(world)


MAKERS: dict[Situation, Callable[[ObservedCluster, str], PanelMeans]] = {
    "decode-bound": decode_bound,
    "prefill-bound": prefill_bound,
    "model unserved": model_unserved,
    "KV transfer not reusing": not_reusing,
    "store full": store_full,
    "healthy": healthy,
}


def see(world: ObservedCluster, situation: Situation, model: str) -> PanelMeans:
    """Make the situation with workers of its own, look, and clear it away."""
    try:
        return MAKERS[situation](world, model)
    finally:
        world.clear()


def _look(world: ObservedCluster, settle_s: float = _SETTLE_S) -> PanelMeans:
    world.window(settle_s)
    return world.look(_LOOK_S)


@contextmanager
def losing_blocks(world: ObservedCluster) -> Iterator[None]:
    """Delete blocks from the store as they come."""
    with _again_and_again(world.lose_blocks, every_s=0.01):
        yield


@contextmanager
def _feed(world: ObservedCluster, model: str, every_s: float = 0.5) -> Iterator[None]:
    """A job every now and then, so that some are always under way and none has to wait long."""
    with _again_and_again(lambda: world.submit(model, 1), every_s):
        world.until(f'sum(kvasir_jobs_total{{model="{model}", stage="decode"}})', at_least=1)
        yield


@contextmanager
def _again_and_again(do: Callable[[], object], every_s: float) -> Iterator[None]:
    stop = threading.Event()

    def run() -> None:
        while not stop.wait(every_s):
            do()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
