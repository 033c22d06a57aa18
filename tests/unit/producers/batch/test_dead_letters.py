"""The graveyard: who looks takes nothing away, and a replay is one new run, however often it is asked for."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from infra.broker import topology
from infra.broker.base import Address, Message
from infra.broker.embedded.broker import EmbeddedBroker
from infra.broker.envelope import Envelope, submit_message
from messages import codec
from messages.errors import BatchError
from messages.jobs import DecodeJob, JobError, JobResult, PrefillJob, Sampling, user_prompt
from producers.batch.batch import Batch, BatchEntry
from producers.batch.dead_letters import DeadLetters, LetterFilter, ReplayOutcome
from producers.client import Client
from tests.support.pipeline import MODEL, Pipeline, always_fails, work
from tests.support.waiting import wait_until

EVERYTHING = LetterFilter()


@pytest.fixture
def pipeline() -> Iterator[Pipeline]:
    with Pipeline(unseen_copies=True) as pipeline:
        yield pipeline


def a_job(name: str = "job", batch: str = "hw1", **fields: object) -> PrefillJob:
    job = PrefillJob(
        name, batch, f"item-{name}", MODEL, user_prompt("rubric", "work"), Sampling(8), reply_to=f"reply.{batch}"
    )
    return replace(job, **fields)  # type: ignore[arg-type]


def bury(pipeline: Pipeline, job: PrefillJob, error: str = "Poison", body: bytes = b"", **counters: int) -> None:
    """A letter as a worker makes it."""
    _, sealed = submit_message(job)
    sealed = replace(sealed, body=body or sealed.body)
    headers = {**sealed.headers, **{f"kvasir-{name}": count for name, count in counters.items()}}
    headers |= {"kvasir-error": error, "kvasir-error-message": "why", "x-first-death-reason": "x"}
    pipeline.broker.publish(Address(topology.DEAD, topology.DEAD_LETTERS), replace(sealed, headers=headers))


def replay(pipeline: Pipeline, which: LetterFilter = EVERYTHING, batch: Batch | None = None) -> ReplayOutcome:
    """As `kvasir dead replay` does: a broker client of its own, closed at the end."""
    broker = EmbeddedBroker(pipeline.server)
    try:
        client = Client(broker, pipeline.cluster_state, [MODEL], pipeline.observe)
        with DeadLetters(broker) as graveyard:
            return graveyard.replay(graveyard.matching(which), client, batch)
    finally:
        broker.close()


def queued(pipeline: Pipeline) -> list[Message]:
    """What lies in the prefill queue."""
    return pipeline.lying_in(work("prefill"))


def runs(pipeline: Pipeline) -> list[int]:
    return [codec.decode(message.body, PrefillJob).run for message in queued(pipeline)]


def test_looking_takes_nothing_away_and_changes_no_order(pipeline: Pipeline) -> None:
    for name in ("a", "b", "c"):
        bury(pipeline, a_job(name))

    for _ in range(2):
        broker = pipeline.new_broker()
        with DeadLetters(broker) as graveyard:
            assert [letter.envelope.job_id for letter in graveyard.letters] == ["a", "b", "c"]
            assert [letter.envelope.returns for letter in graveyard.letters] == [0, 0, 0]
        broker.close()

    assert pipeline.ready(topology.DEAD_LETTERS) == 3


def test_one_process_at_a_time_looks(pipeline: Pipeline) -> None:
    with DeadLetters(pipeline.broker), pytest.raises(BatchError, match="another process reads this queue"):
        DeadLetters(pipeline.new_broker())


@pytest.mark.parametrize(
    ("which", "meant"),
    [
        (EVERYTHING, ["a", "b", "c"]),
        (LetterFilter(batch="hw2"), ["c"]),
        (LetterFilter(error="Poison"), ["a", "c"]),
        (LetterFilter(error="Poison", batch="hw1"), ["a"]),
        (LetterFilter(model="another:1b"), []),
        (LetterFilter(jobs=("b", "zz")), ["b"]),
    ],
)
def test_letters_are_chosen_by_batch_model_error_class_and_job(
    pipeline: Pipeline, which: LetterFilter, meant: list[str]
) -> None:
    bury(pipeline, a_job("a"))
    bury(pipeline, a_job("b"), error="ContextExceeded")
    bury(pipeline, a_job("c", batch="hw2"))

    with DeadLetters(pipeline.new_broker()) as graveyard:
        assert [letter.envelope.job_id for letter in graveyard.matching(which)] == meant


def test_a_replay_is_the_next_run_with_nothing_of_the_last_one_left(pipeline: Pipeline) -> None:
    bury(pipeline, a_job(run=3, tokens=(1, 2, 3), shared_tokens=1, stream_to="gone"), attempts=5, returns=4)

    done = replay(pipeline)

    (message,) = queued(pipeline)
    job = codec.decode(message.body, PrefillJob)
    assert done.jobs == [job]
    assert job == a_job(run=4)
    assert message.headers == submit_message(job)[1].headers
    assert pipeline.ready(topology.DEAD_LETTERS) == 0


def test_replaying_twice_gives_one_new_run(pipeline: Pipeline) -> None:
    bury(pipeline, a_job())

    replay(pipeline)
    again = replay(pipeline)

    assert again.jobs == []
    assert runs(pipeline) == [2]


def test_a_crash_between_confirm_and_ack_makes_a_copy_of_the_same_run(pipeline: Pipeline) -> None:
    bury(pipeline, a_job())
    broker = pipeline.new_broker()

    class Crash(BaseException):
        pass

    class Dying(DeadLetters):
        def drop(self, _chosen: object) -> int:
            raise Crash

    with pytest.raises(Crash), Dying(broker) as graveyard:
        graveyard.replay(graveyard.letters, Client(broker, pipeline.cluster_state, [MODEL]))
    broker.close()
    replay(pipeline)

    assert runs(pipeline) == [2, 2]
    assert pipeline.ready(topology.DEAD_LETTERS) == 0


def test_two_letters_of_one_job_are_one_new_run_above_both(pipeline: Pipeline) -> None:
    bury(pipeline, a_job(run=1), error="Poison")
    bury(pipeline, a_job(run=2), error="ContextExceeded")

    replay(pipeline, LetterFilter(error="Poison"))

    assert runs(pipeline) == [3]
    assert [message.headers["kvasir-error"] for message in pipeline.dead_letters()] == ["ContextExceeded"]


def test_letters_that_are_not_meant_stay(pipeline: Pipeline) -> None:
    for number in range(20):
        bury(pipeline, a_job(f"job{number}", batch=f"hw{number % 2}"))

    done = replay(pipeline, LetterFilter(batch="hw1"))

    assert len(done.jobs) == 10
    assert {message.correlation_id for message in pipeline.dead_letters(10)} == {"hw0"}


def test_a_letter_of_the_decode_stage_starts_from_its_prompt(pipeline: Pipeline) -> None:
    job = a_job(tokens=(1, 2, 3))
    body = codec.encode(DecodeJob(job, None, why_no_kv="none"))
    bury(pipeline, job, body=body, stage="decode")  # type: ignore[arg-type]

    replay(pipeline)

    (message,) = queued(pipeline)
    assert codec.decode(message.body, PrefillJob) == a_job(run=2)


def test_what_can_not_be_replayed_stays_and_says_why(pipeline: Pipeline) -> None:
    bury(pipeline, a_job("unreadable"), body=b"\xc1 no message")
    bury(pipeline, a_job("foreign", model="another:1b"))
    bury(pipeline, a_job("cancelled", batch="stopped"))
    bury(pipeline, a_job("good"))
    pipeline.cluster_state.cancel("stopped")

    done = replay(pipeline)

    assert [job.job_id for job in done.jobs] == ["good"]
    reasons = {letter.envelope.job_id: why for letter, why in done.refusals}
    assert "not a msgpack message" in reasons["unreadable"]
    assert "'another:1b' has no queue" in reasons["foreign"]
    assert "batch stopped is cancelled" in reasons["cancelled"]
    assert len(pipeline.dead_letters(3)) == 3


def test_a_deadline_that_has_passed_does_not_end_the_new_run(pipeline: Pipeline) -> None:
    later = pipeline.cluster_state.now() + 3600
    bury(pipeline, a_job("late", deadline=1.0))
    bury(pipeline, a_job("in-time", deadline=later))

    done = replay(pipeline)

    assert {job.job_id: job.deadline for job in done.jobs} == {"late": 0.0, "in-time": later}


def test_dropping_deletes_what_is_meant_and_nothing_else(pipeline: Pipeline) -> None:
    bury(pipeline, a_job("a"))
    bury(pipeline, a_job("b"), error="ContextExceeded")
    broker = pipeline.new_broker()

    with DeadLetters(broker) as graveyard:
        assert graveyard.drop(graveyard.matching(LetterFilter(error="Poison"))) == 1
    broker.close()

    (left,) = pipeline.dead_letters()
    assert left.message_id == "b"


def a_failed(job: PrefillJob) -> JobResult:
    error = JobError("prefill", "Poison", "why")
    return JobResult(job.job_id, job.run, job.batch_id, job.item_id, job.model, "failed", error=error)


def test_with_its_folder_a_batch_wants_the_new_run_and_takes_no_known_one(pipeline: Pipeline, tmp_path: Path) -> None:
    with Batch(tmp_path / "hw1") as batch:
        # Given a job whose letter is of its first run, and whose second run has failed as well, without a letter
        job = a_job(batch=batch.batch_id)
        batch.plan([BatchEntry(job.job_id, job.item_id, MODEL, "code", "ada.R")], {"folder": "x"})
        batch.journal.record([a_failed(job), a_failed(replace(job, run=2))])
        bury(pipeline, job)

        # When it is replayed
        replay(pipeline, batch=batch)

        # Then the batch waits for its third run, and knows that the broker has it
        assert runs(pipeline) == [3]
        assert list(batch.open_jobs) == [job.job_id]
        assert batch.is_confirmed(job.job_id)


def test_a_job_that_has_succeeded_meanwhile_is_not_run_again(pipeline: Pipeline, tmp_path: Path) -> None:
    with Batch(tmp_path / "hw1") as batch:
        job = a_job(batch=batch.batch_id)
        batch.plan([BatchEntry(job.job_id, job.item_id, MODEL, "code", "ada.R")], {"folder": "x"})
        batch.journal.record([JobResult(job.job_id, 2, job.batch_id, job.item_id, MODEL, "succeeded", text="x")])
        bury(pipeline, job)

        done = replay(pipeline, batch=batch)

    assert done.jobs == []
    assert "run 2 of the job has succeeded" in done.refusals[0][1]


def test_a_job_that_died_succeeds_when_it_is_replayed_to_a_mended_worker(pipeline: Pipeline) -> None:
    # Given a job that its engine could not do
    prefill, _ = pipeline.start()
    prefill.engine.before_prefill = always_fails(ValueError("a bug"))
    job = pipeline.job()
    assert pipeline.run(job).state == "failed"
    wait_until(lambda: pipeline.ready(topology.DEAD_LETTERS) == 1, "it is buried")

    # When the engine is fixed and the letter replayed
    prefill.engine.before_prefill = lambda _tokens, _stop: None
    done = replay(pipeline)

    # Then the new run succeeds, and arrives where the first one did
    result = pipeline.result(done.jobs[0])
    assert (result.state, result.run) == ("succeeded", 2)
    assert Envelope(job.job_id, job.batch_id, job.item_id, MODEL, "prefill").run == 1
