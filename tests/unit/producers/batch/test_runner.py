"""The Runner: a batch goes on where it stopped, nothing is lost, and nothing counts twice."""

from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest

from infra.broker import topology
from infra.broker.base import Address, Message
from infra.broker.topology import work_queue
from messages import codec
from messages.jobs import JobResult, PrefillJob, Sampling, user_prompt
from messages.lifecycle import Event, Step
from messages.workers import NO_DETAILS, WorkerDetails, WorkerInfo
from producers.batch.batch import Batch, BatchEntry, Counts
from producers.batch.runner import Runner
from tests.support.pipeline import (
    MODEL,
    SHARED_TEXT,
    SLOW,
    Gate,
    Pipeline,
    RecordingProgress,
    WatchedEngine,
    always_fails,
    work,
)
from tests.support.waiting import wait_until

SAMPLING = Sampling(max_tokens=16)
HURRY_S = 20
ONE_BY_ONE = SLOW.replace("decode=0.1", "decode=100")  # quicker jobs are answered in groups


@pytest.fixture
def pipeline() -> Iterator[Pipeline]:
    with Pipeline(unseen_copies=True) as pipeline:
        yield pipeline


class Class:
    """A class's batch in a folder: its owner comes and goes, the folder stays."""

    def __init__(self, folder: Path, students: int) -> None:
        self.folder = folder
        self._students = students

    def own(self, pipeline: Pipeline) -> "Owner":
        """Somebody opens the folder, as `kvasir grade` does."""
        return Owner(self.folder, self._students, pipeline)


class Owner:
    """The batch, its tasks and its runner, for one pipeline."""

    def __init__(self, folder: Path, students: int, pipeline: Pipeline) -> None:
        self.batch = Batch(folder)
        self._pipeline = pipeline
        self.progress = RecordingProgress()
        self.tasks = [self._task(number) for number in range(students)]
        entries = [
            BatchEntry(task.job_id, task.item_id, MODEL, "code", f"student {task.item_id}") for task in self.tasks
        ]
        self.batch.plan(entries, {})
        self.runner = Runner(self.batch, self.tasks, pipeline.client, self.progress)

    def __enter__(self) -> "Owner":
        return self

    def __exit__(self, *_exc: object) -> None:
        self.batch.close()

    def run(self, max_wait_s: float = HURRY_S) -> Counts:
        return self.runner.run(max_wait_s)

    def killed_at(self, results: int) -> None:
        """Run until so many results are in the journal, and die there."""
        with pytest.raises(Killed):
            Runner(self.batch, self.tasks, self._pipeline.client, Fatal(results)).run(HURRY_S)

    def lines(self) -> int:
        path = self.batch.folder / "results.jsonl"
        return len(path.read_text().splitlines()) if path.exists() else 0

    def job(self, task: PrefillJob, run: int = 1) -> PrefillJob:
        """The job as it is published."""
        client = self._pipeline.client
        return client.new_job(self.batch.batch_id, task.item_id, MODEL, task.prompt, SAMPLING, run=run)

    def texts_are_right(self) -> None:
        for task in self.tasks:
            result = self.batch.result(task.job_id)
            assert result is not None
            assert result.text == self._pipeline.undisturbed_text(self.job(task))

    def _task(self, number: int) -> PrefillJob:
        parts = user_prompt(SHARED_TEXT, f"def student_{number}(): ...\n" * 8)
        return self._pipeline.client.new_job(self.batch.batch_id, f"item-{number}", MODEL, parts, SAMPLING)


class Killed(BaseException):
    """The owner's sudden death: nothing catches it."""


class Fatal(RecordingProgress):
    """Kills the owner once so many results are in the journal."""

    def __init__(self, results: int) -> None:
        super().__init__()
        self._results = results

    def update(self, counts: Counts) -> None:
        if counts.finished_jobs >= self._results:
            raise Killed


