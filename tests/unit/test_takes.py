"""Which jobs took their worker along."""

from __future__ import annotations

import pytest

from kvstore.base import Board
from kvstore.best_effort import BestEffortBoard
from kvstore.memory import MemoryBoard
from kvstore.takes import taking
from messages.errors import StoreUnavailable


class Fell(BaseException):
    """The worker is gone."""


def fall(board: Board, returns: int) -> int:
    """A worker takes the job and falls with it; returns how many fell with it before, as the worker was told."""
    take = taking(board, "decode", "job", 1, returns)
    fallen = take.__enter__()
    take.__exit__(Fell, Fell(), None)
    return fallen


def test_falls_are_counted_from_the_first_on() -> None:
    board = MemoryBoard()
    assert [fall(board, returns) for returns in range(6)] == [0, 1, 2, 3, 4, 5]


def test_a_take_that_ended_is_no_fall_however_it_ended() -> None:
    board = MemoryBoard()
    for returns in range(1, 9):
        with taking(board, "decode", "job", 1, returns) as fallen:
            assert fallen == 1, "nobody noted the first take, which may have been one"
        with pytest.raises(ValueError, match="an end"), taking(board, "decode", "job", 1, returns):
            raise ValueError("an end")


def test_each_run_and_stage_counts_by_itself() -> None:
    board = MemoryBoard()
    fall(board, 1)
    for stage, run in (("prefill", 1), ("decode", 2)):
        with taking(board, stage, "job", run, 5) as fallen:
            assert fallen == 1


def test_without_the_store_the_brokers_count_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    def away(*_arguments: object) -> int:
        raise StoreUnavailable("away")

    board = MemoryBoard()
    monkeypatch.setattr(board, "count_takes", away)
    with taking(BestEffortBoard(board), "decode", "job", 1, 4) as fallen:
        assert fallen == 4
