"""What may happen to a job at the decode worker, and that it always ends in the right text or in one typed result."""

from dataclasses import replace

import pytest

from decode_worker.stealing.models import CachedModel, ModelCache
from decode_worker.worker import DecodeWorker
from engines.base import LoadedEngine
from infra.broker import topology
from infra.broker.embedded.broker import EmbeddedBroker
from infra.broker.envelope import open_envelope
from infra.quick_jobs import QuickJobs
from infra.worker_loop import JobSource, OneByOne
from kvstore.base import TTL_S
from kvstore.memory import MemoryClusterState
from messages import codec
from messages.errors import EngineUnavailable, StoreUnavailable
from messages.jobs import DecodeJob, Sampling, user_prompt
from messages.lifecycle import Step
from messages.workers import ENGINE_AWAY, SELF_PAUSED
from tests.support.faults import drop
from tests.support.pipeline import (
    BATCH,
    INSTANT,
    SLOW,
    Gate,
    Pipeline,
    SupervisedWorker,
    WatchedEngine,
    WorkerDied,
    always_fails,
    fails,
    work,
)
from tests.support.waiting import wait_until

SHORT = "short"
RETRY_1S = topology.retry_level(1)


@pytest.fixture(params=[OneByOne, QuickJobs])
def pipeline(request):
    with Pipeline(steps=request.param) as pipeline:
        yield pipeline


def prefilled(pipeline, *jobs, prefill: SupervisedWorker | None = None) -> None:
    """Submit jobs and have them prefilled; nobody decodes yet."""
    prefill = prefill or pipeline.start_prefill()
    pipeline.submit(*jobs)
    wait_until(lambda: pipeline.ready(work("decode")) == len(jobs), "the jobs wait to be decoded")


def facts(pipeline, job, step: Step) -> dict[str, object]:
    """What is known of the only such step of a job."""
    (event,) = [event for event in pipeline.events if (event.job_id, event.step) == (job.job_id, step)]
    return event.facts


# The KV cache is gone, damaged or foreign


def test_a_job_whose_kv_cache_is_gone_goes_back_to_prefill_ahead_of_the_bulk_and_no_attempt_is_counted(pipeline):
    # Given a prefilled job whose blocks were lost, and a prefill worker that is held up by another job
    job, other = pipeline.job(), pipeline.job("another")
    prefill = pipeline.start_prefill()
    prefilled(pipeline, job, prefill=prefill)
    pipeline.kv.delete(pipeline.refs(job))
    prefill.engine.before_prefill = gate = Gate()
    pipeline.submit(other)
    gate.wait()

    # When a decode worker takes it
    pipeline.start_decode()

    # Then it waits in prefill's `now` lane, with one failed KV transfer and no attempt counted
    wait_until(lambda: pipeline.ready(work("prefill", "now")) == 1, "it is back at prefill")
    broker = pipeline.new_broker()
    envelope = open_envelope(broker.get(work("prefill", "now")), "prefill", job.model)
    assert (envelope.job_id, envelope.kv_transfers, envelope.attempts) == (job.job_id, 1, 0)
    broker.close()

    # and is then answered from a KV cache after all
    gate.open()
    result = pipeline.result(job)
    assert (result.state, result.attempts) == ("succeeded", 1)
    assert (result.decode.kv_transfer, result.decode.evaluated_tokens) == ("verified", 1)
    assert result.text == pipeline.undisturbed_text(job)
    assert pipeline.steps(job).count(Step.KV_GONE) == 1


class LossyClusterState(MemoryClusterState):
    """A store whose larger values do not come through, or which is away."""

    def __init__(self):
        super().__init__()
        self.loses_large, self.is_away, self.probes = False, False, 0

    def now(self):
        if self.is_away:
            raise StoreUnavailable("away")
        return super().now()

    def get_sketch(self, name):
        if self.loses_large in (True, "coming") or self.is_away:
            raise StoreUnavailable("no answer")
        self.probes += name.startswith("probe-")
        return super().get_sketch(name)

    def put_sketch(self, name, body, ttl_s=TTL_S):
        if self.loses_large == "going" and super().get_sketch(name) is None:  # what is there is not sent again
            raise StoreUnavailable("no answer")
        super().put_sketch(name, body, ttl_s)

    def encoded_registrations(self):
        if self.loses_large == "coming":
            raise StoreUnavailable("no answer")
        return super().encoded_registrations()


