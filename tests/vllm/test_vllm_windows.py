"""Models with sliding windows between vLLM and every other engine that is here: a gemma3 and a gpt-oss."""

import json
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks import matrix_models
from benchmarks.matrix_caches import difference, prefilled
from benchmarks.matrix_mutations import spoiled
from benchmarks.matrix_prompts import MARGIN
from engines.base import Answer
from engines.proof import prove
from engines.registry import Engine, EngineOptions, entries, open_engine
from engines.sketch import compare
from engines.sketching import fresh_sketch
from engines.vllm.engine import VLLMEngine
from messages.errors import KVTransferFailed
from messages.jobs import Sampling
from messages.kv import Block, KVCache, Record, Window, assemble_cache

pytestmark = pytest.mark.vllm

OTHERS = [name for name in ("llamacpp", "mlx", "transformers") if not entries()[name].install_command()]
PAIRS = [*(("vllm", other) for other in OTHERS), *((other, "vllm") for other in OTHERS), ("vllm", "vllm")]
WINDOW = 40  # of both models; a page of vLLM's and a block of ours have 32 tokens
CONTEXT = 1024
GREEDY = Sampling(max_tokens=24, temperature=0)
# Shorter than the window, as long as it, ending at a block (the last token is the decoder's), and many windows long.
LENGTHS = (5, 20, 34, WINDOW, WINDOW + 1, 65, 66, 97, 333, 900)


def prompt(length: int, number: int = 0) -> tuple[int, ...]:
    """Text tokens; which of them is drawn by the length."""
    source = np.random.default_rng((number, length))
    return tuple(source.integers(0, matrix_models.num_plain_tokens(), length).tolist())


@pytest.fixture(scope="module", params=matrix_models.WINDOWED)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, str]:
    made = tmp_path_factory.mktemp("windows")
    matrix_models.write(made, request.param, seed=0)
    return made, request.param


@pytest.fixture(scope="module")
def engines(folder: tuple[Path, str]) -> Iterator[dict[str, Engine]]:
    opened = {
        name: open_engine(
            name,
            EngineOptions(
                str(matrix_models.weights_for(name, *folder)), context=CONTEXT, slots=2, threads=1, prefill_slots=4
            ),
        )
        for name in (*OTHERS, "vllm")
    }
    yield opened
    for engine in opened.values():
        engine.close()


def lead(engine: Engine, tokens: Sequence[int], cold: Answer, warm: Answer) -> float:
    """By how many nats the engine, without a transfer, prefers its token where the two answers part."""
    at = next(n for n, (one, other) in enumerate(zip(cold.tokens, warm.tokens, strict=False)) if one != other)
    expected = engine.top_logprobs((*tokens, *cold.tokens[:at]), None)
    return expected[cold.tokens[at]] - expected[warm.tokens[at]]


@pytest.mark.parametrize(("sender", "receiver"), PAIRS)
def test_a_kv_transfer_changes_no_answer_and_leaves_one_token(
    sender: str, receiver: str, engines: dict[str, Engine]
) -> None:
    decided = 0
    for length in LENGTHS:
        tokens = prompt(length)
        cold = engines[receiver].decode(tokens, None, GREEDY)
        warm = engines[receiver].decode(tokens, prefilled(engines[sender], tokens), GREEDY)
        assert warm.evaluated_tokens == 1, length
        # Where engines differ without any transfer, the model is undecided, and rounding decides
        if engines[sender].decode(tokens, None, GREEDY).text == cold.text:
            assert warm.text == cold.text or lead(engines[receiver], tokens, cold, warm) < MARGIN, length
            decided += 1
    assert decided >= len(LENGTHS) - 2


@pytest.mark.parametrize("other", OTHERS)
def test_keys_values_and_sketches_are_the_other_engine_s_to_rounding(other: str, engines: dict[str, Engine]) -> None:
    one, two = engines["vllm"], engines[other]
    assert one.info.layout == replace(two.info.layout, dtype="f32")  # type: ignore[type-var]
    assert one.info.ropes
    for length in LENGTHS:
        caches = [prefilled(engine, prompt(length)) for engine in (one, two)]
        assert difference(*caches) < (0.05 if other == "llamacpp" else 1e-3)
        assert caches[0].window
        assert caches[0].window.data.shape[2] == min(WINDOW - 1, length - 1)
    made = [fresh_sketch(engine, engine.info.layout) for engine in (one, two) if engine.info.layout]
    assert not compare(*made).problem


def test_its_transfer_is_proved(engines: dict[str, Engine]) -> None:
    assert prove(engines["vllm"], engines["vllm"]) == ""


