"""What a worker knows of cancelled batches without asking for each job."""

from __future__ import annotations

from kvstore.memory import MemoryBoard
from kvstore.tombstones import Tombstones


class Counting(MemoryBoard):
    """Counts the questions."""

    asked = 0

    def is_cancelled(self, batch_id: str) -> bool:
        self.asked += 1
        return super().is_cancelled(batch_id)


def test_the_board_is_asked_once_for_many_jobs_of_a_batch():
    board = Counting()
    tombstones = Tombstones(board)

    assert not any(tombstones.has("batch") for _ in range(100))

    assert board.asked < 10


def test_who_hears_of_a_cancelled_batch_sees_its_tombstone_at_once():
    board = Counting()
    tombstones = Tombstones(board)
    assert not tombstones.has("batch")

    board.cancel("batch")
    tombstones.heard("batch")

    assert tombstones.has("batch")


def test_a_tombstone_that_was_taken_away_is_not_remembered():
    board = MemoryBoard()
    tombstones = Tombstones(board)
    board.cancel("batch")
    assert tombstones.has("batch")

    board.cancel("batch", ttl_s=0)

    assert not tombstones.has("batch")
