"""vLLM as an engine: a host process in vLLM's own environment computes, and KV caches go in and out through shared
memory.

`weights` is a Hugging Face folder (`FOLDER`, `FOLDER?dtype=float32`) or a hub name; see `huggingface.weights`. Or it
is a `vllm serve` that runs already, on this machine (`attach`).
Blocks of a prompt leave after each of vLLM's chunks, what its sliding windows look back at after the last one; an
injected cache covers at most all tokens but the last. What can't be transferred is refused when the engine starts: who
wants text only has the `openai` engine.
"""

import logging
import math
import os
import threading
import time
import uuid
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any, BinaryIO

import numpy as np

from engines.base import Answer, Capabilities, EngineInfo
from engines.entry import EngineOptions, closed_on_failure
from engines.guidance import guidance_schema, thinking_grammar
from engines.harmony import final_channel
from engines.huggingface.engine import FolderEngine
from engines.huggingface.prompt import HFPrompt
from engines.huggingface.rope import FULL, SLIDING, stated_rope
from engines.huggingface.weights import DTYPES, HFFolder, fingerprint, layout_of, open_folder, rounding
from engines.logprobs import TOP
from engines.vllm import environment
from engines.vllm.attached import connect
from engines.vllm.conversation import Conversation, layout_seen
from engines.vllm.host.kvasir_vllm.wire import Message
from engines.vllm.process import HostLaunch, HostProcess
from engines.waiting import acquire_slot
from messages.errors import ConfigError, EngineUnavailable, InvalidMessage, KVTransferFailed
from messages.jobs import PrefillReport, Sampling
from messages.kv import Block, KVCache, KVLayout, Record, Window, cast

_log = logging.getLogger(__name__)
# Tokens per message if nobody streams the answer. Each message wakes three threads, so few messages are better.
_INTERVAL_TOKENS = 16
_PAGE_TOKENS = 32  # on a CPU, vLLM requires that a page's length is a multiple of 32 tokens
_CPU_CHUNK_TOKENS = 512
_LONGEST_CHUNK_TOKENS = 16_384  # the length of the chunks that vLLM chooses for a GPU
_GREEDY = Sampling(max_tokens=1, temperature=0)


def open_engine(options: EngineOptions) -> "VLLMEngine":
    """Load a model folder, or attach to a server that has it loaded. Raises ConfigError, which says what to do."""
    if options.weights.startswith(("http://", "https://")):
        return attach(options)
    folder, launch = launch_for(options)
    prompt = HFPrompt(folder.path)
    host = HostProcess(launch)
    with closed_on_failure(host):
        return VLLMEngine(folder, prompt, host, _layout(folder), replace(options, context=_context(folder, options)))


def attach(options: EngineOptions) -> "VLLMEngine":
    """A server of vLLM with Kvasir's connector: `http://HOST:PORT?model=FOLDER&shared=FOLDER`.

    `model` is the folder that it serves, as seen from here (left out: the path or hub name that the server reports);
    `shared` the folder in which both meet (left out: /dev/shm). Raises ConfigError, saying what to do.
    """
    server, model = connect(options.weights, options.api_key)
    with closed_on_failure(server):
        served_model = server.served_model
        dtype = next(name for name, short in DTYPES.items() if short == served_model["shape"]["dtype"])
        folder = open_folder(f"{model or served_model['model']}?dtype={dtype}")
        _require_same_model(folder, served_model["sizes"])
        if options.context > served_model["context"]:
            raise ConfigError(
                f"the context of {options.weights} holds only {served_model['context']:,} tokens, fewer than the "
                f"{options.context:,} requested: restart vLLM with a larger --max-model-len"
            )
        options = replace(options, context=options.context or served_model["context"])
        return VLLMEngine(folder, HFPrompt(folder.path), server, _layout(folder), options)


def launch_for(options: EngineOptions) -> tuple[HFFolder, HostLaunch]:
    """The model's folder, and what to start its host with. Raises ConfigError, which says what to do."""
    vllm_environment = environment.find()
    folder = open_folder(options.weights)
    layout = _layout(folder)
    sequences = options.slots + options.prefill_slots
    arguments = _arguments(folder, layout, _context(folder, options), sequences)
    # On a CPU, compiling would take a minute, so vLLM runs the model uncompiled.
    #
    # With vLLM's default chunk length, one chunk would contain a whole prompt. Then no block could be sent before the
    # whole prompt is computed.
    if vllm_environment.cpu:
        arguments |= {"enforce_eager": True, "max_num_batched_tokens": max(_CPU_CHUNK_TOKENS, sequences)}
    if vllm_environment.release != environment.TESTED_RELEASE:
        _log.warning(
            "vLLM %s was not tested with this release of Kvasir; %s was",
            vllm_environment.release,
            environment.TESTED_RELEASE,
        )
    # On a CPU, vLLM computes on all cores except one. That core is for vLLM's scheduler, which waits in a busy loop and
    # would slow down a computing thread on the same core. Each step would wait for that thread.
    threads = options.threads or (max(1, (os.cpu_count() or 2) - 1) if vllm_environment.cpu else 0)
    return folder, HostLaunch(vllm_environment, str(folder.path), arguments, layout.block_tokens, threads)


