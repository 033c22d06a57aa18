"""llama.cpp as an engine: real KV caches go in and out through the server's slot files.

`weights` is a GGUF file, loaded by a server inside this process, or the URL of a running llama-server (see
`llamacpp_start.attach`; it must be ours alone, because seats are taken by number). The last seat is for prefill, the
others decode. Each seat is erased before it is used, so the server's own counter of evaluated prompt tokens proves
what was handed over.
"""

from __future__ import annotations

import hashlib
import logging
import queue
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from engines import slotfile
from engines.base import Answer, Capabilities, EngineInfo, Prefilled, Tokenized
from engines.llamacpp_answer import Answers, Ask
from engines.llamacpp_http import ServerRefused
from engines.llamacpp_model import fingerprint, slot_shape, tokenizer_hash
from engines.llamacpp_prompt import ChatPrompt
from engines.llamacpp_start import Backing, attach, start
from engines.registry import EngineOptions
from engines.slotfile import SlotFile, SlotShape
from messages.errors import Cancelled, ConfigError, ContextExceeded, EngineUnavailable, HandOverFailed
from messages.jobs import Sampling
from messages.kv import Block, KVCache, Window

_log = logging.getLogger(__name__)
_POLL_S = 0.1
_SAMPLE = """def mean(values: list[float]) -> float:
    \"\"\"Arithmetic mean; 0.0 for an empty list.\"\"\"
    return sum(values) / len(values) if values else 0.0

The loop visits every element twice, so the running time grows with the square of the input. A dictionary would make
one pass enough. Names are clear and the tests cover the empty list, but not negative numbers.
"""


def open_engine(options: EngineOptions) -> LlamaCppEngine:
    """Load a GGUF file, or attach to a running llama-server. Raises ConfigError, saying what to do."""
    if options.slots < 1:
        raise ConfigError(f"slots must be at least 1, not {options.slots}")
    backing = attach(options) if options.weights.startswith(("http://", "https://")) else start(options)
    try:
        return LlamaCppEngine(backing, options.slots)
    except BaseException:
        backing.close()
        raise


