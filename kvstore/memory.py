"""The store and the cluster state in memory, for the local pipeline and for tests, with the same records and checks."""

import threading
import time
from collections.abc import Callable, Iterable, Sequence, Sized
from dataclasses import dataclass
from typing import Generic, TypeVar

import xxhash

from kvstore.base import TTL_S, ClusterState, EncodedRegistration, KVStore, R, Run, StoreUsage, encoded
from kvstore.blocks import BlockRef, is_shared
from kvstore.records import DECODERS, check_record, encode
from messages.change import replace_fields
from messages.errors import KVTransferFailed, StoreUnavailable
from messages.jobs import MAX_QUESTION_ANSWERS
from messages.kv import KVLayout, Record
from messages.workers import WorkerInfo

DEFAULT_MAX_BYTES = 4 << 30

Clock = Callable[[], float]
V = TypeVar("V", bound=Sized)


class Expiring(Generic[V]):
    """Values by key, each with a TTL, limited in bytes.

    Expired values can't be read, and are removed from time to time. `max_bytes` 0: no limit. `clock` returns seconds
    and never goes back. Thread-safe.
    """

    def __init__(self, max_bytes: int = 0, clock: Clock = time.monotonic) -> None:
        self.max_bytes = max_bytes
        self._clock = clock
        self._lock = threading.RLock()
        self._entries: dict[str, tuple[V, float]] = {}
        self._total_bytes = 0
        self._sweep_at = 64

    @property
    def used_bytes(self) -> int:
        """Bytes of all live values."""
        with self._lock:
            self._sweep()
            return self._total_bytes

    def put(self, key: str, value: V, ttl_s: float) -> None:
        """Store a value. Raises StoreUnavailable if it doesn't fit; the old value of `key` then stays."""
        with self._lock:
            if len(self._entries) >= self._sweep_at or self._overfull(key, value):
                self._sweep()
                # Unless the store is full, the next sweep comes only when the number of entries has doubled. So the
                # average cost of sweeping per put does not grow with the number of entries.
                self._sweep_at = 2 * len(self._entries) + 64
            if self._overfull(key, value):
                raise StoreUnavailable(
                    f"the store in memory is full ({self._total_bytes:,} of {self.max_bytes:,} bytes)"
                )
            self.delete(key)
            self._entries[key] = (value, self._clock() + ttl_s)
            self._total_bytes += len(value)

    def get(self, key: str) -> V | None:
        """Return the value, or None."""
        with self._lock:
            entry = self._entries.get(key)
            return entry[0] if entry and self._clock() < entry[1] else None

    def renew(self, keys: Iterable[str], ttl_s: float) -> list[V | None]:
        """Return the live value of each key, or None, and renew its TTL."""
        with self._lock:
            now = self._clock()
            values: list[V | None] = []
            for key in keys:
                value, expires = self._entries.get(key, (None, 0.0))
                values.append(value if now < expires else None)
                if value is not None and now < expires:
                    self._entries[key] = (value, now + ttl_s)
            return values

    def delete(self, *keys: str) -> None:
        """Delete keys. Missing ones are ignored."""
        with self._lock:
            for key in keys:
                if entry := self._entries.pop(key, None):
                    self._total_bytes -= len(entry[0])

    def items(self) -> dict[str, V]:
        """Return all live values, by key."""
        now = self._clock()
        with self._lock:
            return {key: value for key, (value, expires) in self._entries.items() if now < expires}

    def oldest_first(self, matches: Callable[[str], bool]) -> list[tuple[str, int]]:
        """Return (key, bytes) of the matching keys, the next to expire first."""
        with self._lock:
            entries = [(expires, key, len(value)) for key, (value, expires) in self._entries.items() if matches(key)]
        return [(key, size) for _, key, size in sorted(entries)]

    def _overfull(self, key: str, value: V) -> bool:
        if not self.max_bytes:
            return False
        old = self._entries.get(key)
        return self._total_bytes - (len(old[0]) if old else 0) + len(value) > self.max_bytes

    def _sweep(self) -> None:
        now = self._clock()
        self.delete(*[key for key, (_, expires) in self._entries.items() if expires <= now])


