"""The system programs that tests need: found, installed where that is ours to do, or asked for in one command.

`python -m tests.support.programs rabbitmq redis` makes sure of them from a shell.
"""

import contextlib
import fcntl
import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import click


class ProgramMissing(RuntimeError):
    """A program is not on this machine; the message is the command that installs it."""


@dataclass(frozen=True, slots=True)
class Program:
    """An executable, and the packages that bring it."""

    executable: str
    apt: str
    brew: str
    description: str


PROGRAMS = {
    "rabbitmq": Program("rabbitmq-server", "rabbitmq-server", "rabbitmq", "RabbitMQ"),
    "redis": Program("redis-server", "redis-server", "redis", "Redis"),
    "prometheus": Program("prometheus", "prometheus", "prometheus", "Prometheus"),
    "redis-exporter": Program(
        "prometheus-redis-exporter", "prometheus-redis-exporter", "redis_exporter", "the Redis exporter"
    ),
    "sshd": Program("sshd", "openssh-server", "openssh", "the OpenSSH server"),
    "systemd": Program("systemd-analyze", "systemd", "", "systemd, for checking unit files"),
    "iproute2": Program("ip", "iproute2", "", "iproute2"),
    "gcc": Program("gcc", "gcc libc6-dev", "gcc", "a C compiler"),
    "iperf3": Program("iperf3", "iperf3", "iperf3", "iperf3"),
    "faketime": Program("faketime", "faketime", "libfaketime", "faketime"),
    "debootstrap": Program("debootstrap", "debootstrap", "", "debootstrap"),
    "chromium": Program("chromium", "chromium", "--cask chromium", "the Chromium browser"),
}

# Debian's RabbitMQ wrapper in PATH drops its arguments for an ordinary user, and as root changes the user: what it
# wraps comes first. Homebrew keeps RabbitMQ in `sbin`, which is often outside PATH.
_FIRST = ("/usr/lib/rabbitmq/bin",)
_LAST = ("/opt/homebrew/sbin", "/opt/homebrew/bin", "/usr/local/sbin", "/usr/local/bin", "/usr/sbin", "/sbin")
_POLICY = Path("/usr/sbin/policy-rc.d")


def search_path() -> str:
    """PATH with the folders that package managers use and shells forget; first that of KVASIR_TEST_PROGRAMS."""
    chosen = filter(None, [os.environ.get("KVASIR_TEST_PROGRAMS")])
    return os.pathsep.join([*chosen, *_FIRST, os.environ.get("PATH", os.defpath), *_LAST])


def find(executable: str) -> str | None:
    """Where the executable is, or None."""
    return shutil.which(executable, path=search_path())


def require(name: str) -> str:
    """Path of a program of PROGRAMS; installs its Debian package first if we are root or in CI.

    Raises ProgramMissing with the one command that a person has to type.
    """
    program = PROGRAMS[name]
    path = find(program.executable)
    if path is None and shutil.which("apt-get") and (os.geteuid() == 0 or os.environ.get("CI")):
        with _one_at_a_time():
            path = find(program.executable)  # another process may have brought it meanwhile
            if path is None:
                _apt_install(program)
                path = find(program.executable)
    if path is None:
        raise ProgramMissing(f"{program.description} is not installed. Install it with:\n\n    {_command(program)}\n")
    return path


def compiled(source: Path, *flags: str) -> Path:
    """What gcc makes of a C file, made once for this source. Raises ProgramMissing."""
    digest = hashlib.sha256(source.read_bytes()).hexdigest()[:16]
    folder = Path(tempfile.gettempdir()) / f"kvasir-compiled-{os.getuid()}"
    folder.mkdir(mode=0o700, exist_ok=True)
    path = folder / digest
    if not path.exists():
        unfinished = path.with_suffix(f".{os.getpid()}")
        subprocess.run([require("gcc"), "-O2", *flags, "-o", unfinished, source], check=True)
        unfinished.replace(path)
    return path


def _command(program: Program) -> str:
    if sys.platform == "darwin":
        return f"brew install {program.brew}"
    sudo = "" if os.geteuid() == 0 else "sudo "
    return f"{sudo}apt-get update && {sudo}apt-get install --no-install-recommends {program.apt}"


def _apt_install(program: Program) -> None:
    click.echo(f"installing Debian packages {program.apt}", err=True)
    environment = os.environ | {"DEBIAN_FRONTEND": "noninteractive"}
    install = ["apt-get", "install", "-y", "-q", "--no-install-recommends", *program.apt.split()]
    with _services_stay_off():
        for command in (["apt-get", "update", "-q"], install):
            # Somebody else's installation may be under way: wait for its lock.
            completed_process = subprocess.run(
                [*command, "-o", "DPkg::Lock::Timeout=300"],
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            if completed_process.returncode:
                tail = "\n".join(completed_process.stdout.splitlines()[-15:])
                raise ProgramMissing(f"{' '.join(command)} failed:\n{tail}\n\nTry: {_command(program)}")


@contextlib.contextmanager
def _one_at_a_time() -> Iterator[None]:
    """Hold the installer's lock among test processes: apt waits for nobody while it updates its lists."""
    with open(Path(tempfile.gettempdir()) / f"kvasir-apt-{os.getuid()}.lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


@contextlib.contextmanager
def _services_stay_off() -> Iterator[None]:
    """Keep Debian from starting the service of a package that it installs; ours run privately, on other ports."""
    if os.geteuid() != 0 or _POLICY.exists():
        yield
        return
    _POLICY.write_text("#!/bin/sh\nexit 101\n")  # 101: action forbidden by policy
    _POLICY.chmod(0o755)
    try:
        yield
    finally:
        _POLICY.unlink(missing_ok=True)


def main(names: list[str]) -> int:
    """Make sure of the named programs; prints what to do about the first that is missing."""
    try:
        for name in names:
            require(name)
    except ProgramMissing as error:
        click.echo(error, err=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
