"""What every ClusterState keeps, in memory and in Redis."""

import dataclasses
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import msgpack
import pytest

from kvstore.memory import MemoryClusterState
from messages import codec
from messages.workers import WorkerDetails, WorkerInfo
from tests.support.stores import Room, open_room
from tests.support.waiting import wait_until


@pytest.fixture(params=["memory", "redis", "cluster"])
def room(request: pytest.FixtureRequest) -> Iterator[Room]:
    room = open_room(request.param, request)
    yield room
    immortal = room.immortal()
    for registration in _mine(room):
        room.cluster_state.unregister(registration.worker_id)
    room.close()
    assert immortal == [], "every key must have a TTL"


def _registration(room: Room, name: str, busy: int = 0) -> WorkerInfo:
    return WorkerInfo(
        f"{name}.{room.token}", "decode", "tiny:1b", "simulated", "cpu", "fp", "tok", 4096, 4, "host", 1, 1e9, busy=busy
    )


def _mine(room: Room) -> list[WorkerInfo]:
    return [registration for registration in room.cluster_state.registrations() if room.token in registration.worker_id]


def test_the_clock_is_this_machines_clock_when_the_store_is_local(room: Room) -> None:
    assert abs(room.cluster_state.now() - time.time()) < 1


def test_registrations_are_listed_by_worker(room: Room) -> None:
    for name in ("b", "a", "c"):
        room.cluster_state.register(_registration(room, name), ttl_s=30)

    assert _mine(room) == [_registration(room, name) for name in ("a", "b", "c")]


def test_a_renewed_registration_replaces_the_former(room: Room) -> None:
    room.cluster_state.register(_registration(room, "a"), ttl_s=30)

    room.cluster_state.register(_registration(room, "a", busy=3), ttl_s=30)

    assert _mine(room) == [_registration(room, "a", busy=3)]


def test_a_registration_vanishes_when_it_is_not_renewed(room: Room) -> None:
    room.cluster_state.register(_registration(room, "gone"), ttl_s=10)
    room.cluster_state.register(_registration(room, "alive"), ttl_s=30)

    room.let_pass(11)

    assert _mine(room) == [_registration(room, "alive")]


def test_a_registration_may_expire_at_any_millisecond(room: Room) -> None:
    # Round ones among them, which a script must not write as 1.8e+12.
    for milliseconds in range(1000):
        room.cluster_state.register(_registration(room, "a"), ttl_s=30 + milliseconds / 1000)

    assert _mine(room) == [_registration(room, "a")]


def test_a_worker_that_leaves_takes_its_registration_along(room: Room) -> None:
    room.cluster_state.register(_registration(room, "a"), ttl_s=30)

    room.cluster_state.unregister(_registration(room, "a").worker_id)
    room.cluster_state.unregister(_registration(room, "a").worker_id)

    assert _mine(room) == []


def _lost(room: Room) -> list[tuple[float, WorkerInfo]]:
    """Of this test's workers; none in memory, whose workers end with it."""
    return [(at, each) for at, each in room.cluster_state.lost_registrations() if room.token in each.worker_id]


def test_a_worker_that_was_lost_is_known_for_an_hour_and_one_that_left_is_not(room: Room) -> None:
    lost = _registration(room, "lost", busy=2)
    begun = room.cluster_state.now()
    room.cluster_state.register(dataclasses.replace(lost, details=WorkerDetails(("decode",))), ttl_s=0.2)
    room.cluster_state.register(_registration(room, "left"), ttl_s=0.2)
    room.cluster_state.unregister(_registration(room, "left").worker_id)
    assert _lost(room) == []
    wait_until(lambda: _mine(room) == [], "its registration has run out")
    for _ in range(2):  # nobody's registration takes it away
        room.cluster_state.register(_registration(room, "alive"), ttl_s=30)

    if isinstance(room.cluster_state, MemoryClusterState):
        assert _lost(room) == []
        return
    ((ended_at, registration),) = _lost(room)
    assert registration == lost
    assert begun + 0.1 < ended_at <= room.cluster_state.now()
    # Back again it is not lost, and an hour later nobody knows of it
    room.cluster_state.register(lost, ttl_s=30)
    assert _lost(room) == []
    room.cluster_state.register(lost, ttl_s=0.2)
    wait_until(lambda: len(_lost(room)) == 1, "it is lost again")
    room.let_pass(3601)
    assert _lost(room) == []


def test_registrations_that_cannot_be_read_are_left_out(room: Room) -> None:
    newer = msgpack.packb({**msgpack.unpackb(codec.encode(_registration(room, "newer"))), "v": codec.VERSION + 1})
    room.cluster_state.register(_registration(room, "a"), ttl_s=30)
    room.plant(f"card:{{cards}}:newer.{room.token}", newer)
    room.plant(f"card:{{cards}}:noise.{room.token}", b"\xff noise")

    assert _mine(room) == [_registration(room, "a")]


