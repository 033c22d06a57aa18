"""What workers cost while there is nothing to do: two with both roles, two that decode, two that prefill.

    both_percent, decode_percent, prefill_percent    processor time of one such worker, in percent of one core
    broker_percent    of RabbitMQ, which answers how long its queues are (all RabbitMQs of this machine; 0: elsewhere)
    redis_percent     of Redis likewise

Engines are simulated, so an engine's own threads are left out. Nothing is submitted: what is measured are heartbeats,
looks at queues and registrations, and pika's loops. The figures depend on the machine; compare two versions in turn.
"""

import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from benchmarks import harness
from tests.support.processes import SIMULATED_MODEL, Cluster, ProcessRole

SETTLE_S = 8.0  # connections, the first looks
MEASURED_S, QUICK_MEASURED_S = 60.0, 10.0
ROLES: tuple[ProcessRole, ...] = ("both", "decode", "prefill")
MODELS = ("idle-a:1b", "idle-b:1b")


def cpu_s(workers: dict[int, str]) -> Counter[str]:
    """Processor seconds so far of the workers (pid -> role), of RabbitMQ and of Redis, by the keys of the figures."""
    services = {"beam.smp": "broker", "redis-server": "redis"}
    seconds: Counter[str] = Counter()
    for process in harness.processes():
        seconds[workers.get(process.pid) or services.get(process.name, "others")] += process.cpu_s
    return seconds


def main() -> int:
    """Measure, print a line for each kind of process, and end with the line of JSON."""
    options = harness.options(__doc__)
    if sys.platform != "linux":
        raise SystemExit("processor time is read from /proc: Linux only")
    print(harness.machine())
    with harness.pair() as pair, tempfile.TemporaryDirectory() as name:
        models = dict.fromkeys(MODELS, SIMULATED_MODEL)
        with Cluster(Path(name), pair.broker_url, pair.store_url, models) as cluster:
            launched = [(role, cluster.launch(role, model)) for role in ROLES for model in MODELS]
            for _, worker in launched:
                worker.wait_until_registered()
            workers = {worker.pid: role for role, worker in launched}
            time.sleep(SETTLE_S)
            before, start = cpu_s(workers), time.monotonic()
            time.sleep(QUICK_MEASURED_S if options.quick else MEASURED_S)
            used, seconds = cpu_s(workers), time.monotonic() - start
    counts = Counter(workers.values())
    shares = {
        f"{name}_percent": 100 * (used[name] - before[name]) / seconds / counts.get(name, 1)
        for name in (*ROLES, "broker", "redis")
    }
    for key, share in shares.items():
        print(f"{key:16} {share:.1f}")
    harness.finish(**shares)
    return 0


if __name__ == "__main__":
    sys.exit(main())
