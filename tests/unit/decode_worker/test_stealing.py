"""The two rules, on figures: when a job is worth taking from another model, and when it is better left to others."""

import math
from itertools import pairwise

import pytest

from decode_worker.stealing.policy import (
    Offer,
    Peer,
    Queue,
    decide,
    leave_to_faster,
    plan,
)
from decode_worker.stealing.queue_forecast import FIRST_ANSWER_TOKENS, FIRST_TOKENS_PER_S, expected_service_s


def queue(ready: int, *peers: Peer, model: str = "other") -> Queue:
    return Queue(model, ready, peers)


def offer(ready: int, *peers: Peer, here: float = 10, fetch: float = 0, load: float = 0, model: str = "other") -> Offer:
    return Offer(queue(ready, *peers, model=model), here, fetch, load)


FREE, BUSY = Peer(slots=1, busy=0, service_s=10), Peer(slots=1, busy=1, service_s=10)
FOUR_BUSY = Peer(slots=4, busy=4, service_s=10)


# The plan


@pytest.mark.parametrize(
    ("ready", "peers", "start_s", "end_s"),
    [
        (0, [BUSY], 0, 0),
        (1, [FREE], 0, 10),
        (3, [FREE], 20, 30),
        (1, [BUSY], 5, 15),  # half of the running job is left, on average
        (1, [FOUR_BUSY], 2, 12),
        (4, [FOUR_BUSY], 8, 18),
        (2, [FREE, Peer(1, 0, 50)], 10, 20),  # the slow one is given nothing that the fast one ends sooner
        (6, [FREE, Peer(1, 0, 50)], 0, 50),
        (1, [], math.inf, math.inf),
        (1, [Peer(2, 7, 9)], 3, 12),  # a registration may count more jobs than slots
    ],
)
def test_the_plan_gives_each_job_to_the_slot_that_ends_it_soonest(ready, peers, start_s, end_s):
    planned = plan(ready, peers)
    assert (planned.start_s, planned.end_s) == (pytest.approx(start_s), pytest.approx(end_s))


def test_a_long_queue_takes_as_long_as_the_workers_joint_rate_says():
    peers = [FOUR_BUSY, Peer(2, 0, 4)]
    per_job_s = 1 / (4 / 10 + 2 / 4)
    assert plan(10_000, peers).end_s == pytest.approx(10_000 * per_job_s, rel=0.01)
    assert plan(10_001, peers).end_s - plan(10_000, peers).end_s == pytest.approx(per_job_s)


def test_one_job_more_never_ends_sooner_whatever_the_length_of_the_queue():
    ends = [plan(ready, [FOUR_BUSY, Peer(1, 0, 3)]).end_s for ready in range(100)]
    assert all(early <= late + 1e-9 for early, late in pairwise(ends))


# Stealing


@pytest.mark.parametrize(
    ("asked", "reason"),
    [
        (offer(0, BUSY), "nothing waits"),
        (offer(1, FREE), "short wait"),  # somebody there is free
        (offer(1, FOUR_BUSY, fetch=2), "short wait"),  # 2 s of waiting are not worth 2 s of transfer
        (offer(5, FOUR_BUSY, fetch=1, load=30), "short wait"),
        (offer(4, FOUR_BUSY, here=60), "sooner at home"),  # a slow thief
        (offer(8, FOUR_BUSY, here=28), "sooner at home"),
    ],
)
def test_a_steal_that_does_not_pay_is_refused_with_its_reason(asked, reason):
    refusal = decide([asked])
    assert refusal.reason == reason


@pytest.mark.parametrize(
    "asked",
    [
        offer(40, FOUR_BUSY),
        offer(4, FOUR_BUSY, fetch=1),
        offer(1, BUSY, fetch=1),
        offer(200, FOUR_BUSY, load=30),  # eight minutes of work are worth a load
        offer(40, FOUR_BUSY, here=60),  # slow, and still done before the queue is
        offer(3, here=60),  # nobody is at home
    ],
)
def test_a_steal_pays_where_the_wait_exceeds_the_cost_and_the_thief_ends_first(asked):
    steal = decide([asked])
    assert not steal.reason
    assert steal.wait_s > steal.cost_s
    assert steal.end_here_s < steal.end_there_s
    assert steal.saving_s > 0


def test_the_queue_with_the_longest_wait_comes_first_not_the_one_with_the_most_jobs():
    many_short = offer(20, Peer(4, 4, 1), here=1, model="many")
    few_long = offer(6, Peer(1, 1, 30), here=30, model="few")

    steal = decide([many_short, few_long])

    assert not steal.reason
    assert steal.model == "few"


def test_the_next_worst_off_is_taken_where_the_worst_off_does_not_pay():
    steal = decide([offer(6, Peer(1, 1, 30), here=500, model="slow here"), offer(9, FOUR_BUSY, model="other")])
    assert not steal.reason
    assert steal.model == "other"


def test_savings_of_successive_steals_add_up_to_what_the_queue_gains():
    savings = []
    for ready in range(40, 20, -1):
        steal = decide([offer(ready, FOUR_BUSY)])
        assert not steal.reason
        savings.append(steal.saving_s)
    gained = plan(40, [FOUR_BUSY]).end_s - plan(20, [FOUR_BUSY]).end_s
    assert sum(savings) == pytest.approx(gained)


def test_a_sentence_says_why():
    steal = decide([offer(4, FOUR_BUSY, fetch=1)])
    assert not steal.reason
    assert steal.summary == "other: it would wait 8.0 s, stealing costs 1.0 s; done here in 11.0 s, there in 18.0 s"


# The tail


@pytest.mark.parametrize(
    ("ready", "peers", "here_s", "leaves"),
    [
        (1, [FREE], 30, True),
        (1, [BUSY], 30, True),  # 15 s there, 30 s here
        (2, [BUSY], 30, True),  # 25 s there
        (3, [BUSY], 30, False),  # 35 s there
        (1, [BUSY], 12, False),
        (1, [FREE], 10, False),  # two alike never leave a job to each other
        (1, [Peer(1, 0, 9)], 10, False),  # nor two that are nearly alike
        (0, [FREE], 30, True),  # a zero may be false: one job is in hand
        (1, [], 30, False),
        (40, [FOUR_BUSY], 30, False),
        (6, [FOUR_BUSY], 30, True),
    ],
)
def test_a_slow_worker_leaves_what_the_faster_ones_end_sooner(ready, peers, here_s, leaves):
    assert (leave_to_faster(queue(ready, *peers), here_s) is not None) is leaves


def test_what_is_left_ends_when_it_is_said_to():
    assert leave_to_faster(queue(1, BUSY), 30, fetch_s=1) == pytest.approx(15)


def test_slower_workers_do_not_count_as_a_way_out():
    assert leave_to_faster(queue(1, Peer(8, 0, 40)), 30) is None


# First guesses


def test_service_is_transfer_and_tokens_and_guessed_until_measured():
    assert expected_service_s(100, 50, 0.5) == pytest.approx(2.5)
    assert expected_service_s(0, 0) == FIRST_ANSWER_TOKENS / FIRST_TOKENS_PER_S
    assert expected_service_s(100, 0) == 100 / FIRST_TOKENS_PER_S
