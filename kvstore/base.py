"""The two contracts of the store: KVStore (blocks) and ClusterState (small facts that workers share).

Losing everything here costs time, but never a job, because RabbitMQ holds the truth about work. Both raise
StoreUnavailable when the store can't be reached. Both may be called from any thread.
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

# Guards against leaked records. It is longer than any deadline or queue, and every put and every use renews it.
TTL_S = 24 * 3600

# For how long the store remembers workers whose registrations ran out without a goodbye.
LOST_FOR_S = 3600

R = TypeVar("R", Block, Window, RecurrentState)
Run = tuple[str, int]  # job_id, run
EncodedRegistration = tuple[bytes, bytes]  # a WorkerInfo and its WorkerDetails (b"": none)


@dataclass(frozen=True, slots=True)
class StoreUsage:
    """Bytes in use and bytes allowed (0: no known limit)."""

    used_bytes: int
    max_bytes: int


class KVStore(ABC):
    """Blocks of KV caches under their keys."""

    @abstractmethod
    def find_missing(self, refs: Sequence[BlockRef]) -> list[BlockRef]:
        """The members of `refs` that are not stored, found in one pipeline. The TTLs of all others are renewed."""

    @abstractmethod
    def put(self, fingerprint: str, layout: KVLayout, records: Iterable[tuple[BlockRef, Record]]) -> int:
        """Store records, each as one atomic value with a TTL. Returns the bytes stored.

        Raises StoreUnavailable, also when the store is full. Records stored before the error stay.
        """

    @abstractmethod
    def read(self, kind: type[R], fingerprint: str, layout: KVLayout, refs: Sequence[BlockRef]) -> list[R]:
        """The records of `refs`, in order, with their TTLs renewed. All refs must be of this kind.

        Raises KVTransferFailed, and returns nothing, if a record is missing, damaged, or does not belong to this
        fingerprint, layout and chain. The error says which record and why.
        """

    def get(self, fingerprint: str, layout: KVLayout, refs: Sequence[BlockRef]) -> list[Block]:
        """The blocks of `refs`, in order. Raises KVTransferFailed under the same conditions as `read`."""
        return self.read(Block, fingerprint, layout, refs)

    def get_window(self, fingerprint: str, layout: KVLayout, ref: BlockRef) -> Window:
        """The window record of `ref`. Raises KVTransferFailed under the same conditions as `read`."""
        return self.read(Window, fingerprint, layout, [ref])[0]

    def get_states(self, fingerprint: str, layout: KVLayout, refs: Sequence[BlockRef]) -> list[RecurrentState]:
        """The recurrent states of `refs`, in order. Raises KVTransferFailed under the same conditions as `read`."""
        return self.read(RecurrentState, fingerprint, layout, refs)

    def get_cache(self, fingerprint: str, layout: KVLayout, refs: Sequence[BlockRef]) -> KVCache:
        """The KV cache made of the blocks of `refs` and the snapshots at their end. Raises KVTransferFailed under the
        same conditions as `read`."""
        blocks = self.get(fingerprint, layout, refs)
        ends = snapshot_refs(layout, refs[-1]) if layout.snapshots else []
        window = self.get_window(fingerprint, layout, ends.pop(0)) if layout.window_layers else None
        states = self.get_states(fingerprint, layout, ends) if ends else []
        return KVCache(layout, tuple(blocks), window, tuple(states))

    @abstractmethod
    def prepare(self) -> None:
        """Prepare memory for the first `get`, where that helps. Call it once, early, in a process that will read."""

    @abstractmethod
    def delete(self, refs: Sequence[BlockRef]) -> None:
        """Delete records. Missing ones are ignored."""

    @abstractmethod
    def free_shared(self, size_bytes: int) -> int:
        """Delete shared records, least recently used first, until `size_bytes` are free. Returns the bytes freed.

        Records that belong to single jobs are kept. A job that needs a deleted record finds it missing, and it is
        computed again.
        """

    @abstractmethod
    def usage(self) -> StoreUsage:
        """How full the store is."""

    @abstractmethod
    def close(self) -> None:
        """Close connections. Idempotent."""


class ClusterState(ABC):
    """Worker registrations, stored results, tombstones, claims and reservations. Every entry has a TTL."""

    @abstractmethod
    def now(self) -> float:
        """The store's clock, in seconds since the epoch. It is the one clock that all machines share."""

    @abstractmethod
    def register(self, registration: WorkerInfo, ttl_s: float) -> None:
        """Publish or renew a worker's registration."""

    @abstractmethod
    def encoded_registrations(self) -> dict[str, EncodedRegistration]:
        """The registrations of all live workers, encoded and of any version, by worker_id."""

    def registrations(self) -> list[WorkerInfo]:
        """The registrations of all live workers, by worker_id. Unreadable ones are left out."""
        return readable_registrations(self.encoded_registrations().values())

    def lost_registrations(self) -> list[tuple[float, WorkerInfo]]:
        """The last registration of each worker whose registration ran out within LOST_FOR_S, with the time at which it
        did.

        Details are not included. The store in memory returns none, because all workers of one process end together.
        """
        return []

    @abstractmethod
    def unregister(self, worker_id: str) -> None:
        """Remove a worker's registration, because it is shutting down."""

    @abstractmethod
    def take_up(self, worker_id: str, runs: Sequence[Run], ttl_s: float) -> list[tuple[bytes | None, bool]]:
        """For each (job_id, run): its stored result, and whether this worker now holds its claim. A run that has a
        result is not claimed.

        Takes one round trip if the store allows it.
        """

    @abstractmethod
    def finish(self, worker_id: str, results: Sequence[tuple[str, int, bytes]], ttl_s: float = TTL_S) -> None:
        """Store each encoded JobResult, then `release` its claim. A job that is delivered again is then answered and
        not decoded.

        Takes one round trip if the store allows it.
        """

    @abstractmethod
    def note_answer(self, job_id: str, run: int, number: int, body: bytes, ttl_s: float = TTL_S) -> None:
        """Keep one of several answers of a run that has not ended, so that it need not be generated again after a
        crash."""

    @abstractmethod
    def noted_answers(self, job_id: str, run: int) -> dict[int, bytes]:
        """The answers kept for this run, by their numbers."""

    @abstractmethod
    def forget_answers(self, job_id: str, run: int) -> None:
        """Delete the kept answers of a run that has ended. It is fine if there are none."""

    @abstractmethod
    def cancel(self, batch_id: str, ttl_s: float = TTL_S) -> None:
        """Set a batch's tombstone."""

    @abstractmethod
    def is_cancelled(self, batch_id: str) -> bool:
        """Whether the batch has a tombstone."""

    @abstractmethod
    def claim(self, job_id: str, run: int, worker_id: str, ttl_s: float) -> bool:
        """Claim the decode of this run, best effort: True if this worker now holds the claim (or renewed it), False if
        another worker holds it."""

    @abstractmethod
    def release(self, job_id: str, run: int, worker_id: str) -> None:
        """Give up this worker's claim. Other workers' claims are left as they are."""

    @abstractmethod
    def count_crashes(self, stage: str, job_id: str, run: int, change: int, ttl_s: float = TTL_S) -> int:
        """Change the count of workers that hold this run at this stage or died while holding it, and return it. It
        never falls below 0."""

    @abstractmethod
    def put_sketch(self, name: str, body: bytes, ttl_s: float = TTL_S) -> None:
        """Store an engine's sketch (`engines.sketch`) under its hash, or renew it if it is already stored."""

    @abstractmethod
    def get_sketch(self, name: str) -> bytes | None:
        """The sketch under this name, or None. The caller must check that the bytes match the name."""

    @abstractmethod
    def reserve(self, name: str, size_bytes: int, capacity_bytes: int, ttl_s: float) -> bool:
        """Reserve space in the store, atomically: False if all live reservations would exceed `capacity_bytes`.

        A second call with the same name replaces the first reservation.
        """

    @abstractmethod
    def unreserve(self, name: str) -> None:
        """Give up a reservation. A missing one is ignored."""

    @abstractmethod
    def reserved_bytes(self) -> int:
        """Sum of all live reservations."""

    @abstractmethod
    def close(self) -> None:
        """Close connections. Idempotent."""


