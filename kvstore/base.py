"""The two contracts of the store: KVStore (blocks) and ClusterState (small facts that workers share).

Everything here is a cache or saves work. Losing all of it costs time, never a job, because RabbitMQ knows what work is
left. Both raise StoreUnavailable if the store can't be reached, and may be called from any thread.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TypeVar

from kvstore.blocks import BlockRef, snapshot_refs
from messages import codec
from messages.errors import InvalidMessage, NewerMessage
from messages.kv import Block, KVCache, KVLayout, Record, RecurrentState, Window
from messages.workers import NO_DETAILS, WorkerDetails, WorkerInfo

# The TTL only guards against leaks, so it is longer than any deadline and any wait in a queue. Every put and every use
# renews it.
TTL_S = 24 * 3600

# A worker that stopped registering without unregistering counts as lost for this many seconds.
LOST_FOR_S = 3600

R = TypeVar("R", Block, Window, RecurrentState)
Run = tuple[str, int]  # job_id, run
EncodedRegistration = tuple[bytes, bytes]  # an encoded WorkerInfo, and its encoded WorkerDetails or b""


@dataclass(frozen=True, slots=True)
class StoreUsage:
    """The bytes in use and the bytes allowed (0: no limit is known)."""

    used_bytes: int
    max_bytes: int


class KVStore(ABC):
    """Blocks of KV caches under their keys."""

    @abstractmethod
    def find_missing(self, refs: Sequence[BlockRef]) -> list[BlockRef]:
        """Return those of `refs` that are not stored, in one pipeline. The TTL of all others is renewed."""

    @abstractmethod
    def put(self, fingerprint: str, layout: KVLayout, records: Iterable[tuple[BlockRef, Record]]) -> int:
        """Store records, each as one atomic value with a TTL. Returns the bytes stored.

        Raises StoreUnavailable, also when the store is full. Records that were stored before the error stay.
        """

    @abstractmethod
    def read(self, kind: type[R], fingerprint: str, layout: KVLayout, refs: Sequence[BlockRef]) -> list[R]:
        """Return the records of `refs`, which are all of this kind, in order. Their TTLs are renewed.

        Raises KVTransferFailed, with the record and the reason, if one is missing, damaged, or not of this fingerprint,
        layout and chain. No records are returned then.
        """

    def get(self, fingerprint: str, layout: KVLayout, refs: Sequence[BlockRef]) -> list[Block]:
        """Return the blocks of `refs`, in order. Raises KVTransferFailed as `read` does."""
        return self.read(Block, fingerprint, layout, refs)

    def get_cache(self, fingerprint: str, layout: KVLayout, refs: Sequence[BlockRef]) -> KVCache:
        """Return the KV cache made of the blocks of `refs` and the snapshot at their end. Raises as `read` does."""
        blocks = self.get(fingerprint, layout, refs)
        ends = snapshot_refs(layout, refs[-1]) if layout.snapshots else []
        window = self.read(Window, fingerprint, layout, [ends.pop(0)])[0] if layout.window_layers else None
        states = self.read(RecurrentState, fingerprint, layout, ends) if ends else []
        return KVCache(layout, tuple(blocks), window, tuple(states))

    @abstractmethod
    def prepare(self) -> None:
        """Allocate memory for the first `get`, if that helps. A process that will read calls this once, early."""

    @abstractmethod
    def delete(self, refs: Sequence[BlockRef]) -> None:
        """Delete records. Missing ones are ignored."""

    @abstractmethod
    def free_shared(self, size_bytes: int) -> int:
        """Delete shared records, least recently used first, until `size_bytes` are freed. Returns the bytes freed.

        Jobs' own records are kept. If a job needs a deleted record, it finds it missing and computes it again.
        """

    @abstractmethod
    def usage(self) -> StoreUsage:
        """Return how full the store is."""

    @abstractmethod
    def close(self) -> None:
        """Close connections. Idempotent."""


class ClusterState(ABC):
    """Worker registrations, stored results, tombstones, claims and reservations. Every entry has a TTL."""

    @abstractmethod
    def now(self) -> float:
        """Return the store's clock in seconds since the epoch. It is the one clock that all machines share."""

    @abstractmethod
    def register(self, registration: WorkerInfo, ttl_s: float) -> None:
        """Publish or renew a worker's registration."""

    @abstractmethod
    def encoded_registrations(self) -> dict[str, EncodedRegistration]:
        """Return the registrations of all live workers, of any version, as they were written, by worker_id."""

    def registrations(self) -> list[WorkerInfo]:
        """Return the registrations of all live workers, sorted by worker_id. Unreadable ones are left out."""
        return readable_registrations(self.encoded_registrations().values())

    def lost_registrations(self) -> list[tuple[float, WorkerInfo]]:
        """Return the workers whose registrations expired within LOST_FOR_S: when each did, and its last registration.

        They have no details. In one process the list is empty, because its workers end together.
        """
        return []

    @abstractmethod
    def unregister(self, worker_id: str) -> None:
        """Remove a worker's registration, because the worker leaves."""

    @abstractmethod
    def take_up(self, worker_id: str, runs: Sequence[Run], ttl_s: float) -> list[tuple[bytes | None, bool]]:
        """Return for each (job_id, run) its result, and whether this worker holds its claim.

        A run is claimed only if it has no result. This takes one round trip if the store allows it.
        """

    @abstractmethod
    def finish(self, worker_id: str, results: Sequence[tuple[str, int, bytes]], ttl_s: float = TTL_S) -> None:
        """Store each encoded JobResult, then release its claim.

        If the job is delivered again, it is answered from there. This takes one round trip if the store allows it.
        """

    @abstractmethod
    def note_answer(self, job_id: str, run: int, number: int, body: bytes, ttl_s: float = TTL_S) -> None:
        """Store one of several answers of a run that has not ended, so that it is not decoded again after a crash."""

    @abstractmethod
    def noted_answers(self, job_id: str, run: int) -> dict[int, bytes]:
        """Return the answers that are stored for this run, by their numbers."""

    @abstractmethod
    def forget_answers(self, job_id: str, run: int) -> None:
        """Delete the answers stored for a run that has ended, if there are any."""

    @abstractmethod
    def cancel(self, batch_id: str, ttl_s: float = TTL_S) -> None:
        """Set a batch's tombstone."""

    @abstractmethod
    def is_cancelled(self, batch_id: str) -> bool:
        """Whether the batch has a tombstone."""

    @abstractmethod
    def claim(self, job_id: str, run: int, worker_id: str, ttl_s: float) -> bool:
        """Claim a run for decode.

        Returns True if this worker now holds the claim, False if another does. Best effort.
        """

    @abstractmethod
    def release(self, job_id: str, run: int, worker_id: str) -> None:
        """Give up a claim that this worker holds. Claims of other workers are kept."""

    @abstractmethod
    def count_crashes(self, stage: str, job_id: str, run: int, change: int, ttl_s: float = TTL_S) -> int:
        """Change the count of workers that hold this run at this stage, or died while holding it.

        It is never below 0.
        """

    @abstractmethod
    def put_sketch(self, name: str, body: bytes, ttl_s: float = TTL_S) -> None:
        """Store what an engine computes (`engines.sketch`) under the hash that names it, or renew it."""

    @abstractmethod
    def get_sketch(self, name: str) -> bytes | None:
        """Return the bytes under this name, or None. The reader checks that they match the name."""

    @abstractmethod
    def reserve(self, name: str, size_bytes: int, capacity_bytes: int, ttl_s: float) -> bool:
        """Reserve space in the store, atomically. Returns False if all live reservations would exceed `capacity_bytes`.

        A second call with the same name replaces the first reservation.
        """

    @abstractmethod
    def unreserve(self, name: str) -> None:
        """Give up a reservation. A missing one is ignored."""

    @abstractmethod
    def reserved_bytes(self) -> int:
        """Return the sum of all live reservations."""

    @abstractmethod
    def close(self) -> None:
        """Close connections. Idempotent."""