def _context(folder: HFFolder, options: EngineOptions) -> int:
    return options.context or int(folder.text.get("max_position_embeddings") or 4096)


class VLLMEngine(FolderEngine):
    """Both protocols of `engines.base` on one vLLM host."""

    def __init__(
        self, folder: HFFolder, prompt: HFPrompt, host: Conversation, layout: KVLayout, options: EngineOptions
    ) -> None:
        try:
            observed_layout = layout_seen(host.served_model["shape"])
        except (TypeError, InvalidMessage) as error:
            raise ConfigError(f"vLLM keeps its KV cache in an unknown shape: {error}") from None
        if observed_layout != layout:
            raise ConfigError(f"vLLM's KV cache has the layout {observed_layout}, but config.json states {layout}")
        num_logits = int(folder.text["vocab_size"])
        super().__init__(prompt, num_logits)
        self.host = host
        self._layout = layout
        self._pinned_files: dict[int, str] = {}
        self._prefill_slots = threading.Semaphore(options.prefill_slots)
        self.info = EngineInfo(
            engine="vllm",
            device=str(host.served_model["device"]),
            context=options.context,
            slots=options.slots,
            fingerprint=fingerprint(folder, layout, prompt.tokenizer_hash),
            tokenizer=prompt.tokenizer_hash,
            layout=layout,
            ropes=_ropes(folder),
            capabilities=Capabilities.local(transfers_kv=True, blocks_while_computing=True),
            chars_per_token=prompt.chars_per_token,
            vocabulary=min(len(self._token_bytes), num_logits),
            rounding=rounding(folder, layout.dtype),
            # A restarted server can have other weights, so results that were stored for an earlier instance must not be
            # used.
            build=" ".join(filter(None, ("vllm", host.served_model["vllm"], host.served_model.get("instance")))),
            prefill_slots=options.prefill_slots,
        )

    @property
    def outage(self) -> str:
        """See engines.base.outage_of."""
        return self.host.outage

    def close(self) -> None:
        """Calls in progress raise EngineUnavailable. Idempotent."""
        self.host.close()

    def prefill(
        self,
        tokens: Sequence[int],
        emit: Callable[[Record], None],
        first: int = 0,
        resume: KVCache | None = None,
        stop: threading.Event | None = None,
    ) -> PrefillReport:
        """See PrefillEngine. vLLM can't compute a prompt without an answer, so one token is sampled and thrown away."""
        self.info.require_capacity(len(tokens) + 1)
        if resume is not None:
            # vLLM computes the last token again, and this token attends to a full window of rows before it. If the
            # window record already includes the token, the oldest of these rows is missing. So the record must end
            # before the last token.
            resume.require_part_of(len(tokens), min_evaluated=1 if self._layout.window else 0)
        with acquire_slot(self._prefill_slots, partial(self.host.check, stop)):
            start = time.monotonic()
            with (
                self._injected(resume) as inject,
                closing(self._ask(tokens, _GREEDY, inject, stop, emit=first)) as replies,
            ):
                for message in gapless_replies(replies, first, len(tokens), bool(self._layout.window)):
                    for record in self._records(message):
                        emit(record)
            evaluated_tokens = int(message["evaluated"])
        return PrefillReport(
            computed_tokens=evaluated_tokens,
            restored_tokens=len(tokens) - evaluated_tokens,
            prefill_s=time.monotonic() - start,
        )

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
        if sampling.json_schema:
            self._constrainer.start(sampling.json_schema)  # raises InvalidSchema if something is wrong with the schema
        interval = 1 if on_text or sampling.stop else _INTERVAL_TOKENS
        with (
            self._injected(cache) as inject,
            closing(self._ask(tokens, sampling, inject, stop, interval=interval)) as replies,
        ):
            evaluated_tokens = 0

            def answer_token_ids() -> Iterator[int]:
                nonlocal evaluated_tokens
                for message in replies:
                    evaluated_tokens = int(message.get("evaluated", evaluated_tokens))
                    for token in message.get("tokens", ()):  # several tokens if this process reads slowly
                        self.host.check(stop)
                        if token not in self._prompt.end_ids:
                            yield token

            return self._collect_answer(answer_token_ids(), sampling, on_text, start, lambda: evaluated_tokens)

    @contextmanager
    def pin_cache(self, tokens: Sequence[int], cache: KVCache) -> Iterator[None]:
        """See DecodeEngine. Every answer starts from one file in shared memory."""
        with self._injected(cache) as inject:
            if inject is not None:
                self._pinned_files[id(cache)] = inject[0]
            try:
                yield
            finally:
                self._pinned_files.pop(id(cache), None)

    def top_logprobs(
        self, tokens: Sequence[int], cache: KVCache | None, stop: threading.Event | None = None
    ) -> dict[int, float]:
        """See DecodeEngine."""
        self._check_call(tokens, cache, 1)
        likely: dict[int, float] = {}
        with (
            self._injected(cache) as inject,
            closing(self._ask(tokens, _GREEDY, inject, stop, logprobs=TOP)) as replies,
        ):
            for message in replies:
                if message["op"] == "tokens" and message["logprobs"]:
                    likely = dict(sorted(message["logprobs"], key=lambda pair: -pair[1])[:TOP])
        return likely

    def _ask(
        self,
        tokens: Sequence[int],
        sampling: Sampling,
        inject: tuple[str, int] | None,
        stop: threading.Event | None,
        emit: int | None = None,
        logprobs: int = 0,
        interval: int = 1,
    ) -> Generator[Message, None, None]:
        constraint: dict[str, Any] = {}
        if sampling.json_schema:
            schema = guidance_schema(sampling.json_schema)
            constraint = {"grammar": thinking_grammar(schema)} if final_channel(self._prompt) else {"json": schema}
        return self.host.ask(
            stop,
            tokens=list(tokens),
            max_tokens=sampling.max_tokens,
            ends=sorted(self._prompt.end_ids),
            sampling=_draw(sampling),
            constraint=constraint,
            logprobs=logprobs,
            interval=interval,
            emit=emit,
            inject=inject,
        )

    @contextmanager
    def _injected(self, cache: KVCache | None) -> Iterator[tuple[str, int] | None]:
        """A file with the cache for the length of the block, and the number of tokens that it covers."""
        if cache is None or not cache.blocks:
            yield None
            return
        cache.require_layout(self._layout)
        if name := self._pinned_files.get(id(cache)):
            yield name, cache.num_tokens
            return
        name = f"{uuid.uuid4().hex}.kv"
        try:
            try:
                with self.host.open_file(name, os.O_WRONLY | os.O_CREAT | os.O_EXCL) as file:
                    write_cache(file, cache, self._layout)
            except OSError as error:
                raise KVTransferFailed(
                    f"the KV cache can't be written to {self.host.folder}: {error.strerror}"
                ) from None
            yield name, cache.num_tokens
        finally:
            self.host.remove_file(name)

    def _records(self, message: Message) -> Iterator[Record]:
        """The records in the connector's file, if the message names one."""
        if "file" not in message:
            return
        # The file is memory-mapped, so its data stays readable after the file is deleted.
        with self.host.open_file(message["file"]) as file:
            data = np.memmap(file, self._layout.numpy_type, "r")
        self.host.remove_file(message["file"])
        layout = self._layout
        if message["op"] == "window":
            yield Window(message["position"], data.reshape(layout.window_shape(-1)))
            return
        offset = 0
        for start in range(message["start"], message["end"], layout.block_tokens):
            # The prompt's last block can be shorter.
            shape = layout.block_shape(min(layout.block_tokens, message["end"] - start))
            size = math.prod(shape)
            yield Block(start, data[offset : offset + size].reshape(shape))
            offset += size