def kills_at(events: int, pipeline: Pipeline) -> Callable[[Event], None]:
    """The pipeline's observer; it kills whoever tells it of so many moments."""

    def observe(event: Event) -> None:
        pipeline.observe(event)
        if len(pipeline.events) == events:
            raise Killed

    return observe


def cancels_at(results: int, pipeline: Pipeline, owner: Owner) -> Callable[[Counts], None]:
    """Somebody cancels the batch once so many results are in the journal."""

    def update(counts: Counts) -> None:
        if counts.finished_jobs >= results:
            pipeline.client.cancel(owner.batch.batch_id)

    return update


def each_once(engine: WatchedEngine) -> bool:
    """Whether no prompt was decoded twice."""
    return set(Counter(engine.decode_calls).values()) == {1}


def test_a_batch_is_run_to_its_end_and_everything_is_told(tmp_path: Path) -> None:
    with Pipeline() as pipeline, Class(tmp_path, 6).own(pipeline) as owner:
        pipeline.start()

        counts = owner.run()

        assert (counts.succeeded, counts.finished_jobs, counts.total) == (6, 6, 6)
        assert owner.progress.counts[-1] == counts
        assert all(seen.finished_jobs + seen.open == seen.total for seen in owner.progress.counts)
        assert pipeline.checker.jobs_without_result() == []
        owner.texts_are_right()


def test_a_batch_that_is_done_calls_no_engine_again(pipeline: Pipeline, tmp_path: Path) -> None:
    _, decode = pipeline.start()
    for _ in range(2):
        with Class(tmp_path, 3).own(pipeline) as owner:
            assert owner.run().succeeded == 3

    assert len(decode.engine.decode_calls) == 3
    assert owner.lines() == 3


def test_jobs_whose_deadline_has_passed_expire_and_run_again_without_one(pipeline: Pipeline, tmp_path: Path) -> None:
    # Given a batch whose time is over before any worker can have looked at it
    pipeline.start()
    with Class(tmp_path, students=3).own(pipeline) as owner:
        counts = Runner(owner.batch, owner.tasks, pipeline.client, owner.progress, deadline_s=1e-6).run(HURRY_S)
        # Then every job says so
        assert (counts.expired, counts.open) == (3, 0)
        # And when they are run once more, by a command that sets none, they succeed
        owner.batch.run_again(task.job_id for task in owner.tasks)
        assert owner.run().succeeded == 3


def test_the_same_job_published_ten_times_makes_one_line(pipeline: Pipeline, tmp_path: Path) -> None:
    pipeline.start()
    pipeline.start_decode()
    with Class(tmp_path, 1).own(pipeline) as owner:
        for _ in range(10):
            pipeline.client.submit([owner.job(owner.tasks[0])])

        assert owner.run().succeeded == 1

        pipeline.nothing_is_left()
        assert owner.lines() == 1
        owner.texts_are_right()


# Killed and run again


def test_an_owner_killed_while_workers_go_on_finds_its_results_when_it_is_back(
    pipeline: Pipeline, tmp_path: Path
) -> None:
    # Given an owner that is gone after all its jobs were confirmed
    _, decode = pipeline.start()
    decode.engine.before_decode = gate = Gate()
    with Class(tmp_path, 5).own(pipeline) as owner:
        assert owner.run(max_wait_s=0).open == 5
    gate.open()
    wait_until(lambda: pipeline.ready(topology.reply_queue(owner.batch.batch_id)) == 5, "all is answered")

    # When it comes back
    with Class(tmp_path, 5).own(pipeline) as again:
        counts = again.run()

        # Then nothing was published again, decoded again or lost
        assert counts.succeeded == 5
        assert each_once(decode.engine)
        submitted = [event.job_id for event in pipeline.events if event.step is Step.SUBMITTED]
        assert sorted(submitted) == sorted(task.job_id for task in again.tasks)
        again.texts_are_right()


