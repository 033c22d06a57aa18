"""One engine's half of the matrix, in a process of its own: `python -m benchmarks.matrix_child TASK`, a JSON object.

`step` is "choose" (prompts), "prefill" or "decode"; each ends with one JSON object. See `ChildTask` for the rest.
"""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import harness, matrix_models, matrix_real
from benchmarks.matrix_caches import CachePlace, difference, prefilled
from benchmarks.matrix_forced import first_difference, forced
from benchmarks.matrix_mutations import spoiled
from benchmarks.matrix_prompts import ANSWER_TOKENS, ANSWERED, BOUNDARY, LENGTHS, Numbers, choose, prompt
from benchmarks.matrix_real import RealReceiver, cold_margin
from engines.base import Answer
from engines.registry import Engine, EngineOptions, open_engine
from engines.sketch import Sketches, read_sketch
from engines.sketching import fresh_sketch
from engines.worker_info import MEND_ROPE, different_rope, ignored_window, kv_text
from kvstore.redis.store import RedisKVStore
from messages.errors import ConfigError, KvasirError, KVTransferFailed
from messages.jobs import Sampling
from messages.kv import KVCache, KVLayout, Record, assemble_cache
from tests.support import mlx_blas, services

FIRST_TOKENS = 8  # by then nearly every spoiled cache has led elsewhere
GREEDY = Sampling(max_tokens=ANSWER_TOKENS, temperature=0)

Row = dict[str, Any]


@dataclass(frozen=True)
class ChildTask:
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
    texts: int = 0  # how many of the real prompts

    @property
    def engine_name(self) -> str:
        """The engine without its release: `llamacpp` of `llamacpp-2026.8.10229`."""
        return self.engine.partition("-")[0]

    def weights(self, model: str) -> Path:
        """What the engine loads."""
        return matrix_models.weights_for(self.engine_name, Path(self.folder), model)

    def prompts(self, model: str) -> dict[str, tuple[int, ...]]:
        """Ids of the model's prompts, by name."""
        if model in matrix_models.REAL:
            return matrix_real.prompts(model, self.texts)
        return {name: prompt(model, name, self.seed, self.numbers.get(model, {}).get(name, 0)) for name in LENGTHS}

    def place(self, engine: str, model: str, layout: KVLayout) -> CachePlace:
        """Where the caches lie that `engine` has prefilled."""
        return CachePlace(self.run, model, engine, tuple(self.family), layout)

    def sketches(self, engine: Engine, model: str) -> Sketches:
        """As a worker with this engine would have them; they lie in the run's folder, where it is made once."""
        assert engine.info.layout is not None
        folder, made = SketchFolder(Path(self.folder)), self.handed.get(self.engine, {}).get(model)
        if made is None:
            return Sketches(fresh_sketch(engine, engine.info.layout), folder)
        return Sketches(read_sketch(folder.get_sketch(made["sketch"]), made["sketch"]), folder)

    def sources(self, model: str) -> list[CachePlace]:
        """Where all caches of a model lie."""
        layouts = {engine: of[model]["layout"] for engine, of in self.handed.items() if model in of}
        return [self.place(engine, model, _layout(fields)) for engine, fields in layouts.items()]


def _layout(fields: Row) -> KVLayout:
    return KVLayout(**{name: tuple(value) if isinstance(value, list) else value for name, value in fields.items()})


@dataclass(frozen=True)
class SketchFolder:
    """Where the sketches of a run lie."""

    path: Path

    def put_sketch(self, name: str, body: bytes) -> None:
        """Keep one."""
        (self.path / f"{name}.sketch").write_bytes(body)

    def get_sketch(self, name: str) -> bytes:
        """It."""
        return (self.path / f"{name}.sketch").read_bytes()


@contextmanager
def loaded(task: ChildTask, model: str) -> Iterator[Engine]:
    """A tiny model in the task's engine, as a worker would load it. Raises Unable."""
    slots = matrix_real.SLOTS if model in matrix_models.REAL else 1
    options = EngineOptions(str(task.weights(model)), matrix_models.context_of(model), slots, threads=1)
    try:
        opened = open_engine(task.engine_name, options)
    except ConfigError as error:
        raise Unable(str(error)) from None
    with closing(opened) as engine:
        yield engine