class LlamaCppEngine:
    """Both protocols of `engines.base` on one llama.cpp server."""

    def __init__(self, backing: Backing, slots: int) -> None:
        self._backing = backing
        self._server = backing.server
        self._closed = threading.Event()
        decode_seats = range(min(slots, max(1, backing.total_seats - 1)))
        self._decode_seats = _Seats(decode_seats, self._check_running)
        self._prefill_seats = self._decode_seats  # a server with one seat shares it
        if backing.total_seats > 1:
            self._prefill_seats = _Seats([backing.total_seats - 1], self._check_running)
        self._prompt = ChatPrompt(self._server)
        self._answers = Answers(self._server, self._prompt, backing.slot_folder is not None)
        self._sample_ids = self._prompt.plain_ids(_SAMPLE)
        self._shape: SlotShape | None = None
        self._streams = 0
        self._no_hand_over = self._learn_slot_files()
        self._info = self._describe(len(decode_seats))

    @property
    def info(self) -> EngineInfo:
        """What is loaded."""
        return self._info

    def tokenize(self, shared: str, own: str, clock: float) -> Tokenized:
        """See Tokenizes. Control tokens spelled in the text stay text."""
        return self._prompt.tokenize(shared, own, clock)

    def count_tokens(self, text: str) -> int:
        """How many tokens a bare text is."""
        return len(self._prompt.plain_ids(text))

    def close(self) -> None:
        """Calls in progress raise EngineUnavailable. Idempotent."""
        if not self._closed.is_set():
            self._closed.set()
            self._backing.close()

    def prefill(
        self,
        tokens: Sequence[int],
        emit: Callable[[Block | Window], None],
        first: int = 0,
        resume: KVCache | None = None,
        stop: threading.Event | None = None,
    ) -> Prefilled:
        """See PrefillEngine. All blocks are emitted at the end: a slot is saved as a whole."""
        shape = self._require_hand_over()
        self._check_context(len(tokens))
        state = self._slot_file(tokens[: resume.num_tokens], resume, shape) if resume and resume.blocks else None
        with self._prefill_seats.taken(stop) as seat:
            started = time.monotonic()
            self._prepare(seat, state, stop)
            evaluated = self._evaluate(seat, tokens, stop)
            seconds = time.monotonic() - started
            saved = self._save(seat, stop)
        if saved.tokens != tuple(tokens):
            raise EngineUnavailable("the llama.cpp server saved another prompt than it was given: is its seat shared?")
        for block in slotfile.to_blocks(saved, shape, first):
            emit(block)
        window = slotfile.to_window(saved, shape)
        if window is not None:
            emit(window)
        return Prefilled(evaluated, len(tokens) - evaluated, seconds)

    def decode(
        self,
        tokens: Sequence[int],
        cache: KVCache | None,
        sampling: Sampling,
        on_text: Callable[[str], None] | None = None,
        stop: threading.Event | None = None,
    ) -> Answer:
        """See DecodeEngine."""
        called = time.monotonic()
        self._check_context(len(tokens) + sampling.max_tokens)
        state = None
        if cache is not None and len(tokens) > 1:
            state = self._slot_file(tokens[:-1], cache, self._require_hand_over())
        with self._decode_seats.taken(stop) as seat:
            self._answers.require_enforced(sampling.json_schema, seat, stop)
            self._prepare(seat, state, stop)
            return self._answers.generate(Ask(seat, tokens, sampling, on_text, stop, called))

    def _describe(self, slots: int) -> EngineInfo:
        backing, shape = self._backing, self._shape
        layout = shape.layout if shape else None
        hands_over = layout is not None
        return EngineInfo(
            engine="llamacpp",
            device=backing.device,
            context=backing.context,
            slots=slots,
            fingerprint=fingerprint(backing.gguf, layout) if backing.gguf and layout else "",
            tokenizer=tokenizer_hash(backing.gguf) if backing.gguf else self._observed_tokenizer(),
            layout=layout,
            capabilities=Capabilities(hands_over, True, hands_over, hands_over, resumes=hands_over),
            chars_per_token=len(_SAMPLE) / len(self._sample_ids),
        )

    def _observed_tokenizer(self) -> str:
        """Where the vocabulary can't be read: what it makes of the sample."""
        return "observed-" + hashlib.blake2b(repr(self._sample_ids).encode(), digest_size=16).hexdigest()

    def _learn_slot_files(self) -> str:
        """Have the server write a slot file, and see how it lays them out. Why it can't hand over; "": it can."""
        if self._backing.gguf is None or self._backing.slot_folder is None:
            reason = "its GGUF file or its folder of slot files can't be reached from here (see ?slots= and &model=)"
        else:
            try:
                with self._prefill_seats.taken(None) as seat:
                    self._prepare(seat, None, None)
                    self._evaluate(seat, self._sample_ids[:8], None)
                    probe = self._save(seat, None)
                self._shape = slot_shape(self._backing.gguf, probe)
                self._streams = probe.streams
                return ""
            except (HandOverFailed, ServerRefused) as error:
                reason = str(error)
        _log.warning("this llama.cpp engine hands over no KV cache: %s", reason)
        return reason

    def _require_hand_over(self) -> SlotShape:
        if self._shape is None:
            raise HandOverFailed(f"this llama.cpp engine hands over no KV cache: {self._no_hand_over}")
        return self._shape

    def _check_context(self, wanted: int) -> None:
        if wanted > self._info.context:
            raise ContextExceeded(f"{wanted:,} tokens, but the context holds {self._info.context:,}")

    def _check_running(self, stop: threading.Event | None) -> None:
        if self._closed.is_set():
            raise EngineUnavailable("the llama.cpp engine was closed")
        if stop is not None and stop.is_set():
            raise Cancelled("cancelled while waiting for a seat in the engine")

    def _slot_file(self, tokens: Sequence[int], cache: KVCache, shape: SlotShape) -> bytes:
        return slotfile.build(tokens, cache, shape, self._streams)

    def _prepare(self, seat: int, state: bytes | None, stop: threading.Event | None) -> None:
        """Clear a seat, and put a KV cache into it."""
        if self._backing.slot_folder is not None:  # without a slot folder the server has no such action
            self._server.post(f"/slots/{seat}?action=erase", {}, stop)
        if state is None:
            return
        with self._exchange_file() as path:
            path.write_bytes(state)
            try:
                self._server.post(f"/slots/{seat}?action=restore", {"filename": path.name}, stop)
            except ServerRefused as error:
                raise HandOverFailed(f"the KV cache could not be restored: {error}") from None

    def _save(self, seat: int, stop: threading.Event | None) -> SlotFile:
        with self._exchange_file() as path:
            self._server.post(f"/slots/{seat}?action=save", {"filename": path.name}, stop)
            try:
                # Mapped, not read: it stays readable after the file is deleted, and is copied only once, into blocks.
                data = np.memmap(path, np.uint8, "r")
            except OSError as error:
                raise HandOverFailed(f"the server's slot file is not in {path.parent}: {error}") from None
        return slotfile.parse(data.data)

    @contextmanager
    def _exchange_file(self) -> Iterator[Path]:
        assert self._backing.slot_folder is not None
        path = self._backing.slot_folder / f"kvasir-{uuid.uuid4().hex}.slot"
        try:
            yield path
        finally:
            path.unlink(missing_ok=True)

    def _evaluate(self, seat: int, tokens: Sequence[int], stop: threading.Event | None) -> int:
        """Compute the KV cache of a prompt; how many of its tokens the server evaluated."""
        body = {"prompt": list(tokens), "n_predict": 0, "id_slot": seat, "cache_prompt": True}
        timings = self._server.post("/completion", body | {"response_fields": ["timings"]}, stop)["timings"]
        return int(timings["prompt_n"])


class _Seats:
    """Seat numbers of the server, each lent to one caller at a time."""

    def __init__(self, numbers: Sequence[int], check: Callable[[threading.Event | None], None]) -> None:
        self._free: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._check = check
        for number in numbers:
            self._free.put(number)

    @contextmanager
    def taken(self, stop: threading.Event | None) -> Iterator[int]:
        """A seat, as soon as one is free."""
        seat = self._take(stop)
        try:
            yield seat
        finally:
            self._free.put(seat)

    def _take(self, stop: threading.Event | None) -> int:
        while True:
            self._check(stop)
            try:
                return self._free.get(timeout=_POLL_S)
            except queue.Empty:
                continue
