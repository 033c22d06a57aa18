"""A class's prefix: computed once, stored once, resumed from, and never built upon where it is damaged."""

import threading
import time
import zlib
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import pytest

from benchmarks import matrix_models
from engines.base import LoadedEngine, PrefillEngine
from engines.registry import Engine, EngineOptions, open_engine
from kvstore.blocks import BlockRef, block_refs, shared_boundary, snapshot_refs
from kvstore.heartbeat import CLAIM_TTL_S
from kvstore.memory import MemoryClusterState
from messages.errors import Cancelled, EngineUnavailable, KVTransferFailed
from messages.jobs import DecodeJob, PrefillJob, Sampling, user_prompt
from messages.kv import KVCache
from prefill_worker.free_memory import FreeMemory
from prefill_worker.kv_transfer import KVWriter, PrefixLeases, Refusals
from tests.support.kv_samples import raised_by
from tests.support.pipeline import INSTANT, Gate, WatchedEngine, WatchedStore
from tests.support.tiny_gguf import TinyModel, write_gguf
from tests.support.waiting import wait_until

GREEDY = Sampling(max_tokens=16, temperature=0)
RUBRIC = "the program reads its input line by line, and it prints the report.\n" * 12
OWN_BLOCKS_TAKE_S = 0.3


class Class:
    """A store, and workers' KV transfers into it."""

    def __init__(self, engine: PrefillEngine | None = None) -> None:
        self.engine: Any = engine or WatchedEngine()
        self.kv = WatchedStore(max_bytes=16 << 20)  # little enough that room is reserved for such prompts
        self.clock = 0.0
        self.cluster_state = MemoryClusterState(lambda: self.clock)

    def worker(self, name: str = "worker-1", engine: PrefillEngine | None = None) -> KVWriter:
        refusals = Refusals(self.cluster_state, "m", "")
        free_memory = FreeMemory(0, lambda: False)
        return KVWriter(
            LoadedEngine(engine or self.engine),
            self.kv,
            self.cluster_state,
            name,
            lambda: False,
            refusals,
            free_memory,
        )

    def job(self, own: str, shared: str = RUBRIC) -> PrefillJob:
        prompt = self.engine.tokenize(user_prompt(shared, own), 0.0)
        bare = PrefillJob(
            f"job-{zlib.crc32(own.encode())}", "batch", "item", "tiny:1b", user_prompt(shared, own), GREEDY
        )
        return bare.tokenized(prompt.ids, prompt.shared_tokens)

    def prefill(self, job: PrefillJob, worker: KVWriter | None = None) -> DecodeJob:
        return (worker or self.worker()).compute_and_store(job, threading.Event())

    def boundary(self, job: PrefillJob) -> int:
        """Where the stored class-wide part of a job ends."""
        return shared_boundary(self.engine.info.layout, job.shared_tokens)

    def refs(self, job: PrefillJob) -> list[BlockRef]:
        """The job's blocks, and at the end its window records and states, if it has any."""
        info, covered = self.engine.info, len(job.tokens) - 1
        shared = self.boundary(job)
        blocks = block_refs(info.fingerprint, info.layout, job.tokens, covered, shared, job.job_id, tag=job.tag)
        ends = [ref for ref in blocks if ref.end in (self.boundary(job), covered)]
        return blocks + [one for ref in ends for one in snapshot_refs(info.layout, ref)]

    def stored(self, job: PrefillJob) -> list[BlockRef]:
        """Those of them that are in the store."""
        missing = self.kv.find_missing(self.refs(job))
        return [ref for ref in self.refs(job) if ref not in missing]

    def cache(self, job: PrefillJob) -> KVCache:
        """The job's KV cache, as a decoder loads it."""
        info = self.engine.info
        blocks = [ref for ref in self.refs(job) if ref.key.startswith("kv:")]
        return self.kv.get_cache(info.fingerprint, info.layout, blocks)


@pytest.fixture
def room() -> Class:
    return Class()


# What is computed and stored


