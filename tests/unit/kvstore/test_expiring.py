"""Values with a TTL in memory: none outlives it, and the bound on their bytes holds."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from kvstore.memory import Expiring
from messages.errors import StoreUnavailable

steps = st.lists(
    st.tuples(
        st.sampled_from(["put", "renew", "delete", "wait"]),
        st.sampled_from("abcd"),
        st.integers(0, 6),
        st.integers(1, 9),
    ),
    max_size=60,
)


@given(steps)
def test_it_behaves_like_a_dict_whose_entries_die(steps: list[tuple[str, str, int, int]]) -> None:
    now = 0.0
    values = Expiring(max_bytes=12, clock=lambda: now)
    model: dict[str, tuple[bytes, float]] = {}

    for what, key, size, seconds in steps:
        alive = {k: entry for k, entry in model.items() if entry[1] > now}
        if what == "wait":
            now += seconds
        elif what == "delete":
            values.delete(key)
            model.pop(key, None)
        elif what == "renew":
            assert (values.renew([key], seconds) != [None]) == (key in alive)
            if key in alive:
                model[key] = (model[key][0], now + seconds)
        elif sum(len(v) for k, (v, _) in alive.items() if k != key) + size <= 12:
            values.put(key, bytes(size), seconds)
            model[key] = (bytes(size), now + seconds)
        else:
            with pytest.raises(StoreUnavailable, match="is full"):
                values.put(key, bytes(size), seconds)

        for k in "abcd":
            value, expires = model.get(k, (None, 0.0))
            assert values.get(k) == (value if expires > now else None)
        assert values.used_bytes == sum(len(v) for v, expires in model.values() if expires > now)


def test_what_nobody_asks_for_again_is_swept_in_the_end() -> None:
    now = 0.0
    values = Expiring(clock=lambda: now)
    for number in range(10_000):
        now += 1
        values.put(f"key-{number}", b"x", ttl_s=10)

    assert len(values._entries) < 200
