"""A registration with what the release before this one can't read: its reader refuses every field that it doesn't know.

`message_version_1/fields.json` has the fields of a card of version 1; those of version 2 are in the golden cards.
The rule is `_build` of messages/codec.py of 992a9c4: `if not fields.keys() <= known: raise InvalidMessage`. It finds
cards by the index `cards`, and its users of a store with an access list may use keys that begin with `card:`.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import msgpack
import pytest

from kvstore.base import encoded, readable_registrations
from messages import codec
from messages.errors import InvalidMessage
from messages.workers import Link, RateCurve, WorkerDetails, WorkerInfo, prefill_id
from tests.unit.messages.golden.make import FOLDER, MESSAGES, WORKER

CARD: Any = MESSAGES["card-every-field"]
DETAILS: Any = MESSAGES["details-every-field"]
CURVE = RateCurve("tiny:1b", (1, 2), (10.0, 15.0))


def test_the_release_before_reads_the_card_of_a_worker_with_both_roles_byte_for_byte_as_its_own() -> None:
    for role, worker_id in (("decode", "host.2.b"), ("prefill", prefill_id("host.2.b"))):
        registration = replace(CARD, role=role, worker_id=worker_id, details=DETAILS)
        card, details = encoded(registration)
        assert card == codec.encode(replace(CARD, role=role, worker_id=worker_id))
        recorded = [msgpack.unpackb(path.read_bytes()).keys() for path in FOLDER.glob("card-*.msgpack")]
        assert msgpack.unpackb(card).keys() <= set().union(*recorded)
        # And together they are what was registered
        assert readable_registrations([(card, details)]) == [registration]
        assert registration.process == "host.2.b"


def test_a_card_alone_is_that_of_a_worker_of_the_release_before() -> None:
    card, details = encoded(CARD)
    assert (card, details) == ((FOLDER / "card-every-field.msgpack").read_bytes(), b"")
    assert readable_registrations([(card, b"")]) == [CARD]


@pytest.mark.parametrize(
    "details",
    [
        *(b"noise", b"\x80", codec.encode(CARD), msgpack.packb({"v": 3, "kind": "details"})),
        msgpack.packb({"v": 2, "kind": "details", "later": 1}),
    ],
    ids=["noise", "no version", "a card", "newer", "an unknown field"],
)
def test_details_that_cannot_be_read_leave_the_card(details: bytes) -> None:
    assert readable_registrations([(codec.encode(CARD), details)]) == [CARD]


def test_details_inside_a_card_are_refused() -> None:
    fields = msgpack.unpackb(codec.encode(CARD))
    with pytest.raises(InvalidMessage, match="details"):
        codec.decode(msgpack.packb({**fields, "details": {}}), WorkerInfo)


REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: WorkerDetails(roles=("prefill", "prefill")), "the same role twice"),
    (lambda: WorkerDetails(roles=("grade",)), "decode, prefill"),  # type: ignore[arg-type]
    (lambda: WorkerDetails(roles=("prefill", "decode", "prefill")), "roles"),
    (lambda: WorkerDetails(decode_curves=(CURVE, CURVE)), "different models"),
    (lambda: WorkerDetails(prefill_curves=(1,)), "RateCurve"),  # type: ignore[arg-type]
    (lambda: WorkerDetails(links=(Link("a"),) * 65), "at most 64"),
    (lambda: WorkerDetails(clock_s=float("nan")), "clock_s"),
    (lambda: WorkerDetails(engine_build="b" * 256), "255"),
    (lambda: WorkerDetails(slot_file_version="b" * 256), "255"),
    (lambda: RateCurve("tiny:1b", (1, 2), (3.0,)), "equally long"),
    (lambda: RateCurve("tiny:1b", (), ()), "at least one"),
    (lambda: RateCurve("tiny:1b", (2, 2), (1, 1)), "ascend"),
    (lambda: RateCurve("tiny:1b", (0, 2), (1, 1)), "above 0"),
    (lambda: RateCurve("tiny:1b", (1,), (float("inf"),)), "number"),
    (lambda: RateCurve("tiny:1b", tuple(range(1, 66)), (1.0,) * 65), "at most 64"),
    (lambda: Link("p" * 256), "peer"),
    (lambda: Link("p", rtt_ms=-1), "rtt_ms"),
    (lambda: replace(WorkerInfo(*WORKER), details=1), "details"),  # type: ignore[arg-type]
]


@pytest.mark.parametrize(("make", "said"), REFUSED, ids=range(len(REFUSED)))
def test_what_is_out_of_bounds_is_refused_with_its_name(make: Callable[[], object], said: str) -> None:
    with pytest.raises(InvalidMessage, match=said):
        make()


def test_the_largest_details_are_read() -> None:
    points = tuple(range(1, 65))
    curves = tuple(RateCurve(f"m{number}", points, points) for number in range(64))
    largest = WorkerDetails(("decode",), curves, curves, tuple(Link(f"h{number}") for number in range(64)))
    assert codec.decode(codec.encode(largest), WorkerDetails) == largest
