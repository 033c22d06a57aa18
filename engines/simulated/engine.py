"""An engine without a model: synthetic KV caches of realistic size, deterministic text, and configurable rates.

For tests, benchmarks and planning. A KV cache's bytes follow from the chain of its tokens, and decode checks every
one of them: a foreign, swapped or damaged block is a failed KV transfer here, as it would be a wrong answer elsewhere.
`weights` is a list of settings, all optional:

sim:prefill=2000,decode=60,scale=0.01,layers=4,kv_heads=2,head_dim=16,dtype=bf16,context=32768,answer=200,spread=3,seed=1

prefill: tokens/s of the machine; decode: tokens/s of each slot; scale: seconds slept for each simulated one (0: as fast
as it goes); answer: mean tokens of an answer; spread: the longest is so many times the shortest; seed: which "weights"
these are; recurrent: how many of the layers, from the first, keep a state in place of keys and values; batch: prompts
computed at once, each at its share of `prefill`.
"""

import hashlib
import json
import random
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace
from functools import lru_cache, partial
from typing import Any

import numpy as np

from engines.base import Answer, Capabilities, EngineInfo, TokenizedPrompt
from engines.chat import chat
from engines.entry import EngineOptions
from engines.logprobs import TOP
from engines.simulated.schema_text import json_text, prose
from engines.waiting import acquire_slot, check_running
from messages.errors import (
    ConfigError,
    InvalidMessage,
    InvalidSchema,
    KVTransferFailed,
)
from messages.jobs import Part, PrefillReport, Sampling
from messages.kv import Array, Block, KVCache, KVLayout, Record, RecurrentState

CHARS_PER_TOKEN = 4
_BOS = 1
_MARKS = {"user": 2, "assistant": 3, "system": 4, "tool": 5}
_FIRST_TEXT_ID = 16
_VOCABULARY = 1 << 17
_POLL_S = 0.05
_NO_CHARACTERS = b"\xff" * 4 * CHARS_PER_TOKEN
_ODD = np.array([0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB], "<u8")


@dataclass(frozen=True, slots=True)
class SimulatedModel:
    """The settings in `weights`."""

    prefill: float = 2000.0
    decode: float = 60.0
    scale: float = 0.01
    layers: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    dtype: str = "bf16"
    context: int = 32768
    answer: int = 200
    spread: float = 3.0
    seed: int = 1
    recurrent: int = 0
    batch: int = 1

    @property
    def layout(self) -> KVLayout:
        """Shape of its KV cache."""
        plain = KVLayout(self.layers, self.kv_heads, self.head_dim, self.dtype)  # type: ignore[arg-type]
        if not self.recurrent:
            return plain
        matrix = (self.kv_heads, self.head_dim, self.head_dim)
        columns = (3 * self.kv_heads * self.head_dim, 3)
        return replace(plain, recurrent_layers=tuple(range(self.recurrent)), conv_shape=columns, matrix_shape=matrix)

    @property
    def lengths(self) -> tuple[int, int]:
        """The token counts of the shortest and the longest answer."""
        shortest = 2 * self.answer / (1 + self.spread)
        return max(1, int(shortest)), max(1, int(shortest * self.spread))

    @property
    def fingerprint(self) -> str:
        """A hash that names the KV family, from shapes and seed. Machines with different rates share it."""
        family = f"simulated/1/{self.layers}/{self.kv_heads}/{self.head_dim}/{self.dtype}/{self.seed}"
        family += f"/{self.recurrent}" if self.recurrent else ""
        return "sim-" + hashlib.blake2b(family.encode(), digest_size=12).hexdigest()


