"""The rules as they are shipped: valid, and each alert fires when its wait is over, and clears. No service runs."""

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.support import programs
from tests.support.monitors import CONFIG, RULES

pytestmark = [pytest.mark.system, pytest.mark.gate]

QUEUE = 'job="rabbitmq-queues", queue="decode.m.bulk", model="m", stage="decode", lane="bulk"'
OF_M = {"model": "m", "stage": "decode"}
WAITING = {f"rabbitmq_detailed_queue_messages_ready{{{QUEUE}}}": "5x60"}

# Series a minute apart; the last minute at which the alert must be silent, the first at which it must fire, and one
# after the fault has ended, at which it must be silent again; labels.
CASES: dict[str, tuple[dict[str, str], int, int, int, dict[str, str]]] = {
    "KvasirQueueNotDraining": (
        WAITING | {
            'kvasir_worker_info{model="m", stage="decode"}': "1x60",
            'kvasir_queue_wait_seconds_count{model="m", stage="decode", lane="bulk"}': "7x20 8+1x40",
        },
        5, 8, 30, OF_M | {"severity": "warning"},
    ),
    "KvasirModelUnserved": (
        WAITING | {f"rabbitmq_detailed_queue_consumers{{{QUEUE}}}": "0x20 2x40"},
        1, 3, 30, OF_M | {"severity": "critical"},
    ),
    "KvasirDeadLetters": (
        {'rabbitmq_detailed_queue_messages_ready{job="rabbitmq-queues", queue="dead-letters"}': "2x20 0x40"},
        0, 2, 30, {"severity": "warning"},
    ),
    "KvasirStorePressure": (
        {"redis_memory_used_bytes": "90x20 50x40", "redis_memory_max_bytes": "100x60"},
        4, 6, 30, {"severity": "warning"},
    ),
    "KvasirWorkerGone": (
        {'up{job="kvasir-workers", instance="spark1:9100"}': "0x20 1x40"},
        1, 3, 30, {"job": "kvasir-workers", "instance": "spark1:9100", "severity": "critical"},
    ),
    "KvasirWorkerMissing": (
        {'kvasir_worker_info{model="m", stage="decode", host="mac2", instance="mac2:9101"}': "1x5 stale _x9 1x40"},
        6, 8, 20, OF_M | {"host": "mac2", "severity": "warning"},
    ),
    "KvasirWorkerPaused": (
        {
            'kvasir_paused{model="m", stage="decode", instance="mac2:9101"}': "1x20 0x40",
            'kvasir_worker_info{model="m", stage="decode", host="mac2", instance="mac2:9101"}': "1x60",
        },
        0, 2, 30, OF_M | {"host": "mac2", "instance": "mac2:9101", "severity": "warning"},
    ),
    "KvasirServiceGone": (
        {'up{job="redis", instance="redis:9121"}': "0x20 1x40"},
        0, 2, 30, {"job": "redis", "instance": "redis:9121", "severity": "critical"},
    ),
    "KvasirKVTransferNotReusing": (
        {
            'kvasir_kv_transfers_total{model="m", outcome="none"}': "0+1x20 20x40",
            'kvasir_kv_transfers_total{model="m", outcome="verified"}': "0+1x60",
        },
        9, 14, 40, {"model": "m", "severity": "warning"},
    ),
    "KvasirDecodeSlower": (  # 60 tokens a minute: for a day at 0.02 s each, then at 0.05 s
        {
            'kvasir_tpot_seconds_sum{model="m"}': "0+1.2x1440 1731+3x60 1912.2+1.2x120",
            'kvasir_tpot_seconds_count{model="m"}': "0+60x1622",
        },
        1450, 1475, 1560, {"model": "m", "severity": "warning"},
    ),
}  # fmt: skip


def _promtool(*arguments: str) -> None:
    tool = Path(programs.require("prometheus")).with_name("promtool")
    done = subprocess.run([str(tool), *arguments], stdin=subprocess.DEVNULL, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_rules_are_valid() -> None:
    _promtool("check", "rules", *map(str, RULES.glob("*.yml")))


def test_the_scrape_configuration_is_valid(tmp_path: Path) -> None:
    config = CONFIG.read_text().replace("/etc/prometheus/rules", str(RULES))
    (tmp_path / "prometheus.yml").write_text(config)
    _promtool("check", "config", str(tmp_path / "prometheus.yml"))


def test_every_alert_has_a_case() -> None:
    rules = yaml.safe_load((RULES / "alerts.yml").read_text())["groups"][0]["rules"]
    assert set(CASES) == {rule["alert"] for rule in rules}


@pytest.mark.parametrize("alert", CASES)
def test_an_alert_fires_when_its_wait_is_over_and_clears_with_its_fault(alert: str, tmp_path: Path) -> None:
    series, silent, fires, cleared, labels = CASES[alert]
    test = {
        "interval": "1m",
        "input_series": [{"series": name, "values": values} for name, values in series.items()],
        "alert_rule_test": [
            {"eval_time": f"{silent}m", "alertname": alert, "exp_alerts": []},
            {"eval_time": f"{fires}m", "alertname": alert, "exp_alerts": [{"exp_labels": labels}]},
            {"eval_time": f"{cleared}m", "alertname": alert, "exp_alerts": []},
        ],
    }
    suite = {"rule_files": _without_words(tmp_path), "evaluation_interval": "1m", "tests": [test]}
    (tmp_path / "suite.yml").write_text(yaml.safe_dump(suite))
    _promtool("test", "rules", str(tmp_path / "suite.yml"))


def _without_words(folder: Path) -> list[str]:
    """The rules without annotations, which hold values and would have to be repeated here word by word."""
    for path in RULES.glob("*.yml"):
        rules: dict[str, Any] = yaml.safe_load(path.read_text())
        for rule in rules["groups"][0]["rules"]:
            rule.pop("annotations", None)
        (folder / path.name).write_text(yaml.safe_dump(rules))
    return [path.name for path in RULES.glob("*.yml")]
