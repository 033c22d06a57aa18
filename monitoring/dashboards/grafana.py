"""The panels as the JSON that Grafana is provisioned with.

`python -m monitoring.dashboards.grafana` writes the file. A test compares the file with this module.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from monitoring.dashboards.panels import ROWS, Panel, PanelRow

FILE = Path(__file__).with_name("queue-depth.json")
TITLE = "Kvasir: queue depth and flow"
# infra/deploy/compose/grafana/datasources has the same uid, because a provisioned dashboard must name its data source.
DATASOURCE = {"type": "prometheus", "uid": "kvasir-prometheus"}

_COLUMNS = 24
_HEIGHT = 8


_ALERTS = {
    "name": "Alerts",
    "datasource": DATASOURCE,
    "enable": True,
    "hide": False,
    "iconColor": "red",
    "expr": 'ALERTS{alertstate="firing", alertname=~"Kvasir.+"}',
    "titleFormat": "{{alertname}}",
    "textFormat": "{{model}} {{stage}} {{instance}}",
}
_MODEL = {
    "name": "model",
    "label": "Model",
    "type": "query",
    "datasource": DATASOURCE,
    "query": "label_values(kvasir:queue_ready, model)",
    "refresh": 2,  # the list of models is read again whenever the time range changes
    "multi": True,
    "includeAll": True,
    "allValue": ".*",
    "current": {"text": "All", "value": "$__all"},
}


def dashboard() -> dict[str, Any]:
    """Return the dashboard."""
    return {
        "uid": "kvasir-queue-depth",
        "title": TITLE,
        "description": "A job's path, row by row. docs/how-to/runbook.md says how to read it and what to do.",
        "tags": ["kvasir"],
        "timezone": "browser",
        "schemaVersion": 39,
        "version": 2,
        "editable": False,
        "graphTooltip": 1,  # one crosshair across all panels
        "refresh": "10s",
        "time": {"from": "now-1h", "to": "now"},
        "annotations": {"list": [_ALERTS]},
        "templating": {"list": [_MODEL]},
        "panels": list(_panels()),
    }


def text() -> str:
    """Return the file's content."""
    return json.dumps(dashboard(), indent=2, ensure_ascii=False) + "\n"


def _panels() -> Iterator[dict[str, Any]]:
    number, top = 1, 0
    for row in ROWS:
        yield {"id": number, "type": "row", "title": row.title, "collapsed": False, "gridPos": _place(0, top, 24, 1)}
        top += 1
        for panel, place in _panels_of_row(row, top):
            number += 1
            yield _panel(number, panel, place)
        number += 1
        top += _HEIGHT


def _panels_of_row(row: PanelRow, top: int) -> Iterator[tuple[Panel, dict[str, int]]]:
    """Yield a row's panels side by side. The last one gets the columns that don't divide evenly."""
    width = _COLUMNS // len(row.panels)
    for index, panel in enumerate(row.panels):
        last = index == len(row.panels) - 1
        yield panel, _place(index * width, top, _COLUMNS - index * width if last else width, _HEIGHT)


def _place(x: int, y: int, w: int, h: int) -> dict[str, int]:
    return {"h": h, "w": w, "x": x, "y": y}


def _panel(number: int, panel: Panel, place: dict[str, int]) -> dict[str, Any]:
    return {
        "id": number,
        "type": panel.kind,
        "title": panel.title,
        "description": panel.description,
        "datasource": DATASOURCE,
        "gridPos": place,
        "fieldConfig": {"defaults": {"unit": panel.unit, "min": 0}, "overrides": []},
        "options": {"legend": {"showLegend": True, "displayMode": "list", "placement": "bottom"}, "tooltip": _TOOLTIP}
        if panel.kind == "timeseries"
        else {"reduceOptions": {"calcs": ["lastNotNull"], "values": False}, "colorMode": "value"},
        "targets": [
            {"refId": letter, "datasource": DATASOURCE, "expr": query.expr, "legendFormat": query.legend}
            for letter, query in zip("ABCDEF", panel.queries, strict=False)
        ],
    }


_TOOLTIP = {"mode": "multi", "sort": "desc"}


if __name__ == "__main__":
    FILE.write_text(text(), "utf-8")
