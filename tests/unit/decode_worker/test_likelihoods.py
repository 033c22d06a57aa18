"""The shares of a value's alternatives, from a model that writes letter by letter and whose expectations are known."""

import json
import math
import threading
from collections.abc import Mapping, Sequence
from typing import Any, cast

import pytest

from decode_worker.likelihoods import value_likelihoods
from engines.base import DecodeEngine
from messages.errors import Cancelled, EngineUnavailable
from messages.jobs import Part, PrefillJob, Sampling

QUESTION = "How many?"


class Letters:
    """A token is a letter. What it expects after an answer's beginning is said; elsewhere it expects a blank."""

    def __init__(self, expected: Mapping[str, Mapping[str, float]], error: Exception | None = None) -> None:
        self.expected = expected
        self.error = error
        self.passes = 0

    def text_of(self, tokens: Sequence[int]) -> str:
        return "".join(map(chr, tokens))

    def top_logprobs(self, tokens: Sequence[int], _cache: object, _stop: object) -> dict[int, float]:
        self.passes += 1
        if self.error:
            raise self.error
        answer = self.text_of(tokens).removeprefix(QUESTION)
        return {ord(letter): math.log(share) for letter, share in self.expected.get(answer, {" ": 1.0}).items()}


def asking(sampling: Sampling) -> PrefillJob:
    return PrefillJob("j", "b", "i", "m", (Part("user", QUESTION),), sampling, tokens=tuple(map(ord, QUESTION)))


def shares(model: Any, values: list[Any], answer: str, tokens: Sequence[int] | None = None) -> tuple[float, ...]:
    schema = {"type": "object", "properties": {"evidence": {"type": "string"}, "points": {"enum": values}}}
    ask = asking(Sampling(9, json_schema=json.dumps(schema)))
    tokens = [ord(letter) for letter in answer] if tokens is None else tokens
    return value_likelihoods(cast(DecodeEngine, model), ask, None, answer, tokens, threading.Event())


def spelt(start: str, *words: str) -> dict[str, dict[str, float]]:
    """After its first letter each word goes on surely."""
    return {f'{start}"{word[:at]}': {(word + '"')[at]: 1.0} for word in words for at in range(1, len(word) + 1)}


def test_the_shares_are_those_of_the_steps_alone_and_cost_one_pass():
    # Given a model that would rather have written something else, half of the time
    model = Letters({'{"points": ': {"n": 0.5, "2": 0.4, "1": 0.08, "0": 0.02}})

    assert shares(model, [0, 1, 2], '{"points": 2}') == (0.04, 0.16, 0.8)
    assert model.passes == 1


def test_a_number_that_begins_like_another_is_told_from_it_by_what_follows():
    start = '{"points": '
    expected = {
        start: {"1": 0.8, "5": 0.2},
        start + "1": {"0": 0.5, ".": 0.25, ",": 0.25},
        start + "1.": {"5": 1.0},
        start + "10": {"}": 1.0},
    }

    assert shares(Letters(expected), [1, 1.5, 5, 10], '{"points": 1, "x": 3}') == (0.2, 0.2, 0.2, 0.4)


def test_words_are_told_apart_and_a_text_that_names_the_property_is_not_its_place():
    quoting = '{"evidence": "\\"points\\": 2", "points": '
    expected = {quoting: {'"': 1.0}, quoting + '"': {"y": 0.75, "n": 0.25}, **spelt(quoting, "yes", "no")}

    assert shares(Letters(expected), ["no", "yes"], quoting + '"no"}') == (0.25, 0.75)


def test_the_value_is_found_within_the_criterion_that_the_answer_names():
    # Given a criterion that is called as the property is, and evidence that quotes both
    start = '{"points": {"evidence": "\\"points\\": 9", "points": '
    said = {"type": "object", "properties": {"evidence": {"type": "string"}, "points": {"enum": [0, 1]}}}
    schema = json.dumps({"type": "object", "properties": {"points": said}})
    model = cast(DecodeEngine, Letters({start: {"1": 0.75, "0": 0.25}}))
    ask = asking(Sampling(9, json_schema=schema))
    answer = start + "1}}"

    found = value_likelihoods(model, ask, None, answer, [ord(letter) for letter in answer], threading.Event())

    assert found == (0.25, 0.75)


def test_nothing_is_said_where_the_model_expected_none_of_the_values():
    assert shares(Letters({'{"points": ': {"n": 0.995, "1": 0.005}}), [0, 1], '{"points": 1}') == ()


@pytest.mark.parametrize(
    ("answer", "tokens"),
    [('{"evidence": "cut o', None), ("", ()), ('{"points": 1}', ()), ('{"points": 1}', [ord("x")])],
)
def test_an_answer_without_its_value_or_without_its_ids_has_no_shares(answer, tokens):
    model = Letters({'{"points": ': {"1": 1.0}})
    assert shares(model, [0, 1], answer, tokens) == ()
    assert model.passes == 0


def test_an_engine_that_fails_costs_the_shares_and_not_the_answer_but_a_cancelled_one_is_cancelled():
    assert shares(Letters({}, EngineUnavailable("gone")), [0, 1], '{"points": 1}') == ()
    with pytest.raises(Cancelled):
        shares(Letters({}, Cancelled("stopped")), [0, 1], '{"points": 1}')


def test_a_model_that_never_comes_to_a_value_is_not_asked_for_ever():
    model = Letters({})  # blanks, and nothing else
    assert shares(model, [0, 1], '{"points": 1}') == ()
    assert model.passes == 1  # a blank begins no value
