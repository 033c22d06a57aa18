"""What both APIs share: the models, who may use them, and how a request becomes an answer."""

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
from gateway.keys import Key, KeyRing
from gateway.refusal import RETRY_S, ApiError, of_error, of_job
from infra.broker import topology
from infra.config.types import ModelSettings
from messages.errors import ConfigError, KvasirError
from messages.jobs import JobResult, Lane, Message, Part, Sampling, TokenEvent, conversation
from messages.strict_schema import Objects
from messages.workers import WorkerInfo
from producers.batch.openai_body import Defaults
from producers.client import Client

log = logging.getLogger(__name__)

T = TypeVar("T")

MAX_WAITING = 1000  # if this many jobs wait for a model, the gateway accepts no more jobs for that model
STOP_S = 10.0  # when the gateway must stop, its streams have this many seconds to end
DEADLINE_S: Mapping[Lane, float] = {"now": 600.0, "bulk": 3600.0}
_BEYOND_DEADLINE_S = 5.0  # after a job's deadline, a worker has this many seconds to report that the job expired
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
    objects: Objects = "closed"  # how to treat object schemas without `additionalProperties`
    host_names: Collection[str] = ()  # names of this machine, in addition to localhost
    figures: GatewayMetrics = field(init=False)
    started_at: float = field(default_factory=time.time)
    is_stopping: bool = False
    _looks: dict[object, tuple[float, Any]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.figures = GatewayMetrics(self.models)

    def visible(self, key: Key | None) -> list[str]:
        """Return the models that this key may use."""
        return [name for name in self.models if key is None or key.may_use(name)]

    def model(self, name: str, key: Key | None) -> ModelSettings:
        """Return a model's settings. Raises ApiError if the model does not exist, or if this key may not use it."""
        if name not in self.visible(key):
            names = ", ".join(self.visible(key)) or "none"
            raise ApiError(404, f"model {name!r:.120} not found; there are: {names}", "model", "model_not_found")
        return self.models[name]

    async def workers(self) -> list[WorkerInfo]:
        """Return all live workers. The answer is at most a second old."""
        return await self._look("workers", self.client.workers)

    async def decoders(self, model: str) -> list[WorkerInfo]:
        """Return the decode workers of this model."""
        return [worker for worker in await self.workers() if (worker.role, worker.model) == ("decode", model)]

    async def context(self, model: str) -> int:
        """Return how many tokens prompt and answer may have together.

        0 means unknown, because no worker serves the model.
        """
        context_lengths = [worker.context for worker in await self.decoders(model) if worker.context]
        return min(context_lengths, default=self.models[model].context)

    async def defaults(self, model: ModelSettings) -> Defaults:
        """Return what a request leaves out. The longest answer is the model's limit, or half of a small context."""
        context = await self.context(model.name)
        max_tokens = min(model.max_tokens, max(1, context // 2) if context else 1 << 20)
        return Defaults(model.name, max_tokens, model.temperature, model.top_p)

    async def ask(
        self, model: str, prompt: tuple[Part, ...], sampling: Sampling, lane: Lane, stream: bool, key: Key | None
    ) -> PromptRequest:
        """Accept a request. Raises ApiError if no worker serves the model, or if too many jobs wait in its queue."""
        if self.is_stopping:
            raise ApiError(503, "the gateway is stopping", code="stopping", retry_s=RETRY_S)
        if not await self.decoders(model):
            raise ApiError(503, f"no worker serves {model} now", "model", "no_worker", RETRY_S)
        queue_depth = await self._look((model, lane), lambda: self._queue_depth(model, lane))
        if queue_depth >= MAX_WAITING:
            raise ApiError(
                429, f"{queue_depth:,} jobs already wait for {model}: try again later", "model", "queue_full", RETRY_S
            )
        # Without API keys, all requests have the same tag.
        return PromptRequest(model, prompt, sampling, lane, stream, key.tag if key else "anybody", DEADLINE_S[lane])

    async def result(self, ask: PromptRequest, request: Request) -> JobResult:
        """Return the whole answer. Raises ApiError."""
        async with aclosing(self.answer(ask, request)) as happenings:
            async for event in happenings:
                if isinstance(event, JobResult):
                    return event
        raise ApiError(500, "the job ended without a result")

    async def results(self, asks: Sequence[PromptRequest], request: Request) -> list[JobResult]:
        """Return whole answers, in the order of `asks`. Raises ApiError."""
        tasks = [asyncio.ensure_future(self.result(ask, request)) for ask in asks]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def answer(self, ask: PromptRequest, request: Request) -> AsyncGenerator[str | JobResult, None]:
        """Yield the first answer's text as it arrives, if `ask` streams, then the successful result.

        Raises ApiError.
        """
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
        """Wait for the first new piece.

        Return the text of all pieces that have come, and the result if there is one.
        """
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
        """Cancel the job as soon as its client disconnects.

        The code that sends the answer might notice that much later.
        """
        while (await request.receive())["type"] != "http.disconnect":
            pass
        self.dispatch.leave(run)
        run.tell(NoResult(_CLIENT_LEFT))

    def stop(self) -> None:
        """Take no new requests; those under way get STOP_S to end. Must be called in the event loop."""
        if not self.is_stopping:
            self.is_stopping = True
            reason = "the gateway is stopping"
            asyncio.get_running_loop().call_later(STOP_S, self.dispatch.end_all, reason)

    async def why_not_ready(self) -> list[str]:
        """Return the reasons why no request could be answered now, as sentences.

        An empty list means that it is ready.
        """
        return self._reasons(await self.workers())

    def why_not_ready_now(self) -> list[str]:
        """Do the same as `why_not_ready`, but outside the event loop."""
        try:
            return self._reasons(self.client.workers())
        except KvasirError as error:
            return [str(error)]

    def status(self) -> dict[str, Any]:
        """Return what `/status` says about this gateway. Must be called outside the event loop."""
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
            return self.client.broker.ready(*names)
        except ConfigError as error:  # since RabbitMQ 4.3, a producer isn't allowed to read a queue's length
            log.info("how many jobs wait for %s is not known: %s", model, error)
            return 0

    async def _look(self, key: object, look: Callable[[], T]) -> T:
        """Return the broker's or store's answer to a question. Each question is asked at most once a second."""
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


# A route's parameter of this type gets the gateway that received the request.
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
    """Return the parts of a conversation. Consecutive messages of one role are joined with a blank line between them.

    `shares` means that many requests begin with the same system message, so its KV cache is kept under a hash of its
    content. Otherwise the cache is private: sharing would reveal, by the response time, that somebody else sent the
    same text.
    """
    return conversation(messages, "class" if shares else "conversation", "conversation")


def new_seed() -> int:
    """Draw a seed for a request that names none, so that asking again gives another answer."""
    return random.getrandbits(32)
