"""The body of a request to OpenAI's API, and its answer. Used for the lines of a file and for the gateway."""

import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from messages.errors import InvalidMessage
from messages.jobs import JobResult, Message, Part, Sampling
from messages.strict_schema import Objects, strict_schema

_ROLES = ("system", "developer", "user", "assistant", "tool")
# Some clients send -1 to leave the choice to the server. llama.cpp gives -1 the same meaning.
_LEFT_TO_SERVER = -1


@dataclass(frozen=True, slots=True)
class Defaults:
    """The values for a request that gives none."""

    model: str
    max_tokens: int
    temperature: float
    top_p: float


def messages_of(body: Mapping[str, Any]) -> list[Message]:
    """Return the messages that have content.

    Each function call of the assistant is one message. Raises InvalidMessage.
    """
    messages = body["messages"]
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages) or not messages:
        raise InvalidMessage("messages must be a list of objects")
    for message in messages:
        if message.get("role") not in _ROLES:
            raise InvalidMessage(f"messages must have one of these roles: {', '.join(_ROLES)}")
    conversation_messages: list[Message] = []
    function_by_call: dict[str, str] = {}
    for message in messages:
        role, content = message["role"], _content(message)
        if role == "tool":
            name = message.get("tool_name") or function_by_call.get(str(message.get("tool_call_id")))
            if name is None:
                raise InvalidMessage(
                    "messages with the role 'tool' must give an earlier tool call's id as tool_call_id"
                )
            conversation_messages.append((role, content or " ", name))
        elif content or role == "user":
            conversation_messages.append((role, content))
        calls = message.get("tool_calls") or []
        for call in calls if isinstance(calls, list) else [calls]:
            name, arguments = _name_and_arguments(call)
            function_by_call[str(call.get("id"))] = name
            conversation_messages.append((role, arguments, name))
    return conversation_messages


def _name_and_arguments(call: Any) -> tuple[str, str]:
    """Return a function's name, and its arguments as a JSON object. Ollama's clients send that object itself."""
    try:
        name, arguments = call["function"]["name"], call["function"].get("arguments") or {}
        text = json.dumps(arguments) if isinstance(arguments, dict) else arguments
        if isinstance(name, str) and isinstance(json.loads(text), dict):
            return name, text
    except (AttributeError, KeyError, TypeError, ValueError, RecursionError):
        pass
    # The first word of each InvalidMessage in this module must be the field's name, because the gateway sends this name
    # to its client (gateway/refusal.py).
    raise InvalidMessage("tool_calls must have a function with a name, and with arguments that are a JSON object")


def _content(message: Mapping[str, Any]) -> str:
    """Return the text of a message, or "" if it has none, which only a user's message may not."""
    content = message.get("content")
    may_be_empty = message["role"] != "user"
    if content is None and may_be_empty:
        return ""
    if isinstance(content, list) and all(isinstance(part, dict) and part.get("type") == "text" for part in content):
        content = "".join(str(part.get("text", "")) for part in content)
    if not isinstance(content, str) or not (content.strip() or may_be_empty):
        raise InvalidMessage("messages must have non-empty text as content; images are not supported")
    return content if content.strip() else ""


def sampling_of(body: Mapping[str, Any], defaults: Defaults, seed: int, objects: Objects = "closed") -> Sampling:
    """Return the sampling of a request, with `seed` if it names none. Raises InvalidMessage, InvalidSchema."""
    stop = body.get("stop") or ()
    schema = _schema(body.get("response_format"))
    return Sampling(
        max_tokens=_first_present(body, ("max_completion_tokens", "max_tokens"), defaults.max_tokens, _LEFT_TO_SERVER),
        temperature=_first_present(body, ("temperature",), defaults.temperature),
        top_p=_first_present(body, ("top_p",), defaults.top_p),
        seed=_first_present(body, ("seed",), seed, _LEFT_TO_SERVER),
        stop=tuple(stop) if isinstance(stop, list) else (stop,) if stop else (),
        json_schema=schema and strict_schema(schema, objects),
        answers=_first_present(body, ("n",), 1),
    )


def _first_present(body: Mapping[str, Any], names: Iterable[str], default: Any, left_out: int | None = None) -> Any:
    return next((body[name] for name in names if body.get(name) not in (None, left_out)), default)


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


def raw_prompt(text: Any) -> tuple[Part, ...]:
    """Return a prompt that is continued as it is. Raises InvalidMessage."""
    if not isinstance(text, str) or not text:
        raise InvalidMessage("prompt must be a single non-empty string; token ids are not supported")
    return (Part("raw", text),)


def texts_of(result: JobResult, first: int = 0) -> list[dict[str, Any]]:
    """Return the answers in the form of a text_completion. The first has the index `first`."""
    return [
        {"index": first + choice.pop("index"), "text": choice.pop("message")["content"], **choice}
        for choice in choices_of(result)
    ]


def choices_of(result: JobResult) -> list[dict[str, Any]]:
    """Return the answers in the form of a chat.completion."""
    return [
        {
            "index": index,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": None,
            "finish_reason": result.finish_reason or "stop",
        }
        for index, text in enumerate((result.text, *result.more_texts))
    ]


def usage_of(*results: JobResult) -> dict[str, Any]:
    """Return the token counts of all results together, from the engines' counters."""
    prompt_tokens = sum(result.decode.prompt_tokens for result in results)
    completion_tokens = sum(result.decode.completion_tokens for result in results)
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": sum(map(cached_tokens, results))},
    }


def cached_tokens(result: JobResult) -> int:
    """Return the prompt tokens that came from the store instead of being computed, by the engines' counters."""
    computed_tokens = result.prefill.computed_tokens + result.decode.evaluated_tokens
    return max(0, result.decode.prompt_tokens - computed_tokens)
