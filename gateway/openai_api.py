"""OpenAI's API: models and chat completions. docs/gateway.md lists every field."""

from __future__ import annotations

import json
import random
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Mapping
from typing import Annotated, Any, Literal, Self

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import FailFast, Field, model_validator

from gateway.dispatch import PromptRequest
from gateway.gateway import Gateway, ThisGateway, new_seed, prompt_of
from gateway.refusal import RESPONSES, ApiError
from gateway.requests import BoundedRoute, Strict, apart, meaningful_fields
from gateway.streams import stream_response
from messages.jobs import JobResult, Lane
from messages.lines import on_one_line
from producers.batch.openai_body import Defaults, choices_of, messages_of, sampling_of, usage_of

router = APIRouter(prefix="/v1", tags=["OpenAI"], responses=RESPONSES, route_class=BoundedRoute)

# What the API has and we have not, and the values by which a client says that it doesn't want it.
NOT_SERVED: Mapping[str, tuple[Any, ...]] = {
    "audio": (),
    "frequency_penalty": (0,),
    "function_call": ("none", "auto"),
    "functions": ([],),
    "logit_bias": ({},),
    "logprobs": (False,),
    "modalities": (["text"],),
    "moderation": (),
    "parallel_tool_calls": (True, False),
    "prediction": (),
    "presence_penalty": (0,),
    "prompt_cache_key": (),
    "prompt_cache_options": (),
    "prompt_cache_retention": (),
    "reasoning_effort": ("none",),
    "safety_identifier": (),
    "store": (False,),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "verbosity": (),
    "web_search_options": (),
}
NOT_IN_A_MESSAGE: Mapping[str, tuple[Any, ...]] = {
    "annotations": ([],),
    "audio": (),
    "function_call": (),
    "name": (),
    "refusal": (),
    "tool_call_id": (),
    "tool_calls": ([],),
}
NOT_IN_A_COMPLETION: Mapping[str, tuple[Any, ...]] = {
    "best_of": (1,),
    "echo": (False,),
    "frequency_penalty": (0,),
    "logit_bias": ({},),
    "logprobs": (),
    "presence_penalty": (0,),
    "suffix": ("",),
}
_LANES: Mapping[str, Lane] = {"auto": "now", "default": "now", "flex": "bulk"}


class TextPart(Strict):
    """A piece of a message's content."""

    type: Literal["text"]
    text: str


class ChatMessage(Strict):
    """Who says what."""

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[TextPart]


class JsonSchema(Strict):
    """A schema that the answer keeps; it is enforced, `strict` or not."""

    name: str
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """What form the answer has."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="after")
    def _refuse_a_schema_that_is_missing(self) -> Self:
        if self.type == "json_schema" and self.json_schema is None:
            raise ApiError(400, "response_format has no json_schema", "response_format.json_schema", "invalid_value")
        return self


class StreamOptions(Strict):
    """`include_usage`: a last chunk with the usage."""

    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class _OpenAIRequest(Strict):
    """What both ways to an answer have. Without temperature, top_p or a length the model's own hold."""

    model: str
    max_tokens: int | None = None
    n: int = 1
    seed: int | None = None
    stop: str | list[str] = Field(default_factory=list)
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None
    user: Annotated[str | None, Field(description="Ignored: keys say who asks.")] = None

    async def ask(
        self, gateway: Gateway, request: Request, messages: list[tuple[str, str]] | None = None, lane: Lane = "now"
    ) -> PromptRequest:
        """The job that it asks for, after `messages`, by default its own. Raises ApiError, InvalidMessage."""
        if self.stream_options and not self.stream:
            raise ApiError(400, "stream_options is only for streams", "stream_options", "invalid_value")
        model = gateway.model(self.model, request.state.key)
        fields = self.model_dump(by_alias=True)
        defaults = Defaults(model.name, await gateway.default_tokens(model.name), model.temperature, model.top_p)
        sampling = await apart(request, sampling_of, fields, defaults, new_seed())
        prompt = prompt_of(messages or messages_of(fields), shares=request.state.key is None)
        return await gateway.ask(model.name, prompt, sampling, lane, self.stream, request.state.key)


