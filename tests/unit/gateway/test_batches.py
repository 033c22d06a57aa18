"""Files and batches, with OpenAI's own client, unmodified."""

import asyncio
import io
import json
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, cast

import httpx
import openai
import pytest
from openai.types import Batch, Completion, FileObject
from openai.types.chat import ChatCompletion

from gateway import batches as batches_module
from gateway import files as files_module
from gateway import keys
from gateway.files import open_files
from gateway.keys import add_key, file_in
from infra.config.types import ModelSettings
from messages import limits
from messages.errors import ConfigError
from messages.jobs import Sampling, conversation
from producers.batch import prompt_lines
from producers.batch.batch import Batch as PlannedBatch
from tests.support.gateway import ServedGateway, nothing_unknown, validate
from tests.support.pipeline import MODEL, Pipeline
from tests.support.waiting import wait_until

PACED = "sim:scale=1,prefill=1000000,decode=80,answer=16"  # an answer takes a fifth of a second
OVER = ("completed", "failed", "expired", "cancelled")
MODELS = {name: ModelSettings(name=name, max_tokens=16, temperature=0.0) for name in (MODEL, "other:1b")}


@contextmanager
def client_of(served: ServedGateway, key: str = "x") -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key=key, max_retries=0, timeout=30) as client:
        yield client


@pytest.fixture
def client(served: ServedGateway) -> Iterator[openai.OpenAI]:
    with client_of(served) as client:
        yield client


def line(custom_id: str, text: str = "What is a queue?", **body: Any) -> dict[str, Any]:
    request = {"model": MODEL, "messages": [{"role": "user", "content": text}], "max_tokens": 16, **body}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/chat/completions", "body": request}


def content(*lines: Any) -> bytes:
    return "".join((each if isinstance(each, str) else json.dumps(each)) + "\n" for each in lines).encode()


def send(client: openai.OpenAI, *lines: Any, name: str = "prompts.jsonl") -> FileObject:
    return client.files.create(file=(name, io.BytesIO(content(*lines))), purpose="batch")


def begin(client: openai.OpenAI, file: FileObject, key: str = "", **more: Any) -> Batch:
    headers = {"Idempotency-Key": key} if key else {}
    return client.batches.create(
        input_file_id=file.id,
        endpoint="/v1/chat/completions",
        completion_window="24h",
        extra_headers=headers,
        **more,
    )


def ended(client: openai.OpenAI, batch: Batch) -> Batch:
    wait_until(lambda: client.batches.retrieve(batch.id).status in OVER, "the batch is over", timeout_s=20)
    return client.batches.retrieve(batch.id)


def rows(client: openai.OpenAI, file_id: str | None) -> list[dict[str, Any]]:
    return [json.loads(each) for each in client.files.content(file_id or "").text.splitlines()]


def counted(batch: Batch) -> tuple[int, int, int]:
    assert batch.request_counts
    counts = batch.request_counts
    if batch.status in OVER:
        assert counts.total == counts.completed + counts.failed
    return counts.total, counts.completed, counts.failed


def test_files_are_kept_listed_in_pages_fetched_and_deleted(client: openai.OpenAI) -> None:
    sent = [send(client, line("a"), name=f"{number}.jsonl") for number in range(5)]

    assert sent[0].bytes == len(content(line("a")))
    assert sent[0].filename == "0.jsonl"
    assert [file.id for file in client.files.list(limit=2)] == [file.id for file in reversed(sent)]
    assert [file.id for file in client.files.list(order="asc", limit=3, purpose="batch")] == [file.id for file in sent]
    page = client.files.list(limit=4)
    assert page.has_more
    assert not client.files.list(limit=5).has_more
    assert list(client.files.list(purpose="batch_output")) == []
    assert client.files.content(sent[1].id).content == content(line("a"))

    assert client.files.delete(sent[1].id).deleted
    for look in (client.files.retrieve, client.files.content, client.files.delete):
        with pytest.raises(openai.NotFoundError):
            look(sent[1].id)
    assert len(list(client.files.list())) == 4
    with pytest.raises(openai.BadRequestError) as refused:
        client.files.list(after=sent[1].id)
    assert refused.value.param == "after"