def test_many_results_that_came_while_nobody_listened_are_all_taken_before_any_job_is_held_for_lost(
    pipeline: Pipeline, tmp_path: Path
) -> None:
    # Given a large class, all of it published, answered, and gone from every queue but the reply queue
    with Class(tmp_path, 600).own(pipeline) as owner:
        owner.runner.submit()
        pipeline.broker.open_reply_queue(owner.batch.batch_id)
        while delivery := pipeline.broker.get(work("prefill")):
            job = codec.decode(delivery.message.body, PrefillJob)
            body = codec.encode(JobResult(job.job_id, 1, job.batch_id, job.item_id, MODEL, "expired"))
            pipeline.observe(Event(Step.EXPIRED, job.job_id, MODEL))
            pipeline.broker.publish(topology.reply(job.reply_to), Message(body, job.job_id, job.batch_id))
            delivery.ack()
        pipeline.events.clear()

        # When its owner runs it
        counts = owner.run()

        # Then nothing was published again
        assert counts.expired == 600
        assert {event.step for event in pipeline.events} == {Step.JOURNALED}


def test_an_owner_and_a_pipeline_that_died_together_leave_nothing_lost_and_nothing_done_twice(tmp_path: Path) -> None:
    # Given an owner killed after two of five jobs, and with it the workers, the broker and the store
    with Pipeline(unseen_copies=True) as first, Class(tmp_path, 5).own(first) as owner:
        first.start_prefill()
        decode = first.start_decode(WatchedEngine(ONE_BY_ONE, slots=1))
        stuck = Gate()
        decode.engine.before_decode = lambda tokens, stop: (
            stuck(tokens, stop) if len(decode.engine.decode_calls) > 2 else None
        )
        owner.killed_at(results=2)
        done = {task.job_id for task in owner.tasks if owner.batch.result(task.job_id)}
        assert len(done) == 2

    # When new ones work on the same folder
    with Pipeline(unseen_copies=True) as second, Class(tmp_path, 5).own(second) as again:
        _, decode = second.start()
        counts = again.run()

        # Then all is done, and what was in the journal was not done again
        assert counts.succeeded == 5
        assert again.lines() == 5
        assert len(decode.engine.decode_calls) == 3
        assert each_once(decode.engine)
        assert all(not second.steps(again.job(task)) for task in again.tasks if task.job_id in done)
        again.texts_are_right()


def test_an_owner_killed_while_it_publishes_publishes_the_rest_when_it_is_back(
    pipeline: Pipeline, tmp_path: Path
) -> None:
    # Given an owner killed after three confirms of ten
    with Class(tmp_path, 10).own(pipeline) as owner:
        pipeline.client.observe = kills_at(3, pipeline)
        with pytest.raises(Killed):
            owner.run()
        pipeline.client.observe = pipeline.observe
    assert pipeline.ready(work("prefill")) == 3

    # When it comes back
    pipeline.start()
    with Class(tmp_path, 10).own(pipeline) as again:
        counts = again.run()

        # Then every job has one line
        assert (counts.succeeded, again.lines()) == (10, 10)
        again.texts_are_right()


def test_a_result_in_the_journal_that_was_not_acked_comes_again_and_makes_no_second_line(
    pipeline: Pipeline, tmp_path: Path
) -> None:
    pipeline.start()
    with Class(tmp_path, 1).own(pipeline) as owner:
        job = owner.job(owner.tasks[0])
        owner.batch.journal.record([JobResult(job.job_id, 1, job.batch_id, job.item_id, MODEL, "expired")])
        pipeline.broker.open_reply_queue(job.batch_id)
        body = codec.encode(JobResult(job.job_id, 1, job.batch_id, job.item_id, MODEL, "expired"))
        pipeline.broker.publish(topology.reply(job.reply_to), Message(body, job.job_id, job.batch_id))

        counts = owner.run()

        assert (counts.expired, owner.lines()) == (1, 1)


# Jobs that were confirmed and have no result


