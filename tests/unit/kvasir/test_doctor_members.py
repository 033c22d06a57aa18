"""Which nodes doctor takes for those outside, by what RabbitMQ 3.10 answers after a node was frozen."""

import pytest

from kvasir.doctor.members import separated_from_largest


@pytest.mark.parametrize(
    ("lost", "named"),
    [
        ({"a": "", "b": "", "f": ""}, []),
        ({"a": "", "b": "f", "f": ""}, ["f"]),  # at first only one has noticed
        ({"a": "", "b": "f", "f": "ab"}, ["f"]),
        ({"a": "f", "b": "f", "f": "ab"}, ["f"]),
        ({"a": "", "b": "", "f": "ab"}, ["f"]),  # seen from the one outside
        ({"a": "cde", "b": "cde", "c": "ab", "d": "ab", "e": "ab"}, ["a", "b"]),
    ],
)
def test_the_nodes_outside_are_those_that_the_largest_part_does_not_see(lost: dict[str, str], named: list[str]) -> None:
    assert (
        sorted(separated_from_largest([{"name": name, "partitions": list(others)} for name, others in lost.items()]))
        == named
    )


def test_nodes_that_say_nothing_are_all_inside() -> None:
    assert separated_from_largest([]) == separated_from_largest([{"name": "a"}, {"name": "b"}]) == []