def test_a_worker_that_can_fetch_no_kv_cache_leaves_the_jobs_to_others_until_a_probe_comes_through(
    pipeline, monkeypatch
):
    monkeypatch.setattr("decode_worker.generate._PROBE_EVERY_S", 0.0)
    cluster_state = pipeline.cluster_state = LossyClusterState()
    jobs = [pipeline.job(f"{number}") for number in range(3)]
    prefilled(pipeline, *jobs)
    # Given a worker whose fetches fail while the store answers
    cluster_state.loses_large = True
    pipeline.kv.failing_calls = {"get"}
    decode = pipeline.start_decode(WatchedEngine(slots=1))
    # Then alone it goes on without them, and takes no more once there is another one
    assert all(pipeline.result(job).decode.why_none.startswith("the store is away") for job in jobs)
    register_another(pipeline, off="")
    wait_until(lambda: decode.worker.registration().off == SELF_PAUSED, "it has paused itself")
    assert "3 KV caches in a row" in decode.worker.registration().details.paused_because
    later = pipeline.job("later")
    prefilled(pipeline, later, prefill=pipeline.workers[0])
    # While nobody has a store, everybody goes on without one
    cluster_state.is_away = True
    wait_until(lambda: decode.worker.registration().off == "", "it takes jobs")
    assert pipeline.result(later).state == "succeeded"
    cluster_state.is_away = False
    wait_until(lambda: decode.worker.registration().off == SELF_PAUSED, "it has paused itself again")
    # When something large comes through again
    cluster_state.loses_large = False
    pipeline.kv.failing_calls = set()
    # Then it goes on by itself, with KV caches
    wait_until(lambda: decode.worker.registration().off == "", "it takes jobs")
    assert pipeline.run(pipeline.job("last")).decode.kv_transfer == "verified"


@pytest.mark.parametrize("way", ["going", "coming"])
def test_a_worker_without_jobs_finds_out_that_nothing_large_passes(pipeline, way, monkeypatch):
    monkeypatch.setattr("decode_worker.generate._PROBE_EVERY_S", 0.0)
    cluster_state = pipeline.cluster_state = LossyClusterState()
    pipeline.start_prefill()
    register_another(pipeline, off="")
    decode = pipeline.start_decode()
    wait_until(lambda: cluster_state.probes, "it has tried once")
    cluster_state.loses_large = way
    wait_until(lambda: decode.worker.registration().off == SELF_PAUSED, "it has paused itself")
    cluster_state.loses_large = False
    wait_until(lambda: decode.worker.registration().off == "", "it takes jobs")


def register_another(pipeline, off):
    """A decode worker of the same model, elsewhere."""
    registration = pipeline.workers[0].worker.registration()
    pipeline.cluster_state.register(replace(registration, role="decode", worker_id="another", off=off), ttl_s=600)


def test_a_worker_that_can_fetch_no_kv_cache_goes_on_without_where_the_others_can_not_either(pipeline):
    cluster_state = pipeline.cluster_state = LossyClusterState()
    jobs = [pipeline.job(f"{number}") for number in range(8)]
    prefilled(pipeline, *jobs)
    cluster_state.loses_large = True
    pipeline.kv.failing_calls = {"get"}
    register_another(pipeline, off=SELF_PAUSED)
    pipeline.start_decode(WatchedEngine(slots=1))
    assert all(pipeline.result(job).decode.why_none.startswith("the store is away") for job in jobs)


def test_a_job_that_comes_back_is_not_tokenized_again_and_rings_at_prefill(pipeline, monkeypatch):
    # Prefill alone looks seldom: a decoder with no free slot yet hands the job back, and nobody is told of that.
    look_at = JobSource._look_at

    def look_seldom_at_prefill(source, queue, every_s):
        return look_at(source, queue, 60.0 if topology.stage_and_model(queue)[0] == "prefill" else every_s)

    monkeypatch.setattr(JobSource, "_look_at", look_seldom_at_prefill)
    job, prefill = pipeline.job(), pipeline.start_prefill()
    prefilled(pipeline, job, prefill=prefill)
    pipeline.kv.delete(pipeline.refs(job))

    pipeline.start_decode()

    assert pipeline.result(job).decode.kv_transfer == "verified"
    assert (len(prefill.engine.prefill_calls), prefill.engine.tokenize_calls) == (2, 1)


