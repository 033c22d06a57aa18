"""The prefix benchmark: what it reports, on a class of three."""

import pytest
import redis

from benchmarks import prefix
from benchmarks.prefix import ALLOWED, PROMPT_TOKENS, SHARED_TOKENS, PrefixRow, measure, report
from tests.support.servers import RedisServer

pytestmark = pytest.mark.system  # a measurement, some six seconds

JOBS = 3
# What whoever compares runs reads.
KEYS = {"computed_tokens", "ideal_tokens", "tokens_ratio", "stored_bytes", "ideal_bytes", "bytes_ratio"}
SECONDS = {"seconds", "seconds_without_sharing"}


@pytest.fixture(scope="module")
def server():
    with RedisServer() as server:
        yield server


@pytest.fixture(scope="module")
def row(server: RedisServer) -> PrefixRow:
    return measure("simulated", server.url, JOBS, seed=0)


def test_a_class_costs_its_shared_part_once_and_each_suffix(row: PrefixRow) -> None:
    unique = PROMPT_TOKENS - SHARED_TOKENS
    assert row.ideal_tokens == pytest.approx(SHARED_TOKENS + JOBS * unique, rel=0.005)
    assert row.ideal_bytes == row.ideal_tokens * 2048
    assert 1 <= row.tokens_ratio < ALLOWED
    assert 1 <= row.bytes_ratio < ALLOWED
    assert row.tokens_ratio == row.computed_tokens / row.ideal_tokens


def test_without_sharing_each_job_costs_all_of_it(row: PrefixRow) -> None:
    assert row.tokens_without_sharing == pytest.approx(JOBS * PROMPT_TOKENS, rel=0.005)
    assert row.bytes_without_sharing == pytest.approx(JOBS * PROMPT_TOKENS * 2048, rel=0.03)


def test_it_leaves_no_kv_and_no_result_behind(server: RedisServer, row: PrefixRow) -> None:
    with redis.Redis.from_url(server.url) as client:
        assert row.jobs == JOBS
        assert [key for key in client.scan_iter() if key.startswith((b"kv", b"result", b"card:"))] == []


def test_the_report_says_when_the_ideal_was_missed(row: PrefixRow) -> None:
    missed = PrefixRow(**{name: getattr(row, name) for name in PrefixRow.__slots__} | {"bytes_ratio": 1.04})
    assert "more than 3% above the ideal" in report(missed)
    assert "above the ideal" not in report(row)


def test_every_key_is_there(row: PrefixRow) -> None:
    assert set(PrefixRow.__slots__) >= KEYS | SECONDS
    assert set(prefix.QUICK_JOBS) == set(prefix.WEIGHTS)
