"""Scores how much a text reads as if it addressed the grader: a linear model over n-grams of characters and words.

The text is read once. Every n-gram has a weight in a small hashed table. Running sums over these weights give the score
of any passage in constant time, so scoring all sentences and short runs costs no more than reading the text. Meanings
of words (`attacks.words`) have separate weights: two meanings in one passage reveal an attack of an unknown kind better
than its spelling does, in any language and at any distance. `examples/attacks/train.py` makes the table.
"""

import json
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from importlib import resources
from zlib import crc32

import numpy as np
import numpy.typing as npt

from grading.attacks.disguises import plain

BITS = 17
BUCKETS = 1 << BITS
_ODD = tuple(map(np.uint64, (0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93, 0xC2B2AE3D27D4EB4F, 0x165667B19E3779F9)))
WEIGHTS = "attacks.weights"
GRAMS = (3, 4)
WORD_WEIGHT = 4.0
# This number makes a score's divisor larger. Without it, one or two words could have an extreme score.
SHORT = 800.0
# The weight of pairs of meanings, relative to n-grams. FEW_PAIRS lowers this weight if a passage has few pairs.
PAIR_WEIGHT, FEW_PAIRS = 0.5, 10.0
NEAR = (0, 1, 2, 3)  # distances between the words of a pair, in words; 0 means a single word
_CJK = "\u3040-\u30ff\u3400-\u9fff"
_STEM = 5
_ARTICLE = re.compile("^(?:و|ف)?(?:ال|بال|لل)?(?=..)")
WORDS = "attacks.words"

Floats = npt.NDArray[np.float32]
Integers = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class ScorerWeights:
    """The weights of hashed n-grams and of pairs of meanings, and the bias. A score above 0 is worth a look."""

    weights: Floats
    bias: float


@cache
def table() -> ScorerWeights:
    """Read the table in the package. It is a line of JSON, followed by one byte for each weight."""
    head, _, body = resources.files("grading.attacks").joinpath(WEIGHTS).read_bytes().partition(b"\n")
    numbers = json.loads(head)
    weights = np.frombuffer(body, np.int8).astype(np.float32) * np.float32(numbers["step"])
    return ScorerWeights(weights, numbers["bias"])


@dataclass(frozen=True, slots=True)
class Features:
    """One kind of feature: where each starts, its bucket, how far it reaches, and its weight."""

    starts: Integers
    buckets: Integers
    reach: int  # distance from the feature's start to its end, in characters or in words
    counts: float


def words_in(text: str) -> tuple[Integers, npt.NDArray[np.uint64]]:
    """Return the position of each word in a text, and a number for its meaning, or for its first letters."""
    occurrences = [(match.start(), meaning(match[0])) for match in word_list()[1].finditer(text)]
    return np.array([start for start, _ in occurrences], np.int64), np.array(
        [stem for _, stem in occurrences], np.uint64
    )


def features_in(text: str, starts: Integers, stems: npt.NDArray[np.uint64]) -> Iterator[Features]:
    """Yield all features of a text: n-grams of its characters, and pairs of its words."""
    codes = np.frombuffer(text.encode("utf-32-le", "replace"), np.uint32).astype(np.uint64)
    hashes = np.zeros(len(codes), np.uint64)
    for size in range(1, max(GRAMS) + 1):
        hashes = hashes[: max(len(codes) - size + 1, 0)] * _ODD[0] + codes[size - 1 :]
        if size in GRAMS:
            yield Features(np.arange(len(hashes)), _bucket(hashes, size), size - 1, 1.0)
    for distance in NEAR:
        last = max(len(stems) - distance, 0)
        pairs = stems[:last] * _ODD[1] + stems[distance:] * np.uint64(distance > 0)
        yield Features(starts, _bucket(pairs, 16 + distance), distance, WORD_WEIGHT)


def _bucket(hashes: npt.NDArray[np.uint64], salt: int) -> Integers:
    products = (hashes + np.uint64(salt)) * _ODD[2]
    return ((products ^ (products >> np.uint64(29))) * _ODD[3] >> np.uint64(64 - BITS)).astype(np.int64)


def pair_worth(count: npt.ArrayLike) -> Floats:
    """Return the weight of each pair in a passage that holds this many pairs."""
    return np.asarray(PAIR_WEIGHT / np.sqrt(FEW_PAIRS + np.asarray(count)), np.float32)


