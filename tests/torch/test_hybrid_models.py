"""Models with recurrent layers in the transformers engine: no state is shared by two answers."""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from benchmarks import matrix_models
from engines.proof import prove
from engines.registry import Engine
from tests.integration.test_hybrid_models import (
    GREEDY,
    SLOTS,
    Forgetful,
    a_prompt,
    answers_unlike_those_alone,
    load,
    prefilled,
)

pytestmark = pytest.mark.torch


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    folder = tmp_path_factory.mktemp("hybrid")
    matrix_models.write(folder, "qwen3.5", seed=0)
    loaded = load(folder, "transformers", "qwen3.5", SLOTS)
    yield loaded
    loaded.close()


def test_two_students_on_eight_slots_never_get_each_others_state(engine: Engine) -> None:
    assert answers_unlike_those_alone(engine, 1000) == 0


def test_questions_forked_from_one_cache_are_answered_as_from_no_cache(engine: Engine) -> None:
    start = a_prompt(200, seed=3)
    asks = [start + a_prompt(length, seed=length) for length in (1, 17, 40)]
    cold = [engine.decode(ask, None, GREEDY).tokens for ask in asks]
    cache = prefilled(engine, start)

    with engine.pin_cache(asks[0], cache), ThreadPoolExecutor(3) as pool:
        answers = list(pool.map(lambda ask: engine.decode(ask, cache, GREEDY), [*asks, *asks]))

    assert [answer.tokens for answer in answers] == [*cold, *cold]
    assert [answer.evaluated_tokens for answer in answers] == [1, 17, 40] * 2


def test_the_proof_at_start_passes_and_fails_where_the_state_is_lost(engine: Engine) -> None:
    assert prove(engine, engine) == ""
    assert "led to another answer" in prove(Forgetful(engine), engine)  # type: ignore[arg-type]
