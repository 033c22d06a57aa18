"""What faults cost: real workers, a real broker and Redis behind TCP proxies, 1,000 simulated jobs a row.

Each row starts two prefill and two decode worker processes and the batch's owner, injects its fault at random moments
of the batch, waits until nothing moves any more, starts the owner again once if jobs are missing, and counts:

    attempted           jobs in the manifest
    confirmed           of these, confirmed by the broker as far as the owner knows
    succeeded, failed   jobs by their typed result
    lost                jobs without a typed result, after the owner was started again once
    lost_before_rerun   confirmed jobs that the owner, started again, found nowhere and published again
    unexpected          results of jobs that are not of the batch, or with another text than an undisturbed engine's
    executed_twice      jobs whose decode was begun more than once, by the workers' logs
    journal_duplicates  lines of the journal beyond the first of a job's run
    dead_lettered       messages in dead-letters
    recovery_s          the longest time from a fault's end until those that it hit went on: each job that a killed
                        worker had begun was begun elsewhere, else each process took its next step

Rows of nodes have three brokers, or three primaries of a Redis Cluster, or both. Rows of the network have both services
on a machine of their own, behind a link of 20 ms, 1 Gb/s and 0.1% loss (tests/support/network.py: Linux, root); with
--network all rows of one broker and one Redis do. Rows of names have them behind a name that a name server of the
harness resolves (unshare of util-linux). The clocks of `clocks-apart` are libfaketime's; the monotonic one is left
alone.

What the figures do not show: several machines, power cuts of the disk (a SIGKILL loses no page
cache), real engines. --quick runs a few rows with fewer jobs; docs/measurements/2026-11-27-faults.md has a whole table.
"""

import sys
import tempfile
from dataclasses import replace
from pathlib import Path

from benchmarks import harness
from tests.acceptance.faults.catalogue import FAULTS, Fault, find, plan_of
from tests.acceptance.faults.row import Row, run_row
from tests.acceptance.faults.services import NetworkServices, Services

JOBS, QUICK_JOBS = 1000, 150
QUICK = ("none", "decode-killed")
_COLUMNS = (
    *("attempted", "confirmed", "succeeded", "failed", "lost", "lost_before_rerun", "unexpected", "executed_twice"),
    *("journal_duplicates", "dead_lettered", "recovery_s"),
)


def main() -> int:
    """Run the rows, print each when it is done, and end with the line of JSON. 1 if a row isn't clean, or broke off."""
    parser = harness.parser(__doc__)
    parser.add_argument("--fault", action="append", metavar="NAME", help="only this row; may be given several times")
    parser.add_argument("--jobs", type=int, help=f"jobs of a row (default: {JOBS})")
    parser.add_argument("--list", action="store_true", help="say which rows there are")
    parser.add_argument(
        "--network", action="store_true", help="one broker and one Redis over the network of those rows"
    )
    given = parser.parse_args()
    if given.list:
        print("\n".join(f"{fault.name:24}{fault.what}" for fault in FAULTS))
        return 0
    chosen = [_find(name) for name in given.fault or (QUICK if given.quick else [fault.name for fault in FAULTS])]
    if given.network:
        chosen = [replace(fault, services=NetworkServices) for fault in chosen if fault.services is Services]
    rows = run(chosen, given.jobs or (QUICK_JOBS if given.quick else JOBS), given.seed)
    total_lost = sum(row.lost for row in rows)
    harness.finish(seed=given.seed, rows=[row.as_dict() for row in rows], total_lost=total_lost)
    return 0 if len(rows) == len(chosen) and all(row.is_clean() for row in rows) else 1


def run(faults: list[Fault], jobs: int, seed: int) -> list[Row]:
    """The rows, one after the other, over one store and one broker, or three; those that broke off are missing."""
    rows: list[Row | None] = []
    for kind in dict.fromkeys(fault.services for fault in faults):
        with kind() as services, tempfile.TemporaryDirectory(prefix="kvasir-faults-") as folder:
            print(f"{harness.machine()}; {services.version()}; seed {seed}\n")
            for line in _heading():
                print(line)
            rows += [_run(services, fault, jobs, seed, Path(folder)) for fault in faults if fault.services is kind]
    return [row for row in rows if row]


def _run(services: Services, fault: Fault, jobs: int, seed: int, folder: Path) -> Row | None:
    try:
        row = run_row(services, fault, plan_of(fault, jobs, seed), folder / fault.name)
    except Exception as error:  # noqa: BLE001  the other rows have their say all the same
        print(f"{fault.name:24} broke off: {type(error).__name__}: {error}", flush=True)
        return None
    figures = row.as_dict()
    cells = [f"{value:.1f}" if isinstance(value := figures[name], float) else str(value) for name in _COLUMNS]
    print(f"{fault.name:24}" + "".join(f"{cell.replace('None', '-'):>11}" for cell in cells), flush=True)
    return row


def _heading() -> list[str]:
    """Two lines: names of two or three words don't fit into one."""
    parts = [name.replace("_before", " before").replace("_", " ", 1).rsplit(" ", 1) for name in _COLUMNS]
    upper = "".join(f"{part[0] if len(part) > 1 else '':>11}" for part in parts)
    return [f"{'':24}{upper}", f"{'fault':24}" + "".join(f"{part[-1]:>11}" for part in parts)]


def _find(name: str) -> Fault:
    try:
        return find(name)
    except KeyError as error:
        raise SystemExit(str(error.args[0])) from None


if __name__ == "__main__":
    sys.exit(main())
