"""Two folders that differ in one thing are no pair: it is refused, or named, and a pair of one model is taken.

What differs stands in the folder of the prefill worker alone. Both ends are judged as workers judge each other when
they start (`check_family`), by their sketches when a job comes (`compare`), and by `kvasir doctor`.
"""

import json
import re
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from benchmarks import matrix_models
from engines.base import LoadedEngine
from engines.entry import Engine
from engines.family import in_family
from engines.proof import prove
from engines.registry import EngineOptions, open_engine
from engines.sketch import Sketches
from engines.sketching import fresh_sketch
from engines.worker_info import engine_registration, template_name
from infra.config.settings import Settings, load_settings
from kvasir.doctor.pairs import check_workers
from kvasir.worker.process import check_family
from kvstore.memory import MemoryClusterState
from messages.errors import ConfigError
from messages.jobs import Sampling, user_prompt
from messages.workers import WorkerInfo, WorkerStage
from tests.support.kv_samples import prefilled

pytestmark = pytest.mark.torch

MODEL = "m"
ENGINES = ("llamacpp", "mlx", "transformers")
MODELS = ("llama", "mistral", "qwen2", "qwen3", "olmo2", "phi3", "gemma3", "gpt-oss")
WINDOWED = ("mistral", "qwen2", "phi3", "gemma3", "gpt-oss")
GREEDY = Sampling(max_tokens=12, temperature=0)

Config = dict[str, Any]


def _base(config: Config) -> None:
    for rope in _ropes(config):
        rope["rope_theta"] = rope.get("rope_theta", matrix_models.ROPE_THETA) * 1.2


def _scaling(config: Config) -> None:
    for rope in _ropes(config):
        rope |= {"rope_type": "linear", "factor": 1.1}


def _ropes(config: Config) -> list[Config]:
    """Of the kinds of layers: by kind in a gemma3, else one."""
    stated = config.setdefault("rope_parameters", {"rope_type": "default", "rope_theta": config.pop("rope_theta", 1e4)})
    return [kind for kind in stated.values() if isinstance(kind, dict)] or [stated]


def _window(config: Config) -> None:
    config |= {"sliding_window": matrix_models.WINDOW + 8, "use_sliding_window": True, "max_window_layers": 1}
    if config["model_type"] == "qwen2":
        config["layer_types"] = ["full_attention", "sliding_attention"]


def _attention_softcap(config: Config) -> None:
    config["attn_logit_softcapping"] = 2.0


def _output_softcap(config: Config) -> None:
    config["final_logit_softcapping"] = 2.0


def _tied(config: Config) -> None:
    config["tie_word_embeddings"] = True


def _untouched(_config: Config) -> None:
    """Of those whose tokenizer or template differs."""


CHANGES: dict[str, tuple[Callable[[Config], None], tuple[str, ...]]] = {
    "rope base": (_base, MODELS),
    "scaling": (_scaling, MODELS),
    "window": (_window, WINDOWED),
    "softcap in attention": (_attention_softcap, ("gemma3",)),
    "softcap of the output": (_output_softcap, ("gemma3",)),
    "tied weights": (_tied, MODELS),
    "tokenizer": (_untouched, MODELS),
    "template": (_untouched, MODELS),
}
CHANGED = [(model, name) for name, (_, models) in CHANGES.items() for model in models]
# What changes an answer, and no key or value: the decode worker's own folder decides, whoever computed the prompt. And
# what no engine computes: PyTorch's attention (SDPA) leaves a gemma3's softcap out, as llama.cpp and MLX do.
OF_THE_OUTPUT = ("softcap of the output", "tied weights")
NOT_IN_A_CACHE = (*OF_THE_OUTPUT, "softcap in attention")


@dataclass(frozen=True)
class End:
    """A worker of one engine and folder, or why there is none."""

    engine: str
    loaded: LoadedEngine[Engine] | None = None
    family: Engine | None = None  # under the name that the owner's word for the weights gives it
    refusal: str = ""

    def registration(self, role: WorkerStage, by_word: bool) -> WorkerInfo:
        assert self.loaded is not None
        assert self.family is not None
        loaded = replace(self.loaded, engine=self.family) if by_word else self.loaded
        return engine_registration(f"{role}-1", role, MODEL, 0.0, loaded)


@dataclass(frozen=True)
class Bench:
    """The models' folders, and what workers of them found when they started."""

    folder: Path
    state: MemoryClusterState

    def source(self, model: str, engine: str) -> Path:
        return matrix_models.weights_for(engine, self.folder, model)

    def changed(self, model: str, name: str, target: Path) -> Path:
        """A copy of PyTorch's folder in which one thing differs."""
        shutil.copytree(self.source(model, "transformers"), target)
        _rewrite(target / "config.json", CHANGES[name][0])
        if name == "tokenizer":
            _rewrite(target / "tokenizer.json", _swap_two_tokens)
        if name == "template":
            _rewrite(target / "tokenizer_config.json", _say_who_answers)
        return target

    def end(self, engine: str, weights: Path) -> End:
        """As a worker of it starts."""
        try:
            opened = open_engine(engine, EngineOptions(str(weights), matrix_models.CONTEXT, slots=1, threads=1))
        except ConfigError as error:
            return End(engine, refusal=str(error))
        with closing(opened):
            why_no_kv, sketches = prove(opened, opened), Sketches()
            if not why_no_kv:
                assert opened.info.layout is not None
                sketches = Sketches(fresh_sketch(opened, opened.info.layout), self.state)
                sketches.publish()
            loaded = LoadedEngine(opened, why_no_kv, sketches, template_name(opened))
            return End(engine, loaded, in_family(opened, MODEL, ENGINES))


def _rewrite(path: Path, change: Callable[[Config], None]) -> None:
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))


