"""Ollama's API: chat, generate, and what is asked about models. docs/gateway.md lists every field."""

from __future__ import annotations

import hashlib
import json
from collections.abc import AsyncGenerator, Callable, Mapping
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Annotated, Any, Literal

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from pydantic import FailFast, Field, model_validator

from gateway.gateway import Gateway, ThisGateway, new_seed, prompt_of
from gateway.refusal import RESPONSES, ApiError
from gateway.requests import BoundedRoute, Strict, apart, meaningful_fields
from gateway.streams import stream_response
from infra.config.types import ModelSettings
from messages.jobs import JobResult, Sampling
from messages.lines import on_one_line

router = APIRouter(prefix="/api", tags=["Ollama"], responses=RESPONSES, route_class=BoundedRoute)

LIKE = "0.33.0"  # the release of Ollama whose API this follows

NOT_SERVED: Mapping[str, tuple[Any, ...]] = {
    "context": ([],),
    "height": (),
    "images": ([],),
    "logprobs": (False,),
    "raw": (False,),
    "shift": (False,),
    "steps": (),
    "suffix": ("",),
    "template": ("",),
    "think": (False,),
    "tools": ([],),
    "top_logprobs": (0,),
    "truncate": (False,),
    "width": (),
}
NOT_IN_A_MESSAGE: Mapping[str, tuple[Any, ...]] = {
    "images": ([],),
    "thinking": ("",),
    "tool_call_id": ("",),
    "tool_calls": ([],),
    "tool_name": ("",),
}
NOT_AN_OPTION: Mapping[str, tuple[Any, ...]] = {
    "embedding_only": (False,),
    "f16_kv": (True,),
    "frequency_penalty": (0,),
    "logits_all": (False,),
    "low_vram": (False,),
    "main_gpu": (),
    "min_p": (0,),
    "mirostat": (0,),
    "mirostat_eta": (),
    "mirostat_tau": (),
    "num_batch": (),
    "num_gpu": (),
    "num_keep": (),
    "num_thread": (),
    "numa": (False,),
    "penalize_newline": (),
    "presence_penalty": (0,),
    "repeat_last_n": (),
    "repeat_penalty": (1,),
    "tfs_z": (1,),
    "typical_p": (1,),
    "use_mlock": (False,),
    "use_mmap": (True, False),
    "vocab_only": (False,),
}
_ALL_METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE"]


class Options(Strict):
    """How tokens are chosen. `num_ctx` may ask for no more than the model has, and changes nothing."""

    num_ctx: int | None = None
    num_predict: int | None = None
    seed: int | None = None
    stop: str | list[str] = Field(default_factory=list)
    temperature: float | None = None
    top_k: int = 0
    top_p: float | None = None


class OllamaRequest(Strict):
    """What both ways to an answer have."""

    model: str
    format: Literal["", "json"] | dict[str, Any] = ""
    keep_alive: int | float | str | None = Field(None, description="Accepted; workers keep their models.")
    options: Options = Options()
    stream: bool = True

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_is_not_served(cls, body: Any) -> Any:
        if not isinstance(body, dict):
            return body
        fields = meaningful_fields(body, NOT_SERVED)
        if isinstance(fields.get("options"), dict):
            fields["options"] = meaningful_fields(fields["options"], NOT_AN_OPTION, "options.")
        if isinstance(fields.get("messages"), list):
            fields["messages"] = [
                meaningful_fields(message, NOT_IN_A_MESSAGE, f"messages[{at}].")
                if isinstance(message, dict)
                else message
                for at, message in enumerate(fields["messages"])
            ]
        return fields

    async def sampling(self, gateway: Gateway, model: ModelSettings, request: Request) -> Sampling:
        """Raises ApiError, InvalidMessage."""
        options = self.options
        context = await gateway.context(model.name)
        if context and (options.num_ctx or 0) > context:
            raise ApiError(400, f"options.num_ctx is {options.num_ctx:,}, but {model.name} has {context:,} tokens")
        is_unlimited = options.num_predict is None or options.num_predict < 0
        random = options.seed is None or options.seed < 0
        schema = {"json": '{"type":"object"}'}.get(self.format, "") if isinstance(self.format, str) else None
        make = partial(
            Sampling,
            max_tokens=await gateway.default_tokens(model.name) if is_unlimited else options.num_predict,  # type: ignore[arg-type]
            temperature=model.temperature if options.temperature is None else options.temperature,
            top_p=model.top_p if options.top_p is None else options.top_p,
            top_k=options.top_k,
            seed=new_seed() if random else options.seed,  # type: ignore[arg-type]
            stop=(options.stop,) if isinstance(options.stop, str) else tuple(options.stop),
            json_schema=json.dumps(self.format, ensure_ascii=False) if schema is None else schema,
        )
        return await apart(request, make)


class OllamaMessage(Strict):
    """Who says what."""

    role: Literal["system", "user", "assistant"]
    content: str


