"""Finds the submissions that a ruling on an edge case may concern: their evidence shares words with it."""

import re
from collections.abc import Mapping, Sequence

_WORD = re.compile(r"[^\W\d_]{3,}")


def may_affect(rulings: Sequence[str], evidence: Mapping[str, str]) -> dict[str, tuple[str, ...]]:
    """Return, for each submission, the words that its quoted evidence shares with the rulings, if there are any.

    A word in more than half of the evidence does not distinguish submissions, so it does not count. The result only
    hints at where to look first: a submission that says the same in other words is not found.
    """
    words_by_name = {name: words for name, text in evidence.items() if (words := _words(text))}
    distinctive_words = {
        word
        for word in _words(" ".join(rulings))
        if 2 * sum(word in words for words in words_by_name.values()) <= len(words_by_name)
    }
    return {
        name: tuple(sorted(words & distinctive_words))
        for name, words in words_by_name.items()
        if words & distinctive_words
    }


def _words(text: str) -> set[str]:
    return set(_WORD.findall(text.casefold()))