def test_a_kv_cache_gone_twice_is_no_longer_waited_for_and_the_result_says_why(pipeline):
    # Given a job whose blocks are lost after each prefill
    job, prefill = pipeline.job(), pipeline.start_prefill()
    prefilled(pipeline, job, prefill=prefill)
    pipeline.kv.delete(pipeline.refs(job))
    prefill.engine.before_prefill = gate = Gate()
    first = pipeline.start_decode()
    gate.wait()
    pipeline.leave(first)
    gate.open()
    wait_until(lambda: pipeline.ready(work("decode")) == 1, "it was prefilled a second time")
    pipeline.kv.delete(pipeline.refs(job))

    # When it is decoded
    decode = pipeline.start_decode()
    result = pipeline.result(job)

    # Then the decoder did the prompt itself, once
    assert result.decode.kv_transfer == "none"
    assert "is not in the store" in result.decode.why_none
    assert result.decode.evaluated_tokens == result.decode.prompt_tokens
    assert (result.text, result.attempts) == (pipeline.undisturbed_text(job), 1)
    assert len(decode.engine.decode_calls) == 1
    assert pipeline.steps(job).count(Step.KV_GONE) == 1


def test_a_short_prompt_without_its_kv_cache_is_decoded_alone_at_once(pipeline):
    job = pipeline.job(SHORT, shared_text="")
    prefilled(pipeline, job)
    pipeline.kv.delete(pipeline.refs(job))

    pipeline.start_decode()

    result = pipeline.result(job)
    assert (result.decode.kv_transfer, result.text) == ("none", pipeline.undisturbed_text(job))
    assert Step.KV_GONE not in pipeline.steps(job)


def test_without_a_prefill_worker_a_lost_kv_cache_is_not_waited_for(pipeline):
    job, prefill = pipeline.job(), pipeline.start_prefill()
    prefilled(pipeline, job, prefill=prefill)
    pipeline.leave(prefill)
    pipeline.kv.delete(pipeline.refs(job))

    pipeline.start_decode()

    result = pipeline.result(job)
    assert (result.decode.kv_transfer, result.text) == ("none", pipeline.undisturbed_text(job))
    assert Step.KV_GONE not in pipeline.steps(job)


@pytest.mark.parametrize("which", ["shared", "own"])
def test_a_damaged_record_is_never_used_and_is_computed_again(pipeline, which):
    # Given a prefilled job, one record of which is damaged in the store
    job = pipeline.job()
    prefilled(pipeline, job)
    damaged = next(ref for ref in pipeline.refs(job) if ref.is_shared == (which == "shared"))
    pipeline.kv.flip_a_byte(damaged)

    # When it is decoded
    pipeline.start_decode()
    result = pipeline.result(job)

    # Then the text is right, and the KV cache was made again
    assert result.text == pipeline.undisturbed_text(job)
    assert (result.decode.kv_transfer, result.decode.evaluated_tokens) == ("verified", 1)
    assert pipeline.steps(job).count(Step.KV_GONE) == 1

    # and the next job of the class does not meet the damage
    neighbour = pipeline.job("a neighbour's work " * 20)
    assert pipeline.run(neighbour).decode.kv_transfer == "verified"
    assert Step.KV_GONE not in pipeline.steps(neighbour)


def test_a_kv_cache_of_another_model_is_decoded_alone_and_not_prefilled_again(pipeline):
    job, prefill = pipeline.job(), pipeline.start_prefill(WatchedEngine("sim:scale=0,answer=8,seed=2"))
    prefilled(pipeline, job, prefill=prefill)

    pipeline.start_decode()

    result = pipeline.result(job)
    assert result.decode.kv_transfer == "none"
    assert "this worker's model" in result.decode.why_none
    assert result.text == pipeline.undisturbed_text(job)
    assert len(prefill.engine.prefill_calls) == 1


