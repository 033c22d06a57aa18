"""The four messages: what they refuse, and that they survive the wire."""

from __future__ import annotations

import dataclasses
import json
from contextlib import suppress

import msgpack
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from messages import codec
from messages.errors import InvalidMessage, KvasirError, NewerMessage
from messages.jobs import (
    MAX_PROMPT_BYTES,
    DecodeJob,
    DecodeReport,
    JobError,
    JobResult,
    PrefillJob,
    PrefillReport,
    Sampling,
    StoredKV,
    TokenEvent,
    job_id,
)
from messages.kv import KVLayout

LAYOUT = KVLayout(4, 2, 32, "bf16", window=16, window_layers=(1, 3))


def a_job(**changes: object) -> PrefillJob:
    fields = {"job_id": "j1", "batch_id": "b1", "item_id": "i1", "model": "qwen3-coder:30b"}
    return PrefillJob(**{**fields, "shared": "rubric", "own": "work", "sampling": Sampling(10), **changes})  # type: ignore[arg-type]


def a_result(**changes: object) -> JobResult:
    fields = {"job_id": "j1", "run": 1, "batch_id": "b1", "item_id": "i1", "model": "m", "state": "succeeded"}
    return JobResult(**{**fields, **changes})  # type: ignore[arg-type]


MESSAGES = [
    a_job(lane="now", deadline=5.0, reply_to="reply.b1", stream_to="s"),
    a_job().tokenized((1, 2, 2**32 - 1), 2),
    DecodeJob(a_job().tokenized((1, 2, 3), 1), StoredKV("f00", LAYOUT, 2, 0, 99), PrefillReport("w", "e", 1.0)),
    DecodeJob(a_job().tokenized((1,), 0), None, why_no_kv="the store is away"),
    a_result(text="grüße", finish_reason="stop", decode=DecodeReport(hand_over="kv", evaluated_tokens=1)),
    a_result(state="failed", error=JobError("decode", "EngineUnavailable", "gone")),
    TokenEvent("j1", 1, "d1", 0, "piece", last=True),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_a_message_survives_the_wire_unchanged(message):
    assert codec.decode(codec.encode(message), type(message)) == message


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"job_id": ""}, "job_id must be"),
        ({"job_id": "a/b"}, "job_id must be"),
        ({"model": "a b"}, "model must be a model name"),
        ({"own": "x" * (MAX_PROMPT_BYTES + 1)}, "prompt is 1,048,577 bytes long"),
        ({"shared": "x" * (MAX_PROMPT_BYTES // 2), "own": "x" * (MAX_PROMPT_BYTES // 2 + 1)}, "prompt is"),
        ({"shared": "", "own": ""}, "prompt is empty"),
        ({"run": 0}, "run must be a whole number"),
        ({"run": True}, "run must be a whole number"),
        ({"lane": "soon"}, "lane must be one of bulk, now"),
        ({"deadline": float("nan")}, "deadline must be a number"),
        ({"shared_tokens": 1}, "shared_tokens must be"),
    ],
)
def test_a_job_with_a_bad_field_says_which_and_why(changes, complaint):
    with pytest.raises(InvalidMessage, match=complaint):
        a_job(**changes)


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"max_tokens": 0}, "max_tokens"),
        ({"temperature": -1}, "temperature"),
        ({"top_p": 1.5}, "top_p"),
        ({"stop": ["x"]}, "stop must be a tuple"),
        ({"json_schema": "{"}, "json_schema is not JSON"),
        ({"json_schema": "[1]"}, "must be a JSON object"),
    ],
)
def test_sampling_with_a_bad_value_says_which(changes, complaint):
    with pytest.raises(InvalidMessage, match=complaint):
        Sampling(**{"max_tokens": 5, **changes})


def test_a_failed_result_has_an_error_and_no_other_has_one():
    with pytest.raises(InvalidMessage, match="carries an error"):
        a_result(state="failed")
    with pytest.raises(InvalidMessage, match="carries an error"):
        a_result(error=JobError("decode", "X", "y"))


def test_a_hand_over_leaves_the_last_prompt_token_to_the_decoder():
    with pytest.raises(InvalidMessage, match="last token must be left"):
        DecodeJob(a_job().tokenized((1, 2), 0), StoredKV("f", LAYOUT, 2, 0))


