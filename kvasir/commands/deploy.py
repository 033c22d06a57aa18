"""`kvasir deploy`: installs Kvasir on the machines of kvasir.toml over ssh, and starts, stops and upgrades it there."""

import atexit
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import cast

import click

import kvasir
from infra.config.settings import MachineSettings, Settings
from infra.config.urls import Secret
from infra.deploy import steps, wheelhouse
from infra.deploy.accounts import (
    SERVICES,
    Service,
    accounts,
    has_roles,
    passwords,
    secrets_of,
    with_hosts,
    with_logins,
    without_passwords,
)
from infra.deploy.machine import Facts, default_facts, place_of, probe
from infra.deploy.remote import SECRET, DeployFailed, Remote
from infra.deploy.services import service_files, service_units
from infra.deploy.steps import DeployStep
from infra.deploy.units import Place, Unit, supervisor_of, units_of
from kvasir.commands.engines import print_findings
from kvasir.commands.logs import select_machines
from kvasir.connect import open_broker
from kvasir.doctor.cluster import examine
from kvasir.options import Globals, ssh_config_option
from messages.errors import UsageError

CHECKOUT = Path(kvasir.__file__).resolve().parents[1]
_CACHE = Path.home() / ".cache" / "kvasir"
VERBS = ("install", "start", "stop", "restart", "upgrade", "status")


@dataclass(frozen=True, slots=True)
class Order:
    """The task of one `kvasir deploy` command."""

    verb: str
    machines: Sequence[MachineSettings]
    config: Path
    settings: Settings
    ssh_config: Path | None
    wheel: Path | None  # None if a wheel is built from this checkout
    services: bool  # set up the broker and the store instead of the workers
    with_weights: bool  # also copy the models' weights
    dry_run: bool


@dataclass(frozen=True, slots=True)
class Site:
    """One machine of the order, and what was found out about it."""

    machine: MachineSettings
    remote: Remote
    facts: Facts
    place: Place
    units: list[Unit]
    secrets: Mapping[str, Secret]


@click.command("deploy")
@click.argument("verb", type=click.Choice(VERBS), default="install")
@click.option("--machine", "names", multiple=True, metavar="NAME", help="Deploy only to this machine; can be repeated.")
@ssh_config_option
@click.option(
    "--wheel",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="Install Kvasir from this wheel [default: a newly built wheel].",
)
@click.option("--services", is_flag=True, help="Set up the broker and the store instead of the workers.")
@click.option("--with-weights", is_flag=True, help="Also copy the models' weights that lie in kvasir.toml's folder.")
@click.option("--dry-run", is_flag=True, help="Print all steps and files, and contact no machine.")
@click.pass_obj
def deploy(
    global_options: Globals,
    verb: str,
    names: tuple[str, ...],
    ssh_config: Path | None,
    wheel: Path | None,
    services: bool,
    with_weights: bool,
    dry_run: bool,
) -> int:
    """Install and start the workers of each machine in kvasir.toml.

    \b
    install   copy wheels (the machines need no internet), configuration and units, start, wait until ready
    upgrade   the same with what is new here, one machine at a time; each worker finishes what it holds
    start, stop, restart, status
    """
    settings = global_options.settings()
    machines = _machines_for(settings, names, services)
    order = Order(
        verb, machines, _config_file(global_options), settings, ssh_config, wheel, services, with_weights, dry_run
    )
    installs = verb in ("install", "upgrade")
    if installs and services:
        _prepare_passwords(order)
    elif installs and has_roles(settings, "broker"):
        _declare(order)
    for machine in order.machines:
        _carry_out(order, machine)
    if installs and services and _hosts("broker", machines):
        _declare(order)
    if not installs or services or dry_run:
        return 0
    findings = list(examine(lambda: settings))
    print_findings(findings)
    return int(any(finding.level == "error" for finding in findings))


