"""The thread that owns an MLX model: it feeds prompts in chunks and decodes all answers in one running batch.

MLX arrays belong to the thread that made them, so all callers' prefills and decodes go through this thread. Each turn
of the loop feeds one chunk of one waiting prompt, and then takes one step of the batch. So prompts join while others
decode, and neither starves. `BatchGenerator` gets sequences whose cache already holds all prompt tokens except the
last.
"""

import logging
import queue
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import mlx.core as mx
from mlx_lm.generate import BatchGenerator
from mlx_lm.models.cache import make_prompt_cache

from engines.mlx.model import LoadedModel
from engines.mlx.sampling import greedy
from engines.mlx.work import DecodeWork, PrefillWork, PromptWork
from messages.errors import EngineUnavailable, KvasirError

_log = logging.getLogger(__name__)
CHUNK_TOKENS = 512  # a multiple of every block length, so that no block spans two chunks


class ModelLoop:
    """Runs `load`, and then the model, in a separate thread. Callable from any thread."""

    def __init__(self, load: Callable[[], LoadedModel], end_ids: Sequence[int], slots: int) -> None:
        """Returns when the model is loaded. Raises the errors of `load`."""
        self._inbox: queue.SimpleQueue[PromptWork | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._closed = False
        ready: queue.SimpleQueue[LoadedModel | Exception] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, args=(load, end_ids, slots, ready), name="mlx", daemon=True)
        self._thread.start()
        outcome = ready.get()
        if isinstance(outcome, Exception):
            self._thread.join()  # the thread must end before the interpreter does
            raise outcome
        self.layout, self.ropes, self.num_logits = outcome.layout, outcome.ropes, outcome.num_logits
        self.device, self.no_kv_transfer = outcome.device, outcome.no_kv_transfer

    def submit(self, work: PromptWork) -> None:
        """Raises EngineUnavailable if the loop has ended."""
        with self._lock:
            self.require_open()
            self._inbox.put(work)

    def require_open(self) -> None:
        """Raises EngineUnavailable if the loop has ended."""
        if self._closed:
            raise EngineUnavailable("the MLX engine was closed")

    def close(self) -> None:
        """End the thread. Callers that wait for outputs get EngineUnavailable. Idempotent."""
        with self._lock:
            self._closed = True
            self._inbox.put(None)
        self._thread.join()

    def _run(
        self,
        load: Callable[[], LoadedModel],
        end_ids: Sequence[int],
        slots: int,
        ready: queue.SimpleQueue[LoadedModel | Exception],
    ) -> None:
        try:
            stream = mx.new_stream(mx.default_device())
            with mx.stream(stream):
                loaded_model = load()
                turns = _Scheduler(loaded_model, stream, end_ids, slots, self._inbox)
                ready.put(loaded_model)
                try:
                    turns.run()
                except Exception:  # noqa: BLE001  a bug must not leave callers waiting for ever
                    _log.exception("the thread of the MLX engine ended; the engine is closed")
                finally:
                    with self._lock:
                        self._closed = True
                    turns.end()
        except Exception as error:  # noqa: BLE001  from `load`; raised again in the waiting thread
            ready.put(error)
        finally:
            mx.clear_cache()
            # MLX requires this before a thread ends. Otherwise its destructors run after the interpreter has ended, and
            # can abort the process. Older releases don't have this function.
            getattr(mx, "clear_streams", lambda: None)()


