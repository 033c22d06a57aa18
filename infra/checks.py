"""What both workers check about a delivery before they work on it, in this order.

A check that finds something raises. `infra.broker.settle` says how the delivery is settled then.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any

from infra.broker.envelope import Attempt, StopReason
from infra.broker.failpoints import failpoint
from infra.broker.topology import is_suspects_queue
from messages import codec
from messages.errors import Poison, Stopped
from messages.jobs import DecodeJob, PrefillJob

SUSPECT_AFTER_CRASHES = 3  # a job becomes a suspect after this many workers have died while running it
POISON_AFTER_CRASHES = SUSPECT_AFTER_CRASHES + 2


@dataclass(frozen=True, slots=True)
class Standing:
    """What is known about a job besides its message."""

    job: PrefillJob
    is_cancelled: bool  # whether the job's batch was cancelled
    now: float  # the store's clock
    crashes: int  # how many workers died while they ran the job


def stop_cancelled(attempt: Attempt[Any], standing: Standing) -> None:
    """Stop the attempt if the batch was cancelled."""
    if standing.is_cancelled:
        _stop(attempt, "cancelled")


def stop_expired(attempt: Attempt[Any], standing: Standing) -> None:
    """Stop the attempt if the job's deadline has passed."""
    if standing.job.deadline and standing.now > standing.job.deadline:
        _stop(attempt, "expired")


def bury_poison(_attempt: Attempt[Any], standing: Standing) -> None:
    """Raise Poison if the job killed workers even when it ran alone."""
    if standing.crashes >= POISON_AFTER_CRASHES:
        raise Poison(
            f"{standing.crashes} workers died while they ran this job, and the last worker ran no other job at that "
            "time; no worker will get this job again"
        )


def isolate_suspect(attempt: Attempt[Any], standing: Standing) -> None:
    """Stop the attempt if too many workers died while holding the job. From then on the job runs alone."""
    if standing.crashes >= SUSPECT_AFTER_CRASHES and not is_suspects_queue(attempt.deliveries[0].queue):
        _stop(attempt, "suspect")


STEPS = (stop_cancelled, stop_expired, bury_poison, isolate_suspect)


def _stop(attempt: Attempt[Any], reason: StopReason) -> None:
    attempt.stop_for(reason)
    raise Stopped(f"the job was not started: {reason}")


class Checks:
    """The checks, and the sources of their facts.

    Args:
        is_cancelled: whether a batch, given by its id, is cancelled.
        now: the store's clock.
        count_crashes: returns a context manager for the time in which a job is worked on, by stage, job id, run and
            returns. It yields the number of earlier crashes, and counts one if the worker dies within the block.
    """

    def __init__(
        self,
        is_cancelled: Callable[[str], bool],
        now: Callable[[], float],
        count_crashes: Callable[[str, str, int, int], AbstractContextManager[int]],
    ) -> None:
        self._is_cancelled = is_cancelled
        self._now = now
        self._count_crashes = count_crashes

    @contextmanager
    def passed(self, attempt: Attempt[Any]) -> Iterator[Standing]:
        """Read the message and run all checks. If the worker dies within the block, a crash is counted.

        Raises Stopped, Poison, and the errors of reading the message.
        """
        envelope = attempt.envelope
        with self._count_crashes(envelope.stage, envelope.job_id, envelope.run, envelope.returns) as crashes:
            body = attempt.deliveries[0].message.body
            if envelope.stage == "decode":
                failpoint("decode.taken", envelope.job_id)
                attempt.job = codec.decode(body, DecodeJob)
                job = attempt.job.job
            else:
                failpoint("prefill.taken", envelope.job_id)
                job = attempt.job = codec.decode(body, PrefillJob)
            standing = Standing(job, self._is_cancelled(job.batch_id), self._now(), crashes)
            for step in STEPS:
                step(attempt, standing)
            yield standing
