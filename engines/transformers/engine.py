"""PyTorch as an engine, through the transformers library: prefill in chunks on CUDA or CPU; decode as the reference.

`weights` is a Hugging Face model folder, or a hub's OWNER/NAME (see `transformers_model.find_weights`). Blocks leave
while later chunks are computed; on CUDA they are copied in parallel. Decode does not batch: each call runs through the
model separately. So it is a reference for what the model answers, not for its speed.
"""

import gc
import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch
from transformers import DynamicCache

from engines.base import PROMPTS_IN_TURN, Answer, Capabilities, EngineInfo
from engines.chat import common_prefix
from engines.entry import EngineOptions
from engines.huggingface.constrain import Constraint
from engines.huggingface.engine import FolderEngine
from engines.huggingface.prompt import HFPrompt
from engines.huggingface.weights import builds, fingerprint, rounding
from engines.logprobs import top_logprobs
from engines.rope import Rope
from engines.transformers.kv import Copies, Exporter, fork_layers, restore
from engines.transformers.model import Check, ModelRun, TorchModel, Weights, find_weights
from engines.transformers.sampling import Sampler, Scores
from engines.waiting import acquire_slot, check_running
from messages.errors import EngineUnavailable, KVTransferFailed
from messages.jobs import PrefillReport, Sampling
from messages.kv import KVCache, KVLayout, Record

_log = logging.getLogger(__name__)
# Tokens per chunk: enough to keep a GPU busy, but few enough that the first blocks can be sent early.
_CHUNK_TOKENS = {"cuda": 2048, "cpu": 512}
# While a chunk is computed, this many earlier chunks may still have blocks that have not left the device.
_IN_FLIGHT = {"cuda": 1, "cpu": 0}


def open_engine(options: EngineOptions) -> "TransformersEngine":
    """Load a model. Raises ConfigError, which says what to do."""
    if options.threads:
        torch.set_num_threads(options.threads)
    weights = find_weights(options.weights)
    return TransformersEngine(weights, HFPrompt(weights.folder.path), TorchModel(weights), options)


