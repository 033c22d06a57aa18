"""Any server with OpenAI's chat completions API as an engine: text goes in and out, without KV caches.

`weights` is `http://HOST:PORT/v1/MODEL`: the server's base URL, and after `/v1/` the model by the server's own name.
Its jobs pass the prefill stage as text: the server renders the template and tokenizes.

Servers support different fields. At the start every field is sent once, and fields that the server refuses by name are
not sent again.
"""

import json
import logging
import re
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from engines.base import Answer, Capabilities, EngineInfo, StreamedText
from engines.entry import EngineOptions, closed_on_failure
from engines.openai.http import NoModelList, OpenAIServer, Outside, RequestRefused, outside, permanent_error
from engines.remote import FINISH_REASONS, RANDOM_SEED, TextOnly, break_known_marks, check_json, context_of, new_sample
from messages.errors import ConfigError, DeadLetter, EngineUnavailable, InvalidPrompt
from messages.jobs import Part, Sampling

_log = logging.getLogger(__name__)

_SHAPE = re.compile(r"(https?://[^/?#@\s]+(?:/[^?#\s]*?)?/v\d+)/(\S+)")
# Some servers refuse requests with these fields. The engine also works without them.
_OPTIONAL = ("response_format", "stream_options", "seed", "top_k", "min_p", "repetition_penalty")
_KEY_REFUSED = (401, 403)
_CONTEXT_FIELDS = ("max_model_len", "context_length", "max_context_length", "context_window")
_PROBE = {"type": "object", "properties": {"well": {"type": "boolean"}}, "required": ["well"]}
_KEY = "set KVASIR_API_KEY, or api_key_file in the model's table"


def open_engine(options: EngineOptions) -> "OpenAIEngine":
    """Find the server and the model, and test it. Raises ConfigError, which says what to do."""
    base, model = parse_weights(options.weights)
    server = OpenAIServer(base, options.api_key, options.allow_external)
    with closed_on_failure(server):
        try:
            return OpenAIEngine(server, model, find_model(server, model), options)
        except EngineUnavailable as error:
            raise startup_error(error, bool(options.api_key)) from None
        except DeadLetter as error:
            raise ConfigError(f"the server at {base} refused a test prompt of a few hundred tokens: {error}") from None


def look_up(options: EngineOptions) -> tuple[str, bool]:
    """(the host if it is outside private networks, else ""; whether the server lists the model, because some servers
    list none).

    Raises ConfigError if the server is not there, refuses the key, or has other models.
    """
    base, model = parse_weights(options.weights)
    server = OpenAIServer(base, options.api_key, options.allow_external)
    try:
        entry = find_model(server, model)
    except EngineUnavailable as error:
        raise startup_error(error, bool(options.api_key)) from None
    finally:
        server.close()
    return outside(base), bool(entry)


def parse_weights(weights: str) -> tuple[str, str]:
    """(base URL, model). Raises ConfigError."""
    match = _SHAPE.fullmatch(weights)
    if match is None:
        quotation = "what was given" if "@" in weights else f"{weights!r:.100}"
        raise ConfigError(
            f"for the openai engine, weights must be a URL such as 'http://127.0.0.1:8000/v1/MODEL', not {quotation}; "
            "put the model's name after /v1/"
        )
    return match[1], match[2]


def startup_error(error: EngineUnavailable, with_key: bool) -> ConfigError:
    """The error for an engine that can't start, with what to do about it."""
    if isinstance(error, Outside):
        return ConfigError(f"{error} in the model's table")
    if isinstance(error, RequestRefused) and error.status in _KEY_REFUSED:
        fix = "it does not take this API key" if with_key else f"it wants an API key: {_KEY}"
        return ConfigError(f"{error}; {fix}")
    if isinstance(error, RequestRefused):
        return ConfigError(str(error))
    return ConfigError(f"{error}; is it running there?" if "does not answer" in str(error) else str(error))


def find_model(server: OpenAIServer, model: str) -> dict[str, Any]:
    """The server's entry for a model, {} if it lists no models. Raises ConfigError if it lists only others."""
    try:
        models = server.models()
    except (NoModelList, RequestRefused) as error:
        if isinstance(error, RequestRefused) and error.status != 404:
            raise
        return {}
    for entry in models:
        if entry.get("id") == model:
            return entry
    model_names = ", ".join(sorted(str(entry.get("id")) for entry in models)) or "no model at all"
    raise ConfigError(f"the server at {server.host} has no model {model!r} (it has: {model_names:.400})")


