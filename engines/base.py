"""The two engine protocols, and what an engine reports about itself.

An engine knows tokens, KV caches and text. It knows no queue, no store and no job. It may raise only these errors:
ContextExceeded, InvalidSchema, InvalidPrompt, EngineUnavailable, KVTransferFailed, Cancelled (all from
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

# The `prefill_slots` of an engine that computes one prompt at a time. While the blocks of one prompt are stored, the
# engine computes the next prompt. Otherwise a GPU would wait for the network after each prompt.
PROMPTS_IN_TURN = 2


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an engine declares that it can do. The worker proves the KV transfer when it starts."""

    prefill: bool
    decode: bool
    exports_kv: bool
    imports_kv: bool
    blocks_while_computing: bool = False  # prefill emits its first blocks before it has computed the last token
    resumes: bool = False  # prefill can start from a stored prefix

    @classmethod
    def local(cls, *, transfers_kv: bool, blocks_while_computing: bool = False) -> "Capabilities":
        """The capabilities of an engine that runs a model itself: it decodes, and if it transfers KV caches, it also
        prefills and resumes."""
        can, early = transfers_kv, transfers_kv and blocks_while_computing
        return cls(prefill=can, decode=True, exports_kv=can, imports_kv=can, blocks_while_computing=early, resumes=can)

    @classmethod
    def text_only(cls) -> "Capabilities":
        """The capabilities of an engine whose model runs behind a server: text goes in and out, without KV caches."""
        return cls(prefill=False, decode=True, exports_kv=False, imports_kv=False)


@dataclass(frozen=True, slots=True)
class EngineInfo:
    """A loaded model in an engine."""

    engine: str
    device: str  # such as "cpu", "cuda", "metal" or "simulated"
    context: int  # maximum number of tokens that a prompt and its answer can have together
    slots: int  # how many sequences the engine decodes at once
    fingerprint: str  # identifies the KV family (shapes, RoPE, tokenizer, weights); "" if no KV cache is transferred
    tokenizer: str  # hash of the vocabulary
    layout: KVLayout | None  # None if the engine transfers no KV cache
    capabilities: Capabilities
    chars_per_token: float = 0.0  # measured on a sample of code and prose; 0: unknown
    ropes: tuple[Rope, ...] = ()  # RoPE of the full-attention layers, then of the windowed layers; empty if not known
    vocabulary: int = 0  # number of token ids; 0: unknown, so no sketch is made
    rounding: str = "f32"  # precision of the weights: f32, f16, bf16, q8 or q4 (anything coarser than 8 bits)
    build: str = ""  # version of the program that runs the model
    slot_file_version: str = ""  # format of the engine's KV cache files; empty if it uses no files
    outside: str = ""  # host that receives the prompts, if it is outside private networks; otherwise empty
    prefill_slots: int = 1  # how many prompts prefill takes at once
    weights: str = ""  # the weights' own fingerprint, if `fingerprint` names a family; otherwise empty

    def require_capacity(self, tokens: int) -> None:
        """Raises ContextExceeded unless the context holds `tokens`."""
        if tokens > self.context:
            raise ContextExceeded(
                f"prompt and answer need {tokens:,} tokens, but the context holds only {self.context:,}"
            )


@dataclass(frozen=True, slots=True)
class TokenizedPrompt:
    """A rendered and tokenized prompt. Its first `shared_tokens` ids are the same in every prompt with this class-wide
    part.

    If there are no ids, the engine does not reveal them (see DecodesText), and the job travels as text.
    """

    ids: tuple[int, ...]
    shared_tokens: int


@dataclass(frozen=True, slots=True)
class Answer:
    """A finished decode."""

    text: str
    tokens: tuple[int, ...]  # the sampled ids, without the end-of-sequence token; () if the engine doesn't reveal ids
    completion_tokens: int
    finish_reason: str  # "stop" or "length"
    evaluated_tokens: int  # how many prompt tokens the engine evaluated, according to its own counter
    first_token_s: float  # seconds from the call to the first token
    seconds: float  # seconds from the call to the last token, including the wait for a slot inside the engine

    # Likelihoods of the values that the answer could have (`QuestionAnswer.likelihoods`). The engine leaves them empty,
    # and its caller fills them in.
    likelihoods: tuple[float, ...] = ()


