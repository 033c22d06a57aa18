"""Renders a model's chat template around the messages of a prompt, and tokenizes the result.

A student's text must never become a control token, even if it spells one (`<|im_end|>`). So the template is rendered
around markers and never around the texts. Everything before, between and after the markers then belongs to the
template. The template's text up to its last control token before a message, and from its first control token after it,
is tokenized with control tokens recognised. The message, with the plain template text next to it, is tokenized as one
piece without recognising any. Tokenizers split at control tokens before anything else, so for harmless messages the ids
equal those of the whole text.

An assistant's message at the end is continued if the template prints the same text before it as before an answer. A raw
prompt uses no template, and has no control tokens except those with which the tokenizer begins any text.

A template that changes with what a message says can't be rendered this way; one that trims messages is recognised.
"""

import hashlib
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from itertools import groupby, pairwise
from typing import Any

from engines.base import TokenizedPrompt
from messages.errors import ConfigError, InvalidPrompt
from messages.jobs import ChatRole, Part

# A marker has only lower-case letters, so it never looks like a date. Dates in a rendered template can get replaced.
_MARKER = "kvasirqzjwkmarker"
_MARKER_PATTERN = re.compile(_MARKER + "([a-j]+)x")
# In place of a function's arguments, a template gets a JSON object whose only key is a marker. The template prints the
# object with `tojson`.
_ARGUMENTS_PATTERN = re.compile(r'\{"(' + _MARKER + r'[a-j]+x)": ?0\}')
# Some templates require call ids of nine characters. All calls share this id, because no template checks that ids
# differ.
_CALL_ID = "call00000"
_AS_LETTERS = str.maketrans("0123456789", "abcdefghij")
_PADDING = " \n"
# Sample texts that are put after the prefix that all students' prompts share. They show which of the prefix's last
# tokens change with the text that follows. Such tokens don't count as shared.
_FOLLOWERS = ("", "a", "A", "0", " ", " a", "\n", "\n\n", ".", "_", "'s", "é", "语")
MEMORY_SIZE = 64

# Code and prose, for measuring how many characters a token has.
SAMPLE = """def mean(values: list[float]) -> float:
    \"\"\"Arithmetic mean; 0.0 for an empty list.\"\"\"
    return sum(values) / len(values) if values else 0.0

The loop visits every element twice, so the running time grows with the square of the input. A dictionary would make
one pass enough. Names are clear and the tests cover the empty list, but not negative numbers.
"""

# Texts on which tokenizers with the same vocabulary can differ: runs of spaces, tabs, line ends and digits, letters
# with combining accents, scripts without spaces, emoji of several characters, control characters, and characters
# without a token, which are spelled in bytes.
HARD_SAMPLE = (
    f"{SAMPLE}  two   three\tone\t\ttabs\n\n\nlines\r\n1234567890 3.14159 1,000,000 x86_64 don't I'LL "
    "naïve e\u0301tude Привет, мир! 日本語のテキスト 中文测试 한국어 ไทย العربية עברית "
    "\U0001f600\U0001f469\u200d\U0001f4bb\U0001f1e9\U0001f1ea\u2581\u00a0\u200b\ufeff\x01\x7f \U0001f9ff\U00012345 "
    "&amp;{}[]()|~`^ a<b>c "
)


@dataclass(frozen=True, slots=True)
class PromptMessage:
    """Consecutive parts of one role. The first `common` characters of the text belong to the whole class.

    `function`: see `Part`.
    """

    role: ChatRole
    text: str
    common: int
    function: str = ""

    def as_fields(self, text: str, arguments: Any) -> dict[str, Any]:
        """The message in the form of OpenAI's API, with `text` and `arguments` in place of its own content."""
        if self.role == "tool":
            return {"role": "tool", "content": text, "name": self.function, "tool_call_id": _CALL_ID}
        if not self.is_call:
            return {"role": self.role, "content": text}
        call = {"id": _CALL_ID, "type": "function", "function": {"name": self.function, "arguments": arguments}}
        return {"role": self.role, "content": "", "tool_calls": [call]}

    @property
    def is_call(self) -> bool:
        """Whether the assistant calls a function."""
        return self.role == "assistant" and bool(self.function)

    @property
    def is_continued(self) -> bool:
        """Whether this message, if it is the last, is an answer to be continued."""
        return self.role == "assistant" and not self.function


def chat(prompt: Sequence[Part]) -> list[PromptMessage]:
    """The messages of a prompt, in order."""
    messages = []
    for (role, _), group in groupby(enumerate(prompt), lambda pair: (pair[1].role, pair[1].function and pair[0])):
        parts = [part for _, part in group]
        common = sum(len(part.text) for part in parts if part.scope == "class")
        messages.append(PromptMessage(role, "".join(part.text for part in parts), common, parts[0].function))
    return messages