def encoded(registration: WorkerInfo) -> EncodedRegistration:
    """Return a registration as it is written. Fields that the previous release would refuse are in a separate body."""
    details = registration.details
    card = codec.encode(replace(registration, details=NO_DETAILS))
    return card, b"" if details == NO_DETAILS else codec.encode(details)


def readable_registrations(bodies: Iterable[EncodedRegistration]) -> list[WorkerInfo]:
    """Return the registrations that this program can read, sorted by worker_id. Unreadable details are left out."""
    registrations = []
    for card, details in bodies:
        with suppress(InvalidMessage, NewerMessage):  # during an upgrade, a worker can run another version of Kvasir
            registrations.append(codec.decode(card, WorkerInfo))
            if details:
                registrations[-1] = replace(registrations[-1], details=codec.decode(details, WorkerDetails))
    return sorted(registrations, key=lambda registration: registration.worker_id)


def other_versions(bodies: Mapping[str, EncodedRegistration]) -> tuple[list[str], list[str]]:
    """Return the worker_ids of registered workers with older versions, and those with newer ones.

    An older worker can't read messages of this version. A newer worker's registration can't be read by this program.
    """
    older_ids = [worker_id for worker_id, (card, _) in bodies.items() if 0 < codec.version_of(card) < codec.VERSION]
    return older_ids, [worker_id for worker_id, body in bodies.items() if not readable_registrations([body])]
