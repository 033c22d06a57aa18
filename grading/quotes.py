"""Checks whether a quote is in the submission, and whether feedback repeats confidential text.

White space and case don't count.
"""

import unicodedata
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from itertools import compress, groupby
from operator import itemgetter

from grading.prompts.answers import Evidence
from grading.prompts.prompt import neutralise
from grading.submissions.submission import Submission
from grading.submissions.visible import HIDDEN, SEEN, visible_text, without_invisible

# A quote that is shorter than this would be found in nearly every submission, so it must match letter for letter.
SHORT_QUOTE_CHARS = 8
# If two texts share a run of this many characters, that is not a coincidence. White space is not counted, so the run
# has about eight words.
LEAK_CHARS = 40
OWN = 1  # marks the student's own visible text; `HIDDEN` of visible.py is 2


@dataclass(frozen=True, slots=True)
class SubmissionTexts:
    """A submission's texts as the models saw them, and all of them squeezed into one."""

    texts: tuple[str, ...]
    squeezed_text: str
    # One flag for each character of `squeezed_text`. OWN marks a visible line by the student, HIDDEN marks text that no
    # reader sees, and 0 marks the rest.
    flags: bytes
    own_text: str


@dataclass(frozen=True, slots=True)
class PrivateTexts:
    """Text that only graders see, and text that students were given anyway, both squeezed."""

    secret_text: str = ""
    public_text: str = ""
    # Lines that no student wrote, each with its count, as `line_counts` returns them.
    foreign_lines: Mapping[str, int] = field(default_factory=dict)


def submission_texts(submission: Submission, foreign_lines: Mapping[str, int] | None = None) -> SubmissionTexts:
    """Prepare a submission for the search for quotes, before any cuts.

    `foreign_lines` are lines that the student did not write.
    """
    texts = tuple(neutralise(part.text) for part in submission.parts)
    remaining_lines = Counter(foreign_lines)
    squeezed_pieces, flags, own_lines = [], bytearray(), []
    for part, text in zip(submission.parts, texts, strict=True):
        visible_flags = bytes([HIDDEN]) * len(text) if part.has_no_run else visible_text(text, part.kind).flags
        start = 0
        for line in text.split("\n"):
            line_flags = visible_flags[start : start + len(line)]
            start += len(line) + 1
            squeezed_line = squeeze(line)
            is_own = not part.is_given_cell and remaining_lines[squeezed_line] <= 0
            remaining_lines[squeezed_line] -= 1
            own_lines += ["".join(compress(line, (flag == SEEN for flag in line_flags)))] if is_own else []
            for flag, run in groupby(zip(line, line_flags, strict=True), itemgetter(1)):
                squeezed_pieces.append(squeeze("".join(char for char, _ in run)))
                flags += bytes([OWN * is_own if flag == SEEN else flag & HIDDEN]) * len(squeezed_pieces[-1])
    return SubmissionTexts(texts, "".join(squeezed_pieces), bytes(flags), "\n".join(own_lines))


def line_counts(texts: Iterable[str]) -> Counter[str]:
    """Count the squeezed lines of texts. Lines without a letter or digit are left out."""
    lines = (squeeze(line) for text in texts for line in neutralise(text).split("\n"))
    return Counter(line for line in lines if any(map(str.isalnum, line)))


def quoted_lines(text: str, quotes: Iterable[str]) -> set[int]:
    """Return the numbers, from 0, of the lines that hold one of the quotes. A quote may begin and end within a line."""
    lines = text.split("\n")
    squeezed_lines = [squeeze(line) for line in lines]
    whole, owners = "".join(squeezed_lines), [number for number, line in enumerate(squeezed_lines) for _ in line]
    line_numbers: set[int] = set()
    for quote in map(_bare, quotes):
        needle = squeeze(quote)
        if len(needle) < SHORT_QUOTE_CHARS:
            line_numbers.update(number for number, line in enumerate(lines) if needle and quote in line)
            continue
        at = whole.find(needle)
        while at >= 0:
            line_numbers.update(owners[at : at + len(needle)])
            at = whole.find(needle, at + 1)
    return line_numbers


def _bare(quote: str) -> str:
    """Remove the quotation marks that models put around their quotes."""
    return neutralise(quote).strip().strip("\"'`“”‘’").strip()


def evidence_state(quote: str, work_texts: SubmissionTexts) -> Evidence:
    """Return whether and where the quote was found."""
    quote = _bare(quote)
    needle = squeeze(quote)
    if not needle:
        return "none given"
    if len(needle) < SHORT_QUOTE_CHARS:
        is_quoted = quote in work_texts.own_text
        return (
            "found"
            if is_quoted
            else "not their own"
            if any(quote in text for text in work_texts.texts)
            else "not found"
        )
    at = work_texts.squeezed_text.find(needle)
    state: Evidence = "not found"
    while at >= 0:
        if HIDDEN not in (flags := work_texts.flags[at : at + len(needle)]):
            if OWN in flags:
                return "found"
            state = "not their own"
        at = work_texts.squeezed_text.find(needle, at + 1)
    return state


def private_texts(secrets: Iterable[str], public_texts: Iterable[str], notes: Iterable[str] = ()) -> PrivateTexts:
    """Prepare texts for `leaks`.

    `secrets` are grading notes, solution and rules; `public_texts` are instructions and template.

    `notes` are the rubric's grading notes; their lines never count as the student's own.
    """
    public_texts = list(public_texts)
    return PrivateTexts(
        squeeze("\n".join(secrets)), squeeze("\n".join(public_texts)), line_counts([*public_texts, *notes])
    )


def leaks(text: str, private_texts: PrivateTexts, work_texts: SubmissionTexts) -> bool:
    """Whether `text` repeats a run of confidential text.

    A run does not count if it is in the student's work, or if all students know it.
    """
    squeezed_text = squeeze(text)
    runs = (squeezed_text[start : start + LEAK_CHARS] for start in range(len(squeezed_text) - LEAK_CHARS + 1))
    return any(
        run in private_texts.secret_text
        and run not in work_texts.squeezed_text
        and run not in private_texts.public_text
        for run in runs
    )


def squeeze(text: str) -> str:
    """Remove white space and zero-width characters, and unify case and typographic variants."""
    return "".join(unicodedata.normalize("NFKC", without_invisible(text)).casefold().split())
