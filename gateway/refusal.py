"""What a request is refused with, in the shape of the API that it came by."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from fastapi import Response

from messages.errors import BrokerUnavailable, DeadLetter, KvasirError, NoQueue, StoreUnavailable
from messages.jobs import JobError

RETRY_S = 10
# For the APIs' descriptions: FastAPI's own answer to a bad body, which it would name otherwise, is never sent.
DESCRIBED: dict[int | str, dict[str, Any]] = {"4XX": {"description": "Refused: the body says why"}}
# What no other attempt at the same request helps with: the request is at fault.
_ITS_OWN_FAULT = {
    "ContextExceeded": "context_length_exceeded",
    "InvalidMessage": "invalid_value",
    "InvalidPrompt": "invalid_prompt",
    "InvalidSchema": "invalid_json_schema",
}
_TYPES = 8  # more than any field may be of


class Refused(KvasirError):
    """An HTTP status, a sentence, the field it is about, and in how many seconds to try again (0: never said)."""

    def __init__(
        self, status: int, message: str, param: str | None = None, code: str | None = None, retry_s: int = 0
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.retry_s = retry_s

    def openai(self) -> dict[str, Any]:
        """The body that OpenAI's clients read."""
        kind = "rate_limit_error" if self.status == 429 else "invalid_request_error"
        if self.status >= 500:
            kind = "server_error"
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    def ollama(self) -> dict[str, Any]:
        """The body that Ollama's clients read."""
        return {"error": str(self)}

    def response(self, path: str) -> Response:
        """The answer to a request for this path."""
        headers = {"Retry-After": str(self.retry_s)} if self.retry_s else {}
        if self.status == 401:
            headers["WWW-Authenticate"] = "Bearer"
        made = json.dumps(self.ollama() if path.startswith("/api/") else self.openai())  # half characters, too
        return Response(made, self.status, headers, "application/json")


def of_error(error: KvasirError) -> Refused:
    """What one of our errors means to a client."""
    if isinstance(error, Refused):
        return error
    if isinstance(error, BrokerUnavailable | StoreUnavailable):
        return Refused(503, "the queues can't be reached now", code="unavailable", retry_s=RETRY_S)
    if isinstance(error, NoQueue):
        return Refused(503, str(error), code="unavailable", retry_s=RETRY_S)
    if isinstance(error, DeadLetter):
        return Refused(400, str(error), code=_ITS_OWN_FAULT.get(type(error).__name__))
    return Refused(500, str(error))


def of_job(error: JobError) -> Refused:
    """What a job's failure means to a client."""
    if code := _ITS_OWN_FAULT.get(error.kind):
        return Refused(400, error.message, code=code)
    return Refused(500, error.message, code="job_failed")


def of_unread(error: ValueError | RecursionError) -> Refused:
    """What kept Python's own reader of JSON from reading a body."""
    why = "the body is not JSON that can be read: it nests too deep, or a number has too many digits"
    if isinstance(error, json.JSONDecodeError):
        why = "the body is not JSON"
    if isinstance(error, UnicodeDecodeError):
        why = "the body is not JSON in UTF-8; it must not be compressed"
    return Refused(400, why, code="invalid_json")


def of_validation(problems: Sequence[Any], given: Mapping[str, Any]) -> Refused:
    """What is wrong with what was `given`, by where (`body`, `query`) it was; its values are not repeated.

    Of a field that may be of several types pydantic has a problem for each. The first is as good as any, unless one
    goes deeper, or is no wrong type: then what was given is of that one's type.
    """
    problems = problems[:_TYPES]  # a body may have a million, and those of one field follow each other
    paths = [_as_written(problem, given) for problem in problems]
    same = [each for each in zip(problems, paths, strict=True) if each[1][: len(paths[0])] == paths[0]]
    problem, path = max(same, key=lambda each: (len(each[1]), not each[0]["type"].endswith("_type")))
    param = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in path[1:]).removeprefix(".")
    if problem["type"] == "extra_forbidden":
        return Refused(400, f"{param!r} is not a field of this request", param, "unknown_parameter")
    return Refused(400, f"{param or 'the body'}: {problem['msg']}", param or None, "invalid_value")


def _as_written(problem: Any, given: Any) -> list[str | int]:
    """The path to a problem without the types that pydantic puts into it: in what was given they lead nowhere."""
    path: list[str | int] = []
    for number, part in enumerate(problem["loc"], 1):
        there = part in given if isinstance(given, Mapping) else isinstance(given, list) and isinstance(part, int)
        if there:
            given = given[part]
        if there or (problem["type"] == "missing" and number == len(problem["loc"])):
            path.append(part)
    return path
