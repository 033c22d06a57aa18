"""Models with recurrent layers in llama.cpp and MLX: their state goes along, exactly, and never to somebody else."""

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import matrix_models
from engines.proof import prove
from engines.registry import Engine, EngineOptions, open_engine
from engines.sketch import compare
from engines.sketching import fresh_sketch
from messages.errors import KVTransferFailed
from messages.jobs import PrefillReport, Sampling
from messages.kv import Array, KVCache, Record, RecurrentState, assemble_cache

GREEDY = Sampling(max_tokens=32, temperature=0)
BOUNDARY = 96  # a whole number of blocks
SLOTS = 8


@dataclass(frozen=True)
class Twins:
    """The same weights in two engines."""

    engines: tuple[Engine, ...]
    tokens: tuple[int, ...]


def a_prompt(length: int, seed: int) -> tuple[int, ...]:
    return tuple(np.random.default_rng(seed).integers(0, matrix_models.num_plain_tokens(), length).tolist())


def load(folder: Path, engine: str, name: str, slots: int = 2) -> Engine:
    weights = str(matrix_models.weights_for(engine, folder, name))
    return open_engine(engine, EngineOptions(weights, matrix_models.CONTEXT, slots, threads=1))


def prefilled(engine: Engine, tokens: Sequence[int], **how: Any) -> KVCache:
    """With the blocks of what it was resumed from."""
    records: list[Record] = []
    engine.prefill(tokens, records.append, **how)
    assert engine.info.layout is not None
    start = how["resume"].blocks if "resume" in how else ()
    return assemble_cache(engine.info.layout, [*start, *records])


def changed(cache: KVCache, change: Callable[[Array], Array]) -> KVCache:
    states = tuple(replace(state, data=change(state.data).astype(np.float32)) for state in cache.states)
    return replace(cache, states=states)


@pytest.fixture(scope="module", params=matrix_models.HYBRID)
def twins(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Twins]:
    folder = tmp_path_factory.mktemp("hybrid")
    matrix_models.write(folder, request.param, seed=0)
    engines = tuple(load(folder, name, request.param) for name in ("llamacpp", "mlx"))
    yield Twins(engines, a_prompt(333, seed=1))
    for engine in engines:
        engine.close()


def test_the_state_goes_between_any_two_engines_and_one_token_is_evaluated(twins: Twins) -> None:
    cold = [engine.decode(twins.tokens, None, GREEDY).tokens for engine in twins.engines]
    caches = [prefilled(engine, twins.tokens[:-1]) for engine in twins.engines]
    sketches = [fresh_sketch(engine, cache.layout) for engine, cache in zip(twins.engines, caches, strict=True)]

    assert cold[0] == cold[1]
    for giver, taker in product((0, 1), (0, 1)):
        answer = twins.engines[taker].decode(twins.tokens, caches[giver], GREEDY)

        assert (answer.tokens, answer.evaluated_tokens) == (cold[taker], 1)
        assert compare(sketches[taker], sketches[giver]).problem == ""


def test_a_cache_resumed_at_the_boundary_is_the_one_computed_in_one_go(twins: Twins) -> None:
    for giver, taker in product(twins.engines, twins.engines):
        start = prefilled(giver, twins.tokens[:BOUNDARY])
        records: list[Record] = []
        done = taker.prefill(twins.tokens[:-1], records.append, resume=start)
        assert taker.info.layout is not None
        answer = taker.decode(twins.tokens, assemble_cache(taker.info.layout, records), GREEDY)

        assert (done.computed_tokens, done.restored_tokens) == (len(twins.tokens) - 1 - BOUNDARY, BOUNDARY)
        assert answer.tokens == taker.decode(twins.tokens, None, GREEDY).tokens
        assert answer.evaluated_tokens == 1