class ChatRequest(_OpenAIRequest):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1), FailFast()]
    max_completion_tokens: int | None = None
    metadata: dict[str, str] = Field(default_factory=dict, max_length=16)
    response_format: ResponseFormat | None = None
    service_tier: Literal["auto", "default", "flex"] = "auto"

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_is_not_served(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        fields = meaningful_fields(body, NOT_SERVED)
        if isinstance(fields.get("messages"), list):
            fields["messages"] = [
                _message(message, f"messages[{at}].") for at, message in enumerate(fields["messages"])
            ]
        return fields


class CompletionRequest(_OpenAIRequest):
    """POST /v1/completions. The prompt is what a user says: it goes through the model's chat template, too."""

    prompt: Annotated[str, Field(min_length=1)]

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_is_not_served(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        fields = meaningful_fields(body, NOT_IN_A_COMPLETION)
        match fields.get("prompt"):
            case [str(prompt)]:
                fields["prompt"] = prompt
            case list():
                raise ApiError(400, "prompt: only one text is served", "prompt", "unsupported_parameter")
        return fields


def _message(message: Any, prefix: str) -> Any:
    """One message without what says nothing. Raises ApiError for what is no text, by its name."""
    if not isinstance(message, dict):
        return message
    if message.get("role") in ("tool", "function"):
        raise ApiError(
            400, f"{prefix}role: {message['role']} messages are not served", f"{prefix}role", "invalid_value"
        )
    fields = meaningful_fields(message, NOT_IN_A_MESSAGE, prefix)
    content = fields.get("content")
    for at, part in enumerate(content if isinstance(content, list) else ()):
        kind = part.get("type") if isinstance(part, dict) else None
        if isinstance(kind, str) and kind != "text":
            param = f"{prefix}content[{at}]"
            raise ApiError(400, f"{param}: {kind[:40]} is not served, only text", param, "unsupported_parameter")
    return fields


@router.get("/models")
async def models(request: Request, gateway: ThisGateway) -> dict[str, Any]:
    """The models that there are for this key."""
    return {"object": "list", "data": [_model(gateway, name) for name in gateway.visible(request.state.key)]}


@router.get("/models/{name:path}")
async def model(name: str, request: Request, gateway: ThisGateway) -> dict[str, Any]:
    """One of them."""
    return _model(gateway, gateway.model(name, request.state.key).name)


@router.post("/chat/completions")
async def chat_completions(body: ChatRequest, request: Request, gateway: ThisGateway) -> Response:
    """An answer to a conversation."""
    return await _respond(
        gateway, await body.ask(gateway, request, lane=_LANES[body.service_tier]), request, _Chat(body)
    )


@router.post("/completions")
async def completions(body: CompletionRequest, request: Request, gateway: ThisGateway) -> Response:
    """An answer to one text, in the form of OpenAI's older API."""
    return await _respond(gateway, await body.ask(gateway, request, [("user", body.prompt)]), request, _Text(body))


async def _respond(gateway: Gateway, ask: PromptRequest, request: Request, completion: _Completion) -> Response:
    if ask.stream:
        lines = completion.chunks(gateway.answer(ask, request))
        return await stream_response(
            lines, lambda refusal: _event(refusal.openai()), "text/event-stream", ": waiting\n\n"
        )
    return JSONResponse(completion.whole(await gateway.result(ask, request)))


def _model(gateway: Gateway, name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": int(gateway.started_at), "owned_by": "kvasir"}


class _Completion(ABC):
    """The objects of one answer: the same id and time in all of them."""

    def __init__(self, body: _OpenAIRequest, name: str, kind: str, chunk_kind: str, **fields: Any) -> None:
        self._common_fields = {
            "id": f"{name}-{random.getrandbits(96):024x}",
            "created": int(time.time()),
            "model": body.model,
            "system_fingerprint": None,
            **fields,
        }
        self._kind, self._chunk_kind = kind, chunk_kind
        self._usage = bool(body.stream_options and body.stream_options.include_usage)

    @abstractmethod
    def choices(self, result: JobResult) -> list[dict[str, Any]]:
        """The whole answers."""

    @abstractmethod
    def piece(self, text: str, opens: bool) -> dict[str, Any]:
        """The part of a chunk's choice that holds new text."""

    def whole(self, result: JobResult) -> dict[str, Any]:
        """The answer to a request that is no stream."""
        return self._object(self._kind, self.choices(result)) | {"usage": usage_of(result)}

    async def chunks(self, answer: AsyncGenerator[str | JobResult, None]) -> AsyncGenerator[str, None]:
        """Server-sent events: the first answer as it is generated, others whole at the end."""
        opening = self._chunk(0, "", opens=True)
        async for event in answer:
            yield opening + (self._chunk(0, event) if isinstance(event, str) else self._end(event))
            opening = ""

    def _end(self, result: JobResult) -> str:
        reason = result.finish_reason or "stop"
        events = self._chunk(0, "", reason)
        for index, text in enumerate(result.more_texts, 1):
            events += self._chunk(index, text, opens=True) + self._chunk(index, "", reason)
        if self._usage:
            events += _event(self._object(self._chunk_kind, []) | {"usage": usage_of(result)})
        return events + "data: [DONE]\n\n"

    def _chunk(self, index: int, text: str, finish_reason: str | None = None, opens: bool = False) -> str:
        choice = {"index": index, "logprobs": None, "finish_reason": finish_reason, **self.piece(text, opens)}
        chunk = self._object(self._chunk_kind, [choice])
        return _event(chunk | {"usage": None} if self._usage else chunk)

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._common_fields, "object": kind, "choices": choices}


class _Chat(_Completion):
    def __init__(self, body: ChatRequest) -> None:
        tier = "flex" if body.service_tier == "flex" else "default"
        super().__init__(body, "chatcmpl", "chat.completion", "chat.completion.chunk", service_tier=tier)
        self._metadata = body.metadata

    def choices(self, result: JobResult) -> list[dict[str, Any]]:
        return choices_of(result)

    def piece(self, text: str, opens: bool) -> dict[str, Any]:
        role = {"role": "assistant", "refusal": None} if opens else {}
        return {"delta": {**role, "content": text} if opens or text else {}}

    def whole(self, result: JobResult) -> dict[str, Any]:
        answer = super().whole(result)
        return answer | {"metadata": self._metadata} if self._metadata else answer


class _Text(_Completion):
    def __init__(self, body: CompletionRequest) -> None:
        super().__init__(body, "cmpl", "text_completion", "text_completion")

    def choices(self, result: JobResult) -> list[dict[str, Any]]:
        return [{"text": choice.pop("message")["content"], **choice} for choice in choices_of(result)]

    def piece(self, text: str, opens: bool) -> dict[str, Any]:
        return {"text": text}


def _event(chunk: dict[str, Any]) -> str:
    return f"data: {on_one_line(json.dumps(chunk, ensure_ascii=False))}\n\n"
