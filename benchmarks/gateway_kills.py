"""A gateway that is killed at every step of a batch, and twice more while answers come: what is lost, or done twice?

Real processes over a private RabbitMQ and Redis: `kvasir serve`, a prefill and a decode worker with the simulated
engine (50 ms a job), and the openai client, which repeats what got no answer with the same Idempotency-Key. One batch
of 1,000 lines for each place of `failpoints.GATEWAY` (60 with --quick). All but `lines` and `kills` are to be 0.

    lost, duplicates    lines without an answer, and with several
    wrong_counts        looks at which the counts didn't add up
    batches             batches besides the one that was asked for
    changed_ids         looks at which an id or a date was another than before

What happens between two of these places, in the publishing and gathering of a batch, is in the fault table (`faults`).
"""

import tempfile
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from benchmarks import harness
from tests.acceptance.gateway_kills import PLACES, QUICK, kill_at
from tests.support.processes import Cluster

LINES, QUICK_LINES = 1000, 60


def main(arguments: Sequence[str] | None = None) -> None:
    """Run it."""
    options = harness.options(__doc__, arguments)
    lines, rows = QUICK_LINES if options.quick else LINES, []
    with harness.pair() as pair, tempfile.TemporaryDirectory(prefix="kvasir-gateway-") as name:
        for number, place in enumerate(PLACES):
            folder = Path(name) / str(number)
            with Cluster(folder, pair.broker_url, pair.store_url, {f"kills-{number}": QUICK}) as cluster:
                cluster.worker("prefill", cluster.models[0])
                cluster.worker("decode", cluster.models[0])
                rows.append(kill_at(cluster, folder / "state", place, lines, options.seed))
            print(" ".join(f"{key} {value}" for key, value in asdict(rows[-1]).items()), flush=True)
    bad = sum(row.lost + row.duplicates + row.wrong_counts + row.batches + row.changed_ids for row in rows)
    harness.finish(seed=options.seed, rows=list(map(asdict, rows)), bad=bad)


if __name__ == "__main__":
    main()
