"""Sketches without an engine: which ids and positions, bytes that come from anybody, and who compares with whom."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from engines.base import EngineInfo
from engines.rope import Rope, plain
from engines.sketch import (
    TOKENS,
    Sketch,
    Sketches,
    compare,
    positions,
    prompt_ids,
    read_sketch,
    sketch_name,
)
from engines.sketching import compute_numbers, sketch_of
from messages.errors import KVTransferFailed
from messages.kv import Block, KVLayout, Window
from tests.support.sketches import LAYOUT, a_sketch, off_by

SLIDING = KVLayout(4, 2, 8, "f32", 64, (0, 2))


class Shelf:
    """A store of sketches."""

    def __init__(self, *sketches: Sketch) -> None:
        self.bodies = {sketch.name: sketch.body for sketch in sketches}
        self.asked = 0

    def put_sketch(self, name: str, body: bytes) -> None:
        self.bodies[name] = body

    def get_sketch(self, name: str) -> bytes | None:
        self.asked += 1
        return self.bodies.get(name)


def test_every_engine_gets_the_same_ids_for_the_same_vocabulary() -> None:
    assert prompt_ids(151_669, 2047)[:4] == (69384, 19211, 105847, 29132)  # for ever: other ids are another version
    assert prompt_ids(151_669, 100) == prompt_ids(151_669, 2047)[:100]
    assert prompt_ids(151_669, 10) != prompt_ids(151_670, 10)


@pytest.mark.parametrize("vocabulary", [259, 1536, 32_000, 262_144])
def test_ids_leave_out_both_ends_of_the_vocabulary_where_control_tokens_are(vocabulary: int) -> None:
    ids = prompt_ids(vocabulary, TOKENS)

    assert len(ids) == TOKENS
    assert vocabulary // 8 <= min(ids) <= max(ids) < vocabulary - vocabulary // 8
    assert len(set(ids)) > min(vocabulary // 2, 1900)


def test_positions_are_spread_over_the_prompt_and_over_what_a_window_keeps() -> None:
    assert positions(LAYOUT, 0, 2047) == [9 * k * k for k in range(15)] + [2046]
    assert positions(LAYOUT, 0, 511) == [0, 9, 36, 81, 144, 225, 324, 441, 510]
    assert len(positions(SLIDING, 0, 2047)) == 16
    assert (min(positions(SLIDING, 0, 2047)), max(positions(SLIDING, 0, 2047))) == (2047 - 63, 2046)
    assert positions(SLIDING, 0, 3) == [0, 1, 2]
    assert positions(SLIDING, 1, 2047) == positions(LAYOUT, 0, 2047)


def test_the_numbers_are_the_projections_and_norms_of_keys_and_values_at_their_positions() -> None:
    # Given an engine that hands out a known KV cache of 100 tokens
    layout, tokens = SLIDING, 100
    full, window = (np.random.default_rng(1).standard_normal((2, 2, n, 2, 8)).astype("<f4") for n in (tokens, 63))

    class Engine:
        def prefill(self, ids: Any, emit: Any) -> None:
            for start in range(0, tokens, 32):
                emit(Block(start, full[:, :, start : start + 32]))
            emit(Window(tokens, window))

    numbers = compute_numbers(Engine(), layout, range(tokens))  # type: ignore[arg-type]

    # Then norms are exact, and distances between any two rows nearly so
    for layer, data, first in ((1, full[0], 0), (3, full[1], 0), (0, window[0], 37), (2, window[1], 37)):
        places = positions(layout, layer, tokens)
        rows = data[:, [place - first for place in places]].reshape(2, len(places), 16)
        assert np.allclose(numbers[layer, :, : len(places), -1], np.linalg.norm(rows, axis=-1), rtol=1e-5)
        assert not numbers[layer, :, len(places) :].any()
        apart = np.linalg.norm(rows[:, :-1] - rows[:, 1:], axis=-1)
        small = np.linalg.norm(
            numbers[layer, :, : len(places) - 1, :-1] - numbers[layer, :, 1 : len(places), :-1], axis=-1
        )
        assert 0.8 < (small / apart).mean() < 1.2


def test_prompts_of_two_lengths_are_compared_where_both_were_looked_at() -> None:
    # Given two ends of one model, of which one has a short context
    layout, data = KVLayout(2, 2, 8, "f32"), np.random.default_rng(1).standard_normal((2, 2, 400, 2, 8)).astype("<f4")

    class Engine:
        def prefill(self, ids: Any, emit: Any) -> None:
            emit(Block(0, data[:, :, : len(ids)]))

    def of(tokens: int) -> Sketch:
        return a_sketch(layout=layout, tokens=tokens, numbers=compute_numbers(Engine(), layout, range(tokens)))  # type: ignore[arg-type]

    # Then they agree, and a difference is told by its position in both
    assert compare(of(400), of(100)).layers == ((0, 0, 1e-4), (0, 0, 1e-3))
    long = of(400)
    data[1, 1, 81:] *= 2
    assert "in layer 1, from position 81 on, V differs" in compare(of(100), long).problem


def test_a_sketch_goes_through_bytes_unchanged_and_is_named_by_them() -> None:
    made = a_sketch(layout=SLIDING)

    found = read_sketch(made.body, made.name)

    assert (found.body, found.name, found.layout, found.ropes) == (made.body, made.name, SLIDING, made.ropes)
    assert np.array_equal(found.numbers, made.numbers)
    assert a_sketch(1, layout=SLIDING).name != made.name


def test_bytes_from_anybody_are_refused_and_nothing_else_happens() -> None:
    good = a_sketch()
    with pytest.raises(KVTransferFailed, match="holds another sketch"):
        read_sketch(good.body, a_sketch(1).name)
    head, _, rest = good.body.partition(b"\n")
    damaged = [
        b"", b"\n", b"[]\n", b"null\n" + rest, b"{}\n" + rest, head, head + b"\n" + rest[:-4], b"\xff\n" + rest,
        head.replace(b'"v":1', b'"v":2') + b"\n" + rest, head.replace(b'"f32"', b'"q1"') + b"\n" + rest,
        head.replace(b'"num_layers":3', b'"num_layers":-3') + b"\n" + rest, b"[" * 100_000 + b"\n" + rest,
        head.replace(b'"tokens":2047', b'"tokens":"2047"') + b"\n" + rest, b"x" * (5 << 20),
        head.replace(b'"tokens":2047', b'"tokens":0') + b"\n" + rest, good.body[:-4] + b"\0\0\xc0\x7f",
        head.replace(b'"num_layers":3', b'"num_layers":3.0') + b"\n" + rest,
    ]  # fmt: skip
    for body in damaged:
        with pytest.raises(KVTransferFailed, match="sketch"):
            read_sketch(body, sketch_name(body))


def test_equal_numbers_agree_and_are_not_called_rounded() -> None:
    found = compare(a_sketch(), a_sketch())

    assert (found.problem, found.formats_differ) == ("", False)
    assert [(keys, values) for keys, values, _ in found.layers] == [(0, 0)] * 3


@pytest.mark.parametrize(
    ("rounding", "first", "later"), [("f16", 0.0015, 0.005), ("bf16", 0.01, 0.03), ("q8", 0.03, 0.1)]
)
def test_what_rounding_makes_is_accepted_and_three_times_that_is_not(rounding: str, first: float, later: float) -> None:
    ours = a_sketch()
    for layer, share in ((0, first), (1, later)):
        accepted = compare(ours, off_by(ours, share, layer, 1, rounding=rounding, weights="weights-2"))
        refused = compare(ours, off_by(ours, 3 * share, layer, 1, rounding=rounding, weights="weights-2"))
        assert (accepted.problem, accepted.formats_differ) == ("", True)
        assert f"in layer {layer}, from position 0 on, V differs" in refused.problem
        assert refused.problem.endswith("likely because they hold other weights")
        assert len(refused.layers) == 3


def test_the_same_file_is_rounded_alike_so_less_is_allowed() -> None:
    ours = a_sketch(rounding="q4")
    theirs = off_by(ours, 0.3, 0, 1)

    assert "rounding makes 5.00% at most" in compare(ours, theirs).problem
    assert compare(ours, replace(theirs, weights="weights-2")).problem == ""


def test_two_positions_of_sixteen_may_be_off_where_an_expert_was_chosen_otherwise() -> None:
    ours = a_sketch()

    assert compare(ours, off_by(ours, 0.5, 1, 0, slice(3, 5))).problem == ""
    assert "from position 81 on" in compare(ours, off_by(ours, 0.5, 1, 0, slice(3, 6))).problem


def test_nothing_that_is_no_number_is_accepted() -> None:
    ours = a_sketch()
    numbers = ours.numbers.copy()
    numbers[1, 0] = np.nan

    assert "in layer 1" in compare(ours, replace(ours, numbers=numbers)).problem


def test_other_words_shapes_lengths_and_ropes_are_told_before_numbers_are_looked_at() -> None:
    ours = a_sketch(layout=SLIDING)
    turned = (Rope(tuple(plain(500_000.0, 8)), 1.0, 500_000.0),)
    for change, reason in [
        ({"tokenizer": "vocabulary-2"}, "different tokenizers"),
        ({"layout": replace(SLIDING, window=32)}, "different shapes"),
        ({"ropes": turned}, "compute different keys, RoPE base 500,000 and 10,000"),
        ({"tokens": 255}, "give both the same context"),
    ]:
        assert reason in compare(ours, replace(ours, **change)).problem


def test_a_worker_compares_each_sketch_once_and_only_what_it_can_find() -> None:
    ours, alike, other = a_sketch(), a_sketch(engine="llamacpp"), a_sketch(1)
    shelf = Shelf(alike)
    sketches = Sketches(ours, shelf)
    sketches.publish()

    assert shelf.bodies[ours.name] == ours.body
    assert sketches.agreement(ours.name).problem == ""
    assert shelf.asked == 0
    for _ in range(2):
        assert sketches.agreement(alike.name).problem == ""
    assert shelf.asked == 1
    assert "is not in the store" in sketches.agreement(other.name).problem
    assert sketches.refusals == {}  # it may come yet
    shelf.put_sketch(other.name, other.body)
    assert "different KV caches" in sketches.agreement(other.name).problem
    assert sketches.refusals == {other.name: sketches.agreement(other.name).problem}
    shelf.put_sketch("5e7c40", other.body)
    assert "holds another sketch" in sketches.agreement("5e7c40").problem


def test_without_a_sketch_on_one_side_nothing_is_transferred_and_without_both_it_is() -> None:
    own = a_sketch()

    assert Sketches().agreement("").problem == ""
    assert "did not both leave a sketch" in Sketches().agreement(own.name).problem
    assert "did not both leave a sketch" in Sketches(own, Shelf()).agreement("").problem


def test_an_engine_that_tells_no_vocabulary_makes_none() -> None:
    class Engine:
        info = EngineInfo("simulated", "simulated", 512, 1, "f", "t", LAYOUT, None)  # type: ignore[arg-type]

    assert sketch_of(Engine()) is None  # type: ignore[arg-type]
