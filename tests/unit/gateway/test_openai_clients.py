"""OpenAI's own client, unmodified, asks the gateway; its answers are what the client's models allow, and no more."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any, Literal, cast
from unittest import mock

import httpx
import openai
import pytest
from openai.types import Completion, Model
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel

from engines.entry import EngineOptions
from engines.simulated.engine import SimulatedEngine, parse_weights
from gateway import gateway as gateway_module
from gateway.gateway import prompt_of
from messages.errors import ConfigError
from messages.jobs import Part, Sampling, conversation
from tests.support.gateway import ServedGateway, nothing_unknown, validate
from tests.support.pipeline import MODEL, SHARED_TEXT, Pipeline

ASK: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a queue?"}]
POINTS: Any = {"type": "object", "properties": {"points": {"type": "integer", "minimum": 0, "maximum": 9}}}
POINTS["required"] = ["points"]
FUNCTION: Any = {"type": "function", "function": {"name": "grade", "parameters": POINTS, "strict": True}}


def choice(name: str) -> Any:
    return {"type": "function", "function": {"name": name}}


@pytest.fixture
def client(served: ServedGateway) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none is needed", max_retries=0, timeout=30) as client:
        yield client


@pytest.fixture
def standing_client(standing: ServedGateway) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{standing.url}/v1", api_key="x", max_retries=0, timeout=30) as client:
        yield client


def alone(pipeline: Pipeline, messages: Any = ASK, **sampling: Any) -> str:
    """What the engine says to these messages without a gateway."""
    prompt = prompt_of([(each["role"], each["content"]) for each in messages], shares=True)
    job = pipeline.client.new_job("b", "i", MODEL, prompt, Sampling(**{"max_tokens": 16, "temperature": 0} | sampling))
    return pipeline.undisturbed_text(job)


def test_models_are_listed_and_shown(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == [MODEL]
    assert client.models.retrieve(MODEL).owned_by == "kvasir"
    with pytest.raises(openai.NotFoundError) as refused:
        client.models.retrieve("gpt-4o")
    assert refused.value.code == "model_not_found"


def test_an_answer_is_the_engines_with_its_own_figures(client: openai.OpenAI, pipeline: Pipeline) -> None:
    _, decode = pipeline.start()

    made = client.chat.completions.create(model=MODEL, messages=ASK, seed=7, max_completion_tokens=12)

    nothing_unknown(made)
    assert made.choices[0].message.content == alone(pipeline, seed=7, max_tokens=12)
    assert made.choices[0].finish_reason in ("stop", "length")
    assert made.service_tier == "default"
    assert made.usage
    (tokens,) = decode.engine.decode_calls
    assert made.usage.prompt_tokens == len(tokens)
    assert made.usage.total_tokens == made.usage.prompt_tokens + made.usage.completion_tokens


def test_all_that_is_served_at_once(client: openai.OpenAI, pipeline: Pipeline) -> None:
    pipeline.start()

    made = client.chat.completions.create(
        model=MODEL,
        messages=[
            {"role": "developer", "content": [{"type": "text", "text": "Be "}, {"type": "text", "text": "brief."}]},
            {"role": "user", "content": "What is a queue?"},
            {"role": "assistant", "content": "A line."},
            {"role": "user", "content": "And a stack?"},
        ],
        n=3,
        seed=1,
        stop=["zebra", "quagga"],
        temperature=0.7,
        top_p=0.5,
        max_tokens=10,
        response_format={"type": "text"},
        metadata={"course": "101"},
        service_tier="flex",
        user="ada",
        logprobs=False,
        presence_penalty=0,
        frequency_penalty=0.0,
        tools=[],
        extra_body={"logit_bias": {}, "audio": None, "store": True, "prompt_cache_key": "x", "cache_control": {}},
    )

    nothing_unknown(made)
    assert [choice.index for choice in made.choices] == [0, 1, 2]
    assert made.metadata == {"course": "101"}
    assert made.service_tier == "flex"
    (events,) = [event for event in pipeline.events if event.step.name == "SUBMITTED"]
    assert events.facts["lane"] == "bulk"


def test_what_many_have_in_common_is_cached_and_said_to_be(client: openai.OpenAI, pipeline: Pipeline) -> None:
    pipeline.start()
    system = {"role": "system", "content": SHARED_TEXT}

    first, second = (
        client.chat.completions.create(model=MODEL, messages=[system, {"role": "user", "content": text}])
        for text in ("One question. " * 20, "Another question. " * 20)
    )

    cached = [made.usage.prompt_tokens_details.cached_tokens for made in (first, second) if made.usage]
    # The second job computed what follows the last whole block of the system's message, and not a token more.
    assert cached[0] == 0
    assert 128 <= cached[1] < 230


def test_the_next_turn_computes_the_last_answer_and_the_new_message(client: openai.OpenAI, pipeline: Pipeline) -> None:
    # Given a conversation whose class-wide part is short, and a worker that keeps nothing by itself
    pipeline.start()
    said: Any = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "A long question. " * 120}]
    first = client.chat.completions.create(model=MODEL, messages=said)
    answer = {"role": "assistant", "content": first.choices[0].message.content}
    # When it goes on
    second = client.chat.completions.create(
        model=MODEL, messages=[*said, answer, {"role": "user", "content": "And why? " * 20}]
    )
    # Then its prompt's whole blocks are not computed again
    assert first.usage
    assert second.usage
    asked = [made.usage.prompt_tokens_details.cached_tokens for made in (first, second)]
    assert asked[0] == 0
    assert first.usage.prompt_tokens - 16 <= asked[1] <= first.usage.prompt_tokens


def test_a_schema_is_kept_and_parsed(client: openai.OpenAI, pipeline: Pipeline) -> None:
    class Grade(BaseModel):
        letter: Literal["A", "B", "C"]
        points: int

    pipeline.start()
    parsed = client.chat.completions.parse(model=MODEL, messages=ASK, response_format=Grade, max_tokens=40)
    free = client.chat.completions.create(model=MODEL, messages=ASK, response_format={"type": "json_object"})

    assert isinstance(parsed.choices[0].message.parsed, Grade)
    assert isinstance(json.loads(free.choices[0].message.content or ""), dict)


def test_a_stream_has_the_same_text_and_the_usage_last(client: openai.OpenAI, pipeline: Pipeline) -> None:
    pipeline.start()

    chunks = list(
        client.chat.completions.create(
            model=MODEL, messages=ASK, seed=7, n=2, stream=True, stream_options={"include_usage": True}
        )
    )

    for chunk in chunks:
        nothing_unknown(chunk)
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    texts = ["", ""]
    for chunk in chunks:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
    assert texts == [alone(pipeline, seed=7), alone(pipeline, seed=8)]
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[-1].usage
    assert not chunks[-1].choices
    assert all(chunk.usage is None for chunk in chunks[:-1])


def test_the_async_client_streams_too(served: ServedGateway, pipeline: Pipeline) -> None:
    pipeline.start()

    async def both() -> tuple[str, str]:
        async with openai.AsyncOpenAI(base_url=f"{served.url}/v1", api_key="x", max_retries=0) as client:
            whole = await client.chat.completions.create(model=MODEL, messages=ASK, seed=3)
            async with client.chat.completions.stream(model=MODEL, messages=ASK, seed=3) as stream:
                pieces = [event.delta async for event in stream if event.type == "content.delta"]
                final = await stream.get_final_completion()
            assert final.choices[0].message.content == "".join(pieces)
            return whole.choices[0].message.content or "", "".join(pieces)

    whole, streamed = asyncio.run(both())
    assert whole == streamed == alone(pipeline, seed=3)


def test_raw_answers_have_what_the_models_require(served: ServedGateway, pipeline: Pipeline) -> None:
    pipeline.start()
    body = {"model": MODEL, "messages": ASK}
    with httpx.Client(base_url=served.url, timeout=30) as http:
        validate(Model, http.get(f"/v1/models/{MODEL}").json())
        validate(ChatCompletion, http.post("/v1/chat/completions", json=body).json())
        lines = http.post("/v1/chat/completions", json=body | {"stream": True}).text.split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    for line in lines[:-2]:
        validate(ChatCompletionChunk, json.loads(line.removeprefix("data: ")))


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"tools": [{"type": "function", "function": {"name": "f"}}]}, "tools"),
        ({"tools": [FUNCTION], "tool_choice": "auto"}, "tool_choice"),
        ({"tools": [FUNCTION, {**FUNCTION, "function": {"name": "g"}}], "tool_choice": "required"}, "tool_choice"),
        ({"tools": [FUNCTION], "tool_choice": choice("g")}, "tool_choice.function.name"),
        ({"tools": [], "tool_choice": "required"}, "tool_choice"),
        ({"max_tokens": 0}, "max_tokens"),
        ({"stop": ["a"] * 17}, "stop"),
        ({"best_of": 3}, "best_of"),
        ({"service_tier": "priority"}, "service_tier"),
        ({"response_format": {"type": "grammar"}}, "response_format.type"),
        ({"response_format": {"type": "json_schema"}}, "response_format"),
        ({"stream_options": {"include_usage": True}}, "stream_options"),
        ({"temperature": "hot"}, "temperature"),
        ({"n": True}, "n"),
        ({"messages": []}, "messages"),
        ({"messages": [{"role": "tool", "content": "4", "tool_call_id": "a"}]}, "messages"),
        ({"messages": [{"role": "function", "content": "4", "name": "a"}]}, "messages[0].role"),
        (
            {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:"}}]}]},
            "messages[0].content[0]",
        ),
        ({"messages": [{"role": "assistant", "content": None, "tool_calls": [{"id": "a"}]}]}, "tool_calls"),
    ],
)
def test_what_is_not_served_is_refused_by_name(
    standing_client: openai.OpenAI, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        standing_client.chat.completions.create(**{"model": MODEL, "messages": ASK, "extra_body": fields})
    assert refused.value.param == param
    assert param.split(".")[0] in refused.value.message
    assert refused.value.type == "invalid_request_error"


def said(**message: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", **message}]}


@pytest.mark.parametrize(
    ("fields", "param", "fault"),
    [
        (said(content=[{"type": "text", "text": 5}]), "messages[0].content[0].text", "should be a valid string"),
        (said(content=[{"type": "text"}]), "messages[0].content[0].text", "required"),
        (said(content=[{"type": "text", "text": "x", "y": 1}]), "messages[0].content[0].y", "is not a field"),
        (said(content=5), "messages[0].content", "should be a valid string"),
        ({"stop": [None]}, "stop[0]", "should be a valid string"),
        ({"stop": 5}, "stop", "should be a valid string"),
        ({"body": 5}, "body", "is not a field"),
    ],
)
def test_a_field_is_named_as_the_client_wrote_it(
    standing_client: openai.OpenAI, fields: dict[str, Any], param: str, fault: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        standing_client.chat.completions.create(model=MODEL, messages=ASK, extra_body=fields)
    assert refused.value.param == param
    assert param in refused.value.message
    assert fault in refused.value.message


@pytest.mark.parametrize(
    "fields", [{"n": 33}, {"temperature": 6}, {"temperature": -1}, {"seed": -2}, {"max_tokens": -2}, {"max_tokens": 0}]
)
def test_values_out_of_bounds_are_refused(standing_client: openai.OpenAI, fields: dict[str, Any]) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        standing_client.chat.completions.create(**{"model": MODEL, "messages": ASK, "extra_body": fields})
    assert refused.value.code == "invalid_value"


def test_a_job_that_its_own_request_spoils_is_a_bad_request(client: openai.OpenAI, pipeline: Pipeline) -> None:
    pipeline.start()
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as refused:
            client.chat.completions.create(model=MODEL, messages=ASK, max_tokens=100_000, stream=stream)
        assert refused.value.code == "context_length_exceeded"


@pytest.mark.parametrize("chosen", ["required", choice("grade")])
def test_a_forced_function_is_called_whole_and_in_pieces(
    client: openai.OpenAI, pipeline: Pipeline, chosen: Any
) -> None:
    pipeline.start()
    ask: Any = {"model": MODEL, "messages": ASK, "tools": [FUNCTION], "tool_choice": chosen, "seed": 7, "n": 2}

    made = client.chat.completions.create(**ask, parallel_tool_calls=False)
    chunks = list(client.chat.completions.create(**ask, stream=True))

    nothing_unknown(made)
    calls: list[Any] = []
    for one in made.choices:
        assert (one.finish_reason, one.message.content) == ("tool_calls", None)
        [call] = one.message.tool_calls or []
        calls.append(call)
    assert len({call.id for call in calls}) == 2
    assert {call.function.name for call in calls} == {"grade"}
    assert all(set(json.loads(call.function.arguments)) == {"points"} for call in calls)
    # In pieces: the first says id and name, all of them the arguments
    names, arguments, ends = [""] * 2, [""] * 2, set()
    for chunk in chunks:
        nothing_unknown(chunk)
        for piece in chunk.choices:
            ends |= {piece.finish_reason} - {None}
            for part in piece.delta.tool_calls or ():
                assert part.function
                names[piece.index] += part.function.name or ""
                arguments[piece.index] += part.function.arguments or ""
    assert (names, ends) == (["grade"] * 2, {"tool_calls"})
    assert arguments == [call.function.arguments for call in calls]


def test_without_a_choice_of_functions_the_answer_is_text(client: openai.OpenAI, pipeline: Pipeline) -> None:
    pipeline.start()
    ask: Any = {"model": MODEL, "messages": ASK, "seed": 7}
    made = client.chat.completions.create(**ask, tools=[FUNCTION], tool_choice="none")
    assert made.choices[0].message.content == alone(pipeline, seed=7)


def test_a_history_of_calls_and_their_results_is_part_of_the_prompt(client: openai.OpenAI, pipeline: Pipeline) -> None:
    _, decode = pipeline.start()
    call = {"id": "call_1", "type": "function", "function": {"name": "grade", "arguments": '{"points": 7}'}}
    history = [
        *ASK,
        {"role": "assistant", "content": None, "tool_calls": [call], "reasoning_content": "Seven."},
        {"role": "tool", "tool_call_id": "call_1", "content": "kept"},
        {"role": "user", "content": "And now?", "name": "ada"},
    ]
    made = client.chat.completions.create(model=MODEL, messages=history)

    assert made.choices[0].message.content
    parts = (
        *conversation([("system", "Be brief."), ("user", "What is a queue?")], "class", "conversation"),
        Part("assistant", '{"points": 7}', "conversation", "grade"),
        Part("tool", "kept", "conversation", "grade"),
        Part("user", "And now?", "conversation"),
    )
    assert tuple(decode.engine.decode_calls[0]) == decode.engine.tokenize(parts, 0.0).ids


def test_an_answer_that_was_begun_goes_on(client: openai.OpenAI, pipeline: Pipeline) -> None:
    _, decode = pipeline.start()
    client.chat.completions.create(model=MODEL, messages=[*ASK, {"role": "assistant", "content": "A queue is"}])
    whole = decode.engine.decode_calls[0]
    client.chat.completions.create(model=MODEL, messages=ASK)
    before = decode.engine.decode_calls[1]
    assert tuple(whole[: len(before)]) == tuple(before)  # with the opening of the answer
    assert len(whole) == len(before) + 3


def test_messages_that_say_nothing_are_left_out(client: openai.OpenAI, pipeline: Pipeline) -> None:
    pipeline.start()
    empty: Any = [{"role": "system", "content": " "}, {"role": "assistant", "tool_calls": []}]
    made = client.chat.completions.create(
        model=MODEL, messages=[*empty, *ASK], seed=-1, max_tokens=-1, user=None, extra_body={"user": {"id": 5}}
    )
    assert made.usage
    parts = conversation([("system", "Be brief."), ("user", "What is a queue?")], "class", "conversation")
    tokens = SimulatedEngine(parse_weights("sim:"), EngineOptions("", slots=1)).tokenize(parts, 0.0).ids
    assert made.usage.prompt_tokens == len(tokens)


def test_a_schema_that_can_not_be_enforced_is_refused_before_it_is_a_job(
    client: openai.OpenAI, pipeline: Pipeline
) -> None:
    pipeline.start()
    schema = {"type": "object", "properties": {"when": {"type": "array", "uniqueItems": True}}}
    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    with pytest.raises(openai.BadRequestError) as refused:
        client.chat.completions.create(model=MODEL, messages=ASK, response_format=form)
    assert refused.value.code == "invalid_json_schema"
    assert "$.properties.when: uniqueItems" in refused.value.message
    assert not pipeline.events


def test_what_a_setting_opens(served: ServedGateway, client: openai.OpenAI, pipeline: Pipeline) -> None:
    pipeline.start()
    asked = {"Host": "host.docker.internal:8000"}
    assert httpx.get(f"{served.url}/v1/models", headers=asked).status_code == 403
    served.gateway.host_names = ("host.docker.internal",)
    assert httpx.get(f"{served.url}/v1/models", headers=asked).status_code == 200
    assert httpx.get(f"{served.url}/v1/models", headers={"Host": "example.com"}).status_code == 403

    form: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": POINTS}}
    schemas = []
    for objects in ("closed", "open"):
        served.gateway.objects = cast(Any, objects)
        with mock.patch.object(pipeline.client, "new_job", wraps=pipeline.client.new_job) as new_job:
            client.chat.completions.create(model=MODEL, messages=ASK, response_format=form)
        schemas.append(json.loads(new_job.call_args.args[4].json_schema))
    assert schemas == [POINTS | {"additionalProperties": False}, POINTS]


def test_a_request_for_the_head_alone_and_every_answers_id(standing: ServedGateway) -> None:
    with httpx.Client(base_url=standing.url, timeout=30) as http:
        head, get = http.head("/v1/models"), http.get("/v1/models")
        assert (head.status_code, head.content) == (200, b"")
        assert head.headers["content-length"] == str(len(get.content))
        assert http.head("/v1/chat/completions").status_code == 405
        refused = http.post("/v1/chat/completions", json={})
    ids = {answer.headers["x-request-id"] for answer in (head, get, refused)}
    assert len(ids) == 3


def test_a_completion_goes_on_from_a_text_whole_and_in_pieces(
    client: openai.OpenAI, served: ServedGateway, pipeline: Pipeline
) -> None:
    pipeline.start()
    ask: Any = {"model": MODEL, "prompt": "What is a queue?", "seed": 7, "n": 2}

    made = client.completions.create(**ask | {"prompt": ["What is a queue?"]}, extra_body={"best_of": 1, "echo": False})
    chunks = list(client.completions.create(**ask, stream=True, stream_options={"include_usage": True}))
    raw = httpx.post(f"{served.url}/v1/completions", json=ask).json()

    nothing_unknown(made)
    validate(Completion, raw)
    raw_prompt = (Part("raw", ask["prompt"]),)
    jobs = [
        pipeline.client.new_job("b", "i", MODEL, raw_prompt, Sampling(max_tokens=16, temperature=0, seed=seed))
        for seed in (7, 8)
    ]
    expected = [pipeline.undisturbed_text(job) for job in jobs]
    assert [choice.text for choice in made.choices] == [choice["text"] for choice in raw["choices"]] == expected
    texts = ["", ""]
    for chunk in chunks:
        nothing_unknown(chunk)
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == expected
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert made.usage
    assert chunks[-1].usage
    assert chunks[-1].usage.completion_tokens == made.usage.completion_tokens > 0


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ["a"] * 33}, "prompt"),
        ({"prompt": ["a", "b"], "n": 17}, "prompt"),
        ({"prompt": [1, 2]}, "prompt[0]"),
        ({"prompt": [[1], [2]]}, "prompt[0]"),
        ({"prompt": []}, "prompt"),
        ({"prompt": ""}, "prompt"),
        ({"suffix": "x"}, "suffix"),
        ({"echo": True}, "echo"),
        ({"best_of": 2}, "best_of"),
        ({"logprobs": 1}, "logprobs"),
        ({"response_format": {"type": "text"}}, "response_format"),
    ],
)
def test_what_a_completion_can_not_have_is_refused_by_name(
    standing_client: openai.OpenAI, fields: dict[str, Any], param: str
) -> None:
    with pytest.raises(openai.BadRequestError) as refused:
        standing_client.completions.create(model=MODEL, prompt="x", extra_body=fields)
    assert refused.value.param == param


def test_several_texts_are_continued_in_their_order(client: openai.OpenAI, pipeline: Pipeline) -> None:
    pipeline.start()
    texts = ["Once upon a", "In a hole", "Call me"]
    ask: Any = {"model": MODEL, "seed": 7, "n": 2}
    alone_texts = [one.text for text in texts for one in client.completions.create(**ask, prompt=text).choices]

    together = client.completions.create(**ask, prompt=texts)
    pieces = [""] * 6
    for chunk in client.completions.create(**ask, prompt=texts, stream=True):
        for one in chunk.choices:
            pieces[one.index] += one.text

    assert [one.index for one in together.choices] == [*range(6)]
    assert [one.text for one in together.choices] == pieces == alone_texts
    assert together.usage
    assert together.usage.total_tokens == together.usage.prompt_tokens + together.usage.completion_tokens


def test_without_a_worker_the_client_is_told_when_to_come_again(client: openai.OpenAI) -> None:
    with pytest.raises(openai.InternalServerError) as refused:
        client.chat.completions.create(model=MODEL, messages=ASK)
    assert refused.value.status_code == 503
    assert refused.value.code == "no_worker"
    assert int(refused.value.response.headers["Retry-After"]) > 0


def test_a_queue_that_is_too_long_takes_no_more(
    client: openai.OpenAI, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipeline.start_decode()
    monkeypatch.setattr(gateway_module, "MAX_WAITING", 2)
    pipeline.submit(*(pipeline.job(f"job {number}", lane="bulk") for number in range(2)))

    with pytest.raises(openai.RateLimitError) as refused:
        client.chat.completions.create(model=MODEL, messages=ASK, service_tier="flex")
    assert refused.value.code == "queue_full"
    assert int(refused.value.response.headers["Retry-After"]) > 0


def test_a_broker_that_does_not_let_us_look_does_not_stop_us(
    client: openai.OpenAI, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refused(queue: str) -> None:
        raise ConfigError(f"ACCESS_REFUSED for {queue}")

    pipeline.start()
    monkeypatch.setattr(pipeline.broker, "depth", refused)
    assert client.chat.completions.create(model=MODEL, messages=ASK).choices[0].message.content
