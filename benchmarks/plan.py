"""How well `kvasir plan` predicts: its simulation beside a real run with simulated engines, on real services.

The class, the workers and the clock are those of `benchmarks.fleet`: RabbitMQ, Redis, worker processes, a median
decode of one wall second. The simulation is the one that `kvasir plan` reports, with the same share of services and
workers for each job, and it is told the true lengths of the answers; the real workers are not.

    simulated_s    the makespan that the simulation predicts, in wall seconds
    real_s         from the first publish to the last answer
    error          (simulated_s - real_s) / real_s
    worst_error    the largest of the rows', without its sign

What the figures do not show: how well rates and lengths in kvasir.toml describe real machines and classes, which is
what a real prediction's error will be made of.
"""

import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from benchmarks import fleet, harness
from benchmarks.fleet_cluster import run
from kvasir.plan.cluster import DECODE_OVERHEAD_S, PREFILL_OVERHEAD_S
from kvasir.plan.simulate import typical
from tests.support.services import Pair

MIXES = fleet.MIXES[:4]
QUICK_MIXES = fleet.MIXES[:1]
KEYS = ("simulated_s", "real_s", "error")


def measure(pair: Pair, mix: fleet.Mix, submissions: int, decode_s: float, seed: int) -> dict[str, object]:
    """One row. The simulation comes first: it can't learn from the run."""
    cast, prompts = fleet.prepare(mix, submissions, decode_s, seed)
    workers = replace(cast.fleet(), prefill_overhead_s=PREFILL_OVERHEAD_S, decode_overhead_s=DECODE_OVERHEAD_S)
    simulated_s = typical(workers, [prompt.job for prompt in prompts]).makespan_s
    with tempfile.TemporaryDirectory() as folder:
        real_s = run(pair, Path(folder), cast, prompts, steal=True).makespan_s
    error = (simulated_s - real_s) / real_s
    return {"mix": mix.name, "slots": mix.slots, "simulated_s": simulated_s, "real_s": real_s, "error": error}


def main() -> int:
    """Measure every row, explain, and end with the line of JSON."""
    options = harness.options(__doc__)
    print(harness.machine())
    submissions = fleet.QUICK_SUBMISSIONS if options.quick else fleet.SUBMISSIONS
    decode_s = fleet.QUICK_MEDIAN_DECODE_S if options.quick else fleet.MEDIAN_DECODE_S
    rows = []
    with harness.pair() as pair:
        for mix in QUICK_MIXES if options.quick else MIXES:
            row = measure(pair, mix, submissions, decode_s, options.seed)
            rows.append(row)
            print(f"{mix.name}, {mix.slots} slots:", ", ".join(f"{key} {row[key]:.3g}" for key in KEYS), flush=True)
    worst = max(abs(float(str(row["error"]))) for row in rows)
    harness.finish(rows=rows, worst_error=worst, submissions=submissions, seed=options.seed)
    return 0


if __name__ == "__main__":
    sys.exit(main())
