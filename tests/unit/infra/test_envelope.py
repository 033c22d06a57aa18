"""A job's identity and counters, in headers: they survive re-publishing, and nonsense in them hurts nobody."""

from dataclasses import replace
from typing import Any

import pytest

from infra.broker.base import Delivery, Message
from infra.broker.embedded.broker import EmbeddedBroker
from infra.broker.envelope import Envelope, open_envelope, submit_message
from infra.broker.topology import work
from messages import codec
from messages.errors import InvalidMessage
from messages.jobs import DecodeJob, PrefillJob, Sampling, user_prompt
from tests.support.faults import drop

MODEL = "tiny:1b"
JOB = PrefillJob(
    "a-job", "a-batch", "an-item", MODEL, user_prompt("", "hi"), Sampling(8), run=3, lane="now", reply_to="reply.b"
)
COUNTED = Envelope("a-job", "a-batch", "an-item", MODEL, "decode", 3, "now", "reply.b", 2, 1, 4, turn=2)


def delivered(message: Message) -> Delivery:
    broker = EmbeddedBroker()
    broker.declare([MODEL])
    broker.publish(work("prefill", MODEL, "bulk"), message)
    delivery = broker.get("prefill.tiny:1b.bulk")
    assert delivery is not None
    return delivery


def test_an_envelope_comes_back_as_it_was_sealed() -> None:
    assert open_envelope(delivered(COUNTED.seal(b"body")), "decode", MODEL) == COUNTED


def test_a_header_that_says_nothing_is_left_out_and_read_as_such() -> None:
    headers = submit_message(replace(JOB, lane="bulk"))[1].headers

    assert headers.keys() == {"kvasir-item", "kvasir-model", "kvasir-stage", "kvasir-run", "traceparent"}
    assert COUNTED.seal(b"").headers.keys() >= {
        "kvasir-lane",
        "kvasir-attempts",
        "kvasir-kv-transfers",
        "kvasir-returns",
        "kvasir-turn",
    }


def test_a_new_jobs_envelope_carries_its_identity_and_starts_all_counters_at_zero() -> None:
    envelope = open_envelope(delivered(submit_message(JOB)[1]), "prefill", MODEL)

    trace = envelope.traceparent
    assert trace
    assert envelope == Envelope("a-job", "a-batch", "an-item", MODEL, "prefill", 3, "now", "reply.b", traceparent=trace)
    assert (envelope.attempts, envelope.kv_transfers, envelope.returns) == (0, 0, 0)


def test_the_next_stage_starts_its_counters_anew_but_keeps_the_failed_kv_transfers() -> None:
    onward = COUNTED.for_stage("prefill")

    assert (onward.stage, onward.attempts, onward.kv_transfers, onward.returns) == ("prefill", 0, 1, 0)


def test_the_brokers_own_count_of_returns_is_added_to_ours() -> None:
    broker = EmbeddedBroker()
    broker.declare([MODEL])
    broker.publish(work("prefill", MODEL, "bulk"), COUNTED.seal(b""))

    for returns in (4, 5, 6):
        delivery = broker.get("prefill.tiny:1b.bulk")
        assert delivery is not None
        assert open_envelope(delivery, "decode", MODEL).returns == returns
        drop(broker)


@pytest.mark.parametrize("value", [-1, 10**9, 2.5, True, "many", b"\xff", float("nan"), [1]])
def test_absurd_counters_are_taken_as_not_there(value: Any) -> None:
    names = ("run", "attempts", "kv-transfers", "returns")
    message = Message(b"", "a-job", "a-batch", headers={f"kvasir-{name}": value for name in names})

    envelope = open_envelope(delivered(message), "prefill", MODEL)

    assert (envelope.run, envelope.attempts, envelope.kv_transfers, envelope.returns) == (1, 0, 0, 0)


@pytest.mark.parametrize("value", ["", "two words", "x" * 129, "../up", "\udcff"])
def test_an_absurd_identity_is_taken_as_unknown(value: str) -> None:
    message = Message(b"", value, value, headers={"kvasir-item": value, "kvasir-lane": value})

    envelope = open_envelope(delivered(message), "prefill", MODEL)

    assert (envelope.job_id, envelope.batch_id, envelope.item_id) == ("unknown",) * 3
    assert envelope.lane == "bulk"


def test_a_job_is_read_from_its_body_alone() -> None:
    _, message = submit_message(JOB)

    assert codec.decode(delivered(Message(message.body)).message.body, PrefillJob) == JOB
    with pytest.raises(InvalidMessage):
        codec.decode(delivered(Message(message.body)).message.body, DecodeJob)
