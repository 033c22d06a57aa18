"""Renders a llama.cpp server's chat template around a user message, and tokenizes it.

A student's text must never become a control token, even if it spells one (`<|im_end|>`). So the template is rendered
around a marker, never around the text: what stands before and after the marker is the template's own. The template's
text up to its last control token before the message, and from its first one after it, is tokenized with control
tokens recognised; the message, with the plain template text that touches it, as one piece without. llama.cpp itself
cuts at control tokens before it tokenizes, so for a harmless message the ids are those of the whole text at once.

A template that changes with what the user says can't be rendered this way; one that trims the message is recognised.
"""

from __future__ import annotations

import re
import threading
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Any

from engines.base import Tokenized
from engines.llamacpp_http import LlamaServer
from messages.errors import ConfigError

_MARKER = "kvasir7c1e5a93marker"
_PADDING = " \n"
# What may follow the class-wide part. Where one of these changes how its end is tokenized, that end is not shared.
_FOLLOWERS = ("", "a", "A", "0", " ", " a", "\n", "\n\n", ".", "_", "'s", "é", "语")
_MARK = re.compile(r"<\|[^<>|\s]{1,40}\|>")
_REMEMBERED = 64
_DATE_CALL = re.compile(r"""strftime_now\(\s*(['"])(.*?)\1\s*\)""")


@dataclass(frozen=True, slots=True)
class Frame:
    """What the template puts around a message: control tokens outside, plain text next to the message."""

    before: str
    plain_before: str
    plain_after: str
    after: str