def _swap_two_tokens(tokenizer: Config) -> None:
    vocabulary = tokenizer["model"]["vocab"]
    vocabulary["a"], vocabulary["b"] = vocabulary["b"], vocabulary["a"]


def _say_who_answers(settings: Config) -> None:
    settings["chat_template"] = settings["chat_template"].replace("assistant\\n", "assistant\\n\\n")


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    folder = tmp_path_factory.mktemp("models")
    for model in MODELS:
        matrix_models.write(folder, model, seed=0)
    yield Bench(folder, MemoryClusterState())
    shutil.rmtree(folder)


@cache
def _as_it_is(bench_folder: Path, state: MemoryClusterState, model: str, engine: str) -> End:
    bench = Bench(bench_folder, state)
    return bench.end(engine, bench.source(model, engine))


def _settings(folder: Path, by_word: bool) -> Settings:
    model = {"weights": dict.fromkeys(ENGINES, "m"), "same_weights": list(ENGINES) if by_word else []}
    return load_settings({"models": {MODEL: model}}, environ={}, cwd=folder, user_dir=folder)


def _said(bench: Bench, prefill: End, decode: End, by_word: bool) -> str:
    """Why this is no pair, or what is named that differs; "": nothing, and caches are handed over."""
    if refusal := prefill.refusal or decode.refusal:
        return refusal
    there, joining = prefill.registration("prefill", by_word), decode.registration("decode", by_word)
    cards = MemoryClusterState()
    cards.register(there, 60)
    assert decode.loaded is not None
    info = decode.family.info if by_word and decode.family else decode.loaded.engine.info
    try:
        check_family(cards, MODEL, info)
    except ConfigError as error:
        return str(error)
    doctor = [
        finding
        for finding in check_workers(_settings(bench.folder, by_word), [there, joining], bench.state.get_sketch)
        if finding.level != "ok"
    ]
    met = decode.loaded.sketches.agreement(there.sketch).problem if there.sketch else decode.loaded.why_no_kv
    # What a decoder refuses when it meets it is known to doctor before
    assert doctor or not met
    return "; ".join(finding.what for finding in doctor)


@pytest.mark.parametrize(("model", "name"), CHANGED)
def test_a_folder_that_differs_in_one_thing_makes_no_pair_without_a_word(
    model: str, name: str, bench: Bench, tmp_path: Path
) -> None:
    # Given a prefill worker whose folder differs from the decode worker's in one thing
    prefill = bench.end("transformers", bench.changed(model, name, tmp_path / "changed"))
    decode = _as_it_is(bench.folder, bench.state, model, "transformers")
    # Then the folders are no pair by themselves
    said = _said(bench, prefill, decode, by_word=False)
    assert said
    if name == "template":
        assert "chat templates" in said
    # And where the owner says that both hold the same weights, what they compute is not believed to be the same
    for engine in ENGINES:
        by_word = _said(bench, prefill, _as_it_is(bench.folder, bench.state, model, engine), by_word=True)
        assert bool(by_word) == (name not in NOT_IN_A_CACHE), (engine, by_word)
        if name in ("rope base", "scaling"):
            assert re.search("RoPE|rope|KV caches", by_word), (engine, by_word)
        if name == "tokenizer":
            assert "tokenizer" in by_word


@pytest.mark.parametrize(("prefill", "decode"), list(product(ENGINES, repeat=2)))
@pytest.mark.parametrize("model", MODELS)
def test_a_pair_of_one_model_is_taken(model: str, prefill: str, decode: str, bench: Bench) -> None:
    ends = [_as_it_is(bench.folder, bench.state, model, engine) for engine in (prefill, decode)]
    assert _said(bench, *ends, by_word=True) == ""
    if prefill == decode:
        assert _said(bench, *ends, by_word=False) == ""


@pytest.mark.parametrize("engine", ENGINES)
def test_the_consumers_weights_on_the_producer_compute_the_consumers_own_cache(engine: str, bench: Bench) -> None:
    # Given a producer that loads what the consumer loads, as a process of its own would
    consumer = _as_it_is(bench.folder, bench.state, "gemma3", engine)
    producer = bench.end(engine, bench.source("gemma3", engine))
    # Then what it computes is the same to the last bit, and nothing of it is rounded
    assert consumer.loaded is not None
    assert producer.loaded is not None
    assert producer.loaded.sketches.name == consumer.loaded.sketches.name != ""
    agreement = consumer.loaded.sketches.agreement(producer.loaded.sketches.name)
    assert (agreement.problem, agreement.formats_differ) == ("", False)


@pytest.mark.parametrize("name", OF_THE_OUTPUT)
def test_what_changes_the_output_alone_is_the_decoders_own(name: str, bench: Bench, tmp_path: Path) -> None:
    # Given a decode worker whose output differs, and a prompt's cache of a model as it is
    folder = bench.changed("gemma3", name, tmp_path / "changed")
    options = [EngineOptions(str(folder), matrix_models.CONTEXT, slots=1, threads=1)]
    options += [replace(options[0], weights=str(bench.source("gemma3", "transformers")))]
    with (
        closing(open_engine("transformers", options[0])) as changed,
        closing(open_engine("transformers", options[1])) as as_it_is,
    ):
        tokens = changed.tokenize(user_prompt("", "What does a queue hold, and who takes it out?"), 0.0).ids
        cache = prefilled(as_it_is, tokens[:-1])
        # Then its answer from that cache is what it says by itself
        warm, cold = changed.decode(tokens, cache, GREEDY), changed.decode(tokens, None, GREEDY)
    assert (warm.text, warm.evaluated_tokens) == (cold.text, 1)


def test_there_are_forty_of_each() -> None:
    assert len(CHANGED) >= 40
    assert len(MODELS) * len(ENGINES) ** 2 >= 40
