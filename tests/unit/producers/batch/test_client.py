"""The Client: what is submitted is told, what is answered is kept until asked for, and a stream's pieces join up."""

from collections.abc import Iterator
from dataclasses import replace
from itertools import groupby

import pytest

from infra.broker import topology
from infra.broker.base import Address, Message
from messages import codec
from messages.errors import BatchError, EngineUnavailable, InvalidMessage, NoQueue
from messages.jobs import JobResult, Part, PrefillJob, Sampling, TokenEvent, user_prompt
from messages.kv import MAX_BLOCK_TOKENS
from messages.lifecycle import Step
from messages.workers import WorkerDetails, WorkerInfo
from producers.client import Replies
from tests.support.pipeline import (
    MODEL,
    OWN_TEXT,
    SHARED_TEXT,
    SLOW,
    Gate,
    Pipeline,
    WatchedEngine,
    fails,
    work,
)
from tests.support.waiting import wait_until

SAMPLING = Sampling(max_tokens=16)


@pytest.fixture
def pipeline() -> Iterator[Pipeline]:
    with Pipeline() as pipeline:
        yield pipeline


def parked(pipeline: Pipeline) -> int:
    return pipeline.ready(topology.RESULTS_PARKED)


# Turns


def registered(pipeline: Pipeline, worker_id: str, turns: int) -> None:
    details = WorkerDetails(turns=turns)
    worker = WorkerInfo(worker_id, "decode", MODEL, "sim", "cpu", "", "", 4096, 1, "h", 1, 0.0, details=details)
    pipeline.cluster_state.register(worker, ttl_s=60)


def test_a_batch_takes_the_turn_for_which_the_fewest_jobs_wait(pipeline: Pipeline) -> None:
    registered(pipeline, "d1", topology.TURNS)
    taken = []
    for number, size in enumerate((5, 3, 4, 1, 1, 1)):
        turns = pipeline.client.turns([MODEL])
        jobs = [pipeline.job(f"{number} {place}", batch=f"batch-{number}") for place in range(size)]
        pipeline.client.submit(jobs, turns=turns)
        taken.append(turns[MODEL])
    assert taken == [0, 1, 2, 3, 3, 3]
    depths = [pipeline.ready(name) for name in topology.lane_queues("prefill", MODEL, "bulk")]
    assert depths == [5, 3, 4, 3]


def test_while_a_worker_knows_no_turns_or_none_is_seen_everybody_takes_the_first(pipeline: Pipeline) -> None:
    """The release before this one consumes `prefill.MODEL.bulk` and `decode.MODEL.bulk`, and no more."""
    pipeline.client.submit([pipeline.job("waits")])
    assert pipeline.client.turns([MODEL]) == {MODEL: 0}

    registered(pipeline, "d1", topology.TURNS)
    assert pipeline.client.turns([MODEL]) == {MODEL: 1}

    registered(pipeline, "d0", 0)
    assert pipeline.client.turns([MODEL]) == {MODEL: 0}


def test_urgent_jobs_have_no_turn(pipeline: Pipeline) -> None:
    pipeline.client.submit([pipeline.job("now!", lane="now")], turns={MODEL: 2})
    assert pipeline.ready(work("prefill", "now")) == 1


# ask and stream


def test_an_answer_goes_ahead_of_the_bulk(pipeline: Pipeline) -> None:
    # Given a decoder whose one slot is taken, and bulk that waits
    pipeline.start_prefill()
    decode = pipeline.start_decode(WatchedEngine(slots=1))
    decode.engine.before_decode = gate = Gate()
    bulk = [pipeline.job(f"bulk {n}") for n in range(3)]
    pipeline.submit(*bulk)
    gate.wait()

    # When somebody asks
    asking = pipeline.client.new_job("ask", "prompt", MODEL, user_prompt("", "now!"), SAMPLING, lane="now")
    pipeline.submit(asking)
    wait_until(lambda: pipeline.ready(work("decode", "now")) == 1, "it is prefilled")
    gate.open()

    # Then it is answered before what still waited in the queue
    pipeline.result(asking)
    assert decode.engine.decode_calls.index(WatchedEngine().tokenize(user_prompt("", "now!"), 0.0).ids) < 3
    assert [pipeline.result(job).state for job in bulk] == ["succeeded"] * 3


