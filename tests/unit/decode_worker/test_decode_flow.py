"""Where a decode worker's next job comes from, and what it holds before a slot is free."""

import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace

import pytest

from decode_worker import flow as flow_module
from decode_worker.flow import DecodeFlow
from decode_worker.generate import DecodeAttempt, RunningJobs
from decode_worker.stealing.models import CachedModel, ModelCache
from decode_worker.stealing.queue_forecast import FIRST_TOKENS_PER_S
from decode_worker.stealing.thief import QueueChoice
from engines.base import LoadedEngine
from infra.broker.base import Delivery
from infra.broker.embedded.broker import EmbeddedBroker
from infra.broker.envelope import open_envelope
from infra.broker.settle import Settler
from infra.worker_loop import JobSource, OneByOne, SlotPool
from kvstore.blocks import BlockRef
from messages import codec
from messages.jobs import DecodeJob, DecodeReport, Sampling, user_prompt
from messages.kv import Block, KVLayout
from messages.lifecycle import Step
from tests.support.pipeline import MODEL, Gate, Pipeline, WatchedEngine, WatchedStore, work
from tests.support.waiting import wait_until

LOOK_DUE_S = 0.3  # workers look at `now` four times a second at least, on a busy machine where a wakeup comes late, too
BULK, NOW = work("decode"), work("decode", "now")


class ReadingStore(WatchedStore):
    """Notes how often each record was read."""

    def __init__(self) -> None:
        super().__init__()
        self.read_counts: Counter[BlockRef] = Counter()

    def get(self, fingerprint: str, layout: KVLayout, refs: Sequence[BlockRef]) -> list[Block]:
        blocks = super().get(fingerprint, layout, refs)
        self.read_counts.update(refs)
        return blocks


def prefilled(pipeline: Pipeline, count: int) -> list[DecodeJob]:
    """Jobs that wait to be decoded, longest first, as messages."""
    jobs = [pipeline.job(f"student {number} " * 40) for number in range(count)]
    prefill = pipeline.start_prefill()
    pipeline.submit(*jobs)
    wait_until(lambda: pipeline.ready(BULK) == count, "all wait to be decoded")
    pipeline.leave(prefill)
    return jobs


# One ahead


class Bench:
    """A worker's flow with one slot, driven by hand."""

    def __init__(self, pipeline: Pipeline) -> None:
        self.pipeline = pipeline
        self.broker = EmbeddedBroker(pipeline.server)
        self.slots, self.running = SlotPool(1), RunningJobs()
        self.loaded = LoadedEngine(WatchedEngine())
        model_cache = ModelCache(CachedModel(MODEL, 0, self.loaded))
        choice = QueueChoice(self.broker, pipeline.cluster_state, model_cache, "me", pipeline.observe)
        self.choice = choice
        settler = Settler(self.broker, [MODEL], pipeline.observe)
        jobs = OneByOne[DecodeAttempt](self.broker, settler, self.slots, lambda *_: None, lambda _: None)
        self.flow = DecodeFlow(self.broker, jobs, self.running, choice, pipeline.kv, settler.hand_back_all)
        self.source = JobSource(self.broker, "decode", MODEL, self.flow, lambda: 0)

    def hand_back(self, deliveries: list[Delivery]) -> None:
        Settler(self.broker, [MODEL], self.pipeline.observe).hand_back_all(deliveries)

    def run(self, delivery: Delivery, expected_s: float) -> None:
        """A job is in the slot, and is expected to take so long."""
        attempt = DecodeAttempt([delivery], open_envelope(delivery, "decode", MODEL))
        decode = codec.decode(delivery.message.body, DecodeJob)
        answer = Sampling(max_tokens=max(1, round(expected_s * FIRST_TOKENS_PER_S)))
        attempt.job, attempt.loaded_model = replace(decode, job=replace(decode.job, sampling=answer)), self.loaded
        assert self.running.start(attempt)

    def take(self) -> Delivery:
        return wait_until(lambda: self.source.next(0.1), "a job comes")

    def close(self) -> None:
        self.hand_back(self.flow.close())
        self.slots.close()
        self.broker.close()


@pytest.fixture
def pipeline() -> Iterator[Pipeline]:
    with Pipeline() as pipeline:
        yield pipeline


@pytest.fixture
def bench(pipeline: Pipeline) -> Iterator[Bench]:
    prefilled(pipeline, 4)
    bench = Bench(pipeline)
    yield bench
    bench.close()


def test_nothing_more_is_held_while_no_slot_is_about_to_free(bench, pipeline):
    bench.run(bench.take(), expected_s=100)

    for _ in range(3):
        bench.flow.throttle(bench.source.urgent)

    assert pipeline.ready(BULK) == 3


def test_one_job_more_is_held_when_a_slot_is_about_to_free_and_never_two(bench, pipeline):
    bench.run(bench.take(), expected_s=0.1)

    for _ in range(3):
        bench.flow.throttle(bench.source.urgent)

    assert pipeline.ready(BULK) == 2
    second = bench.take()
    assert pipeline.ready(BULK) == 2
    assert bench.flow.pop_fetch(second).result().cache.num_tokens > 0