def test_the_second_of_a_class_computes_and_stores_only_what_is_its_own(room: Class) -> None:
    # Given a class whose first student's work was prefilled
    first, second = room.job("a" * 400), room.job("b" * 600)
    covered = len(first.tokens) - 1
    assert room.prefill(first).prefill.computed_tokens == covered
    room.kv.stored_refs.clear()

    # When the second's is
    done = room.prefill(second)

    # Then the prefix is neither computed nor stored again
    assert done.prefill.restored_tokens == room.boundary(second) > 0
    assert done.prefill.computed_tokens == len(second.tokens) - 1 - room.boundary(second)
    assert not any(ref.is_shared for ref in room.kv.stored_refs)

    # and the whole cache is there
    room.engine.decode(second.tokens, room.cache(second), GREEDY)


def test_a_job_that_comes_back_computes_nothing(room: Class) -> None:
    job = room.job("a" * 400)
    room.prefill(job)

    again = room.prefill(job)

    assert (again.prefill.computed_tokens, again.prefill.put_bytes) == (0, 0)
    assert again.kv == room.prefill(job).kv


def test_a_block_that_was_freed_is_computed_and_stored_again(room: Class) -> None:
    # Given a class's prefix out of which the store freed a block
    room.prefill(room.job("a" * 400))
    job = room.job("b" * 400)
    lost = room.refs(job)[2]
    room.kv.delete([lost])
    room.kv.stored_refs.clear()

    # When the next is prefilled
    done = room.prefill(job)

    # Then all from there on is computed, and only what was missing is stored
    assert done.prefill.computed_tokens == len(job.tokens) - 1 - lost.start
    assert [ref for ref in room.kv.stored_refs if ref.is_shared] == [lost]
    room.engine.decode(job.tokens, room.cache(job), GREEDY)


def test_a_damaged_prefix_is_replaced(room: Class) -> None:
    room.prefill(room.job("a" * 400))
    job = room.job("b" * 400)
    room.kv.flip_a_byte(room.refs(job)[1])

    done = room.prefill(job)

    assert done.prefill.computed_tokens == len(job.tokens) - 1
    room.engine.decode(job.tokens, room.cache(job), GREEDY)


def test_a_prefix_that_is_damaged_again_and_again_costs_the_kv_transfer_and_not_the_job(room: Class) -> None:
    # Given a store that spoils whatever is put into it
    room.kv = SpoilingStore()

    # When a class is prefilled
    first, second = (room.prefill(room.job(letter * 400)) for letter in "ab")

    # Then its jobs go on without a KV transfer, and no worker computes for ever
    assert (first.kv, second.kv) == (None, None)
    assert "xxh3" in second.why_no_kv


class SpoilingStore(WatchedStore):
    def put(self, fingerprint: Any, layout: Any, records: Any) -> int:
        records = list(records)
        done = super().put(fingerprint, layout, records)
        for ref, _ in records:
            self.flip_a_byte(ref)
        return done


def test_an_engine_that_refuses_a_stored_start_computes_it_itself(room: Class) -> None:
    # Given an engine that can't go on from any stored prefix
    room.prefill(room.job("a" * 400))
    job = room.job("b" * 400)
    engine = Stubborn()

    # When it prefills
    done = room.prefill(job, room.worker(engine=engine))

    # Then it computes all of it
    assert (engine.refused, done.prefill.computed_tokens) == (1, len(job.tokens) - 1)
    room.engine.decode(job.tokens, room.cache(job), GREEDY)


class Stubborn(WatchedEngine):
    refused = 0

    def prefill(self, tokens: Any, emit: Any, first: int = 0, resume: Any = None, stop: Any = None) -> Any:
        if resume:
            self.refused += 1
            raise KVTransferFailed("the server refused to restore the slot")
        return super().prefill(tokens, emit, first, resume, stop)


# What is left behind


@pytest.mark.parametrize(
    "error",
    [Cancelled("stopped"), EngineUnavailable("out of memory"), KVTransferFailed("disk full"), ValueError("bug")],
)
def test_a_prefill_that_ends_early_leaves_no_block_of_its_own(room: Class, error: Exception) -> None:
    # Given an engine that fails when it has emitted half of the job's own blocks
    job = room.job("a" * 4000)
    engine = FailsHalfway(error)
    worker = room.worker(engine=engine)

    # When it prefills
    raised = raised_by(lambda: worker.compute_and_store(job, threading.Event()), type(error))
    assert raised == ("" if isinstance(error, KVTransferFailed) else str(error))

    # Then nothing of the job's own is stored, now or a little later, and the prefix is
    assert engine.emitted > room.boundary(job)
    assert not [thread for thread in threading.enumerate() if thread.name == "kv-upload"]
    assert [ref.end for ref in room.stored(job)][-1] == room.boundary(job)
    assert room.cluster_state.reserved_bytes() == 0


