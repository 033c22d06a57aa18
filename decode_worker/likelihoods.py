"""How likely a model finds each value that an answer might have had, given what it wrote before it.

An answer under a schema holds the one value that was drawn. What the model expected in its place is read from one
forward pass over the prompt and the answer up to there: raw probabilities, at temperature 1 and without the schema.
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

_PASSES = 8  # for one value: a number may be several tokens, and each way of writing it is looked at by itself
_NEGLIGIBLE = math.log(1e-3)  # ways that are less likely are not followed
_MIN_TOTAL = 0.01  # share of all probability; if the values have less together, the model expected something else there
_DIGITS = 4


def value_likelihoods(
    engine: DecodeEngine, ask: Ask, cache: KVCache | None, answer: str, tokens: Sequence[int], stop: threading.Event
) -> tuple[float, ...]:
    """The share of each value of the schema's first `enum`, in its order; together 1.

    Args:
        cache: as for `decode`.
        answer: the text, and `tokens` as they were sampled.

    () where there is no enum, the engine tells no ids or can't read them, or the model expected none of the values.
    An error of the engine gives () too: an answer that is there must not be lost for this. Raises Cancelled.
    """
    enum = _enum(json.loads(ask.sampling.json_schema or "{}"))
    if enum is None or not tokens or not hasattr(engine, "text_of"):  # isinstance would ask just this, and not quickly
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
    """The names that lead to the first property that is one of several values, and how JSON writes these."""
    properties = schema.get("properties") if isinstance(schema, dict) else None
    for name, value in properties.items() if isinstance(properties, dict) else ():
        if isinstance(value, dict) and isinstance(value.get("enum"), list):
            return (name,), [json.dumps(member) for member in value["enum"]]
        if within := _enum(value):
            return (name, *within[0]), within[1]
    return None


@dataclass(frozen=True, slots=True)
class _Place:
    """Where a value begins: the ids before it, and the text that the next one may share with it."""

    preceding_ids: tuple[int, ...]
    lead: str


def _place(engine: Detokenizes, path: Sequence[str], answer: str, tokens: Sequence[int]) -> _Place | None:
    # A quotation mark within a text has a backslash before it.
    names = [rf"(?<!\\){re.escape(json.dumps(name))}\s*:\s*" for name in path]
    match = re.search("(?s:.*?)".join(names), answer)
    whole = engine.text_of(tokens)
    if match is None or not whole.endswith(answer):  # what a hidden channel holds comes first
        return None
    start = len(whole) - len(answer) + match.end()
    # The longest beginning of the ids whose text ends there or sooner.
    low = bisect_right(range(1, len(tokens) + 1), start, key=lambda count: len(engine.text_of(tokens[:count])))
    text_before = engine.text_of(tokens[:low])
    return _Place(tuple(tokens[:low]), whole[len(text_before) : start]) if whole.startswith(text_before) else None


class _Expected:
    """The model's next-token expectations after a place, followed until the values can be told apart."""

    def __init__(self, engine: Any, ask: Ask, cache: KVCache | None, stop: threading.Event) -> None:
        self._engine = engine
        self._ask = ask
        self._cache = cache
        self._stop = stop

    def shares(self, place: _Place, values: Sequence[str]) -> tuple[float, ...]:
        """Each value's share of all probability."""
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
        """Each likely token after this way: how likely it is, the way to it, and what has been written then."""
        start = len(self._engine.text_of(place.preceding_ids))
        tokens = [*self._ask.tokens, *place.preceding_ids, *way]
        for id, token_logprob in self._engine.top_logprobs(tokens, self._cache, self._stop).items():
            if logprob + token_logprob > _NEGLIGIBLE:
                longer = (*way, id)
                yield logprob + token_logprob, longer, self._engine.text_of([*place.preceding_ids, *longer])[start:]


def _value_of(continuation: str, texts: Sequence[str]) -> str:
    """The value that is written out; "" if none is, or it may still become another: 1 is also how 10 begins."""
    for text in texts:
        rest = continuation[len(text) :]
        if continuation.startswith(text) and not rest[:1].isdigit() and rest[:1] != ".":
            longer = any(candidate.startswith(text) for candidate in texts if candidate != text)
            return text if rest or not longer else ""
    return ""
