"""One answer of a llama.cpp server: the request, its stream of tokens, and a check that the server enforces schemas.

A model that thinks first (the Harmony format) answers in two requests on one slot. The first is unconstrained and ends
when the final channel opens. The second continues from the tokens in the slot, under the job's schema and stop words. A
grammar from the first token on would prevent thinking, and stop words would end it.
"""

import threading
import time
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from copy import copy
from dataclasses import dataclass, replace
from typing import Any

from engines.base import Answer, StreamedText
from engines.guidance import guidance_schema
from engines.harmony import FinalChannel, final_channel
from engines.llamacpp.http import LlamaServer, ServerRefused
from engines.llamacpp.prompt import LlamaPrompt
from engines.logprobs import TOP
from engines.remote import RANDOM_SEED
from messages.errors import EngineUnavailable, InvalidSchema
from messages.jobs import Sampling

_FINISH = {"eos": "stop", "word": "stop", "limit": "length"}
# Only the samplers that `Sampling` names, in llama.cpp's own order. Without this list, llama.cpp would add its defaults
# (min_p, penalties).
_SAMPLERS = ["top_k", "top_p", "temperature"]
_NO_JSON = "~"  # no JSON text begins with this character


@dataclass(frozen=True, slots=True)
class AnswerRequest:
    """A prompt to answer, whose KV cache may already be in the slot, and where to send the answer."""

    slot: int
    tokens: Sequence[int]
    sampling: Sampling
    on_text: Callable[[str], None] | None
    stop: threading.Event | None
    start: float  # when decode() was called (monotonic seconds)


class _StreamResult(StreamedText):
    """The part of a stream that has arrived."""

    count = 0  # number of sampled tokens; `tokens` can hold fewer ids, see `consume_event`
    evaluated_tokens = 0
    finish = ""

    def __init__(self, start: float, on_text: Callable[[str], None] | None = None) -> None:
        super().__init__(start, on_text)
        self.tokens: list[int] = []

    def consume_event(self, event: dict[str, Any]) -> Sequence[int]:
        """Add one event. Returns its token ids.

        While a character is incomplete the server sends no event, and afterwards it sends only the last id.
        """
        self.note_token()
        tokens: Sequence[int] = event.get("tokens", ())
        self.tokens += tokens
        self.count = int(event["tokens_predicted"])
        if "timings" in event:
            self.evaluated_tokens = int(event["timings"]["prompt_n"])
        if event["stop"]:
            self.finish = str(event.get("stop_type", ""))
        self.add(event["content"])
        return tokens


