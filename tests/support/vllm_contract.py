"""What the vllm engine keeps whoever runs its vLLM: a host process of ours, or somebody else's server."""

import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from benchmarks.matrix_caches import prefilled
from engines.vllm.engine import VLLMEngine
from messages.errors import Cancelled, EngineUnavailable, KVTransferFailed
from messages.jobs import Sampling
from messages.kv import KVCache, Record
from tests.support.waiting import wait_until

GREEDY = Sampling(max_tokens=16, temperature=0)
ENDLESS = Sampling(max_tokens=7000, temperature=0, json_schema='{"type": "string", "minLength": 7000}')  # half a minute
TOKENS = tuple(40 + number * 7 % 800 for number in range(900))
LONG = (TOKENS * 9)[:8000]


def answers(engine: VLLMEngine, cache: KVCache | None) -> tuple[str, int] | None:
    """Text and evaluated tokens; None while it is away."""
    try:
        answer = engine.decode(TOKENS, cache, GREEDY)
    except EngineUnavailable:
        return None
    return answer.text, answer.evaluated_tokens


def life(engine: VLLMEngine) -> object:
    """Another one each time its vLLM is started."""
    process = getattr(engine.host, "process", None)
    return process.pid if process else engine.host.served_model["instance"]


class VLLMContract:
    """For a test module with a fixture `engine`: the demo model, a context of 8,192 tokens, chunks of 512."""

    def test_a_prefill_gives_blocks_out_before_it_ends(self, engine: VLLMEngine) -> None:
        emitted_records: list[tuple[float, int]] = []

        def emit(record: Record) -> None:
            emitted_records.append((time.monotonic(), record.start))  # type: ignore[union-attr]

        engine.prefill(LONG, emit)
        assert [start for _, start in emitted_records] == list(range(0, 8000, 32))
        assert emitted_records[-1][0] - emitted_records[0][0] > (time.monotonic() - emitted_records[-1][0])

    @pytest.mark.parametrize("operation", ["prefill", "decode"])
    def test_work_that_is_cancelled_ends_within_a_second_and_leaves_nothing(
        self, engine: VLLMEngine, operation: str
    ) -> None:
        stop = threading.Event()
        threading.Timer(0.3, stop.set).start()

        def work() -> None:
            while operation == "prefill":  # however quick the machine is
                engine.prefill(LONG, lambda _: None, stop=stop)
            engine.decode(TOKENS, None, ENDLESS, stop=stop)

        with pytest.raises(Cancelled):
            work()
        end = time.monotonic()
        assert engine.decode(TOKENS[:64], None, GREEDY).evaluated_tokens == 64
        assert time.monotonic() - end < 5
        wait_until(lambda: not list(engine.host.folder.glob("*.kv")), "the files are gone", 10)

    def test_a_cache_that_can_not_be_read_fails_its_job_and_no_other(self, engine: VLLMEngine) -> None:
        # Given a job at work, and another whose cache is cut short in shared memory
        cache, long = prefilled(engine, TOKENS), Sampling(max_tokens=400, temperature=0)
        instance = life(engine)
        with ThreadPoolExecutor(1) as thread, engine.pin_cache(TOKENS, cache):
            busy = thread.submit(engine.decode, TOKENS, None, long)
            (path,) = engine.host.folder.glob("*.kv")
            path.unlink()
            path.write_bytes(b"short")
            with pytest.raises(KVTransferFailed, match="could not be put in"):
                engine.decode(TOKENS, cache, GREEDY)
            assert busy.result().evaluated_tokens == len(TOKENS)
        # Then the engine serves on
        assert engine.decode(TOKENS, cache, GREEDY).evaluated_tokens == 1
        assert life(engine) == instance
