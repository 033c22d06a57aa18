"""Ollama as an engine: it decodes through a server and transfers nothing, because its API has no requests for KV
caches.

`weights` is `http://host:11434/MODEL`, or `ollama:MODEL` for the server that OLLAMA_HOST names, else this machine's.
Its jobs pass the prefill stage as text, because Ollama renders the template and tokenizes. Options that Ollama would
set by itself (such as repeat_penalty 1.1) are set to values that don't change the model's distribution. So a job's
sampling means the same as in every other engine.

A prompt that doesn't fit is an error. Since 0.12.6 the request can tell this to the server. Older servers cut the
prompt to the context's length and still answer, which is detected by their count of prompt tokens.
"""

import json
import logging
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from urllib.parse import urlsplit

import ollama

from engines.base import Answer, Capabilities, EngineInfo, StreamedText
from engines.entry import EngineOptions, closed_on_failure
from engines.ollama.http import ModelMissing, OllamaServer
from engines.remote import (
    FINISH_REASONS,
    LETTERS_PER_TOKEN,
    RANDOM_SEED,
    TextOnly,
    break_known_marks,
    break_mark,
    check_json,
    context_of,
    new_sample,
)
from messages.errors import (
    ConfigError,
    EngineUnavailable,
    InvalidPrompt,
)
from messages.jobs import Part, Sampling

_log = logging.getLogger(__name__)

