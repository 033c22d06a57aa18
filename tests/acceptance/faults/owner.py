"""The batch's owner as a process of its own: real Batch, Client and Runner. Started again it goes on.

python -m tests.acceptance.faults.owner --config FILE --out FOLDER --model M --jobs 1000 --seed 1
"""

import argparse
import logging
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from infra.config.settings import load_settings
from kvasir.connect import connect
from messages.jobs import PrefillJob
from monitoring import logs
from producers.batch.batch import Batch, Counts
from producers.batch.runner import Runner
from producers.client import Client
from tests.acceptance.faults import load

WAITING = "waiting"


class Quiet:
    """Progress for the log."""

    def update(self, counts: Counts) -> None:
        """Told first when all that had to be published is confirmed."""
        logging.getLogger("kvasir").info(WAITING)

    def say(self, sentence: str) -> None:
        """A sentence for people."""
        logging.getLogger("kvasir").info(sentence)


class Insistent:
    """A client that publishes each of its first jobs several times, and asks `questions` in each."""

    def __init__(self, client: Client, copies: int, jobs: int, questions: int = 0) -> None:
        self._client = client
        self._questions = questions
        self._copies = copies
        self._jobs = jobs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._client, name)

    def submit(
        self, jobs: Iterable[PrefillJob], on_confirmed: Callable[[PrefillJob], None], turns: Mapping[str, int]
    ) -> int:
        """The first jobs again and again, in between the others."""
        wanted = [load.asking(job, self._questions) for job in jobs]
        again = wanted[: self._jobs] * (self._copies - 1)
        told = self._client.submit(wanted, on_confirmed, turns)
        self._client.submit(again, turns=turns)
        return told


def arguments() -> argparse.Namespace:
    """What the stage gives."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--config", type=Path, required=True)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--model", required=True)
    parser.add_argument("--jobs", type=int, required=True)
    parser.add_argument("--seed", type=int, required=True)
    parser.add_argument("--long-jobs", type=int, default=0)
    parser.add_argument("--long-s", type=float, default=0.0)
    parser.add_argument("--copies", type=int, default=1)
    parser.add_argument("--copied-jobs", type=int, default=0)
    parser.add_argument("--deadline-s", type=float, default=0.0)
    parser.add_argument("--questions", type=int, default=0)
    parser.add_argument("--submit-only", action="store_true")
    return parser.parse_args()


def main() -> int:
    """Submit, collect, leave. 0: every job has its result."""
    given = arguments()
    logs.configure("info", "json")
    settings = load_settings({}, config=given.config)
    with Batch(given.out) as batch, connect(settings, [given.model], logs.log_event, "owner") as client:
        made = load.tasks(batch.batch_id, given.model, given.jobs, given.seed, given.long_jobs, given.long_s)
        if not batch.entries:
            batch.plan(load.entries(made), {})
        insistent: Any = Insistent(client, given.copies, given.copied_jobs, given.questions)
        runner = Runner(batch, made, insistent, Quiet(), given.deadline_s)
        if given.submit_only:
            runner.submit()
            return 0
        return 1 if runner.run().open else 0


if __name__ == "__main__":
    sys.exit(main())