def parse_weights(weights: str) -> SimulatedModel:
    """The model that `weights` describes. Raises ConfigError, naming the setting."""
    kind, _, settings = weights.partition(":")
    if kind != "sim":
        raise ConfigError(
            f"weights of the simulated engine look like 'sim:prefill=2000,decode=60', not {weights!r:.80}"
        )
    types: dict[str, Any] = {spec.name: spec.type for spec in fields(SimulatedModel)}
    values: dict[str, Any] = {}
    for setting in filter(None, (part.strip() for part in settings.split(","))):
        name, _, value = setting.partition("=")
        if name not in types:
            raise ConfigError(f"the simulated engine has no setting {name!r:.40}; choose from: {', '.join(types)}")
        try:
            values[name] = types[name](value)
        except ValueError:
            raise ConfigError(f"{name} must be a number, not {value!r:.40}") from None
    return _check_model(SimulatedModel(**values))


def open_engine(options: EngineOptions) -> "SimulatedEngine":
    """The engine that `options.weights` describes. Raises ConfigError."""
    return SimulatedEngine(parse_weights(options.weights), options)


class SimulatedEngine:
    """Both protocols of `engines.base`, without a model."""

    def __init__(self, model: SimulatedModel, options: EngineOptions) -> None:
        self._model = model
        self._layout = model.layout
        self._closed = threading.Event()
        self._prefill_slots = threading.Semaphore(model.batch)
        self._slots = threading.Semaphore(options.slots)
        # Random bits for one token's K and V in all layers, as unsigned integers of the dtype's width.
        bits = np.dtype(f"<u{self._layout.numpy_type.itemsize}")
        shape, highest = self._layout.block_shape(1), np.iinfo(bits).max
        self._pattern = np.random.default_rng(model.seed).integers(0, highest, shape, dtype=bits, endpoint=True)
        heads, dim = self._layout.kv_heads, self._layout.head_dim
        # Each token has a 64-bit value. It is split into integers of the dtype's width, and these repeat along the
        # token's row.
        self._columns = (np.arange(heads * dim) % (8 // bits.itemsize)).reshape(heads, dim)
        # This bitmask clears the sign bit and the exponent's top bit. The other bits always encode a finite number.
        self._finite = bits.type(highest >> 2)
        self.info = EngineInfo(
            engine="simulated",
            device="simulated",
            context=options.context or model.context,
            slots=options.slots,
            fingerprint=model.fingerprint,
            tokenizer="sim-4-characters",
            layout=self._layout,
            capabilities=Capabilities.local(transfers_kv=True, blocks_while_computing=True),
            chars_per_token=float(CHARS_PER_TOKEN),
            prefill_slots=model.batch,
        )

    def tokenize(self, prompt: Sequence[Part], clock: float) -> TokenizedPrompt:
        """Begin of text, for each message its role's mark and one id for every four characters, an assistant mark.

        A raw prompt has no marks, and an assistant's message at the end gets no mark after it.
        """
        ids, shared_tokens, whole = [_BOS], 0, True
        messages = chat(prompt)
        if messages[0].role == "raw":
            return TokenizedPrompt((_BOS, *_text_ids(messages[0].text)), 0)
        for message in messages:
            if whole:  # all messages so far are the same for the whole class of students
                shared_tokens = len(ids) + 1 + message.common // CHARS_PER_TOKEN
            whole = whole and message.common == len(message.text)
            ids += (_MARKS[message.role], *_text_ids(message.function + message.text))
        opening = () if messages[-1].is_continued else (_MARKS["assistant"],)
        return TokenizedPrompt((*ids, *opening), shared_tokens)

    def count_tokens(self, text: str) -> int:
        """Four characters to a token, rounded up."""
        return -(-len(text) // CHARS_PER_TOKEN)

    def close(self) -> None:
        """Calls in progress raise EngineUnavailable."""
        self._closed.set()

    def prefill(
        self,
        tokens: Sequence[int],
        emit: Callable[[Record], None],
        first: int = 0,
        resume: KVCache | None = None,
        stop: threading.Event | None = None,
    ) -> PrefillReport:
        """See PrefillEngine."""
        self.info.require_capacity(len(tokens))
        chain = _chain(tokens)
        restored_tokens = self._verify(tokens, resume, 0)
        rate = self._model.prefill / self._model.batch
        with acquire_slot(self._prefill_slots, partial(self._check_running, stop)):
            start_time = time.monotonic()
            for start, end in self._layout.block_spans(len(tokens)):
                self._pace(start_time, max(0, end - restored_tokens) / rate, stop)
                if end > first:
                    emit(Block(start, self._data(chain[start:end])))
            for layer in self._layout.state_layers:
                emit(RecurrentState(len(tokens), layer, self._state(chain, layer)))
            return PrefillReport(
                computed_tokens=len(tokens) - restored_tokens,
                restored_tokens=restored_tokens,
                prefill_s=time.monotonic() - start_time,
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
        call_time = time.monotonic()
        self.info.require_capacity(len(tokens) + sampling.max_tokens)
        evaluated_tokens = len(tokens) - self._verify(tokens, cache)
        text, finish_reason = self._answer(tokens, sampling)
        pieces = [text[start : start + CHARS_PER_TOKEN] for start in range(0, len(text), CHARS_PER_TOKEN)]
        first_token_s = 0.0
        with acquire_slot(self._slots, partial(self._check_running, stop)):
            start_time = time.monotonic()
            prompt_s = (evaluated_tokens - 1) / self._model.prefill
            for index, piece in enumerate(pieces, 1):
                # If nobody streams the answer, only the times of the first and the last token matter.
                if on_text or index in (1, len(pieces)):
                    self._pace(start_time, prompt_s + index / self._model.decode, stop)
                first_token_s = first_token_s or time.monotonic() - call_time
                if on_text:
                    on_text(piece)
        return Answer(
            text=text,
            tokens=_answer_ids(text),
            completion_tokens=len(pieces),
            finish_reason=finish_reason,
            evaluated_tokens=evaluated_tokens,
            first_token_s=first_token_s,
            seconds=time.monotonic() - call_time,
        )

    def pin_cache(self, tokens: Sequence[int], cache: KVCache) -> AbstractContextManager[None]:
        """See DecodeEngine: it has nothing to import, and checks the cache at each decode."""
        return nullcontext()

    def top_logprobs(
        self, tokens: Sequence[int], cache: KVCache | None, stop: threading.Event | None = None
    ) -> dict[int, float]:
        """See DecodeEngine: invented, and takes no time, for a cache is checked bit by bit in any case."""
        self.info.require_capacity(len(tokens) + 1)
        self._verify(tokens, cache)
        source = random.Random(hash((self._model.seed, *tokens)))
        return {source.randrange(_VOCABULARY): -0.1 * number - 1 for number in range(TOP)}

    def _answer(self, tokens: Sequence[int], sampling: Sampling) -> tuple[str, str]:
        """Text and finish reason. A text under a schema always closes, whatever max_tokens says."""
        source = random.Random(hash((sampling.seed, *tokens)))  # hash() of integers doesn't depend on the process
        if sampling.json_schema:
            try:
                schema = json.loads(sampling.json_schema)
            except (ValueError, RecursionError) as error:
                raise InvalidSchema(f"the JSON schema is not JSON: {error}") from None
            return json_text(schema, source), "stop"
        length = source.randint(*self._model.lengths)
        text = prose(source, min(length, sampling.max_tokens) * CHARS_PER_TOKEN)
        ends = [text.find(word) for word in sampling.stop if word and word in text]
        if ends:
            return text[: min(ends)], "stop"
        return text, "length" if length > sampling.max_tokens else "stop"

    def _data(self, chain: Array) -> Array:
        """K and V for the tokens with these chain values: the pattern, shifted by each token's 64 bits."""
        layout = self._layout
        words = np.ascontiguousarray(chain).view(self._pattern.dtype).reshape(len(chain), -1)
        data: Array = self._pattern + words.take(self._columns, axis=1)  # C-contiguous, like a block's data
        data &= self._finite
        return data.view(layout.numpy_type)

    def _state(self, chain: Array, layer: int) -> Array:
        """The state of a layer after all tokens of `chain`."""
        source = np.random.default_rng((int(chain[-1]), layer, self._model.seed))
        return source.standard_normal(self._layout.state_size, np.float32)

    def _verify(self, tokens: Sequence[int], cache: KVCache | None, min_evaluated: int = 1) -> int:
        """The number of tokens that the cache covers, after checking every byte of it."""
        if cache is None:
            return 0
        cache.require_part_of(len(tokens), min_evaluated=min_evaluated)
        if cache.layout != self._layout:
            raise KVTransferFailed(
                f"the KV cache has the layout {cache.layout}, but the model has the layout {self._layout}"
            )
        chain, bits = _chain(tokens), self._pattern.dtype
        for block in cache.blocks:
            expected = self._data(chain[block.start : block.end])
            if not np.array_equal(expected.view(bits), block.data.view(bits)):
                raise KVTransferFailed(f"the KV block at position {block.start} belongs to other tokens, or is damaged")
        for state in cache.states:
            if not np.array_equal(state.data, self._state(chain[: cache.num_tokens], state.layer)):
                raise KVTransferFailed(f"the state of layer {state.layer} belongs to other tokens, or is damaged")
        return cache.num_tokens

    def _pace(self, start_time: float, simulated_s: float, stop: threading.Event | None) -> None:
        """Return when `simulated_s` have passed since `start_time` on the scaled clock; raise an error sooner if there
        is one."""
        due = start_time + simulated_s * self._model.scale
        self._check_running(stop)
        while (remaining_s := due - time.monotonic()) > 0:
            (stop or self._closed).wait(min(remaining_s, _POLL_S))
            self._check_running(stop)

    def _check_running(self, stop: threading.Event | None) -> None:
        check_running("simulated", self._closed, stop)


def _check_model(model: SimulatedModel) -> SimulatedModel:
    for name, low in (
        ("prefill", 0.001),
        ("decode", 0.001),
        ("scale", 0),
        ("context", 2),
        ("answer", 1),
        ("spread", 1),
        ("seed", 0),
        ("recurrent", 0),
        ("batch", 1),
    ):
        if not low <= getattr(model, name) < 1e12:
            raise ConfigError(f"{name} of the simulated engine must be at least {low}, not {getattr(model, name)}")
    if model.recurrent >= model.layers > 0:
        raise ConfigError(
            f"at least one of the {model.layers} layers of the simulated engine must be an attention layer, but "
            f"{model.recurrent} are recurrent"
        )
    try:
        model.layout  # noqa: B018  evaluated only for its checks
    except InvalidMessage as error:
        raise ConfigError(f"weights of the simulated engine: {error}") from None
    return model


def _text_ids(text: str) -> tuple[int, ...]:
    """An id for every four characters, computed all at once, because a prompt of 1 KiB must cost next to nothing."""
    utf32 = text.encode("utf-32-le", "surrogatepass")
    pairs = np.frombuffer(utf32 + _NO_CHARACTERS[: -len(utf32) % len(_NO_CHARACTERS)], "<u8")
    ids = pairs[::2] * _ODD[0] + pairs[1::2] * _ODD[1]
    ids ^= ids >> np.uint64(31)
    ids *= _ODD[2]
    ids >>= np.uint64(33)
    ids %= np.uint64(_VOCABULARY - _FIRST_TEXT_ID)
    ids += np.uint64(_FIRST_TEXT_ID)
    return tuple(ids.tolist())


_answer_ids = lru_cache(maxsize=1024)(_text_ids)  # short answers recur


def _chain(tokens: Sequence[int]) -> Array:
    """For each position a 64-bit value that depends on every token up to it, and on their order."""
    values = np.array(tokens, "<u8")
    values += np.arange(1, len(values) + 1, dtype="<u8") * _ODD[0]
    values = np.cumsum(_mix(values), dtype="<u8")  # wraps
    return _mix(values)


def _mix(values: Array) -> Array:
    """Mix in place, so that each bit of a value depends on most of its bits."""
    values ^= values >> np.uint64(30)
    values *= _ODD[1]
    values ^= values >> np.uint64(27)
    values *= _ODD[2]
    values ^= values >> np.uint64(31)
    return values
