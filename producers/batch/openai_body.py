"""The body of a request to OpenAI's API, and its answer: the same for a line of a file and for the gateway."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from messages.errors import InvalidMessage
from messages.jobs import JobResult, Sampling

_ROLES = ("system", "developer", "user", "assistant")


@dataclass(frozen=True, slots=True)
class Defaults:
    """What a request that doesn't say gets."""

    model: str
    max_tokens: int
    temperature: float
    top_p: float


def messages_of(body: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(role, text) of each message. Raises InvalidMessage."""
    messages = body["messages"]
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages) or not messages:
        raise InvalidMessage("messages must be a list of objects")
    for message in messages:
        if message.get("role") not in _ROLES:
            raise InvalidMessage(f"a message's role must be one of {', '.join(_ROLES)}")
    return [(message["role"], _content(message)) for message in messages]


def _content(message: Mapping[str, Any]) -> str:
    content = message.get("content")
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        content = "".join(str(part.get("text", "")) for part in content)
    if not isinstance(content, str) or not content.strip():
        raise InvalidMessage("a message's content must be text, and not empty; pictures are not served")
    return content


def sampling_of(body: Mapping[str, Any], defaults: Defaults, seed: int) -> Sampling:
    """How its tokens are chosen; `seed` if it names none. Raises InvalidMessage."""
    stop = body.get("stop") or ()
    return Sampling(
        max_tokens=_first_present(body, ("max_completion_tokens", "max_tokens"), defaults.max_tokens),
        temperature=_first_present(body, ("temperature",), defaults.temperature),
        top_p=_first_present(body, ("top_p",), defaults.top_p),
        seed=_first_present(body, ("seed",), seed),
        stop=tuple(stop) if isinstance(stop, list) else (stop,) if stop else (),
        json_schema=_schema(body.get("response_format")),
        answers=_first_present(body, ("n",), 1),
    )


def _first_present(body: Mapping[str, Any], names: Iterable[str], default: Any) -> Any:
    return next((body[name] for name in names if body.get(name) is not None), default)


def _schema(response_format: Any) -> str:
    if response_format is None or (isinstance(response_format, dict) and response_format.get("type") == "text"):
        return ""
    kind = response_format.get("type") if isinstance(response_format, dict) else None
    if kind == "json_object":
        return '{"type":"object"}'
    schema = response_format.get("json_schema") if kind == "json_schema" else None
    if not isinstance(schema, dict) or not isinstance(schema.get("schema"), dict):
        raise InvalidMessage("response_format must be of type text, json_object or json_schema with a schema")
    return json.dumps(schema["schema"], separators=(",", ":"), ensure_ascii=False)


def choices_of(result: JobResult) -> list[dict[str, Any]]:
    """The answers, as a chat.completion has them."""
    return [
        {
            "index": index,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": None,
            "finish_reason": result.finish_reason or "stop",
        }
        for index, text in enumerate((result.text, *result.more_texts))
    ]


def usage_of(result: JobResult) -> dict[str, Any]:
    """What the engines counted."""
    report = result.decode
    return {
        "prompt_tokens": report.prompt_tokens,
        "completion_tokens": report.completion_tokens,
        "total_tokens": report.prompt_tokens + report.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens(result)},
    }


def cached_tokens(result: JobResult) -> int:
    """Prompt tokens that nobody computed for this job, by the engines' own counters: they came from the store."""
    computed_tokens = result.prefill.computed_tokens + result.decode.evaluated_tokens
    return max(0, result.decode.prompt_tokens - computed_tokens)