@dataclass(frozen=True, slots=True)
class _Held:
    """A record as it is, since it is read only here, and the identity under which it was put."""

    fingerprint: str
    layout: KVLayout
    ref: BlockRef
    record: Record
    xxh3: int

    def __len__(self) -> int:
        return self.record.data.nbytes


class MemoryKVStore(KVStore):
    """Stores records in memory. Raises StoreUnavailable once `max_bytes` are in use."""

    def __init__(self, max_bytes: int = DEFAULT_MAX_BYTES, clock: Clock = time.monotonic) -> None:
        self._held: Expiring[_Held] = Expiring(max_bytes, clock)

    def find_missing(self, refs: Sequence[BlockRef]) -> list[BlockRef]:
        """See KVStore."""
        held = self._held.renew([ref.key for ref in refs], TTL_S)
        return [ref for ref, entry in zip(refs, held, strict=True) if entry is None]

    def put(self, fingerprint: str, layout: KVLayout, records: Iterable[tuple[BlockRef, Record]]) -> int:
        """See KVStore."""
        total = 0
        for ref, record in records:
            check_record(layout, ref, record)
            data = record.data
            is_whole = data.base is None or getattr(data.base, "nbytes", 0) == data.nbytes
            if not (is_whole and data.flags.c_contiguous):
                data = data.copy()  # a view would keep the whole array behind it in memory
                record = replace_fields(record, data=data)
            data.flags.writeable = False
            self._held.put(ref.key, _Held(fingerprint, layout, ref, record, xxhash.xxh3_64_intdigest(data.data)), TTL_S)
            total += data.nbytes
        return total

    def prepare(self) -> None:
        """See `KVStore`. Nothing to do, since the blocks are in memory."""

    def delete(self, refs: Sequence[BlockRef]) -> None:
        """See KVStore."""
        self._held.delete(*[ref.key for ref in refs])

    def free_shared(self, size_bytes: int) -> int:
        """See KVStore."""
        freed_bytes = 0
        for key, size in self._held.oldest_first(is_shared):
            if freed_bytes >= size_bytes:
                break
            self._held.delete(key)
            freed_bytes += size
        return freed_bytes

    def usage(self) -> StoreUsage:
        """See KVStore."""
        return StoreUsage(self._held.used_bytes, self._held.max_bytes)

    def close(self) -> None:
        """See KVStore."""

    def read(self, kind: type[R], fingerprint: str, layout: KVLayout, refs: Sequence[BlockRef]) -> list[R]:
        """See `KVStore`.

        A record with another identity than requested is encoded and then decoded, so that the usual checks apply.
        """
        records = []
        for ref, held in zip(refs, self._held.renew([ref.key for ref in refs], TTL_S), strict=True):
            if held is None:
                raise KVTransferFailed(f"the KV record at position {ref.start} ({ref.key}) is not in the store")
            if (xxh3 := xxhash.xxh3_64_intdigest(held.record.data.data)) != held.xxh3:
                raise KVTransferFailed(
                    f"the stored KV record at position {ref.start} ({ref.key}) is damaged: its checksum (xxh3) was "
                    f"{held.xxh3}, and is now {xxh3}"
                )
            record = held.record
            if not isinstance(record, kind) or (held.fingerprint, held.layout, held.ref) != (fingerprint, layout, ref):
                value = b"".join(encode(held.fingerprint, held.layout, held.ref, record))
                record = DECODERS[kind](value, fingerprint, layout, ref)
            records.append(record)
        return records


