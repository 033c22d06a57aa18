"""Makes grading/attacks/attacks.weights from the texts beside it: `python -m examples.attacks.train`.

Logistic regression by stochastic gradient descent, half a minute in NumPy: the mean of four, each with copies and an
order of its own, which flags half as many harmless texts as one does. The seeds are fixed, and the same machine makes
the same bytes; another may round a few weights differently.
"""

import json
import random
import re
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

import grading
from examples.attacks.corpus import Text, read
from grading.attacks.detection import split_sentences
from grading.attacks.disguises import plain
from grading.attacks.scorer import (
    BUCKETS,
    SHORT,
    WEIGHTS,
    Floats,
    Integers,
    ScorerWeights,
    features_in,
    meaning,
    meaning_count,
    pair_worth,
    word_list,
    words_in,
)

EPOCHS = 4
RATE = 0.8
TRAININGS = 4
THRESHOLD = 1.4  # above even chances
DROPPED = 0.2  # of the words, in copies: what is left still says what it says
REWORDED = 0.5  # of the words that the list has, in copies: another word for the same, in whatever language
UNSPACED = 0.15
_NO_SPACES = {"ja", "zh"}


def flat(text: str) -> str:
    """The text as the scorer reads it."""
    return " ".join(plain(sentence) for sentence in split_sentences(text))


def samples(texts: Sequence[Text], seed: int) -> list[tuple[str, bool]]:
    """Each text, copies with words left out, with other words or without spaces, and harmless neighbours as one."""
    draw = random.Random(seed)
    read_as = [(flat(text.text), text) for text in texts]
    made = []
    for place, (line, text) in enumerate(read_as):
        copies = 0 if text.language == "code" else 2
        made += [(line, text.attack), *((_thinned(line, draw), text.attack) for _ in range(copies))]
        made += [(_reworded(line, draw), text.attack) for _ in range(copies)]
        if not text.attack:
            together = read_as[place : place + draw.choice((2, 3))]
            made.append((" ".join(line for line, other in together if not other.attack), False))
        if draw.random() < UNSPACED and text.language not in _NO_SPACES:
            made.append(("".join(line.split()), text.attack))
    return [(line, attack) for line, attack in made if line]


def _thinned(line: str, draw: random.Random) -> str:
    space = " " if " " in line else ""
    words = line.split(" ") if space else list(line)
    return space.join(word for word in words if draw.random() > DROPPED)


def _reworded(line: str, draw: random.Random) -> str:
    def other(match: re.Match[str]) -> str:
        same = _same_meaning().get(meaning(match[0]))
        return draw.choice(same) if same and draw.random() < REWORDED else match[0]

    return word_list()[1].sub(other, line)


@cache
def _same_meaning() -> dict[int, list[str]]:
    same: dict[int, list[str]] = {}
    for word, number in word_list()[0].items():
        same.setdefault(number, []).append(word)
    return same


def train(texts: Sequence[Text], seed: int = 0, trainings: int = TRAININGS) -> ScorerWeights:
    """The table for these texts, the mean of so many trainings."""
    each = [_trained(texts, seed * TRAININGS + number) for number in range(trainings)]
    weights = np.mean([weights for weights, _ in each], axis=0)
    return ScorerWeights(weights.astype(np.float32), sum(bias for _, bias in each) / trainings - THRESHOLD)


def _trained(texts: Sequence[Text], seed: int) -> tuple[npt.NDArray[np.float64], float]:
    """Weights and bias."""
    made = [(buckets(line), attack) for line, attack in samples(texts, seed)]
    weights, squares = np.zeros(table_size()), np.full(table_size(), 1e-2)
    bias, bias_square = 0.0, 1e-2
    attacks = sum(attack for _, attack in made)
    heavier = (len(made) - attacks) / attacks
    draw = random.Random(seed + 1)
    for _ in range(EPOCHS):
        draw.shuffle(made)
        for (where, values), attack in made:
            likely = 1 / (1 + np.exp(-(float(weights[where] @ values) + bias)))
            error = (likely - attack) * (heavier if attack else 1.0)
            slopes = error * values
            squares[where] += slopes * slopes
            weights[where] -= RATE * slopes / np.sqrt(squares[where])
            bias_square += error * error
            bias -= RATE * error / np.sqrt(bias_square)
    return weights, bias


def table_size() -> int:
    """How many weights a table has: one for each bucket of n-grams, and one for each two meanings."""
    return BUCKETS + meaning_count() ** 2


def buckets(text: str) -> tuple[Integers, Floats]:
    """The places in a table of what a whole text holds, each once, and what each is worth to its score."""
    starts, stems = words_in(text)
    features = list(features_in(text, starts, stems))
    counts = np.concatenate([np.full(len(feature.buckets), feature.counts) for feature in features])
    grams, inverse = np.unique(np.concatenate([feature.buckets for feature in features]), return_inverse=True)
    present_meanings = np.unique(stems[stems < meaning_count()]).astype(np.int64)
    first, second = np.triu_indices(len(present_meanings), 1)
    pairs = BUCKETS + present_meanings[first] * meaning_count() + present_meanings[second]
    worth = np.bincount(inverse, counts) / np.sqrt(SHORT + (counts * counts).sum())
    return np.append(grams, pairs), np.append(worth, np.full(len(pairs), pair_worth(len(pairs))))


def packed(table: ScorerWeights) -> bytes:
    """The file: a line of JSON, then a byte for each weight."""
    step = float(np.abs(table.weights).max()) / 127
    numbers = {"step": step, "bias": table.bias}
    rounded = np.round(table.weights / step).astype(np.int8)
    return json.dumps(numbers).encode() + b"\n" + rounded.tobytes()


if __name__ == "__main__":
    path = Path(grading.__file__).parent / "attacks" / WEIGHTS
    path.write_bytes(packed(train(read("train"))))
    print(f"{path}: {path.stat().st_size:,} bytes")