class TransformersEngine(FolderEngine):
    """Both protocols of `engines.base` on one PyTorch model."""

    def __init__(self, weights: Weights, prompt: HFPrompt, model: TorchModel, options: EngineOptions) -> None:
        super().__init__(prompt, model.config.vocab_size)
        self._model: TorchModel | None = model
        self._closed = threading.Event()
        self._pinned_caches: dict[int, _PinnedCache] = {}
        self._prefilling = threading.Semaphore(1)
        self._slots = threading.Semaphore(options.slots)
        self._chunk_tokens = _CHUNK_TOKENS[model.device.type]
        self._in_flight = _IN_FLIGHT[model.device.type]
        layout: KVLayout | None = None
        ropes: tuple[Rope, ...] = ()
        try:
            layout, ropes = model.layout(weights.folder), model.ropes(weights.folder)
        except KVTransferFailed as error:
            self._no_kv_transfer = f"this transformers engine transfers no KV cache: {error}"
            _log.warning("%s", self._no_kv_transfer)
        self._exporter = Exporter(layout, model.device) if layout else None
        self.info = EngineInfo(
            engine="transformers",
            device=model.device.type,
            context=options.context or model.context,
            slots=options.slots,
            fingerprint=fingerprint(weights.folder, layout, prompt.tokenizer_hash) if layout else "",
            tokenizer=prompt.tokenizer_hash,
            layout=layout,
            ropes=ropes,
            capabilities=Capabilities.local(transfers_kv=layout is not None, blocks_while_computing=True),
            chars_per_token=prompt.chars_per_token,
            vocabulary=len(self._token_bytes),
            rounding=rounding(weights.folder, layout.dtype) if layout else "q4",
            build=builds("torch", "transformers"),
            prefill_slots=PROMPTS_IN_TURN,
        )

    def close(self) -> None:
        """Calls in progress raise EngineUnavailable. Idempotent."""
        self._closed.set()
        self._model = None  # a call in progress keeps its own reference to the model
        gc.collect()  # model and hooks refer to each other, so only the garbage collector frees them
        torch.cuda.empty_cache()

    def prefill(
        self,
        tokens: Sequence[int],
        emit: Callable[[Record], None],
        first: int = 0,
        resume: KVCache | None = None,
        stop: threading.Event | None = None,
    ) -> PrefillReport:
        """See PrefillEngine."""
        layout, exporter = self._require_layout(), self._exporter
        assert exporter is not None
        self.info.require_capacity(len(tokens))
        if resume is not None:
            resume.require_part_of(len(tokens), min_evaluated=0)
        under_way: deque[Copies] = deque()
        with self._slot(self._prefilling, stop) as model:
            start = time.monotonic()
            run = self._begin(model, resume)
            spans = deque(span for span in layout.block_spans(len(tokens)) if span[1] > first)
            check = partial(self._check_running, stop)
            for copies in self._chunks(model, run, exporter, tokens, spans, under_way, check):
                for block in copies.wait_for_blocks():
                    emit(block)
            records: list[Record] = [block for copies in under_way for block in copies.wait_for_blocks()]
            records += exporter.snapshot(run.past)
            report = PrefillReport(
                computed_tokens=run.fed_tokens,
                restored_tokens=len(tokens) - run.fed_tokens,
                prefill_s=time.monotonic() - start,
            )
        for record in records:  # not in the slot, so that the next prompt is computed while these records are stored
            emit(record)
        return report

    def decode(
        self,
        tokens: Sequence[int],
        cache: KVCache | None,
        sampling: Sampling,
        on_text: Callable[[str], None] | None = None,
        stop: threading.Event | None = None,
    ) -> Answer:
        """See DecodeEngine."""
        start = time.monotonic()
        self._check_call(tokens, cache, sampling.max_tokens)
        constraint = self._constrainer.start(sampling.json_schema) if sampling.json_schema else None
        check = partial(self._check_running, stop)
        with self._slot(self._slots, stop) as model:
            run = self._begin(model, cache)
            scores = self._read_prompt(model, run, tokens, check)
            evaluated_tokens = run.fed_tokens
            answer_ids = self._sample_ids(model, run, scores, sampling, constraint, check)
            answer = self._collect_answer(answer_ids, sampling, on_text, start, lambda: evaluated_tokens)
            self._remember_run(cache, (*tokens, *answer.tokens), run)
            return answer

    @contextmanager
    def pin_cache(self, tokens: Sequence[int], cache: KVCache) -> Iterator[None]:
        """See DecodeEngine: each decode begins with the same tensors."""
        with self._slot(self._slots, None) as model:
            run = self._begin(model, cache)
        self._pinned_caches[id(cache)] = _PinnedCache(run.past)
        try:
            yield
        finally:
            del self._pinned_caches[id(cache)]

    def top_logprobs(
        self, tokens: Sequence[int], cache: KVCache | None, stop: threading.Event | None = None
    ) -> dict[int, float]:
        """See DecodeEngine."""
        self._check_call(tokens, cache, 1)
        with self._slot(self._slots, stop) as model:
            run = self._reusable_run(cache, tokens) or self._begin(model, cache)
            scores = self._read_prompt(model, run, tokens, partial(self._check_running, stop))
            self._remember_run(cache, tokens, run)
            return top_logprobs(scores)

    def _check_running(self, stop: threading.Event | None = None) -> None:
        check_running("transformers", self._closed, stop)

    @contextmanager
    def _slot(self, slots: threading.Semaphore, stop: threading.Event | None) -> Iterator[TorchModel]:
        """The model, once a slot is free."""
        try:
            with acquire_slot(slots, partial(self._check_running, stop)):
                model = self._model
                if model is None:
                    raise EngineUnavailable("the transformers engine was closed")
                yield model
        except torch.OutOfMemoryError as error:
            raise EngineUnavailable(f"{self.info.device} has too little memory left for this sequence") from error

    def _begin(self, model: TorchModel, cache: KVCache | None) -> ModelRun:
        run = model.new_run()
        if source := self._pinned_caches.get(id(cache)):
            run.past.layers = fork_layers(source.past)
        elif cache is not None and cache.blocks:
            restore(run.past, cache, self._require_layout(), model.device)
        return run

    def _remember_run(self, cache: KVCache | None, tokens: Sequence[int], run: ModelRun) -> None:
        """Remember what this thread has computed after an imported cache."""
        layout = self.info.layout
        # A sliding window or a recurrent state can't go back to an earlier position.
        if (source := self._pinned_caches.get(id(cache))) and layout and not (layout.window or layout.state_layers):
            source.runs[threading.get_ident()] = (tokens, run)

    def _reusable_run(self, cache: KVCache | None, tokens: Sequence[int]) -> ModelRun | None:
        """This thread's last computation after this cache, cut to the tokens that it shares with these."""
        source = self._pinned_caches.get(id(cache))
        if source is None or threading.get_ident() not in source.runs:
            return None
        run_tokens, run = source.runs.pop(threading.get_ident())
        common = min(common_prefix(run_tokens, tokens), len(tokens) - 1)
        if common < run.length:
            run.past.crop(common - run.length)  # a negative number removes that many tokens
        return run

    def _split_chunks(self, tokens: Sequence[int]) -> list[Sequence[int]]:
        return [tokens[start : start + self._chunk_tokens] for start in range(0, len(tokens), self._chunk_tokens)]

    def _chunks(
        self,
        model: TorchModel,
        run: ModelRun,
        exporter: Exporter,
        tokens: Sequence[int],
        spans: deque[tuple[int, int]],
        under_way: deque[Copies],
        check: Check,
    ) -> Iterator[Copies]:
        """Compute the rest of `tokens` that `run` lacks, chunk by chunk, and yield the blocks at `spans` when their
        tokens are done. The last of them stay in `under_way`."""
        for chunk in self._split_chunks(tokens[run.length :]) or [()]:
            model.compute(run, chunk, check)
            ready = [spans.popleft() for _ in range(sum(end <= run.length for _, end in spans))]
            under_way.append(exporter.blocks(run.past, ready))
            if len(under_way) > self._in_flight and run.length < len(tokens):
                yield under_way.popleft()
            check()

    def _read_prompt(self, model: TorchModel, run: ModelRun, tokens: Sequence[int], check: Check) -> Scores:
        # The prompt is split into the same chunks as in prefill. So a run without a transferred cache computes exactly
        # the bits that a transferred cache would contain.
        for chunk in self._split_chunks(tokens[run.length : -1]):
            model.compute(run, chunk, check)
        return model.scores(run, tokens[-1:], check)

    def _sample_ids(
        self,
        model: TorchModel,
        run: ModelRun,
        scores: Scores,
        sampling: Sampling,
        constraint: Constraint | None,
        check: Check,
    ) -> Iterator[int]:
        """At most max_tokens ids, up to one that ends the answer; that one is left out."""
        sampler = Sampler(sampling)
        for count in range(1, sampling.max_tokens + 1):
            token = sampler.choose(
                scores if constraint is None else np.where(constraint.compute_mask(), scores, -np.inf)
            )
            if token in self._prompt.end_ids:
                return
            if constraint is not None:
                constraint.accept(token)
            yield token
            if count < sampling.max_tokens:
                scores = model.scores(run, (token,), check)


@dataclass(frozen=True, slots=True)
class _PinnedCache:
    """A cache from which decodes start with a copy, and by thread, what was last computed after it."""

    past: DynamicCache
    runs: dict[int, tuple[Sequence[int], ModelRun]] = field(default_factory=dict)
