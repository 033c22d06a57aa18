"""docker-compose.yml keeps our promises: loopback ports, health checks, no password of its own."""

from __future__ import annotations

import re
import stat
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
VARIABLE = re.compile(r"\$\{(\w+)(:\?|:-)?")

every_service = pytest.mark.parametrize("name", SERVICES)


@every_service
def test_ports_are_bound_to_loopback_unless_somebody_says_otherwise(name: str) -> None:
    assert SERVICES[name]["ports"]
    for port in SERVICES[name]["ports"]:
        assert re.fullmatch(r"\$\{KVASIR_BIND:-127\.0\.0\.1\}:\d+:\d+", port)


@every_service
def test_a_service_is_checked_restarted_and_of_a_fixed_version(name: str) -> None:
    service = SERVICES[name]
    assert service["healthcheck"]["test"]
    assert service["restart"] == "unless-stopped"
    assert re.search(r":v?\d", service["image"])


@pytest.mark.parametrize("name", ["rabbitmq", "redis", "grafana"])
def test_what_can_be_logged_into_has_a_password_without_a_default(name: str) -> None:
    passwords = [value for key, value in SERVICES[name]["environment"].items() if "PASS" in key]
    assert len(passwords) == 1
    assert re.fullmatch(r"\$\{KVASIR_\w+_PASSWORD:\?[^}]+\}", passwords[0])


@every_service
def test_a_service_waits_for_the_health_of_what_it_needs(name: str) -> None:
    for other, how in SERVICES[name].get("depends_on", {}).items():
        assert other in SERVICES
        assert how == {"condition": "service_healthy"}


def test_redis_keeps_nothing_and_evicts_nothing() -> None:
    command = SERVICES["redis"]["command"][-1]
    for directive in ('save ""', "appendonly no", "maxmemory-policy noeviction", "requirepass $$REDIS_PASSWORD"):
        assert directive in command


def test_mounted_files_are_in_the_checkout() -> None:
    mounts = [volume for service in SERVICES.values() for volume in service.get("volumes", [])]
    sources = [mount.split(":")[0] for mount in mounts if mount.startswith("./")]
    assert [source for source in sources if not (ROOT / source).exists()] == []


def test_prometheus_and_grafana_know_the_services_by_their_names() -> None:
    folder = ROOT / "infra/deploy/compose"
    jobs = yaml.safe_load((folder / "prometheus.yml").read_text())["scrape_configs"]
    targets = [target for job in jobs for group in job.get("static_configs", []) for target in group["targets"]]
    assert {target.split(":")[0] for target in targets} <= set(SERVICES)

    source = yaml.safe_load((folder / "grafana/datasources/prometheus.yml").read_text())["datasources"][0]
    assert source["uid"] == "kvasir-prometheus"
    assert source["url"] == "http://prometheus:9090"


def test_make_env_writes_every_variable_for_its_owner_alone(tmp_path: Path) -> None:
    first, second = (_make_env(tmp_path / name) for name in ("first", "second"))

    wanted = set(VARIABLE.findall((ROOT / "docker-compose.yml").read_text()))
    assert {name for name, _how in wanted} <= set(first)
    passwords = [name for name in first if name.endswith("PASSWORD")]
    assert all(len(first[name]) == 48 and first[name] != second[name] for name in passwords)
    assert stat.S_IMODE((tmp_path / "first/.env").stat().st_mode) == 0o600


def test_make_env_leaves_existing_passwords_alone(tmp_path: Path) -> None:
    before = _make_env(tmp_path)
    again = subprocess.run(["sh", str(ROOT / "scripts/make-env")], cwd=tmp_path, capture_output=True, text=True)
    assert again.returncode != 0
    assert "there already" in again.stderr
    assert _read_env(tmp_path) == before


def _make_env(folder: Path) -> dict[str, str]:
    folder.mkdir(exist_ok=True)
    subprocess.run(["sh", str(ROOT / "scripts/make-env")], cwd=folder, check=True, capture_output=True)
    return _read_env(folder)


def _read_env(folder: Path) -> dict[str, str]:
    lines = (folder / ".env").read_text().splitlines()
    return dict(line.split("=", 1) for line in lines if line and not line.startswith("#"))