def test_what_the_release_before_cannot_read_lies_beside_its_card_and_goes_with_it(room: Room) -> None:
    plain = _registration(room, "a")
    detailed = dataclasses.replace(plain, details=WorkerDetails(("prefill", "decode"), engine_build="b1"))
    room.cluster_state.register(detailed, ttl_s=30)
    assert _mine(room) == [detailed]
    assert room.cluster_state.encoded_registrations()[plain.worker_id][0] == codec.encode(plain)
    # And goes when it has none any more
    room.cluster_state.register(plain, ttl_s=30)
    assert _mine(room) == [plain]
    # Or when it leaves
    room.cluster_state.register(detailed, ttl_s=30)
    room.cluster_state.unregister(detailed.worker_id)
    room.cluster_state.register(plain, ttl_s=30)
    assert _mine(room) == [plain]


def test_a_result_is_kept_for_its_run_only(room: Room) -> None:
    room.cluster_state.finish("worker", [(room.token, 1, b"first")])

    runs = [(room.token, 1), (room.token, 2), (f"{room.token}:1", 1)]
    found = room.cluster_state.take_up("worker", runs, ttl_s=30)

    assert [body for body, _ in found] == [b"first", None, None]


def test_a_result_expires(room: Room) -> None:
    room.cluster_state.finish("worker", [(room.token, 1, b"body")], ttl_s=100)

    room.let_pass(101)

    assert room.cluster_state.take_up("worker", [(room.token, 1)], ttl_s=30) == [(None, True)]


def test_answers_are_noted_by_run_and_number_until_they_are_forgotten_or_expire(room: Room) -> None:
    state = room.cluster_state
    for number, body in ((7, b"seventh"), (0, b"first"), (7, b"seventh again")):
        state.note_answer(room.token, 1, number, body, ttl_s=100)
    state.note_answer(room.token, 2, 1, b"another run's", ttl_s=10)

    assert state.noted_answers(room.token, 1) == {0: b"first", 7: b"seventh again"}
    room.let_pass(11)
    assert state.noted_answers(room.token, 2) == {}

    state.forget_answers(room.token, 1)
    state.forget_answers(room.token, 1)
    assert state.noted_answers(room.token, 1) == {}


def test_a_tombstone_stands_for_its_batch_until_it_expires(room: Room) -> None:
    batch = f"batch-{room.token}"
    assert not room.cluster_state.is_cancelled(batch)

    room.cluster_state.cancel(batch, ttl_s=100)
    assert room.cluster_state.is_cancelled(batch)
    assert not room.cluster_state.is_cancelled(f"{batch}-2")

    room.let_pass(101)
    assert not room.cluster_state.is_cancelled(batch)


def test_a_claim_is_exclusive_to_its_owner(room: Room) -> None:
    assert room.cluster_state.claim(room.token, 1, "worker-a", ttl_s=30)

    assert not room.cluster_state.claim(room.token, 1, "worker-b", ttl_s=30)
    assert room.cluster_state.claim(room.token, 2, "worker-b", ttl_s=30), "another run is another claim"


def test_the_owner_renews_its_claim(room: Room) -> None:
    room.cluster_state.claim(room.token, 1, "worker-a", ttl_s=30)
    room.let_pass(20)

    assert room.cluster_state.claim(room.token, 1, "worker-a", ttl_s=30)
    room.let_pass(20)

    assert not room.cluster_state.claim(room.token, 1, "worker-b", ttl_s=30)


def test_a_claim_that_expired_is_anybodys(room: Room) -> None:
    room.cluster_state.claim(room.token, 1, "worker-a", ttl_s=30)

    room.let_pass(31)

    assert room.cluster_state.claim(room.token, 1, "worker-b", ttl_s=30)
    assert not room.cluster_state.claim(room.token, 1, "worker-a", ttl_s=30)


def test_only_the_owner_releases_a_claim(room: Room) -> None:
    room.cluster_state.claim(room.token, 1, "worker-a", ttl_s=30)

    room.cluster_state.release(room.token, 1, "worker-b")
    assert not room.cluster_state.claim(room.token, 1, "worker-b", ttl_s=30)

    room.cluster_state.release(room.token, 1, "worker-a")
    room.cluster_state.release(room.token, 1, "worker-a")
    assert room.cluster_state.claim(room.token, 1, "worker-b", ttl_s=30)


def test_of_many_that_claim_at_once_one_wins(room: Room) -> None:
    with ThreadPoolExecutor(8) as threads:
        won = list(threads.map(lambda n: room.cluster_state.claim(room.token, 1, f"worker-{n}", ttl_s=30), range(40)))

    assert sum(won) == 1


