"""What `kvasir deploy` would write and run: units, steps, wheels; and that a dry run shows no secret."""

import base64
import dataclasses
import hashlib
import json
import os
import plistlib
import subprocess
import sys
from pathlib import Path
from urllib.parse import urlsplit

import pytest
from click.testing import CliRunner

from infra.config.schema import MachineRole
from infra.config.settings import MachineSettings, Settings, load_settings
from infra.deploy import steps, supervise, wheelhouse
from infra.deploy.accounts import (
    SERVICES,
    Account,
    accounts,
    login,
    passwords,
    secrets_of,
    with_hosts,
    with_logins,
    without_passwords,
)
from infra.deploy.machine import default_facts, place_of
from infra.deploy.permissions import PERMISSIONS
from infra.deploy.services import definitions, service_files, service_units, store_users
from infra.deploy.steps import write
from infra.deploy.units import Place, supervisor_of, unit_file, units_of
from kvasir.cli import kvasir
from messages.errors import ConfigError, UsageError
from tests.support.waiting import wait_until

EXAMPLE = Path(__file__).parents[3] / "examples" / "kvasir.toml"
PLACE = Place("/home/k", "k", "/home/k/kvasir", {"A": "50% $HOME"})


@pytest.fixture
def settings() -> Settings:
    return load_settings(config=EXAMPLE, environ={})


def _machine(settings: Settings, name: str) -> MachineSettings:
    return settings.machines[name]


def test_each_platform_has_its_own_supervisor_and_each_worker_its_own_port(settings: Settings) -> None:
    machines = settings.machines.values()
    assert [supervisor_of(machine) for machine in machines] == ["systemd", "systemd", "launchd", "launchd"]
    units = units_of(_machine(settings, "mac1"))
    assert [(unit.name, unit.port, unit.host) for unit in units] == [
        ("kvasir-decode-gpt-oss-120b", 9101, "169.254.150.101")
    ]


def test_a_worker_with_both_roles_is_one_unit(settings: Settings) -> None:
    machine = dataclasses.replace(
        _machine(settings, "spark1"), roles=(MachineRole("worker", "gpt-oss:120b", "llamacpp", slots=16),)
    )
    [unit] = units_of(machine)
    assert (unit.name, unit.role) == ("kvasir-worker-gpt-oss-120b", "worker")
    words = " ".join(unit.command(PLACE))
    assert " worker --model gpt-oss:120b --engine llamacpp --slots 16 " in words


def test_services_of_before_that_role_let_its_worker_log_in_as_the_operator(tmp_path: Path) -> None:
    config = tmp_path / "kvasir.toml"
    config.write_text(
        '[services]\nbroker = "amqp://teacher@studio:5672/"\nbroker_password_file = "broker"\n'
        'store = "redis://teacher@studio:6379/0"\nstore_password_file = "store"\n'
    )
    roles = ("producer", "prefill", "decode", "monitor")
    for name in ("broker", "store", *(f"{service}.{role}" for service in ("broker", "store") for role in roles)):
        (tmp_path / name).write_text("secret")
        (tmp_path / name).chmod(0o600)
    earlier = load_settings(config=config, environ={})
    logins = {role: login(earlier, "store", role) for role in ("decode", "worker")}
    assert {role: one and one.name for role, one in logins.items()} == {"decode": "store.decode", "worker": "store"}
    (tmp_path / "store.worker").write_text("secret")
    now = login(earlier, "store", "worker")
    assert now
    assert (now.name, urlsplit(now.url).username) == ("store.worker", "kvasir-worker")


def test_a_launchd_daemon_is_a_plist_that_keeps_its_worker_running(settings: Settings) -> None:
    unit = units_of(_machine(settings, "mac2"))[0]
    path, text = unit_file("launchd", unit, PLACE)
    entries = plistlib.loads(text.encode())
    assert path == "/Library/LaunchDaemons/org.kvasir.decode-qwen3-coder-30b.plist"
    assert entries["ProgramArguments"] == unit.command(PLACE)
    assert (entries["KeepAlive"], entries["UserName"], entries["EnvironmentVariables"]["A"]) == (True, "k", "50% $HOME")


def test_systemd_reads_no_specifier_and_no_variable_out_of_a_value(settings: Settings) -> None:
    _, text = unit_file("systemd", units_of(_machine(settings, "spark1"))[0], PLACE)
    assert 'Environment="A=50%% $HOME"' in text


def test_no_machine_is_given_the_wheel_that_computes_on_its_cpu(settings: Settings) -> None:
    assert wheelhouse.extras_of(_machine(settings, "spark1")) == ["nvml"]
    assert wheelhouse.extras_of(_machine(settings, "mac1")) == ["llamacpp"]


