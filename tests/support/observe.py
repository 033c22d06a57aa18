"""What every panel shows, idle and loaded, and how six situations look: `make observe`.

python -m tests.support.observe              each panel: its expression, and its values idle and under load
python -m tests.support.observe situations   the six situations of docs/runbook.md, as its table
"""

from __future__ import annotations

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
from tests.support.observation import Seen, Window, World, expression
from tests.support.situations import DECODE_SLOW, DECODE_STEADY, FAST, MAKERS, see

MODELS = ("m1", "m2")
# Whose figures no worker of a world makes: there is no GPU. (tests/unit/monitoring/test_metrics.py has the figures
# themselves.)
UNSEEN = tuple(panel for panel in PANELS if "kvasir_gpu" in str(panel.queries))
_IDLE_S = 8.0
_PEOPLE = 30  # who talk through the gateway at once
_GONE_S = 2.0  # a series without a value for this long has ended

# Of the six situations' table: those that tell them apart.
TELLING = (
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
class PanelSeen:
    """A panel's series: the last value of the idle window, and of the loaded one the value farthest from that.

    A series that ended before the loaded window did is not in `loaded`.
    """

    panel: Panel
    idle: Mapping[str, float]
    loaded: Mapping[str, float]

    @property
    def moved(self) -> list[str]:
        """The series that were others under load than idle; one that is new and zero was not."""
        names = sorted({*self.idle, *self.loaded})
        return [name for name in names if abs(self.loaded.get(name, 0.0) - self.idle.get(name, 0.0)) > 1e-9]


def watch_panels(world: World, folder: Path) -> list[PanelSeen]:
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
        with world.paused(thief):
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
    return seen_in(world, idle, Window(start, time.time()))


def _talk(url: str) -> None:
    """A conversation of some turns through the gateway, streamed, with a real client."""
    messages: list[Any] = [{"role": "user", "content": "Explain recursion, please. " * 200}]
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
        for _turn in range(4):
            stream = client.chat.completions.create(model="m1", messages=messages, stream=True, max_tokens=40)
            text = "".join(event.choices[0].delta.content or "" for event in stream if event.choices)
            messages += [{"role": "assistant", "content": text}, {"role": "user", "content": "And then?"}]


def seen_in(world: World, idle: Window, loaded: Window) -> list[PanelSeen]:
    """What each panel showed in the two windows."""
    return [_seen(world, panel, idle, loaded) for panel in PANELS if panel not in UNSEEN]


def _seen(world: World, panel: Panel, idle: Window, loaded: Window) -> PanelSeen:
    before = {name: series[-1][1] for name, series in world.shown(panel.queries, idle).items()}
    after = {
        name: max((value for _at, value in series), key=lambda value: abs(value - before.get(name, 0.0)))
        for name, series in world.shown(panel.queries, loaded).items()
        if series[-1][0] > loaded.end - _GONE_S or name not in before
    }
    return PanelSeen(panel, before, after)


def print_panels(seen: Sequence[PanelSeen]) -> None:
    """For people."""
    for one in seen:
        click.echo(f"\n{one.panel.title}  [{one.panel.unit}]{'' if one.moved else '   DID NOT MOVE'}")
        for query in one.panel.queries:
            click.echo(f"  {expression(query)}")
        for name in one.moved or sorted(one.idle):
            idle, loaded = (_figure(window.get(name)) for window in (one.idle, one.loaded))
            click.echo(f"    {name:40} idle {idle:>12}   loaded {loaded:>12}")


def situations_table(seen: Mapping[Situation, Seen]) -> str:
    """Markdown: a row for each telling panel, a column for each situation; series of 0 are left out beside others."""
    lines = [f"| | {' | '.join(seen)} |", f"|---|{'---|' * len(seen)}"]
    for title in TELLING:
        cells = [_cell(panels[title]) for panels in seen.values()]
        lines.append(f"| {title} | {' | '.join(cells)} |")
    lines.append(f"| **the script's word** | {' | '.join(diagnose(panels) for panels in seen.values())} |")
    return "\n".join(lines)


def _cell(series: Mapping[str, float]) -> str:
    """Without the model's name, which is each situation's own."""
    shown = {name.partition(" ")[2]: value for name, value in series.items() if value}
    nothing = "0" if series else "–"
    return "<br>".join(f"{name} {_figure(value)}".strip() for name, value in shown.items()) or nothing


def _figure(value: float | None) -> str:
    return "–" if value is None else f"{value:,.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def main(arguments: Sequence[str]) -> int:
    """Print one or the other; 1 if a panel did not move, or a situation was called by another name."""
    with tempfile.TemporaryDirectory(prefix="kvasir-observe-") as folder:
        if list(arguments) == ["situations"]:
            names = [f"m{number}" for number in range(1, len(MAKERS) + 1)]
            with World(Path(folder) / "world", names) as world:
                seen = {what: see(world, what, model) for what, model in zip(MAKERS, names, strict=True)}
            click.echo(situations_table(seen))
            return int(any(diagnose(panels) != what for what, panels in seen.items()))
        with World(Path(folder) / "world", MODELS) as world:
            panels = watch_panels(world, Path(folder) / "gateway")
    print_panels(panels)
    return int(not all(one.moved for one in panels))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
