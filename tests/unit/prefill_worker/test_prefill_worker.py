"""What may happen to a job at the prefill worker."""

import json
from collections.abc import Iterator
from dataclasses import replace

import pytest

from engines.base import LoadedEngine
from engines.proof import prove
from infra.broker import topology
from infra.broker.base import Address, Delivery
from infra.broker.embedded.broker import EmbeddedBroker
from infra.broker.envelope import open_envelope
from infra.broker.settle import Settler
from infra.quick_jobs import HELD_IF_QUICK, QuickJobs
from infra.worker_loop import OneByOne, SlotPool
from messages.errors import EngineUnavailable, KVTransferFailed
from messages.jobs import Sampling
from messages.lifecycle import Event, Step
from prefill_worker.flow import PrefillFlow
from prefill_worker.worker import PrefillWorker
from tests.support.faults import drop
from tests.support.pipeline import (
    BATCH,
    MODEL,
    SLOW,
    Gate,
    HybridEngine,
    Pipeline,
    SupervisedWorker,
    WatchedEngine,
    always_fails,
    fails,
    work,
)
from tests.support.waiting import wait_until

SLOW_PREFILL = SLOW.replace("prefill=1000000", "prefill=1")


@pytest.fixture(params=[OneByOne, QuickJobs])
def pipeline(request: pytest.FixtureRequest) -> Iterator[Pipeline]:
    with Pipeline(steps=request.param) as pipeline:
        yield pipeline


# The store


@pytest.mark.parametrize("operation", ["put", "missing"])
def test_a_store_that_takes_nothing_costs_the_kv_transfer_and_not_the_job(pipeline: Pipeline, operation: str) -> None:
    pipeline.kv.failing_calls = {operation}
    pipeline.start()
    job = pipeline.job()

    result = pipeline.run(job)

    assert (result.state, result.attempts, result.decode.kv_transfer) == ("succeeded", 1, "none")
    assert "the store did not accept it" in result.decode.why_none
    assert result.text == pipeline.undisturbed_text(job)
    assert Step.KV_STORED not in pipeline.steps(job)


def test_a_store_that_gives_nothing_back_costs_the_restoring_and_not_the_job(pipeline: Pipeline) -> None:
    # Given a class whose prefix is stored
    pipeline.start()
    pipeline.run(pipeline.job("the first " * 20))

    # When the store refuses to read it out
    pipeline.kv.failing_calls = {"get"}
    job = pipeline.job("the second " * 20)
    result = pipeline.run(job)

    # Then the text is right
    assert (result.state, result.text) == ("succeeded", pipeline.undisturbed_text(job))


def test_a_damaged_shared_block_is_not_built_upon(pipeline: Pipeline) -> None:
    # Given a stored prefix, a block of which is damaged
    prefill, _ = pipeline.start()
    pipeline.run(pipeline.job("the first " * 20))
    job = pipeline.job("the second " * 20)
    pipeline.kv.flip_a_byte(pipeline.refs(job)[0])

    # When the next of the class is prefilled
    result = pipeline.run(job)

    # Then the whole prompt is computed, and the answer is right and from a KV cache
    assert len(prefill.engine.prefill_calls[-1]) == result.decode.prompt_tokens - 1
    assert (result.text, result.decode.kv_transfer) == (pipeline.undisturbed_text(job), "verified")


def test_an_engine_that_cannot_give_its_kv_cache_out_costs_the_kv_transfer_and_not_the_job(pipeline: Pipeline) -> None:
    prefill, _ = pipeline.start()
    prefill.engine.before_prefill = always_fails(KVTransferFailed("the disk of the slot files is full"))
    job = pipeline.job()

    result = pipeline.run(job)

    assert (result.state, result.decode.kv_transfer) == ("succeeded", "none")
    assert result.decode.why_none == "the engine did not export it: the disk of the slot files is full"
    assert result.text == pipeline.undisturbed_text(job)


def test_a_prefill_whose_kv_transfer_was_not_proved_passes_the_job_on_untouched(pipeline: Pipeline) -> None:
    prefill = pipeline.start_prefill(why_no_kv="it can't be trusted " * 80)
    pipeline.start_decode()
    job = pipeline.job()

    result = pipeline.run(job)

    assert (prefill.engine.tokenize_calls, prefill.engine.prefill_calls) == (1, [])
    assert (result.text, result.decode.kv_transfer) == (pipeline.undisturbed_text(job), "none")


