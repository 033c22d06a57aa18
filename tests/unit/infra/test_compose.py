"""docker-compose.yml keeps our promises: loopback ports, health checks, no password of its own."""

import ast
import json
import os
import re
import stat
import subprocess
import tomllib
from hashlib import sha256
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import pytest
import yaml

from infra.config.settings import load_settings
from infra.deploy.accounts import Account, user_of
from infra.deploy.permissions import PERMISSIONS
from infra.deploy.services import definitions, store_users
from kvasir import cli

ROOT = Path(__file__).resolve().parents[3]
COMPOSE = yaml.safe_load((ROOT / "docker-compose.yml").read_text())
SERVICES: dict[str, dict[str, Any]] = COMPOSE["services"]
DOCKERFILE = (ROOT / "Dockerfile").read_text()
VARIABLE = re.compile(r"\$\{(\w+)(:\?|:-)?")

JOBS = {"topology"}  # they end
FOLDER = ROOT / "infra/deploy/compose"

every_service = pytest.mark.parametrize("name", [name for name in SERVICES if name not in JOBS])
every_worker = pytest.mark.parametrize("name", ["prefill-worker", "decode-worker"])


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
    ours = r"kvasir(-gateway)?:0\.1\.0"
    assert re.search(rf":v?\d+\.\d+|^{ours}$", service["image"])


@pytest.mark.parametrize("name", SERVICES)
def test_nothing_fills_memory_or_disk(name: str) -> None:
    assert SERVICES[name]["mem_limit"]
    assert SERVICES[name]["logging"] == {"driver": "json-file", "options": {"max-size": "10m", "max-file": "3"}}


@pytest.mark.parametrize(("name", "count"), [("rabbitmq", 5), ("redis", 5), ("grafana", 1)])
def test_what_can_be_logged_into_has_passwords_without_a_default(name: str, count: int) -> None:
    passwords = {value for key, value in SERVICES[name]["environment"].items() if "PASS" in key}
    assert len(passwords) == count
    assert all(re.fullmatch(r"\$\{KVASIR_\w+_PASSWORD:\?[^}]+\}", password) for password in passwords)


COMPOSE_ROLES = [role for role in PERMISSIONS if role != "worker"]  # it starts each role by itself
ROLE_PASSWORDS = {f"{role.upper()}_PASSWORD": f"{role}-{10**9}" for role in COMPOSE_ROLES}
ACCOUNTS = [
    Account("ada" if role == "operator" else user_of(role), ROLE_PASSWORDS[f"{role.upper()}_PASSWORD"], role)
    for role in COMPOSE_ROLES
]


def test_the_brokers_users_have_their_roles_rights_and_there_are_no_others() -> None:
    written = json.loads(_with_passwords("definitions.json"))
    expected = json.loads(definitions(ACCOUNTS))
    for user, account in zip(expected["users"], ACCOUNTS, strict=True):
        del user["password_hash"], user["hashing_algorithm"]
        user["password"] = account.password
    assert written == expected
    assert "load_definitions = /run/kvasir/definitions.json" in (FOLDER / "rabbitmq.conf").read_text()
    assert ">/run/kvasir/definitions.json" in SERVICES["rabbitmq"]["entrypoint"][-1]
    assert "RABBITMQ_DEFAULT_USER" not in SERVICES["rabbitmq"]["environment"]


def test_the_stores_users_have_their_roles_rights_and_there_are_no_others() -> None:
    hashed = re.sub(r">(\S+)", lambda word: f"#{sha256(word[1].encode()).hexdigest()}", _with_passwords("users.acl"))
    assert hashed == store_users(ACCOUNTS)
    assert "$$(awk -f /etc/kvasir/with-passwords.awk /etc/kvasir/users.acl)\n" in SERVICES["redis"]["command"][-1]