def test_a_batch_from_its_file_to_its_answers(client: openai.OpenAI, served: ServedGateway, pipeline: Pipeline) -> None:
    pipeline.start()
    said = [("system", "Be brief."), ("user", "Hi."), ("assistant", "Yes?"), ("user", "What is a queue?")]
    messages = [{"role": role, "content": text} for role, text in said]
    file = send(client, line("b", messages=messages), line("a", n=2), "no json", line("t", logprobs=True))

    batch = ended(client, begin(client, file, metadata={"course": "101"}))

    validate(Batch, httpx.get(f"{served.url}/v1/batches/{batch.id}").json())
    validate(FileObject, httpx.get(f"{served.url}/v1/files/{batch.output_file_id}").json())
    assert batch.status == "completed"
    assert counted(batch) == (4, 2, 2)
    assert batch.metadata == {"course": "101"}
    assert batch.created_at <= (batch.in_progress_at or 0) <= (batch.finalizing_at or 0) <= (batch.completed_at or 0)
    assert (batch.expires_at or 0) - batch.created_at == 24 * 3600
    answers = rows(client, batch.output_file_id)
    assert [row["custom_id"] for row in answers] == ["b", "a"]
    for row in answers:
        assert row["error"] is None
        assert row["response"]["status_code"] == 200
        validate(ChatCompletion, row["response"]["body"])
    assert len(answers[1]["response"]["body"]["choices"]) == 2
    job = pipeline.client.new_job(
        "b", "i", MODEL, conversation(said, "class", "own"), Sampling(max_tokens=16, temperature=0)
    )
    assert answers[0]["response"]["body"]["choices"][0]["message"]["content"] == pipeline.undisturbed_text(job)
    errors = {row["custom_id"]: row["error"]["message"] for row in rows(client, batch.error_file_id)}
    assert "not JSON" in errors["line 3"]
    assert "'logprobs' is not served" in errors["t"]
    assert {event.facts["lane"] for event in pipeline.events if event.step.name == "SUBMITTED"} == {"bulk"}
    assert [each.id for each in client.files.list(purpose="batch_output")] == [
        batch.error_file_id,
        batch.output_file_id,
    ]


def test_a_line_and_a_request_say_the_same_of_what_was_cached(client: openai.OpenAI, pipeline: Pipeline) -> None:
    pipeline.start()
    # Of other requests only what the system says is kept for both; a request's own turns are for its next ones.
    first, second, third = (
        [{"role": "system", "content": "A rule. " * 200}, {"role": "user", "content": f"A {word} question. " * 20}]
        for word in ("first", "further", "final")
    )
    client.chat.completions.create(model=MODEL, messages=first)

    asked = client.chat.completions.create(model=MODEL, messages=second)
    batch = ended(client, begin(client, send(client, line("a", messages=third))))

    [row] = rows(client, batch.output_file_id)
    answered = ChatCompletion.model_validate(row["response"]["body"])
    for usage in (asked.usage, answered.usage):
        assert usage
        assert usage.prompt_tokens_details
        assert 0 < (usage.prompt_tokens_details.cached_tokens or 0) < usage.prompt_tokens
    assert asked.usage
    assert answered.usage
    assert answered.usage.prompt_tokens_details == asked.usage.prompt_tokens_details


def test_the_async_client_sends_waits_and_fetches(served: ServedGateway, pipeline: Pipeline) -> None:
    pipeline.start()

    async def both() -> list[str]:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="x", max_retries=0) as client:
            file = await client.files.create(file=("p.jsonl", content(line("a"), line("b"))), purpose="batch")
            made = await client.batches.create(
                input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
            )
            nothing_unknown(made)
            while made.status not in OVER:
                await asyncio.sleep(0.05)
                made = await client.batches.retrieve(made.id)
            answers = await client.files.content(made.output_file_id or "")
            assert [each.id async for each in client.batches.list()] == [made.id]
            return [json.loads(row)["custom_id"] for row in answers.text.splitlines()]

    assert asyncio.run(both()) == ["a", "b"]


def test_batches_are_listed_in_pages(client: openai.OpenAI, pipeline: Pipeline) -> None:
    pipeline.start()
    file = send(client, line("a"))
    made = [begin(client, file) for _ in range(3)]
    assert [each.id for each in client.batches.list(limit=2)] == [each.id for each in reversed(made)]
    assert client.batches.list(limit=2).has_more
    for each in made:
        ended(client, each)


