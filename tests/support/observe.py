"""What every panel shows, idle and loaded, and how six situations look: `make observe`.

python -m tests.support.observe              each panel: its expression, and its values idle and under load
python -m tests.support.observe situations   the six situations of docs/how-to/runbook.md, as a table
"""

import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click
import openai

from monitoring.dashboards.panels import PANELS, Panel
from tests.support.diagnosis import Situation, diagnose
from tests.support.observation import ObservedCluster, PanelMeans, TimeWindow, expression
from tests.support.situations import DECODE_SLOW, DECODE_STEADY, FAST, MAKERS, see

MODELS = ("m1", "m2")
# Whose figures no worker of a world makes: there is no GPU. (tests/unit/monitoring/test_metrics.py has the figures
# themselves.)
UNFED_PANELS = tuple(panel for panel in PANELS if "kvasir_gpu" in str(panel.queries))
_IDLE_S = 8.0
_PEOPLE = 30  # who talk through the gateway at once
_GONE_S = 2.0  # a series without a value for this long has ended

# Of the six situations' table: those that tell them apart.
TELLTALE_PANELS = (
    "Jobs waiting, by model, stage and lane",
    "Age of the oldest job waiting, at most",
    "Workers, by model and stage",
    "Prefill workers busy, share",
    "Decode slots busy, share",
    "Answers from a transferred KV cache, share",
    "Prompt tokens evaluated by decode, per answer",
    "Jobs prefilled again",
    "Store in use, share",
)


@dataclass(frozen=True, slots=True)
class PanelObservation:
    """A panel's series: the last value of the idle window, and of the loaded one the value farthest from that.

    A series that ended before the loaded window did is not in `under_load`.
    """

    panel: Panel
    idle: Mapping[str, float]
    under_load: Mapping[str, float]

    @property
    def moved_series(self) -> list[str]:
        """The series that were others under load than idle; one that is new and zero was not."""
        names = sorted({*self.idle, *self.under_load})
        return [name for name in names if abs(self.under_load.get(name, 0.0) - self.idle.get(name, 0.0)) > 1e-9]


def watch_panels(world: ObservedCluster, folder: Path) -> list[PanelObservation]:
    """Two models' workers idle, then under load and with faults injected, of which every panel has to tell something.

    m1's decode worker may steal from m2, whose own is slow. While a figure is waited for nobody can work it away: the
    thief is paused, or it is a count that only rises. A wait in vain fails the panels that it was for, and no others.
    The thief's jobs take a fifth of a second: at milliseconds each, its slots may be free whenever they are looked at.
    """
    workers = [
        *world.launch_pair("m1", FAST, DECODE_STEADY, "--steal", "m2"),
        *world.launch_pair("m2", FAST, DECODE_SLOW),
    ]
    world.wait_for(*workers)
    url = world.gateway(folder)
    thief, slow = workers[1], workers[3]
    idle = world.window(_IDLE_S)
    start = time.time()
    with ThreadPoolExecutor(_PEOPLE) as people:  # enough of them that Prometheus, which looks each second, sees some
        for talk in [people.submit(_talk, url) for _ in range(_PEOPLE)]:
            talk.result()
    world.submit("m2", 60)
    world.submit("m1", 40)
    world.submit("m1", 1, max_tokens=40_000)  # more than the context
    try:
        world.until('kvasir_steals_total{model="m2"}', at_least=1)
        world.until('rabbitmq_detailed_queue_messages_ready{queue="dead-letters"}', at_least=1)
        with world.pause(thief):
            # The slow worker dies with jobs in hand, before others whose blocks are then taken away.
            world.submit("m2", 60)
            world.until('sum(kvasir:queue_ready{model="m2", stage="decode"})', at_least=5)
            slow.kill()
            world.lose_blocks()
        world.until('sum(kvasir_redeliveries_total{model="m2", stage="decode"})', at_least=1)
        world.until("sum(kvasir_reprefills_total)", at_least=1)
        world.until("sum(kvasir:energy_wh_per_submission:1h)", at_least=1e-9)
    except AssertionError as error:
        click.echo(error, err=True)
    world.window(3)
    return observe_windows(world, idle, TimeWindow(start, time.time()))