def test_a_kv_cache_of_a_layout_that_is_not_supported_yet_is_not_used(pipeline):
    # Given a decode job of a later version's prefill worker, for the same model
    job = pipeline.job()
    prefilled(pipeline, job)
    delivery = pipeline.broker.get(work("decode"))
    later = codec.decode(delivery.message.body, DecodeJob)
    later = replace(later, kv=replace(later.kv, layout=replace(later.kv.layout, v_head_dim=8)))
    message = replace(delivery.message, body=codec.encode(later))
    pipeline.broker.publish(topology.work("decode", job.model, "bulk"), message)
    delivery.ack()

    pipeline.start_decode()

    result = pipeline.result(job)
    assert (result.state, result.decode.kv_transfer) == ("succeeded", "none")
    assert result.decode.why_none == "K is 16 wide and V 8; unequal widths can't be transferred yet"
    assert result.text == pipeline.undisturbed_text(job)


def test_a_store_that_is_away_costs_the_decoder_the_kv_transfer_and_not_the_job(pipeline):
    job = pipeline.job()
    prefilled(pipeline, job)
    pipeline.kv.failing_calls = {"get", "delete"}

    pipeline.start_decode()

    result = pipeline.result(job)
    assert (result.state, result.decode.kv_transfer, result.attempts) == ("succeeded", "none", 1)
    assert facts(pipeline, job, Step.ANSWERED)["get_bytes"] == 0
    assert "the store is away" in result.decode.why_none
    assert result.text == pipeline.undisturbed_text(job)


def test_an_engine_whose_kv_transfer_was_not_proved_is_given_no_kv_cache(pipeline):
    job = pipeline.job()
    prefilled(pipeline, job)

    pipeline.start_decode(why_no_kv="its answers differed" * 100)

    result = pipeline.result(job)
    assert result.decode.kv_transfer == "none"
    assert result.decode.why_none.startswith("its answers differed")


# Errors


def test_a_transient_error_is_retried_after_a_second_and_counted(pipeline):
    _, decode = pipeline.start()
    decode.engine.before_decode = fails(EngineUnavailable("the model was being loaded"))
    job = pipeline.job()

    result = pipeline.run(job)

    assert (result.state, result.attempts) == ("succeeded", 2)
    assert (result.text, result.decode.kv_transfer) == (pipeline.undisturbed_text(job), "verified")
    assert pipeline.steps(job).count(Step.RETRIED) == 1
    stored, answered = (facts(pipeline, job, step) for step in (Step.KV_STORED, Step.ANSWERED))
    assert answered["get_bytes"] == stored["put_bytes"] > 0


def test_of_an_engine_that_goes_away_the_begun_jobs_lose_one_attempt_and_the_others_none(pipeline):
    # Given more jobs than slots, and an engine whose program goes away under the first
    jobs = [pipeline.job(f"def f{number}(): ...\n" * 40) for number in range(24)]
    pipeline.start_prefill()
    engine = WatchedEngine()

    def goes_away(_tokens, _stop):
        engine.outage = "its program died"
        raise EngineUnavailable(engine.outage)

    engine.before_decode = goes_away
    decode = pipeline.start_decode(engine)
    pipeline.submit(*jobs)
    # When it stays away for longer than a job's second retry
    wait_until(lambda: engine.outage, "it is away")
    wait_until(lambda: pipeline.ready(work("decode")) == len(jobs), "all jobs wait for whoever is there")
    assert decode.worker.registration().off == ENGINE_AWAY
    assert decode.worker.registration().notes == "its program died"
    begun = len(engine.decode_calls)
    # Then nothing more was asked of it, and once it is back all are answered
    assert begun <= 8  # those in hand when it went, of quick jobs more than there are slots
    engine.before_decode, engine.outage = fails(), ""
    results = [pipeline.result(job) for job in jobs]
    assert {result.state for result in results} == {"succeeded"}
    assert sorted(result.attempts for result in results) == [1] * (len(jobs) - begun) + [2] * begun


def test_while_it_waits_for_its_retry_a_job_lies_in_the_retry_level(pipeline):
    _, decode = pipeline.start()
    decode.engine.before_decode = fails(EngineUnavailable("not yet"))
    job = pipeline.job()

    pipeline.submit(job)

    wait_until(lambda: pipeline.ready(RETRY_1S) == 1, "the job is in the first retry level")
    wait_until(lambda: not decode.broker.unacked, "its delivery is acked")
    assert pipeline.result(job).state == "succeeded"