def choose_prompts(task: ChildTask) -> Row:
    """The prompts to take for each model."""
    tiny = [model for model in task.models if model not in matrix_models.REAL]
    chosen = {model: choose(model, task.weights(model), task.seed) for model in tiny}
    return {
        "numbers": {model: numbers for model, (numbers, _) in chosen.items()},
        "margins": {model: margin for model, (_, margin) in chosen.items()},
    }


def prefill(task: ChildTask, store: RedisKVStore) -> Row:
    """Layouts, and what registrations say of the engine, for models whose caches now lie in the store; why others'
    do not."""
    layouts, reasons = {}, {}
    for model in task.models:
        try:
            layouts[model] = _prefill_model(task, store, model)
        except Unable as error:
            reasons[model] = str(error)
    return {"layouts": layouts, "reasons": reasons}


def _prefill_model(task: ChildTask, store: RedisKVStore, model: str) -> Row:
    prompts = task.prompts(model)
    with loaded(task, model) as engine:
        if not engine.info.capabilities.exports_kv:
            raise Unable(_why_none(engine, max(prompts.values(), key=len)))
        for name, tokens in prompts.items():
            cache = prefilled(engine, tokens)
            place = task.place(task.engine, model, cache.layout)
            place.put(store, name, tokens, cache)
        if cache.states or model in matrix_models.REAL:
            start = matrix_real.start(prompts) if model in matrix_models.REAL else prompts["long"][: BOUNDARY + 1]
            place.put(store, "start", start, prefilled(engine, start))
        sketches = task.sketches(engine, model)
        sketches.publish()
        return {"layout": asdict(cache.layout), "said": kv_text(engine.info), "sketch": sketches.name}


def decode(task: ChildTask, store: RedisKVStore) -> Row:
    """Rows of the matrix: what each engine has prefilled of every model, decoded with this one."""
    found: dict[str, Any] = {"pairs": [], "refused": [], "controls": [], "choices": {}}
    for model in task.models:
        try:
            with loaded(task, model) as engine:
                receiver, sketches = _receiver(task, engine, store, model), task.sketches(engine, model)
                if isinstance(receiver, RealReceiver):
                    found["choices"][model] = receiver.choices()
                for source in task.sources(model):
                    handed = task.handed[source.engine][model]
                    why = sketches.agreement(handed["sketch"]).problem
                    named = _named(task, source) | {"sketch_agrees": not why}
                    if (
                        reason := _different((source.engine, handed["said"]), (task.engine, kv_text(engine.info)))
                        or why
                    ):
                        found["refused"].append(named | {"reason": reason})
                        continue
                    found["pairs"].append(named | receiver.compare(source))
                    if model != matrix_models.DEMO:  # which looks past what does not matter to its answer
                        found["controls"] += [{"pair": pair_name(named)} | row for row in receiver.controls(source)]
        except Unable as error:
            reason = {"sketch_agrees": None, "reason": str(error)}
            found["refused"] += [_named(task, source) | reason for source in task.sources(model)]
    return found


def _receiver(task: ChildTask, engine: Engine, store: RedisKVStore, model: str) -> "Receiver | RealReceiver":
    prompts = task.prompts(model)
    if not engine.info.capabilities.imports_kv:
        raise Unable(_why_none(engine, max(prompts.values(), key=len)))
    if model in matrix_models.REAL:
        (own,) = (source for source in task.sources(model) if source.engine == task.engine)
        return RealReceiver(engine, store, task.weights(model), prompts, own)
    return Receiver(engine, store, task.weights(model), prompts)


def _different(one: tuple[str, str], other: tuple[str, str]) -> str:
    """Why a worker of the second engine would not join one of the first, though their weights are the same; "": it
    would."""
    if window := ignored_window(one, other):
        return f"{window}; use the same engine for prefill and decode"
    rope = different_rope(one, other)
    return f"{rope}; {MEND_ROPE}" if rope else ""


def _named(task: ChildTask, source: CachePlace) -> Row:
    return {"model": source.model, "prefill": source.engine, "decode": task.engine}


