"""The two engine protocols, and what an engine says of itself.

An engine knows tokens, KV caches and text. It knows no queue, no store and no job. Errors it may raise, and only
these: ContextExceeded, InvalidSchema, InvalidPrompt, EngineUnavailable, KVTransferFailed, Cancelled (all from
messages.errors), and ConfigError while it starts.
"""

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Generic, Protocol, TypeVar, runtime_checkable

from engines.rope import Rope
from engines.sketch import Sketches
from messages.errors import ContextExceeded
from messages.jobs import Part, PrefillReport, Sampling
from messages.kv import KVCache, KVLayout, Record
from messages.workers import Link


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an engine can do, declared; the worker proves the KV transfer when it starts."""

    prefill: bool
    decode: bool
    exports_kv: bool
    imports_kv: bool
    blocks_while_computing: bool = False  # emits blocks before the last token is computed
    resumes: bool = False  # can start from a stored prefix

    @classmethod
    def local(cls, *, transfers_kv: bool, blocks_while_computing: bool = False) -> "Capabilities":
        """An engine that runs a model here: it decodes, and with KV transfer it prefills and resumes too."""
        can, early = transfers_kv, transfers_kv and blocks_while_computing
        return cls(prefill=can, decode=True, exports_kv=can, imports_kv=can, blocks_while_computing=early, resumes=can)

    @classmethod
    def text_only(cls) -> "Capabilities":
        """An engine whose model runs behind a server: text in, text out, no KV cache."""
        return cls(prefill=False, decode=True, exports_kv=False, imports_kv=False)


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """A loaded model in an engine."""

    engine: str
    device: str  # "cpu", "cuda", "metal", "simulated"
    context: int  # tokens, prompt and answer together
    slots: int  # sequences decoded at once
    fingerprint: str  # identifies the KV family (shapes, RoPE, tokenizer, weights); "" if nothing is transferred
    tokenizer: str  # hash of the vocabulary
    layout: KVLayout | None  # None: no KV cache goes in or out
    capabilities: Capabilities
    chars_per_token: float = 0.0  # on a sample of code and prose
    ropes: tuple[Rope, ...] = ()  # for full-attention layers, then for windowed ones; empty: not known
    vocabulary: int = 0  # ids that the tokenizer has; 0: not known, and no sketch is made
    rounding: str = "f32"  # precision of the weights: f32, f16, bf16, q8 or q4 (anything coarser than 8 bits)
    build: str = ""  # of the program that computes
    slot_file_version: str = ""  # format of its KV cache files; "": it does not use files
    outside: str = ""  # host outside private networks that prompts go to; "": they stay inside
    prefill_slots: int = 1  # prompts computed at once
    weights: str = ""  # fingerprint of the very files where `fingerprint` is a family's; "": that is the same

    def require_capacity(self, tokens: int) -> None:
        """Raises ContextExceeded unless the context holds so many."""
        if tokens > self.context:
            raise ContextExceeded(f"{tokens:,} tokens, but the context holds {self.context:,}")


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """A rendered and tokenized prompt. Its first `shared_tokens` ids are those of every prompt with this prefix.

    No ids: the engine keeps them to itself (see DecodesText); the job then travels as text.
    """

    ids: tuple[int, ...]
    shared_tokens: int


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished decode."""

    text: str
    tokens: tuple[int, ...]  # as sampled, without the end-of-sequence token; () if the engine doesn't tell
    completion_tokens: int
    finish_reason: str  # "stop" or "length"
    evaluated_tokens: int  # prompt tokens that the engine evaluated, by its own counter
    first_token_s: float  # from the call to the first token
    seconds: float  # from the call to the last token, waiting for a slot inside the engine included
    # How likely each value was that it might have had (`QuestionAnswer.likelihoods`): found by whoever asked.
    likelihoods: tuple[float, ...] = ()


class StreamedText:
    """The text of an answer as it comes, piece by piece."""

    def __init__(self, start: float, on_text: Callable[[str], None] | None) -> None:
        """`start`: when the engine was called, on the monotonic clock."""
        self.start = start
        self.text = ""
        self.first_token_s = 0.0  # 0: none has come
        self._on_text = on_text

    def note_token(self) -> None:
        """A token has come, with text or without."""
        self.first_token_s = self.first_token_s or time.monotonic() - self.start

    def add(self, piece: str) -> None:
        """Another piece, "" among them, which nobody is told of."""
        self.text += piece
        if piece and self._on_text:
            self._on_text(piece)


class Tokenizes(Protocol):
    """Both engines render and tokenize, with the same result for the same weights."""

    @property
    def info(self) -> EngineInfo:
        """What is loaded; constant for the engine's life."""

    def tokenize(self, prompt: Sequence[Part], clock: float) -> TokenizedPrompt:
        """Render the model's chat template around the messages of `prompt`, and tokenize it.

        `clock` (seconds since the epoch) is what a template that prints the date is given. Raises InvalidPrompt for
        messages that the template can't render, each once and in their order.
        """

    def count_tokens(self, text: str) -> int:
        """The number of tokens in a bare text."""

    def close(self) -> None:
        """Unload. Calls in progress raise EngineUnavailable. Idempotent."""


