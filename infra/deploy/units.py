"""The processes that a machine keeps running, and the files for systemd, launchd or our own supervisor.

A unit is one process: a worker or a service. Everything is in one folder of one user: `current` (a link to the release
in use), `releases`, `wheelhouse`, `kvasir.toml`, `secrets`, `services`, `env`, `log`, `run`. Nothing here has side
effects.
"""

import plistlib
import re
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from ipaddress import ip_address
from typing import Literal, cast

from infra.config.schema import CONTROL, WORKER_ROLES, Supervisor
from infra.config.settings import MachineRole, MachineSettings
from messages.errors import ConfigError

UnitRole = Literal["prefill", "decode", "worker", "producer"]  # a unit logs in to the broker as the user of its role

LOOPBACK = "127.0.0.1"
# A worker that is asked to stop has this many seconds to finish its jobs, because a long answer takes minutes. Jobs
# that are not finished by then are handed back.
GRACE_S = 600.0
_STOP_MARGIN_S = 30.0
_KVASIR = ("{folder}/current/bin/kvasir", "--config", "kvasir.toml", "--log-style", "json", "--log-level", "info")
_UNSAFE = re.compile(r"[^a-z0-9]+")
# Two kinds of options are left out. PrivateDevices, DevicePolicy, DeviceAllow, and ProtectClock (which implies
# DeviceAllow) would hide the GPUs: /dev/nvidia*, /dev/dri, /dev/kfd. MemoryDenyWriteExecute would make CUDA and PyTorch
# fail, because they compile kernels at run time.
#
# ProtectHome can't be stricter than read-only, because the home contains weights, vLLM's environment and often Python
# itself.
_SANDBOX = """\
NoNewPrivileges=true
CapabilityBoundingSet=
ProtectSystem=strict
ProtectHome=read-only
PrivateTmp=true
ProtectProc=invisible
ProtectHostname=true
ProtectControlGroups=true
ProtectKernelLogs=true
ProtectKernelModules=true
ProtectKernelTunables=true
RestrictAddressFamilies=AF_UNIX AF_INET AF_INET6 AF_NETLINK
RestrictNamespaces=true
RestrictRealtime=true
RestrictSUIDSGID=true
LockPersonality=true
SystemCallArchitectures=native
SystemCallFilter=@system-service
SystemCallErrorNumber=EPERM
UMask=0077
# A unit that leaks memory is ended and started again before the machine runs out of it.
MemoryMax=90%
"""
# Units can write only to Kvasir's folder and to ~/.cache (models from a hub, and code that vLLM compiles). These
# variables move all other caches into Kvasir's folder.
_CACHES = {"CUDA_CACHE_PATH": "cache/cuda", "TRITON_CACHE_DIR": "cache/triton", "VLLM_CONFIG_ROOT": "cache/vllm"}


@dataclass(frozen=True, slots=True)
class Unit:
    """A process that a machine keeps running. In `words`, {folder} stands for the machine's folder.

    A worker is ready when `http://HOST:PORT/ready` answers 200. A gateway is ready when `/health` does, since it may
    start before its workers. A service is ready when PORT accepts connections.
    """

    name: str
    says: str  # a description for people
    words: tuple[str, ...]
    port: int
    host: str = LOOPBACK
    environment: tuple[tuple[str, str], ...] = ()  # variables that are added to the machine's environment
    role: UnitRole | None = None  # None for a service, which has no HTTP page

    def command(self, place: "Place") -> list[str]:
        """Return the command as it is run on the machine."""
        return [word.replace("{folder}", place.folder) for word in self.words]

    def variables(self, place: "Place") -> dict[str, str]:
        """Return its environment on the machine. It contains no secrets, because every user can read unit files."""
        variables = {name: value.replace("{folder}", place.folder) for name, value in self.environment}
        return {"PYTHONUNBUFFERED": "1", **place.environment, **variables}


@dataclass(frozen=True, slots=True)
class Place:
    """Where Kvasir is on a machine, in absolute paths of that machine."""

    home: str
    user: str
    folder: str
    # The environment of every unit; it contains no secrets.
    environment: Mapping[str, str] = field(default_factory=dict)

    @property
    def python(self) -> str:
        """The interpreter of the release in use."""
        return f"{self.folder}/current/bin/python"