class FailsHalfway(WatchedEngine):
    def __init__(self, error: Exception, weights: str = INSTANT) -> None:
        super().__init__(weights, context=8192)
        self._error = error
        self.emitted = 0
        self.before_failing: Callable[[], object] = lambda: None

    def prefill(self, tokens: Any, emit: Any, first: int = 0, resume: Any = None, stop: Any = None) -> Any:
        def until_half(record: Any) -> None:
            self.emitted = record.end
            if record.end > 600:
                self.before_failing()
                raise self._error
            emit(record)

        return super().prefill(tokens, until_half, first, resume, stop)


def test_blocks_already_on_their_way_are_deleted_too() -> None:
    # Given a store that is slow to take a job's own blocks, and an engine that fails meanwhile
    large = f"{INSTANT},head_dim=128"  # little is stored by the prefill's own thread
    room = Class(WatchedEngine(large))
    room.kv = slow = SlowStore()
    job = room.job("a" * 4000)
    engine = FailsHalfway(EngineUnavailable("lost its model"), large)
    engine.before_failing = lambda: slow.busy.wait(10)

    # When the prefill fails
    with pytest.raises(EngineUnavailable):
        room.worker(engine=engine).compute_and_store(job, threading.Event())

    # Then what the store took last is gone as well
    assert room.kv.stored_refs[-1].end > room.boundary(job)
    assert room.stored(job)[-1].end == room.boundary(job)


class SlowStore(WatchedStore):
    def __init__(self) -> None:
        super().__init__()
        self.busy = threading.Event()

    def put(self, fingerprint: Any, layout: Any, records: Any) -> int:
        records = list(records)
        if not records[0][0].is_shared:
            self.busy.set()
            time.sleep(OWN_BLOCKS_TAKE_S)
        return super().put(fingerprint, layout, records)


# Leases


def test_two_workers_compute_a_prefix_once() -> None:
    # Given a worker in the middle of a class's prefix
    room = Class()
    slow, quick = WatchedEngine(), WatchedEngine()
    slow.before_prefill = gate = Gate()
    jobs = room.job("a" * 400), room.job("b" * 400)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(room.prefill, jobs[0], room.worker("worker-1", slow))
        gate.wait()

        # When another begins with the next job of the class
        second = pool.submit(room.prefill, jobs[1], room.worker("worker-2", quick))
        wait_until(lambda: room.cluster_state.reserved_bytes() > 60_000, "the second waits with its room reserved")
        gate.open()

    # Then it waits, and computes its suffix
    assert first.result().prefill.computed_tokens == len(jobs[0].tokens) - 1
    assert second.result().prefill.restored_tokens == room.boundary(jobs[1])
    assert [len(tokens) for tokens in quick.prefill_calls] == [len(jobs[1].tokens) - 1]


def test_a_lease_is_held_by_one_and_free_again_afterwards() -> None:
    cluster_state = MemoryClusterState()
    ours, theirs = PrefixLeases(cluster_state, "worker-1"), PrefixLeases(cluster_state, "worker-2")
    never = threading.Event()

    with ours.turn("abc", lambda: False, 0, never) as compute:
        assert compute
        assert ours.claims == [("prefix-abc", 1)]
        assert not cluster_state.claim("prefix-abc", 1, "worker-2", 1)
    assert ours.claims == []

    with theirs.turn("abc", lambda: False, 0, never) as compute:
        assert compute
        assert theirs.claims == [("prefix-abc", 1)]


def test_who_gets_the_lease_after_the_prefix_was_stored_computes_nothing() -> None:
    leases = PrefixLeases(MemoryClusterState(), "worker-1")
    with leases.turn("abc", lambda: True, 0, threading.Event()) as compute:
        assert not compute


def test_patience_has_an_end_and_the_lease_stays_with_its_holder() -> None:
    # Given a lease that another worker holds for ever
    cluster_state = MemoryClusterState()
    cluster_state.claim("prefix-abc", 1, "worker-2", 3600)

    # When a worker's patience is at its end, Then it computes too, without the lease
    leases = PrefixLeases(cluster_state, "worker-1")
    with leases.turn("abc", lambda: False, 0, threading.Event()) as compute:
        assert (compute, leases.claims) == (True, [])
    assert cluster_state.claim("prefix-abc", 1, "worker-2", 3600)


