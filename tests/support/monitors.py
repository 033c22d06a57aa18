"""A private Prometheus and Redis exporter, with the configuration and the rules that compose ships, made quick.

    with Prometheus({"rabbitmq": [broker.metrics_url], "redis": [exporter.url]}) as prometheus:
        prometheus.values("kvasir:queue_ready", start, end)

The rules are the shipped ones with every duration divided by `QUICKER`, and a scrape each second: ten minutes of an
operator's life are ten seconds of a test's.
"""

import json
import os
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.support import programs
from tests.support.servers import HOST, Server

ROOT = Path(__file__).resolve().parents[2]
CONFIG = ROOT / "infra/deploy/compose/prometheus.yml"
RULES = ROOT / "monitoring/prometheus"

QUICKER = 60
WINDOW = "6s"  # in place of Grafana's $__rate_interval

_UNITS = {"s": 1, "m": 60, "h": 3600, "d": 86400}
_DURATION = re.compile(r"(?<=\[)\d+[smhd](?=\])|(?<=for: )\d+[smhd]\b|(?<=offset )\d+[smhd]\b")

Series = list[tuple[float, float]]  # (time, value), one a second where there is one


def quicker(rules: str) -> str:
    """Rules with their windows, offsets and waits divided by QUICKER."""
    return _DURATION.sub(lambda match: _shorter(match[0]), rules)


def _shorter(duration: str) -> str:
    return f"{max(1, int(duration[:-1]) * _UNITS[duration[-1]] // QUICKER)}s"


class RedisExporter(Server):
    """Debian's prometheus-redis-exporter beside one Redis."""

    def __init__(self, store_url: str) -> None:
        super().__init__("redis-exporter")
        self._store_url = store_url

    @property
    def url(self) -> str:
        """Where Prometheus looks."""
        return f"http://{HOST}:{self.port}"

    def _environment(self) -> dict[str, str]:
        return dict(os.environ) | {"REDIS_ADDR": self._store_url}  # its password is in no process list

    def _command(self) -> list[str]:
        return [programs.require("redis-exporter"), "-web.listen-address", f"{HOST}:{self.port}"]

    def _answers(self) -> bool:
        return _answers(f"{self.url}/metrics")


class Prometheus(Server):
    """Debian's Prometheus with our configuration; `watch` says which workers there are."""

    def __init__(self, targets: Mapping[str, Sequence[str]]) -> None:
        """`targets`: the URLs of each static job, one for each node: rabbitmq, redis."""
        super().__init__("prometheus")
        for path in RULES.glob("*.yml"):
            (self.folder / path.name).write_text(quicker(path.read_text()))
        self._targets_file = self.folder / "workers.json"
        self.watch([])
        (self.folder / "prometheus.yml").write_text(yaml.safe_dump(self._configuration(targets)))

    @property
    def url(self) -> str:
        """Its API and its page."""
        return f"http://{HOST}:{self.port}"

    def watch(self, ports: Sequence[int], elsewhere: Sequence[str] = ()) -> None:
        """Scrape the workers' pages on these ports, and on other hosts, and no others; noticed at once."""
        new_file = self._targets_file.with_suffix(".new")
        new_file.write_text(json.dumps([{"targets": [*(f"{HOST}:{port}" for port in ports), *elsewhere]}]))
        new_file.replace(self._targets_file)

    def value(self, expression: str) -> float | None:
        """The sum over the series of an expression now, or None without any."""
        results = self._get("query", query=expression)["result"]
        return sum(float(series["value"][1]) for series in results) if results else None

    def values(self, expression: str, start: float, end: float) -> list[tuple[dict[str, str], Series]]:
        """Labels and values of every series of an expression."""
        results = self._get("query_range", query=expression, start=start, end=end, step=1)["result"]
        return [
            (series["metric"], [(at, float(value)) for at, value in series["values"] if value != "NaN"])
            for series in results
        ]

    def firing(self) -> dict[str, list[dict[str, str]]]:
        """Labels of the alerts that fire now, by name."""
        firing: dict[str, list[dict[str, str]]] = {}
        for alert in self._get("alerts")["alerts"]:
            if alert["state"] == "firing":
                firing.setdefault(alert["labels"]["alertname"], []).append(alert["labels"])
        return firing

    def _get(self, endpoint: str, **parameters: Any) -> Any:
        answer = httpx.get(f"{self.url}/api/v1/{endpoint}", params=parameters, timeout=30)
        reply = answer.json()
        assert reply["status"] == "success", f"{parameters}: {reply}"
        return reply["data"]

    def _configuration(self, targets: Mapping[str, Sequence[str]]) -> dict[str, Any]:
        config: dict[str, Any] = yaml.safe_load(CONFIG.read_text())
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s", "scrape_timeout": "1s"}
        config["rule_files"] = [str(self.folder / path.name) for path in RULES.glob("*.yml")]
        for job in config["scrape_configs"]:
            if "static_configs" in job:
                urls = targets[job["job_name"].split("-")[0]]
                job["static_configs"] = [{"targets": [url.removeprefix("http://") for url in urls]}]
            else:
                job["file_sd_configs"] = [{"files": [str(self._targets_file)], "refresh_interval": "1s"}]
        return config

    def _command(self) -> list[str]:
        folder = self.folder
        return [
            programs.require("prometheus"),
            f"--config.file={folder}/prometheus.yml",
            f"--storage.tsdb.path={folder}/data",
            f"--web.listen-address={HOST}:{self.port}",
        ]

    def _answers(self) -> bool:
        return _answers(f"{self.url}/-/ready")


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, timeout=2).status_code == 200
    except httpx.HTTPError:
        return False
