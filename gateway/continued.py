"""An answer's text from its pieces, in order and without repeats, whatever was lost or decoded twice."""

from dataclasses import dataclass, field

from messages.errors import KvasirError
from messages.jobs import TokenEvent


class AnswerDiverged(KvasirError):
    """The job was decoded again, to a text that does not continue what was already passed on."""


@dataclass
class _Decode:
    """The pieces of one decode: its text without a gap, and what came after one."""

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
    """Pieces in, new text out. What follows a gap is held back; `rest` fills it from the result.

    Of a job that is decoded again (another `delivery`) only what goes beyond the text passed on so far is new, and only
    if it begins with that. Two decodes may run at once, and their pieces come mixed.
    """

    def __init__(self) -> None:
        self.sent_text = ""
        self._decodes: dict[str, _Decode] = {}

    def feed(self, event: TokenEvent) -> str:
        """The text that can be passed on now, or ""."""
        decode = self._decodes.setdefault(event.delivery, _Decode())
        decode.add(event)
        if not decode.text.startswith(self.sent_text):
            return ""
        new = decode.text[len(self.sent_text) :]
        self.sent_text = decode.text
        return new

    def rest(self, text: str) -> str:
        """The rest of the finished answer. Raises AnswerDiverged."""
        if not text.startswith(self.sent_text):
            raise AnswerDiverged("the job was decoded again, and the new answer does not continue this one")
        return text[len(self.sent_text) :]
