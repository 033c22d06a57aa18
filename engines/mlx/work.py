"""One prompt on its way through an MLX model: the caller's request, and the queue on which it receives the outputs."""

import queue
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx_lm import generate as mlx_generate

from engines.huggingface.constrain import Constraint
from engines.mlx import kv as mlx_kv
from engines.mlx.sampling import Sampler
from messages.errors import Cancelled, InvalidSchema, KvasirError
from messages.jobs import PrefillReport
from messages.kv import KVCache, KVLayout, Record

_POLL_S = 0.2  # seconds between two checks for a cancelled call; each check takes CPU time from the model
_TOKENS_PER_PUT = 16
_begin_computing: Any = mx.async_eval
# Releases of mlx-lm before 0.32 mix up a batch's logits processors when a sequence that has none leaves the batch. So
# in those releases every sequence gets a logits processor.
_PROCESS_ALL = not hasattr(mlx_generate, "StopSequences")

# A token's id and a finish reason. The reason is "" if the answer goes on, "length" if this is its last token, and
# "stop" if this token only marks its end.
Token = tuple[int, str]
Output = Record | list[Token] | PrefillReport | KvasirError


class PromptWork(ABC):
    """One prompt on its way through the model. A caller creates it and takes its outputs, and the loop does the
    rest."""

    def __init__(self, tokens: Sequence[int], prefix_cache: KVCache | None, to_feed: int) -> None:
        """`to_feed`: how many tokens the cache should hold when the prompt is done."""
        self.tokens = list(tokens)
        self.to_feed = to_feed
        self.prefix_cache = prefix_cache
        # The state of the MLX caches after `prefix_cache` was loaded into them. The first decode fills the list, and
        # later decodes start from it. It is None if this cache is not pinned.
        self.fork: list[mlx_kv.CacheState] | None = None
        self.is_abandoned = False  # set by the caller when it stops listening
        self.caches: list[Any] = []
        self.position = 0  # how many tokens are in the cache
        self.evaluated_tokens = 0  # how many prompt tokens the model has computed
        self._outputs: queue.SimpleQueue[Output] = queue.SimpleQueue()

    @abstractmethod
    def on_chunk(self) -> None:
        """Called when another chunk is on its way into the cache."""

    def begin(self, caches: list[Any], layout: KVLayout | None) -> None:
        """Take new caches, and load the transferred cache into them. Raises KVTransferFailed."""
        if self.prefix_cache is not None:
            assert layout is not None  # an engine without a layout would have refused the prefix earlier
            if self.fork:
                mlx_kv.set_states(caches, self.fork)
            else:
                mlx_kv.fill(caches, layout, self.prefix_cache)
                if self.fork is not None:
                    self.fork += mlx_kv.states(caches)
            self.position = self.prefix_cache.num_tokens
            self.prefix_cache = None  # frees memory that is no longer needed
        self.caches = caches

    def put(self, output: Output) -> None:
        """Send an output to the caller."""
        self._outputs.put(output)

    def next_output(self, stop: threading.Event | None) -> Output:
        """The next output. Raises the loop's error, or Cancelled."""
        while True:
            if stop is not None and stop.is_set():
                raise Cancelled("cancelled while the engine was working")
            try:
                output = self._outputs.get(timeout=_POLL_S)
            except queue.Empty:
                continue
            if isinstance(output, KvasirError):
                raise output
            return output


class PrefillWork(PromptWork):
    """Sends each Block, the Window if there is one, and the PrefillReport."""

    def __init__(self, tokens: Sequence[int], prefix_cache: KVCache | None, layout: KVLayout, first: int) -> None:
        super().__init__(tokens, prefix_cache, len(tokens))
        self.layout = layout
        self._export_position = first
        self._computing: tuple[mx.array, int] | None = None  # rows that MLX computes while earlier rows are copied
        self._start = 0.0

    def begin(self, caches: list[Any], layout: KVLayout | None) -> None:
        """See PromptWork; the clock of `PrefillReport.prefill_s` starts here."""
        self._start = time.monotonic()
        super().begin(caches, layout)

    def on_chunk(self) -> None:
        """Start computing the chunk, and meanwhile send the blocks of the previous one."""
        partial_tokens = self.position % self.layout.block_tokens if self.position < self.to_feed else 0
        start, end = self._export_position, self.position - partial_tokens
        rows = [mlx_kv.rows(self.caches, self.layout, start, end)] if end > start else []
        _begin_computing(mlx_kv.arrays(self.caches), rows)
        self._put_computed()
        if rows:
            self._computing, self._export_position = (rows[0], start), end

    def finish(self) -> None:
        """Send what is left."""
        self._put_computed()
        for record in mlx_kv.snapshot(self.caches, self.layout, self.position):
            self.put(record)
        self.put(
            PrefillReport(
                computed_tokens=self.evaluated_tokens,
                restored_tokens=self.position - self.evaluated_tokens,
                prefill_s=time.monotonic() - self._start,
            )
        )

    def _put_computed(self) -> None:
        if self._computing is not None:
            rows, start = self._computing
            self._computing = None
            for block in mlx_kv.to_blocks(rows, self.layout, start):
                self.put(block)


class DecodeWork(PromptWork):
    """Sends lists of Tokens. `evaluated_tokens` is final when the first token is sent.

    `eager`: send each token at once, for callers that stream the text. Other callers get the first token, and then 16
    together. Each message wakes a thread, and eight of these wakeups at each step would slow the steps down.
    """

    def __init__(
        self,
        tokens: Sequence[int],
        prefix_cache: KVCache | None,
        max_tokens: int,
        sampler: Sampler,
        constraint: Constraint | None,
        eager: bool,
    ) -> None:
        super().__init__(tokens, prefix_cache, len(tokens) - 1)  # the batch itself computes the last prompt token
        self.max_tokens = max_tokens
        self.sampler = sampler
        self.constraint = constraint
        self.failure: KvasirError | None = None
        self._has_begun = False
        self._eager = eager
        self._token_buffer: list[Token] = []
        self._buffer_size = 1  # the first token is sent at once

    def on_chunk(self) -> None:
        """Wait for the chunk, so that at most one is ever under way."""
        mx.eval(mlx_kv.arrays(self.caches))

    def put_token(self, token: int, reason: str) -> None:
        """Add a token. With a `reason` it is the last one."""
        self._token_buffer.append((token, reason))
        if reason or len(self._token_buffer) >= self._buffer_size:
            self.put(self._token_buffer)
            self._token_buffer = []
            self._buffer_size = 1 if self._eager else _TOKENS_PER_PUT

    @property
    def processors(self) -> list[Callable[[mx.array, mx.array], mx.array]]:
        """The processors for this sequence's logits in the batch."""
        if self.constraint is not None:
            return [self._apply_constraint]
        return [lambda context, logits: logits] if _PROCESS_ALL else []

    def _apply_constraint(self, context: mx.array, logits: mx.array) -> mx.array:
        """Rule out tokens that the schema doesn't allow. The context ends with the token sampled last."""
        assert self.constraint is not None
        try:
            if self._has_begun:
                self.constraint.accept(np.asarray(context[-1:]).item())
            self._has_begun = True
            mask = mx.array(self.constraint.compute_mask())
        except InvalidSchema as error:  # an error raised here would end the whole batch
            self.failure = error
            return logits
        return mx.where(mask, logits, mx.array(-mx.inf, logits.dtype))