def test_the_same_content_with_the_same_key_runs_once(client: openai.OpenAI, pipeline: Pipeline) -> None:
    pipeline.start()
    first = begin(client, send(client, line("a")), key="monday")
    again = begin(client, send(client, line("a"), name="again.jsonl"), key="monday")
    others = [
        begin(client, send(client, line("a")), key="tuesday"),
        begin(client, send(client, line("b")), key="monday"),
    ]

    assert again.id == first.id
    assert len({first.id, *(each.id for each in others)}) == 3
    ended(client, first)
    assert begin(client, send(client, line("a")), key="monday").status == "completed"
    for each in others:
        ended(client, each)
    assert len([event for event in pipeline.events if event.step.name == "SUBMITTED"]) == 3


def test_a_batch_without_a_usable_line_fails_and_says_why(client: openai.OpenAI) -> None:
    get = {**line("d"), "method": "GET"}
    function = {"type": "function", "function": {"name": "f"}}
    lines = [line("a", model="gpt-4o"), line("b", stream=True), "", line("c", stop=[None]), get, "no json"]
    lines.append(line("e", tools=[function], tool_choice="required"))
    batch = ended(client, begin(client, send(client, *lines)))

    assert batch.status == "failed"
    assert batch.failed_at
    assert counted(batch) == (6, 0, 6)
    assert batch.errors
    data = batch.errors.data or []
    said = [each.message or "" for each in data]
    assert [each.line for each in data] == [1, 2, 4, 5, 6, 7]
    assert "not found" in said[0]
    assert said[2] == "line 4, c: stop[0]: Input should be a valid string"
    assert said[3] == "line 5, d: the method is 'GET'; only POST is served"
    assert said[4].startswith("line 6: it is not JSON")
    assert "tools" in said[5]
    assert len(rows(client, batch.error_file_id)) == 6
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(batch.id)


def test_a_custom_id_that_is_taken_is_in_one_file_only(client: openai.OpenAI, pipeline: Pipeline) -> None:
    pipeline.start()
    over = ended(client, begin(client, send(client, line("a"), line("a", "Another question."))))
    assert [row["custom_id"] for row in rows(client, over.output_file_id)] == ["a"]
    [error] = rows(client, over.error_file_id)
    assert error["custom_id"] == "line 2"
    assert "an earlier line has the same custom_id 'a'" in error["error"]["message"]


def test_lines_that_are_continued_are_answered_as_requests_are(client: openai.OpenAI, pipeline: Pipeline) -> None:
    pipeline.start()
    ask: dict[str, Any] = {"model": MODEL, "prompt": "Once upon a", "max_tokens": 8, "seed": 3, "temperature": 0}
    lines = [{"custom_id": "a", "method": "POST", "url": "/v1/completions", "body": ask}]
    lines.append({**lines[0], "custom_id": "b", "body": ask | {"prompt": ["one", "two"]}})
    made = client.batches.create(
        input_file_id=send(client, *lines).id, endpoint="/v1/completions", completion_window="24h"
    )
    over = ended(client, made)

    assert over.endpoint == "/v1/completions"
    [row] = rows(client, over.output_file_id)
    validate(Completion, row["response"]["body"])
    assert row["response"]["body"]["choices"][0]["text"] == client.completions.create(**ask).choices[0].text
    assert rows(client, over.error_file_id)[0]["error"]["message"].startswith("prompt must be a single non-empty")