class MemoryClusterState(ClusterState):
    """The cluster state in memory."""

    def __init__(self, clock: Clock = time.monotonic) -> None:
        self._values: Expiring[bytes] = Expiring(clock=clock)
        # Registrations are kept apart from results, because they are often read all together.
        self._workers: Expiring[bytes] = Expiring(clock=clock)
        self._details: Expiring[bytes] = Expiring(clock=clock)
        self._reservations: Expiring[bytes] = Expiring(clock=clock)
        self._claims = threading.Lock()

    def now(self) -> float:
        """See ClusterState."""
        return time.time()

    def register(self, registration: WorkerInfo, ttl_s: float) -> None:
        """See ClusterState."""
        for bodies, body in zip((self._workers, self._details), encoded(registration), strict=True):
            bodies.put(registration.worker_id, body, ttl_s)

    def encoded_registrations(self) -> dict[str, EncodedRegistration]:
        """See ClusterState."""
        details = self._details.items()
        return {worker_id: (card, details.get(worker_id, b"")) for worker_id, card in self._workers.items().items()}

    def unregister(self, worker_id: str) -> None:
        """See ClusterState."""
        self._workers.delete(worker_id)
        self._details.delete(worker_id)

    def take_up(self, worker_id: str, runs: Sequence[Run], ttl_s: float) -> list[tuple[bytes | None, bool]]:
        """See ClusterState."""
        bodies = [self._values.get(f"result:{job_id}:{run}") for job_id, run in runs]
        return [
            (body, body is None and self.claim(*run, worker_id, ttl_s)) for run, body in zip(runs, bodies, strict=True)
        ]

    def finish(self, worker_id: str, results: Sequence[tuple[str, int, bytes]], ttl_s: float = TTL_S) -> None:
        """See ClusterState."""
        for job_id, run, body in results:
            self._values.put(f"result:{job_id}:{run}", body, ttl_s)
            self.release(job_id, run, worker_id)

    def note_answer(self, job_id: str, run: int, number: int, body: bytes, ttl_s: float = TTL_S) -> None:
        """See ClusterState."""
        self._values.put(f"answers:{job_id}:{run}:{number}", body, ttl_s)

    def noted_answers(self, job_id: str, run: int) -> dict[int, bytes]:
        """See ClusterState."""
        bodies = {
            number: self._values.get(f"answers:{job_id}:{run}:{number}") for number in range(MAX_QUESTION_ANSWERS)
        }
        return {number: body for number, body in bodies.items() if body is not None}

    def forget_answers(self, job_id: str, run: int) -> None:
        """See ClusterState."""
        for number in self.noted_answers(job_id, run):
            self._values.delete(f"answers:{job_id}:{run}:{number}")

    def cancel(self, batch_id: str, ttl_s: float = TTL_S) -> None:
        """See ClusterState."""
        self._values.put(f"cancelled:{batch_id}", b"1", ttl_s)

    def is_cancelled(self, batch_id: str) -> bool:
        """See ClusterState."""
        return self._values.get(f"cancelled:{batch_id}") is not None

    def claim(self, job_id: str, run: int, worker_id: str, ttl_s: float) -> bool:
        """See ClusterState."""
        key, owner = f"claim:{job_id}:{run}", worker_id.encode()
        with self._claims:
            if self._values.get(key) not in (None, owner):
                return False
            self._values.put(key, owner, ttl_s)
            return True

    def release(self, job_id: str, run: int, worker_id: str) -> None:
        """See ClusterState."""
        key = f"claim:{job_id}:{run}"
        with self._claims:
            if self._values.get(key) == worker_id.encode():
                self._values.delete(key)

    def count_crashes(self, stage: str, job_id: str, run: int, change: int, ttl_s: float = TTL_S) -> int:
        """See ClusterState."""
        key = f"takes:{stage}:{job_id}:{run}"
        with self._claims:
            count = int(self._values.get(key) or 0) + change
            if count <= 0:
                self._values.delete(key)
                return 0
            self._values.put(key, str(count).encode(), ttl_s)
            return count

    def put_sketch(self, name: str, body: bytes, ttl_s: float = TTL_S) -> None:
        """See ClusterState."""
        self._values.put(f"sketch:{name}", body, ttl_s)

    def get_sketch(self, name: str) -> bytes | None:
        """See ClusterState."""
        return self._values.get(f"sketch:{name}")

    def reserve(self, name: str, size_bytes: int, capacity_bytes: int, ttl_s: float) -> bool:
        """See ClusterState."""
        with self._claims:
            self._reservations.delete(name)
            if self.reserved_bytes() + size_bytes > capacity_bytes:
                return False
            self._reservations.put(name, str(size_bytes).encode(), ttl_s)
            return True

    def unreserve(self, name: str) -> None:
        """See ClusterState."""
        self._reservations.delete(name)

    def reserved_bytes(self) -> int:
        """See ClusterState."""
        return sum(map(int, self._reservations.items().values()))

    def close(self) -> None:
        """See ClusterState."""
