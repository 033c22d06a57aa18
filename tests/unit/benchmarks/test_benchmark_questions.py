"""The questions benchmark: what it reports, on one student with few questions."""

from dataclasses import replace

import pytest
import redis

from benchmarks.questions import ALLOWED_BYTES, ALLOWED_PREFILL, QUICK, SETUPS, SIMULATED, QuestionsRow, measure, report
from tests.support.servers import RedisServer

SMALL = replace(
    SIMULATED,
    students=2,
    criteria=3,
    samples=2,
    own_tokens=500,
    weights="sim:scale=0.1,answer=8,layers=8,kv_heads=2,head_dim=32",
)


@pytest.fixture(scope="module")
def server():
    with RedisServer() as server:
        yield server


@pytest.fixture(scope="module")
def row(server: RedisServer) -> QuestionsRow:
    return measure(SMALL, server.url, seed=0)


def test_many_questions_cost_the_prefill_and_the_bytes_of_one(row: QuestionsRow) -> None:
    assert row.answers == 6
    assert 1 <= row.prefill_ratio < ALLOWED_PREFILL
    assert 1 <= row.kv_bytes_ratio < ALLOWED_BYTES
    assert row.one_tokens == pytest.approx(700 + 2 * 500, rel=0.05)


def test_a_job_each_costs_the_prompt_each_time(row: QuestionsRow) -> None:
    assert row.separate_tokens == pytest.approx(700 + 2 * 6 * 530, rel=0.05)
    assert row.separate_evaluated_tokens == 2 * 6
    assert row.forked_evaluated_tokens < 2 * 6 * 40


def test_it_leaves_no_kv_no_result_and_no_answers_behind(server: RedisServer, row: QuestionsRow) -> None:
    with redis.Redis.from_url(server.url) as client:
        assert row.engine == "simulated"
        assert [key for key in client.scan_iter() if key.startswith((b"kv", b"result", b"answers", b"card:"))] == []


def test_the_report_says_when_questions_cost_too_much(row: QuestionsRow) -> None:
    assert "bytes than they may" in report(replace(row, kv_bytes_ratio=1.06))
    assert "bytes than they may" not in report(row)


def test_the_quick_run_has_the_goals_row(row: QuestionsRow) -> None:
    assert (QUICK[0].criteria, QUICK[0].samples, QUICK[0].weights) == (8, 5, SIMULATED.weights)
    assert {setup.engine for setup in SETUPS} == {"simulated", "llamacpp", "mlx", "transformers"}