def test_confirmed_jobs_that_vanished_are_published_again(pipeline: Pipeline, tmp_path: Path) -> None:
    # Given a confirmed job that is nowhere: somebody purged its queue
    with Class(tmp_path, 1).own(pipeline) as owner:
        owner.runner.submit()
        delivery = pipeline.broker.get(work("prefill"))
        assert delivery is not None
        delivery.ack()

        # When its owner runs the batch, then it is published again
        pipeline.start()
        assert owner.run().succeeded == 1
        assert pipeline.steps(owner.job(owner.tasks[0])).count(Step.SUBMITTED) == 2


def test_a_confirmed_job_that_vanishes_is_found_and_published_again_while_its_owner_runs(
    pipeline: Pipeline, tmp_path: Path
) -> None:
    # Given an owner that waits for two jobs, of which the broker drops one
    with Class(tmp_path, 2).own(pipeline) as owner, ThreadPoolExecutor() as pool:
        counts = pool.submit(owner.run)
        wait_until(lambda: pipeline.ready(work("prefill")) == 2, "both are published")
        dropped = pipeline.broker.get(work("prefill"))
        assert dropped is not None
        dropped.ack()

        # When workers come and are idle again, then it is published again, under its run, and somebody is told
        pipeline.start()
        assert counts.result(HURRY_S).succeeded == 2
        published = [pipeline.steps(owner.job(task)).count(Step.SUBMITTED) for task in owner.tasks]
        assert sorted(published) == [1, 2]
        assert any("lost them: published again" in said for said in owner.progress.sentences)


@pytest.mark.parametrize("queue", [work("prefill"), work("decode", "now"), "retry.10m", f"suspects.decode.{MODEL}"])
def test_while_any_queue_holds_a_job_none_is_held_for_lost(pipeline: Pipeline, tmp_path: Path, queue: str) -> None:
    with Class(tmp_path, 2).own(pipeline) as owner:
        owner.runner.submit()
        while delivery := pipeline.broker.get(work("prefill")):
            delivery.ack()
        exchange = f"kvasir.{queue}" if queue.startswith("retry.") else topology.WORK
        pipeline.broker.publish(Address(exchange, queue), Message(b"somewhere on its way"))

        assert owner.runner.submit() == 0


def test_while_a_worker_says_that_it_holds_a_job_that_job_is_not_held_for_lost(
    pipeline: Pipeline, tmp_path: Path
) -> None:
    # Given two confirmed jobs, of which a worker holds one and the other vanished
    with Class(tmp_path, 2).own(pipeline) as owner:
        held, lost = owner.tasks
        owner.runner.submit()
        delivery = pipeline.broker.get(work("prefill"))
        vanished = pipeline.broker.get(work("prefill"))
        assert delivery is not None
        assert vanished is not None
        vanished.ack()
        pipeline.client.submit([owner.job(held)])
        delivery.ack()
        prefill = pipeline.start_prefill(WatchedEngine(SLOW.replace("prefill=1000000", "prefill=1")))
        wait_until(
            lambda: (
                held.job_id
                in [job for registration in pipeline.cluster_state.registrations() for job in registration.jobs]
            ),
            "it is on a registration",
        )

        # When the owner looks for what is missing, then only the other is published again
        assert owner.runner.submit() == 1
        assert pipeline.steps(owner.job(lost)).count(Step.SUBMITTED) == 2
        assert len(prefill.engine.prefill_calls) == 1


# Cancelled, failed, and run again


def test_a_cancelled_batch_ends_with_a_result_for_each_job_and_the_counts_add_up(tmp_path: Path) -> None:
    with Pipeline() as pipeline, Class(tmp_path, 6).own(pipeline) as owner:
        # Given a batch of which two jobs are done and the rest waits or runs
        pipeline.start_prefill()
        decode = pipeline.start_decode(WatchedEngine(ONE_BY_ONE, slots=1))
        stuck = Gate()
        decode.engine.before_decode = lambda tokens, stop: (
            stuck(tokens, stop) if len(decode.engine.decode_calls) > 2 else None
        )

        # When it is cancelled while its owner waits
        owner.progress.update = cancels_at(2, pipeline, owner)  # type: ignore[method-assign]
        counts = owner.run()

        # Then every job has its result
        assert (counts.total, counts.open) == (6, 0)
        assert counts.succeeded + counts.cancelled == 6
        assert counts.cancelled >= 3
        assert owner.lines() == 6
        pipeline.nothing_is_left()
        assert pipeline.checker.jobs_without_result() == []