def _with_passwords(name: str) -> str:
    command = ["awk", "-f", str(FOLDER / "with-passwords.awk"), str(FOLDER / name)]
    variables = os.environ | ROLE_PASSWORDS | {"OPERATOR": "ada"}
    return subprocess.run(command, env=variables, capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize(
    ("name", "role"),
    [("topology", ""), ("prefill-worker", "prefill"), ("decode-worker", "decode"), ("gateway", "producer")],
)
def test_a_process_logs_in_as_its_role(name: str, role: str) -> None:
    given = SERVICES[name]["environment"]
    for service, kind in (("BROKER", "RABBITMQ"), ("STORE", "REDIS")):
        user = urlsplit(re.sub(r"\$\{(\w+).*?\}", r"\1", given[f"KVASIR_{service}_URL"])).username
        assert user == (f"kvasir-{role}" if role else "KVASIR_RABBITMQ_USER")
        variable = f"KVASIR_{kind}_{role.upper()}_PASSWORD" if role else f"KVASIR_{kind}_PASSWORD"
        assert given[f"KVASIR_{service}_PASSWORD"].startswith(f"${{{variable}:?")
    assert SERVICES["redis-exporter"]["environment"]["REDIS_USER"] == "kvasir-monitor"


def test_the_operator_declares_what_workers_and_gateway_wait_for() -> None:
    before, name, options = _command("topology")
    assert (before, name, options) == (["--config=/models/kvasir.toml", "--log-style=json"], "status", [])
    assert set(SERVICES["topology"]["depends_on"]) == {"rabbitmq", "redis"}
    assert SERVICES["topology"]["restart"] == "on-failure"


def test_workflows_take_actions_by_commit() -> None:
    used = re.findall(r"uses: (.*)", (ROOT / ".github/workflows/ci.yml").read_text())
    assert used
    assert [line for line in used if not re.fullmatch(r"[\w-]+/[\w-]+@[0-9a-f]{40} # v\d+\.\d+\.\d+", line)] == []


@every_service
def test_a_service_waits_for_the_health_of_what_it_needs(name: str) -> None:
    for other, how in SERVICES[name].get("depends_on", {}).items():
        assert other in SERVICES
        ended = "service_completed_successfully"
        assert how == {"condition": ended if other in JOBS else "service_healthy"}


def test_redis_keeps_nothing_and_evicts_nothing() -> None:
    command = SERVICES["redis"]["command"][-1]
    for directive in ('save ""', "appendonly no", "maxmemory-policy noeviction"):
        assert directive in command


def test_three_brokers_are_named_as_their_configuration_says_and_keep_the_promises_of_one() -> None:
    folder = ROOT / "examples"
    services = yaml.safe_load((folder / "cluster.compose.yml").read_text())["services"]
    brokers = {name: each for name, each in services.items() if name.startswith("broker")}
    conf = (ROOT / "infra/deploy/compose/cluster.conf").read_text()
    assert re.findall(r"nodes\.\d = rabbit@(\w+)", conf) == [each["hostname"] for each in brokers.values()]
    assert "cluster_partition_handling = pause_minority" in conf
    for each in brokers.values():
        assert each["image"] == SERVICES["rabbitmq"]["image"]
        assert each["healthcheck"]["test"] == SERVICES["rabbitmq"]["healthcheck"]["test"]
        assert all(port.startswith("${KVASIR_BIND:-127.0.0.1}:") for port in each["ports"])
        assert all(":?" in value for value in each["environment"].values())
        sources = [volume.split(":")[0] for volume in each["volumes"] if volume.startswith(".")]
        assert all((folder / source).exists() for source in sources)
    settings = load_settings(config=folder / "cluster.toml", environ={})
    assert settings.services.broker_nodes == len(brokers) == settings.services.broker.count(":5672")


def test_the_nodes_of_a_redis_cluster_are_set_up_as_one_redis_and_the_comment_joins_them() -> None:
    path = ROOT / "examples" / "cluster.compose.yml"
    services = yaml.safe_load(path.read_text())["services"]
    nodes = {name: each for name, each in services.items() if name.startswith("redis")}
    assert len(nodes) == 6
    for each in nodes.values():
        assert each["image"] == SERVICES["redis"]["image"]
        assert ":?" in each["environment"]["REDIS_PASSWORD"]
        for directive in ('save ""', "appendonly no", "maxmemory-policy noeviction", "requirepass $$REDIS_PASSWORD"):
            assert directive in each["command"][-1]
    ports = [each["environment"]["REDIS_PORT"] for each in nodes.values()]
    assert f'printf "$REDIS_BIND:%s " {" ".join(ports)}' in path.read_text()


def test_mounted_files_are_in_the_checkout() -> None:
    mounts = [volume for service in SERVICES.values() for volume in service.get("volumes", [])]
    sources = [mount.split(":")[0] for mount in mounts if mount.startswith("./")]
    assert [source for source in sources if not (ROOT / source).exists()] == []


@every_worker
def test_a_workers_command_is_one_and_serves_a_model_that_is_mounted(name: str) -> None:
    before, role, options = _command(name)
    assert role == name
    cli.kvasir.commands[role].make_context(role, options)  # raises for an option that there is not
    assert before == ["--config=/models/kvasir.toml", "--log-style=json"]

    mounts = dict(mount.removesuffix(":ro").split(":")[::-1] for mount in SERVICES[name]["volumes"])
    config = ROOT / mounts["/models/kvasir.toml"]
    model = load_settings(config=config, environ={}).model("kvasir-demo")
    _engine, weights = model.weights_for()
    assert Path(weights).parent.resolve() == (ROOT / mounts["/models/model"]).resolve()
    assert Path(weights).is_file()


@every_worker
def test_a_worker_is_healthy_when_it_is_ready_and_its_page_is_published(name: str) -> None:
    options = dict(option.split("=") for option in SERVICES[name]["command"] if option.startswith("--"))
    port = options["--metrics-port"]
    program, flag, code = SERVICES[name]["healthcheck"]["test"][1:]
    compile(code, name, "exec")
    assert (program, flag) == ("python", "-c")
    assert f"http://127.0.0.1:{port}/ready" in code
    assert SERVICES[name]["ports"][0].endswith(f":{port}:{port}")
    grace = int(SERVICES[name]["stop_grace_period"].removesuffix("s"))
    assert grace > int(options["--grace"])


@every_worker
def test_a_worker_reaches_the_services_by_name_and_is_started_only_when_asked_for(name: str) -> None:
    service = SERVICES[name]
    urls = [value for key, value in service["environment"].items() if key.endswith("_URL")]
    assert [urlsplit(re.sub(r"\$\{.*?\}", "user", url)).hostname for url in urls] == ["rabbitmq", "redis"]
    assert set(service["depends_on"]) == {"topology"}
    for key, value in service["environment"].items():
        assert "PASSWORD" not in key or re.fullmatch(r"\$\{KVASIR_\w+_PASSWORD:\?[^}]+\}", value)
    assert service["profiles"] == ["workers"]
    assert service["read_only"]
    assert service["cap_drop"] == ["ALL"]


def test_the_gateways_command_is_one_and_its_state_is_a_volume_that_its_user_owns() -> None:
    service = SERVICES["gateway"]
    before, name, options = _command("gateway")
    assert before == SERVICES["decode-worker"]["command"][:2]
    context = cli.kvasir.commands[name].make_context(name, options)
    assert (context.params["host"], context.params["port"]) == ("0.0.0.0", 8000)
    assert f"gateway:{context.params['folder']}" in service["volumes"]
    assert "gateway" in COMPOSE["volumes"]
    assert f"--owner=kvasir --mode=0700 {context.params['folder']}" in DOCKERFILE
    assert service["ports"][0].endswith(":8000:8000")
    assert "http://127.0.0.1:8000/ready" in service["healthcheck"]["test"][-1]
    assert service["build"]["args"] == {"EXTRAS": "gateway"}
    assert (service["profiles"], service["read_only"]) == (["gateway"], True)


def test_the_image_is_of_a_fixed_python_and_does_not_run_as_root() -> None:
    lines = [line for line in DOCKERFILE.splitlines() if line and not line.startswith("#")]
    assert {line.split()[1] for line in lines if line.startswith("FROM ")} == {"python:3.11-slim"}
    last = [line for line in lines if line.startswith(("FROM ", "USER ", "ENTRYPOINT "))][-2:]
    assert last == ["USER kvasir", 'ENTRYPOINT ["kvasir"]']
    assert "useradd" in DOCKERFILE
    assert not re.search(r"PASSWORD|SECRET|TOKEN|://", DOCKERFILE)


def test_the_image_is_built_from_what_the_wheel_is_made_of_and_nothing_else() -> None:
    lines = (ROOT / ".dockerignore").read_text().splitlines()
    rules = [line for line in lines if line and not line.startswith("#")]
    assert rules[0] == "*"
    kept = {rule.removeprefix("!") for rule in rules if rule.startswith("!")}
    assert [name for name in kept if not list(ROOT.glob(name))] == []
    packages = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["setuptools"]["packages"]["find"]["include"]
    demo = {f"examples/{pattern}" for pattern in (*_demo_files(), "homework/submissions")}
    project = {"pyproject.toml", "setup.py", "README.md", "LICENSE"}
    assert {pattern.removesuffix("*") for pattern in packages} | project | demo == kept


def _demo_files() -> tuple[str, ...]:
    """What setup.py puts into the wheel."""
    found = re.search(r"^DEMO = (\(.*?\))$", (ROOT / "setup.py").read_text(), re.MULTILINE | re.DOTALL)
    assert found
    files: tuple[str, ...] = ast.literal_eval(found[1])
    return files


def _command(name: str) -> tuple[list[str], str, list[str]]:
    """What stands before the command's name, the name, and its options."""
    words: list[str] = SERVICES[name]["command"]
    at = next(index for index, word in enumerate(words) if not word.startswith("--"))
    return words[:at], words[at], words[at + 1 :]


def test_prometheus_and_grafana_know_the_services_by_their_names() -> None:
    folder = FOLDER
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
    assert len(passwords) == 11
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
