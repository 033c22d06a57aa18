"""Errors for refused requests, in the shape of the API that received the request."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import Response

from messages.bounded_json import TooManyValues
from messages.errors import BrokerUnavailable, DeadLetter, KvasirError, NoQueue, StoreUnavailable
from messages.jobs import JobError

RETRY_S = 10
# Replaces FastAPI's own error description (422) in the API descriptions, because that error is never sent.
RESPONSES: dict[int | str, dict[str, Any]] = {"4XX": {"description": "Refused: the body says why"}}
# These errors mean that the request itself is wrong, so a retry does not help.
_ITS_OWN_FAULT = {
    "ContextExceeded": "context_length_exceeded",
    "InvalidMessage": "invalid_value",
    "InvalidPrompt": "invalid_prompt",
    "InvalidSchema": "invalid_json_schema",
}
# Maps a field's name in Kvasir's messages to its name in the APIs.
_PARAMS = {"answers": "n", "json_schema": "response_format"}
_ALIKE = {"max_tokens", "temperature", "top_p", "seed", "stop", "messages", "prompt", "response_format", "tool_calls"}
_TYPES = 8  # more types than any field accepts


class ApiError(KvasirError):
    """An HTTP error: its status, a sentence, the field concerned, and the seconds until a retry (0: not told)."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None, retry_s: int = 0
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.retry_s = retry_s

    def openai(self) -> dict[str, Any]:
        """Return the error body that OpenAI's clients read."""
        kind = "rate_limit_error" if self.status == 429 else "invalid_request_error"
        if self.status >= 500:
            kind = "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def ollama(self) -> dict[str, Any]:
        """Return the error body that Ollama's clients read."""
        return {"error": str(self)}

    def response(self, path: str) -> Response:
        """Return the response to a request for this path."""
        headers = {"Retry-After": str(self.retry_s)} if self.retry_s else {}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        body = json.dumps(self.ollama() if path.startswith("/api/") else self.openai())  # half characters, too
        return Response(body, self.status, headers, "application/json")


def of_error(error: KvasirError) -> ApiError:
    """Turn one of Kvasir's errors into the answer for a client."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, BrokerUnavailable | StoreUnavailable):
        return ApiError(503, "the queues can't be reached now", code="unavailable", retry_s=RETRY_S)
    if isinstance(error, NoQueue):
        return ApiError(503, str(error), code="unavailable", retry_s=RETRY_S)
    if isinstance(error, DeadLetter):
        name = str(error).partition(" ")[0]
        param = _PARAMS.get(name, name if name in _ALIKE else None)
        return ApiError(400, str(error), param, _ITS_OWN_FAULT.get(type(error).__name__))
    return ApiError(500, str(error))


def of_job(error: JobError) -> ApiError:
    """Turn a failed job's error into the answer for a client."""
    if code := _ITS_OWN_FAULT.get(error.kind):
        return ApiError(400, error.message, code=code)
    return ApiError(500, error.message, code="job_failed")


def of_unread(error: ValueError | RecursionError) -> ApiError:
    """Return the answer for a body that could not be read as JSON."""
    message = "the body is not JSON that can be read: it nests too deep, or a number has too many digits"
    if isinstance(error, TooManyValues):
        message = f"the body is not read: {error}"
    if isinstance(error, json.JSONDecodeError):
        message = "the body is not JSON"
    if isinstance(error, UnicodeDecodeError):
        message = "the body is not JSON in UTF-8; it must not be compressed"
    return ApiError(400, message, code="invalid_json")


def of_validation(problems: Sequence[Any], request_parts: Mapping[str, Any]) -> ApiError:
    """Return what is wrong with a request, whose parts are `body` and `query`. The values sent are not repeated.

    If a field may have several types, pydantic reports a problem for each of them. The first is reported here, unless
    another goes deeper or is not about the type: then the value sent was meant to be of that type.
    """
    # A body can have a million problems, but only the problems of its first field are needed. They come first in the
    # list, at most one for each type that the field accepts.
    problems = problems[:_TYPES]
    paths = [_as_written(problem, request_parts) for problem in problems]
    candidates = [pair for pair in zip(problems, paths, strict=True) if pair[1][: len(paths[0])] == paths[0]]
    problem, path = max(candidates, key=lambda pair: (len(pair[1]), not pair[0]["type"].endswith("_type")))
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path[1:]).removeprefix(".")
    if problem["type"] == "extra_forbidden":
        return ApiError(400, f"{param!r} is not a field of this request", param, "unknown_parameter")
    return ApiError(400, f"{param or 'the body'}: {problem['msg']}", param or None, "invalid_value")


def _as_written(problem: Any, node: Any) -> list[str | int]:
    """Return the path to a problem without the type names that pydantic inserts, which are not in the request."""
    path: list[str | int] = []
    for number, part in enumerate(problem["loc"], 1):
        is_inside = part in node if isinstance(node, Mapping) else isinstance(node, list) and isinstance(part, int)
        if is_inside:
            node = node[part]
        if is_inside or (problem["type"] == "missing" and number == len(problem["loc"])):
            path.append(part)
    return path