@pytest.mark.parametrize("sender", [*OTHERS, "vllm"])
@pytest.mark.parametrize("boundary", [32, 64, 320])
def test_a_prefill_goes_on_from_a_stored_prefix_and_its_window(
    sender: str, boundary: int, engines: dict[str, Engine]
) -> None:
    # Given the beginning of a prompt that one engine computed, up to a whole block
    vllm, tokens = engines["vllm"], prompt(500)
    begun = prefilled(engines[sender], (*tokens[:boundary], 0))
    # When vLLM goes on from there
    rest: list[Record] = []
    done = vllm.prefill(tokens[:-1], rest.append, first=boundary, resume=begun)
    # Then it computes and gives out the rest only, with the window's record at its end
    assert (done.computed_tokens, done.restored_tokens) == (len(tokens) - 1 - boundary, boundary)
    assert [record.start for record in rest if isinstance(record, Block)] == list(range(boundary, 499, 32))
    assert isinstance(rest[-1], Window)
    # And what the two have is what it computes alone, and answers as that does
    blocks = [block for block in (*begun.blocks, *rest) if isinstance(block, Block)]
    alone = prefilled(vllm, tokens)
    if begun.layout == alone.layout:
        whole = assemble_cache(alone.layout, [*blocks, rest[-1]])
        assert difference(whole, alone) < (0.05 if sender == "llamacpp" else 1e-3)
        answer = vllm.decode(tokens, whole, GREEDY)
        assert (answer.text, answer.evaluated_tokens) == (vllm.decode(tokens, None, GREEDY).text, 1)
    # And from the rest, the stored part's window is no longer needed when all blocks are stored already
    again: list[Record] = []
    vllm.prefill(tokens[:-1], again.append, first=len(tokens) - 1, resume=begun)
    assert [type(record) for record in again] == [Window]


def test_a_cache_that_ends_where_the_prompt_does_is_not_gone_on_from(engines: dict[str, Engine]) -> None:
    # Its window lacks the row that the last token looks back at, and vLLM computes that one again
    cache = prefilled(engines["vllm"], prompt(97))
    with pytest.raises(KVTransferFailed, match="covers 96 of the prompt's 96 tokens"):
        engines["vllm"].prefill(prompt(97)[:-1], lambda record: None, 96, cache)


def test_a_spoiled_cache_or_window_is_noticed(engines: dict[str, Engine]) -> None:
    vllm, tokens = engines["vllm"], prompt(333)
    cache, other = prefilled(vllm, tokens), prefilled(vllm, tokens[::-1])
    assert cache.window
    wrong = spoiled(cache, other)
    wrong["another prompt's window"] = replace(cache, window=other.window)
    wrong["a window one row on"] = replace(cache, window=replace(cache.window, data=moved(cache.window.data)))
    # Then what the model expects next is no longer what it was
    own = vllm.top_logprobs(tokens, cache)
    for name, one in wrong.items():
        found = vllm.top_logprobs(tokens, one)
        assert max(abs(own[token] - found.get(token, -100.0)) for token in list(own)[:16]) > 0.01, name


def moved(rows: np.ndarray) -> np.ndarray:
    """Each row where the next one belongs: the last one is lost."""
    return np.ascontiguousarray(rows[:, :, [0, *range(rows.shape[2] - 1)]])


@pytest.mark.parametrize("what", ["too few rows", "another layer less", "no number"])
def test_a_window_that_can_not_be_put_in_fails_its_job(what: str, engines: dict[str, Engine]) -> None:
    vllm, tokens = engines["vllm"], prompt(333)
    cache = prefilled(vllm, tokens)
    assert cache.window
    data = cache.window.data.copy()
    if what == "no number":
        data[0, 0, -1] = np.nan
    short = {"too few rows": data[:, :, 1:], "another layer less": data[1:]}.get(what, data)
    with pytest.raises(KVTransferFailed):
        vllm.decode(tokens, replace(cache, window=replace(cache.window, data=short)), GREEDY)
    assert vllm.decode(tokens, cache, GREEDY).evaluated_tokens == 1
    assert not list(vllm.host.folder.glob("*.kv"))  # type: ignore[union-attr]


def test_a_cache_that_can_not_be_read_fails_its_job_and_no_other(engines: dict[str, Engine]) -> None:
    # Given an answer under way, and a cache that is cut short in shared memory
    vllm, tokens = engines["vllm"], prompt(333)
    cache, long = prefilled(vllm, tokens), replace(GREEDY, max_tokens=400)
    cold = vllm.decode(tokens, None, long).text
    host = vllm.host.process.pid  # type: ignore[union-attr]
    with ThreadPoolExecutor(1) as thread, vllm.pin_cache(tokens, cache):
        busy = thread.submit(vllm.decode, tokens, None, long)
        (path,) = vllm.host.folder.glob("*.kv")  # type: ignore[union-attr]
        path.unlink()
        path.write_bytes(b"short")
        for _ in range(3):
            with pytest.raises(KVTransferFailed, match="could not be put in"):
                vllm.decode(tokens, cache, GREEDY)
        # Then the other answer is what it was, and the engine serves on
        assert busy.result().text == cold
    assert vllm.decode(tokens, cache, GREEDY).evaluated_tokens == 1
    assert vllm.host.process.pid == host  # type: ignore[union-attr]


