"""What every KVStore keeps, whether in memory or in Redis, over our sockets or redis-py's."""

import dataclasses
import itertools
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from kvstore.base import TTL_S
from kvstore.blocks import BlockRef
from messages.errors import KVTransferFailed
from messages.kv import Block, DType, KVCache, KVLayout, Window
from tests.support.kv_samples import hybrid, layout, records_of, refs_of, same_bits, states, window
from tests.support.stores import KINDS, Room, open_room
from tests.support.waiting import wait_until

TOKENS = 203  # six whole blocks and a part: more than are asked for ahead


@pytest.fixture(params=KINDS)
def room(request: pytest.FixtureRequest) -> Iterator[Room]:
    room = open_room(request.param, request)
    yield room
    immortal = room.immortal()
    room.close()
    assert immortal == [], "every key must have a TTL"


@dataclasses.dataclass(frozen=True)
class Stored:
    fingerprint: str
    layout: KVLayout
    refs: list[BlockRef]
    blocks: list[Block]


@pytest.fixture
def stored(room: Room) -> Stored:
    lay = layout()
    refs = refs_of(lay, TOKENS, shared_tokens=32, fingerprint=room.token)
    records = records_of(lay, refs)
    room.kv.put(room.token, lay, records)
    return Stored(room.token, lay, refs, [block for _, block in records])


@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32"])
def test_blocks_come_back_bit_for_bit_and_in_order(room: Room, dtype: DType) -> None:
    lay = layout(dtype)
    refs = refs_of(lay, TOKENS, shared_tokens=64, fingerprint=room.token)
    records = records_of(lay, refs)

    stored_bytes = room.kv.put(room.token, lay, iter(records))
    got = room.kv.get(room.token, lay, refs)

    assert [block.start for block in got] == [0, 32, 64, 96, 128, 160, 192]
    assert all(same_bits(block.data, put.data) for block, (_, put) in zip(got, records, strict=True))
    assert stored_bytes == sum(len(room.raw(ref.key)) for ref in refs)
    assert KVCache(lay, tuple(got)).num_tokens == TOKENS


def test_many_blocks_come_back_through_one_pipeline(room: Room) -> None:
    lay = KVLayout(8, 8, 64, "f16")
    refs = refs_of(lay, 100 * lay.block_tokens, fingerprint=room.token)
    records = records_of(lay, refs)
    room.kv.put(room.token, lay, records)

    got = room.kv.get(room.token, lay, refs)

    assert all(same_bits(block.data, put.data) for block, (_, put) in zip(got, records, strict=True))


def test_a_window_record_comes_back_bit_for_bit(room: Room) -> None:
    lay = layout("bf16", window=16)
    ref, record = window(lay, refs_of(lay, TOKENS, fingerprint=room.token)[-1])

    room.kv.put(room.token, lay, [(ref, record)])
    got = room.kv.read(Window, room.token, lay, [ref])[0]

    assert got.position == TOKENS
    assert same_bits(got.data, record.data)


def test_a_cache_with_recurrent_states_comes_back_whole(room: Room) -> None:
    lay = hybrid("bf16")
    refs = refs_of(lay, 70, fingerprint=room.token)
    kept = states(lay, refs[-1])
    room.kv.put(room.token, lay, [*records_of(lay, refs), *kept])

    cache = room.kv.get_cache(room.token, lay, refs)

    assert cache.num_tokens == 70
    assert [state.layer for state in cache.states] == [0, 1, 2]
    assert all(same_bits(got.data, put.data) for got, (_, put) in zip(cache.states, kept, strict=True))
    assert room.kv.find_missing([ref for ref, _ in kept]) == []


def test_one_missing_state_fails_the_kv_transfer(room: Room) -> None:
    lay = hybrid()
    refs = refs_of(lay, 40, fingerprint=room.token)
    kept = states(lay, refs[-1])
    room.kv.put(room.token, lay, [*records_of(lay, refs), *kept])
    room.kv.delete([kept[1][0]])

    with pytest.raises(KVTransferFailed, match="is not in the store"):
        room.kv.get_cache(room.token, lay, refs)


def test_what_was_read_cannot_be_written_to(room: Room, stored: Stored) -> None:
    (block,) = room.kv.get(stored.fingerprint, stored.layout, stored.refs[:1])

    with pytest.raises(ValueError, match="read-only"):
        block.data[0] = 0


def test_missing_names_what_is_not_stored(room: Room, stored: Stored) -> None:
    others = refs_of(stored.layout, TOKENS, fingerprint=room.token, job="job-2")

    assert room.kv.find_missing([*others, *stored.refs]) == others
    assert room.kv.find_missing([]) == []