def scores(text: str, passages: Sequence[tuple[int, int]], scorer_weights: ScorerWeights | None = None) -> Floats:
    """Return the logit of each passage; above 0 the passage is worth a look.

    A passage is given by the positions of its first character and of the one after its last.
    """
    scorer_weights = scorer_weights or table()
    first, last = np.array(passages, np.int64).reshape(-1, 2).T
    total, squares = np.zeros(len(passages)), np.zeros(len(passages))
    starts, stems = words_in(text)
    for feature in features_in(text, starts, stems):
        sums = np.concatenate(([0.0], np.cumsum(scorer_weights.weights[feature.buckets], dtype=np.float64)))
        low = np.minimum(np.searchsorted(feature.starts, first), len(feature.buckets))
        # A feature that ends outside the passage is left out. An n-gram's reach is counted in characters, and a pair's
        # reach in words.
        in_words = feature.counts != 1
        high = np.searchsorted(feature.starts, last) - feature.reach if in_words else last - feature.reach
        high = np.clip(high, low, len(feature.buckets))
        total += feature.counts * (sums[high] - sums[low])
        squares += feature.counts**2 * (high - low)
    total = total / np.sqrt(SHORT + squares) + scorer_weights.bias
    presence = _meaning_presence(stems, np.searchsorted(starts, first), np.searchsorted(starts, last))
    meaning_counts = presence.sum(axis=1)
    pairs = (presence @ scorer_weights.weights[BUCKETS:].reshape(meaning_count(), -1) * presence).sum(axis=1)
    return np.asarray(total + pairs * pair_worth(meaning_counts * (meaning_counts - 1) / 2), np.float32)


def _meaning_presence(stems: npt.NDArray[np.uint64], first: Integers, last: Integers) -> Floats:
    """Return, for each passage, 1 for each meaning that occurs in it, else 0.

    A passage is given by the positions of its first word and of the one after its last.
    """
    # Each number in `sets` is a bitmask of 64 meanings.
    sets = np.zeros((-(-meaning_count() // 64), len(stems) + 1), np.uint64)
    positions = np.flatnonzero(stems < meaning_count())
    sets[stems[positions] >> np.uint64(6), positions] = np.uint64(1) << (stems[positions] & np.uint64(63))
    ends = np.column_stack((first, last)).ravel()
    passage_sets = np.bitwise_or.reduceat(sets, ends, axis=1)[:, ::2] * (first < last).astype(np.uint64)
    bits: Floats = ((passage_sets[:, :, None] >> np.arange(64, dtype=np.uint64)) & np.uint64(1)).astype(np.float32)
    return np.concatenate(list(bits), axis=1)[:, : meaning_count()]


@cache
def word_list() -> tuple[dict[str, int], re.Pattern[str]]:
    """Return the number of each word's meaning, and a pattern that finds a text's words.

    The keys are words and beginnings of words.
    """
    lines = resources.files("grading.attacks").joinpath(WORDS).read_text("utf-8").splitlines()
    numbered_stems = [(plain(stem), number) for number, line in enumerate(lines) for stem in line.split()[1:]]
    # If several lines contain a stem, the first line gives its meaning.
    stem_numbers = dict(reversed(numbered_stems))
    cjk_stems = sorted((stem for stem in stem_numbers if re.match(f"[{_CJK}]", stem)), key=len, reverse=True)
    # The first two alternatives match nothing that begins like a CJK stem. They come before the long list of these
    # stems, so that few words are compared with the list.
    return stem_numbers, re.compile("|".join([rf"[^\W_{_CJK}]+", r"[^\w\s]", *map(re.escape, cjk_stems), f"[{_CJK}]"]))


@cache
def meaning_count() -> int:
    """Return how many meanings `attacks.words` has. They are numbered from 0."""
    return max(word_list()[0].values()) + 1


@lru_cache(maxsize=65_536)
def meaning(word: str) -> int:
    """Return the number of a word's meaning.

    A word that is not in the list gets a number at or above `meaning_count()`, made from its first letters.
    """
    stem_numbers, _ = word_list()
    bare = _ARTICLE.sub("", word)
    for size in range(len(bare), 0, -1):
        head = bare[:size]
        if head in stem_numbers and (size == len(bare) or size > 3 or not head.isascii()):
            return stem_numbers[head]
    return meaning_count() + crc32(word[:_STEM].encode("utf-8", "replace"))


def known_words(text: str) -> int:
    """Return how many different words of a text are in the list."""
    return len({word for match in word_list()[1].finditer(plain(text)) if meaning(word := match[0]) < meaning_count()})