def test_ask_gives_the_result_and_leaves_no_queue_behind(pipeline: Pipeline) -> None:
    pipeline.start()

    result = pipeline.client.ask(MODEL, SHARED_TEXT + OWN_TEXT, SAMPLING)

    assert result.text == pipeline.undisturbed_text(pipeline.job(SHARED_TEXT + OWN_TEXT, shared_text=""))
    assert result.decode.kv_transfer == "verified"
    assert pipeline.broker.depth(topology.reply_queue(result.batch_id)) is None
    assert pipeline.broker.depth(f"stream.{result.batch_id}") is None


def test_a_conversation_is_asked_like_a_prompt_and_its_class_wide_part_is_stored_once(pipeline: Pipeline) -> None:
    prefill, _ = pipeline.start()
    before = (Part("system", SHARED_TEXT, "class"), Part("user", "Hello.", "conversation"), Part("assistant", "Yes?"))
    talks = [(*before, Part("user", said * 9)) for said in (OWN_TEXT, "What else?")]

    first, second = (pipeline.client.ask(MODEL, talk, SAMPLING) for talk in talks)

    alone = WatchedEngine()
    for talk, result in zip(talks, (first, second), strict=True):
        assert result.text == alone.decode(alone.tokenize(talk, 0.0).ids, None, SAMPLING).text
        assert (result.decode.kv_transfer, result.decode.evaluated_tokens) == ("verified", 1)
    assert second.prefill.restored_tokens > prefill.engine.count_tokens(SHARED_TEXT) - MAX_BLOCK_TOKENS
    with pytest.raises(InvalidMessage, match="ends with a function call"):
        pipeline.client.ask(MODEL, (*before, Part("assistant", "{}", function="look")), SAMPLING)


def test_the_pieces_of_a_stream_join_to_the_text(pipeline: Pipeline) -> None:
    pipeline.start()

    *pieces, result = pipeline.client.stream(MODEL, "a question", SAMPLING)

    assert isinstance(result, JobResult)
    events = [piece for piece in pieces if isinstance(piece, TokenEvent)]
    assert "".join(event.text for event in events) == result.text
    assert [event.index for event in events] == list(range(len(events)))
    assert [event.last for event in events] == [False] * (len(events) - 1) + [True]
    assert len({event.delivery for event in events}) == 1


def test_a_decode_that_is_begun_again_begins_its_stream_again(pipeline: Pipeline) -> None:
    # Given a decode that is aborted in the middle of its answer
    pipeline.start_prefill()
    slow = pipeline.start_decode(WatchedEngine(SLOW.replace("decode=0.1", "decode=2")))
    stream = pipeline.client.stream(MODEL, "a question", SAMPLING)
    events = [next(stream)]
    pipeline.leave(slow, abort=True)

    # When another worker begins it again
    pipeline.start_decode()
    *pieces, result = stream

    # Then the pieces come from index 0 under another delivery, and the last delivery's join to the text
    assert isinstance(result, JobResult)
    found = [event for event in [*events, *pieces] if isinstance(event, TokenEvent)]
    first, second = (list(group) for _, group in groupby(found, key=lambda event: event.delivery))
    assert (first[0].index, second[0].index) == (0, 0)
    assert "".join(event.text for event in second) == result.text
    assert result.text == pipeline.undisturbed_text(pipeline.job("a question", shared_text=""))


def test_a_retry_loses_nothing_of_a_stream(pipeline: Pipeline) -> None:
    _, decode = pipeline.start()
    decode.engine.before_decode = fails(EngineUnavailable("not yet"))

    *pieces, result = pipeline.client.stream(MODEL, "a question", SAMPLING)

    assert isinstance(result, JobResult)
    assert result.attempts == 2
    assert "".join(event.text for event in pieces if isinstance(event, TokenEvent)) == result.text


