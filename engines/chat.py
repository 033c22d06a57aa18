"""Renders a model's chat template around the messages of a prompt, and tokenizes what comes of it.

A student's text must never become a control token, even if it spells one (`<|im_end|>`). So the template is rendered
around markers, never around the texts: what stands before, between and after the markers is the template's own. The
template's text up to its last control token before a message, and from its first one after it, is tokenized with
control tokens recognised; the message, with the plain template text that touches it, as one piece without. Tokenizers
cut at control tokens before anything else, so for harmless messages the ids are those of the whole text at once.

A template that changes with what a message says can't be rendered this way; one that trims messages is recognised.
"""

from __future__ import annotations

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from itertools import groupby, pairwise

from engines.base import TokenizedPrompt
from messages.errors import ConfigError, InvalidPrompt
from messages.jobs import ChatRole, Part

# Small letters only: a template's text is searched for dates, to be replaced.
_MARKER = "kvasirqzjwkmarker"
_MARKER_PATTERN = re.compile(_MARKER + "([a-j]+)x")
_AS_LETTERS = str.maketrans("0123456789", "abcdefghij")
_PADDING = " \n"
# What may follow the class-wide part. Where one of these changes how its end is tokenized, that end is not shared.
_FOLLOWERS = ("", "a", "A", "0", " ", " a", "\n", "\n\n", ".", "_", "'s", "é", "语")
MEMORY_SIZE = 64

# Code and prose, by which an engine tells how many characters a token has.
SAMPLE = """def mean(values: list[float]) -> float:
    \"\"\"Arithmetic mean; 0.0 for an empty list.\"\"\"
    return sum(values) / len(values) if values else 0.0

The loop visits every element twice, so the running time grows with the square of the input. A dictionary would make
one pass enough. Names are clear and the tests cover the empty list, but not negative numbers.
"""

# Where vocabularies of the same texts part: runs of spaces, tabs, line ends and digits, letters apart from their
# accents, scripts without spaces, emoji of several characters, control characters, and what only bytes can spell.
HARD_SAMPLE = (
    f"{SAMPLE}  two   three\tone\t\ttabs\n\n\nlines\r\n1234567890 3.14159 1,000,000 x86_64 don't I'LL "
    "naïve e\u0301tude Привет, мир! 日本語のテキスト 中文测试 한국어 ไทย العربية עברית "
    "\U0001f600\U0001f469\u200d\U0001f4bb\U0001f1e9\U0001f1ea\u2581\u00a0\u200b\ufeff\x01\x7f \U0001f9ff\U00012345 "
    "&amp;{}[]()|~`^ a<b>c "
)


@dataclass(frozen=True, slots=True)
class PromptMessage:
    """Consecutive parts of one role. The first `common` characters of the text are the class's."""

    role: ChatRole
    text: str
    common: int


def chat(prompt: Sequence[Part]) -> list[PromptMessage]:
    """The messages of a prompt, in order."""
    messages = []
    for role, group in groupby(prompt, lambda part: part.role):
        parts = list(group)
        common = sum(len(part.text) for part in parts if part.scope == "class")
        messages.append(PromptMessage(role, "".join(part.text for part in parts), common))
    return messages


@dataclass(frozen=True, slots=True)
class _Frame:
    """What the template puts around messages.

    `gaps`: before the first message, between each two, and after the last: plain text that touches the message
    before, text in which control tokens are recognised, plain text that touches the message after. `trims`: whether
    the template trims each message's start, and its end.
    """

    gaps: tuple[tuple[str, str, str], ...]
    trims: tuple[tuple[bool, bool], ...]


