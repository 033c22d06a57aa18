"""How likely the model finds each possible value in an answer, given what it wrote before that value.

An answer under a schema contains only the value that was sampled. What the model expected in its place is read from a
forward pass over the prompt and the answer up to there. These are raw probabilities, at temperature 1 and without the
schema.
"""

import json
import logging
import math
import re
import threading
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, cast

from engines.base import DecodeEngine, Detokenizes
from messages.errors import Cancelled, KvasirError
from messages.jobs import Ask
from messages.kv import KVCache

log = logging.getLogger(__name__)

# The maximum number of forward passes for one value. A value such as 12.5 can be several tokens, and can be split into
# tokens in more than one way. Each token needs a pass.
_PASSES = 8
# Continuations whose log-probability is below this are not followed.
_NEGLIGIBLE = math.log(1e-3)
# If the probabilities of all allowed values add up to less than this, the model expected none of them.
_MIN_TOTAL = 0.01
_DIGITS = 4


def value_likelihoods(
    engine: DecodeEngine, ask: Ask, cache: KVCache | None, answer: str, tokens: Sequence[int], stop: threading.Event
) -> tuple[float, ...]:
    """Return the probability share of each value of the schema's first `enum`, in its order. They add up to 1.

    Args:
        cache: as for `decode`.
        answer: the text of the answer.
        tokens: the answer's tokens, as sampled.

    Returns () if there is no enum, if the engine gives no token ids or can't detokenize them, or if the model expected
    none of the values. It also returns () after an error of the engine, since an existing answer must not be lost for
    this. Raises Cancelled.
    """
    enum = _enum(json.loads(ask.sampling.json_schema or "{}"))
    # `hasattr` makes the same check as `isinstance` with a protocol, but is faster.
    if enum is None or not tokens or not hasattr(engine, "text_of"):
        return ()
    path, values = enum
    try:
        place = _place(cast(Detokenizes, engine), path, answer, tokens)
        return _Expected(engine, ask, cache, stop).shares(place, values) if place else ()
    except Cancelled:
        raise
    except KvasirError as error:
        log.info("no likelihoods of %r: %s", path[-1], error)
        return ()


def _enum(schema: Any) -> tuple[tuple[str, ...], list[str]] | None:
    """Return the names that lead to the first property with an enum, and the enum's values as JSON texts."""
    properties = schema.get("properties") if isinstance(schema, dict) else None
    for name, value in properties.items() if isinstance(properties, dict) else ():
        if isinstance(value, dict) and isinstance(value.get("enum"), list):
            return (name,), [json.dumps(member) for member in value["enum"]]
        if within := _enum(value):
            return (name, *within[0]), within[1]
    return None


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a value begins: the ids before it, and the text before it that belongs to the same token."""

    preceding_ids: tuple[int, ...]
    lead: str


def _place(engine: Detokenizes, path: Sequence[str], answer: str, tokens: Sequence[int]) -> _Place | None:
    # A quotation mark inside a JSON string has a backslash before it. The lookbehind skips such marks.
    names = [rf"(?<!\\){re.escape(json.dumps(name))}\s*:\s*" for name in path]
    match = re.search("(?s:.*?)".join(names), answer)
    whole = engine.text_of(tokens)
    # The text can begin with a hidden channel, so only its end must be equal to the answer.
    if match is None or not whole.endswith(answer):
        return None
    start = len(whole) - len(answer) + match.end()
    # Count the tokens that end before the value begins.
    low = bisect_right(range(1, len(tokens) + 1), start, key=lambda count: len(engine.text_of(tokens[:count])))
    text_before = engine.text_of(tokens[:low])
    return _Place(tuple(tokens[:low]), whole[len(text_before) : start]) if whole.startswith(text_before) else None


class _Expected:
    """The model's expectations for the tokens after a place, followed until the values can be told apart."""

    def __init__(self, engine: Any, ask: Ask, cache: KVCache | None, stop: threading.Event) -> None:
        self._engine = engine
        self._ask = ask
        self._cache = cache
        self._stop = stop

    def shares(self, place: _Place, values: Sequence[str]) -> tuple[float, ...]:
        """Return each value's share of the probability of all values."""
        texts = [place.lead + value for value in values]
        probabilities = dict.fromkeys(texts, 0.0)
        open_ways: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
        for _ in range(_PASSES):
            if not open_ways:
                break
            likely = max(open_ways)
            open_ways.remove(likely)
            for logprob, way, continuation in self._next(place, *likely):
                value = _value_of(continuation, texts)
                if value:
                    probabilities[value] += math.exp(logprob)
                elif any(text.startswith(continuation) for text in texts):
                    open_ways.append((logprob, way))
        total = sum(probabilities.values())
        return tuple(round(probabilities[text] / total, _DIGITS) for text in texts) if total >= _MIN_TOTAL else ()

    def _next(
        self, place: _Place, logprob: float, way: tuple[int, ...]
    ) -> Iterator[tuple[float, tuple[int, ...], str]]:
        """Yield each likely token after these tokens: its log probability, the tokens with it, and their text."""
        start = len(self._engine.text_of(place.preceding_ids))
        tokens = [*self._ask.tokens, *place.preceding_ids, *way]
        for id, token_logprob in self._engine.top_logprobs(tokens, self._cache, self._stop).items():
            if logprob + token_logprob > _NEGLIGIBLE:
                longer = (*way, id)
                yield logprob + token_logprob, longer, self._engine.text_of([*place.preceding_ids, *longer])[start:]


def _value_of(continuation: str, texts: Sequence[str]) -> str:
    """Return the value that is written out; "" if none is, or if it may become another one, as 1 may become 10."""
    for text in texts:
        rest = continuation[len(text) :]
        if continuation.startswith(text) and not rest[:1].isdigit() and rest[:1] != ".":
            longer = any(candidate.startswith(text) for candidate in texts if candidate != text)
            return text if rest or not longer else ""
    return ""
