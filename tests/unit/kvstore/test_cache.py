"""The cache of shared blocks: what was read once is served again, within its bound, and never to the wrong reader."""

import dataclasses
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvstore.base import TTL_S
from kvstore.cache import CachedKVStore
from kvstore.memory import MemoryKVStore
from messages.errors import KVTransferFailed, StoreUnavailable
from messages.kv import Window
from tests.support.kv_samples import FINGERPRINT, layout, records_of, refs_of, same_bits, window

LAYOUT = layout()
REFS = refs_of(LAYOUT, 200, shared_tokens=128)  # four shared blocks, three of the job's own
BLOCK_BYTES = 32 * LAYOUT.token_bytes


def _stores(max_bytes: int = 1 << 20) -> tuple[MemoryKVStore, CachedKVStore]:
    store = MemoryKVStore()
    store.put(FINGERPRINT, LAYOUT, records_of(LAYOUT, REFS))
    return store, CachedKVStore(store, max_bytes)


def test_shared_blocks_are_kept_and_a_jobs_own_are_not() -> None:
    store, cache = _stores()
    cache.get(FINGERPRINT, LAYOUT, REFS)
    store.delete(REFS)

    got = cache.get(FINGERPRINT, LAYOUT, REFS[:4])

    assert [block.start for block in got] == [0, 32, 64, 96]
    with pytest.raises(KVTransferFailed, match="position 128"):
        cache.get(FINGERPRINT, LAYOUT, REFS)


def test_a_mix_of_held_and_fetched_blocks_comes_in_order() -> None:
    _, cache = _stores()
    cache.get(FINGERPRINT, LAYOUT, [REFS[1], REFS[3]])

    got = cache.get(FINGERPRINT, LAYOUT, REFS)

    wanted = [block for _, block in records_of(LAYOUT, REFS)]
    assert all(same_bits(block.data, put.data) for block, put in zip(got, wanted, strict=True))


def test_shared_blocks_are_held_once_however_often_they_are_read() -> None:
    _, cache = _stores()

    for _ in range(2):
        cache.get(FINGERPRINT, LAYOUT, REFS)
        assert cache.held_bytes == 4 * BLOCK_BYTES


def test_a_hit_renews_the_ttl_in_the_store() -> None:
    now = [0.0]
    store = MemoryKVStore(clock=lambda: now[0])
    store.put(FINGERPRINT, LAYOUT, records_of(LAYOUT, REFS))
    cache = CachedKVStore(store, 1 << 20)
    cache.get(FINGERPRINT, LAYOUT, REFS[:1])

    now[0] = TTL_S - 1
    cache.get(FINGERPRINT, LAYOUT, REFS[:1])
    now[0] = TTL_S + 1

    assert store.find_missing(REFS[:1]) == []


def test_the_least_recently_used_blocks_go_first() -> None:
    store, cache = _stores(max_bytes=2 * BLOCK_BYTES)
    for index in (0, 1, 0, 2):
        cache.get(FINGERPRINT, LAYOUT, [REFS[index]])
    store.delete(REFS)

    assert cache.held_bytes == 2 * BLOCK_BYTES
    assert len(cache.get(FINGERPRINT, LAYOUT, [REFS[0], REFS[2]])) == 2
    with pytest.raises(KVTransferFailed):
        cache.get(FINGERPRINT, LAYOUT, [REFS[1]])


def test_a_cache_of_no_bytes_holds_nothing() -> None:
    _, cache = _stores(max_bytes=0)

    assert len(cache.get(FINGERPRINT, LAYOUT, REFS)) == len(REFS)
    assert cache.held_bytes == 0


def test_a_reader_of_another_model_is_not_served_from_memory() -> None:
    _, cache = _stores()
    cache.get(FINGERPRINT, LAYOUT, REFS)

    for fingerprint, lay, ref in (
        ("other-model", LAYOUT, REFS[0]),
        (FINGERPRINT, dataclasses.replace(LAYOUT, dtype="bf16"), REFS[0]),
        (FINGERPRINT, LAYOUT, dataclasses.replace(REFS[0], chain="0" * 32)),
    ):
        with pytest.raises(KVTransferFailed):
            cache.get(fingerprint, lay, [ref])


def test_deleted_blocks_are_forgotten() -> None:
    _, cache = _stores()
    cache.get(FINGERPRINT, LAYOUT, REFS)

    cache.delete(REFS)

    assert cache.held_bytes == 0
    with pytest.raises(KVTransferFailed):
        cache.get(FINGERPRINT, LAYOUT, REFS[:1])


def test_everything_else_is_the_stores() -> None:
    lay = layout(window=16)
    store = MemoryKVStore()
    cache = CachedKVStore(store, 1 << 20)
    ref, record = window(lay, refs_of(lay, 40)[-1])

    put_bytes = cache.put(FINGERPRINT, lay, [(ref, record)])

    assert same_bits(cache.read(Window, FINGERPRINT, lay, [ref])[0].data, record.data)
    assert cache.usage() == store.usage()
    assert cache.usage().used_bytes == put_bytes
    assert cache.find_missing([ref, REFS[0]]) == [REFS[0]]


def test_threads_share_the_cache_and_its_bound_holds() -> None:
    _, cache = _stores(max_bytes=3 * BLOCK_BYTES)

    def read(number: int) -> bool:
        refs = REFS[number % 4 :]
        return [block.start for block in cache.get(FINGERPRINT, LAYOUT, refs)] == [ref.start for ref in refs]

    with ThreadPoolExecutor(6) as threads:
        assert all(threads.map(read, range(200)))

    assert cache.held_bytes <= 3 * BLOCK_BYTES


def test_what_was_put_is_kept_until_it_is_deleted_and_only_once_the_store_has_it() -> None:
    store = MemoryKVStore()
    cache = CachedKVStore(store, 1 << 20, keeps_puts=True)
    records = records_of(LAYOUT, REFS)

    cache.put(FINGERPRINT, LAYOUT, iter(records))
    store.delete(REFS)
    got = cache.get(FINGERPRINT, LAYOUT, REFS)
    assert all(same_bits(block.data, put.data) for block, (_, put) in zip(got, records, strict=True))
    # What is a job's own goes with it; what the class shares stays
    cache.delete(REFS[4:])
    assert cache.held_bytes == 4 * BLOCK_BYTES
    # What the store refuses is not kept: no decode job will name it
    small = CachedKVStore(MemoryKVStore(max_bytes=BLOCK_BYTES), 1 << 20, keeps_puts=True)
    with pytest.raises(StoreUnavailable):
        small.put(FINGERPRINT, LAYOUT, records)
    assert small.held_bytes == 0


def test_what_was_put_makes_way_for_newer_blocks() -> None:
    store, _ = _stores()
    cache = CachedKVStore(store, 3 * BLOCK_BYTES, keeps_puts=True)
    cache.put(FINGERPRINT, LAYOUT, records_of(LAYOUT, REFS))
    assert 2 * BLOCK_BYTES < cache.held_bytes <= 3 * BLOCK_BYTES
    assert len(cache.get(FINGERPRINT, LAYOUT, REFS)) == len(REFS)


def test_without_both_roles_nothing_that_was_put_is_kept() -> None:
    _, cache = _stores()
    cache.put(FINGERPRINT, LAYOUT, records_of(LAYOUT, REFS))
    assert cache.held_bytes == 0