class ChatPrompt(ABC):
    """Tokenizes prompts for one model. Callable from any thread."""

    def __init__(self) -> None:
        self._frame = lru_cache(MEMORY_SIZE)(self._cut_frame)
        self._shared_ids = lru_cache(MEMORY_SIZE)(self._common_ids)

    def tokenize(self, prompt: Sequence[Part], clock: float) -> TokenizedPrompt:
        """See `engines.base.Tokenizes.tokenize`. Templates that print the date get the day of `clock`, UTC."""
        messages = chat(prompt)
        frame = self._frame_of([message.role for message in messages], clock)
        ids = self._ids(frame, [message.text for message in messages])
        common = []  # of each message as far as it may be the class's, the one in which others differ last
        for message in messages:
            common.append(message.text[: message.common])
            if message.common < len(message.text):
                break
        if not any(common):
            return TokenizedPrompt(ids, 0)
        beginning = _Frame(frame.gaps[: len(common) + 1], frame.trims[: len(common)])
        return TokenizedPrompt(ids, common_prefix(ids, self._shared_ids(beginning, tuple(common))))

    def require_template(self) -> None:
        """Raises ConfigError if one user message can't be rendered."""
        try:
            self._frame_of(["user"], 0.0)
        except InvalidPrompt as error:
            raise ConfigError(str(error)) from None

    @abstractmethod
    def render(self, messages: list[dict[str, str]], clock: float) -> str:
        """These messages and the opening of the assistant's answer, by the template. Raises InvalidPrompt."""

    @abstractmethod
    def control_span(self, text: str) -> tuple[int, int]:
        """Where the first control token of a template's text begins, and where the last ends; (len, 0): none."""

    @abstractmethod
    def piece_ids(self, text: str, begins: bool, control: bool) -> Sequence[int]:
        """Ids of a piece of a prompt, in which control tokens are recognised or not; `begins`: it is the first."""

    def _ids(self, frame: _Frame, texts: Sequence[str]) -> tuple[int, ...]:
        ids: list[int] = []
        begins, plain = True, ""
        for number, (head, control, tail) in enumerate(frame.gaps):
            plain += head
            if control or number == len(texts):
                for text, is_control in ((plain, False), (control, True)):
                    if text:
                        ids += self.piece_ids(text, begins, is_control)
                        begins = False
                plain = ""
            plain += tail
            if number < len(texts):
                starts, ends = frame.trims[number]
                text = texts[number].lstrip() if starts else texts[number]
                plain += text.rstrip() if ends else text
        return tuple(ids)

    def _common_ids(self, frame: _Frame, common: tuple[str, ...]) -> tuple[int, ...]:
        """The ids that every prompt with this class-wide part, in messages of these roles, begins with."""
        # The x keeps a template that trims messages from eating a follower made of white space.
        variants = [self._ids(frame, [*common[:-1], common[-1] + follower + "x"]) for follower in _FOLLOWERS]
        return variants[0][: min(common_prefix(variants[0], variant) for variant in variants[1:])]

    def _frame_of(self, roles: list[ChatRole], clock: float) -> _Frame:
        return self._frame(tuple(roles), tuple(self._rendered_gaps(roles, clock, "")))

    def _cut_frame(self, roles: tuple[ChatRole, ...], gaps: tuple[str, ...]) -> _Frame:
        cut = []
        spans = {gap: self.control_span(gap) for gap in {*gaps}}  # in a conversation most are alike
        for number, gap in enumerate(gaps):
            start, end = spans[gap]
            start = 0 if number == 0 else start
            end = len(gap) if number == len(roles) else end
            cut.append((gap[:start], gap[start:end], gap[max(start, end) :]))
        padded_gaps = self._rendered_gaps(roles, 0.0, _PADDING)
        trims = [
            (not before.endswith(_PADDING), not after.startswith(_PADDING)) for before, after in pairwise(padded_gaps)
        ]
        return _Frame(tuple(cut), tuple(trims))

    def _rendered_gaps(self, roles: Sequence[ChatRole], clock: float, padding: str) -> list[str]:
        """The template's text before, between and after messages of these roles."""
        names = [str(number).translate(_AS_LETTERS) for number in range(len(roles))]
        texts = [f"{padding}{_MARKER}{name}x{padding}" for name in names]
        messages = [{"role": role, "content": text} for role, text in zip(roles, texts, strict=True)]
        pieces = _MARKER_PATTERN.split(self.render(messages, clock))
        printed_names = pieces[1::2]
        for name, role in zip(names, roles, strict=True):
            if printed_names.count(name) != 1:
                raise InvalidPrompt(
                    f"the model's chat template prints the {role}'s message {printed_names.count(name)} times, not once"
                )
        if printed_names != names:
            raise InvalidPrompt(f"the model's chat template changes the order of these messages: {', '.join(roles)}")
        return pieces[::2]


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """How many ids from the start are the same."""
    for index, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return index
    return min(len(first), len(second))


def vocabulary_hash(tokens: Iterable[str], rules: Iterable[str]) -> str:
    """Names a tokenizer by each id's text and its `rules`, whatever file they came from.

    A byte-level vocabulary's rules are its merges ("a b"). A GGUF of a SentencePiece model has none, and its
    tokenizer.json half a million: there they are the ids of a sample (`sample_words`).
    A GGUF's `tokenizer.ggml.tokens` (without the "[PADn]" that fill it up) and a folder of the same model give the
    same hash.
    """
    digest = hashlib.blake2b(digest_size=16, person=b"kvasir.vocab")
    for part in (tokens, rules):
        digest.update("\0".join(part).encode("utf-8", "surrogatepass") + b"\1")
    return digest.hexdigest()


def sample_words(encode: Callable[[str], Sequence[int]]) -> list[str]:
    """What `encode` makes of a text on which tokenizers differ, one word for each id."""
    return [str(number) for number in encode(HARD_SAMPLE)]
