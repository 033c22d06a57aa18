"""A KV store that keeps the class's shared blocks in memory, so that each decode worker fetches them only once.

In a process with both roles it also keeps the blocks that the process prefills, so that decoding them here needs no
network.
"""

import contextlib
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from kvstore.base import KVStore, R, StoreUsage
from kvstore.blocks import BlockRef
from messages.errors import StoreUnavailable
from messages.kv import Block, KVLayout, Record

# Everything that a record is checked against. A request that matches a cached block in all these parts is answered from
# memory. All other requests go to the store, which checks the record.
_Identity = tuple[str, KVLayout, BlockRef]


class CachedKVStore(KVStore):
    """Wraps a store. Shared blocks that were read stay in memory, up to `max_bytes`; the least recently used go first.

    `keeps_puts`: blocks that were put also stay, once the store has them. A single job's own blocks stay until they are
    deleted.

    `held_bytes` may be read at any time.
    """

    def __init__(self, store: KVStore, max_bytes: int, keeps_puts: bool = False) -> None:
        self._store = store
        self._keeps_puts = keeps_puts
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._blocks: OrderedDict[_Identity, Block] = OrderedDict()
        self._kinds: set[tuple[str, KVLayout]] = set()  # (fingerprint, layout) pairs seen so far, one for each model
        self.held_bytes = 0

    def get(self, fingerprint: str, layout: KVLayout, refs: Sequence[BlockRef]) -> list[Block]:
        """See `KVStore`. A block in memory is returned even if the store has lost it."""
        cached_blocks = self._cached(fingerprint, layout, refs)
        absent = [ref for ref in refs if ref not in cached_blocks]
        stored_blocks = iter(self._store.get(fingerprint, layout, absent) if absent else [])
        if shared_refs := [ref for ref in cached_blocks if ref.is_shared]:
            # These blocks are in memory already, so if the store can't renew them, only other readers are affected.
            with contextlib.suppress(StoreUnavailable):
                self._store.find_missing(shared_refs)
        blocks = [cached_blocks[ref] if ref in cached_blocks else next(stored_blocks) for ref in refs]
        # Tagged blocks are not kept, because each is needed only once: when its job is decoded, or when the
        # conversation's next turn is prefilled.
        pairs = zip(refs, blocks, strict=True)
        self._keep(fingerprint, layout, [(ref, block) for ref, block in pairs if ref.is_shared and not ref.is_tagged])
        return blocks

    def find_missing(self, refs: Sequence[BlockRef]) -> list[BlockRef]:
        """See `KVStore`. This asks the store and not the cache, since other workers read from the store."""
        return self._store.find_missing(refs)

    def put(self, fingerprint: str, layout: KVLayout, records: Iterable[tuple[BlockRef, Record]]) -> int:
        """See KVStore."""
        if not self._keeps_puts:
            return self._store.put(fingerprint, layout, records)
        kept_records = list(records)
        # The records are put into the store first. If the store refuses them, they must not be kept here.
        stored_bytes = self._store.put(fingerprint, layout, kept_records)
        self._keep(fingerprint, layout, [(ref, block) for ref, block in kept_records if isinstance(block, Block)])
        return stored_bytes

    def read(self, kind: type[R], fingerprint: str, layout: KVLayout, refs: Sequence[BlockRef]) -> list[R]:
        """See `KVStore`. This reads from the store, blocks included."""
        return self._store.read(kind, fingerprint, layout, refs)

    def prepare(self) -> None:
        """See KVStore."""
        self._store.prepare()

    def delete(self, refs: Sequence[BlockRef]) -> None:
        """See KVStore."""
        with self._lock:
            for kind in self._kinds:
                for identity in [(*kind, ref) for ref in refs]:
                    if identity in self._blocks:
                        self._forget(identity)
        self._store.delete(refs)

    def free_shared(self, size_bytes: int) -> int:
        """See `KVStore`. This frees blocks in the store; those in memory stay useful."""
        return self._store.free_shared(size_bytes)

    def usage(self) -> StoreUsage:
        """See `KVStore`. This is the usage of the store, not of the cache."""
        return self._store.usage()

    def close(self) -> None:
        """See KVStore."""
        with self._lock:
            self._blocks.clear()
            self.held_bytes = 0
        self._store.close()

    def _cached(self, fingerprint: str, layout: KVLayout, refs: Sequence[BlockRef]) -> dict[BlockRef, Block]:
        with self._lock:
            return {
                ref: self._blocks[fingerprint, layout, ref]
                for ref in refs
                if (fingerprint, layout, ref) in self._blocks
            }

    def _keep(self, fingerprint: str, layout: KVLayout, blocks: Iterable[tuple[BlockRef, Block]]) -> None:
        with self._lock:
            self._kinds.add((fingerprint, layout))
            for ref, block in blocks:
                if (identity := (fingerprint, layout, ref)) not in self._blocks:
                    self._blocks[identity] = block
                    self.held_bytes += block.data.nbytes
                self._blocks.move_to_end(identity)
            while self.held_bytes > self._max_bytes:
                self._forget(next(iter(self._blocks)))

    def _forget(self, identity: _Identity) -> None:
        self.held_bytes -= self._blocks.pop(identity).data.nbytes
