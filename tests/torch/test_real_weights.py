"""Real weights, SmolLM2-135M-Instruct, in three engines: what their KV transfers are measured by (`test_matrix_real`).

llama.cpp runs them as Q4_1, MLX and PyTorch as the same numbers in float32.
"""

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from pathlib import Path

import pytest

from benchmarks.matrix_caches import prefilled
from benchmarks.matrix_forced import Forced, Likeliest, choices, forced
from benchmarks.matrix_models import SMOLLM2, weights_for
from engines.base import Answer
from engines.family import in_family
from engines.registry import Engine, EngineOptions, open_engine
from messages.jobs import Sampling, user_prompt
from messages.kv import KVCache
from tests.support import smollm2, smollm2_folders
from tests.support.essays import PROMPTS

pytestmark = pytest.mark.torch

ENGINES = ("llamacpp", "mlx", "transformers")
ASKED = PROMPTS[:5]
GREEDY = Sampling(max_tokens=16, temperature=0)
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


def test_the_folders_are_made_alike_each_time(tmp_path: Path) -> None:
    smollm2_folders.write(tmp_path / "again", smollm2.weights(), "bf16")
    made = smollm2_folders.folder("bf16")
    for path in made.iterdir():
        assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes(), path.name