class StreamedText:
    """The text of an answer as it arrives, piece by piece."""

    def __init__(self, start: float, on_text: Callable[[str], None] | None) -> None:
        """`start` is the time of the call to the engine, on the monotonic clock."""
        self.start = start
        self.text = ""
        self.first_token_s = 0.0  # 0 until the first token arrives
        self._on_text = on_text

    def note_token(self) -> None:
        """Note that a token has arrived, with or without text."""
        self.first_token_s = self.first_token_s or time.monotonic() - self.start

    def add(self, piece: str) -> None:
        """Add a piece of text. An empty piece is not passed on."""
        self.text += piece
        if piece and self._on_text:
            self._on_text(piece)


class Tokenizes(Protocol):
    """What both kinds of engine share: they render and tokenize, with the same result for the same weights."""

    @property
    def info(self) -> EngineInfo:
        """The loaded model. It does not change while the engine lives."""

    def tokenize(self, prompt: Sequence[Part], clock: float) -> TokenizedPrompt:
        """Render the model's chat template around the messages of `prompt`, and tokenize it.

        `clock` (seconds since the epoch) is the time for templates that print the date. Raises InvalidPrompt unless the
        template prints each message exactly once and in order.
        """

    def count_tokens(self, text: str) -> int:
        """The number of tokens in a bare text."""

    def close(self) -> None:
        """Unload the model. Calls in progress raise EngineUnavailable. Idempotent."""


class PrefillEngine(Tokenizes, Protocol):
    """Computes KV caches. Callable from any thread. The engine may batch the calls, or let them wait for each other."""

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
    """Generates text from a KV cache. Callable from `info.slots` threads at once; the engine may batch the calls."""

    def decode(
        self,
        tokens: Sequence[int],
        cache: KVCache | None,
        sampling: Sampling,
        on_text: Callable[[str], None] | None = None,
        stop: threading.Event | None = None,
    ) -> Answer:
        """Generate an answer to the prompt `tokens`.

        `cache` covers a prefix of `tokens`, without at least the last one, and only the remaining tokens are evaluated.
        Without a cache all tokens are evaluated, in a cleared slot. The answer's `evaluated_tokens` is the engine's own
        counter, with which the caller can prove this.

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
        """For the length of the block, every `decode` from this `cache` object starts from a copy inside the engine.

        So the cache is imported once, and many answers are forked from it. `tokens` start with the tokens that it
        covers. Raises KVTransferFailed, EngineUnavailable.
        """

    def top_logprobs(
        self, tokens: Sequence[int], cache: KVCache | None, stop: threading.Event | None = None
    ) -> dict[int, float]:
        """What the model expects after the prompt `tokens`: the 64 likeliest ids with their log-probabilities.

        These are natural logarithms of the raw probabilities, before grammar and sampling, likeliest first. `cache` and
        errors are the same as for `decode`.
        """


E = TypeVar("E", bound=PrefillEngine | DecodeEngine, covariant=True)


class Detokenizes(Protocol):
    """A decode engine whose token ids stand for text."""

    def text_of(self, tokens: Sequence[int]) -> str:
        """The text of these ids, as an answer shows it; U+FFFD for incomplete characters."""


def outage_of(engine: object) -> str:
    """Why an engine is away, from its property `outage`; "": it is there, or it runs in the worker's own process.

    An engine is away if it uses another process that has ended and will come back. Until then its worker takes no jobs.
    """
    return getattr(engine, "outage", "")


@dataclass(frozen=True, slots=True)
class LoadedEngine(Generic[E]):
    """A model in an engine. `why_no_kv` is a sentence if its KV transfer was not proved."""

    engine: E
    why_no_kv: str = ""
    sketches: Sketches = field(default_factory=Sketches)  # decides whose KV caches this engine accepts
    template: str = ""  # from `engines.worker_info.template_name`
    links: tuple[Link, ...] = ()  # this machine's network links, as last measured


@runtime_checkable
class DecodesText(Protocol):
    """A decode engine that renders and tokenizes internally and doesn't reveal the ids. No KV cache is transferred to
    it.

    Its `tokenize` returns no ids, and `decode_text` replaces `decode`.
    """

    def decode_text(
        self,
        prompt: Sequence[Part],
        sampling: Sampling,
        on_text: Callable[[str], None] | None = None,
        stop: threading.Event | None = None,
    ) -> Answer:
        """Generate an answer to `prompt`. Arguments and errors as for `DecodeEngine.decode`, and InvalidPrompt."""