def units_of(machine: MachineSettings) -> list[Unit]:
    """Return the workers of a machine, in the order of its roles, and then its gateways."""
    roles = [role for role in machine.roles if role.role in WORKER_ROLES]
    gateways = [role for role in machine.roles if role.role == "gateway"]
    name_counts: dict[str, int] = {}
    units = []
    for index, role in enumerate(roles):
        name = f"kvasir-{role.role}-{_UNSAFE.sub('-', role.model.lower()).strip('-')}"
        name_counts[name] = name_counts.get(name, 0) + 1
        name = name if name_counts[name] == 1 else f"{name}-{name_counts[name]}"
        units.append(_worker(name, role, machine.metrics_port + index, _page_host(machine), machine.hours))
    return units + [
        _gateway(role.port, machine.metrics_port + index, _page_host(machine))
        for index, role in enumerate(gateways, len(roles))
    ]


def _gateway(port: int, page: int, host: str) -> Unit:
    words = [*_KVASIR, "serve", "--host", host, "--port", str(port), "--state", f"{{folder}}/gateway-{port}"]
    words += ["--metrics-port", str(page), "--metrics-host", host]
    return Unit(f"kvasir-gateway-{port}", f"gateway at port {port}", tuple(words), page, host, role="producer")


def _worker(name: str, role: MachineRole, port: int, host: str, hours: str) -> Unit:
    command = "worker" if role.role == "worker" else f"{role.role}-worker"
    words = [*_KVASIR, command, "--model", role.model, "--engine", role.engine]
    words += ["--weights", role.weights] if role.weights else []
    words += ["--slots", str(role.slots)] if role.slots and "decode" in role.stages else []
    words += ["--hours", hours] if hours else []
    words += ["--grace", f"{GRACE_S:.0f}", "--metrics-port", str(port), "--metrics-host", host]
    unit_role: UnitRole = "worker" if role.role == "worker" else role.stages[0]
    return Unit(name, f"{role.kind} for {role.model}", tuple(words), port, host, role=unit_role)


def _page_host(machine: MachineSettings) -> str:
    """Return the address of its workers' pages: the configured one, or the loopback address if that is a name."""
    try:
        return str(ip_address(machine.host))
    except ValueError:
        return LOOPBACK


def supervisor_of(machine: MachineSettings) -> Supervisor:
    """Return the configured supervisor, or the platform's default."""
    return cast(Supervisor, machine.supervisor) or ("launchd" if machine.platform == "macos" else "systemd")


def unit_file(supervisor: Supervisor, unit: Unit, place: Place) -> tuple[str, str]:
    """Return (path on the machine, text) of the file that makes the supervisor keep a unit running.

    Raises ConfigError for a value with control characters, which could add lines to the file.
    """
    words = (place.user, place.home, place.folder, unit.says, *unit.command(place), *unit.variables(place).values())
    for value in words:
        if CONTROL.search(value):
            raise ConfigError(
                f"{unit.name}: a unit can't contain a line break or another control character: {value!r:.80}"
            )
    if supervisor == "systemd":
        return f"/etc/systemd/system/{unit.name}.service", _systemd(unit, place)
    if supervisor == "launchd":
        return f"/Library/LaunchDaemons/{label(unit)}.plist", _launchd(unit, place)
    return f"{place.folder}/env/{unit.name}.sh", _plain(unit, place)


def label(unit: Unit) -> str:
    """Return launchd's name for a unit."""
    return f"org.kvasir.{unit.name.removeprefix('kvasir-')}"


def control(supervisor: Supervisor, verb: Literal["start", "stop", "enable"], unit: Unit, place: Place) -> str:
    """Return a shell command that starts, stops or enables a unit.

    `enable` makes the supervisor read a new or changed unit file. Stopping waits until the worker has ended.
    """
    path = shlex.quote(unit_file(supervisor, unit, place)[0])
    if supervisor == "systemd":
        if verb == "enable":
            return f"sudo -n systemctl daemon-reload && sudo -n systemctl enable --quiet {unit.name}"
        return f"sudo -n systemctl {verb} {unit.name}"
    if supervisor == "launchd":
        target = f"system/{label(unit)}"
        is_loaded = f"sudo -n launchctl print {target} >/dev/null 2>&1"
        return {
            "enable": f"sudo -n launchctl enable {target}",
            "start": f"{is_loaded} || sudo -n launchctl bootstrap system {path}",
            # `launchctl bootout` returns before the process has ended, so the script waits for its end.
            "stop": f"! {is_loaded} || {{ sudo -n launchctl bootout {target}; while {is_loaded}; do sleep 1; done; }}",
        }[verb]
    return "true" if verb == "enable" else f"sh {path} {verb}"


