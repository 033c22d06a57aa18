"""OpenAI's API: models, chat completions and completions. `gateway.fields` lists every field.

If `tool_choice` forces a function, its parameters become the answer's schema, and the answer is reported as a call of
it.
"""

import json
import random
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncGenerator, Iterable, Mapping, Sequence
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import FailFast, Field, model_validator

from gateway.dispatch import PromptRequest
from gateway.fields import CHAT, COMPLETION, MESSAGE, PART, each, meaningful_fields
from gateway.gateway import Gateway, ThisGateway, new_seed, prompt_of
from gateway.refusal import RESPONSES, ApiError
from gateway.requests import BoundedRoute, Strict, apart
from gateway.streams import stream_response
from messages.jobs import MAX_ANSWERS, JobResult, Lane, Part
from messages.lines import on_one_line
from producers.batch.openai_body import (
    choices_of,
    messages_of,
    raw_prompt,
    sampling_of,
    texts_of,
    usage_of,
)

router = APIRouter(prefix="/v1", tags=["OpenAI"], responses=RESPONSES, route_class=BoundedRoute)

_Text = Annotated[str, Field(min_length=1)]
_LANES: Mapping[str, Lane] = {"auto": "now", "default": "now", "flex": "bulk"}


class TextPart(Strict):
    """A text part of a message's content."""

    type: Literal["text"]
    text: str


class ChatMessage(Strict):
    """One message: its role, and its text, a function call, or the result of a function."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    tool_calls: list[dict[str, Any]] = Field(default_factory=list)
    tool_call_id: str | None = None


class Function(Strict):
    """A function that the model may call. Its arguments are an object that follows the schema `parameters`."""

    name: Annotated[str, Field(pattern=r"^[A-Za-z0-9._\-]{1,128}$")]
    description: str | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(Strict):
    """A function that is offered; in `tool_choice`, only its name is read."""

    type: Literal["function"]
    function: Function


class JsonSchema(Strict):
    """A schema that the answer follows. It is enforced whether `strict` is set or not."""

    name: str
    description: str | None = None
    schema_: dict[str, Any] = Field(alias="schema")
    strict: bool | None = None


class ResponseFormat(Strict):
    """The form that the answer must have."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None


class StreamOptions(Strict):
    """`include_usage` asks for a last chunk with the token counts."""

    include_usage: bool = False
    include_obfuscation: Literal[False] = False


class _OpenAIRequest(Strict):
    """The fields of both kinds of request. The model's defaults stand in for a missing temperature, top_p or length."""

    model: str
    max_tokens: int | None = None
    n: Annotated[int, Field(ge=1, le=MAX_ANSWERS)] = 1
    seed: int | None = None
    stop: str | list[str] = Field(default_factory=list)
    stream: bool = False
    stream_options: StreamOptions | None = None
    temperature: float | None = None
    top_p: float | None = None

    async def ask(
        self, gateway: Gateway, request: Request, fields: dict[str, Any], prompt: tuple[Part, ...], lane: Lane = "now"
    ) -> PromptRequest:
        """Build the job for these fields and this prompt. Raises ApiError, InvalidMessage, InvalidSchema."""
        if self.stream_options and not self.stream:
            raise ApiError(400, "stream_options is only for streams", "stream_options", "invalid_value")
        model = gateway.model(self.model, request.state.key)
        defaults = await gateway.defaults(model)
        sampling = await apart(request, sampling_of, fields, defaults, new_seed(), gateway.objects)
        return await gateway.ask(model.name, prompt, sampling, lane, self.stream, request.state.key)


class ChatRequest(_OpenAIRequest):
    """POST /v1/chat/completions."""

    messages: Annotated[list[ChatMessage], Field(min_length=1), FailFast()]
    max_completion_tokens: int | None = None
    metadata: dict[str, str] = Field(default_factory=dict, max_length=16)
    response_format: ResponseFormat | None = None
    service_tier: Literal["auto", "default", "flex"] = "auto"
    tools: list[Tool] = Field(default_factory=list)
    tool_choice: Literal["none", "auto", "required"] | Tool | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_is_not_served(cls, body: Any) -> Any:
        return meaningful_fields(body, CHAT, inside={"messages": each(_message)})

    def fields(self) -> dict[str, Any]:
        """Return all fields. The parameters of a forced function become the response format."""
        fields = self.model_dump(by_alias=True)
        if function := self.forced_function():
            fields["response_format"] = {
                "type": "json_schema",
                "json_schema": {"schema": function.parameters or {"type": "object", "properties": {}}},
            }
        return fields

    def forced_function(self) -> Function | None:
        """Return the function that the answer has to call, or None.

        Raises ApiError if the model would have to choose one.
        """
        functions = {tool.function.name: tool.function for tool in self.tools}
        if isinstance(self.tool_choice, Tool):
            if function := functions.get(self.tool_choice.function.name):
                return function
            raise ApiError(
                400,
                "tool_choice names a function that is not among the tools",
                "tool_choice.function.name",
                "invalid_value",
            )
        if self.tool_choice == "required" and len(functions) == 1:
            return self.tools[0].function
        if self.tool_choice == "required" or (functions and self.tool_choice != "none"):
            message = (
                "tools leave a choice, which no model makes here: name one in tool_choice, or ask for the form of "
                "the answer with response_format json_schema"
            )
            raise ApiError(400, message, "tool_choice" if self.tool_choice else "tools", "unsupported_parameter")
        return None


