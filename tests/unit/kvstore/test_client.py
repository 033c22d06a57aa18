"""What a store says of itself, as Redis and Valkey say it."""

import pytest

from kvstore.redis.client import is_node, product

REDIS = {"redis_version": "7.0.15", "redis_mode": "standalone"}
VALKEY = {"redis_version": "7.2.4", "server_name": "valkey", "valkey_version": "9.1.2", "server_mode": "standalone"}


@pytest.mark.parametrize(
    ("said", "name"), [(REDIS, "Redis 7.0.15"), (VALKEY, "Valkey 9.1.2"), ({}, "not a Redis server")]
)
def test_a_store_goes_by_its_own_name(said: dict[str, str], name: str) -> None:
    assert product(said) == name


def test_a_node_of_a_cluster_is_known_by_either_name_of_the_mode() -> None:
    assert not is_node(REDIS)
    assert not is_node(VALKEY)
    assert is_node(REDIS | {"redis_mode": "cluster"})
    assert is_node(VALKEY | {"server_mode": "cluster"})