def test_cancelled_jobs_can_be_run_again(pipeline: Pipeline, tmp_path: Path) -> None:
    # Given a batch that was cancelled before anybody worked on it
    with Class(tmp_path, 2).own(pipeline) as owner:
        pipeline.client.cancel(owner.batch.batch_id)
        assert owner.run().cancelled == 2
        while delivery := pipeline.broker.get(work("prefill")):
            delivery.ack()

        # When its jobs are wanted once more
        pipeline.start()
        owner.batch.run_again(task.job_id for task in owner.tasks)
        counts = owner.run()

        # Then they are done, as run 2
        assert (counts.succeeded, counts.cancelled) == (2, 0)
        results = [owner.batch.result(task.job_id) for task in owner.tasks]
        assert [result.run for result in results if result] == [2, 2]
        owner.texts_are_right()


def test_a_failed_job_is_run_again_as_run_2_and_the_others_are_left_alone(tmp_path: Path) -> None:
    with Pipeline() as pipeline, Class(tmp_path, 3).own(pipeline) as owner:
        # Given a batch of which one job failed
        _, decode = pipeline.start()
        culprit = owner.tasks[1]
        tokens = WatchedEngine().tokenize(culprit.prompt, 0.0).ids
        broken = always_fails(RuntimeError("a bug"))
        decode.engine.before_decode = lambda given, stop: broken(given, stop) if tuple(given) == tokens else None
        counts = owner.run()
        assert (counts.succeeded, counts.failed) == (2, 1)

        # When the bug is fixed and the job is wanted again
        decode.engine.before_decode = lambda _tokens, _stop: None
        owner.batch.run_again([culprit.job_id])
        counts = owner.run()

        # Then all have succeeded, and only that one was run again
        assert (counts.succeeded, counts.failed) == (3, 0)
        assert owner.lines() == 4
        assert pipeline.steps(owner.job(culprit, run=2))[-1] is Step.JOURNALED
        assert len(decode.engine.decode_calls) == 4
        owner.texts_are_right()


# What is said


