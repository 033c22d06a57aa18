"""Ollama's API: chat, generate, and the requests about models. docs/reference/api.md lists every field."""

import hashlib
import json
from collections.abc import AsyncGenerator, Callable
from datetime import UTC, datetime, timedelta
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import FailFast, Field, model_validator

from gateway.fields import OLLAMA, OLLAMA_MESSAGE, OPTIONS, each, meaningful_fields
from gateway.gateway import Gateway, ThisGateway, new_seed, prompt_of
from gateway.openai_api import Function, Tool
from gateway.refusal import RESPONSES, ApiError
from gateway.requests import BoundedRoute, Strict, apart
from gateway.streams import stream_response
from infra.config.types import ModelSettings
from messages.change import replace_fields
from messages.jobs import JobResult, Message, Sampling
from messages.lines import on_one_line
from producers.batch.openai_body import messages_of, sampling_of

router = APIRouter(prefix="/api", tags=["Ollama"], responses=RESPONSES, route_class=BoundedRoute)

LIKE = "0.33.0"  # the release of Ollama whose API the gateway follows

_LINES = "application/x-ndjson"
_ALL_METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"]


class Options(Strict):
    """The sampling options. `num_ctx` has no effect: a model's context is set where its worker runs."""

    num_ctx: Annotated[int | None, Field(ge=1)] = None
    num_predict: int | None = None
    seed: int | None = None
    stop: str | list[str] = Field(default_factory=list)
    temperature: float | None = None
    top_k: int = 0
    top_p: float | None = None


class OllamaRequest(Strict):
    """The fields that chat and generate requests share."""

    model: str
    format: Literal["", "json"] | dict[str, Any] = ""
    keep_alive: int | float | str | None = Field(
        None, description="Accepted and ignored: workers keep their models loaded."
    )
    options: Options = Options()
    stream: bool = True

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_is_not_served(cls, body: Any) -> Any:
        inside = {
            "options": lambda options, place: meaningful_fields(options, OPTIONS, f"{place}."),
            "messages": each(lambda message, place: meaningful_fields(message, OLLAMA_MESSAGE, f"{place}.")),
        }
        return meaningful_fields(body, OLLAMA, inside=inside)

    async def sampling(self, gateway: Gateway, model: ModelSettings, request: Request) -> Sampling:
        """Raises InvalidMessage, InvalidSchema."""
        options, form = self.options, self.format
        fields: dict[str, Any] = options.model_dump()
        fields["max_tokens"] = None if (options.num_predict or 0) < 0 else options.num_predict
        fields["seed"] = None if (options.seed or 0) < 0 else options.seed
        if form == "json":
            fields["response_format"] = {"type": "json_object"}
        elif function := self.forced_function():
            form = function.parameters or {"type": "object", "properties": {}}
        if isinstance(form, dict):
            fields["response_format"] = {"type": "json_schema", "json_schema": {"schema": form}}
        defaults = await gateway.defaults(model)
        sampling = await apart(request, sampling_of, fields, defaults, new_seed(), gateway.objects)
        return replace_fields(sampling, top_k=options.top_k)

    def forced_function(self) -> Function | None:
        """Return the function that the answer has to call, or None.

        Raises ApiError if the model would have to choose one.
        """
        return None


class OllamaMessage(Strict):
    """One message: its role, and its text, a function call, or the result of a function."""

    role: Literal["system", "user", "assistant", "tool"]
    content: str = ""
    tool_calls: list[dict[str, Any]] = Field(default_factory=list)
    tool_name: str = ""


class OllamaChatRequest(OllamaRequest):
    """POST /api/chat. A request without messages only asks whether the model exists."""

    messages: Annotated[list[OllamaMessage], FailFast()] = Field(default_factory=list)
    tools: list[Tool] = Field(default_factory=list)

    @property
    def conversation(self) -> list[Message]:
        """The messages that hold something."""
        return messages_of(self.model_dump()) if self.messages else []

    def forced_function(self) -> Function | None:
        """See OllamaRequest."""
        if len(self.tools) > 1:
            message = "tools leave a choice, which a model doesn't make here: send one, or ask for a form with format"
            raise ApiError(400, message, "tools", "unsupported_parameter")
        return self.tools[0].function if self.tools else None


