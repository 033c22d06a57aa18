"""Acks of many deliveries are joined where that acks nothing else."""

from hypothesis import given
from hypothesis import strategies as st

from infra.broker.rabbitmq.delivery import acks


@given(st.lists(st.booleans(), max_size=40))
def test_acks_settle_what_is_meant_and_nothing_else(wanted: list[bool]) -> None:
    held = list(range(1, len(wanted) + 1))
    meant = {tag for tag, wants in zip(held, wanted, strict=True) if wants}
    left, sent = dict.fromkeys(held), acks(meant, held)
    for acked, multiple in sent:
        for tag in [tag for tag in left if tag == acked or (multiple and tag < acked)]:
            del left[tag]
    assert set(left) == set(held) - meant
    assert len(sent) <= len(meant)


def test_acks_of_all_that_is_held_are_one() -> None:
    assert acks([3, 1, 2], [1, 2, 3, 4]) == [(3, True)]