def test_a_bug_in_an_engine_is_not_run_again_and_leaves_the_worker_alive(pipeline):
    _, decode = pipeline.start()
    decode.engine.before_decode = fails(RuntimeError("index out of range"))
    job = pipeline.job()

    result = pipeline.run(job)

    assert (result.state, result.error.stage, result.error.kind) == ("failed", "decode", "RuntimeError")
    assert result.error.message == "bug: RuntimeError: index out of range"
    assert len(decode.engine.decode_calls) == 1
    assert [letter.message_id for letter in pipeline.dead_letters()] == [job.job_id]
    assert pipeline.run(pipeline.job("the next")).state == "succeeded"


# Duplicates, redeliveries, claims


def test_a_job_published_ten_times_is_decoded_once_and_answered_alike():
    with Pipeline(unseen_copies=True) as pipeline:
        # Given a job whose result is stored
        _, decode = pipeline.start()
        job = pipeline.job()
        pipeline.run(job)

        # When it comes nine times more, one after the other
        for copies in range(2, 11):
            pipeline.submit(job)
            pipeline.results(job, at_least=copies)

        # Then it was answered from the stored result, and no copy left blocks behind
        assert len(decode.engine.decode_calls) == 1
        assert len(set(pipeline.results(job))) == 1
        own = [ref for ref in pipeline.refs(job) if not ref.is_shared]
        wait_until(lambda: pipeline.kv.find_missing(own) == own, "the copies' own blocks are gone")


def test_a_redelivery_of_a_running_job_is_adopted_and_both_deliveries_are_acked(pipeline):
    # Given a decode that is running when its worker loses its channel
    _, decode = pipeline.start()
    decode.engine.before_decode = gate = Gate()
    job = pipeline.job()
    pipeline.submit(job)
    gate.wait()
    drop(decode.broker)

    # When the job comes back to the same worker
    wait_until(lambda: Step.REDELIVERED in pipeline.steps(job), "it has come back")
    wait_until(lambda: decode.worker.slots.jobs_done == 1, "its slot is free")
    assert decode.worker.registration().done == 0
    gate.open()

    # Then it is decoded once, answered once, and nothing is left
    assert pipeline.result(job).state == "succeeded"
    pipeline.nothing_is_left()
    assert len(decode.engine.decode_calls) == 1
    assert len(pipeline.results(job)) == 1


def test_a_job_claimed_by_another_worker_is_deferred_without_counting_and_runs_after_the_release(pipeline):
    # Given a job that another worker has claimed
    job = pipeline.job()
    assert pipeline.cluster_state.claim(job.job_id, 1, "another-worker", 60)
    _, decode = pipeline.start()
    pipeline.submit(job)
    wait_until(lambda: pipeline.ready(RETRY_1S) == 1, "the job is deferred")
    assert decode.engine.decode_calls == []

    # When the claim is released
    pipeline.cluster_state.release(job.job_id, 1, "another-worker")

    # Then it runs, and the waiting counted for nothing
    assert pipeline.result(job).attempts == 1
    assert len(decode.engine.decode_calls) == 1


def test_a_stored_result_that_nobody_can_read_is_made_anew(pipeline):
    job = pipeline.job()
    pipeline.cluster_state.finish("another-worker", [(job.job_id, job.run, b"\xc1 what is this")])
    pipeline.start()

    assert pipeline.run(job).text == pipeline.undisturbed_text(job)


# Cancelled and expired


def test_a_cancelled_decode_stops_and_no_copy_of_the_batch_is_answered(pipeline):
    # Given a long decode that runs, and more of its batch in the queue
    pipeline.start_prefill()
    decode = pipeline.start_decode(WatchedEngine(SLOW, slots=1))
    jobs = [pipeline.job(f"number {n} " * 30) for n in range(4)]
    pipeline.submit(*jobs)
    wait_until(lambda: len(decode.engine.decode_calls) == 1, "one is running")
    wait_until(lambda: pipeline.ready(work("prefill")) == 0, "the others are prefilled")

    # When the batch is cancelled
    pipeline.client.cancel(BATCH)

    # Then within two seconds everything is acked, silently, and what only these jobs used is deleted
    wait_until(lambda: not decode.broker.unacked and not pipeline.work_left(), "all is acked", timeout_s=2)
    assert [result for job in jobs for result in pipeline.results_so_far(job)] == []
    assert len(decode.engine.decode_calls) == 1
    own = [ref for job in jobs for ref in pipeline.refs(job) if not ref.is_shared]
    wait_until(lambda: pipeline.kv.find_missing(own) == own, "their own blocks are gone")


