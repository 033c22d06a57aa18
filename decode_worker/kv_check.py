"""Whether a KV cache from elsewhere leads this engine to what it computes itself, asked of jobs as they come.

The counter of evaluated tokens shows that a cache was used, and sketches compare engines once, on a prompt of their
own. Neither sees what a real prompt's cache does to its answer. So a decoder now and then prefills a job itself, too,
and compares what the model expects as the answer's first token.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import defaultdict
from dataclasses import dataclass

from engines.base import DecodeEngine
from engines.logprobs import logprob_gap
from messages.jobs import KV_CHECK_EVERY, DecodeJob
from messages.kv import KVCache

log = logging.getLogger(__name__)

# In nats. Rounding makes up to 0.11 (SmolLM2 as Q4_1, float32, bfloat16 between llama.cpp and MLX), another prompt's
# cache 0.6 to 3.4 with tiny models of random weights, which expect next to nothing.
MAX_GAP = 0.5


@dataclass
class _Producer:
    """Who prefilled, for one model here: what was found of its KV caches."""

    unchecked: int = 0  # jobs since the last check
    passed: bool = False
    why_ended: str = ""


class KVChecks:
    """The checks of one decode worker. Callable from any thread.

    `every`: the first job of each producer is checked, and then one in so many; 0: none is. Until one has passed, each
    is checked: jobs that come together must not go ahead of the verdict.
    """

    def __init__(self, every: int = KV_CHECK_EVERY) -> None:
        self._every = every
        self._producers: dict[tuple[str, ...], _Producer] = defaultdict(_Producer)
        self._lock = threading.Lock()

    def due(self, job: DecodeJob) -> bool:
        """Whether this job's KV cache is to be checked before it is used. Counts the job."""
        with self._lock:
            producer = self._producer(job)
            producer.unchecked += 1
            return bool(self._every) and (not producer.passed or producer.unchecked >= self._every)

    def why_ended(self, job: DecodeJob) -> str:
        """Why the KV caches of whoever prefilled this job are not used any more; "": they are."""
        with self._lock:
            return self._producer(job).why_ended

    def endings(self) -> dict[str, str]:
        """A sentence for each producer whose KV caches are not used any more, by the name of its sketch."""
        with self._lock:
            return {name[-1]: each.why_ended for name, each in self._producers.items() if each.why_ended}

    def check(self, job: DecodeJob, cache: KVCache, engine: DecodeEngine, stop: threading.Event) -> float:
        """Prefill the job here, too; seconds that it took. Afterwards `why_ended` tells the verdict.

        Raises what `engine.top_logprobs` raises.
        """
        started = time.monotonic()
        tokens = job.job.asks()[0].tokens
        gap = logprob_gap(engine.top_logprobs(tokens, None, stop), engine.top_logprobs(tokens, cache, stop))
        with self._lock:
            producer = self._producer(job)
            producer.unchecked, producer.passed = 0, gap <= MAX_GAP
            if gap > MAX_GAP:
                producer.why_ended = (
                    f"after a KV cache of {job.prefill.engine or 'another engine'} the model expects other tokens than "
                    f"after one of {engine.info.engine}: {gap:.2f} nats apart on average, rounding makes less than "
                    f"{MAX_GAP}"
                )
                log.error("job %s: %s; none of its KV caches is used any more", job.job.job_id, producer.why_ended)
        return time.monotonic() - started

    def _producer(self, job: DecodeJob) -> _Producer:
        assert job.kv is not None
        return self._producers[job.job.model, job.prefill.engine, job.kv.fingerprint, job.kv.sketch]