def _talk(url: str) -> None:
    """A conversation of some turns through the gateway, streamed, with a real client."""
    messages: list[Any] = [{"role": "user", "content": "Explain recursion, please. " * 200}]
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        for _turn in range(4):
            stream = client.chat.completions.create(model="m1", messages=messages, stream=True, max_tokens=40)
            text = "".join(event.choices[0].delta.content or "" for event in stream if event.choices)
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "And then?"}]


def observe_windows(world: ObservedCluster, idle: TimeWindow, load_window: TimeWindow) -> list[PanelObservation]:
    """What each panel showed in the two windows."""
    return [_observe(world, panel, idle, load_window) for panel in PANELS if panel not in UNFED_PANELS]


def _observe(world: ObservedCluster, panel: Panel, idle: TimeWindow, load_window: TimeWindow) -> PanelObservation:
    before = {name: series[-1][1] for name, series in world.series_of(panel.queries, idle).items()}
    after = {
        name: max((value for _at, value in series), key=lambda value: abs(value - before.get(name, 0.0)))
        for name, series in world.series_of(panel.queries, load_window).items()
        if series[-1][0] > load_window.end - _GONE_S or name not in before
    }
    return PanelObservation(panel, before, after)


def print_panels(observations: Sequence[PanelObservation]) -> None:
    """For people."""
    for observation in observations:
        click.echo(
            f"\n{observation.panel.title}  [{observation.panel.unit}]"
            f"{'' if observation.moved_series else '   DID NOT MOVE'}"
        )
        for query in observation.panel.queries:
            click.echo(f"  {expression(query)}")
        for name in observation.moved_series or sorted(observation.idle):
            idle_figure, load_figure = (
                _figure(window.get(name)) for window in (observation.idle, observation.under_load)
            )
            click.echo(f"    {name:40} idle {idle_figure:>12}   loaded {load_figure:>12}")


def situations_table(panels_by_situation: Mapping[Situation, PanelMeans]) -> str:
    """Markdown: a row for each telling panel, a column for each situation; series of 0 are left out beside others."""
    lines = [f"| | {' | '.join(panels_by_situation)} |", f"|---|{'---|' * len(panels_by_situation)}"]
    for title in TELLTALE_PANELS:
        cells = [_cell(panels[title]) for panels in panels_by_situation.values()]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    lines.append(
        f"| **the script's word** | {' | '.join(diagnose(panels) for panels in panels_by_situation.values())} |"
    )
    return "\n".join(lines)


def _cell(series: Mapping[str, float]) -> str:
    """Without the model's name, which is each situation's own."""
    shown_values = {name.partition(" ")[2]: value for name, value in series.items() if value}
    placeholder = "0" if series else "–"
    return "<br>".join(f"{name} {_figure(value)}".strip() for name, value in shown_values.items()) or placeholder


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:,.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def main(arguments: Sequence[str]) -> int:
    """Print one or the other; 1 if a panel did not move, or a situation was called by another name."""
    with tempfile.TemporaryDirectory(prefix="kvasir-observe-") as folder:
        if list(arguments) == ["situations"]:
            names = [f"m{number}" for number in range(1, len(MAKERS) + 1)]
            with ObservedCluster(Path(folder) / "world", names) as world:
                panels_by_situation = {
                    situation: see(world, situation, model) for situation, model in zip(MAKERS, names, strict=True)
                }
            click.echo(situations_table(panels_by_situation))
            return int(any(diagnose(panels) != situation for situation, panels in panels_by_situation.items()))
        with ObservedCluster(Path(folder) / "world", MODELS) as world:
            panels = watch_panels(world, Path(folder) / "gateway")
    print_panels(panels)
    return int(not all(observation.moved_series for observation in panels))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