class GenerateRequest(OllamaRequest):
    """POST /api/generate. A request without a prompt only asks whether the model exists."""

    prompt: str = ""
    system: str = ""
    raw: bool = False

    @property
    def conversation(self) -> list[Message]:
        """The messages to send. A raw prompt is a single message with the role `raw`."""
        if not self.prompt:
            return []
        if self.raw:
            return [("raw", self.prompt)]
        return [(role, text) for role, text in (("system", self.system), ("user", self.prompt)) if text]


class ShowRequest(Strict):
    """POST /api/show. Older clients call the model `name`. Ollama's own client sends all fields, most of them empty."""

    model: str | None = None
    name: str | None = None
    options: Annotated[dict[str, Any] | None, Field(description="Accepted and ignored.")] = None
    system: Annotated[str | None, Field(description="Accepted and ignored.")] = None
    template: Annotated[str | None, Field(description="Accepted and ignored.")] = None
    verbose: Annotated[bool | None, Field(description="Accepted; changes nothing.")] = None


@router.post("/chat")
async def chat(body: OllamaChatRequest, request: Request, gateway: ThisGateway) -> Response:
    """Answer a conversation, by default as a stream of JSON lines."""
    return await _respond(
        gateway, body, body.conversation, request, lambda text: {"message": {"role": "assistant", "content": text}}
    )


@router.post("/generate")
async def generate(body: GenerateRequest, request: Request, gateway: ThisGateway) -> Response:
    """Answer a prompt, by default as a stream of JSON lines."""
    return await _respond(gateway, body, body.conversation, request, lambda text: {"response": text})


@router.get("/tags")
async def tags(request: Request, gateway: ThisGateway) -> dict[str, Any]:
    """List the models that this key may use."""
    return {"models": [await _list_entry(gateway, name) for name in gateway.visible(request.state.key)]}


@router.get("/ps")
async def ps(request: Request, gateway: ThisGateway) -> dict[str, Any]:
    """List the models that some worker has loaded."""
    models = []
    for name in gateway.visible(request.state.key):
        if await gateway.decoders(name):
            until = {"expires_at": _time(datetime.now(UTC) + timedelta(days=1)), "size_vram": 0}
            about = await _list_entry(gateway, name)
            del about["modified_at"]
            models.append(about | until | {"context_length": await gateway.context(name)})
    return {"models": models}


@router.post("/show")
async def show(body: ShowRequest, request: Request, gateway: ThisGateway) -> dict[str, Any]:
    """Return what is known about one model."""
    model = _model(gateway, body.model or body.name or "", request)
    info: dict[str, Any] = {"general.architecture": "kvasir", "general.basename": model.name}
    if context := await gateway.context(model.name):
        info["kvasir.context_length"] = context
    return {
        "modelfile": "",
        "parameters": "",
        "template": "",
        "details": _DETAILS,
        "model_info": info,
        "capabilities": ["completion"],
        "modified_at": _time(datetime.fromtimestamp(gateway.started_at, UTC)),
    }


@router.get("/version")
async def version() -> dict[str, str]:
    """Return the release of Ollama whose API this follows."""
    return {"version": LIKE}


@router.api_route("/{rest:path}", methods=_ALL_METHODS, include_in_schema=False)
async def nothing_else(rest: str, request: Request) -> Response:
    """Refuse all other routes: kvasir.toml sets the models, and embeddings are not served."""
    raise ApiError(501, f"{request.method} /api/{rest:.80} is not served by Kvasir: models come from its kvasir.toml")


