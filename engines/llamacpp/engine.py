"""llama.cpp as an engine. KV caches go in and out through the server's slot files.

`weights` is a GGUF file, which a server inside this process loads, or the URL of a running llama-server (see
`engines.llamacpp.start.attach`). Nobody else may use that server, because slots are chosen by number. The last slot is
for prefill, and the others are for decode. Each slot is erased before use, so the server's own counter of evaluated
prompt tokens proves what was transferred.
"""

import hashlib
import logging
import stat
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import chain
from pathlib import Path

import numpy as np

from engines.base import PROMPTS_IN_TURN, Answer, Capabilities, EngineInfo, TokenizedPrompt
from engines.chat import SAMPLE, common_prefix
from engines.entry import EngineOptions, closed_on_failure
from engines.llamacpp import slotfile
from engines.llamacpp.answer import AnswerRequest, Completions
from engines.llamacpp.entry import SERVER_SCHEMES
from engines.llamacpp.http import ServerRefused
from engines.llamacpp.model import (
    effective_ropes,
    fingerprint,
    marks,
    require_known,
    rounding,
    slot_form,
    slot_shape,
    tokenizer_hash,
    vocabulary,
)
from engines.llamacpp.prompt import LlamaPrompt
from engines.llamacpp.slotfile import SlotFile, SlotShape
from engines.llamacpp.start import Backing, attach, package_version, start
from engines.rope import Rope
from engines.waiting import POLL_S, check_running
from messages.errors import EngineUnavailable, KVTransferFailed
from messages.jobs import Part, PrefillReport, Sampling
from messages.kv import KVCache, Record

_log = logging.getLogger(__name__)


def open_engine(options: EngineOptions) -> "LlamaCppEngine":
    """Load a GGUF file, or attach to a running llama-server. Raises ConfigError, which says what to do."""
    backing = attach(options) if options.weights.startswith(SERVER_SCHEMES) else start(options)
    with closed_on_failure(backing):
        return LlamaCppEngine(backing, options.slots)