def test_answers_are_deleted_when_their_time_is_over(
    client: openai.OpenAI, pipeline: Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline.start()
    hour: Any = {"anchor": "created_at", "seconds": 3600}
    over = ended(client, begin(client, send(client, line("a")), output_expires_after=hour))
    file = client.files.retrieve(over.output_file_id or "")
    assert abs((file.expires_at or 0) - file.created_at - 3600) <= 1
    assert (tmp_path / "files" / f"{file.id}.jsonl").exists()

    monkeypatch.setattr(files_module.time, "time", lambda: file.created_at + 3602.0)

    with pytest.raises(openai.NotFoundError):
        client.files.content(file.id)
    assert [each.purpose for each in client.files.list()] == ["batch"]
    assert not (tmp_path / "files" / f"{file.id}.jsonl").exists()


def test_a_batch_that_was_planned_by_an_earlier_release_goes_on_with_its_own_schemas(
    pipeline: Pipeline, tmp_path: Path
) -> None:
    # A schema as it came was part of a job's id: closed, it would be another job than the one that was sent.
    schema = {"type": "object", "properties": {"yes": {"type": "boolean"}}}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_bytes(content(line("a", response_format=form)))
    defaults = prompt_lines.Defaults(MODEL, 16, 0.0, 1.0)

    def schemas(batch: PlannedBatch) -> list[str]:
        objects = prompt_lines.objects_of(batch)
        lines = prompt_lines.read_lines(prompts, batch.batch_id, batch.secret, lambda _: defaults, objects=objects)
        return [each.job.sampling.json_schema for each in lines if each.job]

    for objects, form_number in (("verbatim", 4), ("closed", 6)):
        with PlannedBatch(tmp_path / objects) as batch:
            lines = prompt_lines.read_lines(
                prompts, batch.batch_id, batch.secret, lambda _: defaults, objects=cast(Any, objects)
            )
            prompt_lines.plan(batch, list(lines), prompts, MODEL, cast(Any, objects))
        with PlannedBatch(tmp_path / objects) as batch:
            assert (batch.prompt_form, batch.may_publish) == (form_number, True)
            assert ("additionalProperties" in schemas(batch)[0]) == (objects == "closed")
            assert set(batch.open_jobs) == {
                each.job.job_id
                for each in prompt_lines.read_lines(
                    prompts, batch.batch_id, batch.secret, lambda _: defaults, objects=prompt_lines.objects_of(batch)
                )
                if each.job
            }


def test_cancelling_keeps_the_answers_that_are_there(client: openai.OpenAI, pipeline: Pipeline) -> None:
    pipeline.start(PACED)
    file = send(client, *(line(f"line {number}", f"Question {number}?") for number in range(12)))
    batch = begin(client, file)
    wait_until(lambda: counted(client.batches.retrieve(batch.id))[1] >= 2, "two are answered")
    with pytest.raises(openai.ConflictError) as refused:
        client.files.delete(file.id)
    assert refused.value.code == "file_in_use"

    assert client.batches.cancel(batch.id).status in ("cancelling", "cancelled")
    over = ended(client, batch)

    assert over.status == "cancelled"
    total, completed, failed = counted(over)
    assert (total, total > completed >= 2) == (12, True)
    assert over.cancelled_at
    answered = {row["custom_id"] for row in rows(client, over.output_file_id)}
    errors = rows(client, over.error_file_id)
    assert (len(answered), len(errors)) == (completed, failed)
    assert answered | {row["custom_id"] for row in errors} == {f"line {number}" for number in range(12)}
    assert {row["error"]["code"] for row in errors} == {"batch_cancelled"}
    assert client.files.delete(file.id).deleted


def test_what_nobody_answers_in_the_window_expires(client: openai.OpenAI, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batches_module, "WINDOW_S", 0.5)
    monkeypatch.setattr(batches_module, "_LATE_S", 0.1)
    batch = ended(client, begin(client, send(client, line("a"), line("b"))))

    assert batch.status == "expired"
    assert batch.expired_at
    assert counted(batch) == (2, 0, 2)
    assert [row["error"]["code"] for row in rows(client, batch.error_file_id)] == ["batch_expired"] * 2


def test_stopped_in_the_middle_the_next_gateway_goes_on(pipeline: Pipeline, tmp_path: Path) -> None:
    pipeline.start(PACED)
    names = [f"line {number}" for number in range(12)]
    with ServedGateway(pipeline.client, tmp_path) as served, client_of(served) as client:
        batch = begin(client, send(client, *(line(name, name) for name in names)))
        wait_until(lambda: counted(client.batches.retrieve(batch.id))[1] >= 2, "two are answered")

    with ServedGateway(pipeline.client, tmp_path) as served, client_of(served) as client:
        over = ended(client, batch)
        assert over.status == "completed"
        assert (over.id, over.created_at, over.expires_at) == (batch.id, batch.created_at, batch.expires_at)
        assert counted(over) == (12, 12, 0)
        assert [row["custom_id"] for row in rows(client, over.output_file_id)] == names
    with ServedGateway(pipeline.client, tmp_path) as served, client_of(served) as client:
        assert client.batches.retrieve(batch.id) == over
        assert len(list(client.files.list())) == 2
    # What is kept of it now are its files and its description
    assert not list((tmp_path / "batches").glob("*/"))


def test_cancelled_before_the_kill_it_is_cancelled_after(pipeline: Pipeline, tmp_path: Path) -> None:
    with ServedGateway(pipeline.client, tmp_path) as served, client_of(served) as client:
        batch = begin(client, send(client, line("a"), "no json"))
        served.batches.close()  # as if it were killed right after the answer to what follows
        assert client.batches.cancel(batch.id).status == client.batches.cancel(batch.id).status == "cancelling"
    with ServedGateway(pipeline.client, tmp_path) as served, client_of(served) as client:
        over = ended(client, batch)
        assert (over.status, counted(over)) == ("cancelled", (2, 0, 2))


def test_a_line_that_can_not_be_used_is_told_after_a_crash_that_came_before_its_reason(
    pipeline: Pipeline, tmp_path: Path
) -> None:
    with ServedGateway(pipeline.client, tmp_path) as served, client_of(served) as client:
        batch = begin(client, send(client, line("a"), "no json"))
        wait_until(lambda: client.batches.retrieve(batch.id).status == "in_progress", "its lines are read")
    (tmp_path / "batches" / batch.id / "results.jsonl").unlink()
    pipeline.start()
    with ServedGateway(pipeline.client, tmp_path) as served, client_of(served) as client:
        over = ended(client, batch)
        assert (over.status, counted(over)) == ("completed", (2, 1, 1))
        assert "not JSON" in rows(client, over.error_file_id)[0]["error"]["message"]


def test_answers_that_can_not_be_written_are_written_later_under_the_same_id(
    client: openai.OpenAI, pipeline: Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(batches_module, "_RETRY_S", 0.05)
    batch = begin(client, send(client, line("a"), line("b")))
    name = f"{batch.id.replace('batch_', 'file-')}-output"
    in_the_way = tmp_path / "files" / f"{name}.jsonl"
    in_the_way.mkdir()
    pipeline.start()
    wait_until(lambda: client.batches.retrieve(batch.id).status == "finalizing", "it has its answers")
    assert client.batches.retrieve(batch.id).output_file_id is None
    with pytest.raises(openai.ConflictError):
        client.batches.cancel(batch.id)

    in_the_way.rmdir()

    over = ended(client, batch)
    assert (over.output_file_id, counted(over)) == (name, (2, 2, 0))
    assert [row["custom_id"] for row in rows(client, name)] == ["a", "b"]


def test_half_characters_and_numbers_for_ids_are_errors_of_their_lines(
    client: openai.OpenAI, pipeline: Pipeline
) -> None:
    pipeline.start()
    lines = [
        line("\ud800"),
        line("b", "d\ud800up"),
        line("c", **{"\ud800": 1}),
        line("d", metadata={"\ud800": 1}),
        {**line("e"), "custom_id": 5},
        line("f", "\U0001f600"),
    ]
    over = ended(client, begin(client, send(client, *lines)))
    assert (over.status, counted(over)) == ("completed", (6, 1, 5))
    assert [row["custom_id"] for row in rows(client, over.output_file_id)] == ["f"]
    errors = {row["custom_id"]: row["error"] for row in rows(client, over.error_file_id)}
    assert {error["code"] for error in errors.values()} == {"invalid_request"}
    assert "custom_id must be text" in errors.pop("line 5")["message"]
    assert set(errors) == {"line 1", "b", "c", "d"}
    assert all("half a character" in error["message"] for error in errors.values())


def test_one_keys_files_and_batches_are_invisible_to_another(
    pipeline: Pipeline, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(keys, "_LOOK_S", 0.0)
    ada, bob = (add_key(file_in(tmp_path), name, [MODEL]) for name in ("ada", "bob"))
    pipeline.start()
    with (
        ServedGateway(pipeline.client, tmp_path, MODELS) as served,
        client_of(served, ada) as hers,
        client_of(served, bob) as his,
    ):
        file = send(hers, line("a", "A rule. " * 200), line("other", model="other:1b"))
        batch = ended(hers, begin(hers, file, key="k"))
        assert counted(batch) == (2, 1, 1)
        assert "other:1b' not found" in rows(hers, batch.error_file_id)[0]["error"]["message"]
        assert list(his.files.list()) == list(his.batches.list()) == []
        for name in (file.id, batch.output_file_id or "", batch.error_file_id or ""):
            for look in (his.files.retrieve, his.files.content, his.files.delete):
                with pytest.raises(openai.NotFoundError):
                    look(name)
        for at in (his.batches.retrieve, his.batches.cancel):
            with pytest.raises(openai.NotFoundError):
                at(batch.id)
        with pytest.raises(openai.NotFoundError):
            begin(his, file)
        copy = ended(his, begin(his, send(his, line("a", "A rule. " * 200)), key="k"))
        assert copy.id != batch.id
        used = rows(his, copy.output_file_id)[0]["response"]["body"]["usage"]
        assert used["prompt_tokens_details"]["cached_tokens"] == 0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"purpose": "fine-tune"}, "purpose"),
        ({"purpose": "batch", "expires_after[seconds]": "3600"}, "expires_after[seconds]"),
        ({"purpose": "batch"}, "file"),
    ],
)
def test_what_is_not_kept_is_refused_by_name(standing: ServedGateway, fields: dict[str, str], param: str) -> None:
    files = {} if param == "file" else {"file": ("p.jsonl", b"{}\n")}
    answer = httpx.post(f"{standing.url}/v1/files", data=fields, files=files or {"purpose": (None, "batch")})
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"endpoint": "/v1/embeddings"}, "endpoint"),
        ({"completion_window": "1h"}, "completion_window"),
        ({"output_expires_after": {"anchor": "created_at", "seconds": 3599}}, "output_expires_after.seconds"),
        ({"metadata": {"a": "x" * 513}}, "metadata.a"),
        ({"input_file_id": None}, "input_file_id"),
        ({"priority": 1}, "priority"),
    ],
)
def test_what_a_batch_can_not_have_is_refused_by_name(
    standing: ServedGateway, fields: dict[str, Any], param: str
) -> None:
    body = {"input_file_id": "file-x", "endpoint": "/v1/chat/completions", "completion_window": "24h"} | fields
    answer = httpx.post(f"{standing.url}/v1/batches", json=body)
    assert answer.status_code == 400
    assert answer.json()["error"]["param"] == param
    assert httpx.get(f"{standing.url}/v1/batches?limit=0").json()["error"]["param"] == "limit"