def test_a_job_id_changes_with_everything_that_makes_it_other_work():
    base = ("b", "i", "m", "prompt", Sampling(5))
    names = {job_id(*base)}
    for place, other in enumerate(["b2", "i2", "m2", "prompt2", Sampling(6)]):
        names.add(job_id(*base[:place], other, *base[place + 1 :]))  # type: ignore[arg-type]
    assert len(names) == 6
    assert job_id(*base) == job_id(*base)


def test_parts_can_not_slide_from_one_field_of_a_job_id_into_the_next():
    assert job_id("ab", "c", "m", "p", Sampling(5)) != job_id("a", "bc", "m", "p", Sampling(5))


def test_a_newer_version_waits_and_an_unknown_one_is_refused():
    fields = msgpack.unpackb(codec.encode(MESSAGES[0]))
    with pytest.raises(NewerMessage):
        codec.decode(msgpack.packb({**fields, "v": codec.VERSION + 1}), PrefillJob)
    for version in (0, -1, None, "1"):
        with pytest.raises(InvalidMessage, match="version"):
            codec.decode(msgpack.packb({**fields, "v": version}), PrefillJob)


@pytest.mark.parametrize(
    ("change", "complaint"),
    [
        ({"surprise": 1}, "no field 'surprise'"),
        ({"sampling": None}, "must be a map"),
        ({"sampling": {"max_tokens": "5"}}, "max_tokens"),
        ({"tokens": [1, 2]}, "packed 32-bit"),
        ({"tokens": b"abc"}, "packed 32-bit"),
        ({"kind": "result"}, "'result' message where a 'prefill' belongs"),
    ],
)
def test_a_body_with_a_bad_field_is_refused_with_its_name(change, complaint):
    fields = msgpack.unpackb(codec.encode(a_job()))
    with pytest.raises(InvalidMessage, match=complaint):
        codec.decode(msgpack.packb({**fields, **change}), PrefillJob)


def test_every_missing_required_field_is_refused():
    fields = msgpack.unpackb(codec.encode(a_job()))
    required = [f.name for f in dataclasses.fields(PrefillJob) if f.default is dataclasses.MISSING]
    for name in required:
        with pytest.raises(InvalidMessage):
            codec.decode(msgpack.packb({k: v for k, v in fields.items() if k != name}), PrefillJob)


scalars = st.none() | st.booleans() | st.integers(-(2**63), 2**64 - 1) | st.floats()
anything = st.recursive(
    scalars | st.text(max_size=5) | st.binary(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=8,
)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=200))
def test_arbitrary_bytes_raise_nothing_but_our_errors(body):
    for kind in (PrefillJob, DecodeJob, JobResult, TokenEvent):
        with pytest.raises(KvasirError):
            codec.decode(body, kind)


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(MESSAGES), st.data())
def test_a_message_with_any_field_replaced_is_read_or_refused_but_never_crashes(message, data):
    fields = msgpack.unpackb(codec.encode(message))
    name = data.draw(st.sampled_from(sorted(fields)))
    fields[name] = data.draw(anything)
    with suppress(KvasirError):
        codec.decode(msgpack.packb(fields), type(message))


@settings(max_examples=300, deadline=None)
@given(st.sampled_from(MESSAGES), st.integers(0, 10**6), st.integers(1, 255))
def test_a_message_with_any_byte_changed_is_read_or_refused_but_never_crashes(message, place, change):
    body = bytearray(codec.encode(message))
    body[place % len(body)] ^= change
    with suppress(KvasirError):
        codec.decode(bytes(body), type(message))


def test_a_result_survives_json():
    for message in MESSAGES:
        if isinstance(message, JobResult):
            assert codec.result_from_dict(json.loads(json.dumps(codec.to_dict(message)))) == message


def test_a_job_id_depends_on_the_sampling_alone_and_not_on_which_came_before():
    whole, fraction = Sampling(8, temperature=0), Sampling(8, temperature=0.0)
    first = [job_id("b", "i", "m", "prompt", sampling) for sampling in (whole, fraction)]
    again = [job_id("b", "i", "m", "prompt", sampling) for sampling in (Sampling(8, temperature=0.0), whole)]

    assert first == again[::-1]
    assert first[0] != first[1]