def write_cache(file: BinaryIO, cache: KVCache, layout: KVLayout) -> None:
    """Write a cache for the connector, in the layout of its vLLM: all blocks as one array, then the windows' rows.

    Writing into a mapping would take twice as long, and would kill the process if shared memory is full (SIGBUS).
    Raises OSError, KVTransferFailed.
    """
    layers, halves, num_tokens, *position = layout.block_shape(cache.num_tokens)
    stride = math.prod(position) * np.dtype(layout.numpy_type).itemsize
    for block in cache.blocks:
        data = np.ascontiguousarray(cast(block.data, cache.layout.dtype, layout.dtype))
        for number, part in enumerate(data.reshape(layers * halves, (block.end - block.start) * math.prod(position))):
            file.seek((number * num_tokens + block.start) * stride)
            file.write(part.data)
    file.seek(layers * halves * num_tokens * stride)
    file.write(np.ascontiguousarray(cast(cache.window_rows, cache.layout.dtype, layout.dtype)).data)


def gapless_replies(replies: Iterable[Message], first: int, length: int, window: bool = False) -> Iterator[Message]:
    """The replies of a prefill. Raises EngineUnavailable if blocks from `first` to `length` are missing among them, or
    a record of its windows.

    The connector silently drops records that are not read for a while.
    """
    position, has_gap = first, False
    for message in replies:
        if message["op"] == "block":
            has_gap, position = message["start"] != position, message["end"]
        elif message["op"] == "window":
            window = False
        elif message["op"] == "done":
            has_gap = position < length or window
        if has_gap:
            raise EngineUnavailable("the KV cache from vLLM's connector has a gap")
        yield message


