"""What operators are shown is true: real services, real workers, a real Prometheus with the shipped rules.

Every panel moves between idle and load; six situations are told apart from panels alone; every alert fires when its
fault is injected, and clears when it is gone. Durations of the rules are divided by 60 (tests.support.monitors).
"""

from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from monitoring.dashboards.panels import PANELS
from tests.support.diagnosis import SITUATIONS, diagnose
from tests.support.observation import ObservedCluster
from tests.support.observe import MODELS, UNFED_PANELS, PanelObservation, watch_panels
from tests.support.situations import DECODE_SLOW, FAST, MAKERS, PREFILL_WHILE_LOSING, losing_blocks, see
from tests.support.waiting import wait_until

pytestmark = pytest.mark.system

# Each situation's model is named by a number: its name must not give it away.
OF_SITUATIONS = {situation: f"m{number}" for number, situation in enumerate(MAKERS, 3)}
STUCK, UNSERVED, LOSING, SLOWING = "m10", "m11", "m12", "m13"
STUCK_WEIGHTS = "sim:scale=1,prefill=20000,decode=5,answer=1000"  # a job takes more than a minute
FEEDS = 40


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ObservedCluster]:
    models = (*MODELS, *OF_SITUATIONS.values(), STUCK, UNSERVED, LOSING, SLOWING)
    with ObservedCluster(tmp_path_factory.mktemp("observation") / "world", models) as made:
        yield made


@pytest.fixture(scope="module")
def panels(world: ObservedCluster, tmp_path_factory: pytest.TempPathFactory) -> dict[str, PanelObservation]:
    """What each panel showed idle and under load; its workers are gone afterwards, however it went."""
    try:
        return {one.panel.title: one for one in watch_panels(world, tmp_path_factory.mktemp("gateway"))}
    finally:
        world.clear()


@pytest.mark.parametrize("title", [panel.title for panel in PANELS if panel not in UNFED_PANELS])
def test_a_panel_shows_something_else_under_load(panels: dict[str, PanelObservation], title: str) -> None:
    seen = panels[title]
    assert seen.moved_series, f"idle {seen.idle}, loaded {seen.under_load}"


@pytest.mark.parametrize("situation", MAKERS)
def test_a_situation_is_named_from_titles_and_values_alone(world: ObservedCluster, situation: str) -> None:
    what = next(known for known in SITUATIONS if known == situation)
    seen = see(world, what, OF_SITUATIONS[what])
    assert diagnose(seen) == situation, seen


def test_every_alert_fires_with_its_fault_and_clears_after_it(world: ObservedCluster) -> None:
    # Given healthy workers with a history
    stuck, losing, slowing = (
        world.launch_pair(model, prefill, FAST)
        for model, prefill in ((STUCK, FAST), (LOSING, PREFILL_WHILE_LOSING), (SLOWING, FAST))
    )
    world.wait_for(*stuck, *losing, *slowing)
    world.submit(SLOWING, FEEDS)
    world.submit(STUCK, 2)
    world.until(f'sum(kvasir_tpot_seconds_count{{model="{SLOWING}"}})', at_least=FEEDS)
    world.window(20)
    wait_until(lambda: not world.prometheus.firing(), "all is quiet", 60, poll_s=0.5)

    # When every fault is there at once
    world.forget(slowing[1], stuck[1])
    slow = world.worker("decode", SLOWING, DECODE_SLOW)
    lame = world.worker("decode", STUCK, STUCK_WEIGHTS)
    gone = world.worker("prefill", STUCK, FAST)
    with ExitStack() as faults:
        faults.enter_context(world.fill_store(0.82))
        faults.enter_context(losing_blocks(world))
        gone.kill()
        for model in (SLOWING, STUCK, UNSERVED):
            world.submit(model, FEEDS)
        world.submit(LOSING, 1, max_tokens=40_000)

        # Then each of them is told of
        _wait_for_alerts(
            world,
            {
                ("KvasirWorkerGone", ""),
                ("KvasirDeadLetters", ""),
                ("KvasirStorePressure", ""),
                ("KvasirModelUnserved", UNSERVED),
                ("KvasirQueueNotDraining", STUCK),
                ("KvasirKVTransferNotReusing", LOSING),
                ("KvasirDecodeSlower", SLOWING),
            },
            fed=(LOSING, SLOWING),
        )

    # And of none when all is fixed
    world.forget(lame, gone, slow)
    world.pair(UNSERVED, FAST, FAST)
    for model in (STUCK, SLOWING):
        world.worker("decode", model, FAST)
    world.broker.control("purge_queue", "dead-letters")
    world.submit(LOSING, FEEDS)
    wait_until(lambda: not world.prometheus.firing(), "all alerts have cleared", 240, poll_s=0.5)
    assert all(worker.alive for worker in losing)


@pytest.mark.gate
def test_a_service_that_stops_is_told_of_until_it_is_back(world: ObservedCluster) -> None:
    world.exporter.stop()
    _wait_for_alerts(world, {("KvasirServiceGone", "")})
    world.exporter.start()
    wait_until(lambda: "KvasirServiceGone" not in world.prometheus.firing(), "the alert has cleared", 60, poll_s=0.5)


def _wait_for_alerts(world: ObservedCluster, awaited: set[tuple[str, str]], fed: tuple[str, ...] = ()) -> None:
    """Return once each of these alerts has fired for its model, in whatever order, and however shortly.

    Meanwhile `fed` models get jobs, for their figures are rates.
    """
    missing = set(awaited)

    def all_fired() -> bool:
        for name in fed:
            if (world.prometheus.value(f'sum(kvasir:queue_ready{{model="{name}"}})') or 0.0) < 5:
                world.submit(name, 10)
        for alert, found in world.prometheus.firing().items():
            missing.difference_update((alert, labels.get("model", "")) for labels in found)
        return not missing

    try:
        wait_until(all_fired, "every alert has fired", 180, poll_s=0.5)
    except AssertionError as error:
        raise AssertionError(f"{error}; these have not: {sorted(missing)}") from None
