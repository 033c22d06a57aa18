"""Without a prefill worker a model's jobs are decoded all the same, and their results say so."""

from collections.abc import Iterator
from dataclasses import replace

import pytest

from decode_worker import fallback
from decode_worker.fallback import Fallback
from infra.broker import topology
from infra.broker.envelope import submit_message
from infra.broker.settle import Settler
from kvstore.cluster_state import BestEffortClusterState
from messages.errors import StoreUnavailable
from messages.lifecycle import Step
from messages.workers import ENGINE_AWAY
from tests.support.pipeline import MODEL, SLOW, Pipeline, WatchedEngine, work
from tests.support.waiting import wait_until


@pytest.fixture
def pipeline() -> Iterator[Pipeline]:
    with Pipeline(unseen_copies=True) as pipeline:
        yield pipeline


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A decode worker waits for no prefill worker."""
    monkeypatch.setattr(fallback, "ALONE_FOR_SURE_S", 0.0)


def test_the_decode_worker_does_the_prompt_itself_and_the_result_says_why(pipeline: Pipeline, impatient: None) -> None:
    decode = pipeline.start_decode()

    job = pipeline.job()
    result = pipeline.run(job)

    assert result.state == "succeeded"
    assert result.text == pipeline.undisturbed_text(job)
    assert (result.decode.kv_transfer, result.decode.why_none) == ("none", "no prefill worker serves this model")
    assert Step.PASSED_ON in pipeline.steps(job)
    assert len(decode.engine.decode_calls) == 1
    pipeline.nothing_is_left()


def test_a_prefill_worker_that_is_there_is_left_its_work(pipeline: Pipeline, impatient: None) -> None:
    pipeline.start()

    results = [pipeline.run(pipeline.job(f"def f{number}(): ...\n" * 40)) for number in range(3)]

    assert [result.decode.kv_transfer for result in results] == ["verified"] * 3


def test_a_prefill_worker_whose_engine_is_away_is_not_waited_for(pipeline: Pipeline, impatient: None) -> None:
    # Given a prefill worker that takes nothing, since its engine's program is gone
    gone = WatchedEngine()
    gone.outage = "it is started again"
    prefill = pipeline.start_prefill(gone)
    wait_until(lambda: prefill.worker.registration().off == ENGINE_AWAY, "it says so")
    pipeline.start_decode()
    # Then the class is graded all the same, and from a transferred cache again once it is back
    first, second = pipeline.job("def f(): ...\n" * 40), pipeline.job("def g(): ...\n" * 40)
    assert pipeline.run(first).decode.why_none == "no prefill worker serves this model"
    gone.outage = ""
    wait_until(lambda: not any(one.off for one in pipeline.cluster_state.registrations()), "it is back")
    assert pipeline.run(second).decode.kv_transfer == "verified"


def test_jobs_are_passed_on_a_few_at_a_time_so_that_a_prefill_worker_finds_the_rest(
    pipeline: Pipeline, impatient: None
) -> None:
    pipeline.start_decode(WatchedEngine(SLOW, slots=2))
    jobs = [pipeline.job(f"def f{number}(): ...\n" * 40) for number in range(20)]
    pipeline.submit(*jobs)
    wait_until(lambda: pipeline.ready(work("decode")) >= 2, "as many wait as there are slots")

    assert pipeline.ready(work("prefill")) >= 20 - 3 * 2


def test_a_job_that_prefill_workers_died_of_is_passed_on_too(pipeline: Pipeline, impatient: None) -> None:
    job = pipeline.job()
    pipeline.submit(job)
    delivery = pipeline.broker.get(work("prefill"))
    assert delivery is not None
    pipeline.broker.publish(topology.suspects("prefill", MODEL), delivery.message)
    delivery.ack()

    pipeline.start_decode()

    assert pipeline.result(job).state == "succeeded"


def test_a_body_that_nobody_can_read_ends_as_a_dead_letter(pipeline: Pipeline, impatient: None) -> None:
    job = pipeline.job()
    pipeline.listen(job.batch_id)
    to, message = submit_message(job)
    pipeline.broker.publish(to, replace(message, body=b"nonsense"))

    pipeline.start_decode()

    result = pipeline.result(job)
    assert result.state == "failed"
    assert result.error is not None
    assert result.error.kind == "InvalidMessage"
    assert len(pipeline.dead_letters()) == 1


class AwayClusterState(BestEffortClusterState):
    """A cluster state whose store does not answer."""

    def registrations(self) -> list:  # type: ignore[type-arg]
        raise StoreUnavailable("unplugged by the test")


def test_a_store_that_is_away_is_not_taken_for_a_missing_prefill_worker(pipeline: Pipeline, impatient: None) -> None:
    # Given a stand-in whose cluster state answers nothing, and a job for prefill
    pipeline.submit(pipeline.job())
    cluster_state = BestEffortClusterState(AwayClusterState(pipeline.cluster_state))
    settler = Settler(pipeline.broker, [MODEL], pipeline.observe)
    one = Fallback(pipeline.broker, cluster_state, settler, "me", MODEL, 2)

    # When it looks
    one.look()

    # Then the job stays
    assert pipeline.ready(work("prefill")) == 1
