"""What requests of both APIs have in common: nothing in them is ignored unless it says nothing.

A long body is read in a thread of its own, one at a time, and no part of it before its length is known.
"""

import asyncio
from collections.abc import Callable, Coroutine
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from fastapi import Request, Response
from fastapi.routing import APIRoute
from pydantic import BaseModel, ConfigDict, ValidationError, model_validator

from gateway.refusal import ApiError, of_validation
from messages import bounded_json
from messages.limits import MAX_ENTRIES

T = TypeVar("T")
M = TypeVar("M", bound=BaseModel)

_LONG_BYTES = 16 << 10
_reader = ThreadPoolExecutor(1, "bodies")


async def apart(request: Request, work: Callable[..., T], *arguments: Any) -> T:
    """The result of `work` on a request; a long one is read in that thread, and nobody else waits for it."""
    if len(await request.body()) <= _LONG_BYTES:
        return work(*arguments)
    return await asyncio.get_running_loop().run_in_executor(_reader, work, *arguments)


class Strict(BaseModel):
    """A part of a request: a field that it doesn't have is an error."""

    model_config = ConfigDict(extra="forbid", strict=True)

    @model_validator(mode="before")
    @classmethod
    def _refuse_what_is_too_long(cls, body: Any) -> Any:
        fields = body if isinstance(body, dict) else {}
        for name, value in (("", fields), *fields.items()):
            if isinstance(value, list | dict) and len(value) > MAX_ENTRIES:
                name = name[:80]
                message = f"{name or 'the body'} has {len(value):,} entries; at most {MAX_ENTRIES} are read"
                raise ApiError(400, message, name or None, "too_many_entries")
        return body


class BoundedRoute(APIRoute):
    """A route whose long bodies become its model before FastAPI sees them."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """See FastAPI."""
        handle, model = super().get_route_handler(), self.body_field and self.body_field.field_info.annotation

        async def handle_bounded(request: Request) -> Response:
            return await handle(_BoundedRequest(request, model))

        return handle_bounded


class _BoundedRequest(Request):
    def __init__(self, request: Request, model: Any) -> None:
        super().__init__(request.scope, request.receive, request._send)
        self._model: type[BaseModel] = model

    async def json(self) -> Any:
        body = await self.body()
        return await apart(self, self._read, body) if len(body) > _LONG_BYTES else await super().json()

    def _read(self, body: bytes) -> BaseModel:
        return validated(self._model, bounded_json.loads(body))


def validated(model: type[M], body: Any) -> M:
    """The body as this model. Raises ApiError, saying what is wrong with it."""
    try:
        return model.model_validate(body)
    except ValidationError as error:
        problems = [{**problem, "loc": ("body", *problem["loc"])} for problem in error.errors()]
        raise of_validation(problems, {"body": body}) from None
