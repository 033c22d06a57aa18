"""Pieces that were lost, doubled, mixed or decoded again: what is passed on is the beginning of one answer."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gateway.continued import AnswerDiverged, AnswerText
from messages.jobs import TokenEvent


def pieces(text: str, delivery: str = "a", size: int = 3) -> list[TokenEvent]:
    cut = [text[start : start + size] for start in range(0, len(text), size)]
    return [TokenEvent("j", 1, delivery, index, piece) for index, piece in enumerate([*cut, ""])]


def test_in_order_each_piece_is_passed_on_at_once() -> None:
    text = AnswerText()
    assert [text.feed(event) for event in pieces("abcdefg")] == ["abc", "def", "g", ""]
    assert text.rest("abcdefg") == ""


def test_after_a_gap_all_is_held_back_and_comes_from_the_result() -> None:
    text = AnswerText()
    first, _lost, *others = pieces("abcdefghijk")
    assert [text.feed(event) for event in (first, *others)] == ["abc", "", "", ""]
    assert text.rest("abcdefghijk") == "defghijk"


def test_a_late_piece_closes_the_gap() -> None:
    text = AnswerText()
    first, second, third, _end = pieces("abcdefgh")
    assert [text.feed(event) for event in (first, third, second, second)] == ["abc", "", "defgh", ""]


def test_decoded_again_to_the_same_text_goes_on_without_a_repeat() -> None:
    text = AnswerText()
    for event in pieces("abcdefghi")[:2]:
        text.feed(event)
    again = [text.feed(event) for event in pieces("abcdefghi", "b", size=2)]
    assert "".join(again) == "ghi"
    assert text.rest("abcdefghi") == ""


def test_decoded_again_to_another_text_passes_on_nothing_and_says_so() -> None:
    text = AnswerText()
    for event in pieces("abcdefghi")[:2]:
        text.feed(event)
    assert [text.feed(event) for event in pieces("abcXefghi", "b")] == ["", "", "", ""]
    with pytest.raises(AnswerDiverged):
        text.rest("abcXefghi")


def test_a_slow_first_decode_may_still_be_the_one_that_counts() -> None:
    text = AnswerText()
    first = pieces("abcdefghi")
    text.feed(first[0])
    text.feed(pieces("abX", "b")[0])
    assert text.feed(first[1]) == "def"
    assert text.rest("abcdefghi") == "ghi"


@given(st.text(max_size=40), st.text(max_size=40), st.integers(0, 10_000))
def test_whatever_happens_nothing_is_repeated_left_out_or_glued(one: str, other: str, seed: int) -> None:
    source = random.Random(seed)
    events = [
        event
        for delivery, text in (("a", one), ("b", other), ("c", one))
        for event in pieces(text, delivery, source.randint(1, 5))
        if source.random() < 0.8
    ]
    source.shuffle(events)
    text, passed = AnswerText(), ""
    for event in events[: source.randint(0, len(events))]:
        passed += text.feed(event)

    assert one.startswith(passed) or other.startswith(passed)
    for result in (one, other):
        if result.startswith(passed):
            assert passed + text.rest(result) == result
        else:
            with pytest.raises(AnswerDiverged):
                text.rest(result)
