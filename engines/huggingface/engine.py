"""What engines share that load a Hugging Face folder, whatever computes: its tokenizer, and the texts of its ids."""

from __future__ import annotations

from collections.abc import Sequence

from engines.base import EngineInfo, Tokenized
from engines.huggingface.constrain import Constrainer
from engines.huggingface.prompt import HFPrompt
from engines.huggingface.text import token_bytes
from messages.jobs import Part


class FolderEngine:
    """The half of an engine that knows ids and texts. The other half sets `_info`."""

    _info: EngineInfo

    def __init__(self, prompt: HFPrompt, num_logits: int) -> None:
        """`num_logits`: the width of the model's logits. Raises ConfigError if the tokenizer can't be used."""
        self._prompt = prompt
        self._token_bytes = token_bytes(prompt)
        self._constrainer = Constrainer(prompt, num_logits)

    @property
    def info(self) -> EngineInfo:
        """What is loaded."""
        return self._info

    def tokenize(self, prompt: Sequence[Part], clock: float) -> Tokenized:
        """See Tokenizes. Control tokens spelled in the text stay text."""
        return self._prompt.tokenize(prompt, clock)

    def count_tokens(self, text: str) -> int:
        """How many tokens a bare text is."""
        return self._prompt.count_tokens(text)

    def text_of(self, tokens: Sequence[int]) -> str:
        """See Detokenizes. A model may have more outputs than its tokenizer has tokens: those stand for nothing."""
        known = (self._token_bytes[id] for id in tokens if id < len(self._token_bytes))
        return b"".join(known).decode(errors="replace")