class LlamaCppEngine:
    """Both protocols of `engines.base` on one llama.cpp server."""

    def __init__(self, backing: Backing, slots: int) -> None:
        self._backing = backing
        self._server = backing.server
        self._closed = threading.Event()
        decode_slots = range(min(slots, max(1, backing.total_slots - 1)))
        self._decode_slots = _Slots(decode_slots, self._check_running)
        self._prefill_slots = self._decode_slots  # with a single slot, prefill and decode share it
        if backing.total_slots > 1:
            self._prefill_slots = _Slots([backing.total_slots - 1], self._check_running)
        gguf = backing.gguf
        has_template = gguf is None or bool(gguf.metadata.get("tokenizer.chat_template"))
        self._prompt = LlamaPrompt(self._server, marks(gguf) if gguf else (), has_template)
        self._answers = Completions(self._server, self._prompt, backing.slot_folder is not None)
        self._sample_ids = self._prompt.plain_ids(SAMPLE)
        self._shape: SlotShape | None = None
        self._ropes: tuple[Rope, ...] = ()
        self._streams = 0
        self._pinned_files: dict[int, Path] = {}
        self._restored_slots: dict[int, tuple[Path, Sequence[int]]] = {}
        self._no_kv_transfer = self._learn_slot_files()
        layout = self._shape.layout if self._shape else None
        # A slot with a sliding window or a recurrent state can't go back to an earlier position. To get there, the
        # server would compute the whole prompt again.
        self._rewinds = layout is not None and not (layout.window or layout.state_layers)
        # If the vocabulary can't be read, the ids of a sample identify the tokenizer.
        observed = "observed-" + hashlib.blake2b(repr(self._sample_ids).encode(), digest_size=16).hexdigest()
        self.info = EngineInfo(
            engine="llamacpp",
            device=backing.device,
            context=backing.context,
            slots=len(decode_slots),
            fingerprint=fingerprint(gguf, layout) if gguf and layout else "",
            tokenizer=tokenizer_hash(gguf, self._prompt.plain_ids) if gguf else observed,
            layout=layout,
            ropes=self._ropes if layout else (),
            capabilities=Capabilities.local(transfers_kv=layout is not None),
            chars_per_token=len(SAMPLE) / len(self._sample_ids),
            vocabulary=len(vocabulary(gguf)) if gguf else 0,
            rounding=rounding(gguf) if gguf else "q4",
            build=f"{self._server.get('/props').get('build_info')}, {package_version()}",
            slot_file_version=str(self._shape.version) if self._shape else "",
            prefill_slots=PROMPTS_IN_TURN,
        )

    @property
    def outage(self) -> str:
        """See engines.base.outage_of. A server in this process is never away."""
        return self._server.outage

    def tokenize(self, prompt: Sequence[Part], clock: float) -> TokenizedPrompt:
        """See Tokenizes. Control tokens that the text spells stay text."""
        return self._prompt.tokenize(prompt, clock)

    def count_tokens(self, text: str) -> int:
        """The number of tokens in a bare text."""
        return len(self._prompt.plain_ids(text))

    def close(self) -> None:
        """Calls in progress raise EngineUnavailable. Idempotent."""
        if not self._closed.is_set():
            self._closed.set()
            self._backing.close()

    def prefill(
        self,
        tokens: Sequence[int],
        emit: Callable[[Record], None],
        first: int = 0,
        resume: KVCache | None = None,
        stop: threading.Event | None = None,
    ) -> PrefillReport:
        """See PrefillEngine. All blocks are emitted at the end, because a slot is saved as a whole."""
        shape = self._require_kv_transfer()
        self.info.require_capacity(len(tokens))
        state = self._slot_file(tokens[: resume.num_tokens], resume, shape) if resume and resume.blocks else None
        with self._prefill_slots.acquire(stop) as slot:
            start = time.monotonic()
            self._prepare(slot, state, stop)
            evaluated_tokens = self._evaluate(slot, tokens, stop)
            seconds = time.monotonic() - start
            slot_file = self._save(slot, len(tokens), stop)
        if slot_file.tokens != tuple(tokens):
            raise EngineUnavailable(
                "the llama.cpp server did not save the prompt that Kvasir sent: let no other program use this server"
            )
        for record in chain(slotfile.to_blocks(slot_file, shape, first), slotfile.snapshot(slot_file, shape)):
            emit(record)
        return PrefillReport(
            computed_tokens=evaluated_tokens, restored_tokens=len(tokens) - evaluated_tokens, prefill_s=seconds
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
        self.info.require_capacity(len(tokens) + sampling.max_tokens)
        state = self._state(tokens, cache)
        with self._decode_slots.acquire(stop) as slot:
            self._answers.require_enforced(sampling.json_schema, slot, stop)
            self._prepare(slot, state, stop)
            answer = self._answers.generate(AnswerRequest(slot, tokens, sampling, on_text, stop, start))
            self._note_restored(slot, state, (*tokens, *answer.tokens))
            return answer

    @contextmanager
    def pin_cache(self, tokens: Sequence[int], cache: KVCache) -> Iterator[None]:
        """See DecodeEngine. All slots are restored from one slot file."""
        state = self._slot_file(tokens[: cache.num_tokens], cache, self._require_kv_transfer())
        with self._exchange_file() as path:
            path.write_bytes(state)
            self._pinned_files[id(cache)] = path
            try:
                yield
            finally:
                del self._pinned_files[id(cache)]

    def text_of(self, tokens: Sequence[int]) -> str:
        """See Detokenizes."""
        return str(self._server.post("/detokenize", {"tokens": list(tokens)})["content"])

    def top_logprobs(
        self, tokens: Sequence[int], cache: KVCache | None, stop: threading.Event | None = None
    ) -> dict[int, float]:
        """See DecodeEngine."""
        self.info.require_capacity(len(tokens) + 1)
        state = self._state(tokens, cache)
        with self._decode_slots.acquire(stop, lambda slot: self._reusable_tokens(slot, state, tokens)) as slot:
            if not self._reusable_tokens(slot, state, tokens):
                self._prepare(slot, state, stop)
            expected = self._answers.top_logprobs(slot, tokens, stop)
            self._note_restored(slot, state, tokens)
            return expected

    def _learn_slot_files(self) -> str:
        """Have the server write a slot file, and learn its layout. Returns why KV caches can't be transferred; "": they
        can."""
        if self._backing.gguf is None or self._backing.slot_folder is None:
            reason = "its GGUF file or its folder of slot files can't be reached from here (see ?slots= and &model=)"
        else:
            try:
                require_known(self._backing.gguf)  # Kvasir may be unable to read the slot files of an unknown model
                self._ropes = effective_ropes(self._backing.gguf)
                with self._prefill_slots.acquire(None) as slot:
                    self._prepare(slot, None, None)
                    self._evaluate(slot, self._sample_ids[:8], None)
                    probe = self._save(slot, len(self._sample_ids[:8]), None)
                self._shape = slot_shape(self._backing.gguf, probe)
                self._streams = probe.streams
                return ""
            except (KVTransferFailed, ServerRefused) as error:
                reason = str(error)
        _log.warning("this llama.cpp engine transfers no KV cache: %s", reason)
        return reason

    def _require_kv_transfer(self) -> SlotShape:
        if self._shape is None:
            raise KVTransferFailed(f"this llama.cpp engine transfers no KV cache: {self._no_kv_transfer}")
        return self._shape

    def _check_running(self, stop: threading.Event | None) -> None:
        check_running("llama.cpp", self._closed, stop)

    def _slot_file(self, tokens: Sequence[int], cache: KVCache, shape: SlotShape) -> bytes:
        return slotfile.build(tokens, cache, shape, self._streams)

    def _state(self, tokens: Sequence[int], cache: KVCache | None) -> bytes | Path | None:
        """A slot file, or the path of one; None if nothing was transferred."""
        if cache is None or not cache.blocks:
            return None
        cache.require_part_of(len(tokens))
        shape = self._require_kv_transfer()
        return self._pinned_files.get(id(cache)) or self._slot_file(tokens[: cache.num_tokens], cache, shape)

    def _note_restored(self, slot: int, state: bytes | Path | None, tokens: Sequence[int]) -> None:
        """Remember what a slot contains after an imported file was restored into it."""
        if isinstance(state, Path) and self._rewinds:
            self._restored_slots[slot] = (state, tokens)

    def _reusable_tokens(self, slot: int, state: bytes | Path | None, tokens: Sequence[int]) -> int:
        """How many of these tokens are already in the slot, computed since this same file was restored there.

        Results from another file are never reused, because a comparison of two KV caches must really compute both.
        """
        slot_content = self._restored_slots.get(slot)
        return common_prefix(slot_content[1], tokens) if slot_content and slot_content[0] == state else 0

    def _prepare(self, slot: int, state: bytes | Path | None, stop: threading.Event | None) -> None:
        """Clear a slot, and load a KV cache into it."""
        self._restored_slots.pop(slot, None)
        if self._backing.slot_folder is not None:  # without a slot folder the server can't erase slots
            self._server.post(f"/slots/{slot}?action=erase", {}, stop)
        if isinstance(state, Path):
            self._restore(slot, state, stop)
        elif state is not None:
            with self._exchange_file() as path:
                path.write_bytes(state)
                self._restore(slot, path, stop)

    def _restore(self, slot: int, path: Path, stop: threading.Event | None) -> None:
        try:
            self._server.post(f"/slots/{slot}?action=restore", {"filename": path.name}, stop)
        except ServerRefused as error:
            raise KVTransferFailed(f"the KV cache could not be restored: {error}") from None

    def _save(self, slot: int, num_tokens: int, stop: threading.Event | None) -> SlotFile:
        with self._exchange_file() as path:
            self._server.post(f"/slots/{slot}?action=save", {"filename": path.name}, stop)
            try:
                # The file is memory-mapped, so that only the KV blocks in it are copied, not the whole file. The
                # mapping stays readable after the file is deleted.
                data = np.memmap(path, np.uint8, "r")
            except (OSError, ValueError) as error:  # ValueError means that the file is empty
                raise KVTransferFailed(f"the server's slot file is not in {path.parent}: {error}") from None
        assert self._backing.gguf is not None
        return slotfile.parse(data.data, slot_form(self._backing.gguf), num_tokens)

    @contextmanager
    def _exchange_file(self) -> Iterator[Path]:
        assert self._backing.slot_folder is not None
        path = self._backing.slot_folder / f"kvasir-{uuid.uuid4().hex}.slot"
        try:
            folder = path.parent
            if folder.is_dir() and stat.S_IMODE(folder.stat().st_mode) == 0o700:
                # Only this user can open the folder, so the server runs as this user. Creating the file here sets its
                # mode, which the server keeps. If the server created the file, its mode would depend on the server's
                # umask.
                path.touch(0o600)
            yield path
        finally:
            path.unlink(missing_ok=True)

    def _evaluate(self, slot: int, tokens: Sequence[int], stop: threading.Event | None) -> int:
        """Compute the KV cache of a prompt. Returns how many of its tokens the server evaluated."""
        body = {"prompt": list(tokens), "n_predict": 0, "id_slot": slot, "cache_prompt": True}
        timings = self._server.post("/completion", body | {"response_fields": ["timings"]}, stop)["timings"]
        return int(timings["prompt_n"])


class _Slots:
    """The server's slot numbers. Each is lent to one caller at a time."""

    def __init__(self, numbers: Sequence[int], check: Callable[[threading.Event | None], None]) -> None:
        self._free = list(numbers)
        self._slot_returned = threading.Condition()
        self._check = check

    @contextmanager
    def acquire(self, stop: threading.Event | None, worth: Callable[[int], int] = lambda _slot: 0) -> Iterator[int]:
        """Wait for a free slot. Among several, take the one with the highest `worth`, then the one that has been free
        longest."""
        with self._slot_returned:
            self._check(stop)
            while not self._free:
                self._slot_returned.wait(POLL_S)
                self._check(stop)
            slot = max(self._free, key=worth)
            self._free.remove(slot)
        try:
            yield slot
        finally:
            with self._slot_returned:
                self._free.append(slot)
                self._slot_returned.notify()