def _systemd(unit: Unit, place: Place) -> str:
    # systemd expands variables only in commands, so $ is escaped only here.
    command = " ".join(_quoted_for_systemd(word).replace("$", "$$") for word in unit.command(place))
    variables = {name: f"{place.folder}/{path}" for name, path in _CACHES.items()} | unit.variables(place)
    environment = "".join(f"Environment={_quoted_for_systemd(f'{k}={v}')}\n" for k, v in variables.items())
    written = " ".join(_quoted_for_systemd(path) for path in (place.folder, f"-{place.home}/.cache"))
    hidden = " ".join(_quoted_for_systemd(f"-{place.home}/{name}") for name in (".ssh", ".gnupg", ".aws"))
    return (
        f"[Unit]\nDescription=Kvasir {_percent(unit.says)}\n"
        "Wants=network-online.target\nAfter=network-online.target\n"
        "# No limit on restarts: the broker may be away for longer than any limit.\nStartLimitIntervalSec=0\n\n"
        f"[Service]\nUser={place.user}\nWorkingDirectory={_percent(place.folder)}\n{environment}"
        f"ExecStart={command}\n"
        "Restart=always\nRestartSec=2\n"
        "# The worker asks for systemd's watchdog itself, which restarts it when it hangs.\nNotifyAccess=main\n"
        "# On SIGTERM it finishes its jobs, and hands back those that take longer.\n"
        f"KillSignal=SIGTERM\nTimeoutStopSec={GRACE_S + _STOP_MARGIN_S:.0f}\n"
        f"{_SANDBOX}ReadWritePaths={written}\nInaccessiblePaths={hidden}\n\n"
        "[Install]\nWantedBy=multi-user.target\n"
    )


def _launchd(unit: Unit, place: Place) -> str:
    # The unit is a launchd daemon, not an agent, because macOS keeps an agent off the local network until the user
    # agrees, and logs nothing about that.
    log = f"{place.folder}/log/{unit.name}.log"
    entries = {
        "Label": label(unit),
        "ProgramArguments": unit.command(place),
        "UserName": place.user,
        "WorkingDirectory": place.folder,
        "EnvironmentVariables": unit.variables(place),
        "RunAtLoad": True,
        "KeepAlive": True,
        "ThrottleInterval": 5,
        "ExitTimeOut": int(GRACE_S + _STOP_MARGIN_S),
        "ProcessType": "Interactive",  # other process types get fewer CPU cores and slower disk access
        "StandardOutPath": log,
        "StandardErrorPath": log,
    }
    return plistlib.dumps(entries, sort_keys=False).decode()


def _plain(unit: Unit, place: Place) -> str:
    run, log = f"{place.folder}/run/{unit.name}", f"{place.folder}/log/{unit.name}.log"
    environment = "".join(f"export {key}={shlex.quote(value)}\n" for key, value in unit.variables(place).items())
    command = shlex.join(unit.command(place))
    supervise = f"{shlex.quote(place.python)} -m infra.deploy.supervise"
    return (
        f"#!/bin/sh\n# Kvasir {unit.says}: start | stop | status\nset -eu\n"
        f"cd {shlex.quote(place.folder)}\n{environment}"
        f'exec {supervise} "$1" {shlex.quote(run)} {shlex.quote(log)} -- {command}\n'
    )


def _quoted_for_systemd(word: str) -> str:
    if re.fullmatch(r"[A-Za-z0-9_./:=@,+-]+", word):
        return word
    text = word.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{_percent(text)}"'


def _percent(text: str) -> str:
    """Escape %, which begins a specifier in systemd's files."""
    return text.replace("%", "%%")
