"""Puts an answer's text together from its pieces, in order and without repeats, even if some get lost or come twice."""

from dataclasses import dataclass, field

from messages.errors import KvasirError
from messages.jobs import TokenEvent


class AnswerDiverged(KvasirError):
    """The job was decoded again, and the new text does not continue the text that was already passed on."""


@dataclass
class _Decode:
    """The pieces of one decode: the text up to the first gap, and the pieces after it."""

    text: str = ""
    next: int = 0
    later: dict[int, str] = field(default_factory=dict)

    def add(self, event: TokenEvent) -> None:
        if event.index >= self.next:
            self.later[event.index] = event.text
        while self.next in self.later:
            self.text += self.later.pop(self.next)
            self.next += 1


class AnswerText:
    """Takes pieces and gives out new text. Text after a gap is held back; `rest` adds it from the result.

    If a job is decoded again (another `delivery`), its text must begin with the text passed on so far; only what goes
    beyond that is passed on. Two decodes may run at once, and then their pieces arrive mixed.
    """

    def __init__(self) -> None:
        self.sent_text = ""
        self._decodes: dict[str, _Decode] = {}

    def feed(self, event: TokenEvent) -> str:
        """Add a piece, and return the text that can be passed on now, or ""."""
        decode = self._decodes.setdefault(event.delivery, _Decode())
        decode.add(event)
        if not decode.text.startswith(self.sent_text):
            return ""
        new = decode.text[len(self.sent_text) :]
        self.sent_text = decode.text
        return new

    def rest(self, text: str) -> str:
        """Return the part of the finished answer that was not passed on yet. Raises AnswerDiverged."""
        if not text.startswith(self.sent_text):
            raise AnswerDiverged("the job was decoded again, and the new answer differs from the text already sent")
        return text[len(self.sent_text) :]