def test_a_state_that_is_lost_shifted_or_transposed_changes_the_answer(twins: Twins) -> None:
    for engine in twins.engines:
        cache, cold = prefilled(engine, twins.tokens[:-1]), engine.decode(twins.tokens, None, GREEDY).tokens
        layout = cache.layout

        def transposed(data: Array, layout: Any = layout) -> Array:
            columns, matrix = layout.state_parts(data)
            return np.concatenate([columns.reshape(-1), matrix.swapaxes(1, 2).reshape(-1)])

        elsewhere = prefilled(engine, twins.tokens[:-2]).states
        shifted = tuple(replace(state, position=cache.num_tokens) for state in elsewhere)
        spoiled = [changed(cache, np.zeros_like), changed(cache, transposed), replace(cache, states=shifted)]
        assert all(engine.decode(twins.tokens, one, GREEDY).tokens != cold for one in spoiled)
        with pytest.raises(KVTransferFailed, match="inf or nan"):
            engine.decode(twins.tokens, changed(cache, lambda data: np.full_like(data, np.nan)), GREEDY)


def test_the_proof_at_start_passes_and_fails_where_the_state_is_lost(twins: Twins) -> None:
    for engine in twins.engines:
        assert prove(engine, engine) == ""
        assert "led to another answer" in prove(Forgetful(engine), engine)  # type: ignore[arg-type]


@pytest.mark.system  # half a minute
def test_questions_forked_from_one_cache_are_answered_as_from_no_cache(twins: Twins) -> None:
    start, rests = twins.tokens[:200], [a_prompt(length, seed=length) for length in (1, 17, 40)]
    asks = [start + rest for rest in rests]
    for giver, taker in product(twins.engines, twins.engines):
        cold = [taker.decode(ask, None, GREEDY).tokens for ask in asks]
        cache = prefilled(giver, start)
        with taker.pin_cache(asks[0], cache), ThreadPoolExecutor(3) as pool:
            answers = list(pool.map(lambda ask, take=taker, kv=cache: take.decode(ask, kv, GREEDY), [*asks, *asks]))

        assert [answer.tokens for answer in answers] == [*cold, *cold]
        assert [answer.evaluated_tokens for answer in answers] == [1, 17, 40] * 2


def test_a_cache_without_its_states_is_refused(twins: Twins) -> None:
    cache = prefilled(twins.engines[0], twins.tokens[:-1])

    with pytest.raises(KVTransferFailed, match="each recurrent layer must have exactly one state"):
        replace(cache, states=cache.states[:-1])


@pytest.mark.system  # half a minute
@pytest.mark.parametrize("engine", ["llamacpp", "mlx"])
def test_two_students_on_eight_slots_never_get_each_others_state(tmp_path: Path, engine: str) -> None:
    matrix_models.write(tmp_path, "qwen3.5", seed=0)
    loaded = load(tmp_path, engine, "qwen3.5", SLOTS)

    assert answers_unlike_those_alone(loaded, 1000) == 0
    loaded.close()


def answers_unlike_those_alone(engine: Engine, count: int) -> int:
    """How many of `count` answers to two students, interleaved over all slots, differ from the one given alone.

    One in ten is given from no cache at all.
    """
    short = replace(GREEDY, max_tokens=4)
    prompts = [a_prompt(60, seed=1), a_prompt(75, seed=2)]
    caches = [prefilled(engine, prompt[:-1]) for prompt in prompts]
    alone = [engine.decode(prompt, None, short).tokens for prompt in prompts]
    assert alone[0] != alone[1]

    def right(number: int) -> bool:
        who = number * 7 % 13 % 2
        given = engine.decode(prompts[who], None if number % 10 == 0 else caches[who], short)
        return given.tokens == alone[who]

    with ThreadPoolExecutor(SLOTS) as pool:
        return list(pool.map(right, range(count))).count(False)


class Forgetful:
    """An engine whose states are all zero when they leave it."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def prefill(self, tokens: Sequence[int], emit: Callable[[Record], None]) -> PrefillReport:
        def forget(record: Record) -> None:
            emit(replace(record, data=np.zeros_like(record.data)) if isinstance(record, RecurrentState) else record)

        return self._engine.prefill(tokens, forget)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine, name)