def test_waiting_ends_when_the_prefix_is_there_whoever_holds_the_lease() -> None:
    cluster_state, stop = MemoryClusterState(), threading.Event()
    cluster_state.claim("prefix-abc", 1, "worker-2", 3600)
    looks = iter([False, False])
    too_late = threading.Timer(10, stop.set)
    too_late.start()

    with PrefixLeases(cluster_state, "worker-1").turn("abc", lambda: next(looks, True), 3600, stop) as compute:
        assert not compute
    too_late.cancel()


def test_the_lease_of_a_worker_that_died_runs_out(room: Class) -> None:
    # Given a worker that died with the lease
    job = room.job("a" * 400)
    chain = room.refs(job)[room.boundary(job) // 32 - 1].chain
    assert room.cluster_state.claim(f"prefix-{chain}", 1, "the dead one", CLAIM_TTL_S)

    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(room.prefill, job)
        wait_until(lambda: room.cluster_state.reserved_bytes(), "the next one has begun")
        assert room.engine.prefill_calls == []

        # When its lease has run out
        room.clock += CLAIM_TTL_S + 0.1

    # Then the next one computes
    assert done.result().prefill.computed_tokens == len(job.tokens) - 1


def test_a_job_can_be_cancelled_while_it_waits_for_the_prefix(room: Class) -> None:
    job, stop = room.job("a" * 400), threading.Event()
    chain = room.refs(job)[room.boundary(job) // 32 - 1].chain
    room.cluster_state.claim(f"prefix-{chain}", 1, "worker-2", 3600)

    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(room.worker().compute_and_store, job, stop)
        wait_until(lambda: room.cluster_state.reserved_bytes(), "it waits")
        stop.set()

    assert isinstance(waiting.exception(), Cancelled)
    assert (room.cluster_state.reserved_bytes(), room.engine.prefill_calls) == (0, [])


# Layers that keep the end of a sequence only


@pytest.fixture(scope="module", params=["gpt-oss", "qwen3.5"])
def uneven(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    """A tiny gpt-oss whose every second layer sees 16 positions, and a Qwen3.5, three layers in four recurrent."""
    folder = tmp_path_factory.mktemp("model")
    if request.param == "gpt-oss":
        path = write_gguf(folder / "gpt-oss.gguf", TinyModel("gpt-oss", window=16))
    else:
        matrix_models.write(folder, request.param, seed=0)
        path = matrix_models.weights_for("llamacpp", folder, request.param)
    engine = open_engine("llamacpp", EngineOptions(str(path), context=2048, slots=1, threads=1))
    yield engine
    engine.close()


def test_with_uneven_layers_resuming_from_the_prefix_equals_full_computation(uneven: Engine) -> None:
    # Given a class whose first student was prefilled
    resumed, alone = Class(uneven), Class(uneven)
    resumed.prefill(resumed.job("it prints out " * 20))
    job = resumed.job("a line of the program " * 20)

    # When the next one resumes, and the same job is computed in full elsewhere
    done = resumed.prefill(job)
    full = alone.prefill(replace(job, shared_tokens=0))

    # Then it computed its suffix only,
    assert done.prefill.restored_tokens == resumed.boundary(job) > 16
    assert full.prefill.computed_tokens == len(job.tokens) - 1

    # and the answers are those of a cold run
    cold = uneven.decode(job.tokens, None, GREEDY)
    for cache in (resumed.cache(job), alone.cache(replace(job, shared_tokens=0))):
        answer = uneven.decode(job.tokens, cache, GREEDY)
        assert (answer.text, answer.evaluated_tokens) == (cold.text, 1)


def test_a_snapshot_lies_at_the_prefixs_end_and_at_the_prompts(uneven: Engine) -> None:
    room = Class(uneven)
    job = room.job("it prints out " * 20)

    room.prefill(job)

    found = [(ref.start, ref.is_shared, ref.layer) for ref in room.stored(job) if ref.key.startswith("kvw:")]
    layers = room.engine.info.layout.state_layers or (None,)
    ends = ((room.boundary(job), True), (len(job.tokens) - 1, False))
    assert found == [(*end, layer) for end in ends for layer in layers]


@pytest.mark.parametrize(
    "harm", [lambda kv, ref: kv.delete([ref]), lambda kv, ref: kv.flip_a_byte(ref)], ids=["gone", "damaged"]
)
def test_a_position_without_its_whole_snapshot_is_not_resumed_from(
    uneven: Engine, harm: Callable[[WatchedStore, BlockRef], None]
) -> None:
    # Given a stored prefix of whose snapshot a record is gone, or damaged
    room = Class(uneven)
    room.prefill(room.job("it prints out " * 20))
    job = room.job("a line of the program " * 20)
    record = [ref for ref in room.refs(job) if ref.key.startswith("kvw:") and ref.is_shared][-1]
    harm(room.kv, record)

    # When the next one is prefilled
    done = room.prefill(job)

    # Then all of it is computed, the record is there again, and the answer is right
    assert done.prefill.computed_tokens == len(job.tokens) - 1
    assert record in room.stored(job)
    answer = uneven.decode(job.tokens, room.cache(job), GREEDY)
    assert (answer.text, answer.evaluated_tokens) == (uneven.decode(job.tokens, None, GREEDY).text, 1)


def test_blocks_alone_are_no_start_for_uneven_layers(uneven: Engine) -> None:
    # Given a job all of whose blocks are stored but the last, and so no snapshot before it
    room = Class(uneven)
    job = replace(room.job("it prints out " * 20), shared_tokens=0)
    room.prefill(job)
    last = [ref for ref in room.refs(job) if ref.key.startswith("kv:")][-1]
    absent = [last, *snapshot_refs(room.engine.info.layout, last)]
    room.kv.delete(absent)
    room.kv.stored_refs.clear()

    # When it comes back, Then it is computed from the start, and what is missing is stored
    assert room.prefill(job).prefill.computed_tokens == len(job.tokens) - 1
    assert room.kv.stored_refs == absent


@pytest.mark.parametrize("shared", [True, False], ids=["after a class's part", "by itself"])
def test_a_turn_goes_on_from_the_last_whole_block_of_the_one_before(uneven: Engine, shared: bool) -> None:
    # Given a conversation's first turn
    room = Class(uneven)
    first = replace(room.job("it prints out " * 20), tag="ada")
    first = first if shared else replace(first, shared_tokens=0)
    room.prefill(first)
    # When it goes on, by itself and with another's tag
    answer = uneven.decode(first.tokens, room.cache(first), GREEDY)
    second = replace(first, job_id="job-2", tokens=(*first.tokens, *answer.tokens, *first.tokens[-40:]))
    done, others = room.prefill(second), room.prefill(replace(second, job_id="job-3", tag="bob"))
    # Then what is computed is what is new, but for less than a block
    step = uneven.info.layout.block_tokens
    kept = (len(first.tokens) - 1) // step * step
    assert done.prefill.restored_tokens == kept
    assert others.prefill.restored_tokens == (room.boundary(second) if shared else 0)
    # and the answer is that of a cold run
    cold = uneven.decode(second.tokens, None, GREEDY)
    warm = uneven.decode(second.tokens, room.cache(second), GREEDY)
    assert (warm.text, warm.evaluated_tokens) == (cold.text, 1)


def test_room_is_reserved_for_both_snapshots_of_a_hybrid_model() -> None:
    # Given the first job of a class, of a model whose states are larger than all else
    room = Class(WatchedEngine(f"{INSTANT},layers=8,kv_heads=4,head_dim=64,recurrent=7"))
    job, layout = room.job("a" * 400), room.engine.info.layout
    room.engine.before_prefill = gate = Gate()

    # When it is prefilled
    with ThreadPoolExecutor(1) as pool:
        done = pool.submit(room.prefill, job)
        gate.wait()
        reserved = room.cluster_state.reserved_bytes()
        gate.open()

    # Then the states at the boundary and at the end are in what was reserved, and not much more
    stored = done.result().prefill.put_bytes
    assert stored > 2 * layout.state_bytes > (len(job.tokens) - 1) * layout.token_bytes
    assert stored <= reserved < 1.4 * stored
    assert done.result().kv.stored_bytes == (len(job.tokens) - 1) * layout.token_bytes + layout.state_bytes
