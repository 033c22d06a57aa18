"""A machine to deploy to: what it reports about itself, and where Kvasir is on it."""

import getpass
from dataclasses import dataclass

from infra.config.settings import MachineSettings
from infra.deploy.remote import DeployFailed, Remote
from infra.deploy.units import Place
from infra.deploy.wheelhouse import WheelTarget, system_of

# systemd and launchd don't read a login shell's profile, so PATH is set explicitly.
_PATHS = {
    "macos": "/opt/homebrew/bin:/opt/homebrew/sbin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
    "linux-cuda": "/usr/local/cuda/bin:/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
    "linux": "/usr/local/bin:/usr/bin:/bin:/usr/sbin:/sbin",
}
_OLDEST_PYTHON = (3, 11)
# This script finds the first Python that is new enough and can create a virtual environment.
_PROBE = """
export PATH="$PATH:/opt/homebrew/bin:/usr/local/bin"
for p in python3.13 python3.12 python3.11 python3; do
  if found=$(command -v "$p") && version=$("$found" -c 'import ensurepip, venv, sys
print("%d.%d.%d" % sys.version_info[:3]) if sys.version_info >= (3, 11) else sys.exit(1)' 2>/dev/null); then
    break
  fi
  found=; version=
done
echo "$HOME"; id -un; uname -s; uname -m; echo "$version"; echo "$found"
"""


@dataclass(frozen=True, slots=True)
class Facts:
    """What a machine reports. `python` is the path of the interpreter that creates environments."""

    home: str
    user: str
    target: WheelTarget
    python: str


def probe(remote: Remote) -> Facts:
    """Ask the machine for its facts. Raises DeployFailed if it can't be reached, or has no suitable Python."""
    lines = remote.run_script(_PROBE, timeout_s=60).splitlines()
    home, user, system, processor, version, python = (*lines, "", "", "", "", "", "")[:6]
    if not version:
        raise DeployFailed(
            f"{remote.name}: there is no Python {'.'.join(map(str, _OLDEST_PYTHON))} or newer with venv; install one "
            "(apt install python3-venv, brew install python@3.12)"
        )
    return Facts(home, user, WheelTarget(system_of(system), processor, version), python)


def default_facts(machine: MachineSettings) -> Facts:
    """Return the facts that a dry run assumes about a machine."""
    user = machine.user or getpass.getuser()
    mac = machine.platform == "macos"
    home = f"/{'Users' if mac else 'home'}/{user}"
    target = WheelTarget("macos" if mac else "linux", "arm64" if mac else "aarch64", "3.11")
    return Facts(home, user, target, "python3")


def place_of(machine: MachineSettings, facts: Facts) -> Place:
    """Return Kvasir's place on the machine."""
    folder = machine.folder if machine.folder.startswith("/") else f"{facts.home}/{machine.folder}"
    return Place(facts.home, facts.user, folder, {"PATH": _PATHS[machine.platform]})
