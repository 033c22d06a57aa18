"""How both APIs read requests: no field is silently ignored unless it changes nothing.

A long body is parsed in a separate thread, one body at a time. Its length is checked before any of it is parsed.
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
    """Return the result of `work` on a request.

    If the body is long, `work` runs in the thread for long bodies, so that other requests don't wait.
    """
    if len(await request.body()) <= _LONG_BYTES:
        return work(*arguments)
    return await asyncio.get_running_loop().run_in_executor(_reader, work, *arguments)


class Strict(BaseModel):
    """A part of a request. An unknown field is an error."""

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
    """A route that validates long bodies itself, before FastAPI sees them."""

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
    """Validate a body as this model. Raises ApiError, which says what is wrong."""
    try:
        return model.model_validate(body)
    except ValidationError as error:
        problems = [{**problem, "loc": ("body", *problem["loc"])} for problem in error.errors()]
        raise of_validation(problems, {"body": body}) from None
