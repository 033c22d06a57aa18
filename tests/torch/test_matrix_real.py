"""Real weights from every engine to every other, the short form of `make matrix`: SmolLM2 and Gemma 3, four prompts.

The longest has 3,200 tokens: six windows of Gemma's. See `benchmarks.matrix_real`.
"""

from itertools import product
from typing import Any

import pytest

from benchmarks import harness, matrix
from benchmarks.matrix_child import pair_name
from benchmarks.matrix_models import GEMMA3, REAL, SMOLLM2
from benchmarks.matrix_mutations import FOREIGN, OFF_BY_ONE

pytestmark = pytest.mark.torch

PAIRS = list(product(matrix.ENGINES, repeat=2))


@pytest.fixture(scope="module", params=REAL)
def found(request: pytest.FixtureRequest, store_url: str) -> dict[str, Any]:
    arguments = ("--models", request.param, "--texts", "4")
    return harness.fresh_process("benchmarks.matrix", *arguments, store_url=store_url, timeout_s=matrix.REAL_TIMEOUT_S)


def test_every_pair_answers_as_without_but_where_the_receiver_was_undecided(found: dict[str, Any]) -> None:
    assert found["refused"] == []
    assert sorted((row["prefill"], row["decode"]) for row in found["pairs"]) == PAIRS
    assert [row for row in found["pairs"] if not matrix.is_held(row)] == []
    assert found["all_held"]


def test_a_prompt_is_gone_on_with_from_the_first_half_of_another_engines_cache(found: dict[str, Any]) -> None:
    assert {row["resumed"]["restored_tokens"] for row in found["pairs"]} <= set(range(1024, 2048, 32))
    assert {row["resumed"]["evaluated_tokens"] for row in found["pairs"]} == {1}


# As measured: these two leave Gemma's answer to the prompt whose cache is spoiled within the bounds of rounding.
UNNOTICED = {SMOLLM2: set(), GEMMA3: {FOREIGN, OFF_BY_ONE}}


def test_a_spoiled_cache_is_not_taken_for_rounding(found: dict[str, Any]) -> None:
    assert {row["pair"] for row in found["controls"]} == {pair_name(row) for row in found["pairs"]}
    model = found["pairs"][0]["model"]
    assert {row["mutation"] for row in found["controls"] if not row["caught"]} <= UNNOTICED[model]