class CompletionRequest(_OpenAIRequest):
    """POST /v1/completions. The model continues the prompt as it stands, without a chat template."""

    prompt: _Text | Annotated[list[_Text], Field(min_length=1)]

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_is_not_served(cls, body: Any) -> Any:
        return meaningful_fields(body, COMPLETION)


def _message(message: Any, place: str) -> Any:
    """Return a message without the fields that change nothing.

    Raises ApiError, with the place, for content that is not text.
    """
    if isinstance(message, dict) and message.get("role") == "function":
        raise ApiError(400, f"{place}.role: function messages are not served", f"{place}.role", "invalid_value")
    return meaningful_fields(message, MESSAGE, f"{place}.", {"content": each(_part)})


def _part(part: Any, place: str) -> Any:
    kind = part.get("type") if isinstance(part, dict) else None
    if isinstance(kind, str) and kind != "text":
        raise ApiError(400, f"{place}: {kind[:40]} is not served; send text", place, "unsupported_parameter")
    return meaningful_fields(part, PART, f"{place}.")


@router.get("/models")
async def models(request: Request, gateway: ThisGateway) -> dict[str, Any]:
    """List the models that this key may use."""
    return {"object": "list", "data": [_model(gateway, name) for name in gateway.visible(request.state.key)]}


@router.get("/models/{name:path}")
async def model(name: str, request: Request, gateway: ThisGateway) -> dict[str, Any]:
    """One of them."""
    return _model(gateway, gateway.model(name, request.state.key).name)


@router.post("/chat/completions")
async def chat_completions(body: ChatRequest, request: Request, gateway: ThisGateway) -> Response:
    """Answer a conversation."""
    fields = body.fields()
    prompt = prompt_of(messages_of(fields), shares=request.state.key is None)
    ask = await body.ask(gateway, request, fields, prompt, _LANES[body.service_tier])
    return await _respond(gateway, [ask], request, _Chat(body))


@router.post("/completions")
async def completions(body: CompletionRequest, request: Request, gateway: ThisGateway) -> Response:
    """Continue one or more texts, as OpenAI's older API does. A stream answers several texts one after the other."""
    fields = body.model_dump()
    texts = [body.prompt] if isinstance(body.prompt, str) else body.prompt
    if len(texts) * body.n > MAX_ANSWERS:
        raise ApiError(
            400,
            f"prompt: at most {MAX_ANSWERS} answers are allowed in one request (texts × n)",
            "prompt",
            "invalid_value",
        )
    asks = [await body.ask(gateway, request, fields, raw_prompt(text)) for text in texts]
    return await _respond(gateway, asks, request, _Continuation(body))


async def _respond(
    gateway: Gateway, asks: Sequence[PromptRequest], request: Request, completion: "_Completion"
) -> Response:
    if asks[0].stream:
        lines = completion.chunks([gateway.answer(ask, request) for ask in asks])
        return await stream_response(
            lines, lambda refusal: _event(refusal.openai()), "text/event-stream", ": waiting\n\n"
        )
    return JSONResponse(completion.whole(await gateway.results(asks, request)))


def _model(gateway: Gateway, name: str) -> dict[str, Any]:
    return {"id": name, "object": "model", "created": int(gateway.started_at), "owned_by": "kvasir"}


