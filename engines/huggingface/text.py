"""Turns token ids into text, piece by piece. Emits only whole characters, detects stop words, and leaves out a hidden
preamble. Pure."""

import codecs
from collections.abc import Sequence
from functools import cache

from engines.harmony import FinalChannel
from engines.huggingface.prompt import HFPrompt

_SENTENCEPIECE_SPACE = "\u2581"


class TextStream:
    """The text of one answer, as its tokens come.

    Stop words end it and are left out. Text that may be the start of a stop word is held back. An answer that never
    opens its final channel is returned whole at the end, so that a reader sees what happened.
    """

    def __init__(
        self, token_bytes: Sequence[bytes], stop: Sequence[str] = (), channel: FinalChannel | None = None
    ) -> None:
        self._token_bytes = token_bytes
        self._stop = [word for word in stop if word]
        self._channel = channel
        self._hidden: list[int] = []
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._buffer = ""
        self.has_stopped = False  # whether a stop word was found

    def push(self, token: int) -> str:
        """The text that this token completes; "" while a character or a stop word may be incomplete."""
        if self._channel is not None and not self._channel.is_open:
            self._channel.observe(token)
            self._hidden.append(token)
            return ""
        return self._release(self._decode(token))

    def finish(self) -> str:
        """The text that was held back, when no more tokens follow. An incomplete character is left out."""
        hidden = "" if self._channel is None or self._channel.is_open else "".join(map(self._decode, self._hidden))
        piece = self._release(hidden)
        if self.has_stopped:
            return piece
        rest, self._buffer = self._buffer, ""
        return piece + rest

    def _decode(self, token: int) -> str:
        # A model can have more outputs than its tokenizer has tokens. The other outputs have no text.
        return self._decoder.decode(self._token_bytes[token] if token < len(self._token_bytes) else b"")

    def _release(self, new: str) -> str:
        if self.has_stopped:
            return ""
        text = self._buffer + new
        positions = [position for word in self._stop if (position := text.find(word)) >= 0]
        self.has_stopped = bool(positions)
        cut = min(positions) if positions else len(text) - self._partial_stop_length(text)
        self._buffer = "" if positions else text[cut:]
        return text[:cut]

    def _partial_stop_length(self, text: str) -> int:
        """The length of the longest suffix of `text` that begins a stop word."""
        beginnings = (word[:size] for word in self._stop for size in range(1, len(word)))
        return max((len(beginning) for beginning in beginnings if text.endswith(beginning)), default=0)


def token_bytes(prompt: HFPrompt) -> list[bytes]:
    """The bytes that each id stands for; none for control tokens. Byte-level and SentencePiece tokenizers."""
    to_bytes = _from_byte_level if "ByteLevel" in prompt.decoder_types else _from_sentencepiece
    result = [to_bytes(text) for text in prompt.token_texts()]
    for number, text in prompt.added_tokens.items():
        result[number] = b"" if number in prompt.control_ids else text.encode()
    return result


def _from_byte_level(text: str) -> bytes:
    table = _byte_level_table()
    try:
        return bytes(table[character] for character in text)
    except KeyError:  # the token was added later, and is stored as plain text
        return text.encode()


def _from_sentencepiece(text: str) -> bytes:
    if len(text) == 6 and text.startswith("<0x") and text.endswith(">"):
        return bytes.fromhex(text[3:5])
    return text.replace(_SENTENCEPIECE_SPACE, " ").encode()


@cache
def _byte_level_table() -> dict[str, int]:
    """GPT-2's printable stand-ins: printable Latin-1 bytes are themselves, the others follow from U+0100 in order."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    unprintable = sorted(set(range(256)) - set(printable))
    return {chr(byte): byte for byte in printable} | {
        chr(0x100 + index): byte for index, byte in enumerate(unprintable)
    }
