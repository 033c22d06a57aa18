"""Sketches of random keys and values, for those who compare sketches and load no engine."""

from dataclasses import replace
from typing import Any

import numpy as np

from engines.rope import Rope, plain
from engines.sketch import POSITIONS, WIDTH, Sketch
from messages.kv import KVLayout

LAYOUT = KVLayout(3, 2, 8, "f32")


def a_sketch(seed: int = 0, layout: KVLayout = LAYOUT, **changes: Any) -> Sketch:
    """Of random keys and values, whatever the seed."""
    numbers = np.random.default_rng(seed).standard_normal((layout.num_layers, 2, POSITIONS, WIDTH + 1))
    numbers[..., -1] = np.linalg.norm(numbers[..., :-1], axis=-1)
    ropes = (Rope(tuple(plain(10_000.0, 8)), 1.0, 10_000.0),)
    sketch = Sketch("mlx", "f32", "weights-1", "vocabulary-1", 2047, layout, ropes, numbers.astype(np.float32))
    return replace(sketch, **changes)


def off_by(sketch: Sketch, share: float, layer: int, part: int, places: slice = slice(None), **changes: Any) -> Sketch:
    """The same, K (0) or V (1) of a layer off by a share of its norm at some positions."""
    numbers = sketch.numbers.copy()
    numbers[layer, part, places, :-1] *= 1 + share
    numbers[layer, part, places, -1] *= 1 + share
    return replace(sketch, numbers=numbers, **changes)