def test_cancelling_one_batch_leaves_the_others_running(pipeline):
    _, decode = pipeline.start()
    decode.engine.before_decode = gate = Gate()
    doomed, other = pipeline.job(batch="doomed"), pipeline.job(batch="other")
    pipeline.submit(doomed, other)
    wait_until(lambda: len(decode.engine.decode_calls) == 2, "both run")

    pipeline.client.cancel("doomed")
    wait_until(lambda: decode.worker._jobs.count_in_progress() == 1, "the cancelled one has stopped")
    gate.open()

    assert pipeline.result(other).state == "succeeded"


def test_a_job_past_its_deadline_is_not_decoded(pipeline, monkeypatch):
    now = pipeline.cluster_state.now
    job = pipeline.job(deadline=now() + 1000)
    prefilled(pipeline, job)
    monkeypatch.setattr(pipeline.cluster_state, "now", lambda: now() + 2000)

    decode = pipeline.start_decode()

    assert pipeline.result(job).state == "expired"
    assert decode.engine.decode_calls == []


def test_a_decode_that_runs_past_its_deadline_is_stopped(pipeline):
    pipeline.start_prefill()
    decode = pipeline.start_decode(WatchedEngine(SLOW))
    job = pipeline.job(deadline=pipeline.cluster_state.now() + 1.0)
    pipeline.submit(job)

    assert pipeline.result(job).state == "expired"
    assert pipeline.cluster_state.now() > job.deadline
    assert decode.engine.decode_calls
    assert pipeline.dead_letters(0) == []


# Leaving


def test_a_worker_that_stops_finishes_what_it_decodes_and_hands_back_what_it_has_not_begun(pipeline):
    # Given a worker with one slot, which decodes one job and was given another
    pipeline.start_prefill()
    decode = pipeline.start_decode(WatchedEngine(slots=1))
    decode.engine.before_decode = gate = Gate()
    first, second = pipeline.job("first " * 40), pipeline.job("second " * 40)
    pipeline.submit(first)
    gate.wait()
    pipeline.submit(second)
    wait_until(lambda: pipeline.steps(second)[-1:] == [Step.PASSED_ON], "the second waits to be decoded")

    # When it is told to leave
    decode.stop()
    gate.open()
    decode.wait_until_left()
    pipeline.workers.remove(decode)

    # Then the first is answered and the second is back in its queue, no return counted
    assert pipeline.result(first).state == "succeeded"
    assert decode.engine.decode_calls[1:] == []
    broker = pipeline.new_broker()
    envelope = open_envelope(broker.get(work("decode")), "decode", second.model)
    assert (envelope.job_id, envelope.returns) == (second.job_id, 0)
    broker.close()

    pipeline.start_decode()
    assert pipeline.result(second).state == "succeeded"


def test_a_worker_that_aborts_hands_its_running_job_back_and_another_gives_the_same_answer(pipeline):
    # Given a decode that would take long
    job = pipeline.job()
    prefilled(pipeline, job)
    slow = pipeline.start_decode(WatchedEngine(SLOW))
    wait_until(lambda: slow.engine.decode_calls, "it is running")

    # When its worker is told to leave at once
    pipeline.leave(slow, abort=True)

    # Then another may claim it at once, and finishes it from the same KV cache; nothing was counted against it
    assert pipeline.cluster_state.claim(job.job_id, job.run, "another-worker", 60)
    pipeline.cluster_state.release(job.job_id, job.run, "another-worker")
    pipeline.start_decode()
    result = pipeline.result(job)
    assert (result.text, result.decode.kv_transfer) == (pipeline.undisturbed_text(job), "verified")
    assert (result.state, result.attempts) == ("succeeded", 1)


