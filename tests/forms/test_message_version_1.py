"""Messages of version 1, as commit 809876f wrote them, are read, and what comes in version 1 is answered in it.

`message_version_1` holds messages that this commit wrote, and its fields with their defaults: what its reader takes.
"""

import json
from pathlib import Path
from typing import Any

import msgpack
import pytest

from infra.broker import topology
from infra.broker.base import Message
from infra.broker.envelope import submit_message
from messages import codec
from messages.errors import ContextExceeded
from messages.jobs import DecodeJob, JobResult, PrefillJob, TokenEvent
from messages.lifecycle import Event, Step
from messages.workers import WorkerInfo
from producers.batch.batch import Batch, BatchEntry
from producers.batch.runner import Runner
from producers.client import version_problems
from tests.support.pipeline import BATCH, SHARED_TEXT, Pipeline, RecordingProgress, always_fails
from tests.support.waiting import wait_until

RECORDED = Path(__file__).parent / "message_version_1"
FIELDS: dict[str, dict[str, Any]] = json.loads((RECORDED / "fields.json").read_text("utf-8"))
KINDS = {"prefill": PrefillJob, "decode": DecodeJob, "result": JobResult, "token": TokenEvent}
NESTED = {
    "job": "PrefillJob",
    "sampling": "Sampling",
    "kv": "StoredKV",
    "layout": "KVLayout",
    "error": "JobError",
    "prefill": "PrefillReport",
    "decode": "DecodeReport",
}
ANSWERED = [path for path in sorted(RECORDED.glob("*.msgpack")) if not path.name.startswith(("card", "decode-with-kv"))]


def as_read(name: str, fields: dict[str, Any]) -> dict[str, Any]:
    """What the reader of version 1 makes of these fields: it takes no others, and has a default for most."""
    known = FIELDS[name]
    assert fields.keys() <= known.keys()
    assert {each for each, default in known.items() if default == "required"} <= fields.keys()
    whole = {each: default["default"] for each, default in known.items() if default != "required"} | fields
    for field, value in whole.items():
        if field in NESTED and value is not None:
            whole[field] = as_read(NESTED[field], value)
    if "tokens" in whole:
        whole["tokens"] = whole["tokens"] or b""
    if whole.get("hand_over") is not None:
        assert whole["hand_over"] in ("kv", "none")
    return whole


def opened(body: bytes) -> tuple[int, str, dict[str, Any]]:
    fields = msgpack.unpackb(body)
    version, kind = fields.pop("v"), fields.pop("kind")
    return version, kind, as_read(KINDS[kind].__name__, fields)


@pytest.mark.parametrize("path", ANSWERED, ids=lambda path: path.stem)
def test_a_message_is_read_and_written_again_as_it_was(path: Path) -> None:
    body = path.read_bytes()
    message = codec.decode(body, KINDS[opened(body)[1]])  # type: ignore[type-var]

    assert opened(codec.encode(message, 1)) == opened(body)
    assert codec.answer_version(body) == 1
    assert codec.answer_version(codec.encode(message)) == codec.VERSION


def test_a_decode_job_with_a_kv_cache_and_a_registration_are_read() -> None:
    job = codec.decode((RECORDED / "decode-with-kv.msgpack").read_bytes(), DecodeJob)
    assert (job.kv is not None, job.job.prompt[0].text, job.job.tokens[-1]) == (True, "Rubric.\n", 2**32 - 1)
    worker = codec.decode((RECORDED / "card-every-field.msgpack").read_bytes(), WorkerInfo)
    assert (worker.transfers_kv, worker.jobs) == (True, ("job-1",))


def submit(pipeline: Pipeline, **changes: Any) -> PrefillJob:
    """A job as its owner of version 1 sends it."""
    job = pipeline.job(**changes)
    to, message = submit_message(job)
    body = codec.encode(job, 1)
    assert opened(body)[0] == 1
    parts = (body, message.message_id, message.correlation_id, message.reply_to, message.headers)
    pipeline.observe(Event(Step.SUBMITTED, job.job_id, job.model, {"batch_id": BATCH, "run": job.run}))
    pipeline.broker.publish(to, Message(*parts))
    return job


