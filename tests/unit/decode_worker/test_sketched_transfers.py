"""Whose KV caches a worker takes: those of producers that compute what it computes, as sketches show."""

from collections.abc import Iterator
from typing import Any

import pytest

from messages.workers import WorkerInfo
from tests.support.pipeline import Pipeline, work
from tests.support.sketches import a_sketch, off_by
from tests.support.waiting import wait_until

OURS = a_sketch(engine="llamacpp")
ROUNDED = off_by(OURS, 0.001, 0, 0, engine="mlx", rounding="f16", weights="weights-2")
OTHER = off_by(OURS, 0.05, 1, 1, slice(4, None), engine="mlx", weights="weights-2")


@pytest.fixture
def pipeline() -> Iterator[Pipeline]:
    with Pipeline() as pipeline:
        yield pipeline


def of(pipeline: Pipeline, role: str) -> WorkerInfo:
    """The registration of the worker in this role."""
    (found,) = [each for each in pipeline.cluster_state.registrations() if each.role == role]
    return found


def test_a_producer_that_computes_the_same_is_believed_and_its_registration_names_what_it_computes(
    pipeline: Pipeline,
) -> None:
    pipeline.start_prefill(sketch=OURS)
    pipeline.start_decode(sketch=OURS)
    job = pipeline.job()
    pipeline.submit(job)

    decode = pipeline.result(job).decode
    assert (decode.kv_transfer, decode.evaluated_tokens, decode.why_none) == ("verified", 1, "")
    assert of(pipeline, "prefill").sketch == OURS.name
    assert pipeline.cluster_state.get_sketch(OURS.name) == OURS.body


def test_a_producer_that_rounds_otherwise_is_believed_and_the_result_says_so(pipeline: Pipeline) -> None:
    pipeline.start_prefill(sketch=ROUNDED)
    pipeline.start_decode(sketch=OURS)
    job = pipeline.job()
    pipeline.submit(job)

    decode = pipeline.result(job).decode
    assert (decode.kv_transfer, decode.evaluated_tokens) == ("verified-rounded", 1)


def test_a_producer_that_computes_something_else_costs_the_transfer_and_everybody_is_told_why(
    pipeline: Pipeline,
) -> None:
    pipeline.start_prefill(sketch=OTHER)
    decode = pipeline.start_decode(sketch=OURS)
    jobs = [pipeline.job(), pipeline.job("another")]
    pipeline.submit(*jobs)

    for job in jobs:
        result = pipeline.result(job)
        why = "mlx and llamacpp compute different KV caches: in layer 1, from position 144 on, V differs by up to 4.8%"
        assert (result.state, result.decode.kv_transfer) == ("succeeded", "none")
        assert result.decode.why_none.startswith(why)
        assert result.decode.evaluated_tokens == result.decode.prompt_tokens > 1
        assert result.text == pipeline.undisturbed_text(job)
        assert decode.worker.registration().notes.startswith(why)


def test_a_producer_whom_every_decoder_refuses_computes_nothing_until_one_comes_that_takes_it(
    pipeline: Pipeline,
) -> None:
    # Given a prefill worker that has learned from a first job's decoder that it is refused
    prefill = pipeline.start_prefill(sketch=OTHER)
    decode = pipeline.start_decode(sketch=OURS)
    first, second, third = pipeline.job(), pipeline.job("another"), pipeline.job("a third one")
    why = pipeline.run(first).decode.why_none
    wait_until(lambda: of(pipeline, "prefill").notes == why, "it learns of it, and says so")
    computed = len(prefill.engine.prefill_calls)

    # When the next job comes, then it goes on at once, and its result has the decoder's own words
    result = pipeline.run(second)
    assert (result.state, result.decode.kv_transfer, result.decode.why_none) == ("succeeded", "none", why)
    assert result.prefill.put_bytes == 0
    assert len(prefill.engine.prefill_calls) == computed
    assert of(pipeline, "decode").refuses == (OTHER.name,)

    # When a decoder has come that computes the same, then there is somebody to compute for
    pipeline.start_decode(sketch=OTHER)
    wait_until(lambda: of(pipeline, "prefill").notes == "", "it learns of that, too")
    pipeline.leave(decode)
    assert pipeline.run(third).decode.kv_transfer == "verified"
    assert len(prefill.engine.prefill_calls) == computed + 1


def test_a_producer_whose_sketch_is_lost_is_believed_again_once_it_is_back(pipeline: Pipeline) -> None:
    # Given a prefilled job whose producer has left, and a store that lost its sketch
    prefill = pipeline.start_prefill(sketch=ROUNDED)
    first, second = pipeline.job(), pipeline.job("another")
    pipeline.submit(first, second)
    wait_until(lambda: pipeline.ready(work("decode")) == 2, "both wait to be decoded")
    pipeline.leave(prefill)
    pipeline.cluster_state.put_sketch(ROUNDED.name, b"", ttl_s=0)

    # Then a decoder can't compare, and does the prompts itself
    decode = pipeline.start_decode(sketch=OURS)
    result = pipeline.result(first).decode
    assert (result.kv_transfer, "is not in the store" in result.why_none) == ("none", True)
    assert decode.worker.registration().notes == ""
    pipeline.result(second)

    # until its producer returns
    pipeline.start_prefill(sketch=ROUNDED)
    third = pipeline.job("a third one")
    pipeline.submit(third)
    assert pipeline.result(third).decode.kv_transfer == "verified-rounded"


@pytest.mark.parametrize(("producer", "decoder"), [(None, OURS), (OURS, None)])
def test_nothing_is_taken_where_only_one_end_left_a_sketch(
    pipeline: Pipeline, producer: object, decoder: object
) -> None:
    pipeline.start_prefill(sketch=producer)
    pipeline.start_decode(sketch=decoder)
    job = pipeline.job()
    pipeline.submit(job)

    decode = pipeline.result(job).decode
    assert (decode.kv_transfer, "did not both leave a sketch" in decode.why_none) == ("none", True)


@pytest.mark.parametrize(("second", "resumes"), [(OURS, True), (ROUNDED, False)])
def test_a_prefill_worker_goes_on_from_a_class_part_of_those_alone_who_compute_just_what_it_computes(
    pipeline: Pipeline, second: Any, resumes: bool
) -> None:
    # Given a class's part, stored by a worker that has left
    shared = "What the whole class is asked. " * 40
    prefill = pipeline.start_prefill(sketch=OURS)
    first, other = pipeline.job(shared_text=shared), pipeline.job("another", shared_text=shared)
    pipeline.submit(first)
    wait_until(lambda: pipeline.ready(work("decode")) == 1, "the first is prefilled")
    pipeline.leave(prefill)

    # When another one prefills for the same class
    pipeline.start_prefill(sketch=second)
    pipeline.submit(other)
    pipeline.start_decode(sketch=OURS)

    # Then it computes the part again unless its sketch is the same to the bit, and both are decoded from KV caches
    report = pipeline.result(other).prefill
    assert (report.restored_tokens > 200) == resumes
    assert pipeline.result(other).decode.kv_transfer == ("verified" if resumes else "verified-rounded")
    assert pipeline.result(first).decode.kv_transfer == "verified"