def test_a_decode_that_begins_while_its_worker_aborts_is_handed_back_too() -> None:
    with Pipeline() as pipeline:
        # Given a worker that is told to leave at once after a delivery has come to it, and before it decodes anything
        prefilled(pipeline, pipeline.job())
        crashing = pipeline.new_broker()
        crashing.get(work("decode"))
        crashing.close()
        broker, engine = EmbeddedBroker(pipeline.server), WatchedEngine(SLOW)

        def observe(event):
            pipeline.observe(event)
            if event.step is Step.REDELIVERED:
                worker.stop(abort=True)

        home = ModelCache(CachedModel(pipeline.job().model, 0, LoadedEngine(engine)))
        worker = DecodeWorker(home, broker, pipeline.kv, pipeline.cluster_state, observe)

        # When it goes on with it, then the job waits for somebody else
        worker.handle(broker.get(work("decode")), lambda: None)
        assert pipeline.ready(work("decode", "now")) == 1
        broker.close()


def test_a_slot_is_free_while_what_it_came_to_is_stored_and_published(pipeline, monkeypatch):
    # Given a worker with one slot, whose first result takes its time to be stored
    first, second = pipeline.job("first " * 40), pipeline.job("second " * 40)
    prefilled(pipeline, first, second)
    finish, decoding, storing = pipeline.cluster_state.finish, Gate(), Gate()
    monkeypatch.setattr(pipeline.cluster_state, "finish", lambda *args: (storing((), None), finish(*args)))
    engine = WatchedEngine(slots=1)
    engine.before_decode = decoding
    decode = pipeline.start_decode(engine)
    decoding.wait()
    wait_until(lambda: not decode.worker._flow._is_pushed, "nothing flows to it while its slot is busy")

    # When it has decoded it
    decoding.open()
    storing.wait()

    # Then the second is decoded meanwhile
    wait_until(lambda: len(engine.decode_calls) == 2, "the second is decoded")
    assert pipeline.results_so_far(first) == pipeline.results_so_far(second) == []
    storing.open()
    assert pipeline.result(second).state == "succeeded"


def test_what_a_recurrent_layer_kept_for_a_job_alone_is_deleted_with_its_blocks(pipeline):
    weights = f"{INSTANT},recurrent=1"
    pipeline.start(weights)

    assert pipeline.run(pipeline.job("def f(): ...\n" * 30)).decode.kv_transfer == "verified"

    own = [ref for ref in pipeline.kv.stored_refs if not ref.is_shared]
    assert own
    wait_until(lambda: pipeline.kv.find_missing(own) == own, "it is gone")


# Poison


def test_a_job_that_kills_its_worker_ends_as_poison_and_its_neighbours_succeed():
    with Pipeline(unseen_copies=True) as pipeline:
        # Given a job that kills whoever decodes it, among neighbours
        pipeline.start_prefill()
        decode = pipeline.start_decode()
        decode.engine.before_decode = decode.dies_of("poison")
        neighbours = [pipeline.job(f"neighbour {number}") for number in range(4)]
        poison = pipeline.job("poison", shared_text="")

        # When all are submitted
        pipeline.submit(*neighbours[:2], poison, *neighbours[2:])

        # Then it was run thrice among the others and twice alone, and was given up
        result = pipeline.result(poison)
        assert (result.state, result.error.stage, result.error.kind) == ("failed", "decode", "Poison")
        runs = WatchedEngine().tokenize(user_prompt("", "poison"), 0.0).ids
        assert decode.engine.decode_calls.count(runs) == 5
        assert Step.ISOLATED in pipeline.steps(poison)
        (letter,) = pipeline.dead_letters()
        assert (letter.message_id, letter.headers["kvasir-error"]) == (poison.job_id, "Poison")
        assert letter.headers["kvasir-from"] == topology.suspects_queue("decode", poison.model)

        # and its neighbours are answered
        assert [pipeline.result(job).state for job in neighbours] == ["succeeded"] * 4


def test_a_delivery_whose_slot_died_is_left_to_the_broker() -> None:
    with Pipeline(unseen_copies=True) as pipeline:
        # Given a job in whose decode a slot dies, its channel still open
        _, decode = pipeline.start()
        decode.engine.before_decode = fails(WorkerDied())
        job = pipeline.job()
        pipeline.submit(job)
        wait_until(
            lambda: decode.engine.decode_calls and not decode.worker._jobs.count_in_progress(), "the slot has died"
        )

        # When the channel closes, then the broker hands the job out again
        drop(decode.broker)
        assert pipeline.result(job).state == "succeeded"


