"""How a delivery ends: the outcome is published before the ack, whatever the message and whatever the broker does."""

from collections.abc import Iterator
from dataclasses import replace

import msgpack
import pytest

from infra.broker import topology
from infra.broker.base import Address, Broker, Message
from infra.broker.embedded.broker import EmbeddedBroker
from infra.broker.envelope import Attempt, open_envelope, submit_message
from infra.broker.settle import MAX_ATTEMPTS, Settler, replying
from messages import codec
from messages.errors import (
    AttemptsExhausted,
    BrokerUnavailable,
    ContextExceeded,
    EngineUnavailable,
    NewerMessage,
)
from messages.jobs import JobResult, PrefillJob, Sampling, user_prompt
from messages.lifecycle import Event, Step
from messages.workers import WorkerStage
from tests.support.pipeline import MODEL, Pipeline, work
from tests.support.waiting import wait_until

JOB = PrefillJob("a-job", "a-batch", "an-item", MODEL, user_prompt("", "hi"), Sampling(8), reply_to="reply.a-batch")
BULK = work("prefill")
TOO_LONG = ContextExceeded("too long")


class Refusing(EmbeddedBroker):
    """A broker that refuses the first publishings to the exchange named, as a full queue would."""

    def __init__(self) -> None:
        super().__init__()
        self.refuse: list[str] = []
        self.published: list[tuple[str, int]] = []  # exchange, and how many deliveries were held then

    def publish(self, to: Address, message: Message, timeout_s: float | None = 30.0) -> None:
        if to.exchange in self.refuse:
            self.refuse.remove(to.exchange)
            raise BrokerUnavailable(f"{to.exchange} is full")
        super().publish(to, message, timeout_s)
        self.published.append((to.exchange, len(self.unacked)))


@pytest.fixture
def broker() -> Iterator[Refusing]:
    broker = Refusing()
    broker.declare([MODEL])
    broker.open_reply_queue("a-batch")
    yield broker
    broker.close()


@pytest.fixture
def events() -> list[Event]:
    return []


@pytest.fixture
def settler(broker: Broker, events: list[Event]) -> Settler:
    return Settler(broker, [MODEL], events.append)


def taken(broker: Broker, **counters: int) -> Attempt[PrefillJob]:
    """The job, delivered; with counters of an earlier life."""
    to, message = submit_message(JOB)
    headers = dict(message.headers) | {f"kvasir-{name}": count for name, count in counters.items()}
    broker.publish(to, replace(message, headers=headers))
    delivery = broker.get(BULK)
    assert delivery is not None
    return Attempt[PrefillJob]([delivery], open_envelope(delivery, "prefill", MODEL))


def answers(broker: Broker) -> list[JobResult]:
    found = []
    while delivery := broker.get("reply.a-batch"):
        found.append(codec.decode(delivery.message.body, JobResult))
        delivery.ack()
    return found


def ready(broker: Broker, queue: str) -> int:
    depth = broker.depth(queue)
    assert depth is not None
    return depth.ready


@pytest.mark.parametrize(
    ("attempts", "levels"),
    [(0, ["retry.1s"]), (1, ["retry.30s", "retry.5s"]), (3, ["retry.1m", "retry.5m"]), (4, ["retry.10m", "retry.5m"])],
)
def test_each_transient_error_waits_longer_and_what_failed_together_comes_back_apart(
    broker: Refusing, settler: Settler, attempts: int, levels: list[str]
) -> None:
    for _ in range(20):
        settler.settle_error(taken(broker, attempts=attempts), EngineUnavailable("later"))

    used = {name: ready(broker, name) for name in map(topology.retry_level, topology.RETRY_LEVELS_S)}
    assert sorted(level for level, jobs in used.items() if jobs) == levels
    assert sum(used.values()) == 20
    again = broker.get(levels[0])
    assert again is not None
    assert open_envelope(again, "prefill", MODEL).attempts == attempts + 1
    assert answers(broker) == []


def test_a_deferred_job_comes_back_ahead_of_the_bulk_and_counts_nothing(broker: Refusing, settler: Settler) -> None:
    # Given a job that another worker has claimed, which may be dead
    attempt = taken(broker)

    # When it is deferred
    settler.defer(attempt)

    # Then it does not wait for its turn again
    again = wait_until(lambda: broker.get(work("prefill", "now")), "the job is back")
    assert open_envelope(again, "prefill", MODEL) == attempt.envelope