@dataclass(frozen=True, slots=True)
class _Frame:
    """What the template puts around messages.

    `gaps`: the text before the first message, between each two, and after the last. Each gap has three parts: plain
    text next to the message before, text in which control tokens are recognised, and plain text next to the message
    after. `trims`: whether the template trims each message's start and its end.
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
        if messages[0].role == "raw":
            return TokenizedPrompt(tuple(self.raw_ids(messages[0].text)), 0)
        frame = self._frame_of(messages, clock)
        ids = self._ids(frame, [message.text for message in messages])
        common = []  # the shared text of each message, up to the first message that differs between students
        for message in messages:
            common.append(message.text[: message.common])
            if message.common < len(message.text):
                break
        if not any(common):
            return TokenizedPrompt(ids, 0)
        beginning = _Frame(frame.gaps[: len(common) + 1], frame.trims[: len(common)])
        return TokenizedPrompt(ids, common_prefix(ids, self._shared_ids(beginning, tuple(common))))

    def require_template(self) -> None:
        """Raises ConfigError if even a single user message can't be rendered."""
        try:
            self._frame_of([PromptMessage("user", "", 0)], 0.0)
        except InvalidPrompt as error:
            raise ConfigError(str(error)) from None

    @abstractmethod
    def raw_ids(self, text: str) -> Sequence[int]:
        """The ids of a text as it stands, without control tokens except those with which the tokenizer begins any
        text."""

    @abstractmethod
    def render(self, messages: list[dict[str, Any]], clock: float) -> str:
        """These messages and the start of the assistant's answer, rendered by the template. Raises InvalidPrompt."""

    @abstractmethod
    def control_span(self, text: str) -> tuple[int, int]:
        """Where the first control token in a template's text begins, and where the last one ends; (len, 0) if there are
        none."""

    @abstractmethod
    def piece_ids(self, text: str, begins: bool, control: bool) -> Sequence[int]:
        """The ids of a piece of a prompt. `control`: whether control tokens are recognised; `begins`: whether it is the
        first piece."""

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
        """The ids with which every prompt begins that has this class-wide part, in messages of these roles."""
        # Some templates trim messages. The final x keeps them from removing a follower that consists of white space.
        variants = [self._ids(frame, [*common[:-1], common[-1] + follower + "x"]) for follower in _FOLLOWERS]
        return variants[0][: min(common_prefix(variants[0], variant) for variant in variants[1:])]

    def _frame_of(self, messages: Sequence[PromptMessage], clock: float) -> _Frame:
        speakers = tuple([replace(message, text="", common=0) for message in messages])
        gaps = self._rendered_gaps(speakers, clock, "")
        if speakers[-1].is_continued:
            if not speakers[1:] or self._rendered_gaps(speakers[:-1], clock, "")[-1] != gaps[-2]:
                raise InvalidPrompt(
                    "the model's chat template can't continue an answer: end the prompt with a user message"
                )
            gaps[-1] = ""
        return self._frame(speakers, tuple(gaps))

    def _cut_frame(self, speakers: tuple[PromptMessage, ...], gaps: tuple[str, ...]) -> _Frame:
        cut = []
        # Most gaps are equal, so each distinct gap is parsed only once.
        spans = {gap: self.control_span(gap) for gap in {*gaps}}
        for number, gap in enumerate(gaps):
            start, end = spans[gap]
            start = 0 if number == 0 else start
            end = len(gap) if number == len(speakers) else end
            cut.append((gap[:start], gap[start:end], gap[max(start, end) :]))
        padded_gaps = self._rendered_gaps(speakers, 0.0, _PADDING)
        trims = [
            (not before.endswith(_PADDING), not after.startswith(_PADDING)) for before, after in pairwise(padded_gaps)
        ]
        if speakers[-1].is_continued:
            trims[-1] = (trims[-1][0], False)
        return _Frame(tuple(cut), tuple(trims))

    def _rendered_gaps(self, speakers: Sequence[PromptMessage], clock: float, padding: str) -> list[str]:
        """The template's text before, between and after messages of these roles."""
        names = [str(number).translate(_AS_LETTERS) for number in range(len(speakers))]
        markers = [f"{_MARKER}{name}x" for name in names]
        messages = [
            speaker.as_fields(f"{padding}{marker}{padding}", {marker: 0})
            for speaker, marker in zip(speakers, markers, strict=True)
        ]
        text, calls = _ARGUMENTS_PATTERN.subn(r"\1", self.render(messages, clock))
        if calls != sum("tool_calls" in message for message in messages):
            raise InvalidPrompt("the model's chat template does not print the arguments of function calls as JSON")
        pieces = _MARKER_PATTERN.split(text)
        printed_names = pieces[1::2]
        for name, speaker in zip(names, speakers, strict=True):
            if (count := printed_names.count(name)) != 1:
                raise InvalidPrompt(
                    f"the model's chat template must print the {speaker.role}'s message once, not {count} times"
                )
        if printed_names != names:
            roles = ", ".join(speaker.role for speaker in speakers)
            raise InvalidPrompt(f"the model's chat template changes the order of these messages: {roles}")
        return pieces[::2]


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """The number of equal ids at the start."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((index for index, (a, b) in pairs if a != b), min(len(first), len(second)))


def cut_inside(text: str, marks: Iterable[re.Match[str]]) -> list[str]:
    """The text in pieces. It is cut after the first character of each mark, so no piece contains a whole mark."""
    cuts = [match.start() + 1 for match in marks]
    return [text[start:end] for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True)]


def vocabulary_hash(tokens: Iterable[str], rules: Iterable[str]) -> str:
    """A hash that names a tokenizer by the text of each id and by its `rules`, whatever file they came from.

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
    """The ids of a text on which tokenizers differ, as words."""
    return [str(number) for number in encode(HARD_SAMPLE)]
