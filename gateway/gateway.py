"""What both APIs stand on: which models there are, who may use them, and the way from a request to its answer."""

import asyncio
import logging
import random
import time
from collections.abc import AsyncGenerator, Callable, Collection, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Annotated, Any, TypeVar, cast

from fastapi import Depends, Request

from gateway.batches import Batches
from gateway.continued import AnswerDiverged, AnswerText
from gateway.dispatch import Dispatcher, NoResult, PromptRequest, Run
from gateway.figures import GatewayMetrics
from gateway.keys import Key, KeyRing, tag_of
from gateway.refusal import RETRY_S, ApiError, of_error, of_job
from infra.broker import topology
from infra.config.types import ModelSettings
from messages.errors import ConfigError, KvasirError
from messages.jobs import JobResult, Lane, Message, Part, Sampling, TokenEvent, conversation
from messages.strict_schema import Objects
from messages.workers import WorkerInfo
from producers.client import Client

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_WAITING = 1000  # jobs in a model's queue beyond which no more are taken
STOP_S = 10.0  # time that streams have to end after the gateway was told to stop
DEADLINE_S: Mapping[Lane, float] = {"now": 600.0, "bulk": 3600.0}
_BEYOND_DEADLINE_S = 5.0  # the worker's word that it has passed comes first, if one holds the job
_FRESH_S = 1.0
_CLIENT_LEFT = "the client has left"


