"""The steps of a deployment on one machine, as data: --dry-run shows them, otherwise they are carried out. Pure
functions."""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from infra.config.schema import Supervisor
from infra.config.urls import mask
from infra.deploy.remote import RemoteFile
from infra.deploy.units import Place, Unit, control, unit_file

Switch = Literal["start", "stop", "restart"]

READY_S = 600  # a model of 120 GB takes minutes to load
SECRET = 0o600
_FOLDERS = ("releases", "wheelhouse", "secrets", "services", "env", "log", "run")


@dataclass(frozen=True, slots=True)
class DeployStep:
    """A shell script, or files to write, or both. Files are written first."""

    says: str
    script: str = ""
    files: Mapping[str, RemoteFile] = field(default_factory=dict)
    as_root: bool = False  # whether to write the files with sudo


def prepare(place: Place) -> list[DeployStep]:
    """Create the folders. Only their owner can read secrets. A unit may write to .cache in the home folder, but can't
    create it."""
    cache = f"{place.home}/.cache"
    folders = " ".join(shlex.quote(path) for path in (*(f"{place.folder}/{name}" for name in _FOLDERS), cache))
    secrets = shlex.quote(f"{place.folder}/secrets")
    return [DeployStep(f"make {place.folder}", f"mkdir -p {folders}; chmod 700 {secrets}")]


def install(place: Place, python: str, release: str, requirements: Sequence[str]) -> list[DeployStep]:
    """Install a release beside the one in use, only from the wheelhouse. Does nothing if it is already installed."""
    final = shlex.quote(f"{place.folder}/releases/{release}")
    arguments = " ".join(shlex.quote(_wheel_on_machine(place, requirement)) for requirement in requirements)
    # It is created in place, because a virtual environment can't be moved. It counts as complete only after the mark is
    # set.
    script = (
        f"[ -e {final}/complete ] || {{ rm -rf {final}; {shlex.quote(python)} -m venv {final}; "
        f"{final}/bin/python -m pip install --quiet --disable-pip-version-check --no-index "
        f"--find-links {shlex.quote(place.folder + '/wheelhouse')} {arguments}; touch {final}/complete; }}"
    )
    return [DeployStep(f"install release {release}", script)]


def _wheel_on_machine(place: Place, requirement: str) -> str:
    """The requirement, with the wheel's path on the machine."""
    path, bracket, extras = requirement.partition("[")
    return f"{place.folder}/wheelhouse/{Path(path).name}{bracket}{extras}" if path.endswith(".whl") else requirement


def use(place: Place, release: str) -> list[DeployStep]:
    """Make this release the current one, which each worker uses from its next start. The three newest releases are
    kept."""
    folder = shlex.quote(place.folder)
    keep = f'ls -1t {folder}/releases | tail -n +4 | while read -r old; do rm -rf {folder}/releases/"$old"; done'
    return [
        DeployStep(
            f"use release {release}", f"ln -sfn releases/{release} {folder}/current; touch {folder}/current; {keep}"
        )
    ]


def write(says: str, place: Place, config: str, secrets: Mapping[str, bytes]) -> DeployStep:
    """Write the configuration, and secrets that only their owner can read. A configuration whose comments hold a
    password is protected too."""
    private = any(mask(line) != line for line in config.splitlines())
    files = {f"{place.folder}/kvasir.toml": RemoteFile(config.encode(), SECRET if private else 0o644)}
    files |= {f"{place.folder}/secrets/{name}": RemoteFile(content, SECRET) for name, content in secrets.items()}
    return DeployStep(says, files=files)


def key_files(place: Place, units: Sequence[Unit]) -> list[DeployStep]:
    """Create a file of API keys for each gateway. It is empty at first, and admits nobody until a key is added."""
    steps = []
    for unit in units:
        if unit.role == "producer":
            state = f"{place.folder}/{unit.name.removeprefix('kvasir-')}"
            folder = shlex.quote(state)
            script = f"umask 077; mkdir -p {folder}; [ -e {folder}/keys.json ] || echo '[]' > {folder}/keys.json"
            add = f"{place.folder}/current/bin/kvasir keys add NAME --state {state}"
            steps.append(DeployStep(f"keep the gateway's API keys in {state}; there, {add} makes one", script))
    return steps


def forget(place: Place, names: Sequence[str]) -> list[DeployStep]:
    """Delete passwords that nothing on the machine needs any more."""
    paths = " ".join(shlex.quote(f"{place.folder}/secrets/{name}") for name in names)
    return [DeployStep(f"delete what is left of secrets/{', secrets/'.join(names)}", f"rm -f {paths}")] if names else []


def register(place: Place, supervisor: Supervisor, units: Sequence[Unit]) -> list[DeployStep]:
    """Write the supervisor's files, and register them."""
    unit_files = dict(unit_file(supervisor, unit, place) for unit in units)
    files = {path: RemoteFile(text.encode()) for path, text in unit_files.items()}
    enable = "; ".join(control(supervisor, "enable", unit, place) for unit in units)
    return [DeployStep(f"write {len(units)} unit(s) for {supervisor}", enable, files, supervisor != "plain")]


def switch(place: Place, supervisor: Supervisor, units: Sequence[Unit], verb: Switch) -> list[DeployStep]:
    """Start or stop workers one after the other, waiting for each."""
    steps = []
    for unit in units:
        if verb in ("stop", "restart"):
            says = f"stop {unit.name}, when it has finished what it holds"
            steps.append(DeployStep(says, control(supervisor, "stop", unit, place)))
        if verb in ("start", "restart"):
            steps.append(DeployStep(f"start {unit.name}", control(supervisor, "start", unit, place)))
            steps.append(DeployStep(f"wait until {unit.name} is ready", wait_ready(place, unit)))
    return steps


def wait_ready(place: Place, unit: Unit, timeout_s: int = READY_S) -> str:
    """A script that ends when the unit is ready (see Unit), or fails with the unit's answer."""
    path = "health" if unit.role == "producer" else "ready"
    host = f"[{unit.host}]" if ":" in unit.host else unit.host
    attempt = f"urllib.request.urlopen('http://{host}:{unit.port}/{path}',timeout=5)"
    if unit.role is None:
        attempt = f"socket.create_connection(({unit.host!r},{unit.port}),5).close()"
    program = (
        "import socket,sys,time,urllib.request,urllib.error\n"
        f"end=time.monotonic()+{timeout_s}\n"
        "while True:\n"
        f" try: {attempt}; break\n"
        " except urllib.error.HTTPError as e: why=e.read(300).decode('utf-8','replace').strip()\n"
        " except OSError as e: why=str(e)\n"
        f" if time.monotonic()>end: sys.exit('{unit.name} is not ready: '+why)\n"
        " time.sleep(0.5)\n"
    )
    return f"{shlex.quote(place.python)} -c {shlex.quote(program)}"


def status(place: Place, units: Sequence[Unit]) -> str:
    """A script that prints each unit's name and whether it is ready now."""
    checks = [f"({wait_ready(place, unit, 0)}) >/dev/null 2>&1 && r=ready || r='not ready'" for unit in units]
    return "; ".join(f'{check}; echo "{unit.name} $r"' for check, unit in zip(checks, units, strict=True)) or "true"
