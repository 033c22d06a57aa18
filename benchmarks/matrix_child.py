"""One engine's half of the matrix, in a process of its own: `python -m benchmarks.matrix_child TASK`, a JSON object.

`step` is "choose" (prompts), "prefill" or "decode"; each ends with one JSON object. See `Task` for the rest.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from benchmarks import harness, matrix_models
from benchmarks.matrix_caches import Place, difference, prefilled
from benchmarks.matrix_mutations import spoiled
from benchmarks.matrix_prompts import ANSWER_TOKENS, ANSWERED, LENGTHS, Numbers, choose, prompt
from engines.base import Answer
from engines.registry import Engine, EngineOptions, open_engine
from kvstore.redis_store import RedisKVStore
from messages.errors import ConfigError, HandOverFailed, KvasirError
from messages.jobs import Sampling
from messages.kv import KVCache, KVLayout
from tests.support import services

FIRST_TOKENS = 8  # by then nearly every spoiled cache has led elsewhere
GREEDY = Sampling(max_tokens=ANSWER_TOKENS, temperature=0)

Row = dict[str, Any]


@dataclass(frozen=True)
class Task:
    """What a child is to do. `handed`: the layouts in which engines have prefilled, by engine and model."""

    step: str
    engine: str
    run: str
    folder: str
    models: list[str]
    seed: int
    family: tuple[str, ...]
    numbers: dict[str, Numbers] = field(default_factory=dict)
    handed: dict[str, dict[str, Row]] = field(default_factory=dict)

    def weights(self, model: str) -> Path:
        """What the engine loads."""
        return matrix_models.weights_for(self.engine, Path(self.folder), model)

    def prompts(self, model: str) -> dict[str, tuple[int, ...]]:
        """Ids of the model's prompts, by name."""
        return {name: prompt(model, name, self.seed, self.numbers.get(model, {}).get(name, 0)) for name in LENGTHS}

    def place(self, engine: str, model: str, layout: KVLayout) -> Place:
        """Where the caches lie that `engine` has prefilled."""
        return Place(self.run, model, engine, tuple(self.family), layout)

    def sources(self, model: str) -> list[Place]:
        """Where all caches of a model lie."""
        layouts = {engine: of[model] for engine, of in self.handed.items() if model in of}
        return [self.place(engine, model, _layout(fields)) for engine, fields in layouts.items()]


def _layout(fields: Row) -> KVLayout:
    return KVLayout(**(fields | {"window_layers": tuple(fields["window_layers"])}))


@contextmanager
def loaded(task: Task, model: str) -> Iterator[Engine]:
    """A tiny model in the task's engine, as a worker would load it. Raises Unable."""
    options = EngineOptions(str(task.weights(model)), matrix_models.context_of(model), slots=1, threads=1)
    try:
        opened = open_engine(task.engine, options)
    except ConfigError as error:
        raise Unable(str(error)) from None
    with closing(opened) as engine:
        yield engine


def choose_prompts(task: Task) -> Row:
    """The prompts to take for each model."""
    chosen = {model: choose(model, task.weights(model), task.seed) for model in task.models}
    return {
        "numbers": {model: numbers for model, (numbers, _) in chosen.items()},
        "margins": {model: margin for model, (_, margin) in chosen.items()},
    }


def prefill(task: Task, store: RedisKVStore) -> Row:
    """The layouts of the models whose caches now lie in the store, and why others' do not."""
    layouts, reasons = {}, {}
    for model in task.models:
        try:
            layouts[model] = asdict(_prefill_model(task, store, model))
        except Unable as error:
            reasons[model] = str(error)
    return {"layouts": layouts, "reasons": reasons}


def _prefill_model(task: Task, store: RedisKVStore, model: str) -> KVLayout:
    prompts = task.prompts(model)
    with loaded(task, model) as engine:
        if not engine.info.capabilities.exports_kv:
            raise Unable(_why_none(engine, prompts["long"]))
        for name, tokens in prompts.items():
            cache = prefilled(engine, tokens)
            task.place(task.engine, model, cache.layout).put(store, name, tokens, cache)
        return cache.layout