@pytest.mark.parametrize(
    ("said", "missing"),
    [
        ("one: ERROR: No matching distribution found for redis>=5.2 (status 1)", "redis>=5.2"),
        ('ERROR: No matching distribution found for a-b>=4; python_version < "3.12"', "a-b>=4"),
        ("ERROR: No matching distribution found for mlx[cuda13] (from kvasir)", "mlx[cuda13]"),
        ("ERROR: the disk is full", ""),
    ],
)
def test_what_pip_did_not_find_is_named_in_its_message(said: str, missing: str) -> None:
    assert wheelhouse.missing_in(said) == missing


def test_a_broker_and_a_store_know_nobody_but_the_accounts_and_keep_no_password(settings: Settings) -> None:
    everybody = [Account("teacher", "secret"), Account("kvasir-decode", "another", "decode")]
    made = json.loads(definitions(everybody))
    for user, password in zip(made["users"], (b"secret", b"another"), strict=True):
        salted = base64.b64decode(user["password_hash"])
        assert hashlib.sha256(salted[:4] + password).digest() == salted[4:]
    assert made["permissions"] == [
        {"configure": given.configure, "write": given.write, "read": given.read, "user": user, "vhost": "/"}
        for user, given in (("teacher", PERMISSIONS["operator"]), ("kvasir-decode", PERMISSIONS["decode"]))
    ]
    assert [line.split()[1:3] for line in store_users(everybody).splitlines()] == [
        ["default", "off"],
        ["teacher", "on"],
        ["kvasir-decode", "on"],
    ]
    files = service_files(_machine(settings, "mac1"), settings, PLACE, everybody, everybody)
    assert not [path for path, file in files.items() if b"secret" in file.content or b"another" in file.content]
    assert {Path(path).name for path, file in files.items() if file.mode == 0o600} == {"definitions.json", "redis.acl"}
    assert b"maxmemory 128000000000" in files["/home/k/kvasir/services/redis.conf"].content


def _settings_with(folder: Path, store: str = "redis://teacher@s:6379/0", more: str = "") -> Settings:
    config = folder / "kvasir.toml"
    config.write_text(
        f'[services]\nbroker = "amqp://teacher@b:5672/?heartbeat=9"\nstore = "{store}"\n'
        'broker_password_file = "broker"\nstore_password_file = "store"\n[models.m]\n[machines.one]\n'
        f"roles = [{more}"
        '{role = "prefill", model = "m", engine = "simulated"}, {role = "decode", model = "m", engine = "simulated"}]\n'
    )
    return load_settings(config=config, environ={})


def test_a_node_of_a_redis_cluster_is_not_set_up_as_a_redis_of_its_own(tmp_path: Path) -> None:
    settings = _settings_with(tmp_path, "redis+cluster://teacher@s1:6379,s2:6379", '{role = "store", memory_gb = 1}, ')
    with pytest.raises(ConfigError, match="names a Redis Cluster, but deploy sets up only one Redis"):
        service_units(_machine(settings, "one"), settings)
    assert [unit.name for unit in units_of(_machine(settings, "one"))]


def test_workers_log_in_as_the_operator_until_each_role_has_its_password(tmp_path: Path) -> None:
    # Given services that somebody set up with one user
    settings = _settings_with(tmp_path)
    (tmp_path / "broker").write_text("old"), (tmp_path / "store").write_text("old")
    units = units_of(_machine(settings, "one"))
    assert set(secrets_of(units, settings)) == {"broker", "store"}
    assert "KVASIR_BROKER_URL" not in dict(with_logins(units[0], settings).environment)

    # When the others' passwords are made
    made = [secret.make() for service in SERVICES for secret in passwords(settings, service).values()]

    # Then the operator's is kept and stays here, and each worker has its role's user and its password's file
    assert (tmp_path / "broker").read_text() == "old"
    assert {path.stat().st_mode & 0o777 for path in made if path} == {0o600}
    assert set(secrets_of(units, settings)) == {"broker.prefill", "broker.decode", "store.prefill", "store.decode"}
    variables = dict(with_logins(units[0], settings).environment)
    assert variables["KVASIR_BROKER_URL"] == "amqp://kvasir-prefill@b:5672/?heartbeat=9"
    assert variables["KVASIR_STORE_URL"] == "redis://kvasir-prefill@s:6379/0"
    assert variables["KVASIR_STORE_PASSWORD_FILE"] == "{folder}/secrets/store.prefill"
    assert len({account.password for account in accounts(settings, "broker")}) == len(PERMISSIONS)
    # And no unit file, which everybody on the machine can read, has a password
    known = [secret.reveal() for secret in secrets_of(units, settings).values()]
    texts = [unit_file(each, with_logins(units[0], settings), PLACE)[1] for each in ("systemd", "launchd", "plain")]
    assert not [text for text in texts if any(password in text for password in known)]


