"""Real weights, SmolLM2-135M-Instruct, from one engine to another: five prompts in English through three pairs.

llama.cpp runs them as Q4_1, MLX and PyTorch as the same numbers in float32. Rounding may change an answer, but only
where the receiver was undecided: see `benchmarks.matrix_real`, whose bounds and measure of that are taken.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property, partial
from pathlib import Path

import pytest

from benchmarks.matrix_caches import prefilled
from benchmarks.matrix_forced import Forced, Likeliest, agreement, choices, forced, shifts
from benchmarks.matrix_models import SMOLLM2, weights_for
from benchmarks.matrix_mutations import MUTATIONS, spoiled
from benchmarks.matrix_real import AGREEMENT, MARGIN, bound, cold_margin, spread
from engines.base import Answer
from engines.family import in_family
from engines.registry import Engine, EngineOptions, open_engine
from messages.jobs import Sampling, user_prompt
from messages.kv import KVCache
from tests.support import smollm2, smollm2_folders
from tests.support.essays import PROMPTS

pytestmark = pytest.mark.torch

ENGINES = ("llamacpp", "mlx", "transformers")
PAIRS = [("llamacpp", "mlx"), ("transformers", "llamacpp"), ("mlx", "transformers")]
ASKED = PROMPTS[:5]
GREEDY = Sampling(max_tokens=16, temperature=0)
ENDS = frozenset({0, 2})  # <|endoftext|>, <|im_end|>
TRICKY = "é 語 １２ ½ don't\tx\n\n\n  y <|im_end|> 3.14159 \r\n🙂"


class Side:
    """One engine, and what is asked of it once: MLX computes ten tokens a second on a CPU."""

    def __init__(self, name: str) -> None:
        self.weights = str(weights_for(name, Path(), SMOLLM2))
        # One thread: with more, the last digits of a sum depend on how the work was cut. In MLX a batch of five costs
        # little more than one sequence.
        options = EngineOptions(self.weights, context=2048, slots=len(ASKED) if name == "mlx" else 1, threads=1)
        self.engine: Engine = open_engine(name, options)
        self.prompts = [self.engine.tokenize(user_prompt("", text), 0.0).ids for text in ASKED]

    @cached_property
    def caches(self) -> list[KVCache]:
        return [prefilled(self.engine, tokens) for tokens in self.prompts]

    @cached_property
    def cold(self) -> list[Answer]:
        return self.answers([None] * len(ASKED))

    @cached_property
    def run(self) -> Forced:
        return forced(self.engine, self.weights)

    @cached_property
    def cold_starts(self) -> Sequence[KVCache | None]:
        """MLX's own caches, which are those of a cold run to the last bit; the other engines are quick."""
        return self.caches if self.engine.info.engine == "mlx" else [None] * len(ASKED)

    @cached_property
    def cold_steps(self) -> list[list[Likeliest]]:
        """Of runs that are made to say the cold answers."""
        return self.said_again(self.cold_starts)

    @cached_property
    def bound(self) -> float:
        """At which leads of its own choice it may be parted from it, as `benchmarks.matrix_real` says.

        llama.cpp moves them by itself where a prompt's tokens come one by one, on some processors by more than MARGIN.
        """
        if self.engine.info.engine != "llamacpp":
            return MARGIN
        compared = zip(self.prompts, self.cold, self.cold_steps, strict=True)
        return bound(spread([each for one in compared for each in self._moved_alone(*one)]))

    def _moved_alone(self, tokens: Sequence[int], cold: Answer, steps: list[Likeliest]) -> list[float]:
        said = self.run(tokens[:2], None, [*tokens[2:], *cold.tokens])
        return shifts(steps, said[-len(steps) :])

    def answers(self, caches: Sequence[KVCache | None]) -> list[Answer]:
        with ThreadPoolExecutor(len(ASKED)) as pool:
            return list(pool.map(lambda tokens, cache: self.engine.decode(tokens, cache, GREEDY), self.prompts, caches))

    def said_again(self, caches: Sequence[KVCache | None]) -> list[list[Likeliest]]:
        asked = zip(self.prompts, caches, self.cold, strict=True)
        return [self.run(tokens, cache, cold.tokens) for tokens, cache, cold in asked]


