"""Whether a quote is in the submission, and whether feedback repeats what no student may see. White space and case
don't count."""

from __future__ import annotations

import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from producers.prompts import neutralise
from producers.submissions import Submission

Evidence = Literal["found", "not found", "none given"]

# A shorter quote is in nearly every submission: it counts only where it stands letter for letter.
SHORT_QUOTE_CHARS = 8
# As long a run in common is no accident; without white space, about eight words.
LEAK_CHARS = 40


@dataclass(frozen=True, slots=True)
class Shown:
    """A submission's texts as the models saw them, and all of them squeezed into one."""

    texts: tuple[str, ...]
    squeezed: str


@dataclass(frozen=True, slots=True)
class Private:
    """What only graders see, and what students have been given anyway, squeezed."""

    secret: str = ""
    known: str = ""


def shown_texts(submission: Submission) -> Shown:
    """What quotes of this submission are looked for in: all of it, before cuts."""
    texts = tuple(neutralise(part.text) for part in submission.parts)
    return Shown(texts, squeeze("\n".join(texts)))


def check_evidence(quote: str, submission: Submission) -> bool:
    """Whether the quote stands in the submission. An empty quote does not."""
    return evidence_state(quote, shown_texts(submission)) == "found"


def evidence_state(quote: str, shown: Shown) -> Evidence:
    """Whether and where the quote stands."""
    quote = neutralise(quote).strip().strip("\"'`“”‘’").strip()  # models put quotes around their quotes
    needle = squeeze(quote)
    if not needle:
        return "none given"
    if len(needle) < SHORT_QUOTE_CHARS:
        return "found" if any(quote in text for text in shown.texts) else "not found"
    return "found" if needle in shown.squeezed else "not found"


def private(secrets: Iterable[str], known: Iterable[str]) -> Private:
    """`secrets`: grading notes, solution, the prompt's rules. `known`: instructions, template."""
    return Private(squeeze("\n".join(secrets)), squeeze("\n".join(known)))


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