class PrefillEngine(Tokenizes, Protocol):
    """Computes KV caches. Callable from `info.prefill_slots` threads at once; one caller more waits."""

    def prefill(
        self,
        tokens: Sequence[int],
        emit: Callable[[Record], None],
        first: int = 0,
        resume: KVCache | None = None,
        stop: threading.Event | None = None,
    ) -> PrefillReport:
        """Compute the KV cache of `tokens` (all of them: the caller leaves the prompt's last one out).

        Calls `emit` with each block, in order of position, as early as the engine can; blocks that end at or before
        `first` are left out (they are stored already). A sliding-window model also emits one Window, at the end.

        Args:
            tokens: prompt token ids, at least one.
            emit: runs in the calling thread; what it is given stays valid and unchanged.
            first: position, a multiple of `layout.block_tokens`.
            resume: cache of a stored prefix of `tokens`, used instead of computing it where `capabilities.resumes`.
            stop: when set, raises Cancelled soon.

        Returns:
            The tokens that the engine evaluated, those that it took from `resume`, and its seconds; its caller knows
            the rest of a report.

        Raises:
            ContextExceeded, EngineUnavailable, KVTransferFailed (resume is unusable), Cancelled.
        """


class DecodeEngine(Tokenizes, Protocol):
    """Generates text from a KV cache. Callable from `info.slots` threads at once; batching is the engine's business."""

    def decode(
        self,
        tokens: Sequence[int],
        cache: KVCache | None,
        sampling: Sampling,
        on_text: Callable[[str], None] | None = None,
        stop: threading.Event | None = None,
    ) -> Answer:
        """Generate an answer to the prompt `tokens`.

        With `cache`, which covers a beginning of `tokens` and leaves at least the last, only the rest is evaluated;
        without, all of them, in a cleared slot. The answer's `evaluated_tokens` is the engine's own counter, so that
        the caller can prove it.

        Args:
            on_text: called with each new piece of text, in the calling thread.
            stop: when set, raises Cancelled within a second.

        Raises:
            ContextExceeded: prompt and `sampling.max_tokens` don't fit the context.
            InvalidSchema: the schema can't be made a constraint.
            KVTransferFailed: the cache has another layout, covers no beginning of the tokens, or can't be restored.
            EngineUnavailable, Cancelled.
        """

    def pin_cache(self, tokens: Sequence[int], cache: KVCache) -> AbstractContextManager[None]:
        """For the length of the block, every `decode` from this very `cache` begins with a copy inside the engine.

        So it is imported once, and many answers are forked from it. `tokens` begin with those that it covers. Raises
        KVTransferFailed, EngineUnavailable.
        """

    def top_logprobs(
        self, tokens: Sequence[int], cache: KVCache | None, stop: threading.Event | None = None
    ) -> dict[int, float]:
        """What the model expects next after the prompt `tokens`: the likeliest ids (64) with their log-probabilities.

        Natural logarithms of the raw probabilities, before grammar and sampling, likeliest first. `cache` as for
        `decode`; so are the errors.
        """


E = TypeVar("E", bound=PrefillEngine | DecodeEngine, covariant=True)


class Detokenizes(Protocol):
    """A decode engine whose token ids stand for text."""

    def text_of(self, tokens: Sequence[int]) -> str:
        """The text of these ids, as an answer shows it; U+FFFD for what is no whole character."""


def outage_of(engine: object) -> str:
    """Why an engine is away, as its property `outage` says; "": it is there, or can't be away without its worker.

    Away is one whose program is another process, which has ended and comes back. Nothing is asked of it meanwhile: its
    worker takes no jobs.
    """
    return getattr(engine, "outage", "")


@dataclass(frozen=True, slots=True)
class LoadedEngine(Generic[E]):
    """A model in an engine. `why_no_kv`: a sentence if its KV transfer was not proved."""

    engine: E
    why_no_kv: str = ""
    sketches: Sketches = field(default_factory=Sketches)  # whose KV caches it takes
    template: str = ""  # as `engines.worker_info.template_name` names it
    links: tuple[Link, ...] = ()  # of its machine, as far as they were measured


@runtime_checkable
class DecodesText(Protocol):
    """A decode engine that renders and tokenizes by itself and tells nobody the ids. Nothing is transferred to it.

    Its `tokenize` gives no ids, and `decode_text` takes the place of `decode`.
    """

    def decode_text(
        self,
        prompt: Sequence[Part],
        sampling: Sampling,
        on_text: Callable[[str], None] | None = None,
        stop: threading.Event | None = None,
    ) -> Answer:
        """Generate an answer to `prompt`. Arguments and errors as for `DecodeEngine.decode`, and InvalidPrompt."""