@pytest.fixture(scope="module")
def sides() -> Iterator[dict[str, Side]]:
    opened = {name: Side(name) for name in ENGINES}
    yield opened
    for side in opened.values():
        side.engine.close()


def test_all_engines_read_the_prompts_alike(sides: dict[str, Side]) -> None:
    for text in (*PROMPTS, TRICKY):
        ids = {side.engine.tokenize(user_prompt("", text), 0.0).ids for side in sides.values()}
        assert len(ids) == 1, text


def test_all_engines_go_by_one_family_name(sides: dict[str, Side]) -> None:
    """The folders state their RoPE in the words of transformers 5 only: an engine that missed them had another."""
    names = {in_family(side.engine, SMOLLM2, ENGINES).info.fingerprint for side in sides.values()}
    assert len(names) == 1
    assert {side.engine.info.ropes[0].base for side in sides.values()} == {100_000.0}


def test_what_is_compared_is_what_the_engines_say(sides: dict[str, Side]) -> None:
    for side in sides.values():
        for tokens, answer, steps in zip(side.prompts, side.cold, side.cold_steps, strict=True):
            assert answer.evaluated_tokens == len(tokens)
            assert len(answer.tokens) > 4
            assert choices(steps)[: len(answer.tokens)] == answer.tokens
    assert len({answer.text for side in sides.values() for answer in side.cold}) >= len(ASKED)


@pytest.mark.parametrize(("sender", "receiver"), PAIRS)
def test_a_transfer_changes_an_answer_only_where_the_receiver_was_undecided(
    sender: str, receiver: str, sides: dict[str, Side]
) -> None:
    side, caches = sides[receiver], sides[sender].caches
    warm = side.answers(caches)
    assert [answer.evaluated_tokens for answer in warm] == [1] * len(ASKED)
    assert max(leads(side, warm), default=0.0) <= side.bound, ([answer.text for answer in warm], side.cold)
    assert agreed(side, caches) >= AGREEMENT


def leads(side: Side, warm: Sequence[Answer]) -> list[float]:
    """By how much the receiver preferred what it said cold, where another answer parts from that."""
    compared = zip(side.prompts, side.cold_starts, side.cold, warm, strict=True)
    return [
        cold_margin(partial(side.run, tokens, start), cold, answer, ENDS)
        for tokens, start, cold, answer in compared
        if (answer.text, answer.tokens) != (cold.text, cold.tokens)
    ]


def agreed(side: Side, caches: list[KVCache]) -> float:
    pairs = zip(side.cold_steps, side.said_again(caches), strict=True)
    return sum(agreement(one, other) for one, other in pairs) / len(ASKED)


@pytest.mark.parametrize("mutation", MUTATIONS)
def test_a_spoiled_cache_is_not_taken_for_rounding(mutation: str, sides: dict[str, Side]) -> None:
    """The bounds above are no formality."""
    side = sides["transformers"]
    longer = side.engine.tokenize(user_prompt("", PROMPTS[9]), 0.0).ids
    foreign = [prefilled(side.engine, longer[: len(tokens)]) for tokens in side.prompts]
    wrong = [spoiled(cache, other)[mutation] for cache, other in zip(side.caches, foreign, strict=True)]
    assert agreed(side, wrong) < AGREEMENT or max(leads(side, side.answers(wrong)), default=0.0) > MARGIN


def test_the_folders_are_made_alike_each_time(tmp_path: Path) -> None:
    smollm2_folders.write(tmp_path / "again", smollm2.weights(), "bf16")
    made = smollm2_folders.folder("bf16")
    for path in made.iterdir():
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes(), path.name
