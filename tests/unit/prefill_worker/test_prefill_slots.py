"""Several prompts in flight at one prefill worker: each job ends as by itself, and a prefix is computed once."""

import threading
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait

import pytest

from kvstore.memory import MemoryClusterState
from messages.errors import EngineUnavailable
from messages.jobs import PrefillJob
from messages.lifecycle import Step
from prefill_worker.kv_transfer import PrefixLeases
from tests.support.faults import drop
from tests.support.pipeline import INSTANT, Gate, Pipeline, SupervisedWorker, WatchedEngine, WatchedStore, work
from tests.support.waiting import wait_until

AT_ONCE = 3
BATCHING = f"{INSTANT},batch={AT_ONCE}"


@pytest.fixture
def pipeline() -> Iterator[Pipeline]:
    with Pipeline() as pipeline:
        yield pipeline


def held_at_a_gate(pipeline: Pipeline, jobs: Sequence[PrefillJob]) -> tuple[SupervisedWorker, Gate]:
    """A worker that has begun as many of these jobs as it can."""
    engine, gate = WatchedEngine(BATCHING), Gate()
    engine.before_prefill = gate
    started = pipeline.start_prefill(engine)
    pipeline.submit(*jobs)
    wait_until(lambda: len(started.engine.prefill_calls) >= min(AT_ONCE, len(jobs)), "they are in flight")
    return started, gate


def alone(pipeline: Pipeline, count: int, **fields: object) -> list[PrefillJob]:
    """Jobs that share nothing."""
    return [pipeline.job(f"student {number} wrote this " * 30, shared_text="", **fields) for number in range(count)]


def test_as_many_prompts_are_in_flight_as_the_engine_computes_at_once_and_no_more_is_held(pipeline: Pipeline) -> None:
    # Given more jobs than the engine computes at once
    jobs = alone(pipeline, 5)
    prefill, gate = held_at_a_gate(pipeline, jobs)

    # Then the others wait in their queue, for whoever is free
    wait_until(lambda: pipeline.ready(work("prefill")) == 2, "the others are in the queue")
    assert len(prefill.broker.unacked) == AT_ONCE
    said = prefill.worker.registration()
    assert (said.slots, said.busy, len(said.jobs)) == (AT_ONCE, AT_ONCE, AT_ONCE)

    # and in the end each is answered from its own KV cache
    gate.open()
    pipeline.start_decode()
    for job in jobs:
        result = pipeline.result(job)
        assert (result.text, result.decode.kv_transfer) == (pipeline.undisturbed_text(job), "verified")
    pipeline.nothing_is_left()
    assert prefill.worker.registration().busy == 0


def test_a_prefix_is_computed_once_though_several_of_its_class_are_in_flight(pipeline: Pipeline) -> None:
    # Given a class whose prompts are all begun at once
    jobs = [pipeline.job(f"student {number} " * 30) for number in range(AT_ONCE)]
    prefill = pipeline.start_prefill(WatchedEngine(BATCHING))
    prefill.engine.before_prefill = gate = Gate()
    pipeline.submit(*jobs)
    wait_until(lambda: prefill.worker.registration().busy == AT_ONCE, "all are in flight")

    # When the first one's prefix may be computed
    assert len(prefill.engine.prefill_calls) == 1
    gate.open()
    pipeline.start_decode()

    # Then the others go on from it
    reports = [pipeline.result(job).prefill for job in jobs]
    assert sorted(report.restored_tokens > 0 for report in reports) == [False, True, True]
    assert len({report.restored_tokens for report in reports}) == 2
    assert {pipeline.result(job).decode.kv_transfer for job in jobs} == {"verified"}


def test_of_one_worker_s_jobs_one_has_the_lease_and_the_next_finds_the_prefix_there() -> None:
    leases, stop, stored = PrefixLeases(MemoryClusterState(), "worker-1"), threading.Event(), threading.Event()

    def second() -> bool:
        with leases.turn("abc", stored.is_set, 3600, stop) as ours:
            return ours

    with ThreadPoolExecutor(1) as pool:
        # Given a job that computes a prefix; another one it may compute, too
        with leases.turn("abc", stored.is_set, 0, stop) as first, leases.turn("def", lambda: False, 0, stop) as other:
            assert (first, other, len(leases.claims)) == (True, True, 2)
            # When a second job of the class comes
            waiting = pool.submit(second)
            assert not wait([waiting], 0.3).done
            stored.set()
        # Then it has waited for the first
        assert waiting.result() is False
    assert leases.claims == []


