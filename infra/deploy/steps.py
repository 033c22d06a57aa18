"""The steps of a deployment on one machine, as data: --dry-run prints them, otherwise they are carried out.

Nothing here has side effects.
"""

import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

from infra.config.schema import Supervisor
from infra.config.urls import mask
from infra.deploy.remote import SECRET, RemoteFile
from infra.deploy.units import Place, Unit, control, unit_file

Switch = Literal["start", "stop", "restart"]

READY_S = 600  # a model of 120 GB takes minutes to load
_FOLDERS = ("releases", "wheelhouse", "secrets", "services", "env", "log", "run")


@dataclass(frozen=True, slots=True)
class DeployStep:
    """Files to write, a shell script, or both. The files are written first."""

    says: str
    script: str = ""
    files: Mapping[str, RemoteFile] = field(default_factory=dict)
    as_root: bool = False  # whether the files are written with sudo


def prepare(place: Place) -> list[DeployStep]:
    """Return the step that makes the folders. Only their owner can read secrets.

    It also makes the home's .cache, which a unit may write to but can't create.
    """
    cache = f"{place.home}/.cache"
    folders = " ".join(shlex.quote(path) for path in (*(f"{place.folder}/{name}" for name in _FOLDERS), cache))
    secrets = shlex.quote(f"{place.folder}/secrets")
    return [DeployStep(f"make {place.folder}", f"mkdir -p {folders}; chmod 700 {secrets}")]


def install(place: Place, python: str, release: str, requirements: Sequence[str]) -> list[DeployStep]:
    """Return the step that installs a release beside the one in use, from the wheelhouse only, unless it is there."""
    final = shlex.quote(f"{place.folder}/releases/{release}")
    arguments = " ".join(shlex.quote(_wheel_on_machine(place, requirement)) for requirement in requirements)
    # The release is installed in its final place, because a virtual environment can't be moved. When the installation
    # is complete, the file `complete` marks it.
    script = (
        f"[ -e {final}/complete ] || {{ rm -rf {final}; {shlex.quote(python)} -m venv {final}; "
        f"{final}/bin/python -m pip install --quiet --disable-pip-version-check --no-index "
        f"--find-links {shlex.quote(place.folder + '/wheelhouse')} {arguments}; touch {final}/complete; }}"
    )
    return [DeployStep(f"install release {release}", script)]


def _wheel_on_machine(place: Place, requirement: str) -> str:
    """Return the requirement with the path that the wheel has on the machine."""
    path, bracket, extras = requirement.partition("[")
    return f"{place.folder}/wheelhouse/{Path(path).name}{bracket}{extras}" if path.endswith(".whl") else requirement


def use(place: Place, release: str) -> list[DeployStep]:
    """Return the step that makes a release the one in use, from each worker's next start on.

    The three newest releases are kept.
    """
    folder = shlex.quote(place.folder)
    keep = f'ls -1t {folder}/releases | tail -n +4 | while read -r old; do rm -rf {folder}/releases/"$old"; done'
    return [
        DeployStep(
            f"use release {release}", f"ln -sfn releases/{release} {folder}/current; touch {folder}/current; {keep}"
        )
    ]


def write(says: str, place: Place, config: str, secrets: Mapping[str, bytes]) -> DeployStep:
    """Return the step that writes the configuration and the secrets.

    Only their owner can read the secrets, and the configuration if a comment in it contains a password.
    """
    private = any(mask(line) != line for line in config.splitlines())
    files = {f"{place.folder}/kvasir.toml": RemoteFile(config.encode(), SECRET if private else 0o644)}
    files |= {f"{place.folder}/secrets/{name}": RemoteFile(content, SECRET) for name, content in secrets.items()}
    return DeployStep(says, files=files)


def key_files(place: Place, units: Sequence[Unit]) -> list[DeployStep]:
    """Return steps that make an empty file of API keys for each gateway.

    Until a key is added, the gateway admits nobody.
    """
    steps = []
    for unit in units:
        if unit.role == "producer":
            state = f"{place.folder}/{unit.name.removeprefix('kvasir-')}"
            folder = shlex.quote(state)
            script = f"umask 077; mkdir -p {folder}; [ -e {folder}/keys.json ] || echo '[]' > {folder}/keys.json"
            add = f"{place.folder}/current/bin/kvasir keys add NAME --state {state}"
            steps.append(DeployStep(f"keep the gateway's API keys in {state}; {add} adds one there", script))
    return steps


def forget(place: Place, names: Sequence[str]) -> list[DeployStep]:
    """Return the step that deletes passwords that the machine no longer needs."""
    paths = " ".join(shlex.quote(f"{place.folder}/secrets/{name}") for name in names)
    return [DeployStep(f"delete secrets/{', secrets/'.join(names)}", f"rm -f {paths}")] if names else []


def register(place: Place, supervisor: Supervisor, units: Sequence[Unit]) -> list[DeployStep]:
    """Return the step that writes the supervisor's files and makes the supervisor read them."""
    unit_files = dict(unit_file(supervisor, unit, place) for unit in units)
    files = {path: RemoteFile(text.encode()) for path, text in unit_files.items()}
    enable = "; ".join(control(supervisor, "enable", unit, place) for unit in units)
    return [DeployStep(f"write {len(units)} unit(s) for {supervisor}", enable, files, supervisor != "plain")]


def switch(place: Place, supervisor: Supervisor, units: Sequence[Unit], verb: Switch) -> list[DeployStep]:
    """Return steps that start or stop workers one after the other, and wait for each."""
    steps = []
    for unit in units:
        if verb in ("stop", "restart"):
            says = f"stop {unit.name} when it has finished its jobs"
            steps.append(DeployStep(says, control(supervisor, "stop", unit, place)))
        if verb in ("start", "restart"):
            steps += [
                DeployStep(f"start {unit.name}", control(supervisor, "start", unit, place)),
                DeployStep(f"wait until {unit.name} is ready", wait_ready(place, unit)),
            ]
    return steps


def wait_ready(place: Place, unit: Unit, timeout_s: int = READY_S) -> str:
    """Return a script that ends when the unit is ready (see Unit), or fails with the unit's last answer."""
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
    """Return a script that prints each unit's name and whether it is ready now."""
    checks = [f"({wait_ready(place, unit, 0)}) >/dev/null 2>&1 && r=ready || r='not ready'" for unit in units]
    return "; ".join(f'{check}; echo "{unit.name} $r"' for check, unit in zip(checks, units, strict=True)) or "true"
