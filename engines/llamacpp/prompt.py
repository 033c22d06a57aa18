"""Tokenizes prompts through a llama.cpp server, with its own tokenizer and chat template. See `engines.chat`."""

import json
import re
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from functools import lru_cache
from typing import Any

from engines.chat import MEMORY_SIZE, ChatPrompt, cut_inside
from engines.llamacpp.http import LlamaServer, ServerRefused
from messages.errors import InvalidPrompt

_MARK = r"<\|[^<>|\s]{1,40}\|>"
_TEMPLATE_FAILED = (400, 500)  # the statuses with which a server reports that its template failed
_DATE_CALL = re.compile(r"""strftime_now\(\s*(['"])(.*?)\1\s*\)""")


class LlamaPrompt(ChatPrompt):
    """Tokenizes prompts on one server. Callable from any thread."""

    def __init__(self, server: LlamaServer, marks: Iterable[str] = (), has_template: bool = True) -> None:
        """`marks`: the texts, as far as known, that the server turns into one token wherever they appear.

        `has_template`: whether the model has a chat template. For a model without one, the server would use its own.

        Raises ConfigError if the model's chat template can't be used.
        """
        super().__init__()
        self._server = server
        choices = [_MARK, *map(re.escape, sorted(marks, key=len, reverse=True))]
        self._marks = re.compile("|".join(choices))
        self._is_always_one_token = lru_cache(MEMORY_SIZE)(self._ask_for_mark)
        template = str(server.get("/props").get("chat_template", ""))
        self._date_formats = sorted({match[2] for match in _DATE_CALL.finditer(template)})
        self._has_template = has_template
        if has_template:
            self.require_template()

    def raw_ids(self, text: str) -> Sequence[int]:
        """See ChatPrompt."""
        return self.plain_ids(text, add_special=True)

    def render(self, messages: list[dict[str, Any]], clock: float) -> str:
        """See ChatPrompt."""
        if not self._has_template:
            raise InvalidPrompt("the model has no chat template, so it can continue a text but can't answer messages")
        for call in (call["function"] for message in messages for call in message.get("tool_calls", ())):
            call["arguments"] = json.dumps(call["arguments"])  # OpenAI's API has the arguments as JSON text
        try:
            text = str(self._server.post("/apply-template", {"messages": messages})["prompt"])
        except ServerRefused as error:
            if error.status not in _TEMPLATE_FAILED:
                raise
            raise InvalidPrompt(f"the chat template can't be rendered: {' '.join(str(error).split())}") from None
        return self._at_clock(text, clock)

    def piece_ids(self, text: str, begins: bool, control: bool) -> Sequence[int]:
        """See ChatPrompt."""
        return self._tokens(text, add_special=begins, parse_special=True) if control else self.plain_ids(text, begins)

    def control_id(self, text: str) -> int | None:
        """The id of the control token with this text, or None."""
        ids = self._tokens(text, add_special=False, parse_special=True)
        return ids[0] if len(ids) == 1 and text and ids != self.plain_ids(text) else None

    def _at_clock(self, text: str, clock: float) -> str:
        """The rendered text, with the server's current date replaced by the day of `clock`, UTC."""
        clock_day, today = datetime.fromtimestamp(clock, UTC), datetime.now()
        for form in self._date_formats:
            # The server may be in another time zone, or midnight may have passed since it rendered the template.
            for day in (today, today - timedelta(days=1), today + timedelta(days=1)):
                date = day.strftime(form)
                if date and date in text:
                    text = text.replace(date, clock_day.strftime(form))
                    break
        return text

    def control_span(self, text: str) -> tuple[int, int]:
        """See ChatPrompt."""
        start, end, position = len(text), 0, 0
        body = {"content": text, "add_special": False, "parse_special": True, "with_pieces": True}
        tokens = self._server.post("/tokenize", body)["tokens"] if text else []
        for piece in (token["piece"] for token in tokens if isinstance(token["piece"], str)):
            start_of_piece = text.find(piece, position)
            if start_of_piece < 0 or not piece:
                continue
            position = start_of_piece + len(piece)
            if self.control_id(piece) is not None:
                start, end = min(start, start_of_piece), position
        return start, end

    def plain_ids(self, text: str, add_special: bool = False) -> tuple[int, ...]:
        """Ids of a text in which nothing is a control token.

        llama.cpp turns matching text into user-defined tokens (gpt-oss's `<|channel|>`, Gemma's `<table>`), even if
        control tokens are not recognised. So a text that spells such a token is cut inside it.
        """
        found = [match for match in self._marks.finditer(text) if self._is_always_one_token(match[0])]
        return self._tokens(cut_inside(text, found), add_special=add_special, parse_special=False)

    def _ask_for_mark(self, mark: str) -> bool:
        return len(self._tokens(mark, add_special=False, parse_special=False)) == 1

    def _tokens(self, text: str | list[str], *, add_special: bool, parse_special: bool) -> tuple[int, ...]:
        """The ids of a text, or of several texts that are tokenized separately in one request. `add_special` applies to
        the first (llama.cpp #2306)."""
        body = {"content": text, "add_special": add_special, "parse_special": parse_special}
        return tuple(self._server.post("/tokenize", body)["tokens"])