# Keeps the model loaded between jobs. By default Ollama would unload it after 5 minutes without a request.
KEEP_ALIVE = "60m"
_NEUTRAL = {"min_p": 0.0, "typical_p": 1.0, "repeat_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0}
# GGUF's token types "control" and "user-defined". Ollama recognises user-defined tokens in any text.
_MARKS = (3, 4)
_PRINTS_SYSTEM = re.compile(r"""\.System\b|"system"|\.Role\s*-?\}\}""")
_STOP_LINE = re.compile(r"^stop\s+(\".*\"|\S+)\s*$", re.MULTILINE)


def open_engine(options: EngineOptions) -> "OllamaEngine":
    """Find the server and the model, and have it loaded. Raises ConfigError, which says what to do."""
    host, model = parse_weights(options.weights)
    server = OllamaServer(host)
    with closed_on_failure(server):
        try:
            return OllamaEngine(server, model, _describe_model(server, model), options)
        except EngineUnavailable as error:
            reason = f"{error}; is it running there? (`ollama serve`, or another URL in the weights)"
            raise ConfigError(reason) from None


def parse_weights(weights: str) -> tuple[str, str]:
    """(URL of the server, "" for this machine's; model). Raises ConfigError."""
    if weights.startswith("ollama:"):
        host, model = "", weights.removeprefix("ollama:")
    else:
        parts = urlsplit(weights)
        host, model = f"{parts.scheme}://{parts.netloc}", parts.path.strip("/")
        if parts.scheme not in ("http", "https") or not parts.netloc:
            raise ConfigError(
                f"weights of the ollama engine look like 'http://127.0.0.1:11434/qwen3-coder:30b', not {weights!r:.100}"
            )
    if not model:
        raise ConfigError(
            f"{weights!r} names no model: write the model after the server, as in {host or 'ollama:'}/MODEL"
        )
    return host, model


def _describe_model(server: OllamaServer, model: str) -> ollama.ShowResponse:
    try:
        return server.show(model)
    except ModelMissing:
        model_names = ", ".join(server.models()) or "no model at all"
        raise ConfigError(
            f"Ollama at {server.host} has no model {model!r} (it has: {model_names}); run `ollama pull {model}` there"
        ) from None


class OllamaEngine(TextOnly[OllamaServer]):
    """Implements `DecodesText`. Its prefill half passes every job through."""

    def __init__(
        self, server: OllamaServer, model: str, description: ollama.ShowResponse, options: EngineOptions
    ) -> None:
        super().__init__(server, "Ollama", context_of("Ollama", model, _trained_context(description), options.context))
        self._model = model
        self._stops = model_stops(description.parameters or "")
        self._break_up = mark_breaker(description.modelinfo or {})
        self._drops_system = drops_system(description)
        self._letters_per_token = self._warm_up()
        self.info = EngineInfo(
            engine="ollama",
            device=self._device(),
            context=self._context,
            slots=options.slots,
            fingerprint="",
            tokenizer="",
            layout=None,
            capabilities=Capabilities.text_only(),
            chars_per_token=self._letters_per_token,
        )

    def decode_text(
        self,
        prompt: Sequence[Part],
        sampling: Sampling,
        on_text: Callable[[str], None] | None = None,
        stop: threading.Event | None = None,
    ) -> Answer:
        """See DecodesText. Also raises ContextExceeded for a prompt that was cut, which is known only at the end."""
        start = time.monotonic()
        if self._drops_system and any(part.role == "system" for part in prompt):
            raise InvalidPrompt(f"Ollama's chat template for {self._model} leaves out system messages")
        self._check_capacity(sampling)
        answer = StreamedText(start, on_text)
        last = None
        for last in self._server.chat(stop, **self._request(prompt, sampling)):
            if last.message.content or last.message.thinking:
                answer.note_token()
            answer.add(last.message.content or "")
        prompt_tokens, finish_reason = self._check_complete(prompt, sampling, last)
        if sampling.json_schema and finish_reason == "stop":
            check_json(answer.text, "Ollama")
        return Answer(
            text=answer.text,
            tokens=(),
            completion_tokens=int(last.eval_count or 0) if last else 0,
            finish_reason=finish_reason,
            evaluated_tokens=prompt_tokens,
            first_token_s=answer.first_token_s,
            seconds=time.monotonic() - start,
        )

    def _request(self, prompt: Sequence[Part], sampling: Sampling) -> dict[str, Any]:
        words = [word for word in sampling.stop if word]
        options: dict[str, Any] = _NEUTRAL | {
            "num_ctx": self._context,
            "num_predict": sampling.max_tokens,
            "temperature": sampling.temperature,
            "top_p": sampling.top_p,
            "top_k": sampling.top_k,
            "seed": sampling.seed % RANDOM_SEED,
        }
        if words:  # the request's stop words would replace the model's own, so both are sent
            options["stop"] = [*self._stops, *words]
        texts = [(message, self._break_up(message.text)) for message in self._messages(prompt)]
        request: dict[str, Any] = {"model": self._model, "options": options}
        if prompt[0].role == "raw":
            request |= {"prompt": texts[0][1], "raw": True}
        else:
            request["messages"] = [
                message.as_fields(text, json.loads(text) if message.is_call else None) | {"tool_name": message.function}
                for message, text in texts
            ]
        if sampling.json_schema:
            request["format"] = json.loads(sampling.json_schema)
        return request | {"keep_alive": KEEP_ALIVE}

    def _check_complete(
        self, prompt: Sequence[Part], sampling: Sampling, last: ollama.ChatResponse | None
    ) -> tuple[int, str]:
        """(prompt tokens, finish reason) of an answer to the whole prompt, from the stream's last event."""
        reason = str(last.done_reason) if last and last.done else "no end"
        if last is None or reason not in FINISH_REASONS:
            raise EngineUnavailable(f"Ollama ended its answer early ({reason}): was the model unloaded?")
        prompt_tokens = int(last.prompt_eval_count or 0)
        self._check_whole(prompt, sampling, prompt_tokens)
        return prompt_tokens, reason

    def _warm_up(self) -> float:
        """Have the model loaded with our context, and count a text. Returns letters per token."""
        text = new_sample()
        response = self._server.generate(
            model=self._model,
            prompt=text,
            raw=True,
            options=_NEUTRAL | {"num_ctx": self._context, "num_predict": 1, "temperature": 0},
            keep_alive=KEEP_ALIVE,
        )
        prompt_tokens = response.prompt_eval_count or 0
        return len(text) / prompt_tokens if prompt_tokens else LETTERS_PER_TOKEN

    def _device(self) -> str:
        """The device that Ollama reports for the model. Raises ConfigError if its context there differs."""
        name = _full_name(self._model)
        for entry in self._server.models_in_memory():
            if _full_name(str(entry.model or entry.name)) != name:
                continue
            if entry.context_length and entry.context_length < self._context:
                raise ConfigError(
                    f"Ollama loaded {name} with a context of {entry.context_length:,}, not {self._context:,}"
                )
            return _device_of(name, int(entry.size or 0), int(entry.size_vram or 0))
        return "unknown"


def model_stops(parameters: str) -> list[str]:
    """The stop words among a model's own parameters. `show` prints them as lines such as `stop "<|im_end|>"`."""
    return [json.loads(word) if word.startswith('"') else word for word in _STOP_LINE.findall(parameters)]


def drops_system(description: ollama.ShowResponse) -> bool:
    """Whether Ollama would silently leave out a system message, because the template prints only the user's.

    For a model with one of Ollama's own renderers the template says nothing about this.
    """
    template = description.template or ""
    return bool(template) and not _PRINTS_SYSTEM.search(template) and "RENDERER " not in (description.modelfile or "")


def mark_breaker(info: Mapping[str, Any]) -> Callable[[str], str]:
    """A function that breaks up every control token spelled in a text, because Ollama would treat it as one.

    It uses the model's vocabulary. If the server doesn't show that, it uses the form of such tokens in known model
    families.
    """
    tokens, kinds = (info.get(f"tokenizer.ggml.{name}") for name in ("tokens", "token_type"))
    if not isinstance(tokens, list) or not isinstance(kinds, list):
        return break_known_marks
    marks = {
        text for text, kind in zip(tokens, kinds, strict=False) if kind in _MARKS and len(text.strip("▁ \t\n")) > 1
    }
    lengths = sorted({len(mark) for mark in marks})
    starts = re.compile(f"[{re.escape(''.join(sorted({mark[0] for mark in marks})))}]" if marks else r"(?!)")

    def break_up(text: str) -> str:
        def break_if_mark(match: re.Match[str]) -> str:
            start = match.start()
            return break_mark(match) if any(text[start : start + length] in marks for length in lengths) else match[0]

        return starts.sub(break_if_mark, text)

    return break_up


def _device_of(name: str, size: int, on_gpu: int) -> str:
    if not on_gpu:
        return "cpu"
    if on_gpu < size:
        _log.warning("Ollama holds only %.0f%% of %s in GPU memory", 100 * on_gpu / size, name)
    return "gpu"


def _trained_context(description: ollama.ShowResponse) -> int:
    info = description.modelinfo or {}
    return int(info.get(f"{info.get('general.architecture')}.context_length") or 0)


def _full_name(model: str) -> str:
    """A model's name with its tag: `m` becomes `m:latest`."""
    return model if ":" in model.rpartition("/")[2] else f"{model}:latest"
