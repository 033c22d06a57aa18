"""Ollama's own client, unmodified, asks the gateway; its answers are what the client's models allow, and no more."""

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import ollama
import pytest
from pydantic import BaseModel

from tests.support.gateway import ServedGateway, validate
from tests.support.pipeline import MODEL, Pipeline

ASK = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What is a queue?"}]
ALL = {"temperature": 0.5, "top_p": 0.8, "top_k": 40, "seed": 5, "num_predict": 9, "stop": ["zebra"], "num_ctx": 4096}


@pytest.fixture
def client(served: ServedGateway) -> Iterator[ollama.Client]:
    with ollama.Client(host=served.url, timeout=30) as client:
        yield client


def test_chat_whole_and_streamed_are_the_same_answer(client: ollama.Client, pipeline: Pipeline) -> None:
    pipeline.start()
    whole = client.chat(MODEL, ASK, options=ALL, keep_alive="5m", think=False)
    pieces = list(client.chat(MODEL, ASK, options=ALL, stream=True))

    assert whole.message.role == "assistant"
    assert "".join(piece.message.content or "" for piece in pieces) == whole.message.content
    assert [piece.done for piece in pieces] == [False] * (len(pieces) - 1) + [True]
    assert pieces[-1].eval_count == whole.eval_count
    assert whole.done_reason in ("stop", "length")
    assert whole.prompt_eval_count
    assert whole.total_duration


def test_generate_with_and_without_a_system_prompt(client: ollama.Client, pipeline: Pipeline) -> None:
    pipeline.start()
    plain = client.generate(MODEL, "What is a queue?", options={"seed": 1})
    told = client.generate(MODEL, "What is a queue?", system="Be brief.", options={"seed": 1})
    pieces = client.generate(MODEL, "What is a queue?", options={"seed": 1}, stream=True)
    assert "".join(piece.response for piece in pieces) == plain.response
    assert told.prompt_eval_count
    assert plain.prompt_eval_count
    assert told.prompt_eval_count > plain.prompt_eval_count


def test_a_format_is_kept(client: ollama.Client, pipeline: Pipeline) -> None:
    class Grade(BaseModel):
        points: int

    pipeline.start()
    Grade.model_validate_json(client.chat(MODEL, ASK, format=Grade.model_json_schema()).message.content or "")
    assert isinstance(json.loads(client.generate(MODEL, "x", format="json").response), dict)


def test_the_async_client(served: ServedGateway, pipeline: Pipeline) -> None:
    pipeline.start()

    async def ask() -> str:
        async with ollama.AsyncClient(host=served.url) as client:
            return "".join([piece.message.content or "" async for piece in await client.chat(MODEL, ASK, stream=True)])

    assert asyncio.run(ask())


def test_what_is_asked_about_models(client: ollama.Client, pipeline: Pipeline) -> None:
    assert client.ps().models == []
    pipeline.start()
    assert [model.model for model in client.list().models] == [MODEL]
    shown = client.show(MODEL)
    assert shown.modelinfo
    assert shown.modelinfo["general.architecture"] == "kvasir"


def test_once_a_worker_is_there_its_context_is_known(client: ollama.Client, pipeline: Pipeline) -> None:
    pipeline.start()
    assert [(model.name, model.context_length) for model in client.ps().models] == [(MODEL, 4096)]
    assert (client.show(MODEL).modelinfo or {})["kvasir.context_length"] == 4096
    assert client.generate(MODEL).done_reason == "load"
    assert client.generate(MODEL, keep_alive=0).done_reason == "unload"


def test_a_context_that_no_model_has_is_the_models_own_and_a_header_says_so(standing: ServedGateway) -> None:
    ask: Any = {"model": MODEL, "messages": [{"role": "user", "content": "x"}]}
    for asked, told in ((4096, None), (131_072, "4096")):
        for stream in (False, True):
            answer = httpx.post(
                f"{standing.url}/api/chat", json=ask | {"options": {"num_ctx": asked}, "stream": stream}
            )
            assert (answer.status_code, answer.headers.get("x-kvasir-num-ctx")) == (200, told)


def test_a_single_tool_is_called_whole_and_in_a_stream(client: ollama.Client, pipeline: Pipeline) -> None:
    def set_points(letter: str, points: int) -> None:
        """Keep a grade."""

    pipeline.start()
    ask: Any = {"model": MODEL, "messages": ASK, "tools": [set_points], "options": {"num_predict": 60, "seed": 7}}

    whole = client.chat(**ask).message
    pieces = list(client.chat(**ask, stream=True))

    assert whole.content == ""
    assert whole.tool_calls
    call = whole.tool_calls[0].function
    assert (call.name, set(call.arguments)) == ("set_points", {"letter", "points"})
    assert [piece.message.tool_calls for piece in pieces if piece.message.tool_calls] == [whole.tool_calls]
    # Its history goes on with the result
    said = [*ASK, whole, {"role": "tool", "tool_name": "set_points", "content": "kept"}]
    assert client.chat(MODEL, said).message.content