def test_asking_for_nothing_gives_nothing(room: Room, stored: Stored) -> None:
    assert room.kv.get(stored.fingerprint, stored.layout, []) == []
    assert room.kv.put(stored.fingerprint, stored.layout, []) == 0


def test_a_second_put_replaces_the_first(room: Room, stored: Stored) -> None:
    room.kv.put(stored.fingerprint, stored.layout, zip(stored.refs, stored.blocks, strict=True))

    got = room.kv.get(stored.fingerprint, stored.layout, stored.refs)

    assert all(same_bits(a.data, b.data) for a, b in zip(got, stored.blocks, strict=True))


def test_deleted_records_are_missing_and_the_others_stay(room: Room, stored: Stored) -> None:
    room.kv.delete(stored.refs[1:])
    room.kv.delete(stored.refs[1:])
    room.kv.delete([])

    assert room.kv.find_missing(stored.refs) == stored.refs[1:]


def test_a_record_expires_a_ttl_after_its_put(room: Room, stored: Stored) -> None:
    room.let_pass(TTL_S - 60)
    assert room.raw(stored.refs[0].key)

    room.let_pass(61)

    assert room.kv.find_missing(stored.refs) == stored.refs
    with pytest.raises(KVTransferFailed, match=r"position 0 .* is not in the store"):
        room.kv.get(stored.fingerprint, stored.layout, stored.refs)


def _again(room: Room, stored: Stored) -> object:
    return room.kv.put(stored.fingerprint, stored.layout, zip(stored.refs, stored.blocks, strict=True))


@pytest.mark.parametrize(
    "use",
    [
        pytest.param(lambda room, stored: room.kv.find_missing(stored.refs), id="missing"),
        pytest.param(lambda room, stored: room.kv.get(stored.fingerprint, stored.layout, stored.refs), id="get"),
        pytest.param(_again, id="put"),
    ],
)
def test_every_use_sets_the_ttl_anew(room: Room, stored: Stored, use: Callable[[Room, Stored], object]) -> None:
    room.let_pass(TTL_S - 60)

    use(room, stored)
    room.let_pass(TTL_S - 60)

    assert room.kv.find_missing(stored.refs) == []


def test_reading_a_window_sets_its_ttl_anew(room: Room) -> None:
    lay = layout(window=16)
    ref, record = window(lay, refs_of(lay, TOKENS, fingerprint=room.token)[-1])
    room.kv.put(room.token, lay, [(ref, record)])
    room.let_pass(TTL_S - 60)

    room.kv.read(Window, room.token, lay, [ref])
    room.let_pass(TTL_S - 60)

    assert room.kv.find_missing([ref]) == []


def test_one_missing_block_fails_the_whole_read_and_nothing_else(room: Room, stored: Stored) -> None:
    room.kv.delete([stored.refs[1]])

    with pytest.raises(KVTransferFailed, match=r"position 32 .* is not in the store"):
        room.kv.get(stored.fingerprint, stored.layout, stored.refs)

    (next_one,) = room.kv.get(stored.fingerprint, stored.layout, stored.refs[2:3])
    assert same_bits(next_one.data, stored.blocks[2].data)


def test_a_missing_window_fails_the_kv_transfer(room: Room) -> None:
    lay = layout(window=16)
    ref, _ = window(lay, refs_of(lay, TOKENS, fingerprint=room.token)[-1])

    with pytest.raises(KVTransferFailed, match="is not in the store"):
        room.kv.read(Window, room.token, lay, [ref])


@pytest.mark.parametrize(
    ("foreign", "reason"),
    [
        ({"fingerprint": "other-model"}, "fingerprint"),
        ({"chain": "0" * 32}, "chain"),
        ({"dtype": "bf16"}, "dtype"),
        ({"kv_heads": 4, "head_dim": 4}, "kv_heads"),
        ({"num_layers": 5}, "layers"),
        ({"start": 1, "end": 33}, "position"),
        ({"end": 31}, "rows"),
    ],
    ids=lambda value: "-".join(value) if isinstance(value, dict) else "",
)
def test_a_record_of_something_else_is_refused(
    room: Room, stored: Stored, foreign: dict[str, object], reason: str
) -> None:
    fingerprint = str(foreign.get("fingerprint", stored.fingerprint))
    lay = dataclasses.replace(stored.layout, **_fields(KVLayout, foreign))
    ref = dataclasses.replace(stored.refs[0], **_fields(BlockRef, foreign))

    with pytest.raises(KVTransferFailed, match=f"has {reason} "):
        room.kv.get(fingerprint, lay, [ref])


