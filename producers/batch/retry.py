"""Chooses the jobs of a batch that `kvasir retry` and `kvasir run --retry-failed` run again."""

from collections.abc import Set

from producers.batch.batch import Batch


def jobs_to_retry(batch: Batch, names: Set[str] = frozenset(), runnable_ids: Set[str] | None = None) -> list[str]:
    """Return the ids of jobs that did not succeed; with `names`, of all jobs of these submissions that have a result.

    Input that could not be read has no job, and needs another file instead of another run. `runnable_ids` are the jobs
    that can still be made from the input; None: all of them.
    """
    job_ids = []
    for entry in batch.entries:
        result = batch.result(entry.job_id)
        if entry.role == "intake" or result is None or (runnable_ids is not None and entry.job_id not in runnable_ids):
            continue
        if entry.name in names or (not names and result.state != "succeeded"):
            job_ids.append(entry.job_id)
    return job_ids
