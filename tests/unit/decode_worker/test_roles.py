"""What a worker with both roles takes next: a table of what it sees and what it does."""

from __future__ import annotations

import math
from dataclasses import replace

from decode_worker.stealing.policy import Peer
from decode_worker.stealing.roles import Backlog, NextWork, choose

SPARK = Peer(16, 16, 60.0)
MAC = Peer(4, 4, 20.0)
# 16/60 + 4/20 of a slot become free in a second: in 3 s 1.4
BUSY = Backlog(prompts=100, prefilling=0, ready=0, own=SPARK, peers=(MAC,), free_decoders=0, prefill_s=2.5, look_s=0.5)


def test_prefill_runs_ahead_by_what_slots_become_free_meanwhile_and_no_further() -> None:
    assert BUSY.starts_in(3.0) == 2
    assert [choose(replace(BUSY, ready=ready)).prefill for ready in range(4)] == [True, True, False, False]
    assert [choose(replace(BUSY, ready=1, prefilling=more)).prefill for more in range(2)] == [True, False]


def test_free_slots_of_anybody_are_wanted_for() -> None:
    mine, others = replace(BUSY, own=replace(SPARK, busy=10)), replace(BUSY, peers=(replace(MAC, busy=1),))
    assert [choose(replace(mine, ready=ready)).prefill for ready in (7, 8)] == [True, False]
    assert [choose(replace(others, ready=ready)).prefill for ready in (4, 5)] == [True, False]


def test_what_others_would_begin_at_once_is_left_to_them_while_there_is_prefill_to_do() -> None:
    waiting = replace(BUSY, own=replace(SPARK, busy=10), peers=(replace(MAC, busy=1),), free_decoders=3)
    decodes = [choose(replace(waiting, ready=ready)).decode for ready in range(5)]
    assert decodes == [True, False, False, False, True]  # nothing to take, theirs, and more than they can begin
    assert choose(replace(waiting, ready=2, prompts=0)).decode  # the end of the night is everybody's
    # Two of both roles would each leave it to the other
    assert choose(replace(waiting, ready=2, free_decoders=0)).decode


def test_nothing_is_left_to_others_by_a_worker_that_does_not_prefill() -> None:
    far_ahead = replace(BUSY, ready=3, prefilling=9, peers=(replace(MAC, busy=0),), free_decoders=4)
    assert choose(far_ahead) == NextWork(prefill=False, decode=True)


def test_a_worker_alone_does_both() -> None:
    alone = replace(BUSY, own=Peer(4, 0, 2.0), peers=(), ready=1)
    assert choose(alone) == NextWork(prefill=True, decode=True)


def test_where_another_prefills_better_only_what_is_missing_is_prefilled_and_only_where_it_pays() -> None:
    mac = Backlog(100, 1, 0, Peer(4, 0, 5.0), (), 0, prefill_s=8.0, advantage=0.6, best_advantage=24.0)
    assert choose(mac).prefill  # idle, and nobody is ahead
    assert not choose(replace(mac, ready=3)).prefill  # there is enough for its slots
    # One answer of 5 s would wait for 8 s, and one of 48 s for 7.5 s
    assert not choose(replace(mac, own=Peer(4, 1, 5.0))).prefill
    assert choose(replace(mac, own=Peer(4, 2, 48.0), prefill_s=7.5)).prefill
    # Unmeasured it is as good as any, and a worker that can do nothing else is better than all
    assert choose(replace(mac, advantage=0.0, ready=3)).prefill
    assert not choose(replace(mac, best_advantage=math.inf, ready=3)).prefill
