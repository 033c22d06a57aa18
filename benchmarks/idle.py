"""What workers cost while there is nothing to do: two with both roles, two that decode, two that prefill.

    both_percent, decode_percent, prefill_percent    processor time of one such worker, in percent of one core
    broker_percent    of RabbitMQ, which answers how long its queues are (all RabbitMQs of this machine; null elsewhere)
    redis_percent     of Redis likewise

Engines are simulated, so an engine's own threads are left out. Nothing is submitted: what is measured are heartbeats,
looks at queues and registrations, and pika's loops. The figures depend on the machine; compare two versions in turn.
"""

import itertools
import os
import sys
import tempfile
import time
from collections.abc import Iterable
from pathlib import Path

from benchmarks import harness
from tests.support.processes import SIMULATED_MODEL, Cluster, ProcessRole

SETTLE_S = 8.0  # connections, the first looks
MEASURED_S, QUICK_MEASURED_S = 60.0, 10.0
ROLES: tuple[ProcessRole, ...] = ("both", "decode", "prefill")
MODELS = ("idle-a:1b", "idle-b:1b")


def cpu_s(pids: Iterable[int]) -> float:
    """Processor seconds that these processes have used (proc(5))."""
    fields = [Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split() for pid in pids]
    return sum(int(field[11]) + int(field[12]) for field in fields) / os.sysconf("SC_CLK_TCK")


def pids_of(program: str) -> list[int]:
    """The processes of this machine that run a program."""
    return [int(path.parent.name) for path in Path("/proc").glob("[0-9]*/comm") if program in path.read_text()]


def main() -> int:
    """Measure, print a line for each kind of process, and end with the line of JSON."""
    options = harness.options(__doc__)
    if sys.platform != "linux":
        raise SystemExit("processor time is read from /proc: Linux only")
    print(harness.machine())
    with harness.pair() as pair, tempfile.TemporaryDirectory() as name:
        models = dict.fromkeys(MODELS, SIMULATED_MODEL)
        with Cluster(Path(name), pair.broker_url, pair.store_url, models) as cluster:
            workers = {role: [cluster.launch(role, model) for model in MODELS] for role in ROLES}
            for worker in itertools.chain(*workers.values()):
                worker.wait_until_registered()
            time.sleep(SETTLE_S)
            groups = {role: [worker.pid for worker in workers[role]] for role in ROLES}
            groups |= {"broker": pids_of("beam.smp"), "redis": pids_of("redis-server")}
            before, start = {role: cpu_s(pids) for role, pids in groups.items()}, time.monotonic()
            time.sleep(QUICK_MEASURED_S if options.quick else MEASURED_S)
            seconds = time.monotonic() - start
            shares = {
                f"{role}_percent": 100 * (cpu_s(pids) - before[role]) / seconds / (len(MODELS) if role in ROLES else 1)
                if pids
                else None
                for role, pids in groups.items()
            }
    for key, share in shares.items():
        print(f"{key:16} {share if share is None else round(share, 1)}")
    harness.finish(**shares)
    return 0


if __name__ == "__main__":
    sys.exit(main())
