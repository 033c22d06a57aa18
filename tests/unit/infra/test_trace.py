"""A job's trace has the job's id, goes through queues, retries and results unchanged, and never refuses a job."""

import re
from dataclasses import replace

import pytest

from infra.broker import topology
from infra.broker.embedded.broker import EmbeddedBroker
from infra.broker.envelope import open_envelope, submit_message
from infra.broker.trace import HEADER, new_traceparent, valid_traceparent
from messages.lifecycle import Event, Step
from producers.client import Replies
from tests.support.pipeline import MODEL, Pipeline
from tests.support.waiting import wait_until

JOB_ID = "0123456789abcdef0123456789abcdef"
GIVEN = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def test_the_trace_id_is_the_job_s_id_in_every_run() -> None:
    first, second = new_traceparent(JOB_ID, 1), new_traceparent(JOB_ID, 2)
    assert first.split("-")[1] == second.split("-")[1] == JOB_ID
    assert first != second
    assert first == new_traceparent(JOB_ID, 1)


@pytest.mark.parametrize("job_id", ["a-job", "0" * 32, JOB_ID.upper()])
def test_an_id_that_is_no_trace_id_gets_one_all_the_same(job_id: str) -> None:
    made = new_traceparent(job_id, 1)
    assert valid_traceparent(made) == made
    assert re.fullmatch(r"00-[0-9a-f]{32}-[0-9a-f]{16}-01", made)


@pytest.mark.parametrize("value", ["", None, 7, f"00-{'0' * 32}-00f067aa0ba902b7-01", GIVEN[:-1], "ff" + GIVEN[2:]])
def test_what_is_no_traceparent_counts_as_none(value: object) -> None:
    assert valid_traceparent(value) == ""


def test_a_job_s_result_carries_the_trace_that_the_job_came_with() -> None:
    # Given a job that somebody else's trace leads to
    with Pipeline() as pipeline:
        job = pipeline.job()
        to, message = submit_message(job)
        message = replace(message, headers={**message.headers, HEADER: GIVEN})

        # When it went through both stages
        pipeline.start_prefill()
        pipeline.start_decode()
        pipeline.client.broker.open_reply_queue(job.batch_id)
        pipeline.broker.publish(to, message)
        pipeline.observe(Event(Step.SUBMITTED, job.job_id, job.model))
        replies = Replies(pipeline.broker, job.batch_id)
        arrived = wait_until(lambda: replies.receive(0.1), "the result arrived")

        # Then its result says so
        assert [one.delivery.message.headers[HEADER] for one in arrived] == [GIVEN]
        arrived[0].delivery.ack()
        replies.close(delete=True)


def test_a_broken_header_is_dropped_and_the_job_is_not() -> None:
    broker = EmbeddedBroker()
    broker.declare([MODEL])
    with Pipeline() as pipeline:
        to, message = submit_message(pipeline.job())
    broker.publish(to, replace(message, headers={**message.headers, HEADER: "not a trace"}))
    delivery = broker.get(topology.work_queue("prefill", MODEL, "bulk"))
    assert delivery is not None
    assert open_envelope(delivery, "prefill", MODEL).traceparent == ""
