"""The picture of the dashboard in README.md: the panels of monitoring/dashboards, over a real Prometheus.

    python -m docs.draw_dashboard

No Grafana is involved: titles, places, expressions, legends and units are read from the dashboard's own JSON, the
series from a Prometheus that watches a private cluster, and Matplotlib (`pip install matplotlib`; no dependency of the
project) draws them; series that are zero all the time are left out. The workers' engines are simulated, so the figures
say nothing about speed.
"""

import json
import re
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from docs.pictures import FOLDER, ROOT, note
from monitoring.dashboards.panels import Query
from tests.support.observation import ObservedCluster, TimeWindow

DASHBOARD = ROOT / "monitoring/dashboards/queue-depth.json"
PICTURE = FOLDER / "dashboard.png"
ROWS = ("Waiting", "Throughput", "Prefill", "Transfer", "Decode", "Stealing")
CODE, TEXT = "qwen3-coder", "gpt-oss"
# As the team's machines are thought to be, in ratio: two prefill workers are quick, two decode workers are not.
PREFILL = "sim:scale=1,prefill=4000,decode=60,answer=60"
DECODES = {CODE: "sim:scale=1,prefill=2000,decode=60,answer=60", TEXT: "sim:scale=1,prefill=2000,decode=30,answer=60"}
STEALING = ("--slots", "4", "--steal", "all", "--memory", "400")
BACKGROUND, PANEL, WORDS, LINES = "#111217", "#181b1f", "#d0d1d5", "#2c3035"
COLOURS = ("#73bf69", "#f2cc0c", "#5794f2", "#ff9830", "#f2495c", "#b877d9", "#8ab8ff", "#c8f2c2")
UNITS = {"s": "s", "percentunit": "%", "Bps": "MB/s", "watt": "W", "watth": "Wh"}

Series = Mapping[str, Sequence[tuple[float, float]]]


def main() -> None:
    """Load the cluster for a minute, then draw."""
    with tempfile.TemporaryDirectory() as name, ObservedCluster(Path(name) / "world", [CODE, TEXT]) as world:
        pairs = [world.launch_pair(model, PREFILL, decode, *STEALING) for model, decode in DECODES.items()]
        for worker in (worker for pair in pairs for worker in pair):
            worker.wait_until_registered()
        start = time.time()
        world.submit(CODE, 240, max_tokens=60)
        world.submit(TEXT, 160, max_tokens=60)
        world.window(66)
        window = TimeWindow(start, time.time())
        panels = json.loads(DASHBOARD.read_text("utf-8"))["panels"]
        draw(chosen(panels), window, lambda queries: world.series_of(queries, window))


def chosen(panels: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The panels of the rows in ROWS, and those rows' own titles."""
    found, inside = [], False
    for panel in panels:
        inside = panel["title"] in ROWS if panel["type"] == "row" else inside
        found += [panel] if inside else []
    return found


def draw(panels: Sequence[dict[str, Any]], window: TimeWindow, shown: Any) -> None:
    """One picture, each panel where the dashboard puts it."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    bottom = max(panel["gridPos"]["y"] + panel["gridPos"]["h"] for panel in panels)
    figure = pyplot.figure(figsize=(15, bottom * 0.27), facecolor=BACKGROUND, dpi=100)
    for panel in panels:
        place = panel["gridPos"]
        box = (place["x"] / 24, 1 - (place["y"] + place["h"]) / bottom, place["w"] / 24, place["h"] / bottom)
        if panel["type"] == "row":
            figure.text(
                0.006, box[1] + box[3] / 2, f"⌄ {panel['title']}", color=WORDS, fontsize=10, va="center", weight="bold"
            )
            continue
        queries = [Query(target["expr"], target["legendFormat"]) for target in panel["targets"]]
        axes = figure.add_axes((box[0] + 0.032, box[1] + 0.3 * box[3], box[2] - 0.042, 0.53 * box[3]), facecolor=PANEL)
        _chart(axes, panel, shown(queries), window)
    figure.savefig(PICTURE, facecolor=BACKGROUND)
    note(PICTURE, "python -m docs.draw_dashboard", "simulated")


def _chart(axes: Any, panel: dict[str, Any], series: Series, window: TimeWindow) -> None:
    unit = panel["fieldConfig"]["defaults"].get("unit", "").removeprefix("suffix:").strip()
    scale = {"percentunit": 100, "Bps": 1e-6}.get(unit, 1)
    moving = {name: points for name, points in sorted(series.items()) if any(value for _at, value in points)}
    for colour, (name, points) in zip(COLOURS * 3, moving.items(), strict=False):
        times, values = zip(*((at - window.start, scale * value) for at, value in points), strict=True)
        axes.plot(times, values, color=colour, linewidth=1.2, label=re.sub(r"\s+", " ", name).strip())
        axes.fill_between(times, values, color=colour, alpha=0.08)
    axes.set_title(f"{panel['title']}  [{UNITS.get(unit, unit)}]", color=WORDS, fontsize=8, loc="left", weight="bold")
    axes.set_xlim(0, window.end - window.start)
    axes.set_ylim(0, 100 if unit == "percentunit" else None)
    axes.tick_params(colors=WORDS, labelsize=7, length=0)
    axes.grid(color=LINES, linewidth=0.6)
    for spine in axes.spines.values():
        spine.set_color(LINES)
    axes.set_ylim(bottom=0)
    if moving:
        axes.legend(
            loc="upper left",
            bbox_to_anchor=(-0.05, -0.12),
            ncols=2 if panel["gridPos"]["w"] < 8 else 3,
            fontsize=6.5,
            frameon=False,
            labelcolor=WORDS,
            handlelength=1,
            columnspacing=1,
            borderaxespad=0,
        )


if __name__ == "__main__":
    main()