class _Completion(ABC):
    """Builds the response objects of one answer. All of them have the same id and time."""

    def __init__(self, body: _OpenAIRequest, name: str, kind: str, chunk_kind: str, **fields: Any) -> None:
        self._common_fields = {
            "id": f"{name}-{random.getrandbits(96):024x}",
            "created": int(time.time()),
            "model": body.model,
            "system_fingerprint": None,
            **fields,
        }
        self._kind, self._chunk_kind = kind, chunk_kind
        self._n = body.n
        self._usage = bool(body.stream_options and body.stream_options.include_usage)

    @abstractmethod
    def choices(self, result: JobResult, first: int) -> list[dict[str, Any]]:
        """Return the whole answers to one prompt. The first gets the index `first`."""

    @abstractmethod
    def piece(self, text: str, opens: bool) -> dict[str, Any]:
        """Return the part of a chunk's choice that holds new text."""

    def whole(self, results: Sequence[JobResult]) -> dict[str, Any]:
        """Return the answer to a request without a stream."""
        choices = [choice for number, result in enumerate(results) for choice in self.choices(result, number * self._n)]
        return self._object(self._kind, choices) | {"usage": usage_of(*results)}

    async def chunks(self, answers: Iterable[AsyncGenerator[str | JobResult, None]]) -> AsyncGenerator[str, None]:
        """Yield server-sent events.

        A prompt's first answer streams as it is generated; its other answers come whole at the end.
        """
        results: list[JobResult] = []
        for answer in answers:
            first = len(results) * self._n
            opening = self._chunk(first, "", opens=True)
            async for event in answer:
                if isinstance(event, JobResult):
                    results.append(event)
                yield opening + (self._chunk(first, event) if isinstance(event, str) else self._end(event, first))
                opening = ""
        if self._usage:
            yield _event(self._object(self._chunk_kind, []) | {"usage": usage_of(*results)})
        yield "data: [DONE]\n\n"

    def finish_reason(self, result: JobResult) -> str:
        """Return why an answer ended."""
        return result.finish_reason or "stop"

    def _end(self, result: JobResult, first: int) -> str:
        reason = self.finish_reason(result)
        events = self._chunk(first, "", reason)
        for index, text in enumerate(result.more_texts, first + 1):
            events += self._chunk(index, text, opens=True) + self._chunk(index, "", reason)
        return events

    def _chunk(self, index: int, text: str, finish_reason: str | None = None, opens: bool = False) -> str:
        choice = {"index": index, "logprobs": None, "finish_reason": finish_reason, **self.piece(text, opens)}
        chunk = self._object(self._chunk_kind, [choice])
        return _event(chunk | {"usage": None} if self._usage else chunk)

    def _object(self, kind: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {**self._common_fields, "object": kind, "choices": choices}


class _Chat(_Completion):
    def __init__(self, body: ChatRequest) -> None:
        super().__init__(
            body,
            "chatcmpl",
            "chat.completion",
            "chat.completion.chunk",
            service_tier="flex" if body.service_tier == "flex" else "default",
        )
        self._metadata = body.metadata
        self._function = body.forced_function()

    def choices(self, result: JobResult, first: int) -> list[dict[str, Any]]:
        choices = choices_of(result)
        for choice in choices if self._function else ():
            message = choice["message"]
            message |= {"content": None, "tool_calls": [self._call(message["content"], opens=True)]}
            choice["finish_reason"] = self.finish_reason(result)
        return choices

    def piece(self, text: str, opens: bool) -> dict[str, Any]:
        role = {"role": "assistant", "refusal": None} if opens else {}
        if not (opens or text):
            return {"delta": {}}
        if self._function:
            call = {"index": 0, **self._call(text, opens)}
            return {"delta": {**role, **({"content": None} if opens else {}), "tool_calls": [call]}}
        return {"delta": {**role, "content": text}}

    def finish_reason(self, result: JobResult) -> str:
        reason = super().finish_reason(result)
        return "tool_calls" if self._function and reason == "stop" else reason

    def whole(self, results: Sequence[JobResult]) -> dict[str, Any]:
        answer = super().whole(results)
        return answer | {"metadata": self._metadata} if self._metadata else answer

    def _call(self, arguments: str, opens: bool) -> dict[str, Any]:
        """Return a call of the forced function, or a further piece of its arguments."""
        if not (opens and self._function):
            return {"function": {"arguments": arguments}}
        return {
            "id": f"call_{random.getrandbits(96):024x}",
            "type": "function",
            "function": {"name": self._function.name, "arguments": arguments},
        }


class _Continuation(_Completion):
    def __init__(self, body: CompletionRequest) -> None:
        super().__init__(body, "cmpl", "text_completion", "text_completion")

    def choices(self, result: JobResult, first: int) -> list[dict[str, Any]]:
        return texts_of(result, first)

    def piece(self, text: str, opens: bool) -> dict[str, Any]:
        return {"text": text}


def _event(chunk: dict[str, Any]) -> str:
    return f"data: {on_one_line(json.dumps(chunk, ensure_ascii=False))}\n\n"
