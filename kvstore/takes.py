"""How many workers a job has taken along.

The broker counts every return, a lost connection's too, and with it all jobs that a worker held but had not begun:
five resets in a row would make poison of an innocent job. So a worker notes on the board that it takes a job which
has come back, and takes the note back when it is through with it, however that ends. What stays are the takes whose
worker fell. (A first take is not noted, so that jobs pay nothing for this: it counts as a fall if the job came back.)
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from kvstore.base import Board


@contextmanager
def taking(board: Board, stage: str, job_id: str, run: int, returns: int) -> Iterator[int]:
    """Have a job in hand that came back `returns` times; yields how many workers have fallen with it, at most."""
    if not returns:
        yield 0
        return
    earlier = board.count_takes(stage, job_id, run, 1) - 1
    through = partial(board.count_takes, stage, job_id, run, -1)
    try:
        yield min(returns, earlier + 1)
    except Exception:  # an end like another; what is no Exception ends the worker
        through()
        raise
    through()