@pytest.mark.parametrize(
    ("queue", "returns", "keep_turn", "lands_in"),
    [
        (BULK, 0, False, BULK),
        (BULK, 0, True, work("prefill", "now")),  # it was fetched ahead, and for too long
        (BULK, 1, False, work("prefill", "now")),  # a worker died with it: another class's batch may fill the queue
        (work("prefill", "now"), 0, True, work("prefill", "now")),
        (topology.suspects_queue("prefill", MODEL), 3, False, topology.suspects_queue("prefill", MODEL)),
    ],
)
def test_what_has_waited_its_turn_goes_before_the_bulk_when_it_is_handed_back(
    broker: Refusing, settler: Settler, queue: str, returns: int, keep_turn: bool, lands_in: str
) -> None:
    _, message = submit_message(JOB)
    counters = {"kvasir-returns": returns} if returns else {}
    broker.publish(Address(topology.WORK, queue), replace(message, headers=message.headers | counters))
    delivery = broker.get(queue)
    assert delivery is not None

    settler.hand_back_all([delivery], keep_turn=keep_turn)

    assert (ready(broker, lands_in), broker.unacked) == (1, set())
    assert settler.jobs_finished == 0


def test_a_job_is_finished_when_it_is_answered_and_not_when_it_goes_back(broker: Refusing, settler: Settler) -> None:
    settler.settle_error(taken(broker), EngineUnavailable("later"))
    settler.defer(taken(broker))
    assert settler.jobs_finished == 0

    settler.settle_error(taken(broker), TOO_LONG)

    assert settler.jobs_finished == 1


def test_the_last_attempt_fails_the_job(broker: Refusing, settler: Settler) -> None:
    attempt = taken(broker, attempts=MAX_ATTEMPTS - 1)

    settler.settle_error(attempt, EngineUnavailable("no model"))

    (result,) = answers(broker)
    assert result.error is not None
    assert (result.state, result.error.kind, result.attempts) == (
        "failed",
        AttemptsExhausted.__name__,
        MAX_ATTEMPTS,
    )
    assert ready(broker, topology.DEAD_LETTERS) == 1


def test_a_newer_message_waits_a_minute_for_the_upgrade_and_nothing_is_counted(
    broker: Refusing, settler: Settler
) -> None:
    attempt = taken(broker)
    (delivery,) = attempt.deliveries

    settler.settle_error(attempt, NewerMessage("version 2"))

    waiting = broker.get("retry.1m")
    assert waiting is not None
    assert open_envelope(waiting, "prefill", MODEL) == attempt.envelope
    assert waiting.message.body == delivery.message.body


def test_a_failure_is_answered_before_it_is_buried_and_buried_before_it_is_acked(
    broker: Refusing, settler: Settler
) -> None:
    attempt = taken(broker)
    broker.published.clear()

    settler.fail(attempt, TOO_LONG)

    assert broker.published == [(topology.REPLY, 1), (topology.DEAD, 1)]  # the delivery was held at each
    assert attempt.deliveries == []
    assert not broker.unacked
    # What is adopted after that may be acked, and nobody needs the job's blocks
    assert (attempt.is_outcome_confirmed, attempt.has_ended_unanswered) == (True, True)


def test_what_a_closed_client_cannot_publish_stays_unacked(
    broker: Refusing, settler: Settler, monkeypatch: pytest.MonkeyPatch
) -> None:
    attempt = taken(broker)
    broker.refuse = [topology.REPLY, topology.REPLY]
    monkeypatch.setattr(Refusing, "is_connected", False)

    with pytest.raises(BrokerUnavailable):
        settler.fail(attempt, TOO_LONG)
    assert (len(attempt.deliveries), attempt.is_outcome_confirmed) == (1, False)
    # The handler of a job ends without an error: the broker hands it out again
    with settler.settling_errors(attempt):
        raise TOO_LONG
    assert (len(attempt.deliveries), len(broker.unacked)) == (1, 1)


def test_a_refused_publishing_is_tried_again_until_it_is_confirmed(broker: Refusing, settler: Settler) -> None:
    attempt = taken(broker)
    broker.refuse = [topology.REPLY, topology.REPLY]

    attempt.stop_for("expired")
    settler.settle_stop(attempt)

    assert [result.state for result in answers(broker)] == ["expired"]


def test_a_deleted_queue_is_declared_again(broker: Refusing, settler: Settler) -> None:
    attempt = taken(broker)
    broker.server.delete_queue(topology.DEAD_LETTERS)

    settler.fail(attempt, TOO_LONG)

    assert ready(broker, topology.DEAD_LETTERS) == 1


def test_without_a_reply_queue_a_result_is_parked(broker: Refusing, settler: Settler) -> None:
    attempt = taken(broker)
    broker.delete_queue("reply.a-batch")

    attempt.stop_for("expired")
    settler.settle_stop(attempt)

    assert ready(broker, topology.RESULTS_PARKED) == 1


def test_all_deliveries_of_a_job_end_together(broker: Refusing, settler: Settler) -> None:
    first, second = taken(broker), taken(broker)
    first.deliveries += second.deliveries

    first.stop_for("expired")
    settler.settle_stop(first)

    assert not broker.unacked
    assert len(answers(broker)) == 1