def encoded(registration: WorkerInfo) -> EncodedRegistration:
    """A registration as it is written. What the previous release would refuse goes into the second body."""
    details = registration.details
    card = codec.encode(replace(registration, details=NO_DETAILS))
    return card, b"" if details == NO_DETAILS else codec.encode(details)


def readable_registrations(bodies: Iterable[EncodedRegistration]) -> list[WorkerInfo]:
    """The registrations that this program can read, by worker_id. Details that it can't read are left out."""
    registrations = []
    for card, details in bodies:
        with suppress(InvalidMessage, NewerMessage):  # a worker of another version, in the middle of an upgrade
            registrations.append(codec.decode(card, WorkerInfo))
            if details:
                registrations[-1] = replace(registrations[-1], details=codec.decode(details, WorkerDetails))
    return sorted(registrations, key=lambda registration: registration.worker_id)


def other_versions(bodies: Mapping[str, EncodedRegistration]) -> tuple[list[str], list[str]]:
    """The ids of the registered workers of older versions, and of those of newer versions.

    An older worker can't read messages of this version. A newer worker's registration can't be read by this program.
    """
    older_ids = [worker_id for worker_id, (card, _) in bodies.items() if 0 < codec.version_of(card) < codec.VERSION]
    return older_ids, [worker_id for worker_id, body in bodies.items() if not readable_registrations([body])]
