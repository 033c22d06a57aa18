"""What engines that load a Hugging Face folder share, whatever computes the model: the tokenizer, and the texts of
token ids."""

import time
from collections.abc import Callable, Iterable, Sequence

from engines.base import Answer, EngineInfo, StreamedText, TokenizedPrompt
from engines.harmony import final_channel
from engines.huggingface.constrain import Constrainer
from engines.huggingface.prompt import HFPrompt
from engines.huggingface.text import TextStream, token_bytes
from messages.errors import KVTransferFailed
from messages.jobs import Part, Sampling
from messages.kv import KVCache, KVLayout


class FolderEngine:
    """The part of an engine that handles ids and texts. The subclass sets `info`.

    If its layout is None, the subclass also sets `_no_kv_transfer` to a sentence that says why nothing is transferred.
    """

    info: EngineInfo
    _no_kv_transfer = ""

    def __init__(self, prompt: HFPrompt, num_logits: int) -> None:
        """`num_logits`: the width of the model's logits. Raises ConfigError if the tokenizer can't be used."""
        self._prompt = prompt
        self._token_bytes = token_bytes(prompt)
        self._constrainer = Constrainer(prompt, num_logits)

    def tokenize(self, prompt: Sequence[Part], clock: float) -> TokenizedPrompt:
        """See Tokenizes. Control tokens spelled in the text stay text."""
        return self._prompt.tokenize(prompt, clock)

    def count_tokens(self, text: str) -> int:
        """The number of tokens in a bare text."""
        return self._prompt.count_tokens(text)

    def text_of(self, tokens: Sequence[int]) -> str:
        """See Detokenizes. A model may have more outputs than its tokenizer has tokens; the extra ids have no text."""
        pieces = (self._token_bytes[id] for id in tokens if id < len(self._token_bytes))
        return b"".join(pieces).decode(errors="replace")

    def _require_layout(self) -> KVLayout:
        if self.info.layout is None:
            raise KVTransferFailed(self._no_kv_transfer)
        return self.info.layout

    def _check_call(self, tokens: Sequence[int], cache: KVCache | None, max_tokens: int) -> None:
        self.info.require_capacity(len(tokens) + max_tokens)
        if cache is not None:
            cache.require_layout(self._require_layout())
            cache.require_part_of(len(tokens))

    def _collect_answer(
        self,
        tokens: Iterable[int],
        sampling: Sampling,
        on_text: Callable[[str], None] | None,
        start: float,
        evaluated: Callable[[], int],
    ) -> Answer:
        """Collects the answer from sampled tokens as they arrive, without the token that ends it. A stop word also ends
        it.

        `start`: when `decode` was called (monotonic seconds). `evaluated` returns the prompt tokens evaluated, by the
        engine's counter at the end.
        """
        stream = TextStream(self._token_bytes, sampling.stop, final_channel(self._prompt))
        answer = StreamedText(start, on_text)
        answer_ids: list[int] = []
        for token in tokens:
            answer.note_token()
            answer_ids.append(token)
            answer.add(stream.push(token))
            if stream.has_stopped:
                break
        answer.add(stream.finish())
        cut_off = len(answer_ids) == sampling.max_tokens and not stream.has_stopped
        seconds = time.monotonic() - start
        return Answer(
            text=answer.text,
            tokens=tuple(answer_ids),
            completion_tokens=len(answer_ids),
            finish_reason="length" if cut_off else "stop",
            evaluated_tokens=evaluated(),
            first_token_s=answer.first_token_s or seconds,
            seconds=seconds,
        )