class _Scheduler:
    """One turn of the loop after another, in the loop's thread."""

    def __init__(
        self,
        loaded_model: LoadedModel,
        stream: Any,
        end_ids: Sequence[int],
        slots: int,
        inbox: queue.SimpleQueue[PromptWork | None],
    ) -> None:
        self._model = loaded_model.model
        self._layout = loaded_model.layout
        self._stream = stream
        self._end_ids = end_ids
        self._slots = slots
        self._inbox = inbox
        self._backlog: deque[PromptWork] = deque()
        self._feeding: deque[PromptWork] = deque()
        self._decoding: dict[int, DecodeWork] = {}
        self._batch: Any = self._new_batch()

    def run(self) -> None:
        """Run until None arrives."""
        while self._receive():
            self._admit()
            self._feed()
            self._step()

    def end(self) -> None:
        """Tell all callers that nothing more will come."""
        while not self._inbox.empty():
            work = self._inbox.get()
            if work is not None:
                self._backlog.append(work)
        for work in (*self._backlog, *self._feeding, *self._decoding.values()):
            work.put(EngineUnavailable("the MLX engine was closed"))
        self._batch.close()

    def _new_batch(self) -> Any:
        # End tokens are passed as stop_tokens, because all releases of mlx-lm accept this argument.
        return BatchGenerator(
            self._model,
            stop_tokens=[[number] for number in self._end_ids],
            sampler=greedy,
            completion_batch_size=self._slots,
            prefill_batch_size=self._slots,
            stream=self._stream,
        )

    def _receive(self) -> bool:
        """Take new work, and wait for some if there is nothing to do. Returns False when the loop should end."""
        busy = bool(self._backlog or self._feeding or self._decoding)
        while not busy or not self._inbox.empty():
            work = self._inbox.get()
            if work is None:
                return False
            self._backlog.append(work)
            busy = True
        return True

    def _admit(self) -> None:
        """Start the work for which there is a slot: at most `slots` decodes and one prefill."""
        self._backlog = deque(work for work in self._backlog if not work.is_abandoned)
        for work in tuple(self._backlog):
            if self._has_slot(work):
                self._backlog.remove(work)
                with _report_failure(work):
                    work.begin(make_prompt_cache(self._model), self._layout)
                    self._feeding.append(work)

    def _has_slot(self, work: PromptWork) -> bool:
        decodes = len(self._decoding) + sum(isinstance(feeding_work, DecodeWork) for feeding_work in self._feeding)
        if isinstance(work, DecodeWork):
            return decodes < self._slots
        return not any(isinstance(feeding_work, PrefillWork) for feeding_work in self._feeding)

    def _feed(self) -> None:
        """Feed one chunk of the prompt that has waited longest.

        Prompts that need no chunk join the batch at once. If only one joined at each step, slots would stay empty
        meanwhile.
        """
        for work in tuple(self._feeding):
            if isinstance(work, DecodeWork) and not work.is_abandoned and work.position >= work.to_feed:
                self._feeding.remove(work)
                with _report_failure(work):
                    self._join_batch(work)
        if not self._feeding or (work := self._feeding.popleft()).is_abandoned:
            return
        with _report_failure(work):
            self._feed_chunk(work)
            if work.position < work.to_feed:
                self._feeding.append(work)
            elif isinstance(work, DecodeWork):
                self._join_batch(work)
            elif isinstance(work, PrefillWork):
                work.finish()

    def _feed_chunk(self, work: PromptWork) -> None:
        # Chunks end at fixed positions, so that a prompt is computed the same way wherever it was resumed.
        start, end = work.position, min(work.to_feed, (work.position // CHUNK_TOKENS + 1) * CHUNK_TOKENS)
        if end > start:
            self._model(mx.array([work.tokens[start:end]]), cache=work.caches)
            work.evaluated_tokens += end - start
            work.position = end
        work.on_chunk()

    def _join_batch(self, work: DecodeWork) -> None:
        (number,) = self._batch.insert(
            [work.tokens[-1:]],
            max_tokens=[work.max_tokens],
            caches=[work.caches],
            samplers=[work.sampler],
            logits_processors=[work.processors],
        )
        self._decoding[number] = work
        work.caches = []

    def _step(self) -> None:
        """Generate one token for every sequence in the batch."""
        self._leave([number for number, work in self._decoding.items() if work.is_abandoned])
        if not self._decoding:
            return
        try:
            prompts, tokens = self._batch.next()
        except Exception as error:  # noqa: BLE001  MLX raises RuntimeError, ValueError and others; the batch is lost
            self._lose_batch(error)
            return
        for prompt in prompts:
            if prompt.end_of_prompt:
                self._decoding[prompt.uid].evaluated_tokens += prompt.progress[1]
        for token in tokens:
            self._hand_out(token.uid, token.token, token.finish_reason or "")

    def _hand_out(self, number: int, token: int, reason: str) -> None:
        work = self._decoding[number]
        if work.failure is None:
            work.put_token(token, reason)
        else:
            work.put(work.failure)
        if reason:  # the sequence is finished, and the batch has already removed it
            del self._decoding[number]
        elif work.failure is not None:
            self._leave([number])

    def _leave(self, numbers: list[int]) -> None:
        if numbers:
            self._batch.remove(numbers)
        for number in numbers:
            del self._decoding[number]

    def _lose_batch(self, error: Exception) -> None:
        _log.exception("a step of the MLX batch failed; its %d answers are lost", len(self._decoding))
        for work in self._decoding.values():
            work.put(EngineUnavailable(f"MLX failed while decoding: {error}"))
        self._decoding.clear()
        self._batch.close()
        self._batch = self._new_batch()


@contextmanager
def _report_failure(work: PromptWork) -> Iterator[None]:
    """Send a prompt's error only to its own caller."""
    try:
        yield
    except KvasirError as error:
        work.put(error)
    except Exception as error:  # noqa: BLE001  MLX raises RuntimeError, ValueError and others
        _log.exception("MLX failed on a prompt of %d tokens", len(work.tokens))
        work.put(EngineUnavailable(f"MLX failed on the prompt: {error}"))