async def _respond(
    gateway: Gateway,
    body: OllamaRequest,
    conversation: list[Message],
    request: Request,
    words: Callable[[str], dict[str, Any]],
) -> Response:
    model = _model(gateway, body.model, request)
    if not conversation:
        reason = "unload" if body.keep_alive in (0, "0", "0s") else "load"
        return JSONResponse(
            {"model": body.model, "created_at": _time(), **words(""), "done": True, "done_reason": reason}
        )
    function = body.forced_function()
    prompt = prompt_of(conversation, shares=request.state.key is None)
    sampling = await body.sampling(gateway, model, request)
    ask = await gateway.ask(model.name, prompt, sampling, "now", body.stream and not function, request.state.key)
    if ask.stream:
        lines = _lines(gateway.answer(ask, request), body.model, words)
        response: Response = await stream_response(lines, lambda refusal: _line(refusal.ollama()), _LINES)
    else:  # Ollama sends a tool call's arguments as one object, even in a stream
        result = await gateway.result(ask, request)
        whole = _last(body.model, result, _call_or_text(result.text, words, function))
        response = Response(_line(whole), media_type=_LINES if body.stream else "application/json")
    context = await gateway.context(model.name)
    if context and (body.options.num_ctx or 0) > context:
        response.headers["x-kvasir-num-ctx"] = str(context)
    return response


async def _lines(
    answer: AsyncGenerator[str | JobResult, None], name: str, words: Callable[[str], dict[str, Any]]
) -> AsyncGenerator[str, None]:
    async for event in answer:
        if isinstance(event, JobResult):
            yield _line(_last(name, event, words("")))
        else:
            yield _line({"model": name, "created_at": _time(), **words(event), "done": False})


def _call_or_text(text: str, words: Callable[[str], dict[str, Any]], function: Function | None) -> dict[str, Any]:
    """Return the message of a whole answer: a function call, or the plain text if num_predict cut the arguments off."""
    try:
        call = {"function": {"name": function.name, "arguments": json.loads(text)}} if function else None
    except ValueError:
        call = None
    return {"message": words("")["message"] | {"tool_calls": [call]}} if call else words(text)


def _line(fields: dict[str, Any]) -> str:
    return on_one_line(json.dumps(fields, ensure_ascii=False)) + "\n"


def _last(name: str, result: JobResult, words: dict[str, Any]) -> dict[str, Any]:
    """Return the whole answer, or the last line of a stream. Times are in nanoseconds."""
    report = result.decode
    return {
        "model": name,
        "created_at": _time(),
        **words,
        "done": True,
        "done_reason": result.finish_reason or "stop",
        "total_duration": _nanoseconds(report.total_s),
        "load_duration": 0,
        "prompt_eval_count": report.prompt_tokens,
        "prompt_eval_duration": _nanoseconds(result.prefill.prefill_s),
        "eval_count": report.completion_tokens,
        "eval_duration": _nanoseconds(report.decode_s),
    }


_DETAILS = {
    "parent_model": "",
    "format": "",
    "family": "kvasir",
    "families": ["kvasir"],
    "parameter_size": "",
    "quantization_level": "",
}


async def _list_entry(gateway: Gateway, name: str) -> dict[str, Any]:
    """Describe a model for a list. The size is 0, because only the workers know the size of its weights."""
    prints = sorted(worker.fingerprint for worker in await gateway.decoders(name))
    return {
        "name": name,
        "model": name,
        "modified_at": _time(datetime.fromtimestamp(gateway.started_at, UTC)),
        "size": 0,
        "digest": hashlib.sha256(f"{name} {prints[:1]}".encode()).hexdigest(),
        "details": _DETAILS,
    }


def _model(gateway: Gateway, name: str, request: Request) -> ModelSettings:
    """Return a model's settings. Ollama's clients add `:latest` to a name without a tag."""
    bare = name.removesuffix(":latest")
    return gateway.model(bare if bare in gateway.models else name, request.state.key)


def _time(moment: datetime | None = None) -> str:
    return (moment or datetime.now(UTC)).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
