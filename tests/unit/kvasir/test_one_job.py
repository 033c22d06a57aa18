"""One job's life, from submit to journal, in one process: the readable twin of docs/explanation/one_job.md."""

import time
from pathlib import Path

from infra.broker import topology
from kvstore.base import TTL_S
from messages.lifecycle import Step
from producers.batch.batch import Batch, BatchEntry
from producers.batch.runner import Runner
from tests.support.pipeline import MODEL, Pipeline, RecordingProgress, WatchedStore
from tests.support.waiting import wait_until

LIFE = [
    Step.SUBMITTED,
    Step.PREFILL_STARTED,
    Step.KV_STORED,
    Step.PASSED_ON,
    Step.DECODE_STARTED,
    Step.KV_CHECKED,  # the first of its prefill engine
    Step.FIRST_TOKEN,
    Step.ANSWERED,
    Step.REPLIED,
    Step.JOURNALED,
]


def test_one_job_from_submit_to_journal(tmp_path: Path) -> None:
    with Pipeline() as pipeline, Batch(tmp_path) as batch:
        # Given a prefill worker, a decode worker, and a batch of one job, on disk before anything is published
        prefill, decode = pipeline.start()
        job = pipeline.job(batch=batch.batch_id, submitted_at=batch.created_at)
        batch.plan([BatchEntry(job.job_id, job.item_id, MODEL, "code", "ada")], request={})

        # When its owner runs the batch
        counts = Runner(batch, [job], pipeline.client, RecordingProgress()).run(max_wait_s=20)

        # Then the job has succeeded, and its one line in the journal is all that the batch wanted
        assert (counts.total, counts.succeeded, counts.open) == (1, 1, 0)
        assert len((tmp_path / "results.jsonl").read_text().splitlines()) == 1
        assert len((tmp_path / "submitted.jsonl").read_text().splitlines()) == 1
        result = batch.result(job.job_id)
        assert result is not None

        # and the text is what a single engine would have answered
        assert result.text == pipeline.undisturbed_text(job)

        # and the decoder's own counter proves that the KV cache was transferred: it evaluated the last token only
        prompt = result.decode.prompt_tokens
        assert result.decode.kv_transfer == "verified"
        assert result.decode.transferred_tokens == prompt - 1
        assert result.decode.evaluated_tokens == 1
        assert result.prefill.computed_tokens == prompt - 1
        assert (result.prefill.worker_id, result.decode.worker_id) == (
            prefill.worker.worker_id,
            decode.worker.worker_id,
        )

        # and every step was taken once, in an order that the lifecycle's table allows (checked when the pipeline ends)
        assert sorted(pipeline.steps(job)) == sorted(LIFE)
        assert pipeline.checker.jobs_without_result() == []

        # and nobody tokenized but the prefill worker, and no queue holds anything
        assert (prefill.engine.tokenize_calls, decode.engine.tokenize_calls) == (1, 0)
        pipeline.nothing_is_left()
        assert pipeline.broker.depth(topology.reply_queue(batch.batch_id)) is None


def test_own_blocks_go_after_the_ack_and_shared_blocks_stay_until_their_ttl() -> None:
    clock = [time.monotonic()]
    with Pipeline(WatchedStore(clock=lambda: clock[0])) as pipeline:
        # Given a job that was answered
        pipeline.start()
        job = pipeline.job()
        pipeline.run(job)

        # When one looks for its blocks
        shared = [ref for ref in pipeline.refs(job) if ref.is_shared]
        own = [ref for ref in pipeline.refs(job) if not ref.is_shared]
        assert shared
        assert own

        # Then all that it shared is there, and nothing of its own
        wait_until(
            lambda: pipeline.kv.find_missing(pipeline.refs(job)) == own, "its own blocks, and no others, are gone"
        )

        # and what it shared is gone when nobody has used it for the length of a TTL
        clock[0] += TTL_S + 1
        assert pipeline.kv.find_missing(shared) == shared


def test_a_second_job_restores_the_shared_part_and_uploads_only_what_is_missing() -> None:
    with Pipeline() as pipeline:
        # Given a first job that was answered
        pipeline.start()
        first = pipeline.run(pipeline.job("def first(): ...\n" * 10))
        uploaded_first = len(pipeline.kv.stored_refs)

        # When another with the same prefix is run
        second = pipeline.job("def second(): ...\n" * 10)
        result = pipeline.run(second)

        # Then the shared blocks were restored, the rest computed, and the answer is that of an undisturbed engine
        shared = [ref for ref in pipeline.refs(second) if ref.is_shared]
        assert result.prefill.restored_tokens == shared[-1].end
        assert result.prefill.computed_tokens == result.decode.prompt_tokens - 1 - shared[-1].end
        assert result.prefill.computed_tokens < first.prefill.computed_tokens
        assert (result.decode.kv_transfer, result.decode.evaluated_tokens) == ("verified", 1)
        assert result.text == pipeline.undisturbed_text(second)

        # and only its own blocks were uploaded
        assert set(pipeline.kv.stored_refs[uploaded_first:]) == {
            ref for ref in pipeline.refs(second) if not ref.is_shared
        }
