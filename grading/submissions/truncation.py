"""Cuts submissions that are too long, and says so.

A submission may hold an output of half a million characters. Each kind of part has a budget of tokens. Within a kind,
the budget is shared by water-filling: every part gets the same share, and what small parts don't need goes to the
others. So many small parts survive, and the largest are cut first. A part that is cut keeps its beginning and its end,
around a line that says how much is missing. Every cut is reported as a `Cut`.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import get_args

from grading.submissions.notebooks import water_level
from grading.submissions.reading import Submission
from grading.submissions.submission import PartKind, SubmissionPart

Count = Callable[[str], int]

# Outputs are cut first, and code is cut last.
_KINDS: tuple[PartKind, ...] = ("output", "text", "code")
# This share of the kept text is taken from the beginning, because the beginning says what the part is.
_HEAD_SHARE = 0.6
# A cut that uses at least this share of the allowance is good enough, and no other cut is tried.
_GOOD_FIT = 0.85
_TRIES = 5
_LINE_SHARE = 0.2  # a cut is moved to the end of a line if this removes at most this share of the text


# Few submissions are longer than this. Earlier releases cut longer ones even if the model had room for them.
USUAL_TOKENS = 22_000


@dataclass(frozen=True, slots=True)
class Limits:
    """Budgets in tokens: one for each kind, and one for any single output. 0 leaves a kind out.

    The defaults are the limits that earlier releases used for every model. Batches planned with them keep them.
    """

    code_tokens: int = 12_000
    text_tokens: int = 6_000
    output_tokens: int = 4_000
    part_tokens: int = 2_000

    def of(self, kind: PartKind) -> int:
        """Return the budget of a kind."""
        return {"code": self.code_tokens, "text": self.text_tokens, "output": self.output_tokens}[kind]


def limits_within(sizes: Mapping[PartKind, int], total: int) -> Limits:
    """Return budgets with the sum `total` for a submission of these sizes.

    What one kind doesn't need goes to the others.

    Outputs are cut first, down to the share that they have in the default limits.
    """
    usual = Limits()
    outputs = min(
        sizes["output"], max(total - sizes["code"] - sizes["text"], total * usual.output_tokens // USUAL_TOKENS)
    )
    code_share = (total - outputs) * usual.code_tokens // (usual.code_tokens + usual.text_tokens)
    code = min(sizes["code"], max(total - outputs - sizes["text"], code_share))
    return Limits(code, min(sizes["text"], total - outputs - code), outputs, outputs)


@dataclass(frozen=True, slots=True)
class Cut:
    """A part that was shortened, or left out (kept_tokens is 0)."""

    where: str
    kind: PartKind
    kept_tokens: int
    dropped_tokens: int


def count_parts(submission: Submission, count: Count) -> dict[PartKind, int]:
    """Tokens per kind."""
    kinds: tuple[PartKind, ...] = get_args(PartKind)
    return {kind: sum(count(part.text) for part in submission.parts if part.kind == kind) for kind in kinds}


def truncate(submission: Submission, limits: Limits, count: Count) -> tuple[Submission, tuple[Cut, ...]]:
    """Cut the submission to its limits. Returns it with the list of cuts, outputs first.

    If nothing is cut, the same submission is returned. Each kind stays within its budget as measured by `count`, except
    for one marker line if the budget is smaller than that. `count` is called once for each part, and a few times on
    short texts for each part that is cut.
    """
    parts: list[SubmissionPart | None] = list(submission.parts)
    cuts: list[Cut] = []
    for kind in _KINDS:
        places = [index for index, part in enumerate(submission.parts) if part.kind == kind]
        cutter = _Cutter(kind, limits, count)
        for index, (part, cut) in zip(places, cutter.cut([submission.parts[i] for i in places]), strict=True):
            parts[index] = part
            cuts += [cut] if cut else []
    if not cuts:
        return submission, ()
    return replace(submission, parts=tuple(part for part in parts if part)), tuple(cuts)


class _Cutter:
    """Cuts the parts of one kind."""

    def __init__(self, kind: PartKind, limits: Limits, count: Count) -> None:
        self.budget = limits.of(kind)
        self.max_part_tokens = limits.part_tokens if kind == "output" else self.budget
        self.count = count

    def cut(self, parts: Sequence[SubmissionPart]) -> list[tuple[SubmissionPart | None, Cut | None]]:
        """Return, for each part, what remains of it and what was cut."""
        sizes = [self.count(part.text) for part in parts]
        if sum(sizes) <= self.budget and max(sizes, default=0) <= self.max_part_tokens:
            return [(part, None) for part in parts]
        self.marker_tokens = self.count(f"\n{_marker(sum(sizes), len(parts))}\n")
        level = water_level([min(size, self.max_part_tokens) for size in sizes], self.budget)
        min_tokens = 2 * self.marker_tokens  # with fewer tokens, a part would be little more than the marker of its cut
        if min(level, self.max_part_tokens) >= min_tokens:
            return [
                self._fit(part, size, min(level, self.max_part_tokens)) for part, size in zip(parts, sizes, strict=True)
            ]
        return self._leave_out(parts, sizes, min_tokens)

    def _leave_out(
        self, parts: Sequence[SubmissionPart], sizes: Sequence[int], min_tokens: int
    ) -> list[tuple[SubmissionPart | None, Cut | None]]:
        """Leave out middle parts if there are too many to give each a useful share.

        One line stands for all that are left out.
        """
        budget = max(0, self.budget - self.marker_tokens)
        kept_indices = _from_both_ends([min(size, min_tokens) for size in sizes], budget, self.max_part_tokens)
        level = min(
            water_level([min(sizes[i], self.max_part_tokens) for i in kept_indices], budget), self.max_part_tokens
        )
        left_out = [i for i in range(len(parts)) if i not in kept_indices]
        line = _marker(sum(sizes[i] for i in left_out), len(left_out))
        return [
            self._fit(part, size, level)
            if index in kept_indices
            else (replace(part, text=line) if index == left_out[0] else None, Cut(part.location, part.kind, 0, size))
            for index, (part, size) in enumerate(zip(parts, sizes, strict=True))
        ]

    def _fit(self, part: SubmissionPart, size: int, max_tokens: int) -> tuple[SubmissionPart, Cut | None]:
        if size <= max_tokens:
            return part, None
        text, kept_tokens = self._shorten(part.text, size, max_tokens)
        return replace(part, text=text), Cut(part.location, part.kind, kept_tokens, size - kept_tokens)

    def _shorten(self, text: str, size: int, max_tokens: int) -> tuple[str, int]:
        """Cut `text` to its beginning and end within `max_tokens` tokens. Also returns the number of tokens kept.

        The length is guessed from tokens per character, and the guess is corrected by the result, because tokenizing
        the whole text again would take seconds.
        """
        best, best_kept_tokens = _marker(size), 0
        low, high = 0, len(text)
        chars = len(text) * max(0, max_tokens - self.marker_tokens) // size
        for _ in range(_TRIES):
            head, tail = _ends(text, chars)
            kept_tokens = min(self.count(head) + self.count(tail), size - 1)
            shorter = f"{head}\n{_marker(size - kept_tokens)}\n{tail}"
            used_tokens = self.count(shorter)
            if used_tokens <= max_tokens:
                best, best_kept_tokens, low = shorter, kept_tokens, chars
                if used_tokens >= _GOOD_FIT * max_tokens:
                    break
            else:
                high = chars
            # The guess can be far off if most of the tokens are in the middle of the text.
            guess = min(chars * max_tokens // max(used_tokens, 1), 2 * chars)
            chars = min(max(guess, low + 1), high - 1)
            if chars <= low:
                break
        return best, best_kept_tokens


def _marker(tokens: int, parts: int = 1) -> str:
    return f"[… {tokens:,} tokens{f' in {parts:,} parts' if parts > 1 else ''} left out here …]"


def _from_both_ends(sizes: Sequence[int], budget: int, max_size: int) -> set[int]:
    """Return indices whose sum is within the budget, taken from the beginning and the end in turn."""
    order = [i for pair in zip(range(len(sizes)), reversed(range(len(sizes))), strict=True) for i in pair]
    indices: set[int] = set()
    for index in order[: len(sizes)]:
        if sizes[index] <= min(budget, max_size):
            budget -= sizes[index]
            indices.add(index)
    return indices


def _ends(text: str, chars: int) -> tuple[str, str]:
    """Return the beginning and end of `text`, about `chars` characters in all, cut at line ends if one is near."""
    first = int(chars * _HEAD_SHARE)
    head, tail = text[:first], text[len(text) - (chars - first) :]
    line_end = head.rfind("\n")
    if line_end >= (1 - _LINE_SHARE) * len(head):
        head = head[:line_end]
    line_start = tail.find("\n")
    if 0 <= line_start <= _LINE_SHARE * len(tail):
        tail = tail[line_start + 1 :]
    return head, tail