@dataclass
class Gateway:
    """One gateway: its models, its client, its keys, its batches."""

    models: Mapping[str, ModelSettings]
    client: Client
    dispatch: Dispatcher
    keys: KeyRing
    batches: Batches
    objects: Objects = "closed"  # how a schema's objects are taken that don't say whether they are open
    host_names: Collection[str] = ()  # this machine's, beside localhost
    figures: GatewayMetrics = field(init=False)
    started_at: float = field(default_factory=time.time)
    is_stopping: bool = False
    _looks: dict[object, tuple[float, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.figures = GatewayMetrics(self.models)

    def visible(self, key: Key | None) -> list[str]:
        """The models that are there for this key."""
        return [name for name in self.models if key is None or key.may_use(name)]

    def model(self, name: str, key: Key | None) -> ModelSettings:
        """Raises ApiError if it does not exist, or not for this key."""
        if name not in self.visible(key):
            names = ", ".join(self.visible(key)) or "none"
            raise ApiError(404, f"model {name!r:.120} not found; there are: {names}", "model", "model_not_found")
        return self.models[name]

    async def workers(self) -> list[WorkerInfo]:
        """All workers alive, as of a moment ago."""
        return await self._look("workers", self.client.workers)

    async def decoders(self, model: str) -> list[WorkerInfo]:
        """Those that generate this model's answers."""
        return [worker for worker in await self.workers() if (worker.role, worker.model) == ("decode", model)]

    async def context(self, model: str) -> int:
        """Tokens that prompt and answer may have together; 0: not known while no worker serves the model."""
        context_lengths = [worker.context for worker in await self.decoders(model) if worker.context]
        return min(context_lengths, default=self.models[model].context)

    async def default_tokens(self, model: str) -> int:
        """Longest answer of a request that doesn't say: the model's, or half of a small context."""
        context = await self.context(model)
        return min(self.models[model].max_tokens, max(1, context // 2) if context else 1 << 20)

    async def ask(
        self, model: str, prompt: tuple[Part, ...], sampling: Sampling, lane: Lane, stream: bool, key: Key | None
    ) -> PromptRequest:
        """A request that is taken. Raises ApiError if nobody would work on it, or too much waits before it."""
        if self.is_stopping:
            raise ApiError(503, "the gateway is stopping", code="stopping", retry_s=RETRY_S)
        if not await self.decoders(model):
            raise ApiError(503, f"no worker serves {model} now", "model", "no_worker", RETRY_S)
        queue_depth = await self._look((model, lane), lambda: self._queue_depth(model, lane))
        if queue_depth >= MAX_WAITING:
            raise ApiError(429, f"{queue_depth:,} jobs wait for {model} already", "model", "queue_full", RETRY_S)
        return PromptRequest(model, prompt, sampling, lane, stream, tag_of(key), DEADLINE_S[lane])

    async def result(self, ask: PromptRequest, request: Request) -> JobResult:
        """The whole answer. Raises ApiError."""
        async with aclosing(self.answer(ask, request)) as happenings:
            async for event in happenings:
                if isinstance(event, JobResult):
                    return event
        raise ApiError(500, "the answer ended without a result")

    async def results(self, asks: Sequence[PromptRequest], request: Request) -> list[JobResult]:
        """Whole answers, in the order of what was asked. Raises ApiError."""
        tasks = [asyncio.ensure_future(self.result(ask, request)) for ask in asks]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def answer(self, ask: PromptRequest, request: Request) -> AsyncGenerator[str | JobResult, None]:
        """Text of the first answer as it comes, if the ask streams, and the result if it succeeded. Raises ApiError."""
        began = time.monotonic()
        try:
            run = await self.dispatch.start(ask)
        except KvasirError as error:
            raise of_error(error) from None
        watch = asyncio.create_task(self._watch(request, run))
        try:
            text = AnswerText()
            while True:
                new, result = await self._next(run, text, began + ask.deadline_s + _BEYOND_DEADLINE_S)
                if new and new == text.sent_text:
                    self.figures.first_text.labels(ask.model).observe(time.monotonic() - began)
                if result:
                    self.figures.count_result(result, time.monotonic() - began)
                    new += _rest(result, text) if ask.stream else ""
                if new:
                    yield new
                if result:
                    yield _require_success(result)
                    return
        finally:
            watch.cancel()
            self.dispatch.leave(run)

    async def _next(self, run: Run, text: AnswerText, until: float) -> tuple[str, JobResult | None]:
        """The text of all pieces that have come, waiting for the first; and the result, once it is there."""
        try:
            async with asyncio.timeout(max(0.0, until - time.monotonic())):
                event = await run.events.get()
        except TimeoutError:
            raise ApiError(504, "no worker has answered in time", code="timeout") from None
        new = ""
        while isinstance(event, TokenEvent):
            new += text.feed(event)
            if run.events.empty():
                return new, None
            event = run.events.get_nowait()
        if isinstance(event, NoResult):
            status = 499 if event.reason == _CLIENT_LEFT else 503
            raise ApiError(status, event.reason, code="stopping", retry_s=RETRY_S)
        return new, event

    async def _watch(self, request: Request, run: Run) -> None:
        """Cancel the job as soon as its client has left: whoever is to read its answer may be asleep meanwhile."""
        while (await request.receive())["type"] != "http.disconnect":
            pass
        self.dispatch.leave(run)
        run.tell(NoResult(_CLIENT_LEFT))

    def stop(self) -> None:
        """Take nothing more; what is under way has STOP_S. In the event loop."""
        if not self.is_stopping:
            self.is_stopping = True
            reason = "the gateway is stopping"
            asyncio.get_running_loop().call_later(STOP_S, self.dispatch.end_all, reason)

    async def why_not_ready(self) -> list[str]:
        """Sentences; none: a request could be answered now."""
        return self._reasons(await self.workers())

    def why_not_ready_now(self) -> list[str]:
        """The same outside the event loop."""
        try:
            return self._reasons(self.client.workers())
        except KvasirError as error:
            return [str(error)]

    def status(self) -> dict[str, Any]:
        """What `/status` says about this gateway, outside the event loop."""
        reasons = self.why_not_ready_now()
        facts = {"role": "gateway", "models": [*self.models], "uptime_s": round(time.time() - self.started_at, 1)}
        return facts | {"ready": not reasons, "reasons": reasons}

    def _reasons(self, workers: Sequence[WorkerInfo]) -> list[str]:
        reasons = ["the gateway is stopping"] if self.is_stopping else []
        if not self.dispatch.works:
            reasons.append("the broker can't be reached")
        served_models = {worker.model for worker in workers if worker.role == "decode"}
        return reasons + ([] if served_models.intersection(self.models) else ["no worker serves any model"])

    def _queue_depth(self, model: str, lane: Lane) -> int:
        names = [name for stage in topology.WORK_STAGES for name in topology.lane_queues(stage, model, lane)]
        try:
            return sum(depth.ready for name in names if (depth := self.client.broker.depth(name)))
        except ConfigError as error:  # from RabbitMQ 4.3 on a producer may not look
            log.info("how many jobs wait for %s is not known: %s", model, error)
            return 0

    async def _look(self, key: object, look: Callable[[], T]) -> T:
        """The broker and the store are asked once a second, whoever asks us."""
        seen_at, answer = self._looks.get(key, (0.0, None))
        if seen_at < time.monotonic() - _FRESH_S:
            try:
                answer = await asyncio.to_thread(look)
            except KvasirError as error:
                raise of_error(error) from None
            self._looks[key] = time.monotonic(), answer
        return cast(T, answer)


async def _gateway_of(request: Request) -> Gateway:
    return cast(Gateway, request.app.state.gateway)


# The gateway that a request came to, as FastAPI hands it to a route.
ThisGateway = Annotated[Gateway, Depends(_gateway_of)]


def _rest(result: JobResult, text: AnswerText) -> str:
    if result.state != "succeeded":
        return ""
    try:
        return text.rest(result.text)
    except AnswerDiverged as error:
        raise ApiError(500, str(error), code="answer_diverged") from None


def _require_success(result: JobResult) -> JobResult:
    if result.error:
        raise of_job(result.error)
    if result.state == "expired":
        raise ApiError(504, "the answer was not finished in time", code="timeout")
    if result.state != "succeeded":
        raise ApiError(500, "the job was cancelled", code="cancelled")
    return result


def prompt_of(messages: Sequence[Message], shares: bool) -> tuple[Part, ...]:
    """Parts of a conversation; two messages of one role in a row become one, with a blank line.

    `shares`: what the system says first is taken to be the same in many requests, so that its KV cache is kept under
    its content. Otherwise nobody can tell, by the time that it takes, whether somebody else has sent the same.
    """
    return conversation(messages, "class" if shares else "conversation", "conversation")


def new_seed() -> int:
    """For a request that names none: asked again, another answer."""
    return random.getrandbits(32)
