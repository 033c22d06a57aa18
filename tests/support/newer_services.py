"""RabbitMQ, Redis and Valkey of a newer Debian, for tests that start their services themselves (make test-services).

    python -m tests.support.newer_services                       the suites and fault rows below, on each pair in turn
    python -m tests.support.newer_services redis -- COMMAND…     one command over RabbitMQ and Redis of Debian 13
    python -m tests.support.newer_services valkey -- COMMAND…    and with Valkey in place of Redis

A Debian root is made once with debootstrap, in the cache folder. Small scripts, named as the programs, start what lies
in it; `KVASIR_TEST_PROGRAMS` puts them before all others. Linux, root.
"""

import contextlib
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import click

from tests.support import programs

SUITE = "trixie"
PACKAGES = ("rabbitmq-server", "redis-server", "valkey-server")
ROOT = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "kvasir" / "tests" / f"debian-{SUITE}"
SHARED = ("proc", "dev", "tmp")  # of this machine: the services' folders and sockets are where the tests put them
_RABBITMQ = "/usr/lib/rabbitmq/bin"
_COMMANDS = {
    **{name: f"{_RABBITMQ}/{name}" for name in ("rabbitmq-server", "rabbitmqctl", "rabbitmq-plugins")},
    "epmd": "/usr/bin/epmd",
}
_STORES = {"redis": "/usr/bin/redis-server", "valkey": "/usr/bin/valkey-server"}
SUITES = (
    "tests/contract",
    "tests/integration/test_rabbitmq_broker.py",
    "tests/integration/test_redis_store.py",
    "tests/integration/test_redis_cluster.py",
    "tests/integration/test_quick_jobs.py",
    "tests/integration/test_forgotten_consumer.py",
    "tests/integration/test_store_faults.py",
    "tests/acceptance/test_gateway.py",
    "tests/system/test_deploy_roles.py",
)
FAULT_ROWS = (
    *(
        "none",
        "decode-killed",
        "prefill-killed",
        "all-workers-killed",
        "workers-stopped",
        "workers-leave",
        "owner-killed",
    ),
    *("broker-restarted", "broker-killed", "memory-alarm", "decode-queue-deleted", "prefill-queue-purged"),
    *(
        "broker-cut",
        "broker-black-hole",
        "store-cut",
        "store-killed",
        "store-flushed",
        "store-full",
        "poison",
        "garbage",
    ),
)
FAULT_JOBS = 300
_SCRIPT = """#!/bin/sh
exec chroot {root} /bin/sh -c 'cd "$1" && shift && exec "$@"' sh "$PWD" {program} "$@"
"""


def make_root() -> None:
    """The root with its packages, if it isn't there. Raises CalledProcessError, ProgramMissing."""
    if (ROOT / "ready").exists():
        return
    debootstrap = programs.require("debootstrap")
    shutil.rmtree(ROOT, ignore_errors=True)
    ROOT.mkdir(parents=True)
    subprocess.run([debootstrap, "--variant=minbase", SUITE, ROOT], check=True)
    policy = ROOT / "usr" / "sbin" / "policy-rc.d"
    policy.write_text("#!/bin/sh\nexit 101\n")  # nothing that is installed is started
    policy.chmod(0o755)
    install = ["apt-get", "install", "-y", "-q", "--no-install-recommends", *PACKAGES]
    with _mounts("proc", "dev"):
        subprocess.run(["chroot", ROOT, *install], check=True, env=os.environ | {"DEBIAN_FRONTEND": "noninteractive"})
    (ROOT / "ready").touch()


def write_programs(store: str) -> Path:
    """A folder of scripts that start the root's programs; `redis-server` starts `store`'s."""
    folder = ROOT.with_name(f"{ROOT.name}-{store}")
    folder.mkdir(exist_ok=True)
    for name, program in {**_COMMANDS, "redis-server": _STORES[store]}.items():
        path = folder / name
        path.write_text(_SCRIPT.format(root=ROOT, program=program))
        path.chmod(0o755)
    return folder


@contextlib.contextmanager
def _mounts(*names: str) -> Iterator[None]:
    with contextlib.ExitStack() as stack:
        for name in names:
            target = ROOT / name
            subprocess.run(["mount", "--rbind", f"/{name}", target], check=True)
            subprocess.run(["mount", "--make-rslave", target], check=True)
            stack.callback(subprocess.run, ["umount", "--recursive", "--lazy", target], check=False)
        yield


def run(store: str, command: Sequence[str]) -> int:
    """Run a command over the newer services; its exit status."""
    with _mounts(*SHARED):
        environment = os.environ | {"KVASIR_TEST_PROGRAMS": str(write_programs(store))}
        return subprocess.run(command, env=environment, check=False).returncode


def run_all() -> int:
    """Every suite and row on every pair of services; 1 if anything failed."""
    suites = ["-m", "pytest", "-q", "-m", "not torch and not vllm", *SUITES]
    rows = ["-m", "benchmarks.faults", "--jobs", str(FAULT_JOBS), *(f"--fault={name}" for name in FAULT_ROWS)]
    statuses = [run(store, [sys.executable, *arguments]) for store in _STORES for arguments in (suites, rows)]
    return int(any(statuses))


def main(arguments: Sequence[str]) -> int:
    """Run the command that is named after `--`, or everything; its exit status."""
    store, separator, *command = arguments if len(arguments) > 2 else ("", "")
    if arguments and (store not in _STORES or separator != "--"):
        click.echo(__doc__, err=True)
        return 2
    if sys.platform != "linux" or os.geteuid():
        click.echo("newer services need Linux and root: they run in a Debian root of their own", err=True)
        return 2
    make_root()
    return run(store, command) if command else run_all()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