def test_a_layout_that_is_not_supported_yet_is_not_stored_and_the_result_says_why(pipeline: Pipeline) -> None:
    started, _ = pipeline.start_prefill(HybridEngine()), pipeline.start_decode()
    job = pipeline.job()

    result = pipeline.run(job)

    assert (result.state, result.decode.kv_transfer) == ("succeeded", "none")
    assert result.decode.why_none == "the size of the model's recurrent states is unknown"
    assert result.text == pipeline.undisturbed_text(job)
    assert started.engine.prefill_calls == []
    assert prove(started.engine, started.engine) == result.decode.why_none


def test_a_prompt_of_one_token_needs_no_kv_cache(pipeline: Pipeline) -> None:
    pipeline.start()

    result = pipeline.run(pipeline.job(tokens=(7,)))

    assert (result.state, result.decode.prompt_tokens) == ("succeeded", 1)
    assert result.decode.why_none == "a prompt of one token has no KV cache to transfer"


# Errors


def test_a_transient_error_is_retried_after_a_second_without_tokenizing_into_the_message(pipeline: Pipeline) -> None:
    prefill, _ = pipeline.start()
    prefill.engine.before_prefill = fails(EngineUnavailable("out of memory for now"))
    job = pipeline.job()

    result = pipeline.run(job)

    assert (result.state, result.decode.kv_transfer) == ("succeeded", "verified")
    assert pipeline.steps(job).count(Step.RETRIED) == 1
    assert len(prefill.engine.prefill_calls) == 2


def test_a_prompt_too_long_for_the_model_fails_once_and_can_be_replayed_from_the_graveyard() -> None:
    with Pipeline(unseen_copies=True) as pipeline:
        # Given a job whose answer may be longer than the context has room for
        pipeline.start()
        job = pipeline.job(sampling=Sampling(max_tokens=5000))

        # When it is submitted
        result = pipeline.run(job)

        # Then there is one failed result that says where and why
        assert (result.state, result.error.stage, result.error.kind) == ("failed", "prefill", "ContextExceeded")
        assert "context of 4,096" in result.error.message
        pipeline.nothing_is_left()
        assert len(pipeline.results(job)) == 1

        # and one dead letter, with all that is needed to run it again
        (letter,) = pipeline.dead_letters()
        assert (letter.message_id, letter.correlation_id) == (job.job_id, BATCH)
        assert letter.reply_to == topology.reply_queue(BATCH)
        assert letter.headers["kvasir-from"] == work("prefill")
        assert letter.headers["kvasir-error"] == "ContextExceeded"
        assert (letter.headers["kvasir-model"], letter.headers["kvasir-stage"]) == (job.model, "prefill")
        assert (letter.headers["kvasir-item"], letter.headers["kvasir-run"]) == (job.item_id, 1)

        # and the same body, published again where it came from, is worked on again
        body = replace(letter, headers={name: letter.headers[name] for name in ("kvasir-item", "kvasir-run")})
        pipeline.broker.publish(Address(topology.WORK, str(letter.headers["kvasir-from"])), body)
        assert len(pipeline.results(job, at_least=2)) == 2


def test_a_schema_that_no_engine_takes_fails_at_decode(pipeline: Pipeline) -> None:
    _, decode = pipeline.start()
    schema = json.dumps({"type": "object", "properties": {"a": {"$ref": "#/nowhere"}}, "required": ["a"]})
    job = pipeline.job(sampling=Sampling(max_tokens=16, json_schema=schema))

    result = pipeline.run(job)

    assert (result.state, result.error.stage, result.error.kind) == ("failed", "decode", "InvalidSchema")
    assert [letter.headers["kvasir-from"] for letter in pipeline.dead_letters()] == [work("decode")]
    assert len(decode.engine.decode_calls) == 1
    pipeline.nothing_is_left()


def test_a_bug_in_an_engine_is_not_run_again_and_leaves_the_worker_alive(pipeline: Pipeline) -> None:
    prefill, _ = pipeline.start()
    prefill.engine.before_prefill = fails(RuntimeError("shape mismatch \udcff"))
    job = pipeline.job()

    result = pipeline.run(job)

    assert (result.state, result.error.stage, result.error.kind) == ("failed", "prefill", "RuntimeError")
    assert result.error.message == "bug: RuntimeError: shape mismatch ?"
    assert len(prefill.engine.prefill_calls) == 1
    assert len(pipeline.dead_letters()) == 1
    assert pipeline.run(pipeline.job("the next")).state == "succeeded"


# Cancelled, expired, leaving, dying