def pair_name(row: Row) -> str:
    """How the controls call a pair."""
    return f"{row['model']}: {row['prefill']} to {row['decode']}"


class Unable(Exception):
    """The engine can't load the model, or says that it transfers KV nothing."""


class Receiver:
    """A decode engine, its cold answers and its own caches."""

    def __init__(self, engine: Engine, store: RedisKVStore, weights: Path, prompts: dict[str, tuple[int, ...]]) -> None:
        self._engine = engine
        self._weights = weights
        self._store = store
        self._prompts = prompts
        self._own = {name: prefilled(engine, prompts[name]) for name in ANSWERED}
        self._cold = {name: engine.decode(prompts[name], None, GREEDY) for name in ANSWERED}

    def compare(self, source: CachePlace) -> Row:
        """Equality, the engine's counter, and the difference of the caches; a KV transfer that fails is not equal."""
        answers: dict[str, Answer] = {}
        differences = []
        try:
            for name in ANSWERED:
                cache = source.get(self._store, name, self._prompts[name])
                answers[name] = self._engine.decode(self._prompts[name], cache, GREEDY)
                differences.append(difference(cache, self._own[name]))
        except KvasirError as error:
            keys = ("evaluated_tokens", "max_difference", "resumed_equal", "first_divergence", "margin")
            return {"equal": False} | dict.fromkeys(keys) | {"failure": str(error)}
        return {
            "equal": all(self._is_cold(name, answer) for name, answer in answers.items()),
            "evaluated_tokens": max(answer.evaluated_tokens for answer in answers.values()),
            "max_difference": max(differences),
            **({"resumed_equal": self._resumes(source)} if source.layout.state_layers else {}),
            **self._parting(answers),
        }

    def _resumes(self, source: CachePlace) -> bool:
        """Whether the longer prompt, computed on from what `source` has at the boundary, is answered as without."""
        tokens = self._prompts["long"]
        start = source.get(self._store, "start", tokens[: BOUNDARY + 1])
        records: list[Record] = []
        done = self._engine.prefill(tokens[:-1], records.append, resume=start)
        assert self._engine.info.layout is not None
        answer = self._engine.decode(tokens, assemble_cache(self._engine.info.layout, records), GREEDY)
        computed = (done.restored_tokens, answer.evaluated_tokens)
        return computed == (BOUNDARY, 1) and self._is_cold("long", answer)

    def controls(self, source: CachePlace) -> list[Row]:
        """What becomes of the longer prompt's cache when it is spoiled."""
        cache, foreign = (source.get(self._store, name, self._prompts[name]) for name in ("long", "foreign"))
        wrong = spoiled(cache, foreign)
        return [{"mutation": name, "caught": self._catches(each)} for name, each in wrong.items()]

    def _parting(self, answers: dict[str, Answer]) -> Row:
        """Where an answer first parts from the cold one, and how far that one's choice lay ahead there."""
        parted = {name: first_difference(self._cold[name].tokens, answer.tokens) for name, answer in answers.items()}
        found = {name: position for name, position in parted.items() if position is not None}
        if not found:
            return {"first_divergence": None, "margin": None}
        run = forced(self._engine, str(self._weights))
        leads = [
            cold_margin(partial(run, self._prompts[name], None), self._cold[name], answers[name], ()) for name in found
        ]
        return {"first_divergence": min(found.values()), "margin": max(leads)}

    def _catches(self, wrong: KVCache) -> bool:
        try:
            return any(self._parts(wrong, length) for length in (FIRST_TOKENS, ANSWER_TOKENS))
        except KVTransferFailed:
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
    except KVTransferFailed as error:
        return str(error)
    return f"this {engine.info.engine} engine transfers no KV cache"


def main() -> int:
    """Do the task."""
    task = ChildTask(**json.loads(sys.argv[1]))
    if {*matrix_models.REAL} & {*task.models}:
        mlx_blas.load()
    if task.step == "choose":
        harness.finish(**choose_prompts(task))
        return 0
    with closing(RedisKVStore(os.environ[services.STORE_VARIABLE])) as store:
        harness.finish(**{"prefill": prefill, "decode": decode}[task.step](task, store))
    return 0


if __name__ == "__main__":
    sys.exit(main())