def test_a_machine_s_workers_are_told_its_own_addresses_of_the_services(tmp_path: Path) -> None:
    settings = _settings_with(tmp_path)
    for service in SERVICES:
        (tmp_path / service).write_text("old")
    machine = dataclasses.replace(_machine(settings, "one"), broker_hosts="fast:5672,b:5672")
    unit = units_of(machine)[0]
    alone = dict(with_hosts(unit, settings, machine).environment)
    assert alone["KVASIR_BROKER_URL"] == "amqp://teacher@fast:5672,b:5672/?heartbeat=9"
    assert "KVASIR_STORE_URL" not in alone
    for service in SERVICES:
        _ = [secret.make() for secret in passwords(settings, service).values()]
    both = dict(with_hosts(with_logins(unit, settings), settings, machine).environment)
    assert both["KVASIR_BROKER_URL"] == "amqp://kvasir-prefill@fast:5672,b:5672/?heartbeat=9"


def test_a_gateway_is_installed_with_its_packages_logs_in_as_a_producer_and_lets_nobody_in_at_first(
    tmp_path: Path,
) -> None:
    settings = _settings_with(tmp_path, more='{role = "gateway", port = 8123}, ')
    for service in SERVICES:
        (tmp_path / service).write_text("old")
        _ = [secret.make() for secret in passwords(settings, service).values()]
    machine = _machine(settings, "one")
    units = units_of(machine)
    assert [(unit.name, unit.port) for unit in units][2:] == [("kvasir-gateway-8123", 9103)]
    assert "gateway" in wheelhouse.extras_of(machine)
    variables = dict(with_logins(units[2], settings).environment)
    assert variables["KVASIR_BROKER_URL"] == "amqp://kvasir-producer@b:5672/?heartbeat=9"

    # Its keys' file is made once, and what stands in it later is kept
    place = dataclasses.replace(PLACE, folder=str(tmp_path / "there"))
    (step,) = steps.key_files(place, units)
    keys = tmp_path / "there" / "gateway-8123" / "keys.json"
    assert str(keys.parent) in units[2].command(place)
    for kept in ("[]\n", '[{"name": "ada"}]'):
        subprocess.run(["sh", "-c", step.script], check=True)
        assert (keys.read_text(), keys.stat().st_mode & 0o777) == (kept, 0o600)
        keys.write_text('[{"name": "ada"}]')


@pytest.mark.parametrize(
    ("store", "why"),
    [
        ("redis://s:6379/0", "names no user"),
        ("redis://default@s:6379/0", "the user 'default'"),
        ("redis://kvasir-decode@s:6379/0", "the user 'kvasir-decode'"),
    ],
)
def test_the_operator_needs_a_user_of_its_own(tmp_path: Path, store: str, why: str) -> None:
    with pytest.raises(UsageError, match=rf"{why}.*write store = 'redis://kvasir@s:6379/0'"):
        accounts(_settings_with(tmp_path, store), "store", for_show=True)


def test_a_release_is_complete_or_made_anew_and_the_one_in_use_is_switched_by_a_link(tmp_path: Path) -> None:
    place = Place(str(tmp_path), "k", str(tmp_path))
    _shell(steps.prepare(place))
    for release in ("old-1", "old-2", "old-3", "new"):
        (tmp_path / "releases" / release).mkdir()
        _shell(steps.use(place, release))
    assert (tmp_path / "current").resolve() == tmp_path / "releases" / "new"
    assert len(list((tmp_path / "releases").iterdir())) == 3


def _shell(some: list[steps.DeployStep]) -> None:
    for step in some:
        subprocess.run(["sh", "-c", f"set -eu; {step.script}"], check=True)


def test_a_folder_may_be_absolute_or_in_the_users_home(settings: Settings) -> None:
    machine = _machine(settings, "mac1")
    place = place_of(machine, default_facts(machine))
    assert place.folder == "/Users/kvasir/kvasir"
    assert "/opt/homebrew/bin" in place.environment["PATH"]


def test_a_dry_run_contacts_nobody_and_shows_no_secret() -> None:
    done = CliRunner(env={"KVASIR_BROKER_PASSWORD": "hunter2", "KVASIR_STORE_PASSWORD": "hunter3"}).invoke(
        kvasir, ["--config", str(EXAMPLE), "deploy", "--dry-run"], catch_exceptions=False
    )
    assert done.exit_code == 0
    assert "kvasir-worker-gpt-oss-120b.service" in done.output
    assert "hunter" not in done.output