class Completions:
    """Makes a server generate answers. Callable from any thread; a slot belongs to one caller at a time."""

    def __init__(self, server: LlamaServer, prompt: LlamaPrompt, can_erase: bool) -> None:
        """`can_erase`: slots are cleared before use. Otherwise the server is told to ignore what is in the slot."""
        self._server = server
        self._prompt = prompt
        self._can_erase = can_erase
        self._enforced_schemas: set[str] = set()  # schemas that the server enforced in a test
        self._channel = final_channel(prompt)

    def generate(self, request: AnswerRequest) -> Answer:
        """Generate the answer. Models with channels think first."""
        if self._channel is not None:
            return self._think_and_answer(request, copy(self._channel))
        return _answer(self._read_stream(request, self._can_erase), request.sampling)

    def top_logprobs(self, slot: int, tokens: Sequence[int], stop: threading.Event | None) -> dict[int, float]:
        """See DecodeEngine. The server reports the softmax of its logits, independent of its samplers."""
        body = {
            "prompt": list(tokens),
            "n_predict": 1,
            "id_slot": slot,
            "cache_prompt": self._can_erase,
            "temperature": 0,
            "ignore_eos": True,  # if the answer ended at once, the server would report no probabilities
            "n_probs": TOP,
            "post_sampling_probs": False,
            "response_fields": ["completion_probabilities"],
        }
        (first,) = self._server.post("/completion", body, stop)["completion_probabilities"]
        return {int(candidate["id"]): float(candidate["logprob"]) for candidate in first["top_logprobs"]}

    def require_enforced(self, schema: str, slot: int, stop: threading.Event | None) -> None:
        """Raise InvalidSchema unless a test shows that the server enforces this schema.

        A build with LLGuidance ignores a schema that it can't use, and still answers with status 200. So it is asked
        for one token, with all weight on a token with which no JSON text begins. If it returns that token, it does not
        enforce the schema.
        """
        if not schema or schema in self._enforced_schemas:
            return
        forced_id = self._prompt.plain_ids(_NO_JSON)[0]
        body = {
            "prompt": [forced_id],
            "n_predict": 1,
            "id_slot": slot,
            "cache_prompt": False,
            "temperature": 0,
            "logit_bias": [[forced_id, 100.0]],
            "json_schema": guidance_schema(schema),
            "return_tokens": True,
            "response_fields": ["tokens"],
        }
        try:
            tokens = self._server.post("/completion", body, stop)["tokens"]
        except ServerRefused as error:
            raise InvalidSchema(f"the JSON schema can't be enforced: {error}") from None
        if forced_id in tokens:
            raise InvalidSchema("the JSON schema can't be enforced: the llama.cpp server ignored it in a test")
        self._enforced_schemas.add(schema)

    def _read_stream(self, request: AnswerRequest, cache_prompt: bool) -> _StreamResult:
        """The whole stream of one request."""
        result = _StreamResult(request.start, request.on_text)
        for event in self._events(_request(request) | {"cache_prompt": cache_prompt}, request.stop):
            result.consume_event(event)
        return result

    def _think_and_answer(self, request: AnswerRequest, channel: FinalChannel) -> Answer:
        """Answer in two requests. All sampled tokens count, but the text before the final channel is not shown."""
        thoughts = self._think(request, channel)
        tokens_left = request.sampling.max_tokens - thoughts.count
        if not channel.is_open or tokens_left < 1:
            return _thoughts_only(thoughts, request, channel)
        rest = replace(request.sampling, max_tokens=tokens_left)
        answer = _answer(
            self._read_stream(replace(request, tokens=[*request.tokens, *thoughts.tokens], sampling=rest), True), rest
        )
        return replace(
            answer,
            tokens=(*thoughts.tokens, *answer.tokens) if answer.tokens else (),
            completion_tokens=thoughts.count + answer.completion_tokens,
            evaluated_tokens=thoughts.evaluated_tokens,
            first_token_s=thoughts.first_token_s,
        )

    def _think(self, request: AnswerRequest, channel: FinalChannel) -> _StreamResult:
        """Generate freely until the final channel opens. Under a schema an answer can't end before its JSON begins."""
        free = replace(request, sampling=replace(request.sampling, json_schema="", stop=()))
        body = _request(free) | {"cache_prompt": self._can_erase, "ignore_eos": bool(request.sampling.json_schema)}
        body["timings_per_token"] = True  # requests the counters in each event, because the last event is never read
        result = _StreamResult(request.start)
        with closing(self._events(body, request.stop)) as events:  # closing the stream makes the server stop
            for event in events:
                held_back = int(event["tokens_predicted"]) - result.count > 1
                old_length = len(result.tokens)
                result.consume_event(event)
                # The event lacks the ids of tokens that the server had held back. So the event's text is tokenized
                # again, which gives nearly the same ids.
                if held_back and event["content"]:
                    result.tokens[old_length:] = self._prompt.plain_ids(event["content"])
                for token in result.tokens[old_length:]:
                    channel.observe(token)
                if channel.is_open:
                    break
        return result

    def _events(self, body: dict[str, Any], stop: threading.Event | None) -> Generator[dict[str, Any]]:
        """The stream's events up to its end, after which the server has finished with the slot."""
        is_complete = False
        with closing(self._server.stream("/completion", body, stop)) as stream:
            for event in stream:
                is_complete = is_complete or bool(event["stop"])
                yield event
        if not is_complete:
            raise EngineUnavailable("the llama.cpp server ended its answer without saying why")


def _request(request: AnswerRequest) -> dict[str, Any]:
    sampling = request.sampling
    body: dict[str, Any] = {
        "prompt": list(request.tokens),
        "id_slot": request.slot,
        "n_predict": sampling.max_tokens,
        "stream": True,
        "return_tokens": True,
        "samplers": _SAMPLERS,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        # At temperature 0 only the likeliest token is needed, and finding it is faster than weighing the whole
        # vocabulary.
        "top_k": sampling.top_k if sampling.temperature else 1,
        "seed": sampling.seed % RANDOM_SEED,
        "stop": [word for word in sampling.stop if word],
        "dynatemp_range": 0.0,
        "mirostat": 0,
    }
    if sampling.json_schema:
        body["json_schema"] = guidance_schema(sampling.json_schema)
    return body


def _answer(result: _StreamResult, sampling: Sampling) -> Answer:
    """The answer from a stream that has ended. Raises EngineUnavailable if the server ended it too early."""
    count, tokens, reason = result.count, result.tokens, result.finish
    if reason not in _FINISH or (reason == "limit" and count < sampling.max_tokens):
        raise EngineUnavailable(f"the llama.cpp server ended its answer early, after {count:,} tokens ({reason!r})")
    complete = len(tokens) == count
    if reason == "eos":
        count, tokens = count - 1, tokens[:-1]
    return Answer(
        text=result.text,
        tokens=tuple(tokens) if complete else (),
        completion_tokens=count,
        finish_reason=_FINISH[reason],
        evaluated_tokens=result.evaluated_tokens,
        first_token_s=result.first_token_s,
        seconds=time.monotonic() - result.start,
    )


def _thoughts_only(thoughts: _StreamResult, request: AnswerRequest, channel: FinalChannel) -> Answer:
    """An answer that never reached its final channel is shown whole, so that a reader sees what happened."""
    if channel.is_open:  # the model's thoughts have used up the answer's token limit
        thoughts.finish = "limit"
        return replace(_answer(thoughts, replace(request.sampling, max_tokens=thoughts.count)), text="")
    if thoughts.text and request.on_text:
        request.on_text(thoughts.text)
    return _answer(thoughts, request.sampling)