def _machines_for(settings: Settings, names: Sequence[str], services: bool) -> list[MachineSettings]:
    """Return the machines that run workers, or services, in the order of the configuration."""
    machines = [
        m for m in select_machines(settings, names) if (service_units(m, settings) if services else units_of(m))
    ]
    if not machines and services:
        raise UsageError("no machine in the configuration runs a service: give a machine the role broker or store")
    if not machines:
        raise UsageError(
            "no machine in the configuration runs a worker or a gateway: "
            "add [machines.NAME] with roles (docs/how-to/deployment.md)"
        )
    return machines


def _config_file(global_options: Globals) -> Path:
    path = global_options.config or Path("kvasir.toml")
    if not path.is_file():
        raise UsageError(
            f"{path} is not a file: pass --config with the configuration file that deploy copies to every machine"
        )
    return path


def _carry_out(order: Order, machine: MachineSettings) -> None:
    site = _site(order, machine)
    if order.verb == "status":
        return click.echo(site.remote.run_script(steps.status(site.place, site.units)), nl=False)
    for step in _steps(order, site):
        click.echo(f"  {step.says}", err=True)
        if order.dry_run:
            _print_step(step)
        else:
            _apply_step(site.remote, step)


def _site(order: Order, machine: MachineSettings) -> Site:
    remote = Remote(machine, order.ssh_config)
    click.echo(f"{machine.name}:", err=True)
    facts = default_facts(machine) if order.dry_run else probe(remote)
    if order.services:
        return Site(machine, remote, facts, place_of(machine, facts), service_units(machine, order.settings), {})
    units = [with_hosts(with_logins(unit, order.settings), order.settings, machine) for unit in units_of(machine)]
    return Site(machine, remote, facts, place_of(machine, facts), units, secrets_of(units, order.settings))


def _steps(order: Order, site: Site) -> Iterator[DeployStep]:
    """Yield the steps of the order on one machine."""
    place, supervisor = site.place, supervisor_of(site.machine)
    if order.verb not in ("install", "upgrade"):
        return (yield from steps.switch(place, supervisor, site.units, cast(steps.Switch, order.verb)))
    yield from steps.prepare(place)
    for path in _weights(order, site.machine):
        local = order.config.parent / path
        folder = f"{place.folder}/{path if local.is_dir() else path.parent}"
        click.echo(f"  copy {local} to {folder}, unless it is there", err=True)
        if not order.dry_run:
            site.remote.put_folder(local, folder)
    wheel, requirements = _requirements(order, site)
    release = "VERSION" if order.dry_run else wheelhouse.release_name(wheel, requirements)
    if order.dry_run:
        yield from steps.install(place, site.facts.python, release, requirements)
    else:
        _install(site, wheel, requirements, release)
    yield from steps.use(place, release)
    secrets = {name: b"" if order.dry_run else secret.reveal().encode() for name, secret in site.secrets.items()}
    config = without_passwords(order.config.read_text("utf-8-sig"))
    yield steps.write("write kvasir.toml and the passwords of its roles", place, config, secrets)
    if order.services:
        yield _service_files(order, site)
    yield from steps.key_files(place, site.units)
    yield from steps.register(place, supervisor, site.units)
    yield from steps.switch(place, supervisor, site.units, "restart")
    yield from steps.forget(place, _outdated_secrets(order, site))


def _weights(order: Order, machine: MachineSettings) -> list[Path]:
    """Return the weights that the machine's workers load by a relative path.

    They are copied from beside the configuration.
    """
    stated = {
        role.weights or order.settings.model(role.model).weights.get(role.engine, "")
        for role in machine.roles
        if role.stages and order.with_weights and not order.services
    }
    beside = order.config.parent.absolute()  # relative paths in the settings start from this folder
    paths = {beside / place.partition("?")[0] for place in stated if place}
    return sorted(path.relative_to(beside) for path in paths if path.is_relative_to(beside) and path.exists())