def test_weights_that_lie_beside_the_configuration_are_copied_where_they_are_asked_for(tmp_path: Path) -> None:
    config, models = tmp_path / "site" / "kvasir.toml", tmp_path / "site" / "models"
    (models / "folder").mkdir(parents=True)
    elsewhere = tmp_path / "elsewhere.gguf"
    for file in (models / "one.gguf", models / "the-model-s.gguf", elsewhere):
        file.touch()
    stated = ["models/one.gguf", "models/folder?dtype=f32", "owner/of-a-hub", str(elsewhere), ""]
    roles = ", ".join(
        f'{{ role = "decode", model = "m:1b", engine = "{engine}", weights = "{weights}" }}'
        for engine, weights in zip(("llamacpp", "transformers", "mlx", "llamacpp", "llamacpp"), stated, strict=True)
    )
    model = '[models."m:1b"]\nweights.llamacpp = "models/the-model-s.gguf"\n'
    config.write_text(f'{model}[machines.one]\nhost = "one"\nroles = [{roles}]\n')

    def shown(*options: str) -> list[str]:
        command = ["--config", str(config), "deploy", "--dry-run", *options]
        output = CliRunner().invoke(kvasir, command, catch_exceptions=False).output
        return [line.split(",")[0] for line in output.splitlines() if line.startswith("  copy ")]

    home = default_facts(load_settings(config=config, environ={}).machines["one"]).home
    places = (("folder", "/folder"), ("one.gguf", ""), ("the-model-s.gguf", ""))
    assert shown("--with-weights") == [
        f"  copy {models / name} to {home}/kvasir/models{folder}" for name, folder in places
    ]
    assert shown() == []


def test_a_password_in_the_files_urls_goes_to_no_machine_and_is_not_shown(tmp_path: Path) -> None:
    config = tmp_path / "kvasir.toml"
    config.write_text(
        '[services]\nbroker = "amqp://teacher:hunter2@b:5672,c:5672/"\nstore = "redis://:hunter3@s:6379/0"\n'
        '# was "amqp://teacher:hunter4@a:5672/"\n[models.m]\n[machines.one]\nhost = "one"\n'
        'roles = [{role = "prefill", model = "m", engine = "llamacpp"}]\n'
    )
    done = CliRunner().invoke(kvasir, ["--config", str(config), "deploy", "--dry-run"], catch_exceptions=False)
    assert done.exit_code == 0
    assert "hunter" not in done.output
    # What is written there is without them, and only its owner's where a comment still holds one
    written = without_passwords(config.read_text())
    assert 'broker = "amqp://teacher@b:5672,c:5672/"\nstore = "redis://s:6379/0"' in written
    [file] = write("", PLACE, written, {}).files.values()
    assert file.mode == 0o600
    [file] = write("", PLACE, written.replace("teacher:hunter4@", ""), {}).files.values()
    assert file.mode == 0o644


def test_an_unknown_machine_is_named_with_those_there_are() -> None:
    done = CliRunner().invoke(kvasir, ["--config", str(EXAMPLE), "deploy", "--machine", "spark9"])
    assert "spark1, spark2, mac1, mac2" in str(done.exception)


def test_what_is_supervised_is_started_again_when_it_ends_and_stopped_when_asked(tmp_path: Path) -> None:
    # Given a command that notes that it runs, and ends the first time
    lines = tmp_path / "lines"
    script = f'echo $$ >> {lines}; [ "$(wc -l < {lines})" -gt 1 ] && exec sleep 600; exit 3'
    run, log = tmp_path / "run" / "unit", tmp_path / "log" / "unit.log"
    ask = [sys.executable, "-m", "infra.deploy.supervise"]
    more = [str(run), str(log), "--", "sh", "-c", script]
    # When it is started, even twice
    for _ in range(2):
        assert subprocess.run([*ask, "start", *more], timeout=60).returncode == 0
    # Then it is running for the second time, and once only
    wait_until(lambda: len(lines.read_text().split()) == 2 if lines.exists() else False, "it was started again", 30)
    assert supervise.supervisor_pid(run.with_suffix(".pid"))
    assert "the command ended with 3" in log.read_text()
    # And stopping it ends it
    assert subprocess.run([*ask, "stop", *more], timeout=60).returncode == 0
    assert subprocess.run([*ask, "status", *more], timeout=60).returncode == 3
    with pytest.raises(ProcessLookupError):
        os.kill(int(lines.read_text().split()[1]), 0)