def _fields(cls: type, values: dict[str, object]) -> dict[str, object]:
    return {field.name: values[field.name] for field in dataclasses.fields(cls) if field.name in values}


def test_a_window_is_not_taken_for_a_block(room: Room) -> None:
    lay = layout(window=16)
    ref, record = window(lay, refs_of(lay, TOKENS, fingerprint=room.token)[-1])
    room.kv.put(room.token, lay, [(ref, record)])

    with pytest.raises(KVTransferFailed, match="has kind 'window', not 'block'"):
        room.kv.get(room.token, lay, [ref])


@pytest.mark.parametrize(
    "damage", [lambda v: v[:-1], lambda v: v + b"\0", lambda v: v[:-1] + bytes([v[-1] ^ 1]), bytes]
)
def test_a_damaged_record_is_refused_and_its_neighbours_are_not(
    room: Room, stored: Stored, damage: Callable[[bytes], bytes]
) -> None:
    value = room.raw(stored.refs[1].key)
    room.plant(stored.refs[1].key, damage(value) if damage is not bytes else b"")

    with pytest.raises(KVTransferFailed, match=r"position 32"):
        room.kv.get(stored.fingerprint, stored.layout, stored.refs)

    others = [stored.refs[0], *stored.refs[2:]]
    assert len(room.kv.get(stored.fingerprint, stored.layout, others)) == len(others)


def test_threads_put_and_get_at_once(room: Room) -> None:
    lay = layout("bf16")

    def kv_transfer(number: int) -> bool:
        refs = refs_of(lay, TOKENS, fingerprint=room.token, job=f"job-{number}")
        records = records_of(lay, refs)
        room.kv.put(room.token, lay, records)
        got = room.kv.get(room.token, lay, refs)
        room.kv.delete(refs)
        same = all(same_bits(block.data, put.data) for block, (_, put) in zip(got, records, strict=True))
        return same and room.kv.find_missing(refs) == refs

    with ThreadPoolExecutor(6) as threads:
        assert all(threads.map(kv_transfer, range(60)))


def test_usage_grows_with_what_is_stored(room: Room) -> None:
    lay = KVLayout(8, 8, 64, "f32")
    tries = itertools.count()

    def grows() -> bool:
        fingerprint = f"{room.token}-{next(tries)}"
        refs = refs_of(lay, 512, fingerprint=fingerprint)
        before = room.kv.usage().used_bytes
        put_bytes = room.kv.put(fingerprint, lay, records_of(lay, refs))
        after = room.kv.usage().used_bytes
        room.kv.delete(refs)
        return after >= before + put_bytes * 0.9

    # Seconds after other tests, Redis still frees what they deleted and shrinks their connections' buffers; and of a
    # cluster that of the fullest primary is told, which may get less than its third of the blocks: by other names more.
    wait_until(grows, "usage grows by what is stored", poll_s=1.0)


def test_closing_twice_is_fine(room: Room, stored: Stored) -> None:
    room.kv.close()
    room.kv.close()


def test_shared_records_are_freed_least_recently_used_first_and_a_jobs_own_stay(room: Room) -> None:
    # Given nothing else that is shared, and two classes' prefixes of which the first was used last
    room.kv.free_shared(1 << 60)
    lay = layout()
    first, second = (refs_of(lay, TOKENS, shared_tokens=64, fingerprint=room.token + name) for name in "ab")
    for name, refs in (("a", first), ("b", second)):
        room.kv.put(room.token + name, lay, records_of(lay, refs))
    time.sleep(0.01)  # Redis keeps times to live in whole milliseconds
    room.kv.find_missing(first)

    # When a little is to be freed
    freed = room.kv.free_shared(1)

    # Then the older prefix has lost one block, and nothing else has gone; on a cluster each primary its oldest
    gone = room.kv.find_missing([*first, *second])
    assert 1 <= len(gone) <= room.primaries
    assert all(ref.is_shared for ref in gone)
    assert room.primaries > 1 or gone[0] in second
    assert freed > 0

    # And when everything is to be freed, only what is shared goes
    room.kv.free_shared(1 << 60)
    left = [ref for ref in (*first, *second) if not ref.is_shared]
    assert room.kv.find_missing([*first, *second]) == [ref for ref in (*first, *second) if ref.is_shared]
    assert room.kv.find_missing(left) == []
    assert room.kv.free_shared(1) == 0