class OllamaChatRequest(OllamaRequest):
    """POST /api/chat. Without messages it only asks whether the model is there."""

    messages: Annotated[list[OllamaMessage], FailFast()] = Field(default_factory=list)

    @property
    def conversation(self) -> list[tuple[str, str]]:
        """(role, text) of each message."""
        return [(message.role, message.content) for message in self.messages]


class GenerateRequest(OllamaRequest):
    """POST /api/generate. Without a prompt it only asks whether the model is there."""

    prompt: str = ""
    system: str = ""

    @property
    def conversation(self) -> list[tuple[str, str]]:
        """(role, text) of each message."""
        if not self.prompt:
            return []
        return [(role, text) for role, text in (("system", self.system), ("user", self.prompt)) if text]


class ShowRequest(Strict):
    """POST /api/show; `name` is what older clients call the model. Ollama's own program sends all fields, empty."""

    model: str | None = None
    name: str | None = None
    options: Annotated[dict[str, Any] | None, Field(description="Accepted; nothing of it is shown.")] = None
    system: Annotated[str | None, Field(description="Accepted; nothing of it is shown.")] = None
    template: Annotated[str | None, Field(description="Accepted; nothing of it is shown.")] = None
    verbose: Annotated[bool | None, Field(description="Accepted; there is no more to show.")] = None


@router.post("/chat")
async def chat(body: OllamaChatRequest, request: Request, gateway: ThisGateway) -> Response:
    """An answer to a conversation, by default as a stream of JSON lines."""
    return await _respond(
        gateway, body, body.conversation, request, lambda text: {"message": {"role": "assistant", "content": text}}
    )


@router.post("/generate")
async def generate(body: GenerateRequest, request: Request, gateway: ThisGateway) -> Response:
    """An answer to a prompt, by default as a stream of JSON lines."""
    return await _respond(gateway, body, body.conversation, request, lambda text: {"response": text})


@router.get("/tags")
async def tags(request: Request, gateway: ThisGateway) -> dict[str, Any]:
    """The models that there are for this key."""
    return {"models": [await _list_entry(gateway, name) for name in gateway.visible(request.state.key)]}


@router.get("/ps")
async def ps(request: Request, gateway: ThisGateway) -> dict[str, Any]:
    """Those that a worker has in its memory."""
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
    """What is known about a model."""
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
    """The release of Ollama whose API this follows."""
    return {"version": LIKE}


@router.api_route("/{rest:path}", methods=_ALL_METHODS, include_in_schema=False)
async def nothing_else(rest: str, request: Request) -> Response:
    """Models are managed by kvasir.toml, and embeddings are not served."""
    raise ApiError(501, f"{request.method} /api/{rest:.80} is not served by Kvasir: models come from its kvasir.toml")


async def _respond(
    gateway: Gateway,
    body: OllamaRequest,
    conversation: list[tuple[str, str]],
    request: Request,
    words: Callable[[str], dict[str, Any]],
) -> Response:
    model = _model(gateway, body.model, request)
    if not conversation:
        load_reply = {"model": body.model, "created_at": _time(), **words(""), "done": True, "done_reason": "load"}
        return JSONResponse(load_reply)
    prompt = prompt_of(conversation, shares=request.state.key is None)
    sampling = await body.sampling(gateway, model, request)
    ask = await gateway.ask(model.name, prompt, sampling, "now", body.stream, request.state.key)
    if body.stream:
        return await stream_response(
            _lines(gateway.answer(ask, request), body.model, words), _error_line, "application/x-ndjson"
        )
    result = await gateway.result(ask, request)
    return JSONResponse(_last(body.model, result, words(result.text)))


async def _lines(
    answer: AsyncGenerator[str | JobResult, None], name: str, words: Callable[[str], dict[str, Any]]
) -> AsyncGenerator[str, None]:
    async for event in answer:
        if isinstance(event, JobResult):
            yield json.dumps(_last(name, event, words(""))) + "\n"
        else:
            piece = {"model": name, "created_at": _time(), **words(event), "done": False}
            yield on_one_line(json.dumps(piece, ensure_ascii=False)) + "\n"


def _last(name: str, result: JobResult, words: dict[str, Any]) -> dict[str, Any]:
    """The whole answer, or the end of a stream; times in nanoseconds."""
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
    """A model in a list. Its weights lie with the workers, so nobody knows their size here."""
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
    """Ollama adds `:latest` to a name without a tag."""
    bare = name.removesuffix(":latest")
    return gateway.model(bare if bare in gateway.models else name, request.state.key)


def _error_line(refusal: ApiError) -> str:
    return on_one_line(json.dumps(refusal.ollama(), ensure_ascii=False)) + "\n"


def _time(moment: datetime | None = None) -> str:
    return (moment or datetime.now(UTC)).strftime("%Y-%m-%dT%H:%M:%S.%fZ")


def _nanoseconds(seconds: float) -> int:
    return int(seconds * 1e9)