def test_who_takes_a_job_up_gets_its_claim_or_its_result(room: Room) -> None:
    first, second = (room.token, 1), (room.token, 2)
    assert room.cluster_state.take_up("worker-a", [first], ttl_s=30) == [(None, True)]
    assert room.cluster_state.take_up("worker-b", [first, second], ttl_s=30) == [(None, False), (None, True)]
    assert room.cluster_state.take_up("worker-a", [first, second], ttl_s=30) == [(None, True), (None, False)]

    room.cluster_state.finish("worker-a", [(room.token, 1, b"body"), (f"{room.token}-2", 1, b"")])

    assert room.cluster_state.take_up("worker-b", [first, second], ttl_s=30) == [(b"body", False), (None, True)]
    assert room.cluster_state.take_up("worker-b", [], ttl_s=30) == []
    assert room.cluster_state.take_up("worker-b", [(f"{room.token}-2", 1)], ttl_s=30) == [(b"", False)]
    assert room.cluster_state.claim(room.token, 1, "worker-b", ttl_s=30), "its claim is free"


def test_crash_counts_are_counted_by_stage_and_run_and_never_fall_below_none(room: Room) -> None:
    count = room.cluster_state.count_crashes
    assert [count("decode", room.token, 1, change) for change in (1, 1, -1)] == [1, 2, 1]
    assert count("decode", room.token, 2, 1) == 1
    assert count("prefill", room.token, 1, -1) == 0
    assert count("prefill", room.token, 1, 1) == 1


def test_crash_counts_are_forgotten_in_time(room: Room) -> None:
    room.cluster_state.count_crashes("decode", room.token, 1, 3, ttl_s=0.2)
    time.sleep(0.4)
    assert room.cluster_state.count_crashes("decode", room.token, 1, 1) == 1


def test_to_finish_leaves_alone_a_claim_that_is_somebody_elses_by_now(room: Room) -> None:
    room.cluster_state.claim(room.token, 1, "worker-b", ttl_s=30)

    room.cluster_state.finish("worker-a", [(room.token, 1, b"body")])

    assert not room.cluster_state.claim(room.token, 1, "worker-c", ttl_s=30)


def test_every_field_of_a_registration_survives(room: Room) -> None:
    registration = dataclasses.replace(
        _registration(room, "a"), jobs=("j1", "j2"), notes="ünïcode", tokens_per_s=12.5, transfers_kv=True
    )

    room.cluster_state.register(registration, ttl_s=30)

    assert _mine(room) == [registration]


def test_reservations_are_granted_up_to_the_room_there_is(room: Room) -> None:
    mine = [f"{name}.{room.token}" for name in "abc"]
    taken = room.cluster_state.reserved_bytes()

    assert room.cluster_state.reserve(mine[0], 60, taken + 100, ttl_s=30)
    assert not room.cluster_state.reserve(mine[1], 60, taken + 100, ttl_s=30)
    assert room.cluster_state.reserve(mine[1], 40, taken + 100, ttl_s=30)
    assert room.cluster_state.reserved_bytes() == taken + 100

    room.cluster_state.unreserve(mine[0])
    room.cluster_state.unreserve(mine[0])
    assert room.cluster_state.reserved_bytes() == taken + 40
    room.cluster_state.unreserve(mine[1])


def test_a_second_reservation_under_one_name_replaces_the_first(room: Room) -> None:
    name = f"again.{room.token}"
    taken = room.cluster_state.reserved_bytes()

    assert room.cluster_state.reserve(name, 80, taken + 100, ttl_s=30)
    assert room.cluster_state.reserve(name, 90, taken + 100, ttl_s=30)

    assert room.cluster_state.reserved_bytes() == taken + 90
    room.cluster_state.unreserve(name)


def test_a_reservation_that_is_not_renewed_runs_out(room: Room) -> None:
    name, other = f"short.{room.token}", f"long.{room.token}"
    taken = room.cluster_state.reserved_bytes()
    assert room.cluster_state.reserve(other, 10, taken + 100, ttl_s=30)
    assert room.cluster_state.reserve(name, 80, taken + 100, ttl_s=0.05)

    wait_until(lambda: room.cluster_state.reserved_bytes() == taken + 10, "the short reservation to run out", 5)

    assert room.cluster_state.reserve(name, 90, taken + 100, ttl_s=30)
    for each in (name, other):
        room.cluster_state.unreserve(each)


def test_reservations_are_granted_one_at_a_time(room: Room) -> None:
    taken = room.cluster_state.reserved_bytes()
    names = [f"{number}.{room.token}" for number in range(20)]

    with ThreadPoolExecutor(8) as pool:
        granted = list(pool.map(lambda name: room.cluster_state.reserve(name, 30, taken + 100, 30), names))

    assert granted.count(True) == 3
    for name in names:
        room.cluster_state.unreserve(name)


def test_a_sketch_lies_under_its_name_and_is_renewed_without_being_sent_again(room: Room) -> None:
    name = f"5e7c{room.token}"
    assert room.cluster_state.get_sketch(name) is None

    room.cluster_state.put_sketch(name, b"\x00numbers\xff", ttl_s=0.5)
    room.cluster_state.put_sketch(name, b"\x00numbers\xff", ttl_s=1.5)
    time.sleep(0.7)

    assert room.cluster_state.get_sketch(name) == b"\x00numbers\xff"
    wait_until(lambda: room.cluster_state.get_sketch(name) is None, "it runs out")