def test_a_reply_queue_that_somebody_deletes_is_opened_again_and_what_was_parked_is_taken(
    pipeline: Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given an owner that waits for its jobs, and results that found no reply queue
    monkeypatch.setattr("producers.batch.runner._LOOK_AROUND_S", 0.1)
    _, decode = pipeline.start()
    decode.engine.before_decode = gate = Gate()
    with Class(tmp_path, 4).own(pipeline) as owner, ThreadPoolExecutor(1) as pool:
        counts = pool.submit(owner.run)
        gate.wait()
        pipeline.server.delete_queue(topology.reply_queue(owner.batch.batch_id))
        gate.open()

        # Then all of them reach the journal, without anybody starting the owner again
        assert counts.result(HURRY_S).succeeded == 4


def test_what_waits_for_a_turn_that_no_worker_knows_is_published_again_where_they_look(
    pipeline: Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given a batch that took the second turn, when all workers are replaced by those of a release that knows the first
    knows_turns = WorkerDetails(turns=topology.TURNS)
    worker = WorkerInfo("d1", "decode", MODEL, "sim", "cpu", "", "", 4096, 1, "h", 1, 0.0, details=knows_turns)
    pipeline.cluster_state.register(worker, ttl_s=60)
    pipeline.client.submit([pipeline.job("of another batch")])
    with Class(tmp_path, 2).own(pipeline) as owner:
        owner.run(max_wait_s=0.1)
        second, first = (work_queue("prefill", MODEL, "bulk", turn) for turn in (1, 0))
        assert (pipeline.ready(second), pipeline.ready(first)) == (2, 1)
        delivery = pipeline.broker.get(first)
        assert delivery
        assert delivery.ack()
        pipeline.cluster_state.register(replace(worker, details=NO_DETAILS), ttl_s=60)

        # When the owner goes on
        monkeypatch.setattr("producers.batch.runner._LOOK_AROUND_S", 0.05)
        owner.run(max_wait_s=3)

        # Then its jobs are in the queue that everybody knows
        assert pipeline.ready(first) == 2


def test_a_person_is_told_of_a_model_that_nobody_serves(pipeline: Pipeline, tmp_path: Path) -> None:
    with Class(tmp_path, 2).own(pipeline) as owner:
        counts = owner.run(max_wait_s=0.1)

    assert counts.open == 2
    assert f"no decode worker serves {MODEL}: 2 jobs wait until one is started" in owner.progress.sentences


def test_nobody_is_told_of_a_worker_that_a_single_look_misses(pipeline: Pipeline, tmp_path: Path) -> None:
    """A store that has just come back empty knows no worker until each has registered again."""
    worker = WorkerInfo("d1", "decode", MODEL, "simulated", "cpu", "", "", 4096, 1, "h", 1, 0.0)
    sentence = f"no decode worker serves {MODEL}: 2 jobs wait until one is started"
    with Class(tmp_path, 2).own(pipeline) as owner:
        pipeline.cluster_state.register(worker, ttl_s=60)
        owner.run(max_wait_s=0.1)  # one look
        pipeline.cluster_state.unregister("d1")
        owner.run(max_wait_s=0.1)
        assert sentence not in owner.progress.sentences

        owner.run(max_wait_s=0.1)
        assert sentence in owner.progress.sentences


def test_a_person_is_told_that_the_decode_workers_do_the_prompts(pipeline: Pipeline, tmp_path: Path) -> None:
    pipeline.start_decode()
    with Class(tmp_path, 2).own(pipeline) as owner:
        owner.run(max_wait_s=0.1)

    assert owner.progress.sentences == [
        f"no prefill worker serves {MODEL}: its decode workers compute the prompts, which takes longer"
    ]


def test_results_that_are_none_of_the_batch_are_left_out_of_its_journal(pipeline: Pipeline, tmp_path: Path) -> None:
    pipeline.start()
    with Class(tmp_path, 3).own(pipeline) as owner:
        # Given results in its reply queue that somebody made up: of another batch, and of a job that it never had
        mine = owner.batch.batch_id
        made_up = [
            JobResult("j1", 1, "another", "i", MODEL, "succeeded"),
            JobResult("j2", 1, mine, "i", MODEL, "expired"),
        ]
        queue = pipeline.broker.open_reply_queue(mine)
        for result in made_up:
            pipeline.broker.publish(topology.reply(queue), Message(codec.encode(result), result.job_id, mine))

        # When the batch runs
        counts = owner.run()

        # Then its journal has its own results, and nothing else
        assert (counts.succeeded, counts.total, owner.lines()) == (3, 3, 3)


def test_the_results_of_a_job_replayed_after_the_batch_was_complete_are_taken(
    pipeline: Pipeline, tmp_path: Path
) -> None:
    prefill, _ = pipeline.start()
    prefill.engine.before_prefill = always_fails(ValueError("a bug"))
    with Class(tmp_path, 2).own(pipeline) as owner:
        assert owner.run().failed == 2
        prefill.engine.before_prefill = lambda _tokens, _stop: None
        pipeline.client.submit([owner.job(task, run=2) for task in owner.tasks])
        wait_until(lambda: pipeline.ready(topology.RESULTS_PARKED) == 2, "both results are parked")

        counts = owner.run()

        assert (counts.succeeded, owner.lines()) == (2, 4)
        owner.texts_are_right()