def test_prompts_in_flight_at_once_give_the_caches_and_answers_of_each_alone(engines: dict[str, Engine]) -> None:
    vllm = engines["vllm"]
    prompts = [prompt(length) for length in (900, 20, 333, 97, 500, 66, 700, 41)]
    alone = [prefilled(vllm, tokens) for tokens in prompts]
    texts = [vllm.decode(tokens, cache, GREEDY).text for tokens, cache in zip(prompts, alone, strict=True)]
    with ThreadPoolExecutor(len(prompts)) as threads:
        together = list(threads.map(lambda tokens: prefilled(vllm, tokens), prompts))
        answers = list(threads.map(lambda both: vllm.decode(*both, GREEDY), zip(prompts, together, strict=True)))
    assert max(difference(one, other) for one, other in zip(alone, together, strict=True)) < 1e-3
    assert [answer.text for answer in answers] == texts
    assert {answer.evaluated_tokens for answer in answers} == {1}


def test_several_answers_begin_from_one_import(engines: dict[str, Engine]) -> None:
    vllm, begun = engines["vllm"], prompt(300)
    asked = [(*begun, *prompt(length, 1)) for length in (3, 50, 90)]
    cache: KVCache = prefilled(vllm, (*begun, 0))
    with ThreadPoolExecutor(3) as threads, vllm.pin_cache(begun, cache):
        answers = list(threads.map(lambda tokens: vllm.decode(tokens, cache, GREEDY), asked))
    assert [answer.evaluated_tokens for answer in answers] == [3, 50, 90]
    assert [answer.text for answer in answers] == [vllm.decode(tokens, None, GREEDY).text for tokens in asked]


def test_an_answer_under_a_schema_fits_it_with_a_transfer_and_without(engines: dict[str, Engine]) -> None:
    schema = {"type": "object", "properties": {"points": {"type": "integer", "minimum": 0, "maximum": 10}}}
    schema |= {"required": ["points"], "additionalProperties": False}
    sampling = Sampling(max_tokens=40, temperature=0, json_schema=json.dumps(schema))
    vllm, tokens = engines["vllm"], prompt(333)
    cold = vllm.decode(tokens, None, sampling)
    warm = vllm.decode(tokens, prefilled(vllm, tokens), sampling)
    assert warm.text == cold.text
    assert 0 <= json.loads(warm.text)["points"] <= 10


@pytest.fixture(scope="module")
def thinking(tmp_path_factory: pytest.TempPathFactory) -> Iterator[VLLMEngine]:
    """A gpt-oss whose vocabulary has Harmony's control tokens."""
    made = tmp_path_factory.mktemp("thinking")
    matrix_models.write(made, "gpt-oss-wide", seed=0)
    folder = matrix_models.weights_for("vllm", made, "gpt-oss-wide")
    path = folder / "tokenizer.json"
    text = path.read_text()
    # In place of letters that the model says often, and that no channel's name has
    tokenizer = json.loads(text)
    names = ("<|start|>", "<|end|>", "<|message|>", "<|channel|>", "<|constrain|>")
    vocabulary = tokenizer["model"]["vocab"]
    for name, letter in zip(names, "bwzqx", strict=True):
        number = vocabulary[name] = vocabulary.pop(letter)
        plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        tokenizer["added_tokens"].append({"id": number, "content": name} | plain)
    tokenizer["added_tokens"].sort(key=lambda token: token["id"])
    path.write_text(json.dumps(tokenizer))
    opened = open_engine("vllm", EngineOptions(str(folder), context=CONTEXT, slots=2, threads=1))
    assert isinstance(opened, VLLMEngine)
    yield opened
    opened.close()


def test_a_model_that_thinks_aloud_is_held_to_a_schema_in_its_final_channel_only(thinking: VLLMEngine) -> None:
    # Given a schema, and a model that says anything
    schema = {"type": "object", "properties": {"n": {"type": "integer", "minimum": 0, "maximum": 9}}, "required": ["n"]}
    schema["additionalProperties"] = False
    for seed in range(4):
        sampling = Sampling(max_tokens=800, temperature=2.0, top_p=1, seed=seed, json_schema=json.dumps(schema))
        answer = thinking.decode(prompt(100), None, sampling)
        # Then its answer proper is held to it, and what it said before is counted and not shown
        if answer.finish_reason == "stop":
            assert 0 <= json.loads(answer.text)["n"] <= 9
            assert answer.completion_tokens > len(answer.text)
            return
    pytest.fail("it thought four times and never answered")
