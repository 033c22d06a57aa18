"""A gateway that is killed at every step of a batch, and twice more while answers come: what is lost, or done twice?

Real processes over a private RabbitMQ and Redis: `kvasir serve`, a prefill and a decode worker with the simulated
engine (50 ms a job), and the openai client, which repeats what got no answer with the same Idempotency-Key. One batch
of 1,000 lines for each place of `failpoints.GATEWAY` (60 with --quick). All but `lines` and `kills` are to be 0.
`--everybody` runs one batch of 2,000 lines for each of three seeds instead, in which the gateway, a prefill worker, a
decode worker and the broker each die twice, in an order by the seed; workers are replaced and the broker comes back.

    lost, duplicates    lines without an answer, and with several
    wrong_counts        looks at which the counts didn't add up
    batches             batches besides the one that was asked for
    changed_ids         looks at which an id or a date was another than before

What happens between two of these places, in the publishing and gathering of a batch, is in the fault table (`faults`).
"""

import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path

from benchmarks import harness
from tests.acceptance.gateway_kills import PLACES, QUICK, Row, kill_at
from tests.support.processes import Cluster, ProcessRole
from tests.support.servers import RabbitMQServer, RedisServer

ROLES: tuple[ProcessRole, ...] = ("prefill", "decode")
LINES, QUICK_LINES = 1000, 60


def main(arguments: Sequence[str] | None = None) -> None:
    """Run it."""
    parser = harness.parser(__doc__)
    parser.add_argument("--everybody", action="store_true", help="kill gateway, workers and broker in one batch")
    options = parser.parse_args(arguments)
    if options.everybody:
        rows = [kill_everybody(QUICK_LINES if options.quick else 2 * LINES, options.seed + run) for run in range(3)]
        finish(rows, options.seed)
        return
    lines, rows = QUICK_LINES if options.quick else LINES, []
    with harness.pair() as pair, tempfile.TemporaryDirectory(prefix="kvasir-gateway-") as name:
        for number, place in enumerate(PLACES):
            folder = Path(name) / str(number)
            with Cluster(folder, pair.broker_url, pair.store_url, {f"kills-{number}": QUICK}) as cluster:
                cluster.worker("prefill", cluster.models[0])
                cluster.worker("decode", cluster.models[0])
                rows.append(kill_at(cluster, folder / "state", place, lines, options.seed))
            show(rows[-1])
    finish(rows, options.seed)


def kill_everybody(lines: int, seed: int) -> Row:
    """One batch in which everybody dies but the store, which a batch of the gateway may lose (see `faults`)."""
    folder = Path(tempfile.mkdtemp(prefix="kvasir-gateway-"))
    with (
        RabbitMQServer() as broker,
        RedisServer() as store,
        Cluster(folder / "run", broker.url, store.url, {"kills-all": QUICK}) as cluster,
    ):
        workers = {role: cluster.worker(role, "kills-all") for role in ROLES}

        def replace(role: ProcessRole) -> None:
            workers[role].kill()
            workers[role] = cluster.launch(role, "kills-all")

        def restart() -> None:
            broker.kill()
            broker.start()

        others = [partial(replace, role) for role in ROLES] + [restart]
        row = kill_at(cluster, folder / "state", f"gateway.described:{seed % 2 + 1}", lines, seed, others)
    shutil.rmtree(folder)
    show(row)
    return row


def show(row: Row) -> None:
    """One line for people."""
    print(" ".join(f"{key} {value}" for key, value in asdict(row).items()), flush=True)


def finish(rows: Sequence[Row], seed: int) -> None:
    """The line for programs."""
    bad = sum(row.lost + row.duplicates + row.wrong_counts + row.batches + row.changed_ids for row in rows)
    harness.finish(seed=seed, rows=list(map(asdict, rows)), bad=bad)


if __name__ == "__main__":
    main()