def test_a_job_that_was_fetched_too_early_goes_back_and_none_takes_its_place_until_a_slot_has_freed(
    bench, pipeline, monkeypatch
):
    monkeypatch.setattr(flow_module, "_HOLD_S", 0.0)
    bench.choice.note(MODEL, DecodeReport(completion_tokens=60, decode_s=0.6))
    bench.run(bench.take(), expected_s=0.1)
    bench.flow.throttle(bench.source.urgent)
    assert pipeline.ready(BULK) == 2

    wait_until(lambda: bench.flow.throttle(bench.source.urgent) or pipeline.ready(NOW) == 1, "it went back")

    bench.flow.throttle(bench.source.urgent)
    assert (pipeline.ready(NOW), pipeline.ready(BULK)) == (1, 2)


def test_what_is_held_is_handed_back_when_the_worker_leaves(bench, pipeline):
    bench.run(bench.take(), expected_s=0.1)
    bench.flow.throttle(bench.source.urgent)

    bench.hand_back(bench.flow.pause())

    assert pipeline.ready(BULK) == 3


def test_an_interactive_job_goes_before_the_one_that_is_held(bench, pipeline):
    bench.run(bench.take(), expected_s=0.1)
    bench.flow.throttle(bench.source.urgent)
    urgent = pipeline.job("urgent", lane="now")
    prefill = pipeline.start_prefill()
    pipeline.submit(urgent)
    wait_until(lambda: pipeline.ready(NOW) == 1, "the interactive job waits")
    pipeline.leave(prefill)

    bench.source.ring(NOW)

    assert bench.take().message.message_id == urgent.job_id


def test_short_jobs_are_pushed_and_nothing_is_held_ahead(bench, pipeline):
    bench.choice.note(MODEL, DecodeReport(completion_tokens=60, decode_s=0.1))
    bench.run(bench.take(), expected_s=0.0)

    bench.flow.throttle(bench.source.urgent)

    assert pipeline.ready(BULK) == 3
    assert bench.flow._is_pushed


# The same through a worker


def test_the_next_jobs_kv_cache_is_read_while_the_slot_is_still_busy():
    store = ReadingStore()
    with Pipeline(store) as pipeline:
        # Given two jobs, the first of which is being decoded
        first, second = prefilled(pipeline, 2)
        engine = WatchedEngine(slots=1)
        engine.before_decode = gate = Gate()
        pipeline.start_decode(engine)
        gate.wait()

        # When its decode goes on
        own = {ref for ref in pipeline.refs(second) if not ref.is_shared}
        wait_until(lambda: own <= store.read_counts.keys(), "the second one's KV cache has been read")

        # Then only the first has been begun; and both are answered from their KV caches, each read once
        assert len(engine.decode_calls) == 1
        gate.open()
        results = [pipeline.result(job) for job in (first, second)]
        assert {result.decode.kv_transfer for result in results} == {"verified"}
        assert {store.read_counts[ref] for ref in own} == {1}


def test_a_kv_cache_that_was_lost_before_it_could_be_fetched_ahead_is_computed_again():
    with Pipeline() as pipeline:
        first, second = prefilled(pipeline, 2)
        pipeline.kv.delete([ref for ref in pipeline.refs(second) if not ref.is_shared])
        engine = WatchedEngine(slots=1)
        engine.before_decode = gate = Gate()
        pipeline.start_decode(engine)
        gate.wait()
        wait_until(lambda: pipeline.ready(BULK) == 0, "the second one is held")
        gate.open()

        assert pipeline.result(first).decode.kv_transfer == "verified"
        result = pipeline.result(second)
        assert (result.state, result.text) == ("succeeded", pipeline.undisturbed_text(second))


def test_an_interactive_job_behind_600_waits_for_the_running_prefill_its_own_and_one_slot(pipeline):
    # Given 600 jobs from a folder: some prefilled, one being prefilled, and both slots busy
    prefill_engine, decode_engine = WatchedEngine(), WatchedEngine(slots=2)
    slots = [Gate(), Gate()]

    def hold_the_first_two(tokens, stop):
        place = decode_engine.decode_calls.index(tuple(tokens))
        if place < len(slots):
            slots[place](tokens, stop)

    decode_engine.before_decode = hold_the_first_two
    jobs = [pipeline.job(f"student {number} " * 3, shared_text="") for number in range(600)]
    pipeline.start_prefill(prefill_engine)
    pipeline.submit(*jobs[:6])
    wait_until(lambda: pipeline.ready(BULK) == 6, "some are prefilled")
    prefill_engine.before_prefill = running = Gate()
    pipeline.start_decode(decode_engine)
    pipeline.submit(*jobs[6:])
    running.wait()
    wait_until(lambda: len(decode_engine.decode_calls) == 2, "both slots are busy")
    begun = len(prefill_engine.prefill_calls)

    # When a job from the app comes
    urgent = pipeline.job("How many points is this?", shared_text="", lane="now")
    pipeline.submit(urgent)

    # Then it is prefilled as soon as the running one is done
    tokens = prefill_engine.tokenize(user_prompt("", "How many points is this?"), 0.0).ids
    time.sleep(LOOK_DUE_S)
    running.open()
    wait_until(lambda: len(prefill_engine.prefill_calls) > begun, "the next is prefilled")
    assert prefill_engine.prefill_calls[begun] == tokens[:-1]

    # and decoded in the first slot that frees, but for a job that was fetched ahead. With two that free at once, their
    # threads decide in which order three jobs of no time begin.
    wait_until(lambda: Step.PASSED_ON in pipeline.steps(urgent), "it waits to be decoded")
    time.sleep(LOOK_DUE_S)
    slots[0].open()
    wait_until(lambda: tokens in decode_engine.decode_calls, "it is decoded")
    assert decode_engine.decode_calls.index(tokens) in (2, 3)