def answers(pipeline: Pipeline, queue: str) -> list[tuple[int, str, dict[str, Any]]]:
    found = []
    while delivery := pipeline.broker.get(queue):
        found.append(opened(delivery.message.body))
        delivery.ack()
    return found


def results(pipeline: Pipeline) -> list[dict[str, Any]]:
    """What lies in the batch's reply queue, all of it results of version 1."""
    wait_until(lambda: pipeline.ready(topology.reply_queue(BATCH)), "a result is there", timeout_s=20)
    found = answers(pipeline, topology.reply_queue(BATCH))
    assert {(version, kind) for version, kind, _ in found} == {(1, "result")}
    return [fields for _, _, fields in found]


def test_its_job_is_passed_on_and_answered_in_its_version() -> None:
    with Pipeline() as pipeline:
        pipeline.broker.open_reply_queue(BATCH)
        stream = pipeline.broker.open_private_queue("stream.forms", topology.STREAM)
        prefill = pipeline.start_prefill()
        job = submit(pipeline, stream_to=stream, tokens=())
        wait_until(lambda: pipeline.ready(topology.work_queue("decode", job.model, "bulk")), "it is passed on", 20)
        delivery = pipeline.broker.get(topology.work_queue("decode", job.model, "bulk"))
        assert delivery
        version, kind, onward = opened(delivery.message.body)
        assert (version, kind, onward["kv"], onward["job"]["shared"]) == (1, "decode", None, SHARED_TEXT)
        assert "version" in onward["why_no_kv"]
        assert pipeline.kv.usage().used_bytes == 0  # nobody would have deleted it
        pipeline.broker.publish(topology.work("decode", job.model, "bulk"), delivery.message)
        delivery.ack()
        pipeline.start_decode()
        [result] = results(pipeline)
        assert (result["state"], result["text"]) == ("succeeded", pipeline.undisturbed_text(job))
        pieces = answers(pipeline, stream)
        assert {(version, kind) for version, kind, _ in pieces} == {(1, "token")}
        assert prefill.engine.prefill_calls == []


def test_its_failure_and_its_second_delivery_are_answered_in_its_version() -> None:
    with Pipeline(unseen_copies=True) as pipeline:
        pipeline.broker.open_reply_queue(BATCH)
        pipeline.start_prefill()
        decode = pipeline.start_decode()
        submit(pipeline)
        [first] = results(pipeline)
        submit(pipeline)  # answered from the store
        assert results(pipeline) == [first]
        decode.engine.before_decode = always_fails(ContextExceeded("too long"))
        submit(pipeline, job_id="another")
        [failed] = results(pipeline)
        assert (failed["state"], failed["error"]["kind"]) == ("failed", "ContextExceeded")


def test_a_worker_of_an_older_and_one_of_a_newer_version_are_named_with_what_to_do(tmp_path: Path) -> None:
    with Pipeline() as pipeline:
        assert version_problems(pipeline.cluster_state) == []
        card = (RECORDED / "card-every-field.msgpack").read_bytes()
        newer = msgpack.packb({"v": codec.VERSION + 1, "kind": "card", "roles": ["prefill", "decode"]})
        registered = pipeline.cluster_state._workers  # type: ignore[attr-defined]
        registered.put("studio1.7.a", card, 60)
        registered.put("studio2.8.b", newer, 60)
        (older, first), (later, then) = version_problems(pipeline.cluster_state)
        assert ("studio1.7.a" in older, "deploy upgrade" in first) == (True, True)
        assert ("studio2.8.b" in later, "pip install --upgrade" in then) == (True, True)
        assert [each.worker_id for each in pipeline.cluster_state.registrations()] == ["host.2.b"]
        with Batch(tmp_path / "batch") as batch:
            progress = RecordingProgress()
            job = pipeline.job()
            batch.plan([BatchEntry(job.job_id, job.item_id, job.model, "prompt", "a")], {})
            Runner(batch, (), pipeline.client, progress).run(0.5)
        assert f"{older}; {first}" in progress.sentences