def _service_files(order: Order, site: Site) -> DeployStep:
    broker, store = (
        accounts(order.settings, service, order.dry_run) if _hosts(service, [site.machine]) else []
        for service in SERVICES
    )
    return DeployStep(
        "write the services' configuration, with a user for each role",
        files=service_files(site.machine, order.settings, site.place, broker, store),
    )


def _prepare_passwords(order: Order) -> None:
    """Make the missing passwords and keep existing ones. Raises UsageError before any machine is changed."""
    for service in SERVICES:
        if _hosts(service, order.machines):
            accounts(order.settings, service, for_show=True)
            for secret in passwords(order.settings, service).values():
                if secret_file := None if order.dry_run else secret.make():
                    click.echo(f"made a password in {secret_file}", err=True)


def _hosts(service: Service, machines: Sequence[MachineSettings]) -> bool:
    return any(role.role == service for machine in machines for role in machine.roles)


def _outdated_secrets(order: Order, site: Site) -> list[str]:
    """Return the operator's passwords, which machines held before there was a user for each role."""
    if order.services and units_of(site.machine):
        return []  # the deployment of this machine's workers removes these passwords
    return [service for service in SERVICES if has_roles(order.settings, service)]


def _declare(order: Order) -> None:
    """Declare all exchanges and queues with the operator's login."""
    click.echo("declare the exchanges, and the queues of each model, as the operator (workers may not)", err=True)
    if order.dry_run:
        return
    with closing(open_broker(order.settings, "deploy")) as broker:
        for remark in broker.declare(list(order.settings.models)):
            click.echo(remark, err=True)


def _requirements(order: Order, site: Site) -> tuple[Path, list[str]]:
    """Return Kvasir's wheel, which is built only once for all machines, and the requirements for the machine's pip."""
    shown = Path("kvasir_inference-VERSION-py3-none-any.whl") if order.dry_run else None
    wheel = order.wheel or shown or _build_wheel()
    return wheel, wheelhouse.requirements_of(site.machine, wheel)


@cache
def _build_wheel() -> Path:
    return wheelhouse.build_wheel(CHECKOUT, _CACHE / "own")


def _install(site: Site, wheel: Path, requirements: Sequence[str], release: str) -> None:
    """Install a release from wheels that are copied to the machine.

    If pip finds one missing, it is fetched and copied too.
    """
    target = site.facts.target
    click.echo(f"  collect the wheels for {target.system} {target.processor}, Python {target.python}", err=True)
    remote_folder = f"{site.place.folder}/wheelhouse"
    folder = _wheels(target, tuple(requirements), wheel)
    fetched_packages: set[str] = set()
    while True:
        site.remote.put_folder(folder, remote_folder)
        try:
            for step in steps.install(site.place, site.facts.python, release, requirements):
                _apply_step(site.remote, step)
            return
        except DeployFailed as error:
            missing_package = wheelhouse.missing_in(str(error))
            if not missing_package or missing_package in fetched_packages:
                raise
            fetched_packages.add(missing_package)
            wheelhouse.fetch(folder, missing_package, target)


@cache
def _wheels(target: wheelhouse.WheelTarget, requirements: tuple[str, ...], wheel: Path) -> Path:
    """Return a folder of wheels. Machines of the same kind share it, so it is collected only once."""
    folder = Path(tempfile.mkdtemp(prefix="kvasir-wheels-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    wheelhouse.fill(folder, requirements, target, wheel)
    return folder


def _apply_step(remote: Remote, step: DeployStep) -> None:
    remote.put(step.files, root=step.as_root)
    if step.script:
        remote.run_script(step.script)


def _print_step(step: DeployStep) -> None:
    for path, file in step.files.items():
        click.echo(f"--- {path} (mode {file.mode:o})")
        click.echo("(a secret)" if file.mode == SECRET else file.content.decode("utf-8", "replace"))
    if step.script:
        click.echo(f"$ {step.script}")
