"""One whole night, as it will be: `make night`.

A Canvas class, a Moodle class with teams, an exam, a batch through the gateway and a question in between; in the long
form also a class at the desk, two exams for real models, and four machines that `kvasir deploy` installs. Then
everything that dies in a night dies, in an order by seed, while Prometheus looks. In the morning what expired is
retried, grades are compared with the right ones, two people review, a sample is graded by hand, one criterion is graded
again, and the LMSs' importers read the grades. Services have a user for each role. The writer is simulated, and the
reader adds up what each work says, so that the grade in each cell is known.

    lost      jobs without a result            doubled    results beyond a run's first
    wrong     answers unlike an undisturbed run's, and cells of the LMS's file unlike the truth
    leaked    names of people, files or folders on the broker's disk, in the store or in a log
    left      messages, queues and keys after `forget`
    unequal   counts that differ between journal, terminal, report, logs and Prometheus

All of them must be 0. What it does not show: several machines, power cuts, GPUs. Ends with one JSON object, and 1 if
anything tore. Writes night.md, night.json and three pictures to --to.
"""

import argparse
import json
import sys
import tempfile
from dataclasses import replace
from pathlib import Path

import click

from tests.night.whole import LONG, SHORT, whole_night


def main() -> int:
    """Run it, print each row as it comes, and end with the line of JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--short", action="store_true", help="the form that make test-system runs: minutes")
    parser.add_argument("--scale", type=float, default=1.0, help="of the classes, beside the form's (default: 1)")
    parser.add_argument("--rounds", type=int, help="how often each trouble comes")
    services = "one of each, or a cluster of three brokers and a Redis Cluster (default: %(default)s)"
    parser.add_argument("--services", choices=("single", "cluster"), default="single", help=services)
    parser.add_argument("--only", action="append", default=[], metavar="WORD", help="troubles whose name holds this")
    parser.add_argument("--to", type=Path, default=Path("results/night"), help="(default: %(default)s)")
    parser.add_argument("--keep", type=Path, help="keep everything in this folder")
    options = parser.parse_args()
    size = (SHORT if options.short else LONG).scaled(options.scale)
    size = replace(size, rounds=options.rounds or size.rounds, has_clusters=options.services == "cluster")
    with tempfile.TemporaryDirectory(prefix="kvasir-night-") as place:
        record = whole_night(options.keep or Path(place), size, options.seed, options.to, options.only)
    click.echo(record.markdown())
    click.echo(json.dumps({name: value for name, value in record.as_dict().items() if name != "rows"}))
    return 0 if record.is_clean else 1


if __name__ == "__main__":
    sys.exit(main())