def _draw(sampling: Sampling) -> dict[str, Any] | None:
    """How to draw a token; None: take the likeliest. Stop words are not included, because this process finds them in
    the text."""
    if sampling.temperature == 0 or sampling.top_k == 1:
        return None
    return {name: getattr(sampling, name) for name in ("temperature", "top_p", "top_k", "seed")}


def _layout(folder: HFFolder) -> KVLayout:
    """The model's layout. Raises ConfigError, which says why this engine can't load the model."""
    dtype = folder.dtype or str(folder.text.get("dtype") or folder.text.get("torch_dtype") or "")
    if dtype not in DTYPES:
        raise ConfigError(
            f"{folder.path / 'config.json'} states the unsupported dtype {dtype!r:.40}; add ?dtype=bfloat16 to weights"
        )
    if not folder.config.get("architectures"):
        raise ConfigError(f"{folder.path / 'config.json'} has no 'architectures', which vLLM needs to load a model")
    advice = "; run it with the llamacpp, mlx or transformers engine"
    try:
        layout = layout_of(folder, DTYPES[dtype])
    except KVTransferFailed as error:
        raise ConfigError(f"the vllm engine can't load {folder.path}: {error}{advice}") from None
    if layout.state_layers:
        raise ConfigError(f"the vllm engine can't load {folder.path}: it has layers with a recurrent state{advice}")
    return layout


def _arguments(folder: HFFolder, layout: KVLayout, context: int, sequences: int) -> dict[str, Any]:
    """Arguments for vLLM's AsyncEngineArgs, for this many parallel sequences of full context length."""
    return {
        "model": str(folder.path),
        "dtype": next(name for name, short in DTYPES.items() if short == layout.dtype),
        "max_model_len": context,
        "max_num_seqs": sequences,
        "kv_cache_memory_bytes": _cache_bytes(layout, context, sequences),
        # Kvasir's store caches prefixes. If vLLM cached them, too, its counter of evaluated tokens would not show
        # whether it used a transferred KV cache.
        "enable_prefix_caching": False,
        "generation_config": "vllm",  # ignores sampling settings in the model's folder, because jobs have their own
        "max_logprobs": TOP,
        "structured_outputs_config": {"backend": "guidance", "disable_any_whitespace": True},
        "disable_log_stats": True,
    }


def _cache_bytes(layout: KVLayout, context: int, sequences: int) -> int:
    """The bytes that this many full contexts take in vLLM's pages. Window layers keep only the pages of their
    window."""
    full, window_count = len(layout.full_layers), len(layout.window_layers)
    smaller, larger = sorted((full, window_count or full))
    group = larger if larger < 1.5 * smaller else smaller  # vLLM pads its groups of layers to equal size
    pages = sequences * -(-full // group) * (-(-context // _PAGE_TOKENS) + 1)
    # Besides the windows, there must be room for two chunks, because while vLLM computes one chunk, it has already
    # scheduled the next.
    chunks = min(context, 2 * _LONGEST_CHUNK_TOKENS)
    window_pages = sequences * (-(-min(context, layout.window) // _PAGE_TOKENS) + 2) + -(-chunks // _PAGE_TOKENS)
    pages += -(-window_count // group) * window_pages
    return pages * group * _PAGE_TOKENS * (layout.token_bytes // full) + (1 << 20)


def _ropes(folder: HFFolder) -> tuple[Any, ...]:
    """The RoPE that config.json states. Whether vLLM computes the same is checked when sketches are compared."""
    kinds = (FULL, SLIDING) if "gemma3" in folder.model_type else (FULL,)
    try:
        return tuple(stated_rope(folder.text, kind) for kind in kinds)
    except KVTransferFailed as error:
        raise ConfigError(f"the vllm engine can't load {folder.path}: {error}") from None


def _require_same_model(folder: HFFolder, sizes: dict[str, Any]) -> None:
    """Compare the model's sizes with the folder's. Whether the weights are the same shows in the sketches."""
    for name, size in sizes.items():
        if size is not None and folder.text.get(name) not in (None, size):
            statement = f"{folder.path} states {folder.text[name]}"
            raise ConfigError(
                f"vLLM serves a different model from the one in weights: its {name} is {size}, but {statement}"
            )
