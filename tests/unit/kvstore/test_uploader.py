"""Uploading in the background: everything arrives, the caller never hangs, the first error is told."""

import threading
from collections.abc import Iterable, Iterator

import pytest

from kvstore.blocks import BlockRef
from kvstore.memory import MemoryKVStore
from kvstore.uploader import Uploader
from messages.errors import StoreUnavailable
from messages.kv import KVLayout, Record, Window
from tests.support.kv_samples import FINGERPRINT, block, layout, records_of, refs_of, same_bits, window
from tests.support.waiting import wait_until

LAYOUT = layout()
REFS = refs_of(LAYOUT, 320)  # ten blocks
RECORDS = records_of(LAYOUT, REFS)


class GatedStore(MemoryKVStore):
    """A store as slow as the test wants: each put waits until the gate is open."""

    def __init__(self, max_bytes: int = 0) -> None:
        super().__init__(max_bytes)
        self.gate = threading.Event()
        self.entered = threading.Event()

    def put(self, fingerprint: str, layout: KVLayout, records: Iterable[tuple[BlockRef, Record]]) -> int:
        self.entered.set()
        assert self.gate.wait(10), "the test never opened the gate"
        return super().put(fingerprint, layout, records)


@pytest.fixture
def store() -> Iterator[GatedStore]:
    store = GatedStore()
    yield store
    store.gate.set()


@pytest.mark.parametrize("background", [True, False])
def test_everything_put_lies_in_the_store_when_finish_returns(background: bool) -> None:
    store = MemoryKVStore()

    upload = Uploader(store, FINGERPRINT, LAYOUT, background=background)
    for ref, record in RECORDS:
        upload.put(ref, record)
    report = upload.finish()

    got = store.get(FINGERPRINT, LAYOUT, REFS)
    assert all(same_bits(block.data, put.data) for block, (_, put) in zip(got, RECORDS, strict=True))
    assert report.bytes == store.usage().used_bytes
    assert report.exposed_s >= 0


def test_windows_are_uploaded_like_blocks() -> None:
    store, lay = MemoryKVStore(), layout(window=16)
    last = refs_of(lay, 40)[-1]
    ref, record = window(lay, last)

    upload = Uploader(store, FINGERPRINT, lay)
    upload.put(last, block(lay, last))
    upload.put(ref, record)
    upload.finish()

    assert same_bits(store.read(Window, FINGERPRINT, lay, [ref])[0].data, record.data)


def test_an_upload_of_nothing_finishes() -> None:
    upload = Uploader(MemoryKVStore(), FINGERPRINT, LAYOUT)
    report = upload.finish()

    assert report.bytes == 0


def test_the_caller_goes_on_while_the_store_is_busy_until_too_much_is_pending(store: GatedStore) -> None:
    accepted: list[int] = []

    def compute(upload: Uploader) -> None:
        for ref, record in RECORDS:
            upload.put(ref, record)
            accepted.append(ref.start)

    upload = Uploader(store, FINGERPRINT, LAYOUT, max_pending_blocks=3)
    upload.put(*RECORDS[0])
    assert store.entered.wait(10)  # the first one is on its way and pends no more
    caller = threading.Thread(target=compute, args=(upload,))
    caller.start()
    wait_until(lambda: len(accepted) == 3, "three blocks pend")
    caller.join(0.1)
    assert caller.is_alive()
    assert len(accepted) == 3, "a fourth must wait"

    store.gate.set()
    caller.join(10)
    assert len(accepted) == 10
    upload.finish()


@pytest.mark.parametrize("background", [True, False])
def test_finish_raises_the_stores_first_error_and_later_puts_are_dropped(background: bool) -> None:
    store = MemoryKVStore(max_bytes=3 * (RECORDS[0][1].data.nbytes + 1024))

    upload = Uploader(store, FINGERPRINT, LAYOUT, max_pending_blocks=1, background=background)
    for ref, record in RECORDS:
        upload.put(ref, record)  # must not hang, though nobody takes them any more
    with pytest.raises(StoreUnavailable, match="is full"):
        upload.finish()

    assert REFS[0] not in store.find_missing(REFS), "what was stored before stays"


def test_an_error_frees_a_caller_that_is_waiting(store: GatedStore) -> None:
    store._held.max_bytes = 1

    upload = Uploader(store, FINGERPRINT, LAYOUT, max_pending_blocks=1)
    upload.put(*RECORDS[0])
    assert store.entered.wait(10)
    upload.put(*RECORDS[1])
    caller = threading.Thread(target=upload.put, args=RECORDS[2])
    caller.start()

    store.gate.set()
    caller.join(10)

    assert not caller.is_alive()
    with pytest.raises(StoreUnavailable):
        upload.finish()


@pytest.mark.parametrize("background", [True, False])
def test_a_bug_in_the_upload_is_raised_by_finish_and_not_lost(background: bool) -> None:
    upload = Uploader(MemoryKVStore(), FINGERPRINT, LAYOUT, background=background)
    upload.put(REFS[0], RECORDS[1][1])  # a block under another block's ref
    with pytest.raises(ValueError, match="record for kv:"):
        upload.finish()


def test_abandoning_does_not_wait_for_the_store(store: GatedStore) -> None:
    upload = Uploader(store, FINGERPRINT, LAYOUT)
    for ref, record in RECORDS:
        upload.put(ref, record)
    assert store.entered.wait(10)

    upload.abandon()  # the gate is shut: this would hang if it waited
    upload.abandon()

    store.gate.set()
    thread = upload._thread
    assert thread
    wait_until(lambda: not thread.is_alive(), "the thread ends")
    with pytest.raises(ValueError, match="the upload has ended"):
        upload.put(*RECORDS[0])