def test_a_suspect_runs_while_nothing_else_does():
    with Pipeline(unseen_copies=True) as pipeline:
        # Given a suspect, and bulk work for both slots of a worker
        suspect, bulk = pipeline.job("a suspect"), [pipeline.job(f"bulk {number}") for number in range(3)]
        prefilled(pipeline, suspect)
        for _ in range(3):
            crashing = pipeline.new_broker()
            assert crashing.get(work("decode"))
            pipeline.cluster_state.count_crashes("decode", suspect.job_id, suspect.run, 1)
            crashing.close()
        engine = WatchedEngine()
        engine.before_decode = gate = Gate()
        pipeline.start_decode(engine)
        wait_until(lambda: Step.ISOLATED in pipeline.steps(suspect), "it is a suspect")
        gate.wait()

        # When bulk work comes while the suspect runs
        pipeline.submit(*bulk)
        wait_until(lambda: pipeline.ready(work("decode")) == 3, "the bulk waits in its queue, in nobody's hands")

        # Then nothing of it was begun before the suspect is answered
        assert len(engine.decode_calls) == 1
        gate.open()
        assert pipeline.result(suspect).state == "succeeded"
        assert [pipeline.result(job).state for job in bulk] == ["succeeded"] * 3


def test_a_job_that_came_back_with_lost_connections_only_is_no_suspect():
    with Pipeline() as pipeline:
        # Given a job that the broker took back nine times, from nobody who fell with it
        job = pipeline.job()
        prefilled(pipeline, job)
        for _ in range(9):
            flaky = pipeline.new_broker()
            assert flaky.get(work("decode"))
            flaky.close()

        # When a worker takes it
        pipeline.start_decode()

        # Then it is a job like others
        assert pipeline.result(job).state == "succeeded"
        assert Step.ISOLATED not in pipeline.steps(job)


def test_an_engine_that_always_fails_transiently_exhausts_the_attempts(pipeline):
    # Given a job that has met five transient errors already
    job = pipeline.job()
    prefilled(pipeline, job)
    delivery = pipeline.broker.get(work("decode"))
    tired = replace(delivery.message, headers=dict(delivery.message.headers) | {"kvasir-attempts": 5})
    pipeline.broker.publish(topology.work("decode", job.model, "bulk"), tired)
    delivery.ack()

    # When the sixth comes
    engine = WatchedEngine()
    engine.before_decode = always_fails(EngineUnavailable("no model is loaded"))
    pipeline.start_decode(engine)
    result = pipeline.result(job)

    # Then the job has failed, and lies among the dead letters
    assert (result.state, result.error.kind, result.attempts) == ("failed", "AttemptsExhausted", 6)
    assert result.error.message == "6 attempts; the last: no model is loaded"
    assert [letter.headers["kvasir-error"] for letter in pipeline.dead_letters()] == ["AttemptsExhausted"]
    pipeline.nothing_is_left()

    # and nothing of its own is kept in the store
    own = [ref for ref in pipeline.refs(job) if not ref.is_shared]
    assert own
    wait_until(lambda: pipeline.kv.find_missing(own) == own, "its own blocks are gone")


def test_a_worker_looks_at_its_queue_behind_its_jobs_backs() -> None:
    with Pipeline() as pipeline:
        decode = pipeline.start_decode()
        seen_at = decode.worker.choice.outlook.at

        wait_until(lambda: decode.worker.choice.outlook.at > seen_at, "it has looked again, though no job came")


def test_several_answers_come_from_one_prefill_and_one_transfer(pipeline):
    prefill, decode = pipeline.start()
    job = pipeline.job(sampling=Sampling(20, temperature=1.0, seed=7, answers=3))

    result = pipeline.run(job)

    texts = [result.text, *result.more_texts]
    assert len(texts) == len(set(texts)) == 3
    assert len(prefill.engine.prefill_calls) == 1
    assert len(decode.engine.decode_calls) == 3
    assert (result.decode.kv_transfer, result.decode.evaluated_tokens) == ("verified", 1)
    # And the second of them is what its seed alone would have given
    alone = pipeline.run(pipeline.job(sampling=Sampling(20, temperature=1.0, seed=8)))
    assert alone.text == texts[1]
