"""Whether a quote is in the submission, and whether feedback repeats what no student may see. White space and case
don't count."""

from __future__ import annotations

import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Literal

from grading.prompts.prompt import neutralise
from grading.submissions.reading import Submission

# "not their own": it stands there, but only in lines of the template, the instructions or the rubric.
Evidence = Literal["found", "not found", "none given", "not their own"]

# A shorter quote is in nearly every submission: it counts only where it stands letter for letter.
SHORT_QUOTE_CHARS = 8
# As long a run in common is no accident; without white space, about eight words.
LEAK_CHARS = 40


@dataclass(frozen=True, slots=True)
class Shown:
    """A submission's texts as the models saw them, and all of them squeezed into one."""

    texts: tuple[str, ...]
    squeezed: str
    own: bytes  # for each character of `squeezed`, whether it stands in a line of the student's own
    own_text: str


@dataclass(frozen=True, slots=True)
class Private:
    """What only graders see, and what students have been given anyway, squeezed."""

    secret: str = ""
    known: str = ""
    given: Mapping[str, int] = field(default_factory=dict)  # lines that are no student's own, as `line_counts`


def shown_texts(submission: Submission, given: Mapping[str, int] | None = None) -> Shown:
    """What quotes of this submission are looked for in: all of it, before cuts. `given`: lines that are not its own."""
    texts = tuple(neutralise(part.text) for part in submission.parts)
    left = Counter(given)
    squeezed, own, own_lines = [], bytearray(), []
    for line in "\n".join(texts).split("\n"):
        squeezed.append(squeeze(line))
        is_own = left[squeezed[-1]] <= 0
        left[squeezed[-1]] -= 1
        own += bytes([is_own]) * len(squeezed[-1])
        own_lines += [line] if is_own else []
    return Shown(texts, "".join(squeezed), bytes(own), "\n".join(own_lines))


def line_counts(texts: Iterable[str]) -> Counter[str]:
    """Lines, squeezed, and how often each is there; without those that hold no letter and no digit."""
    lines = (squeeze(line) for text in texts for line in neutralise(text).split("\n"))
    return Counter(line for line in lines if any(map(str.isalnum, line)))


def quoted_lines(text: str, quotes: Iterable[str]) -> set[int]:
    """The lines of a text, from 0, on which one of the quotes stands. A quote may begin and end within a line."""
    lines = text.split("\n")
    squeezed = [squeeze(line) for line in lines]
    whole, owners = "".join(squeezed), [number for number, line in enumerate(squeezed) for _ in line]
    found: set[int] = set()
    for quote in map(_bare, quotes):
        needle = squeeze(quote)
        if len(needle) < SHORT_QUOTE_CHARS:
            found.update(number for number, line in enumerate(lines) if needle and quote in line)
            continue
        at = whole.find(needle)
        while at >= 0:
            found.update(owners[at : at + len(needle)])
            at = whole.find(needle, at + 1)
    return found


def _bare(quote: str) -> str:
    """Without the quotation marks that models put around their quotes."""
    return neutralise(quote).strip().strip("\"'`“”‘’").strip()


def evidence_state(quote: str, shown: Shown) -> Evidence:
    """Whether and where the quote stands."""
    quote = _bare(quote)
    needle = squeeze(quote)
    if not needle:
        return "none given"
    if len(needle) < SHORT_QUOTE_CHARS:
        found = quote in shown.own_text
        return "found" if found else "not their own" if any(quote in text for text in shown.texts) else "not found"
    at = shown.squeezed.find(needle)
    state: Evidence = "not found" if at < 0 else "not their own"
    while at >= 0:
        if 1 in shown.own[at : at + len(needle)]:
            return "found"
        at = shown.squeezed.find(needle, at + 1)
    return state


def private(secrets: Iterable[str], known: Iterable[str], notes: Iterable[str] = ()) -> Private:
    """`secrets`: grading notes, solution, rules. `known`: instructions, template. `notes`: the rubric's."""
    known = list(known)
    return Private(squeeze("\n".join(secrets)), squeeze("\n".join(known)), line_counts([*known, *notes]))


def leaks(text: str, hidden: Private, shown: Shown) -> bool:
    """Whether `text` repeats a run of what only graders see that is neither the student's own nor known to all."""
    squeezed = squeeze(text)
    if not hidden.secret:
        return False
    runs = (squeezed[start : start + LEAK_CHARS] for start in range(len(squeezed) - LEAK_CHARS + 1))
    return any(run in hidden.secret and run not in shown.squeezed and run not in hidden.known for run in runs)


def squeeze(text: str) -> str:
    """The text without white space, case and typographic variants."""
    return "".join(unicodedata.normalize("NFKC", text).casefold().split())
