"""Every field of both APIs: how it is served, or why it is ignored or refused.

Requests are checked against these tables, and docs/reference/api.md is generated from them (`python -m
docs.write_reference`).
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, Literal

from gateway.refusal import ApiError


@dataclass(frozen=True, slots=True)
class Field:
    """How the gateway treats a field, and what the documentation says about it.

    Some clients send a refused field with a value that means "off". `neutral` lists these values, which are accepted;
    null always is.
    """

    kind: Literal["served", "ignored", "refused"]
    words: str
    neutral: tuple[Any, ...] = ()

    def says_nothing(self, value: Any) -> bool:
        """Whether the answer would be the same without the field."""
        if value is None or self.kind == "ignored":
            return True
        return any(
            value == neutral and isinstance(value, bool) == isinstance(neutral, bool) for neutral in self.neutral
        )


Fields = Mapping[str, Field]


_serve, _ignore = partial(Field, "served"), partial(Field, "ignored")


def _refuse(because: str, *neutral: Any) -> Field:
    return Field("refused", because, neutral)


CHAT: Fields = {
    "model": _serve("a name of kvasir.toml"),
    "messages": _serve("see below"),
    "max_completion_tokens": _serve("at least 1; -1 as if not given. Without it `max_tokens`"),
    "max_tokens": _serve("the same. Differs: without both the model's from kvasir.toml, at most half of its context"),
    "temperature": _serve("0 to 5; without it the model's own"),
    "top_p": _serve("0 to 1; without it the model's own"),
    "seed": _serve("0 to 4,294,967,295; -1, or none: each request has another"),
    "stop": _serve("up to 16 texts"),
    "n": _serve(
        "up to 32. Differs: in a stream the first answer comes as it is generated, the others whole at the end"
    ),
    "response_format": _serve("`text`, `json_object`, `json_schema`. Differs: always enforced, `strict` or not"),
    "tools": _serve("functions, if `tool_choice` leaves no choice: the answer is a call of that one"),
    "tool_choice": _serve("a function's name, `required` with one function, `none`. Refused: `auto` with functions"),
    "parallel_tool_calls": _ignore("there is one call at most"),
    "stream": _serve(""),
    "stream_options": _serve("`include_usage`; `include_obfuscation` only `false`"),
    "metadata": _serve("up to 16 texts, given back in the answer and kept nowhere"),
    "service_tier": _serve("`auto` and `default` are lane `now`, `flex` is lane `bulk`. Refused: others"),
    **dict.fromkeys(("user", "safety_identifier"), _ignore("keys say who asks")),
    "store": _ignore("no answer is kept for later"),
    **dict.fromkeys(
        ("prompt_cache_key", "prompt_cache_options", "prompt_cache_retention", "cache_control"),
        _ignore("the store finds what it has by content, under each key's own tag"),
    ),
    "function_call": _refuse("`tool_choice` takes its place", "none", "auto"),
    "functions": _refuse("`tools` takes its place", []),
    "logit_bias": _refuse("engines sample alike, without a bias", {}),
    "logprobs": _refuse("engines don't tell them for each token", False),
    "top_logprobs": _refuse("engines don't tell them for each token", 0),
    **dict.fromkeys(
        ("frequency_penalty", "presence_penalty"), _refuse("engines sample alike, and have no penalties", 0)
    ),
    "repetition_penalty": _refuse("engines sample alike, and have no penalties", 1),
    "reasoning_effort": _refuse("how long a model thinks can't be set", "none"),
    "verbosity": _refuse("how long a model speaks can't be set but by `max_tokens`"),
    "modalities": _refuse("only text is served", ["text"]),
    "audio": _refuse("only text is served"),
    "prediction": _refuse("an answer is generated token by token"),
    "moderation": _refuse("no answer is moderated"),
    "web_search_options": _refuse("nothing is searched"),
}
MESSAGE: Fields = {
    "role": _serve(
        "`system`, `developer` (as `system`), `user`, `assistant`, `tool`. Differs: two messages of one role in a row "
        "become one, with a blank line between. An assistant's at the end is continued where the template can. "
        "Refused: `function`"
    ),
    "content": _serve(
        "a text, or parts of type `text`. Left out: an empty message of the system or the assistant. "
        "Refused: pictures, audio, files; an empty one of the user"
    ),
    "tool_calls": _serve("of the assistant, rendered by the model's template; refused where that can't"),
    "tool_call_id": _serve("of a `tool`'s message: a call before it"),
    "name": _ignore("no template prints it"),
    "type": _ignore("a message is one"),
    "id": _ignore("a message needs none"),
    "reasoning_content": _ignore("templates leave earlier thoughts out"),
    "reasoning": _ignore("templates leave earlier thoughts out"),
    "cache_control": CHAT["cache_control"],
    "annotations": _ignore("no template prints them"),
    "refusal": _refuse("a message has content", ""),
    "function_call": _refuse("`tool_calls` takes its place"),
    "audio": _refuse("only text is served"),
}
PART: Fields = {
    "type": _serve("`text`"),
    "text": _serve(""),
    "cache_control": MESSAGE["cache_control"],
    "prompt_cache_breakpoint": CHAT["cache_control"],
}
COMPLETION: Fields = {
    "prompt": _serve(
        "a text, or a list of up to 32. It is continued as it stands: no chat template, and control tokens spelled in "
        "it are text. Refused: tokens, an empty text"
    ),
    **{
        name: CHAT[name]
        for name in ("model", "max_tokens", "temperature", "top_p", "seed", "stop", "n", "stream", "stream_options")
    },
    "user": CHAT["user"],
    "best_of": _refuse("every answer is given", 1),
    "echo": _refuse("an answer is what follows the prompt", False),
    "suffix": _refuse("nothing is filled in between two texts", ""),
    "logprobs": CHAT["logprobs"],
    **{name: CHAT[name] for name in ("logit_bias", "frequency_penalty", "presence_penalty", "repetition_penalty")},
}
OLLAMA: Fields = {
    "model": _serve("`:latest` may be added to it"),
    "messages": _serve("chat; see below"),
    "prompt": _serve("generate"),
    "system": _serve("generate"),
    "stream": _serve("default `true`"),
    "format": _serve('`"json"` or a schema, always enforced'),
    "tools": _serve("chat: one function, which the answer is a call of. Refused: several"),
    "options": _serve("see below"),
    "raw": _serve("generate: the prompt is continued as it stands"),
    "keep_alive": _serve("without prompt or messages 0 is answered with `unload`; workers keep their models"),
    "think": _refuse("how a model thinks can't be set", False),
    "truncate": _refuse("a prompt that is too long is an error, and never cut", False),
    "shift": _refuse("an answer that is too long ends", False),
    "images": _refuse("only text is served", []),
    "template": _refuse("a model has its own", ""),
    "context": _refuse("a conversation is its messages", []),
    "suffix": COMPLETION["suffix"],
    "logprobs": CHAT["logprobs"],
    "top_logprobs": CHAT["top_logprobs"],
    **dict.fromkeys(("width", "height", "steps"), _refuse("only text is served")),
}
OLLAMA_MESSAGE: Fields = {
    "role": _serve("`system`, `user`, `assistant`, `tool`; as for chat completions"),
    "content": _serve("a text"),
    "tool_calls": MESSAGE["tool_calls"],
    "tool_name": _serve("of a `tool`'s message"),
    "tool_call_id": _ignore("`tool_name` says which"),
    "thinking": MESSAGE["reasoning"],
    "images": _refuse("only text is served", []),
}
OPTIONS: Fields = {
    "num_predict": _serve("negative as if not given: the model's `max_tokens`, at most half of its context"),
    "temperature": CHAT["temperature"],
    "top_p": CHAT["top_p"],
    "top_k": _serve("0: no limit"),
    "seed": _serve("below 0: each request has another"),
    "stop": CHAT["stop"],
    "num_ctx": _serve("the model's own at most, which the header `x-kvasir-num-ctx` says then; changes nothing"),
    "num_keep": _ignore("nothing is cut off"),
    "repeat_last_n": _ignore("without a penalty it says nothing"),
    "penalize_newline": _ignore("without a penalty it says nothing"),
    "mirostat_eta": _ignore("without `mirostat` it says nothing"),
    "mirostat_tau": _ignore("without `mirostat` it says nothing"),
    **dict.fromkeys(
        ("num_gpu", "main_gpu", "num_thread", "num_batch", "numa", "low_vram", "use_mmap", "use_mlock", "f16_kv"),
        _ignore("how a worker runs its model is set in kvasir.toml"),
    ),
    "repeat_penalty": CHAT["repetition_penalty"],
    "presence_penalty": CHAT["presence_penalty"],
    "frequency_penalty": CHAT["frequency_penalty"],
    **dict.fromkeys(("tfs_z", "typical_p"), _refuse("engines have no such sampler", 1)),
    **dict.fromkeys(("min_p", "mirostat"), _refuse("engines have no such sampler", 0)),
    **dict.fromkeys(("logits_all", "vocab_only", "embedding_only"), _refuse("a model answers in text", False)),
}
TABLES: Mapping[str, Fields] = {
    "`POST /v1/chat/completions`": CHAT,
    "A message": MESSAGE,
    "A part of its content": PART,
    "`POST /v1/completions`": COMPLETION,
    "`POST /api/chat`, `POST /api/generate`": OLLAMA,
    "A message of Ollama's": OLLAMA_MESSAGE,
    "`options`": OPTIONS,
}


def meaningful_fields(
    fields: Any, table: Fields, prefix: str = "", inside: Mapping[str, Callable[[Any, str], Any]] = MappingProxyType({})
) -> Any:
    """Return an object's fields except those that change nothing. A value that is not an object is returned unchanged.

    `inside` maps a field's name to a function that reads its value and place. Raises ApiError for a refused field.
    """
    if not isinstance(fields, dict):
        return fields
    meaningful = {}
    for name, value in fields.items():
        rule = table.get(name)
        if value is None or (rule and rule.says_nothing(value)):
            continue
        if rule and rule.kind == "refused":
            message = f"{prefix + name!r} is not served: {rule.words}"
            raise ApiError(400, message, f"{prefix}{name}", "unsupported_parameter")
        meaningful[name] = value
    return meaningful | {
        name: read(meaningful[name], f"{prefix}{name}") for name, read in inside.items() if name in meaningful
    }


def each(read: Callable[[Any, str], Any]) -> Callable[[Any, str], Any]:
    """Return a function that applies `read` to every entry of a list.

    A value that is not a list is returned unchanged.
    """
    return lambda value, place: (
        [read(entry, f"{place}[{at}]") for at, entry in enumerate(value)] if isinstance(value, list) else value
    )