def test_an_error_of_one_ends_that_one_and_no_other(pipeline: Pipeline) -> None:
    # Given three jobs in flight, of which one meets a passing error, and another one that stays
    passing, lasting, fine = jobs = alone(pipeline, AT_ONCE)
    engine, gate = WatchedEngine(BATCHING), Gate()
    ids = {job.job_id: engine.tokenize(job.prompt, 0.0).ids[:-1] for job in jobs}
    errors = {
        ids[passing.job_id]: [EngineUnavailable("out of memory for now")],
        ids[lasting.job_id]: [RuntimeError("shape mismatch")],
    }

    def meets(given: Sequence[int], stop: threading.Event | None) -> None:
        gate(given, stop)
        if left := errors.get(tuple(given)):
            raise left.pop()

    engine.before_prefill = meets
    pipeline.start_prefill(engine)
    pipeline.submit(*jobs)
    wait_until(lambda: len(engine.prefill_calls) == AT_ONCE, "they are in flight")

    # When they go on
    gate.open()
    pipeline.start_decode()

    # Then each ends in its own way
    assert [pipeline.result(job).state for job in (fine, lasting, passing)] == ["succeeded", "failed", "succeeded"]
    assert Step.RETRIED in pipeline.steps(passing)
    assert Step.RETRIED not in pipeline.steps(fine)
    pipeline.nothing_is_left()


def test_a_cancelled_batch_s_jobs_are_stopped_all_at_once(pipeline: Pipeline) -> None:
    # Given two batches in flight
    cancelled, other = alone(pipeline, 2), pipeline.job("another's " * 30, shared_text="", batch="other")
    prefill, gate = held_at_a_gate(pipeline, [*cancelled, other])

    # When one is cancelled
    pipeline.client.cancel(cancelled[0].batch_id)

    # Then its jobs end silently, and the other goes on
    wait_until(lambda: len(prefill.broker.unacked) == 1, "those of the batch are acked")
    gate.open()
    pipeline.start_decode()
    assert pipeline.result(other).state == "succeeded"
    assert [result for job in cancelled for result in pipeline.results_so_far(job)] == []


@pytest.mark.parametrize("abort", [False, True])
def test_a_worker_that_leaves_finishes_what_is_in_flight_or_hands_it_back(pipeline: Pipeline, abort: bool) -> None:
    jobs = alone(pipeline, 4)
    prefill, gate = held_at_a_gate(pipeline, jobs)

    prefill.stop(abort)
    if not abort:
        gate.open()
    prefill.wait_until_left()
    pipeline.workers.remove(prefill)

    assert (pipeline.ready(work("prefill")), pipeline.ready(work("prefill", "now"))) == (1, AT_ONCE if abort else 0)
    assert pipeline.ready(work("decode")) == (0 if abort else AT_ONCE)
    pipeline.start()
    assert {pipeline.result(job).state for job in jobs} == {"succeeded"}


def test_jobs_whose_worker_lost_its_channel_pass_on_and_their_copies_are_harmless(pipeline: Pipeline) -> None:
    # Given prompts in flight when their worker loses its channel
    jobs = alone(pipeline, AT_ONCE)
    prefill, gate = held_at_a_gate(pipeline, jobs)

    # When they go on, and come back meanwhile
    drop(prefill.broker)
    gate.open()
    decode = pipeline.start_decode()

    # Then each is decoded once, and answered alike
    for job in jobs:
        wait_until(lambda job=job: pipeline.steps(job).count(Step.PASSED_ON) == 2, "both copies are passed on")
        assert pipeline.result(job).text == pipeline.undisturbed_text(job)
    pipeline.nothing_is_left()
    assert len(decode.engine.decode_calls) == AT_ONCE


def test_a_job_that_kills_its_worker_ends_as_poison_and_those_beside_it_succeed() -> None:
    with Pipeline(unseen_copies=True) as pipeline:
        # Given a job that takes the worker's channel along whenever it is prefilled, among neighbours
        poison, neighbours = pipeline.job("poison", shared_text=""), [pipeline.job(f"neighbour {n}") for n in range(4)]
        prefill, _ = pipeline.start_prefill(WatchedEngine(BATCHING)), pipeline.start_decode()
        prefill.engine.before_prefill = prefill.dies_of("poison")

        pipeline.submit(*neighbours[:2], poison, *neighbours[2:])

        # Then it is given up, and they are answered
        result = pipeline.result(poison)
        assert (result.state, result.error.stage, result.error.kind) == ("failed", "prefill", "Poison")
        assert Step.ISOLATED in pipeline.steps(poison)
        assert [pipeline.result(job).state for job in neighbours] == ["succeeded"] * 4


def test_room_is_reserved_for_each_job_in_flight_and_freed_with_it() -> None:
    with Pipeline(WatchedStore(max_bytes=16 << 20)) as pipeline:
        jobs = alone(pipeline, 4)
        prefill, gate = held_at_a_gate(pipeline, jobs[:1])
        reserved = pipeline.cluster_state.reserved_bytes()
        assert reserved > 0

        pipeline.submit(*jobs[1:3])
        wait_until(lambda: len(prefill.engine.prefill_calls) == AT_ONCE, "three are in flight")
        assert pipeline.cluster_state.reserved_bytes() == 3 * reserved

        gate.open()
        wait_until(lambda: not pipeline.cluster_state.reserved_bytes(), "nothing is reserved any more")
