"""KV caches that mislead the decoder are found out on the first job, and now and then later, and not used any more."""

import threading
from collections.abc import Iterator

import pytest

from decode_worker.generate import MAX_GAP
from messages.lifecycle import Step
from tests.support.pipeline import Pipeline, WatchedEngine
from tests.support.sketches import a_sketch


@pytest.fixture
def pipeline() -> Iterator[Pipeline]:
    with Pipeline() as made:
        yield made


def decoded(pipeline: Pipeline, count: int, start: int = 0) -> list[str]:
    """One job after the other; how each one's prompt came to the decoder."""
    found = []
    for number in range(start, start + count):
        job = pipeline.job(f"number {number}")
        pipeline.submit(job)
        result = pipeline.result(job)
        assert result.state == "succeeded"
        assert result.text == pipeline.undisturbed_text(job)
        found.append(result.decode.kv_transfer)
    return found


def test_the_first_job_is_checked_and_then_one_in_so_many(pipeline: Pipeline) -> None:
    pipeline.start_prefill()
    decode = pipeline.start_decode(kv_check_every=3)

    checked = []
    for number in range(9):
        assert decoded(pipeline, 1, number) == ["verified"]
        checked.append(decode.engine.cache_checks)

    assert checked == [1, 1, 1, 2, 2, 2, 3, 3, 3]
    assert sum(event.step is Step.KV_CHECKED for event in pipeline.events) == 3


def test_none_is_checked_if_nobody_wants_it(pipeline: Pipeline) -> None:
    pipeline.start_prefill()
    decode = pipeline.start_decode(kv_check_every=0)

    assert decoded(pipeline, 3) == ["verified"] * 3
    assert decode.engine.cache_checks == 0


@pytest.mark.public_report("vllm-project/vllm 52617")
def test_a_kv_cache_that_misleads_is_not_used_even_once_and_its_producer_s_never_again(pipeline: Pipeline) -> None:
    # Given a decoder whom every transferred KV cache misleads
    same = a_sketch()
    pipeline.start_prefill(sketch=same)
    decode = pipeline.start_decode(kv_check_every=3, sketch=same)
    decode.engine.bias_nats = 3 * MAX_GAP

    # When jobs come
    assert decoded(pipeline, 4) == ["none"] * 4

    # Then the first was compared, all were prefilled by the decoder, and each result says why
    assert decode.engine.cache_checks == 1
    job = pipeline.job("one more")
    pipeline.submit(job)
    why = pipeline.result(job).decode.why_none
    assert "1.50 nats apart" in why
    assert "simulated" in why
    registration = decode.worker.registration()
    assert (registration.notes, registration.why_refused(same.name)) == (why, why)


def test_what_rounding_does_is_let_through(pipeline: Pipeline) -> None:
    pipeline.start_prefill()
    decode = pipeline.start_decode(kv_check_every=3)
    decode.engine.bias_nats = 0.9 * MAX_GAP

    assert decoded(pipeline, 2) == ["verified"] * 2


def test_one_that_goes_astray_later_is_found_by_the_next_check(pipeline: Pipeline) -> None:
    pipeline.start_prefill()
    decode = pipeline.start_decode(kv_check_every=3)
    assert decoded(pipeline, 1) == ["verified"]
    decode.engine.bias_nats = 3 * MAX_GAP

    assert decoded(pipeline, 4, 1) == ["verified"] * 2 + ["none"] * 2


def test_jobs_that_come_together_wait_for_no_verdict_of_another(pipeline: Pipeline) -> None:
    # Given two jobs whose first check is held up until both are at it
    pipeline.start_prefill()
    jobs = [pipeline.job("one"), pipeline.job("another")]
    pipeline.submit(*jobs)
    engine = WatchedEngine()
    engine.bias_nats = 3 * MAX_GAP
    engine.before_check = threading.Barrier(2, timeout=10).wait

    # When both are decoded at once, then neither is answered from its KV cache
    pipeline.start_decode(engine)
    assert [pipeline.result(job).decode.kv_transfer for job in jobs] == ["none", "none"]
