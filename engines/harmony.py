"""Models of the Harmony format (gpt-oss) think first, and give their answer in the final channel. Pure."""

from typing import Any


class FinalChannel:
    """Detects where the final channel of one answer opens.

    The answer itself starts after `<|channel|>final`, any further words of that header, and `<|message|>`.
    """

    def __init__(self, header: tuple[int, ...], message: int) -> None:
        """`header`: the ids of `<|channel|>final`; `message`: the id of `<|message|>`."""
        self._header = header
        self._message = message
        self._recent: tuple[int, ...] = ()
        self._in_header = False
        self.is_open = False

    def observe(self, token: int) -> None:
        """Follow one more sampled token."""
        if self.is_open:
            return
        if self._in_header and token == self._message:
            self.is_open = True
        self._recent = (*self._recent, token)[-len(self._header) :]
        self._in_header = self._recent == self._header or (self._in_header and token != self._header[0])


def final_channel(prompt: Any) -> FinalChannel | None:
    """A detector for one answer of a model with this prompt's vocabulary; None if its answers have no channels."""
    channel, message = prompt.control_id("<|channel|>"), prompt.control_id("<|message|>")
    if channel is None or message is None:
        return None
    return FinalChannel((channel, *prompt.plain_ids("final")), message)