class OpenAIEngine(TextOnly[OpenAIServer]):
    """Implements `DecodesText`. Its prefill half passes every job through."""

    def __init__(self, server: OpenAIServer, model: str, model_entry: dict[str, Any], options: EngineOptions) -> None:
        super().__init__(
            server, "the server", context_of("the server", model, _context_in(model_entry), options.context)
        )
        self._model = model
        self._refused_fields: set[str] = set()
        self._warm_up()
        self.info = EngineInfo(
            engine="openai",
            device="unknown",
            context=self._context,
            slots=options.slots,
            fingerprint="",
            tokenizer="",
            layout=None,
            capabilities=Capabilities.text_only(),
            chars_per_token=self._letters_per_token,
            outside=outside(server.host),
        )

    def decode_text(
        self,
        prompt: Sequence[Part],
        sampling: Sampling,
        on_text: Callable[[str], None] | None = None,
        stop: threading.Event | None = None,
    ) -> Answer:
        """See DecodesText. If the server is busy (429), waits as long as it asks. Counts that it does not report are
        0."""
        start = time.monotonic()
        self._check_capacity(sampling)
        reading = _AnswerReader(start, on_text)
        texts = [(message, break_known_marks(message.text)) for message in self._messages(prompt)]
        request = self._request([message.as_fields(text, text) for message, text in texts], sampling)
        try:
            for event in self._server.chat(request, stop):
                reading.consume_event(event)
        except RequestRefused as refusal:
            raise permanent_error(refusal) from refusal
        finish_reason = reading.finish_reason()
        self._check_whole(prompt, sampling, reading.prompt_tokens)
        if sampling.json_schema and finish_reason == "stop":
            check_json(reading.text, "the server")
        return Answer(
            text=reading.text,
            tokens=(),
            completion_tokens=reading.completion_tokens,
            finish_reason=finish_reason,
            evaluated_tokens=reading.prompt_tokens,
            first_token_s=reading.first_token_s or time.monotonic() - start,
            seconds=time.monotonic() - start,
        )

    def _request(self, messages: list[dict[str, Any]], sampling: Sampling) -> dict[str, Any]:
        is_raw = messages[0]["role"] == "raw"
        request: dict[str, Any] = {
            "model": self._model,
            **({"prompt": messages[0]["content"]} if is_raw else {"messages": messages}),
            "stream": True,
            "stream_options": {"include_usage": True},
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "seed": sampling.seed % RANDOM_SEED,
            "min_p": 0.0,  # set explicitly, because servers differ in their defaults for min_p and repetition_penalty
            "repetition_penalty": 1.0,
        }
        if words := [word for word in sampling.stop if word]:
            request["stop"] = words
        if sampling.json_schema:
            schema = {"name": "answer", "schema": json.loads(sampling.json_schema), "strict": True}
            request["response_format"] = {"type": "json_schema", "json_schema": schema}
        return {name: value for name, value in request.items() if name not in self._refused_fields}

    def _warm_up(self) -> None:
        """Count a text (letters per token), and see which fields the server refuses."""
        text = new_sample()
        sampling = Sampling(max_tokens=1, temperature=0, json_schema=json.dumps(_PROBE))
        while True:
            reading = _AnswerReader(time.monotonic(), None)
            request = self._request([{"role": "user", "content": text}], sampling)
            try:
                for event in self._server.chat(request):
                    reading.consume_event(event)
            except RequestRefused as refusal:
                self._drop_field(refusal, request)
                continue
            if reading.prompt_tokens:
                self._letters_per_token = len(text) / reading.prompt_tokens
            return

    def _drop_field(self, refusal: RequestRefused, request: dict[str, Any]) -> None:
        """Stop sending the field that a refusal names. Raises the refusal if it names none."""
        refusal_text = f"{refusal.param} {refusal.message}"
        field = next((name for name in _OPTIONAL if name in request and name in refusal_text), "")
        if refusal.status not in (400, 422) or not field:
            raise refusal
        _log.warning(
            "the server at %s refuses %s, which is not sent: %.200s", self._server.host, field, refusal.message
        )
        self._refused_fields.add(field)


class _AnswerReader(StreamedText):
    """Reads an answer from the stream's events."""

    prompt_tokens = 0
    completion_tokens = 0
    _reason = ""

    def consume_event(self, event: dict[str, Any]) -> None:
        """Add one event. Raises EngineUnavailable for one of another shape."""
        try:
            if usage := event.get("usage"):
                self.prompt_tokens = int(usage.get("prompt_tokens") or 0)
                self.completion_tokens = int(usage.get("completion_tokens") or 0)
            choices = [choice for choice in event.get("choices") or () if choice.get("index", 0) == 0]
            self._reason = next(
                (choice["finish_reason"] for choice in choices if choice.get("finish_reason")), self._reason
            )
            deltas = [choice.get("delta") or {"content": choice.get("text")} for choice in choices]
            piece = "".join([delta.get("content") or "" for delta in deltas])
            has_thoughts = any(delta.get("reasoning_content") or delta.get("reasoning") for delta in deltas)
        except (AttributeError, TypeError, ValueError):
            raise EngineUnavailable(f"the server sent an event of an unknown form: {json.dumps(event):.80}") from None
        if piece or has_thoughts:
            self.note_token()
        self.add(piece)

    def finish_reason(self) -> str:
        """The finish reason. Raises EngineUnavailable if the answer was cut off, and InvalidPrompt if it was
        withheld."""
        if self._reason == "content_filter":
            raise InvalidPrompt("the server withheld its answer (content_filter)")
        if self._reason not in FINISH_REASONS:
            raise EngineUnavailable(f"the server ended its answer early ({self._reason or 'no finish reason'})")
        return self._reason


def _context_in(model_entry: dict[str, Any]) -> int:
    """The context in tokens that the server reports (vLLM, SGLang, llama.cpp and others); 0 if it reports none."""
    meta = model_entry.get("meta")
    lengths = [model_entry.get(name) for name in _CONTEXT_FIELDS] + [meta.get("n_ctx") if isinstance(meta, dict) else 0]
    return next((value for value in lengths if isinstance(value, int) and value > 0), 0)