def decode(task: Task, store: RedisKVStore) -> Row:
    """Rows of the matrix: what each engine has prefilled of every model, decoded with this one."""
    found: dict[str, list[Row]] = {"pairs": [], "refused": [], "controls": []}
    for model in task.models:
        try:
            with loaded(task, model) as engine:
                receiver = Receiver(engine, store, task.prompts(model))
                for source in task.sources(model):
                    named = _named(task, source)
                    found["pairs"].append(named | receiver.compare(source))
                    if model != matrix_models.DEMO:  # which looks past what does not matter to its answer
                        found["controls"] += [{"pair": pair_name(named)} | row for row in receiver.controls(source)]
        except Unable as error:
            found["refused"] += [_named(task, source) | {"reason": str(error)} for source in task.sources(model)]
    return found


def _named(task: Task, source: Place) -> Row:
    return {"model": source.model, "prefill": source.engine, "decode": task.engine}


def pair_name(row: Row) -> str:
    """How the controls call a pair."""
    return f"{row['model']}: {row['prefill']} to {row['decode']}"


class Unable(Exception):
    """The engine can't load the model, or says that it hands over nothing."""


class Receiver:
    """A decode engine, its cold answers and its own caches."""

    def __init__(self, engine: Engine, store: RedisKVStore, prompts: dict[str, tuple[int, ...]]) -> None:
        """Raises Unable."""
        if not engine.info.capabilities.imports_kv:
            raise Unable(_why_none(engine, prompts["long"]))
        self._engine = engine
        self._store = store
        self._prompts = prompts
        self._own = {name: prefilled(engine, prompts[name]) for name in ANSWERED}
        self._cold = {name: engine.decode(prompts[name], None, GREEDY) for name in ANSWERED}

    def compare(self, source: Place) -> Row:
        """Equality, the engine's counter, and the difference of the caches; a hand-over that fails is not equal."""
        answers, differences = {}, []
        try:
            for name in ANSWERED:
                cache = source.get(self._store, name, self._prompts[name])
                answers[name] = self._engine.decode(self._prompts[name], cache, GREEDY)
                differences.append(difference(cache, self._own[name]))
        except KvasirError as error:
            return {"equal": False, "evaluated_tokens": None, "max_difference": None, "failure": str(error)}
        return {
            "equal": all(self._is_cold(name, answer) for name, answer in answers.items()),
            "evaluated_tokens": max(answer.evaluated_tokens for answer in answers.values()),
            "max_difference": max(differences),
        }

    def controls(self, source: Place) -> list[Row]:
        """What becomes of the longer prompt's cache when it is spoiled."""
        cache, foreign = (source.get(self._store, name, self._prompts[name]) for name in ("long", "foreign"))
        wrong = spoiled(cache, foreign)
        return [{"mutation": name, "caught": self._catches(each)} for name, each in wrong.items()]

    def _catches(self, wrong: KVCache) -> bool:
        try:
            return any(self._parts(wrong, length) for length in (FIRST_TOKENS, ANSWER_TOKENS))
        except HandOverFailed:
            return True

    def _parts(self, wrong: KVCache, length: int) -> bool:
        """Whether the answer from a spoiled cache differs from the cold one within `length` tokens."""
        answer = self._engine.decode(self._prompts["long"], wrong, replace(GREEDY, max_tokens=length))
        return answer.tokens != self._cold["long"].tokens[:length]

    def _is_cold(self, name: str, answer: Answer) -> bool:
        """Whether an answer is the cold run's, which must be a whole one and really cold."""
        cold = self._cold[name]
        whole = len(cold.tokens) == GREEDY.max_tokens and cold.evaluated_tokens == len(self._prompts[name])
        return whole and (answer.text, answer.tokens) == (cold.text, cold.tokens)


def _why_none(engine: Engine, tokens: tuple[int, ...]) -> str:
    """What the engine says when it is asked for a cache all the same."""
    try:
        prefilled(engine, tokens)
    except HandOverFailed as error:
        return str(error)
    return f"this {engine.info.engine} engine hands over no KV cache"


def main() -> int:
    """Do the task."""
    task = Task(**json.loads(sys.argv[1]))
    if task.step == "choose":
        harness.finish(**choose_prompts(task))
        return 0
    with closing(RedisKVStore(os.environ[services.STORE_VARIABLE])) as store:
        harness.finish(**{"prefill": prefill, "decode": decode}[task.step](task, store))
    return 0


if __name__ == "__main__":
    sys.exit(main())
