"""MLX as an engine: Metal, CUDA or CPU, by what MLX finds. KV caches go in and out in memory.

`weights` is a Hugging Face folder (`FOLDER`, `FOLDER?dtype=float32`) or a hub name; see `hf_weights.open_folder`.
One thread owns the model (`mlx_loop`): it feeds prompts in chunks, handing out blocks as they complete, and decodes
all answers in one running batch that sequences join and leave.
"""

import atexit
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

from engines.base import PROMPTS_IN_TURN, Answer, Capabilities, EngineInfo
from engines.entry import EngineOptions, closed_on_failure
from engines.huggingface.engine import FolderEngine
from engines.huggingface.prompt import HFPrompt
from engines.huggingface.weights import HFFolder, builds, fingerprint, open_folder, rounding
from engines.logprobs import top_logprobs
from engines.mlx import model as mlx_model
from engines.mlx.kv import CacheState
from engines.mlx.loop import ModelLoop
from engines.mlx.sampling import Observer, sampler_for
from engines.mlx.work import DecodeWork, Output, PrefillWork, PromptWork
from messages.errors import EngineUnavailable
from messages.jobs import PrefillReport, Sampling
from messages.kv import Block, KVCache, Record, RecurrentState, Window

_log = logging.getLogger(__name__)


def open_engine(options: EngineOptions) -> "MLXEngine":
    """Load a model folder. Raises ConfigError, saying what to do. MLX chooses its CPU threads itself."""
    folder = open_folder(options.weights)
    prompt = HFPrompt(folder.path)
    loop = ModelLoop(partial(mlx_model.load, folder, options.context), sorted(prompt.end_ids), options.slots)
    with closed_on_failure(loop):
        return MLXEngine(folder, prompt, loop, options)


class MLXEngine(FolderEngine):
    """Both protocols of `engines.base` on one MLX model."""

    def __init__(self, folder: HFFolder, prompt: HFPrompt, loop: ModelLoop, options: EngineOptions) -> None:
        super().__init__(prompt, loop.num_logits)
        self._loop = loop
        self._pinned_states: dict[int, list[CacheState]] = {}
        transfers_kv = loop.layout is not None
        if not transfers_kv:
            self._no_kv_transfer = f"this MLX engine transfers no KV cache: {loop.no_kv_transfer}"
            _log.warning("%s", self._no_kv_transfer)
        self.info = EngineInfo(
            engine="mlx",
            device=loop.device,
            context=options.context or int(folder.text.get("max_position_embeddings", 4096)),
            slots=options.slots,
            fingerprint=fingerprint(folder, loop.layout, prompt.tokenizer_hash) if loop.layout else "",
            tokenizer=prompt.tokenizer_hash,
            layout=loop.layout,
            ropes=loop.ropes,
            capabilities=Capabilities.local(transfers_kv=transfers_kv, blocks_while_computing=True),
            chars_per_token=prompt.chars_per_token,
            vocabulary=min(len(self._token_bytes), loop.num_logits),
            rounding=rounding(folder, loop.layout.dtype) if loop.layout else "q4",
            build=builds("mlx", "mlx-lm"),
            prefill_slots=PROMPTS_IN_TURN,
        )
        atexit.register(self.close)  # a thread inside MLX must not outlive the interpreter

    def close(self) -> None:
        """Calls in progress raise EngineUnavailable. Idempotent."""
        atexit.unregister(self.close)
        self._loop.close()

    def prefill(
        self,
        tokens: Sequence[int],
        emit: Callable[[Record], None],
        first: int = 0,
        resume: KVCache | None = None,
        stop: threading.Event | None = None,
    ) -> PrefillReport:
        """See PrefillEngine. Blocks are copied out while the next chunk is computed."""
        layout = self._require_layout()
        self._check_call(tokens, None, 0)
        if resume is not None:
            resume.require_layout(layout)
            resume.require_part_of(len(tokens), min_evaluated=0)
        work = PrefillWork(tokens, resume, layout, first)
        with self._submit(work):
            while not isinstance(output := self._take(work, stop), PrefillReport):
                assert isinstance(output, Block | Window | RecurrentState)
                emit(output)
        return output

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
        eager = on_text is not None or bool(sampling.stop)
        work = DecodeWork(tokens, cache, sampling.max_tokens, sampler_for(sampling), constraint, eager)
        work.fork = self._pinned_states.get(id(cache))
        with self._submit(work):
            tokens_out = self._sample_ids(work, stop)
            return self._collect_answer(tokens_out, sampling, on_text, start, lambda: work.evaluated_tokens)

    @contextmanager
    def pin_cache(self, tokens: Sequence[int], cache: KVCache) -> Iterator[None]:
        """See DecodeEngine: the first decode makes the arrays, the others begin with the same."""
        self._pinned_states[id(cache)] = []
        try:
            yield
        finally:
            del self._pinned_states[id(cache)]

    def top_logprobs(
        self, tokens: Sequence[int], cache: KVCache | None, stop: threading.Event | None = None
    ) -> dict[int, float]:
        """See DecodeEngine."""
        self._check_call(tokens, cache, 1)
        observer = Observer()
        work = DecodeWork(tokens, cache, 1, observer, None, eager=True)
        with self._submit(work):
            self._take(work, stop)
        return top_logprobs(observer.scores[0])

    @contextmanager
    def _submit(self, work: PromptWork) -> Iterator[None]:
        """The loop computes it, for as long as somebody listens."""
        self._loop.submit(work)
        try:
            yield
        finally:
            work.is_abandoned = True

    def _sample_ids(self, work: DecodeWork, stop: threading.Event | None) -> Iterator[int]:
        """The ids of an answer, without one that ends it."""
        reason = ""
        while not reason:
            output = self._take(work, stop)
            assert isinstance(output, list)
            for token, reason in output:
                if reason != "stop":
                    yield token

    def _take(self, work: PromptWork, stop: threading.Event | None) -> Output:
        self._loop.require_open()  # after `close`, outputs that are already waiting are not handed out either
        return work.next_output(stop)

    def _check_call(self, tokens: Sequence[int], cache: KVCache | None, max_tokens: int) -> None:
        self._loop.require_open()
        super()._check_call(tokens, cache, max_tokens)
        # MLX does not check token ids. An id without an embedding would crash the process.
        if not 0 <= min(tokens) <= max(tokens) < self._loop.num_logits:
            raise EngineUnavailable(
                f"a token id is outside the model's {self._loop.num_logits:,} ids: tokenize with this model's tokenizer"
            )