def test_a_file_is_bounded_before_and_after_it_is_read(
    standing: ServedGateway, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def sent(data: bytes) -> httpx.Response:
        return httpx.post(f"{standing.url}/v1/files", data={"purpose": "batch"}, files={"file": ("p.jsonl", data)})

    before = httpx.get(f"{standing.url}/v1/files").json()
    assert sent(b"\n \n").json()["error"]["message"] == "the file contains no prompt"
    monkeypatch.setattr(prompt_lines, "MAX_LINES", 2)
    assert sent(content(line("a"), line("b"), line("c"))).status_code == 400
    monkeypatch.setattr(prompt_lines, "MAX_FILE_BYTES", 100)
    assert "at most" in sent(content(line("a"))).json()["error"]["message"]
    monkeypatch.setattr(limits, "MAX_UPLOAD_BYTES", 50_000)
    assert sent(b"x" * 60_000).status_code == 413
    assert httpx.get(f"{standing.url}/v1/files").json() == before


def test_what_lies_in_the_folder_is_for_its_owner_alone_and_for_one_gateway(pipeline: Pipeline, tmp_path: Path) -> None:
    pipeline.start()
    folder = tmp_path / "state"
    with ServedGateway(pipeline.client, folder) as served, client_of(served) as client:
        ended(client, begin(client, send(client, line("a"))))
        for path in (folder, *folder.rglob("*")):
            assert stat.S_IMODE(path.stat().st_mode) == (0o700 if path.is_dir() else 0o600), path
        with pytest.raises(ConfigError, match="another gateway uses"), open_files(folder):
            pass
    stranger = folder / "files/notes.txt"
    stranger.write_text("mine")
    left = [folder / "files" / f"{start}file-{'a' * 24}.json{end}" for start, end in (("", "l"), (".", ".01234567"))]
    for path in left:
        path.write_text("half")
    with open_files(folder) as files:
        assert len(files.of("")) == 2
    assert stranger.exists()
    assert not any(path.exists() for path in left)
    (folder / f"files/file-{'b' * 24}.json").write_text('{"id": 3}')
    with pytest.raises(ConfigError, match="can't be read"), open_files(folder):
        pass