def test_an_error_after_the_confirmation_of_one_costs_its_neighbour_nothing(
    broker: Refusing, events: list[Event]
) -> None:
    # Given two jobs that are answered together, and trouble once the first is confirmed
    def observe(event: Event) -> None:
        events.append(event)
        if [event.step for event in events] == [Step.REPLIED]:
            raise EngineUnavailable("a fault wanted by the test")

    attempts = [taken(broker), taken(broker)]
    answer = JobResult(JOB.job_id, 1, JOB.batch_id, JOB.item_id, MODEL, "succeeded")

    Settler(broker, [MODEL], observe).settle(*(replying(attempt, answer) for attempt in attempts))

    # Then the first waits for its next attempt, and both are acked
    assert [event.step for event in events] == [Step.REPLIED, Step.RETRIED, Step.REPLIED]
    assert (len(answers(broker)), ready(broker, "retry.1s"), len(broker.unacked)) == (2, 1, 0)


def test_an_error_that_comes_after_the_end_ends_nothing(
    broker: Refusing, settler: Settler, events: list[Event]
) -> None:
    attempt = taken(broker)
    attempt.deliveries.clear()

    settler.settle_error(attempt, EngineUnavailable("too late"))

    assert answers(broker) == []
    assert events == []


# Messages that nobody can read, through a whole pipeline


UNREADABLE = {
    "no msgpack": b"\xc1 what is this",
    "nothing": b"",
    "another kind": codec.encode(JobResult("a-job", 1, "batch", "i", MODEL, "cancelled")),
    "another version": msgpack.packb({"v": 0, "kind": "prefill"}),
    "no job": msgpack.packb({"v": 1, "kind": "prefill", "job_id": "x"}),
    "a bomb": b"\xdf\xff\xff\xff\xff",
    "too long": b"\0" * (codec.MAX_MESSAGE_BYTES + 1),
}


@pytest.mark.parametrize("stage", topology.WORK_STAGES)
@pytest.mark.parametrize("what", UNREADABLE)
def test_an_unreadable_message_is_answered_and_buried_and_the_next_job_succeeds(what: str, stage: WorkerStage) -> None:
    with Pipeline() as pipeline:
        # Given a message with a readable identity and a body that nobody can read
        pipeline.start()
        job = pipeline.job()
        pipeline.submit(job)
        headers = {"kvasir-item": "an-item", "kvasir-run": 7}
        message = Message(UNREADABLE[what], "unreadable", job.batch_id, job.reply_to, headers)

        # When it comes among the work
        pipeline.broker.publish(topology.work(stage, MODEL, "bulk"), message)

        # Then it gets its failed result, under its identity, and lies in the graveyard as it came
        found = pipeline.result(replace(job, job_id="unreadable", run=7))
        assert found.error is not None
        assert (found.state, found.item_id, found.error.stage) == ("failed", "an-item", stage)
        assert found.error.kind == "InvalidMessage"
        (letter,) = pipeline.dead_letters()
        assert (letter.body, letter.message_id) == (message.body, "unreadable")

        # and the worker goes on
        assert pipeline.result(job).state == "succeeded"


def test_a_message_without_any_identity_is_buried() -> None:
    with Pipeline() as pipeline:
        pipeline.start()
        pipeline.broker.publish(topology.work("prefill", MODEL, "now"), Message(b"?"))

        assert pipeline.run(pipeline.job()).state == "succeeded"
        pipeline.nothing_is_left()
        assert [letter.message_id for letter in pipeline.dead_letters()] == ["unknown"]


def test_a_job_with_absurd_headers_is_worked_on_all_the_same() -> None:
    with Pipeline() as pipeline:
        pipeline.start()
        job = pipeline.job()
        to, message = submit_message(job)
        headers = {"kvasir-run": -5, "kvasir-attempts": "many", "kvasir-returns": 1e300, "kvasir-lane": "fast", "x": 1}
        absurd = replace(message, headers=headers)
        pipeline.listen(job.batch_id)

        pipeline.observe(Event(Step.SUBMITTED, job.job_id, MODEL))
        pipeline.broker.publish(to, absurd)

        assert pipeline.result(job).text == pipeline.undisturbed_text(job)
        assert pipeline.dead_letters(0) == []


def test_a_job_of_a_newer_version_waits_while_others_are_done() -> None:
    with Pipeline() as pipeline:
        prefill, _ = pipeline.start()
        to, message = submit_message(pipeline.job())
        fields = msgpack.unpackb(message.body) | {"v": codec.VERSION + 1, "unheard_of": True}
        pipeline.broker.publish(to, replace(message, body=msgpack.packb(fields)))

        assert pipeline.run(pipeline.job("of today")).state == "succeeded"
        (waiting,) = pipeline.lying_in("retry.1m")
        assert "kvasir-attempts" not in waiting.headers
        assert len(prefill.engine.prefill_calls) == 1
        assert pipeline.dead_letters(0) == []
