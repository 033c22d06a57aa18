"""One prompt on its way through an MLX model: what its caller asked for, and the queue on which it gets the outputs."""

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

_POLL_S = 0.2  # how long a cancelled caller may wait; every look takes processor time from the model
_TOKENS_PER_PUT = 16
_begin_computing: Any = mx.async_eval
# Before 0.32, sequences get each other's processors once a sequence without any has left the batch.
_PROCESS_ALL = not hasattr(mlx_generate, "StopSequences")

Token = tuple[int, str]  # id, and why the answer ends with it: "stop" (not part of the answer), "length" or ""
Output = Record | list[Token] | PrefillReport | KvasirError


class PromptWork(ABC):
    """One prompt on its way through the model. Made by a caller, who takes its outputs; the loop does the rest."""

    def __init__(self, tokens: Sequence[int], prefix_cache: KVCache | None, to_feed: int) -> None:
        """`to_feed`: how many of the tokens the cache is to hold when the prompt is done."""
        self.tokens = list(tokens)
        self.to_feed = to_feed
        self.prefix_cache = prefix_cache
        self.fork: list[mlx_kv.CacheState] | None = None  # `prefix_cache` as arrays, once somebody has made them
        self.is_abandoned = False  # set by the caller, who has stopped listening
        self.caches: list[Any] = []
        self.position = 0  # tokens in the cache
        self.evaluated_tokens = 0  # prompt tokens that the model was given
        self._outputs: queue.SimpleQueue[Output] = queue.SimpleQueue()

    @abstractmethod
    def on_chunk(self) -> None:
        """Another chunk is on its way into the cache."""

    def begin(self, caches: list[Any], layout: KVLayout | None) -> None:
        """Take new caches, and put what was transferred into them. Raises KVTransferFailed."""
        if self.prefix_cache is not None:
            assert layout is not None  # else the engine has refused it
            if self.fork:
                mlx_kv.set_states(caches, self.fork)
            else:
                mlx_kv.fill(caches, layout, self.prefix_cache)
                if self.fork is not None:
                    self.fork += mlx_kv.states(caches)
            self.position = self.prefix_cache.num_tokens
            self.prefix_cache = None  # its memory is not needed any more
        self.caches = caches

    def put(self, output: Output) -> None:
        """Hand something to the caller."""
        self._outputs.put(output)

    def next_output(self, stop: threading.Event | None) -> Output:
        """The next output; raises what the loop reports, or Cancelled."""
        while True:
            if stop is not None and stop.is_set():
                raise Cancelled("cancelled in the engine")
            try:
                output = self._outputs.get(timeout=_POLL_S)
            except queue.Empty:
                continue
            if isinstance(output, KvasirError):
                raise output
            return output


class PrefillWork(PromptWork):
    """Puts each Block, the Window if there is one, and the PrefillReport."""

    def __init__(self, tokens: Sequence[int], prefix_cache: KVCache | None, layout: KVLayout, first: int) -> None:
        super().__init__(tokens, prefix_cache, len(tokens))
        self.layout = layout
        self._export_position = first
        self._computing: tuple[mx.array, int] | None = None  # rows that MLX computes while earlier ones are copied
        self._start = 0.0

    def begin(self, caches: list[Any], layout: KVLayout | None) -> None:
        """See PromptWork; the clock of `PrefillReport.prefill_s` starts here."""
        self._start = time.monotonic()
        super().begin(caches, layout)

    def on_chunk(self) -> None:
        """Have MLX compute the chunk, and meanwhile put the blocks of the one before it."""
        partial_tokens = self.position % self.layout.block_tokens if self.position < self.to_feed else 0
        start, end = self._export_position, self.position - partial_tokens
        rows = [mlx_kv.rows(self.caches, self.layout, start, end)] if end > start else []
        _begin_computing(mlx_kv.arrays(self.caches), rows)
        self._put_computed()
        if rows:
            self._computing, self._export_position = (rows[0], start), end

    def finish(self) -> None:
        """Put what is left."""
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
    """Puts lists of Tokens. `evaluated_tokens` is final when the first one is out.

    `eager`: each token at once, for callers who look at the text while it grows. The others get the first one, and
    then 16 together: each time one is passed on a thread wakes, and eight of those at each step slow the steps down.
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
        super().__init__(tokens, prefix_cache, len(tokens) - 1)  # the batch begins with the last
        self.max_tokens = max_tokens
        self.sampler = sampler
        self.constraint = constraint
        self.failure: KvasirError | None = None
        self._has_begun = False
        self._eager = eager
        self._token_buffer: list[Token] = []
        self._buffer_size = 1  # the first one goes at once

    def on_chunk(self) -> None:
        """Wait for it, so that no more than one chunk is ever under way."""
        mx.eval(mlx_kv.arrays(self.caches))

    def put_token(self, token: int, reason: str) -> None:
        """Another token; with a `reason`, the last."""
        self._token_buffer.append((token, reason))
        if reason or len(self._token_buffer) >= self._buffer_size:
            self.put(self._token_buffer)
            self._token_buffer = []
            self._buffer_size = 1 if self._eager else _TOKENS_PER_PUT

    @property
    def processors(self) -> list[Callable[[mx.array, mx.array], mx.array]]:
        """The processors of this sequence's logits in the batch."""
        if self.constraint is not None:
            return [self._apply_constraint]
        return [lambda context, logits: logits] if _PROCESS_ALL else []

    def _apply_constraint(self, context: mx.array, logits: mx.array) -> mx.array:
        """Rule out what the schema doesn't allow; the context ends with the token sampled last."""
        assert self.constraint is not None
        try:
            if self._has_begun:
                self.constraint.accept(np.asarray(context[-1:]).item())
            self._has_begun = True
            mask = mx.array(self.constraint.compute_mask())
        except InvalidSchema as error:  # raised here, it would end the whole batch
            self.failure = error
            return logits
        return mx.where(mask, logits, mx.array(-mx.inf, logits.dtype))
