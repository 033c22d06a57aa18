"""Detects text in a submission that addresses the grader instead of the assignment.

A small model (`scorer.py`) scores sentences, and runs of two or three sentences. It only asks a person to look, and
decides nothing. The grading model must choose points from a fixed list, so the worst that an attack can cause is a
wrong number of points. That is what the person is asked to check. Homework may well mention grades, instructions and
language models, so the training data contains such homework too (`examples/attacks`).
"""

import re
from collections.abc import Iterable, Iterator, Sequence
from functools import lru_cache

import numpy as np

from grading.attacks.disguises import READINGS, plain, uncover
from grading.attacks.scorer import Floats, ScorerWeights, known_words, scores
from grading.prompts.prompt import has_control_tokens
from grading.submissions.reading import Submission

MAX_FLAGS = 3
# In longer work, only the beginnings and ends are searched, because nobody reads the middle of a very long output.
MAX_CHARS = 150_000
MAX_SENTENCES = 6_000
MAX_SHOWN = 120
# At most _RUN neighbouring sentences, with at most _RUN_CHARS characters, are scored together, because a phrase can
# continue on the next line.
_RUN, _RUN_CHARS = 3, 420
# Short lines are also scored in groups of up to _LINES lines, with at most _LINES_CHARS characters in total.
_LINES, _LINES_CHARS = 6, 120
# Long texts cause more false alarms. If there are more than _USUAL sentences, an alarm needs a higher score. _CAUTION
# sets how much higher.
_USUAL, _CAUTION = 20, 1.1
# A decoded text counts only if it has at least this many more known words than the encoded text.
_NEW_WORDS = 2

# A dot ends a sentence only if a word, bracket, quote, `, * or > comes before it, and white space after it. So a dot
# inside Morse code or an HTML entity does not end one.
_END = re.compile(r"""\n+|(?<=[!?…])\s+|(?<=[\w)\]"'”»’`*>][.])\s+|(?<=[。।؟\uff01\uff1b\uff1f])""")
_MARGIN = re.compile(r"^[\s#>*/%|–—•-]+|[\s*|–—-]+$")
_LETTERS = re.compile(r"[^\W\d_]")
_PIECE = re.compile(r".{1,240}(?:\s|$)|.{1,240}")


# The flags are cached, because grading is repeated after each result of a running batch, and the submissions stay the
# same.
@lru_cache(maxsize=1024)
def instruction_flags(submission: Submission) -> tuple[str, ...]:
    """Return a sentence for each suspicious part, at most three, with the passage that scores highest.

    Text that the whole class was given is skipped, because the teacher wrote it.
    """
    flags = []
    parts = [part for part in submission.parts if not part.holds_only_given_text]
    for part, scored_passage in zip(parts, strongest_passages([part.text for part in parts]), strict=True):
        location = part.location or part.kind
        if scored_passage:
            score, passage = scored_passage
            flags.append(f"speaks to the grader ({location}, score {score:.2f}): {passage}")
        elif has_control_tokens(part.text):
            flags.append(f"holds a chat control token ({location})")
    return tuple(flags[:MAX_FLAGS])


def strongest_passages(
    texts: Sequence[str], scorer_weights: ScorerWeights | None = None
) -> list[tuple[float, str] | None]:
    """Return each text's highest-scoring passage with its score, from 0.5 to 1, or None.

    The passage is quoted as it stands in the text. If removing disguises gave another reading, that reading is quoted
    too.
    """
    best: list[tuple[float, str] | None] = [None] * len(texts)
    pieces = _both_ends(
        [(owner, piece) for owner, text in enumerate(_cut(texts)) for piece in _END.split(text) if piece.strip()]
    )
    sentences = _both_ends(
        [(piece, sentence) for piece, (_, text) in enumerate(pieces) for sentence in split_sentences(text)]
    )
    owners = [pieces[piece][0] for piece, _ in sentences]
    caution = _CAUTION * max(np.log(len(sentences) / _USUAL), 0.0) if sentences else 0.0
    for number, reading in enumerate(READINGS):
        readings = [reading(sentence) for _, sentence in sentences]
        changes = [
            not number or (read != sentence and known_words(read) >= known_words(sentence) + _NEW_WORDS)
            for read, (_, sentence) in zip(readings, sentences, strict=True)
        ]
        runs = list(_runs(owners, readings, changes))
        logits = _logits(readings, runs, scorer_weights) - caution
        for place in np.flatnonzero(logits > 0):
            first, last = runs[place]
            score = float(1 / (1 + np.exp(-logits[place])))
            if score > (best[owners[first]] or (0.0, ""))[0]:
                own_words = dict.fromkeys(pieces[piece][1] for piece, _ in sentences[first:last])
                best[owners[first]] = score, _quoted(own_words, readings[first:last])
    return best


def _quoted(own_words: Iterable[str], readings: Iterable[str]) -> str:
    own, read = (" ".join(" ".join(texts).split()) for texts in (own_words, readings))
    is_plain = plain(read).replace(" ", "") in plain(own).replace(" ", "")
    return f"“{own[:MAX_SHOWN]}”" if is_plain else f"“{own[:MAX_SHOWN]}”, which reads “{read[:MAX_SHOWN]}”"


def _both_ends(items: list[tuple[int, str]]) -> list[tuple[int, str]]:
    return items if len(items) <= MAX_SENTENCES else items[: MAX_SENTENCES // 2] + items[-MAX_SENTENCES // 2 :]


def _cut(texts: Sequence[str]) -> Iterator[str]:
    """Cut each text to its beginning and end, so that all texts together have about MAX_CHARS characters."""
    share = MAX_CHARS / max(sum(map(len, texts)), 1)
    for text in texts:
        end_chars = int(len(text) * share / 2)
        yield text if share >= 1 else f"{text[:end_chars]}\n{text[len(text) - end_chars :]}"


def split_sentences(text: str) -> list[str]:
    """Split a text into sentences and lines of code. Disguises and the marks at both ends of a line are removed."""
    sentences = (_MARGIN.sub("", part) for piece in _END.split(text) for part in _END.split(uncover(piece)))
    return [piece for sentence in sentences for piece in _PIECE.findall(sentence) if _LETTERS.search(piece)]


def _runs(owners: Sequence[int], sentences: Sequence[str], changes: Sequence[bool]) -> Iterator[tuple[int, int]]:
    """Yield runs of neighbouring sentences of one text that contain at least one changed sentence.

    A run has up to three sentences, or up to six short ones.
    """
    for first, owner in enumerate(owners):
        length, is_new = 0, False
        for last in range(first, min(first + _LINES, len(owners))):
            length += len(sentences[last])
            is_new |= changes[last]
            limit = _RUN_CHARS if last < first + _RUN else _LINES_CHARS
            if owners[last] != owner or (length > limit and last > first):
                break
            if is_new:
                yield first, last + 1


def _logits(sentences: Sequence[str], runs: Sequence[tuple[int, int]], scorer_weights: ScorerWeights | None) -> Floats:
    if not runs:
        return np.zeros(0, np.float32)
    # Programs often print one line many times, so each distinct sentence is simplified only once.
    plain_texts = {sentence: plain(sentence) for sentence in set(sentences)}
    texts = [plain_texts[sentence] for sentence in sentences]
    starts = np.cumsum([0, *(len(text) + 1 for text in texts)])
    return scores(" ".join(texts), [(starts[first], starts[last] - 1) for first, last in runs], scorer_weights)