def test_whoever_leaves_a_stream_early_stops_the_decode(pipeline: Pipeline) -> None:
    pipeline.start_prefill()
    decode = pipeline.start_decode(WatchedEngine(SLOW.replace("decode=0.1", "decode=2")))
    stream = pipeline.client.stream(MODEL, "a question", SAMPLING)
    next(stream)

    stream.close()  # type: ignore[attr-defined]

    wait_until(lambda: not decode.broker.unacked, "the decode has ended", timeout_s=2)
    assert parked(pipeline) == 0


def test_a_question_with_a_deadline_expires(pipeline: Pipeline) -> None:
    pipeline.start_prefill()
    pipeline.start_decode(WatchedEngine(SLOW))

    assert pipeline.client.ask(MODEL, "a question", SAMPLING, deadline_s=0.5).state == "expired"


def test_a_model_that_is_not_configured_has_no_queue_and_that_is_said_before_anything_is_published(
    pipeline: Pipeline,
) -> None:
    with pytest.raises(NoQueue, match=r"'giant:900b' has no queue; configured models: tiny:1b"):
        pipeline.client.ask("giant:900b", "hi", SAMPLING)
    with pytest.raises(NoQueue):
        pipeline.client.submit([replace(pipeline.job(), model="giant:900b")])
    assert pipeline.events == []


# submit


def test_each_job_is_told_of_once_it_is_confirmed(pipeline: Pipeline) -> None:
    jobs, told = [pipeline.job(f"number {n}") for n in range(3)], list[PrefillJob]()

    assert pipeline.client.submit(jobs, told.append) == 3
    assert told == jobs
    assert pipeline.ready(work("prefill")) == 3


# gather


def test_gather_acks_a_result_only_when_the_next_is_asked_for(pipeline: Pipeline) -> None:
    # Given two jobs, gathered
    pipeline.start()
    jobs = [pipeline.job(f"number {n}") for n in range(2)]
    ids = [job.job_id for job in jobs]
    pipeline.client.submit(jobs)
    gathering = pipeline.client.gather("batch", ids)

    # When whoever gathers fails while it has the first in hand
    first = next(gathering)
    gathering.close()  # type: ignore[attr-defined]

    # Then both can be gathered again, and the queue goes with the last
    again = list(pipeline.client.gather("batch", ids))
    assert first in again
    assert sorted(result.job_id for result in again) == sorted(ids)
    assert pipeline.broker.depth(topology.reply_queue("batch")) is None


def test_results_that_were_faster_than_gather_are_gathered_and_the_last_in_hand_is_lost_no_more_than_others(
    pipeline: Pipeline,
) -> None:
    pipeline.start()
    job = pipeline.job()
    pipeline.client.submit([job])
    wait_until(lambda: parked(pipeline) == 1, "the result found no reply queue")
    gathering = pipeline.client.gather("batch", [job.job_id], timeout_s=10)
    only = next(gathering)

    gathering.close()  # type: ignore[attr-defined]

    assert only.state == "succeeded"
    assert list(pipeline.client.gather("batch", [job.job_id], timeout_s=10)) == [only]
    assert parked(pipeline) == 0


def test_gather_gives_each_job_once_however_often_it_was_answered() -> None:
    with Pipeline(unseen_copies=True) as pipeline:
        pipeline.start()
        job, other = pipeline.job(), pipeline.job("another")
        for _ in range(3):
            pipeline.client.submit([job])
        pipeline.client.submit([other])

        gathered = [result.job_id for result in pipeline.client.gather("batch", [job.job_id, other.job_id])]

        assert sorted(gathered) == sorted([job.job_id, other.job_id])


def test_gather_ends_after_silence_and_what_comes_later_is_kept(pipeline: Pipeline) -> None:
    job = pipeline.job()
    pipeline.client.submit([job])
    assert list(pipeline.client.gather("batch", [job.job_id], timeout_s=0.1)) == []

    pipeline.start()

    assert len(list(pipeline.client.gather("batch", [job.job_id]))) == 1


def test_only_one_process_listens_to_a_batch(pipeline: Pipeline) -> None:
    listening = Replies(pipeline.broker, "batch")

    with pytest.raises(BatchError, match="another process"):
        Replies(pipeline.broker, "batch")
    listening.close()