class ChatPrompt:
    """Tokenizes prompts on one server. Callable from any thread."""

    def __init__(self, server: LlamaServer) -> None:
        """Raises ConfigError if the model's chat template can't be used."""
        self._server = server
        self._lock = threading.Lock()
        self._frames: OrderedDict[tuple[str, str], Frame] = OrderedDict()
        self._marks: OrderedDict[str, bool] = OrderedDict()
        self._shared: OrderedDict[tuple[Frame, str], tuple[int, ...]] = OrderedDict()
        template = str(server.get("/props").get("chat_template", ""))
        self._date_formats = sorted({match[2] for match in _DATE_CALL.finditer(template)})
        before, after = self._render(_PADDING + _MARKER + _PADDING)
        self._trims_start = not before.endswith(_PADDING)
        self._trims_end = not after.startswith(_PADDING)

    def tokenize(self, shared: str, own: str, clock: float) -> Tokenized:
        """See `engines.base.Tokenizes.tokenize`."""
        frame = self._frame(clock)
        ids = self._ids(frame, shared + own)
        return Tokenized(ids, common_prefix(ids, self._shared_ids(frame, shared)) if shared else 0)

    def plain_ids(self, text: str) -> tuple[int, ...]:
        """Ids of a bare text; no control tokens."""
        return self._plain(text, add_special=False)

    def control_id(self, text: str) -> int | None:
        """The id of the control token spelled so, if there is one."""
        ids = self._tokens(text, add_special=False, parse_special=True)
        return ids[0] if len(ids) == 1 and text and ids != self.plain_ids(text) else None

    def _ids(self, frame: Frame, message: str) -> tuple[int, ...]:
        message = message.lstrip() if self._trims_start else message
        message = message.rstrip() if self._trims_end else message
        pieces = ((frame.before, True), (frame.plain_before + message + frame.plain_after, False), (frame.after, True))
        ids: list[int] = []
        begins = True
        for text, parse_special in pieces:
            if text:
                ids += self._tokens(text, begins, True) if parse_special else self._plain(text, begins)
                begins = False
        return tuple(ids)

    def _shared_ids(self, frame: Frame, shared: str) -> tuple[int, ...]:
        """The ids that every prompt with this class-wide part begins with."""
        with self._lock:
            known = self._shared.get((frame, shared))
        if known is not None:
            return known
        # The x keeps a template that trims the message from eating a follower made of white space.
        variants = [self._ids(frame, shared + follower + "x") for follower in _FOLLOWERS]
        ids = variants[0][: min(common_prefix(variants[0], other) for other in variants[1:])]
        with self._lock:
            _remember(self._shared, (frame, shared), ids)
        return ids

    def _frame(self, clock: float) -> Frame:
        before, after = self._at_clock(*self._render(_MARKER), clock)
        with self._lock:
            known = self._frames.get((before, after))
        if known is not None:
            return known
        first, last = self._control_span(before), self._control_span(after)
        cut, resume = first[1], last[0]
        frame = Frame(before[:cut], before[cut:], after[:resume], after[resume:])
        with self._lock:
            _remember(self._frames, (before, after), frame)
        return frame

    def _render(self, message: str) -> tuple[str, str]:
        """The template's text before and after the marker in `message`."""
        body = {"messages": [{"role": "user", "content": message}]}
        parts = str(self._server.post("/apply-template", body)["prompt"]).split(_MARKER)
        if len(parts) != 2:
            raise ConfigError(f"the model's chat template prints the user's message {len(parts) - 1} times, not once")
        return parts[0], parts[1]

    def _at_clock(self, before: str, after: str, clock: float) -> tuple[str, str]:
        """The rendered text with the server's today replaced by the day of `clock`, UTC."""
        wanted, today = datetime.fromtimestamp(clock, UTC), datetime.now()
        for form in self._date_formats:
            # The server's clock may be in another time zone, or past midnight since it rendered.
            for day in (today, today - timedelta(days=1), today + timedelta(days=1)):
                shown = day.strftime(form)
                if shown and (shown in before or shown in after):
                    before, after = (text.replace(shown, wanted.strftime(form)) for text in (before, after))
                    break
        return before, after

    def _control_span(self, text: str) -> tuple[int, int]:
        """Where the first control token of a template's text begins, and where the last ends; (len, 0): none."""
        start, end, at = len(text), 0, 0
        for piece in self._pieces(text):
            found = text.find(piece, at)
            if found < 0 or not piece:
                continue
            at = found + len(piece)
            if self.control_id(piece) is not None:
                start, end = min(start, found), at
        return start, end

    def _pieces(self, text: str) -> list[str]:
        if not text:
            return []
        body = {"content": text, "add_special": False, "parse_special": True, "with_pieces": True}
        tokens = self._server.post("/tokenize", body)["tokens"]
        return [token["piece"] for token in tokens if isinstance(token["piece"], str)]

    def _plain(self, text: str, add_special: bool) -> tuple[int, ...]:
        """Ids of a text in which nothing is a control token.

        llama.cpp makes gpt-oss's marks (`<|channel|>`) tokens that it finds in any text, recognised or not. So a text
        that spells one is cut inside it.
        """
        cuts = [match.start() + 1 for match in _MARK.finditer(text) if self._always_one_token(match[0])]
        ids: list[int] = []
        for start, end in zip([0, *cuts], [*cuts, len(text)], strict=True):
            ids += self._tokens(text[start:end], add_special and not start, False)
        return tuple(ids)

    def _always_one_token(self, mark: str) -> bool:
        with self._lock:
            known = self._marks.get(mark)
        if known is None:
            known = len(self._tokens(mark, False, False)) == 1
            with self._lock:
                _remember(self._marks, mark, known)
        return known

    def _tokens(self, text: str, add_special: bool, parse_special: bool) -> tuple[int, ...]:
        body = {"content": text, "add_special": add_special, "parse_special": parse_special}
        return tuple(self._server.post("/tokenize", body)["tokens"])


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """How many ids from the start are the same."""
    for index, (a, b) in enumerate(zip(first, second, strict=False)):
        if a != b:
            return index
    return min(len(first), len(second))


def _remember(memory: OrderedDict[Any, Any], key: Any, value: Any) -> None:
    memory[key] = value
    while len(memory) > _REMEMBERED:
        memory.popitem(last=False)
