"""The dashboard is what the panels say, a valid Grafana document, and every figure in it is one that somebody makes."""

import copy
import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml
from grafana_foundation_sdk.cog.encoder import JSONEncoder
from grafana_foundation_sdk.cog.plugins import register_default_plugins
from grafana_foundation_sdk.models.dashboard import Dashboard

from gateway.figures import GatewayMetrics
from messages.workers import WorkerInfo
from monitoring.dashboards.grafana import DATASOURCE, FILE, dashboard, text
from monitoring.dashboards.panels import PANELS, ROWS, Panel
from monitoring.energy import PowerMeter
from monitoring.metrics import Metrics
from monitoring.worker_metrics import RegistrationCollector

ROOT = Path(__file__).resolve().parents[3]
RULES = ROOT / "monitoring/prometheus"
RECORDED = [r for group in yaml.safe_load((RULES / "recording.yml").read_text())["groups"] for r in group["rules"]]
ALERTS = [r for group in yaml.safe_load((RULES / "alerts.yml").read_text())["groups"] for r in group["rules"]]
RUNBOOK = (ROOT / "docs/how-to/runbook.md").read_text()
EXPRESSIONS = [
    *(query.expr for panel in PANELS for query in panel.queries),
    *(rule["expr"] for rule in (*RECORDED, *ALERTS)),
]

# Fields of an annotation that belong to the data source's plugin, and so not to Grafana's schema of a dashboard.
OF_THE_PLUGIN = {".annotations.list[0].titleFormat", ".annotations.list[0].textFormat"}

every_panel = pytest.mark.parametrize("panel", PANELS, ids=lambda panel: panel.title)
every_alert = pytest.mark.parametrize("alert", ALERTS, ids=lambda alert: alert["alert"])

register_default_plugins()


def lost(before: Any, after: Any, path: str = "") -> Iterator[str]:
    """What did not survive the way through Grafana's types: their schema knows no such field, or no such value."""
    if isinstance(before, dict) and isinstance(after, dict):
        for name, value in before.items():
            yield from lost(value, after[name], f"{path}.{name}") if name in after else [f"{path}.{name}"]
    elif isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
        for number, value in enumerate(before):
            yield from lost(value, after[number], f"{path}[{number}]")
    elif before != after:
        yield path


def through_grafana(document: dict[str, Any]) -> set[str]:
    """Fields that the types which Grafana generates from its own schema (11.6) don't know."""
    made = json.loads(JSONEncoder().encode(Dashboard.from_json(copy.deepcopy(document))))
    return set(lost(document, made))


def made_figures() -> set[str]:
    """Names of the samples that pages of workers and gateways have."""
    metrics = Metrics()
    registration = WorkerInfo("w", "decode", "m", "simulated", "cpu", "", "", 1, 1, "h", 1, 0.0)
    metrics.registry.register(RegistrationCollector(lambda: [registration]))
    PowerMeter(metrics.registry, "h", lambda: True, 1.0)
    for role in ("prefill", "decode"):
        metrics.prepare("m", "prefill" if role == "prefill" else "decode")
    metrics.prepare_steals(["m"])
    figures = GatewayMetrics(["m"])
    figures.requests.labels("200")
    figures.tokens.labels("m", "prompt")
    registries = (metrics.registry, figures.registry)
    samples = {sample.name for one in registries for family in one.collect() for sample in family.samples}
    gpu = {f"kvasir_gpu_{figure}" for figure in ("busy_ratio", "memory_used_bytes", "memory_total_bytes")}
    return samples | gpu | {"kvasir_taken_submitted_timestamp_seconds"}  # nothing was taken yet, and there is no GPU


def test_the_file_is_what_the_panels_say() -> None:
    assert FILE.read_text("utf-8") == text(), "run: python -m monitoring.dashboards.grafana"


def test_grafana_s_own_schema_knows_every_field() -> None:
    assert through_grafana(dashboard()) == OF_THE_PLUGIN


@pytest.mark.parametrize("field", ["fieldconfig", "refID"])
def test_that_check_finds_a_misspelled_field(field: str) -> None:
    document = dashboard()
    panel = document["panels"][1]
    (panel if field == "fieldconfig" else panel["targets"][0])[field] = {}
    assert len(through_grafana(document)) == len(OF_THE_PLUGIN) + 1


def test_panels_have_ids_and_places_of_their_own() -> None:
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels) == len(PANELS) + len(ROWS)
    cells = [
        (x, y)
        for place in (panel["gridPos"] for panel in panels)
        for x in range(place["x"], place["x"] + place["w"])
        for y in range(place["y"], place["y"] + place["h"])
    ]
    assert len(cells) == len(set(cells))
    assert max(x for x, _y in cells) == 23


@every_panel
def test_a_panel_has_a_title_a_unit_and_says_what_to_make_of_it(panel: Panel) -> None:
    assert panel.unit
    assert panel.title[0].isupper()
    assert panel.description.endswith(".")
    assert all(query.legend for query in panel.queries)


def test_titles_are_told_apart_and_the_source_is_the_one_provisioned() -> None:
    assert len({panel.title for panel in PANELS}) == len(PANELS)
    folder = ROOT / "infra/deploy/compose/grafana/datasources"
    assert yaml.safe_load((folder / "prometheus.yml").read_text())["datasources"][0]["uid"] == DATASOURCE["uid"]


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_an_expression_uses_figures_that_somebody_makes(expression: str) -> None:
    recorded = {rule["record"] for rule in RECORDED}
    names = set(re.findall(r"kvasir[a-z_:0-9]+", re.sub(r'"[^"]*"', "", expression)))
    assert names <= recorded | made_figures()


def test_every_figure_of_a_worker_is_in_a_panel_or_a_rule() -> None:
    used = " ".join(EXPRESSIONS)
    families = {re.sub(r"_(bucket|sum|count)$", "", name) for name in made_figures() if not name.endswith("_created")}
    assert {name for name in families if name not in used} <= {"kvasir_decode_seconds", "kvasir_transfers_kv"} | {
        "kvasir_tokens_per_second"  # the worker's own moving average, for people who look at the page itself
    }


@every_alert
def test_an_alert_has_a_section_in_the_runbook_and_says_what_happened(alert: dict[str, Any]) -> None:
    assert f"### {alert['alert']}\n" in RUNBOOK
    assert alert["annotations"]["runbook"] == f"docs/how-to/runbook.md#{alert['alert'].lower()}"
    assert alert["annotations"]["summary"].endswith(".")
    assert alert["labels"]["severity"] in ("warning", "critical")
    assert alert["for"]


def test_the_runbook_has_no_alert_that_does_not_exist() -> None:
    assert set(re.findall(r"^### (Kvasir\w+)$", RUNBOOK, re.MULTILINE)) == {alert["alert"] for alert in ALERTS}


def test_series_of_batches_and_processes_are_left_out() -> None:
    config = yaml.safe_load((ROOT / "infra/deploy/compose/prometheus.yml").read_text())
    queues = next(job for job in config["scrape_configs"] if job["job_name"] == "rabbitmq-queues")
    keep = re.compile(queues["metric_relabel_configs"][0]["regex"])
    assert queues["metric_relabel_configs"][0]["action"] == "keep"
    for name in ("prefill.m:1b.bulk", "suspects.decode.m", "retry.1s", "dead-letters", "results.parked", ""):
        assert keep.fullmatch(name)
    for name in ("reply.hw4-2026", "stream.ask-1", "control.host.1", "amq.gen-x"):
        assert not keep.fullmatch(name)
