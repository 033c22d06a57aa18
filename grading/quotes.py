"""Whether a quote is in the submission, and whether feedback repeats what no student may see. White space and case
don't count."""

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

# A shorter quote is in nearly every submission: it counts only where it stands letter for letter.
SHORT_QUOTE_CHARS = 8
# As long a run in common is no accident; without white space, about eight words.
LEAK_CHARS = 40
OWN = 1  # beside HIDDEN, which is 2


@dataclass(frozen=True, slots=True)
class SubmissionTexts:
    """A submission's texts as the models saw them, and all of them squeezed into one."""

    texts: tuple[str, ...]
    squeezed_text: str
    # For each character of `squeezed_text`: OWN where it is seen in a line of the student's own, HIDDEN where no reader
    # sees it, and else 0.
    flags: bytes
    own_text: str


@dataclass(frozen=True, slots=True)
class PrivateTexts:
    """What only graders see, and what students have been given anyway, squeezed."""

    secret_text: str = ""
    public_text: str = ""
    foreign_lines: Mapping[str, int] = field(default_factory=dict)  # lines that are no student's own, as `line_counts`


def submission_texts(submission: Submission, foreign_lines: Mapping[str, int] | None = None) -> SubmissionTexts:
    """What quotes of this submission are looked for in: all of it, before cuts. `foreign_lines`: those not its own."""
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
    """Lines, squeezed, and how often each is there; without those that hold no letter and no digit."""
    lines = (squeeze(line) for text in texts for line in neutralise(text).split("\n"))
    return Counter(line for line in lines if any(map(str.isalnum, line)))


def quoted_lines(text: str, quotes: Iterable[str]) -> set[int]:
    """The lines of a text, from 0, on which one of the quotes stands. A quote may begin and end within a line."""
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
    """Without the quotation marks that models put around their quotes."""
    return neutralise(quote).strip().strip("\"'`“”‘’").strip()


def evidence_state(quote: str, work_texts: SubmissionTexts) -> Evidence:
    """Whether and where the quote stands."""
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
    """`secrets`: grading notes, solution, rules. `public_texts`: instructions, template. `notes`: the rubric's."""
    public_texts = list(public_texts)
    return PrivateTexts(
        squeeze("\n".join(secrets)), squeeze("\n".join(public_texts)), line_counts([*public_texts, *notes])
    )


def leaks(text: str, private_texts: PrivateTexts, work_texts: SubmissionTexts) -> bool:
    """Whether `text` repeats a run of what only graders see that is neither the student's own nor known to all."""
    squeezed_text = squeeze(text)
    runs = (squeezed_text[start : start + LEAK_CHARS] for start in range(len(squeezed_text) - LEAK_CHARS + 1))
    return any(
        run in private_texts.secret_text
        and run not in work_texts.squeezed_text
        and run not in private_texts.public_text
        for run in runs
    )


def squeeze(text: str) -> str:
    """The text without white space, characters without width, case and typographic variants."""
    return "".join(unicodedata.normalize("NFKC", without_invisible(text)).casefold().split())
