"""Every field that the SDKs' own types have is served or refused by name, and stands in docs/gateway.md."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
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
    ChatCompletionDeveloperMessageParam,
    ChatCompletionStreamOptionsParam,
    ChatCompletionSystemMessageParam,
    ChatCompletionUserMessageParam,
)
from openai.types.chat import (
    completion_create_params as chat_create_params,
)

from gateway import batches_api, ollama_api, openai_api
from tests.support.gateway import ServedGateway
from tests.support.pipeline import MODEL
from tests.support.processes import ROOT

DOCS = (ROOT / "docs" / "gateway.md").read_text("utf-8")
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
    ChatCompletionUserMessageParam,
)
OLLAMA_CHAT, OLLAMA_GENERATE = names(ollama_types.ChatRequest), names(ollama_types.GenerateRequest)
OLLAMA_MESSAGE = names(ollama.Message)
OPTIONS = names(ollama.Options)


@pytest.mark.parametrize(
    ("theirs", "served", "refused"),
    [
        (CHAT, openai_api.ChatRequest, openai_api.NOT_SERVED),
        (COMPLETION, openai_api.CompletionRequest, openai_api.NOT_IN_A_COMPLETION),
        (MESSAGE, openai_api.ChatMessage, openai_api.NOT_IN_A_MESSAGE),
        (names(ChatCompletionStreamOptionsParam), openai_api.StreamOptions, {}),
        (names(batch_create_params.BatchCreateParams), batches_api.BatchRequest, {"output_expires_after": ()}),
        (OLLAMA_CHAT, ollama_api.OllamaChatRequest, ollama_api.NOT_SERVED),
        (OLLAMA_GENERATE, ollama_api.GenerateRequest, ollama_api.NOT_SERVED),
        (OLLAMA_MESSAGE, ollama_api.OllamaMessage, ollama_api.NOT_IN_A_MESSAGE),
        (OPTIONS, ollama_api.Options, ollama_api.NOT_AN_OPTION),
        (names(ollama_types.ShowRequest), ollama_api.ShowRequest, {}),
    ],
)
def test_no_field_is_unknown(theirs: set[str], served: Any, refused: Mapping[str, Any]) -> None:
    assert theirs - set(served.model_fields) - set(refused) == set()
    assert set(served.model_fields) & set(refused) == set()


@pytest.mark.parametrize(
    ("theirs", "heading", "until"),
    [
        (CHAT | MESSAGE | names(ChatCompletionStreamOptionsParam), "`POST /v1/chat/completions`:", "`POST /v1/comp"),
        (COMPLETION, "`POST /v1/completions`, ", "\nFiles:"),
        (names(file_create_params.FileCreateParams, file_list_params.FileListParams), "\nFiles:", "\nBatches:"),
        (names(batch_create_params.BatchCreateParams, batch_list_params.BatchListParams), "\nBatches:", "\n## Oll"),
        (OLLAMA_CHAT | OLLAMA_GENERATE | OLLAMA_MESSAGE | OPTIONS, "## Ollama's API", "\n## "),
    ],
)
def test_every_field_is_documented(theirs: set[str], heading: str, until: str) -> None:
    assert theirs - documented(heading, until) == set()


def each(refused: Mapping[str, tuple[Any, ...]], theirs: Iterable[str]) -> list[tuple[str, tuple[Any, ...]]]:
    return [(name, refused[name]) for name in sorted(refused) if name in theirs]


GENERATE = {"model": MODEL, "prompt": "x", "stream": False}
NOT_SERVED = [
    *(("/v1/chat/completions", ASK, "", *field) for field in each(openai_api.NOT_SERVED, CHAT)),
    *(("/api/generate", GENERATE, "", *field) for field in each(ollama_api.NOT_SERVED, OLLAMA_CHAT | OLLAMA_GENERATE)),
    *(("/api/chat", ASK, "options", *field) for field in each(ollama_api.NOT_AN_OPTION, OPTIONS)),
]


@pytest.mark.parametrize(("path", "ask", "within", "name", "neutral"), NOT_SERVED)
def test_a_field_that_is_not_served_is_refused_by_name_or_says_nothing(
    standing: ServedGateway, path: str, ask: dict[str, Any], within: str, name: str, neutral: tuple[Any, ...]
) -> None:
    def answer(value: Any) -> httpx.Response:
        fields = {name: value}
        return httpx.post(standing.url + path, json=ask | ({within: fields} if within else fields))

    error = answer("something").json()["error"]
    if path.startswith("/v1"):
        assert (error["param"], error["code"]) == (name, "unsupported_parameter")
    else:
        assert f"'{within}{'.' if within else ''}{name}' is not served" in error
    for value in (None, *neutral):
        assert answer(value).status_code == 200
