"""Input that can't be read becomes an entry of the batch and a failed result, without a job."""

from messages.jobs import JobError, JobResult, Sampling, job_id, user_prompt
from producers.batch.batch import Batch, BatchEntry


def failed_intake(
    batch: Batch, item_id: str, model: str, name: str, error: str, reason: str
) -> tuple[BatchEntry, JobResult]:
    """Return the entry and the failed result of input that can't be read, so that it does not get lost."""
    entry = BatchEntry(
        job_id(batch.batch_id, item_id, model, user_prompt("", reason[:2000]), Sampling(1)),
        item_id,
        model,
        "intake",
        name,
    )
    failure = JobError("intake", error, reason[:2000])
    return entry, JobResult(entry.job_id, 1, batch.batch_id, item_id, model, "failed", error=failure)
