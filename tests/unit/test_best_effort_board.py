"""The board as workers see it while the store is away."""

from __future__ import annotations

import time

import pytest

from kvstore.best_effort import BestEffortBoard
from kvstore.memory import MemoryBoard
from messages.errors import StoreUnavailable


class Board(MemoryBoard):
    """A board of a machine whose clock is 100 s ahead, and which can be away."""

    away = False

    def now(self) -> float:
        if self.away:
            raise StoreUnavailable("away")
        return time.time() + 100


def test_while_the_store_is_away_setting_our_clock_changes_no_deadline(monkeypatch: pytest.MonkeyPatch):
    # Given a store's clock that was seen once
    store = Board()
    board = BestEffortBoard(store)
    seen = board.now()

    # When the store goes away and somebody sets our clock an hour ahead
    store.away = True
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + 3600)

    # Then the board's time goes on from what was seen
    assert seen <= board.now() < seen + 60


def test_before_the_store_was_seen_our_own_clock_serves():
    store = Board()
    store.away = True
    assert abs(BestEffortBoard(store).now() - time.time()) < 60
