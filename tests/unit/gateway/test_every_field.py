"""Every field that the SDKs' own types have is in `gateway.fields`, and taken as that says."""

import re
from typing import Any

import httpx
import ollama
import pytest
from ollama import _types as ollama_types
from openai.types import (
    batch_create_params,
    batch_list_params,
    completion_create_params,
    file_create_params,
    file_list_params,
)
from openai.types.chat import (
    ChatCompletionAssistantMessageParam,
    ChatCompletionContentPartTextParam,
    ChatCompletionDeveloperMessageParam,
    ChatCompletionStreamOptionsParam,
    ChatCompletionSystemMessageParam,
    ChatCompletionToolMessageParam,
    ChatCompletionUserMessageParam,
)
from openai.types.chat import (
    completion_create_params as chat_create_params,
)
from openai.types.shared_params import FunctionDefinition

from gateway import batches_api, fields, ollama_api, openai_api
from tests.support.gateway import ServedGateway
from tests.support.pipeline import MODEL
from tests.support.processes import ROOT

DOCS = (ROOT / "docs/reference/api.md").read_text("utf-8")
ASK: Any = {"model": MODEL, "messages": [{"role": "user", "content": "x"}], "stream": False}


def names(*kinds: type) -> set[str]:
    """The fields of these types: TypedDicts of OpenAI's client, or models of Ollama's."""
    return {name for kind in kinds for name in (getattr(kind, "model_fields", None) or kind.__annotations__)}


def documented(heading: str, until: str) -> set[str]:
    """What stands in backticks between two headings of the page."""
    section = DOCS[DOCS.index(heading) :]
    section = section[: section.index(until, len(heading))]
    return {word for quoted in re.findall(r"`([^`]+)`", section) for word in re.findall(r"\w+", quoted)}


CHAT = names(chat_create_params.CompletionCreateParamsBase, chat_create_params.CompletionCreateParamsStreaming)
COMPLETION = names(
    completion_create_params.CompletionCreateParamsBase, completion_create_params.CompletionCreateParamsStreaming
)
MESSAGE = names(
    ChatCompletionAssistantMessageParam,
    ChatCompletionDeveloperMessageParam,
    ChatCompletionSystemMessageParam,
    ChatCompletionToolMessageParam,
    ChatCompletionUserMessageParam,
)
OLLAMA_CHAT, OLLAMA_GENERATE = names(ollama_types.ChatRequest), names(ollama_types.GenerateRequest)
OLLAMA_MESSAGE = names(ollama.Message)
OPTIONS = names(ollama.Options)


STREAM_OPTIONS = names(ChatCompletionStreamOptionsParam)


@pytest.mark.parametrize(
    ("theirs", "served", "table"),
    [
        (CHAT, openai_api.ChatRequest, fields.CHAT),
        (COMPLETION, openai_api.CompletionRequest, fields.COMPLETION),
        (MESSAGE, openai_api.ChatMessage, fields.MESSAGE),
        (names(ChatCompletionContentPartTextParam), openai_api.TextPart, fields.PART),
        (OLLAMA_CHAT, ollama_api.OllamaChatRequest, fields.OLLAMA),
        (OLLAMA_GENERATE, ollama_api.GenerateRequest, fields.OLLAMA),
        (OLLAMA_MESSAGE, ollama_api.OllamaMessage, fields.OLLAMA_MESSAGE),
        (OPTIONS, ollama_api.Options, fields.OPTIONS),
    ],
)
def test_no_field_is_unknown_and_what_the_table_serves_is_served(
    theirs: set[str], served: Any, table: fields.Fields
) -> None:
    assert theirs - set(table) == set()
    by_table = {name for name, field in table.items() if field.kind == "served"}
    of_one = set(served.model_fields)
    if table is fields.OLLAMA:  # of its two requests
        of_one |= set(ollama_api.GenerateRequest.model_fields) | set(ollama_api.OllamaChatRequest.model_fields)
    assert by_table == of_one


@pytest.mark.parametrize(
    ("theirs", "served"),
    [
        (STREAM_OPTIONS, openai_api.StreamOptions),
        (names(batch_create_params.BatchCreateParams), batches_api.BatchRequest),
        (names(ollama_types.ShowRequest), ollama_api.ShowRequest),
        (names(FunctionDefinition), openai_api.Function),
    ],
)
def test_of_these_every_field_is_served(theirs: set[str], served: Any) -> None:
    assert theirs - set(served.model_fields) == set()


@pytest.mark.parametrize(
    ("theirs", "heading", "until"),
    [
        (STREAM_OPTIONS, "`POST /v1/chat/completions`:", "\nA message"),
        (names(file_create_params.FileCreateParams, file_list_params.FileListParams), "\nFiles:", "\nBatches:"),
        (names(batch_create_params.BatchCreateParams, batch_list_params.BatchListParams), "\nBatches:", "\n## Oll"),
    ],
)
def test_every_field_is_documented(theirs: set[str], heading: str, until: str) -> None:
    assert theirs - documented(heading, until) == set()


GENERATE = {"model": MODEL, "prompt": "x", "stream": False}
WRITE = {"model": MODEL, "prompt": "x"}
REFUSED_OR_IGNORED = [
    (path, ask, within, name, field)
    for path, ask, within, table in (
        ("/v1/chat/completions", ASK, "", fields.CHAT),
        ("/v1/completions", WRITE, "", fields.COMPLETION),
        ("/api/generate", GENERATE, "", fields.OLLAMA),
        ("/api/chat", ASK, "options", fields.OPTIONS),
    )
    for name, field in table.items()
    if field.kind != "served"
]


@pytest.mark.parametrize(("path", "ask", "within", "name", "field"), REFUSED_OR_IGNORED)
def test_a_field_is_taken_as_the_table_says(
    standing: ServedGateway, path: str, ask: dict[str, Any], within: str, name: str, field: fields.Field
) -> None:
    def answer(value: Any) -> httpx.Response:
        given = {name: value}
        return httpx.post(standing.url + path, json=ask | ({within: given} if within else given))

    something = answer({"some": ["thing"]})
    if field.kind == "ignored":
        assert something.status_code == 200
    elif path.startswith("/v1"):
        error = something.json()["error"]
        assert (error["param"], error["code"]) == (name, "unsupported_parameter")
        assert field.words in error["message"]
    else:
        place = f"{within}{'.' if within else ''}{name}"
        assert something.json()["error"] == f"'{place}' is not served: {field.words}"
    for value in (None, *field.neutral):
        assert answer(value).status_code == 200