# parked results


def result_of(batch: str) -> Message:
    body = codec.encode(JobResult(f"job-of-{batch}", 1, batch, "i", MODEL, "cancelled"))
    return Message(body, f"job-of-{batch}", batch)


def test_an_owner_sweeps_its_own_parked_results_and_puts_the_others_back(pipeline: Pipeline) -> None:
    for batch in ("mine", "theirs", "mine", "nobodys"):
        pipeline.broker.publish(Address(topology.REPLY_ALTERNATE, ""), result_of(batch))

    mine = Replies(pipeline.broker, "mine")
    swept = [reply for group in mine.receive_parked() for reply in group]
    for reply in swept:
        reply.delivery.ack()
    mine.close()

    assert [reply.result.batch_id for reply in swept] == ["mine", "mine"]
    stranger = Replies(pipeline.broker, "none of them")
    assert list(stranger.receive_parked()) == []
    stranger.close(delete=True)
    assert sorted(message.correlation_id for message in pipeline.lying_in(topology.RESULTS_PARKED)) == [
        "nobodys",
        "theirs",
    ]


def test_more_parked_results_than_the_broker_brings_unacked_are_all_swept_among_those_of_others(
    pipeline: Pipeline,
) -> None:
    park(pipeline, 2_400)

    mine = Replies(pipeline.broker, "batch")
    swept: list[str] = []
    for group in mine.receive_parked():
        for reply in group:
            swept.append(reply.result.job_id)
            reply.delivery.ack()
    mine.close(delete=True)

    assert sorted(swept) == sorted(f"job{number}" for number in range(2_400) if number % 3)
    left = [message.correlation_id for message in pipeline.lying_in(topology.RESULTS_PARKED)]
    assert left == ["theirs"] * 800


def test_more_parked_results_than_the_broker_brings_unacked_are_all_gathered(pipeline: Pipeline) -> None:
    park(pipeline, 2_400)

    wanted = [f"job{number}" for number in range(2_400) if number % 3]
    assert sorted(one.job_id for one in pipeline.client.gather("batch", wanted, timeout_s=3)) == sorted(wanted)
    assert len(pipeline.lying_in(topology.RESULTS_PARKED)) == 800


def park(pipeline: Pipeline, count: int) -> None:
    """Results of the batch `batch`, one of another one before every two of them."""
    for number in range(count):
        batch = "batch" if number % 3 else "theirs"
        body = codec.encode(JobResult(f"job{number}", 1, batch, "i", MODEL, "cancelled"))
        pipeline.broker.publish(Address(topology.REPLY_ALTERNATE, ""), Message(body, f"job{number}", batch))


def test_what_is_no_result_is_dropped_and_what_is_of_a_newer_version_is_left(pipeline: Pipeline) -> None:
    replies = Replies(pipeline.broker, "batch")
    for message in (Message(b"?"), result_of("batch")):
        pipeline.broker.publish(topology.reply("reply.batch"), message)

    (reply,) = replies.receive(1)

    assert reply.result.batch_id == "batch"
    reply.delivery.ack()
    assert replies.receive(0) == []
    replies.close()


# workers


def test_a_model_without_a_decode_worker_is_not_served_and_one_without_prefill_is_served_slowly(
    pipeline: Pipeline,
) -> None:
    def told() -> tuple[list[str], list[str]]:
        return pipeline.client.unserved([MODEL, MODEL]), pipeline.client.unprefilled([MODEL, MODEL])

    assert told() == ([MODEL], [])
    prefill = pipeline.start_prefill()
    assert told() == ([MODEL], [])
    pipeline.start_decode()
    assert told() == ([], [])
    pipeline.leave(prefill)
    assert told() == ([], [MODEL])


def test_a_cancelled_batch_can_be_opened_again(pipeline: Pipeline) -> None:
    pipeline.client.cancel("batch")
    pipeline.client.reopen("batch")
    pipeline.start()

    job = pipeline.job()
    assert pipeline.run(job).state == "succeeded"
    assert Step.CANCELLED not in pipeline.steps(job)
