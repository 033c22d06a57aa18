"""Every field of both APIs: what is served of it, or why it is ignored or refused.

Requests are read by these tables, and docs/gateway.md has them (`python -m tests.support.gateway_fields`).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from gateway.refusal import ApiError


@dataclass(frozen=True, slots=True)
class Field:
    """How a field is taken, and what the documentation says of it.

    `neutral`: of a field that is refused, the values by which clients say that they don't want it; null always does.
    """

    kind: Literal["served", "ignored", "refused"]
    words: str
    neutral: tuple[Any, ...] = ()

    def says_nothing(self, value: Any) -> bool:
        """Whether the answer is the same without the field."""
        if value is None or self.kind == "ignored":
            return True
        return any(
            value == neutral and isinstance(value, bool) == isinstance(neutral, bool) for neutral in self.neutral
        )


Fields = Mapping[str, Field]


_served, _ignored = partial(Field, "served"), partial(Field, "ignored")


def _refused(because: str, *neutral: Any) -> Field:
    return Field("refused", because, neutral)


_OWN = "without it the model's own"
_NO_PENALTIES = "engines sample alike, and have no penalties"
_NO_LOGPROBS = "engines don't tell them for each token"
_CACHES = "the store finds what it has by content, under each key's own tag"
_WHERE = "how a worker runs its model is set in kvasir.toml"
_TEXT_ONLY = "only text is served"
_USER = _ignored("keys say who asks")

CHAT: Fields = {
    "model": _served("a name of kvasir.toml"),
    "messages": _served("see below"),
    "max_completion_tokens": _served("at least 1; -1 as if not given. Without it `max_tokens`"),
    "max_tokens": _served("the same. Differs: without both the model's from kvasir.toml, at most half of its context"),
    "temperature": _served(f"0 to 5; {_OWN}"),
    "top_p": _served(f"0 to 1; {_OWN}"),
    "seed": _served("0 to 4,294,967,295; -1, or none: each request has another"),
    "stop": _served("up to 16 texts"),
    "n": _served(
        "up to 32. Differs: in a stream the first answer comes as it is generated, the others whole at the end"
    ),
    "response_format": _served("`text`, `json_object`, `json_schema`. Differs: always enforced, `strict` or not"),
    "tools": _served("functions, if `tool_choice` leaves no choice: the answer is a call of that one"),
    "tool_choice": _served("a function's name, `required` with one function, `none`. Refused: `auto` with functions"),
    "parallel_tool_calls": _ignored("there is one call at most"),
    "stream": _served(""),
    "stream_options": _served("`include_usage`; `include_obfuscation` only `false`"),
    "metadata": _served("up to 16 texts, given back in the answer and kept nowhere"),
    "service_tier": _served("`auto` and `default` are lane `now`, `flex` is lane `bulk`. Refused: others"),
    "user": _USER,
    "safety_identifier": _USER,
    "store": _ignored("no answer is kept for later"),
    "prompt_cache_key": _ignored(_CACHES),
    "prompt_cache_options": _ignored(_CACHES),
    "prompt_cache_retention": _ignored(_CACHES),
    "cache_control": _ignored(_CACHES),
    "function_call": _refused("`tool_choice` takes its place", "none", "auto"),
    "functions": _refused("`tools` takes its place", []),
    "logit_bias": _refused("engines sample alike, without a bias", {}),
    "logprobs": _refused(_NO_LOGPROBS, False),
    "top_logprobs": _refused(_NO_LOGPROBS, 0),
    "frequency_penalty": _refused(_NO_PENALTIES, 0),
    "presence_penalty": _refused(_NO_PENALTIES, 0),
    "repetition_penalty": _refused(_NO_PENALTIES, 1),
    "reasoning_effort": _refused("how long a model thinks can't be set", "none"),
    "verbosity": _refused("how long a model speaks can't be set but by `max_tokens`"),
    "modalities": _refused(_TEXT_ONLY, ["text"]),
    "audio": _refused(_TEXT_ONLY),
    "prediction": _refused("an answer is generated token by token"),
    "moderation": _refused("no answer is moderated"),
    "web_search_options": _refused("nothing is searched"),
}
MESSAGE: Fields = {
    "role": _served(
        "`system`, `developer` (as `system`), `user`, `assistant`, `tool`. Differs: two messages of one role in a row "
        "become one, with a blank line between. An assistant's at the end is continued where the template can. "
        "Refused: `function`"
    ),
    "content": _served(
        "a text, or parts of type `text`. Left out: an empty message of the system or the assistant. "
        "Refused: pictures, audio, files; an empty one of the user"
    ),
    "tool_calls": _served("of the assistant, rendered by the model's template; refused where that can't"),
    "tool_call_id": _served("of a `tool`'s message: a call before it"),
    "name": _ignored("no template prints it"),
    "type": _ignored("a message is one"),
    "id": _ignored("a message needs none"),
    "reasoning_content": _ignored("templates leave earlier thoughts out"),
    "reasoning": _ignored("templates leave earlier thoughts out"),
    "cache_control": _ignored(_CACHES),
    "annotations": _ignored("no template prints them"),
    "refusal": _refused("a message has content", ""),
    "function_call": _refused("`tool_calls` takes its place"),
    "audio": _refused(_TEXT_ONLY),
}
PART: Fields = {
    "type": _served("`text`"),
    "text": _served(""),
    "cache_control": MESSAGE["cache_control"],
    "prompt_cache_breakpoint": _ignored(_CACHES),
}
COMPLETION: Fields = {
    "prompt": _served(
        "a text, or a list of up to 32. It is continued as it stands: no chat template, and control tokens spelled in "
        "it are text. Refused: tokens, an empty text"
    ),
    **{
        name: CHAT[name]
        for name in ("model", "max_tokens", "temperature", "top_p", "seed", "stop", "n", "stream", "stream_options")
    },
    "user": _USER,
    "best_of": _refused("every answer is given", 1),
    "echo": _refused("an answer is what follows the prompt", False),
    "suffix": _refused("nothing is filled in between two texts", ""),
    "logprobs": _refused(_NO_LOGPROBS, False),
    **{name: CHAT[name] for name in ("logit_bias", "frequency_penalty", "presence_penalty", "repetition_penalty")},
}
OLLAMA: Fields = {
    "model": _served("`:latest` may be added to it"),
    "messages": _served("chat; see below"),
    "prompt": _served("generate"),
    "system": _served("generate"),
    "stream": _served("default `true`"),
    "format": _served('`"json"` or a schema, always enforced'),
    "tools": _served("chat: one function, which the answer is a call of. Refused: several"),
    "options": _served("see below"),
    "raw": _served("generate: the prompt is continued as it stands"),
    "keep_alive": _served("without prompt or messages 0 is answered with `unload`; workers keep their models"),
    "think": _refused("how a model thinks can't be set", False),
    "truncate": _refused("a prompt that is too long is an error, and never cut", False),
    "shift": _refused("an answer that is too long ends", False),
    "images": _refused(_TEXT_ONLY, []),
    "template": _refused("a model has its own", ""),
    "context": _refused("a conversation is its messages", []),
    "suffix": COMPLETION["suffix"],
    "logprobs": CHAT["logprobs"],
    "top_logprobs": CHAT["top_logprobs"],
    **dict.fromkeys(("width", "height", "steps"), _refused(_TEXT_ONLY)),
}
OLLAMA_MESSAGE: Fields = {
    "role": _served("`system`, `user`, `assistant`, `tool`; as for chat completions"),
    "content": _served("a text"),
    "tool_calls": MESSAGE["tool_calls"],
    "tool_name": _served("of a `tool`'s message"),
    "tool_call_id": _ignored("`tool_name` says which"),
    "thinking": MESSAGE["reasoning"],
    "images": _refused(_TEXT_ONLY, []),
}
OPTIONS: Fields = {
    "num_predict": _served("negative as if not given: the model's `max_tokens`, at most half of its context"),
    "temperature": CHAT["temperature"],
    "top_p": CHAT["top_p"],
    "top_k": _served("0: no limit"),
    "seed": _served("below 0: each request has another"),
    "stop": CHAT["stop"],
    "num_ctx": _served("the model's own at most, which the header `x-kvasir-num-ctx` says then; changes nothing"),
    "num_keep": _ignored("nothing is cut off"),
    "repeat_last_n": _ignored("without a penalty it says nothing"),
    "penalize_newline": _ignored("without a penalty it says nothing"),
    "mirostat_eta": _ignored("without `mirostat` it says nothing"),
    "mirostat_tau": _ignored("without `mirostat` it says nothing"),
    **dict.fromkeys(
        ("num_gpu", "main_gpu", "num_thread", "num_batch", "numa", "low_vram", "use_mmap", "use_mlock", "f16_kv"),
        _ignored(_WHERE),
    ),
    "repeat_penalty": _refused(_NO_PENALTIES, 1),
    "presence_penalty": CHAT["presence_penalty"],
    "frequency_penalty": CHAT["frequency_penalty"],
    **dict.fromkeys(("tfs_z", "typical_p"), _refused("engines have no such sampler", 1)),
    **dict.fromkeys(("min_p", "mirostat"), _refused("engines have no such sampler", 0)),
    **dict.fromkeys(("logits_all", "vocab_only", "embedding_only"), _refused("a model answers in text", False)),
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


def meaningful_fields(fields: Mapping[str, Any], table: Fields, prefix: str = "") -> dict[str, Any]:
    """The fields that say something, and those that are unknown. Raises ApiError for what is refused, by name."""
    meaningful = {}
    for name, value in fields.items():
        rule = table.get(name)
        if value is None or (rule and rule.says_nothing(value)):
            continue
        if rule and rule.kind == "refused":
            message = f"{prefix + name!r} is not served: {rule.words}"
            raise ApiError(400, message, f"{prefix}{name}", "unsupported_parameter")
        meaningful[name] = value
    return meaningful