def test_a_cancelled_prefill_stops_and_its_batch_is_acked_silently(pipeline: Pipeline) -> None:
    prefill = pipeline.start_prefill(WatchedEngine(SLOW_PREFILL))
    jobs = [pipeline.job(f"number {n} " * 30) for n in range(3)]
    pipeline.submit(*jobs)
    wait_until(lambda: prefill.engine.prefill_calls, "one is being prefilled")

    pipeline.client.cancel(BATCH)

    wait_until(lambda: not prefill.broker.unacked and not pipeline.work_left(), "all is acked", timeout_s=2)
    assert len(prefill.engine.prefill_calls) == 1
    assert [result for job in jobs for result in pipeline.results_so_far(job)] == []


def test_a_job_past_its_deadline_is_not_prefilled(pipeline: Pipeline) -> None:
    job = pipeline.job(deadline=pipeline.cluster_state.now() - 1)
    prefill = pipeline.start_prefill()

    assert pipeline.run(job).state == "expired"
    assert prefill.engine.prefill_calls == []
    assert pipeline.dead_letters(0) == []


def test_a_worker_that_stops_finishes_its_prefill_and_hands_back_what_it_was_given_meanwhile(
    pipeline: Pipeline,
) -> None:
    # Given a worker that prefills an urgent job while a job of the bulk lies in its hands
    prefill = pipeline.start_prefill()
    prefill.engine.before_prefill = gate = Gate()
    urgent, bulk = pipeline.job("urgent " * 30, lane="now"), pipeline.job("bulk " * 30)
    pipeline.submit(urgent)
    gate.wait()
    pipeline.submit(bulk)
    wait_until(lambda: len(prefill.broker.unacked) == 2, "it was given the job of the bulk too")

    # When it is told to leave
    prefill.stop()
    gate.open()
    prefill.wait_until_left()
    pipeline.workers.remove(prefill)

    # Then the urgent one is prefilled, and the other is back in its queue, no return counted
    assert len(prefill.engine.prefill_calls) == 1
    assert pipeline.ready(work("decode", "now")) == 1
    looking = pipeline.new_broker()
    envelope = open_envelope(looking.get(work("prefill")), "prefill", bulk.model)
    assert (envelope.job_id, envelope.returns) == (bulk.job_id, 0)
    looking.close()


def test_a_worker_that_aborts_hands_its_prefill_back_and_another_does_it(pipeline: Pipeline) -> None:
    slow = pipeline.start_prefill(WatchedEngine(SLOW_PREFILL))
    job = pipeline.job()
    pipeline.submit(job)
    wait_until(lambda: slow.engine.prefill_calls, "it is being prefilled")

    pipeline.leave(slow, abort=True)

    pipeline.start()
    result = pipeline.result(job)
    assert (result.text, result.decode.kv_transfer) == (pipeline.undisturbed_text(job), "verified")


def test_a_prefill_that_begins_while_its_worker_aborts_is_handed_back_too() -> None:
    with Pipeline() as pipeline:
        # Given a worker that is told to leave at once after a delivery has come to it, and before it computes anything
        pipeline.submit(pipeline.job())
        crashing = pipeline.new_broker()
        crashing.get(work("prefill"))
        crashing.close()
        broker = EmbeddedBroker(pipeline.server)

        def observe(event: Event) -> None:
            pipeline.observe(event)
            if event.step is Step.REDELIVERED:
                worker.stop(abort=True)

        worker = PrefillWorker(
            MODEL, LoadedEngine(WatchedEngine()), broker, pipeline.kv, pipeline.cluster_state, observe
        )
        delivery = broker.get(work("prefill"))
        assert delivery

        # When it goes on with it
        worker.handle(delivery, lambda: None)

        # Then the job waits for somebody else
        assert (pipeline.ready(work("prefill", "now")), pipeline.ready(work("decode"))) == (1, 0)
        broker.close()


def test_a_worker_renews_its_leases_with_its_heartbeat(monkeypatch: pytest.MonkeyPatch) -> None:
    with Pipeline() as pipeline:
        renewals: list[bool] = []
        prefill = pipeline.start_prefill()
        monkeypatch.setattr(prefill.worker._kv_writer.leases, "renew", lambda: renewals.append(True))

        wait_until(lambda: renewals, "they are renewed")