def test_a_raw_prompt_is_continued(client: ollama.Client, pipeline: Pipeline) -> None:
    _, decode = pipeline.start()
    made = client.generate(MODEL, "Once upon a", raw=True)
    assert made.response
    assert made.prompt_eval_count == 1 + 3  # the beginning of a text, and four characters to a token
    assert len(decode.engine.decode_calls[0]) == made.prompt_eval_count


def test_ollamas_own_program_sends_fields_that_are_empty(standing: ServedGateway) -> None:
    """Go's `encoding/json` writes what has no `omitempty`: this is what api/types.go of Ollama makes of a name."""
    show = {"model": MODEL, "system": "", "template": "", "verbose": False, "options": None, "name": ""}
    empty: Any = {"model": MODEL, "prompt": "", "suffix": "", "system": "", "template": "", "options": {}}
    ask = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "options": {}}
    with httpx.Client(base_url=f"{standing.url}/api", timeout=30) as http:
        assert http.post("/show", json=show).json()["model_info"]["general.basename"] == MODEL
        assert http.post("/generate", json=empty).json()["done_reason"] == "load"
        assert http.post("/generate", json=empty | {"prompt": "x", "stream": False}).json()["response"]
        assert json.loads(http.post("/chat", json=ask).text.splitlines()[-1])["done"]


def test_raw_answers_have_what_the_models_require(served: ServedGateway, pipeline: Pipeline) -> None:
    pipeline.start()
    with httpx.Client(base_url=f"{served.url}/api", timeout=30) as http:
        chat: Any = {"model": MODEL, "messages": ASK}
        validate(ollama.ChatResponse, http.post("/chat", json=chat | {"stream": False}).json())
        generate = {"model": MODEL, "prompt": "x", "stream": False}
        validate(ollama.GenerateResponse, http.post("/generate", json=generate).json())
        streamed = http.post("/chat", json=chat)
        assert streamed.headers["content-type"] == "application/x-ndjson"
        for line in streamed.text.splitlines():
            validate(ollama.ChatResponse, json.loads(line))
        validate(ollama.ProcessResponse, http.get("/ps").json())
        validate(ollama.ShowResponse, http.post("/show", json={"model": MODEL}).json())
        listed = http.get("/tags").json()
        assert [model.pop("name") for model in listed["models"]] == [MODEL]  # the API has it, the SDK drops it
        validate(ollama.ListResponse, listed)
        assert http.get("/version").json()["version"]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"tools": [{"type": "function", "function": {"name": name}} for name in "fg"]}, "send one, or ask for"),
        ({"think": True}, "'think' is not served"),
        ({"options": {"colour": 1}}, "'options.colour' is not a field"),
        ({"options": {"num_predict": 0}}, "max_tokens must be"),
        ({"messages": [{"role": "user", "content": "x", "images": ["aGk="]}]}, "'messages[0].images' is not served"),
        ({"messages": [{"role": "tool", "content": "x"}]}, "messages with the role 'tool' must give an earlier"),
        ({"format": "xml"}, "format: Input should be '' or 'json'"),
        ({"options": {"stop": [None]}}, "options.stop[0]: Input should be a valid string"),
        ({"model": "llama3"}, "'llama3' not found"),
    ],
)
def test_what_is_not_served_is_refused_by_name(standing: ServedGateway, fields: dict[str, Any], said: str) -> None:
    answer = httpx.post(f"{standing.url}/api/chat", json={"model": MODEL, "messages": ASK} | fields)
    assert answer.status_code == (404 if "model" in fields else 400)
    assert list(answer.json()) == ["error"]
    assert said in answer.json()["error"]


@pytest.mark.parametrize(
    ("method", "path"),
    [("POST", "embed"), ("POST", "embeddings"), ("POST", "pull"), ("POST", "push"), ("POST", "create"),
     ("POST", "copy"), ("DELETE", "delete"), ("HEAD", "blobs/sha256:00")],
)  # fmt: skip
def test_the_rest_is_not_served_and_says_so(standing: ServedGateway, method: str, path: str) -> None:
    answer = httpx.request(method, f"{standing.url}/api/{path}")
    assert answer.status_code == 501
    if method != "HEAD":
        assert "not served" in answer.json()["error"]


def test_a_name_without_a_tag_is_found_as_ollama_writes_it(client: ollama.Client, pipeline: Pipeline) -> None:
    pipeline.start()
    with pytest.raises(ollama.ResponseError, match="not found"):
        client.chat("tiny", ASK)
    assert client.show(f"{MODEL}:latest").modelinfo


def test_an_error_ends_a_stream_with_a_line(client: ollama.Client, pipeline: Pipeline) -> None:
    pipeline.start()
    with pytest.raises(ollama.ResponseError, match="with a context of 4,096"):
        list(client.chat(MODEL, ASK, options={"num_predict": 100_000}, stream=True))