def test_an_urgent_job_rings_at_each_stage_and_waits_for_no_look(
    pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Given workers that listen already, and look for urgent jobs when they are rung and hardly ever else
    pipeline.start()
    pipeline.run(pipeline.job("the first may come before they listen", lane="now"))
    monkeypatch.setattr("infra.worker_loop._LOOK_AT_NOW_S", 60.0)

    # When more come, then they are answered soon
    for text in ("the second", "the third"):
        assert pipeline.run(pipeline.job(text, lane="now")).state == "succeeded"


def test_a_prefill_that_lost_its_channel_passes_on_all_the_same_and_the_copy_is_harmless(pipeline: Pipeline) -> None:
    # Given a prefill that is running when its worker loses its channel
    prefill, decode = pipeline.start()
    prefill.engine.before_prefill = gate = Gate()
    job = pipeline.job()
    pipeline.submit(job)
    gate.wait()

    # When it goes on, and the job comes back meanwhile
    drop(prefill.broker)
    gate.open()

    # Then whatever becomes of the copy, the job is decoded once and answered alike
    wait_until(lambda: pipeline.steps(job).count(Step.PASSED_ON) == 2, "both copies are passed on")
    assert pipeline.result(job).state == "succeeded"
    pipeline.nothing_is_left()
    assert Step.REDELIVERED in pipeline.steps(job)
    assert len(decode.engine.decode_calls) == 1
    assert len(set(pipeline.results(job))) == 1


def test_a_job_that_kills_its_prefill_worker_ends_as_poison_and_its_neighbours_succeed() -> None:
    with Pipeline(unseen_copies=True) as pipeline:
        # Given a job that kills whoever prefills it, among neighbours, and a supervisor that starts the worker again
        poison, neighbours = pipeline.job("poison", shared_text=""), [pipeline.job(f"neighbour {n}") for n in range(3)]
        prefill, _ = pipeline.start()
        prefill.engine.before_prefill = prefill.dies_of("poison")

        # When all are submitted
        pipeline.submit(neighbours[0], poison, *neighbours[1:])

        # Then it killed three among the others and two alone, and was given up
        result = pipeline.result(poison)
        assert (result.state, result.error.stage, result.error.kind) == ("failed", "prefill", "Poison")
        assert [len(tokens) for tokens in prefill.engine.prefill_calls].count(4) == 5
        assert [pipeline.result(job).state for job in neighbours] == ["succeeded"] * 3


def test_a_job_that_does_not_say_when_it_was_submitted_is_done_all_the_same(pipeline):
    pipeline.start()

    result = pipeline.run(pipeline.job(submitted_at=0.0))

    assert result.state == "succeeded"
    assert (result.prefill.queue_s, result.decode.queue_s) == (0.0, 0.0)


def test_a_short_prompt_goes_on_without_its_kv_cache_and_a_longer_one_with_it(pipeline: Pipeline) -> None:
    # Given a prefill worker that leaves prompts of up to 50 tokens to decode
    engine, broker = WatchedEngine(), EmbeddedBroker(pipeline.server)
    short, long = pipeline.job("short " * 20, shared_text=""), pipeline.job("long " * 80, shared_text="")
    args = (MODEL, LoadedEngine(engine), broker, pipeline.kv, pipeline.cluster_state, pipeline.observe)
    pipeline.workers.append(SupervisedWorker(lambda: PrefillWorker(*args, short_tokens=50), engine, broker))
    pipeline.start_decode()

    # When one of each comes
    pipeline.submit(short, long)

    # Then only the long one was prefilled and stored, and the other's result says why it was not
    assert pipeline.result(long).decode.kv_transfer == "verified"
    result = pipeline.result(short)
    assert (result.state, result.text) == ("succeeded", pipeline.undisturbed_text(short))
    assert (result.decode.kv_transfer, len(engine.prefill_calls)) == ("none", 1)
    assert "this short" in result.decode.why_none


def test_many_quick_jobs_are_held_at_once_until_a_large_one_comes(pipeline: Pipeline) -> None:
    # Given a worker whose jobs have been quick so far, and a large one among those that wait
    jobs = [pipeline.job(f"quick {number}", shared_text="") for number in range(400)]
    jobs[200] = pipeline.job("large " * 4000, shared_text="")
    pipeline.submit(*jobs)
    broker = EmbeddedBroker(pipeline.server)
    settler, held = Settler(broker, [MODEL], pipeline.observe), dict[str, int]()

    def handle(delivery: Delivery, _leave_slot: object) -> None:
        held[delivery.message.message_id] = len(broker.unacked)
        delivery.ack()

    quick_jobs = QuickJobs[None](broker, settler, SlotPool(1, inline=True), handle, lambda _: None)
    flow = PrefillFlow(broker, quick_jobs.consume, MODEL)

    # When all up to the large one are done, and however many go together
    while jobs[200].job_id not in held:
        delivery = flow.next(1)
        assert delivery
        quick_jobs.accept(delivery)

    # Then many were held at once; but beside it one, in case that it takes no longer than the others
    assert max(held.values()) > HELD_IF_QUICK
    assert held[jobs[200].job_id] <= 2
    settler.hand_back_all(flow.close())
    quick_jobs.close()
    broker.close()
